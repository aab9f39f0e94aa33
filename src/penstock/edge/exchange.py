"""One HTTP request and its answer over ASGI: read the body within limits, answer once, notice when the client leaves.

Knows nothing about paths or what a body means.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from starlette.types import Message, Receive, Scope, Send

from penstock.config.limits import Limits
from penstock.edge.admission import BodyHold
from penstock.edge.body_writer import BODY_WRITER, BodyWriter
from penstock.edge.errors import JSON_TYPE, ClientGone, Header, code_of, noted
from penstock.edge.hang_up import HANG_UP, HangUp
from penstock.edge.request_log import NOTE, RequestNote
from penstock.errors import BodyTimeout, BodyTooLarge, RequestError, WrongMediaType

TENANT = "penstock.tenant"
"""In a scope: who has the key that the request came with (``auth.Tenant``)."""

_LINGER_S = 1.0
_LINGER_BYTES = 32 << 20
"""For so long the rest of a refused body is read and thrown away, or the client might never see the refusal."""


class Exchange:
    """Request and answer.  The body is read at most once, the answer started at most once."""

    __slots__ = ("_body_read", "_receive", "_scope", "_send", "finished", "started")

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._scope = scope
        self._receive = receive
        self._send = send
        self._body_read = False
        self.started = False  # the status line is out
        self.finished = False  # so is everything else

    @property
    def note(self) -> RequestNote:
        """What the log of requests is to say of it."""
        note: RequestNote | None = self._scope.get(NOTE)
        return RequestNote() if note is None else note

    @property
    def tenant(self) -> Any:
        """What stands in the scope under ``TENANT``; None where no key is needed."""
        return self._scope.get(TENANT)

    # --- in ----------------------------------------------------------------------------------------------------------

    def header(self, name: bytes) -> bytes | None:
        """The value of a header, None without it."""
        return next((value for key, value in self._scope["headers"] if key == name), None)

    def headers(self, name: bytes) -> bytes | None:
        """The values of all headers of this name, as one list; None without any."""
        values = [value for key, value in self._scope["headers"] if key == name]
        return b", ".join(values) if values else None

    def path_parameter(self, name: str) -> str:
        """A part of the path that its route names.  Raises KeyError for one that it does not."""
        return str(self._scope["path_params"][name])

    async def read_json_body(self, limits: Limits, hold: BodyHold) -> bytes:
        """The raw body of a request that says it is JSON.

        Raises WrongMediaType, BodyTooLarge, SlowBody, QueueFull (all before more is read than must be), ClientGone.
        """
        self._check_type()
        return await self.read_body(limits, hold, limits.max_body_bytes)

    async def read_body(self, limits: Limits, hold: BodyHold, most: int) -> bytes:
        """The raw body, of at most so many bytes.  Raises as ``read_json_body``, but for its type."""
        codings = (self.headers(b"content-encoding") or b"").lower().split(b",")
        if any(coding.strip() not in (b"", b"identity") for coding in codings):
            raise WrongMediaType("Compressed bodies are not read here.", code="unsupported_media_type")
        declared = self._declared_length()
        if declared is not None and declared > most:
            raise _too_large(most)
        try:
            async with asyncio.timeout(limits.slow_body_s):
                return await self._read(hold, most)
        except TimeoutError as error:
            raise BodyTimeout(
                f"The body did not arrive within the limit of {limits.slow_body_s:g} s.", code="slow_body"
            ) from error

    async def _read(self, hold: BodyHold, most: int) -> bytes:
        chunks: list[bytes] = []
        while not self._body_read:
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientGone
            chunk: bytes = message.get("body", b"")
            self._body_read = not message.get("more_body", False)
            if hold.held + len(chunk) > most:
                raise _too_large(most)
            hold.grow(len(chunk))
            chunks.append(chunk)
        return b"".join(chunks)

    def _check_type(self) -> None:
        kind, *parameters = (self.header(b"content-type") or b"").lower().split(b";")
        wrong = [item for item in map(bytes.strip, parameters) if item.startswith(b"charset=")]
        if kind.strip() != b"application/json" or any(item.strip(b'charset="') != b"utf-8" for item in wrong):
            raise WrongMediaType("Send the header 'Content-Type: application/json'.", code="unsupported_media_type")

    def _declared_length(self) -> int | None:
        value = self.header(b"content-length")
        if value is None:
            return None
        if not value.isdigit():
            raise RequestError("The content-length is not a number.", code="bad_content_length")
        return int(value[:20])

    def until_hang_up(self) -> Attention:
        """A scope that is left by ClientGone as soon as the client goes."""
        hang_up: HangUp | None = self._scope.get("extensions", {}).get(HANG_UP)
        return Attention(self, self._receive, hang_up)

    # --- out ---------------------------------------------------------------------------------------------------------

    @property
    def chunked(self) -> bool:
        """Can an answer be sent whose length is not known yet?  HTTP/1.0 has no chunks."""
        return bool(self._scope.get("http_version", "1.1") != "1.0")

    async def start(self, status: int, *headers: Header) -> None:
        """The status line and headers."""
        self.started = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send(self, body: bytes) -> None:
        """A part of the body."""
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def body_writer(self) -> BodyWriter | None:
        """What writes parts of a body that has begun straight to the connection, where the server has such a thing."""
        writer: BodyWriter | None = self._scope.get("extensions", {}).get(BODY_WRITER)
        return writer if writer is not None and writer.usable else None

    async def finish(self, body: bytes = b"") -> None:
        """The last part of the body."""
        self.finished = True
        await self._send({"type": "http.response.body", "body": body})

    async def reply(self, status: int, body: bytes, *headers: Header) -> None:
        """A whole answer, of type JSON unless a header says otherwise."""
        kind = () if any(name == b"content-type" for name, _ in headers) else (JSON_TYPE,)
        await self.start(status, *kind, (b"content-length", str(len(body)).encode()), *headers)
        await self.finish(body)

    async def refuse(self, error: BaseException) -> None:
        """Answer with an error, and read no more of this client than is polite."""
        answer = noted(error)
        self.note.code = code_of(error)
        length = (b"content-length", str(len(answer.body)).encode())
        if self._body_read or not self._has_body():
            await self.start(answer.status, JSON_TYPE, length, *answer.headers)
            await self.finish(answer.body)
            return
        await self.start(answer.status, JSON_TYPE, length, (b"connection", b"close"), *answer.headers)
        await self.send(answer.body)
        await self._linger()
        await self.finish()

    def _has_body(self) -> bool:
        return self.header(b"transfer-encoding") is not None or self.header(b"content-length") not in (None, b"0")

    async def _linger(self) -> None:
        thrown_away = 0
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while not self._body_read and thrown_away < _LINGER_BYTES:
                    message: Message = await self._receive()
                    thrown_away += len(message.get("body", b""))
                    self._body_read = message["type"] != "http.request" or not message.get("more_body", False)


class Attention:
    """Listens for the client's going while its request is worked on, at no cost a token."""

    __slots__ = ("_exchange", "_gone", "_hang_up", "_receive", "_task", "_watch")

    def __init__(self, exchange: Exchange, receive: Receive, hang_up: HangUp | None = None) -> None:
        """``hang_up``: tells that it goes; without it a task waits for that."""
        self._exchange = exchange
        self._receive = receive
        self._hang_up = hang_up
        self._gone = False
        self._watch: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        task = asyncio.current_task()
        assert task is not None
        self._task = task
        if self._hang_up is None:
            self._watch = asyncio.get_running_loop().create_task(self._listen())
        else:
            self._hang_up.when_gone(self._leave)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._hang_up is not None:
            self._hang_up.when_gone(None)
            self._hang_up = None  # or it would still be called, if it is about to be
        if self._gone and kind is asyncio.CancelledError and self._task.uncancel() == 0:
            raise ClientGone from error

    async def _listen(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        over = self._watch is None and self._hang_up is None
        if not over and not self._exchange.finished:
            self._gone = True
            self._task.cancel()


def _too_large(most: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is larger than the limit of {most} bytes.", code="body_too_large")
