"""The models that a running service lists."""

from __future__ import annotations

import http

import msgspec

from penstock.cli.asking import nothing_listens, wants_key
from penstock.cli.chunks import error_of
from penstock.cli.http_stream import HttpStreamClient, StreamError
from penstock.errors import ConfigError, WorkerError


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
            raise WorkerError(nothing_listens(client.server.authority)) from error
        raise WorkerError(f"no server at {client.server.authority} ({error.kind})") from error
    if reply.status == http.HTTPStatus.UNAUTHORIZED:
        raise ConfigError(wants_key(client.server.authority))
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
