"""HTTP/1.1 clients on asyncio: ``HttpStreamClient`` for server-sent events, ``open_request`` for one request to the
gateway of a catalog's model, and ``SseParser`` (WHATWG HTML, section 9.2.6).

``HttpStreamClient`` keeps its connections and hands every event to a callback inside the socket's own read, with the
time of that read, so that measured times are not those of a task that woke up later.  Knows nothing about what events
mean.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import cast
from urllib.parse import urlsplit

import httptools

from penstock.errors import NoWorkers, PenstockError

MAX_EVENT_BYTES = 16 << 20
"""A longer event is a fault of the server, not a reason to fill memory."""

DONE = b"[DONE]"
"""The data with which OpenAI ends a stream."""


class SseParser:
    """Feed it bytes in any pieces; it returns the data of the events that these bytes completed."""

    def __init__(self) -> None:
        self.last_id = ""  # of the last event that came whole
        self._rest = b""
        self._data: list[bytes] = []
        self._id = ""

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Data of each event that is complete now, ``last_id`` being its id; several data lines are joined with a
        newline.  What is not iterated over is lost.

        Raises ValueError when one line grows beyond ``MAX_EVENT_BYTES``.
        """
        text = self._rest + piece if self._rest else piece
        held = b""
        if b"\r" in text:
            if text.endswith(b"\r"):  # the line feed that belongs to it may come with the next piece
                text, held = text[:-1], b"\r"
            text = text.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        lines = text.split(b"\n")
        self._rest = lines.pop() + held
        if len(self._rest) > MAX_EVENT_BYTES:
            raise ValueError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        for line in lines:
            if line.startswith(b"data:"):
                self._data.append(line[6:] if line[5:6] == b" " else line[5:])
            elif line.startswith(b"id:"):
                self._id = line[3:].strip().decode("latin-1")
            elif not line and self._data:
                data, self._data = b"\n".join(self._data), []
                self.last_id = self._id
                yield data


OnEvent = Callable[[bytes, float], None]
"""Called with an event's data and ``time.perf_counter()`` of its arrival.  What it raises ends the exchange."""

MAX_PLAIN_BODY_BYTES = 64 << 20
HTTP_UNAVAILABLE = 503


