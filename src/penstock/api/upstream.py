"""A small HTTP/1.1 client for the catalogue's front: one request to a model's own gateway, answered as it comes.

Knows nothing about models or bodies.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import httptools

from penstock.errors import NoWorkers

Header = tuple[bytes, bytes]

CONNECT_S = 2.0
_CHUNK = 64 << 10


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where a model's gateway listens, and the key that it wants."""

    host: str
    port: int
    key: str


@dataclass(slots=True)
class _Parts:
    """What httptools tells of an answer."""

    headers: list[Header] = field(default_factory=list)
    body: list[bytes] = field(default_factory=list)
    begun: bool = False
    done: bool = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.begun = True

    def on_body(self, body: bytes) -> None:
        self.body.append(body)

    def on_message_complete(self) -> None:
        self.done = True


class Response:
    """An answer whose head is there.  ``chunks`` gives the body as it comes; NoWorkers if it breaks off."""

    def __init__(self, reader: asyncio.StreamReader) -> None:
        self._reader = reader
        self._parts = _Parts()
        self._parser = httptools.HttpResponseParser(self._parts)
        self.status = 0

    @property
    def headers(self) -> list[Header]:
        return self._parts.headers

    async def begin(self) -> None:
        """Until the head is there."""
        while not self._parts.begun:
            await self._more()
        self.status = self._parser.get_status_code()

    async def chunks(self) -> AsyncIterator[bytes]:
        """The body, as it comes."""
        while True:
            body, self._parts.body = self._parts.body, []
            if body:
                yield b"".join(body)
            if self._parts.done:
                return
            await self._more()

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([chunk async for chunk in self.chunks()])

    async def _more(self) -> None:
        try:
            data = await self._reader.read(_CHUNK)
        except OSError:
            data = b""
        if not data:
            raise NoWorkers("The model's own gateway broke off.")
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise NoWorkers(f"The model's own gateway answered in other words than HTTP: {error}.") from None


@asynccontextmanager
async def request(
    to: Upstream,
    method: str,
    path: str,
    body: bytes | None = None,
    kind: bytes = b"application/json",
    *,
    more: Sequence[Header] = (),
) -> AsyncIterator[Response]:
    """One request, with a body of this type and ``more`` headers; leaving the scope early hangs up.

    Raises NoWorkers.
    """
    try:
        async with asyncio.timeout(CONNECT_S):
            reader, writer = await asyncio.open_connection(to.host, to.port)
    except (OSError, TimeoutError) as error:
        raise NoWorkers(f"The model's own gateway cannot be reached: {error or type(error).__name__}.") from None
    try:
        writer.write(_head(to, f"{method} {path}", body, kind, more) + (body or b""))
        response = Response(reader)
        try:
            await writer.drain()
            await response.begin()
        except OSError as error:
            raise NoWorkers(f"The model's own gateway broke off: {error}.") from None
        yield response
    finally:
        writer.close()


def _head(to: Upstream, what: str, body: bytes | None, kind: bytes, more: Sequence[Header]) -> bytes:
    lines = [
        f"{what} HTTP/1.1",
        f"host: {to.host}:{to.port}",
        f"authorization: Bearer {to.key}",
        "connection: close",
    ]
    if body is not None:
        lines += [f"content-type: {kind.decode('latin-1')}", f"content-length: {len(body)}"]
    lines += [f"{name.decode('latin-1')}: {value.decode('latin-1')}" for name, value in more]
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
