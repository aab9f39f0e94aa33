"""The request log: a line for each refused request (4xx), and with ``--log-requests`` for each that ended.

A line has identifiers and numbers: id, route, status, tokens, times.  It has nothing of a prompt or a response.  It is
written when the response has ended, so it costs nothing per token.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from penstock.api.response_format import TokenUsage
from penstock.clock import Clock
from penstock.telemetry.log import Field, log_event

log = logging.getLogger("penstock.api.requests")

LOG_ENTRY = "penstock.note"
"""In a scope: the request's ``RequestLogEntry``."""

UNLOGGED_PATHS = frozenset({"/health", "/ready", "/metrics"})
"""Paths that are polled all the time."""

WINDOW_S = 10.0
MAX_PATH_CHARS = 128
CLIENT_CLOSED_REQUEST = 499
"""nginx' status of a request whose client left before it had an answer."""


class RequestLogEntry:
    """What is logged about a request, filled in while it is served."""

    __slots__ = (
        "_send",
        "cached_tokens",
        "code",
        "completion_tokens",
        "detail",
        "first_token",
        "id",
        "prompt_tokens",
        "reason",
        "status",
        "tenant",
    )

    def __init__(self, send: Send | None = None) -> None:
        self._send = send
        self.status = 0  # of the response, once it has one
        self.id = ""  # as x-request-id has it
        self.code = ""  # of the error that it ended with
        self.reason = ""  # of an error with a code that others share
        self.detail = ""  # what an operator changed
        self.tenant: Any = None  # whose key the request came with (``auth.Tenant``), if any was found
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = 0
        self.first_token: float | None = None  # monotonic seconds

    def send(self, message: Message) -> Awaitable[None]:
        """The ASGI callable that the response is sent by."""
        assert self._send is not None, "made by the middleware"
        if message["type"] == "http.response.start":
            self.status = message["status"]
        return self._send(message)


def note_usage(note: RequestLogEntry, name: str, usage: TokenUsage, first_token: float | None) -> None:
    """Notes the usage of a finished response."""
    note.id, note.first_token = name, first_token
    note.prompt_tokens, note.completion_tokens = usage.prompt_tokens, usage.completion_tokens
    note.cached_tokens = usage.prompt_tokens_details.cached_tokens


class RequestLogMiddleware:
    """ASGI middleware that logs requests."""

    def __init__(
        self,
        app: ASGIApp,
        clock: Clock,
        *,
        every: bool,
        max_refusals: int,
        passes_on: bool = False,
        on_ended: Callable[[Scope, RequestLogEntry], None] = lambda scope, entry: None,
    ) -> None:
        """``every`` request has a line; else 4xx only, at most ``max_refusals`` in ``WINDOW_S``.

        ``passes_on``: to others who have a log of their own, so only what is refused here has a line.
        ``on_ended`` is called with each request that has ended.
        """
        self._app = app
        self._clock = clock
        self._every = every and not passes_on
        self._passes_on = passes_on
        self._max_refusals = max_refusals
        self._on_ended = on_ended
        self._window = float("-inf")  # when it began
        self._refusals = 0  # in it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, note = self._clock.now(), RequestLogEntry(send)
        scope[LOG_ENTRY] = note
        try:
            await self._app(scope, receive, note.send)
        finally:
            self._ended(scope, note, began)
            self._on_ended(scope, note)

    def _ended(self, scope: Scope, note: RequestLogEntry, began: float) -> None:
        if self._every and scope["path"] not in UNLOGGED_PATHS:
            log_event(log, logging.INFO, "request", **self._fields(scope, note, began))
        elif 400 <= note.status < 500 and (note.code or not self._passes_on) and self._has_room():
            log_event(log, logging.INFO, "request refused", **self._fields(scope, note, began))

    def _has_room(self) -> bool:
        now = self._clock.now()
        if now >= self._window + WINDOW_S:
            left_out = self._refusals - self._max_refusals
            self._window, self._refusals = now, 0
            if left_out > 0:
                log_event(log, logging.INFO, "more requests were refused", requests=left_out)
        self._refusals += 1
        return self._refusals <= self._max_refusals

    def _fields(self, scope: Scope, note: RequestLogEntry, began: float) -> dict[str, Field]:
        now = self._clock.now()
        fields: dict[str, Field] = {"request_id": note.id} if note.id else {}
        fields |= {
            "method": scope["method"][:16],
            "route": scope["path"][:MAX_PATH_CHARS],
            "status": note.status or CLIENT_CLOSED_REQUEST,
        }
        if note.code:
            fields["code"] = note.code
        if note.prompt_tokens:
            fields |= {"prompt_tokens": note.prompt_tokens, "cached_tokens": note.cached_tokens}
        if note.completion_tokens:
            fields["completion_tokens"] = note.completion_tokens
        if note.first_token is not None:
            fields["ttft_s"] = round(note.first_token - began, 4)
            if note.completion_tokens > 1 and now > note.first_token:
                fields["tokens_per_s"] = round((note.completion_tokens - 1) / (now - note.first_token), 1)
        fields["seconds"] = round(now - began, 4)
        return fields
