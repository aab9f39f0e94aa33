"""What every endpoint with a body shares, JSON or a form: room for it, its limits, strict parsing, errors, clients that
leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.clock import Clock
from penstock.config.schema import Limits
from penstock.edge import json_strict
from penstock.edge.admission import Admission, BodyHold
from penstock.edge.errors import ClientGone, noted
from penstock.edge.exchange import Exchange
from penstock.edge.forms import boundary_of, parse_form
from penstock.errors import BadField, NoWorkers
from penstock.wire.ports import Form, JsonObject

INLINE_BODY_BYTES = 16 << 10
"""Larger bodies are parsed on a thread, which lets others run between two numbers."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A parsed body; ``hold`` is its room."""

    body: JsonObject
    raw: bytes
    hold: BodyHold


class Sent:
    """A parsed form; ``hold`` is its room."""

    def __init__(self, form: Form, hold: BodyHold) -> None:
        self._form: Form | None = form
        self.hold = hold

    def take(self) -> Form:
        """The form, which is then nobody's here: files are large, and answers take long.  Once."""
        form, self._form = self._form, None
        assert form is not None, "taken already"
        return form


Work = Callable[[Exchange, Asked], Awaitable[None]]
FormWork = Callable[[Exchange, Sent], Awaitable[None]]


class Door:
    """One for an application."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.admission = Admission(limits, clock)
        self._limits = limits
        self._parser = ThreadPoolExecutor(1, thread_name_prefix="json")

    def endpoint(self, work: Work, check: Callable[[], None] = lambda: None) -> ASGIApp:
        """An endpoint that does ``work``; ``check`` may refuse before anything is read."""

        async def read(exchange: Exchange, hold: BodyHold) -> None:
            raw = await exchange.read_json_body(self._limits, hold)
            async with exchange.until_hang_up():
                await work(exchange, Asked(await self._parse(raw), raw, hold))

        return self._guarded(read, check)

    def upload(self, work: FormWork, most: int) -> ASGIApp:
        """The same for a form with files, of at most so many bytes."""

        async def read(exchange: Exchange, hold: BodyHold) -> None:
            sent = await self._sent(exchange, hold, most)
            async with exchange.until_hang_up():
                await work(exchange, sent)

        return self._guarded(read, self.admission.check)

    def _guarded(self, read: Callable[[Exchange, BodyHold], Awaitable[None]], check: Callable[[], None]) -> ASGIApp:
        async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
            exchange = Exchange(scope, receive, send)
            try:
                check()
                with self.admission.body() as hold:
                    await read(exchange, hold)
            except ClientGone:
                return
            except asyncio.CancelledError:  # by nobody but a process that ends: another one can be asked
                if exchange.started:
                    raise
                await exchange.refuse(NoWorkers("The service has stopped."))
            except Exception as error:
                if exchange.started:
                    noted(error)
                    raise
                await exchange.refuse(error)

        return _Endpoint(endpoint)

    async def _sent(self, exchange: Exchange, hold: BodyHold, most: int) -> Sent:
        boundary = boundary_of(exchange.header(b"content-type"))
        raw = await exchange.read_body(self._limits, hold, most)
        loop = asyncio.get_running_loop()
        return Sent(await loop.run_in_executor(self._parser, parse_form, raw, boundary), hold)

    async def _parse(self, raw: bytes) -> JsonObject:
        depth = self._limits.max_json_depth
        if len(raw) <= INLINE_BODY_BYTES:
            value = json_strict.parse(raw, max_depth=depth)
        else:
            loop = asyncio.get_running_loop()
            value = await loop.run_in_executor(self._parser, lambda: json_strict.parse(raw, max_depth=depth))
        if not isinstance(value, dict):
            raise BadField("body", got=value, want="a JSON object", code="invalid_type")
        return value


class _Endpoint:
    """An ASGI application that Starlette's router takes for one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)