class StreamError(PenstockError):
    """No complete reply came.  ``kind`` is a short name to count by."""

    def __init__(self, kind: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {detail}" if detail else kind)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """Where a base URL points to."""

    host: str
    port: int
    tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """From ``http://host:port/prefix``.  Raises ValueError for anything else."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"not an http or https URL: {url!r}")
        tls = parts.scheme == "https"
        return cls(parts.hostname, parts.port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


RESUME_S = 15.0
"""For so long a stream that broke off is asked for again."""

AGAIN_S = 0.1
LOST = ("connection lost", "connection refused", "cannot connect")
"""Kinds of ``StreamError`` after which a server may be there again."""


@dataclass(slots=True)
class _Course:
    """How far a stream has come."""

    last_id: str = ""


@dataclass(slots=True)
class HttpReply:
    """A finished reply.  ``body`` is empty when its events went to a callback."""

    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


class _Connection(asyncio.Protocol):
    """One connection; one exchange at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[HttpReply] | None = None
        self._on_event: OnEvent | None = None
        self._arrived = 0.0
        self.heard = False  # has the current exchange brought a byte?
        self.reusable = True

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's has the methods, not the base class

    def data_received(self, data: bytes) -> None:
        self._arrived = time.perf_counter()
        self.heard = True
        try:
            self._parser.feed_data(data)
        except Exception as error:  # noqa: BLE001 - the parser wraps whatever the event's callback raised
            self._fail(error.__context__ if isinstance(error, httptools.HttpParserCallbackError) else error)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reusable = False
        if self._done is None or self._done.done():
            return
        if self._until_eof and exc is None:
            self._done.set_result(self._reply)
        else:
            self._fail(StreamError("connection lost", str(exc or "the server closed it")))

    # --- one exchange

    def begin(self, request: bytes, on_event: OnEvent | None, course: _Course) -> asyncio.Future[HttpReply]:
        """Send a request; the future is done with the last byte of its reply.  Raises StreamError."""
        self._course = course
        self.heard = False
        if self._transport is None or not self.reusable:
            raise StreamError("connection lost")
        self._done = asyncio.get_running_loop().create_future()
        self._parser = httptools.HttpResponseParser(self)
        self._reply = HttpReply()
        self._events = SseParser()
        self._streams = False
        self._until_eof = False
        self._on_event = on_event
        self._transport.write(request)
        return self._done

    def close(self) -> None:
        self.reusable = False
        if self._transport is not None:
            self._transport.abort()

    def _fail(self, error: BaseException | None) -> None:
        self.close()
        if self._done is not None and not self._done.done():
            ours = error if isinstance(error, PenstockError) else StreamError("bad reply", repr(error))
            self._done.set_exception(ours)

    # --- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        self._reply.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._reply.status = self._parser.get_status_code()
        headers = self._reply.headers
        self._until_eof = "content-length" not in headers and "chunked" not in headers.get("transfer-encoding", "")
        self._streams = self._on_event is not None and "text/event-stream" in headers.get("content-type", "")
        if self._until_eof or not self._parser.should_keep_alive():
            self.reusable = False

    def on_body(self, body: bytes) -> None:
        if self._streams and self._on_event is not None:
            for event in self._events.feed(body):
                self._on_event(event, self._arrived)
                self._course.last_id = self._events.last_id  # not of one that raised: it was not handled
            return
        if len(self._reply.body) + len(body) > MAX_PLAIN_BODY_BYTES:
            raise StreamError("bad reply", f"a body of more than {MAX_PLAIN_BODY_BYTES} bytes")
        self._reply.body += body

    def on_message_complete(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(self._reply)


def _post(body: bytes, more: bytes = b"") -> tuple[bytes, bytes]:
    """Method, and what follows the head that all requests have."""
    head = b"Content-Type: application/json\r\nContent-Length: %d\r\n%b\r\n" % (len(body), more)
    return b"POST", head + body


class HttpStreamClient:
    """Talks to one server.  Close it (or use ``async with``) to close its connections."""

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        headers: Mapping[str, str] | None = None,
        verify: bool = True,
    ) -> None:
        """``verify``: the server's certificate."""
        self.server = ServerAddress.parse(base_url)
        self._tls = ssl.create_default_context() if self.server.tls else None
        if self._tls is not None and not verify:
            self._tls.check_hostname, self._tls.verify_mode = False, ssl.CERT_NONE
        self._idle: list[_Connection] = []
        lines = {"Host": self.server.authority, "Accept": "*/*", "User-Agent": "penstock"}
        if api_key:
            lines["Authorization"] = f"Bearer {api_key}"
        lines |= headers or {}
        if any("\n" in text or "\r" in text for pair in lines.items() for text in pair):
            raise ValueError("a header may not hold a line break")
        self._head = "".join(f"{name}: {value}\r\n" for name, value in lines.items()).encode("latin-1")

    async def __aenter__(self) -> HttpStreamClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    async def get(self, path: str) -> HttpReply:
        """A plain reply.  Raises StreamError."""
        return await self._exchange((b"GET", b"\r\n"), path, None, _Course())

    async def post(self, path: str, body: bytes, on_event: OnEvent | None = None) -> HttpReply:
        """Post JSON.  Events of an event stream go to ``on_event``, any other body into the reply.

        Raises StreamError; cancelling it closes the connection, which is how a server learns that the client has gone.
        """
        return await self._exchange(_post(body), path, on_event, _Course())

    async def post_resumable(self, path: str, body: bytes, on_event: OnEvent, *, key: str) -> HttpReply:
        """As ``post`` with the idempotency key ``key``: a stream that breaks off is asked for again from where it did,
        for ``RESUME_S``.  Raises StreamError."""
        course = _Course()
        deadline: float | None = None
        while True:
            head = f"Idempotency-Key: {key}\r\n" + (f"Last-Event-ID: {course.last_id}\r\n" if course.last_id else "")
            before = course.last_id
            try:
                reply = await self._exchange(_post(body, head.encode("latin-1")), path, on_event, course)
                if reply.status != HTTP_UNAVAILABLE or not course.last_id:
                    return reply
            except StreamError as error:
                if error.kind not in LOST or not course.last_id:
                    raise
            now = time.monotonic()
            if deadline is None or course.last_id != before:
                deadline = now + RESUME_S
            if now > deadline:
                raise StreamError("connection lost", f"and not to be had again for {RESUME_S:g} s")
            await asyncio.sleep(AGAIN_S)

    async def _exchange(
        self, request: tuple[bytes, bytes], path: str, on_event: OnEvent | None, course: _Course
    ) -> HttpReply:
        method, rest = request
        sent = b"%b %b HTTP/1.1\r\n%b" % (method, (self.server.prefix + path).encode("latin-1"), self._head) + rest
        while self._idle:
            connection = self._idle.pop()
            try:
                return await self._on(connection, sent, on_event, course)
            except StreamError:
                if connection.heard:
                    raise
            # the server had closed this idle connection before it read the request: ask again on another
        return await self._on(await self._connect(), sent, on_event, course)

    async def _on(
        self, connection: _Connection, request: bytes, on_event: OnEvent | None, course: _Course
    ) -> HttpReply:
        try:
            reply = await connection.begin(request, on_event, course)
        except BaseException:
            connection.close()
            raise
        if connection.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return reply

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        try:
            _, connection = await loop.create_connection(_Connection, self.server.host, self.server.port, ssl=self._tls)
        except ConnectionRefusedError as error:
            raise StreamError("connection refused", self.server.authority) from error
        except (OSError, ssl.SSLError) as error:
            raise StreamError("cannot connect", str(error)) from error
        return connection


Header = tuple[bytes, bytes]

CONNECT_TIMEOUT_S = 2.0
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


class StreamedResponse:
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
async def open_request(
    to: Upstream,
    method: str,
    path: str,
    body: bytes | None = None,
    kind: bytes = b"application/json",
    *,
    more: Sequence[Header] = (),
) -> AsyncIterator[StreamedResponse]:
    """One request, with a body of this type and ``more`` headers; leaving the scope early hangs up.

    Raises NoWorkers.
    """
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(to.host, to.port)
    except (OSError, TimeoutError) as error:
        raise NoWorkers(f"The model's own gateway cannot be reached: {error or type(error).__name__}.") from None
    try:
        writer.write(_head(to, f"{method} {path}", body, kind, more) + (body or b""))
        response = StreamedResponse(reader)
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
