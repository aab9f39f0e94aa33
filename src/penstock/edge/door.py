"""What every endpoint with a body shares, JSON or a form: room for it, its limits, strict parsing, errors, clients that
leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.clock import Clock
from penstock.config.limits import Limits
from penstock.edge import json_strict
from penstock.edge.admission import Admission, BodyHold
from penstock.edge.errors import ClientGone, code_of, noted
from penstock.edge.exchange import Exchange
from penstock.edge.fair_threads import FairThreads
from penstock.edge.forms import boundary_of, parse_form
from penstock.errors import BadField, NoWorkers
from penstock.wire.ports import Form, JsonObject

INLINE_BODY_BYTES = 16 << 10
"""Larger bodies are parsed on a thread, which lets others run between two numbers."""


SMALL_BODY_BYTES = 256 << 10
"""Larger ones have a thread of their own, so that they hold up none but their like."""


class Asked:
    """A parsed body; ``hold`` is its room, as long as it is there."""

    __slots__ = ("body", "hold", "raw")

    def __init__(self, body: JsonObject, raw: bytes, hold: BodyHold) -> None:
        self.body = body
        self.raw = raw
        self.hold = hold

    def drop_body(self) -> None:
        """What was parsed is needed no more, but the bytes are."""
        self.body = {}
        self.hold.shrink(len(self.raw))

    def drop(self) -> None:
        """Nothing of it is needed no more: answers take long, and what a client sent may be large."""
        self.body, self.raw = {}, b""
        self.hold.release()


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


T = TypeVar("T")
Work = Callable[[Exchange, Asked], Awaitable[None]]
FormWork = Callable[[Exchange, Sent], Awaitable[None]]


class Door:
    """One for an application."""

    def __init__(self, limits: Limits, clock: Clock) -> None:
        self.admission = Admission(limits, clock)
        self._limits = limits
        self._threads = FairThreads("body", SMALL_BODY_BYTES)

    def endpoint(self, work: Work, check: Callable[[], None] = lambda: None) -> ASGIApp:
        """An endpoint that does ``work``; ``check`` may refuse before anything is read."""

        async def read(exchange: Exchange, hold: BodyHold) -> None:
            asked = await self._asked(exchange, await exchange.read_json_body(self._limits, hold), hold)
            async with exchange.until_hang_up():
                await work(exchange, asked)

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
                exchange.note.code = "client_gone"
                return
            except asyncio.CancelledError:  # by nobody but a process that ends: another one can be asked
                if exchange.started:
                    raise
                await exchange.refuse(NoWorkers("The service has stopped."))
            except Exception as error:
                if exchange.started:
                    exchange.note.code = code_of(error)
                    noted(error)
                    raise
                await exchange.refuse(error)

        return _Endpoint(endpoint)

    async def _sent(self, exchange: Exchange, hold: BodyHold, most: int) -> Sent:
        boundary = boundary_of(exchange.header(b"content-type"))
        raw = await exchange.read_body(self._limits, hold, most)
        return Sent(await self._beside(exchange, len(raw), lambda: parse_form(raw, boundary)), hold)

    async def _asked(self, exchange: Exchange, raw: bytes, hold: BodyHold) -> Asked:
        """The parsed body.  Room for it is taken before it is made."""
        limits = self._limits

        def weigh() -> int:
            return json_strict.memory(raw, max_values=limits.max_json_values, max_containers=limits.max_json_containers)

        def parse() -> object:
            return json_strict.parse(raw, max_depth=limits.max_json_depth)

        if len(raw) <= INLINE_BODY_BYTES:
            value = parse()
        else:
            hold.grow(await self._beside(exchange, len(raw), weigh))
            value = await self._beside(exchange, len(raw), parse)
        if not isinstance(value, dict):
            raise BadField("body", got=value, want="a JSON object", code="invalid_type")
        return Asked(value, raw, hold)

    async def _beside(self, exchange: Exchange, size: int, work: Callable[[], T]) -> T:
        """``work`` on a thread, where tenants take turns."""
        return await self._threads.run("" if exchange.tenant is None else exchange.tenant.id, size, work)


class _Endpoint:
    """An ASGI application that Starlette's router takes for one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        return self._app(scope, receive, send)
