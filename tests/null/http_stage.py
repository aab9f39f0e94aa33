"""The real edge and the real intake of the bundled model before streams without workers."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import httpx

import penstock
from penstock.api.app import make_app
from penstock.api.auth import ApiKeys, StaticApiKeys
from penstock.api.endpoints import AppServices
from penstock.clock import MonotonicClock
from penstock.config.limits import RequestLimits
from penstock.interfaces import WorkerAdmin
from penstock.processing.pooling import PoolingModelProcessor
from penstock.processing.service import GenerationProcessor
from penstock.processing.transcription import AudioModelProcessor
from penstock.telemetry.service_levels import ServiceLevels

from .streams import NullStreams

STORYTELLER = Path(penstock.__file__).parent / "bundled" / "storyteller"
MODEL = "storyteller"
CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
HELLO = [{"role": "user", "content": "Tell me a story."}]


@cache
def intake_of(limits: RequestLimits) -> GenerationProcessor:
    """One for all tests: it keeps nothing of a request."""
    return GenerationProcessor(STORYTELLER, name=MODEL, max_model_len=2048, limits=limits, created=1)


def app_of(
    streams: NullStreams,
    limits: RequestLimits | None = None,
    *keys: str,
    intake: GenerationProcessor | PoolingModelProcessor | AudioModelProcessor | None = None,
    ring: ApiKeys | None = None,
    levels: ServiceLevels | None = None,
    posts: WorkerAdmin | None = None,
    **behind: Any,
) -> Any:
    """The application as the composition root makes it."""
    limits = limits or RequestLimits()
    return make_app(
        AppServices(
            streams=streams,
            processor=intake or intake_of(limits),
            limits=limits,
            clock=MonotonicClock(),
            metrics=lambda: lambda: b"# no metrics\n",
            keys=ring or StaticApiKeys.of(keys),
            levels=levels or ServiceLevels(),
            pooling=intake if isinstance(intake, PoolingModelProcessor) else None,
            transcription=intake if isinstance(intake, AudioModelProcessor) else None,
            admin=posts,
            **behind,
        )
    )


@dataclass
class Stage:
    """A client of the application in this process."""

    streams: NullStreams
    client: httpx.AsyncClient
    application: Any

    async def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        """A request with a JSON body."""
        return await self.client.post(path, json=body, **options)

    async def chat(self, **fields: Any) -> httpx.Response:
        """A chat with the fields that a test is not about filled in."""
        return await self.post(CHAT, {"model": MODEL, "messages": HELLO, "max_tokens": 8, "seed": 1} | fields)

    async def text(self, **fields: Any) -> httpx.Response:
        """A completion with the fields that a test is not about filled in."""
        return await self.post(TEXT, {"model": MODEL, "prompt": "Once", "max_tokens": 8, "seed": 1} | fields)


@asynccontextmanager
async def stage(
    streams: NullStreams | None = None,
    limits: RequestLimits | None = None,
    *keys: str,
    intake: GenerationProcessor | PoolingModelProcessor | AudioModelProcessor | None = None,
    ring: ApiKeys | None = None,
    levels: ServiceLevels | None = None,
    posts: WorkerAdmin | None = None,
    **behind: Any,
) -> AsyncIterator[Stage]:
    """Use: ``async with stage() as on: await on.chat()``; ``behind``: more of ``api.endpoints.AppServices``."""
    streams = streams or NullStreams()
    application = app_of(streams, limits, *keys, intake=intake, ring=ring, levels=levels, posts=posts, **behind)
    transport = httpx.ASGITransport(application, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://penstock") as client:
        yield Stage(streams, client, application)


def check(
    answer: httpx.Response,
    status: int,
    code: str | None,
    words: str,
    param: str | None = None,
    *,
    says_param: bool = True,
) -> None:
    """The whole envelope, nothing more and nothing less."""
    assert answer.status_code == status, answer.text
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert set(body) == {"error"}
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert words in error["message"]
    assert error["code"] == code
    if says_param:
        assert error["param"] == param


@dataclass
class Event:
    """One server-sent event."""

    id: str
    data: Any  # parsed; "[DONE]" as it is


def events_of(body: str) -> list[Event]:
    """The events of a whole stream."""
    assert body.endswith("\n\n"), "a stream ends after a whole event"
    return [_event(block) for block in body[:-2].split("\n\n")]


def _event(block: str) -> Event:
    fields = dict(line.split(": ", 1) for line in block.split("\n"))
    raw = fields.pop("data")
    data = raw if raw == "[DONE]" else json.loads(raw)
    assert set(fields) == (set() if "error" in data else {"id"}), "an error leaves the last id as it was"
    return Event(fields.get("id", ""), data)
