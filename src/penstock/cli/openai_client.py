"""A running service as commands see it: the flags that name it, requests with a JSON response, its models, and the
fields of OpenAI's streamed chunks and error bodies that commands look at.
"""

from __future__ import annotations

import argparse
import http
import http.client
import json
from typing import Any
from urllib.parse import urlsplit

import msgspec

from penstock.errors import ConfigError, WorkerError
from penstock.http_client import HttpStreamClient, StreamError


class ChunkDelta(msgspec.Struct):
    """What a chat chunk adds to its message."""

    content: str | None = None
    reasoning_content: str | None = None


class ChunkChoice(msgspec.Struct):
    """One choice of a chunk, of either endpoint."""

    text: str | None = None
    delta: ChunkDelta | None = None
    finish_reason: str | None = None

    def content_added(self) -> str:
        """The text that this chunk adds to the answer."""
        return (self.text if self.delta is None else self.delta.content) or ""

    def reasoning_added(self) -> str:
        """And to the reasoning before it."""
        return (self.delta.reasoning_content if self.delta is not None else None) or ""

    def text_added(self) -> str:
        """Both; empty when the chunk only opens or closes the stream."""
        return self.reasoning_added() + self.content_added()


class PromptDetails(msgspec.Struct):
    """Part of ``usage``."""

    cached_tokens: int | None = None


class ChunkUsage(msgspec.Struct):
    """Tokens as the server counts them."""

    prompt_tokens: int = 0
    completion_tokens: int | None = 0
    prompt_tokens_details: PromptDetails | None = None


class ErrorBody(msgspec.Struct):
    """OpenAI's error envelope."""

    message: str = ""
    code: str | int | None = None


class Chunk(msgspec.Struct):
    """One streamed event, or the body of an error."""

    choices: list[ChunkChoice] = []
    usage: ChunkUsage | None = None
    error: ErrorBody | None = None


decode_chunk = msgspec.json.Decoder(Chunk).decode
"""Raises ``msgspec.DecodeError`` (also for fields of another type)."""


def error_of(body: bytes) -> ErrorBody:
    """The error that a body tells of; an empty one when it is none of OpenAI's shape."""
    try:
        return decode_chunk(body).error or ErrorBody()
    except msgspec.DecodeError:
        return ErrorBody()


_MAX_ANSWER_BYTES = 4 << 20
DEFAULT_PORT = 8000


def add_service_flags(parser: argparse.ArgumentParser) -> None:
    """Declare ``--url`` and ``--api-key``, for ``config.load.load_client``."""
    parser.add_argument("--url", metavar="URL", help="default: PENSTOCK_URL or http://127.0.0.1:8000")
    parser.add_argument("--api-key", metavar="KEY", help="default: PENSTOCK_API_KEY")


def key_needed(url: str) -> str:
    """The error of a request without a key, or with a wrong one."""
    return f"{url} wants a key: add --api-key KEY or set PENSTOCK_API_KEY"


def not_running(url: str) -> str:
    """The error where no server is: the command that would start one there."""
    port = urlsplit(url if "://" in url else f"http://{url}").port
    with_port = f" --port {port}" if port not in (None, DEFAULT_PORT) else ""
    return f"nothing listens at {url}; start it with `penstock serve{with_port}`"


def request_json(
    url: str, api_key: str | None, timeout_s: float, path: str, body: dict[str, Any] | None = None
) -> tuple[int, Any]:
    """(status, parsed body; None when it is no JSON) of ``GET path``, or of ``POST path`` with a body.

    Raises ConfigError for a URL that is none or a key that is wrong, WorkerError when nothing answers.
    """
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: expected something like http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    except ValueError as error:  # a port that is no number
        raise ConfigError(f"--url {url}: {error}") from None
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        if body is None:
            connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
        else:
            headers["Content-Type"] = "application/json"
            connection.request("POST", parts.path.rstrip("/") + path, json.dumps(body), headers)
        answer = connection.getresponse()
        raw = answer.read(_MAX_ANSWER_BYTES)
    except ConnectionRefusedError:
        raise WorkerError(not_running(url)) from None
    except (OSError, http.client.HTTPException) as error:
        raise WorkerError(f"no answer from {url}: {error}") from None
    finally:
        connection.close()
    if answer.status == http.HTTPStatus.UNAUTHORIZED:
        raise ConfigError(key_needed(url))
    if answer.status == http.HTTPStatus.FORBIDDEN:  # a key was known, and is not enough
        raise ConfigError(f"{url}: {error_of(raw).message or 'this is not allowed'}")
    try:
        return answer.status, json.loads(raw)
    except ValueError:
        return answer.status, None


class ServedModel(msgspec.Struct):
    """One entry of ``/v1/models``, as far as clients here look at it."""

    id: str
    max_model_len: int | None = None


class _Models(msgspec.Struct):
    data: list[ServedModel] = []


_decode_models = msgspec.json.Decoder(_Models).decode


async def served_models(client: HttpStreamClient) -> list[ServedModel]:
    """What ``/v1/models`` lists, at least one.  Raises ConfigError where a key is wanted, WorkerError."""
    try:
        reply = await client.get("/v1/models")
    except StreamError as error:
        if error.kind == "connection refused":
            raise WorkerError(not_running(client.server.authority)) from error
        raise WorkerError(f"no server at {client.server.authority} ({error.kind})") from error
    if reply.status == http.HTTPStatus.UNAUTHORIZED:
        raise ConfigError(key_needed(client.server.authority))
    try:
        models = _decode_models(reply.body).data
    except msgspec.DecodeError:
        models = []
    if not models:
        message = error_of(reply.body).message or "and names no model"
        raise WorkerError(f"{client.server.authority}: /v1/models answers {reply.status} {message}")
    return models


async def served_model(client: HttpStreamClient, wanted: str | None) -> ServedModel:
    """The model of this name, or the first that the server lists; a server that lists none may serve it all the same.

    Raises ConfigError where a key is wanted, WorkerError where no name is given and none is listed.
    """
    try:
        models = await served_models(client)
    except WorkerError:
        if wanted is None:
            raise
        return ServedModel(wanted)
    if wanted is None:
        return models[0]
    return next((model for model in models if model.id == wanted), ServedModel(wanted))
