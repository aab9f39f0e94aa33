"""One HTTP connection: uvicorn's protocol with limits on the request's head and on clients that stop reading.

- A head (request line and headers) is limited to ``max_header_bytes`` and ``header_s``: 431 and 408.
- At most ``MAX_PIPELINED`` requests may wait behind a running one: 400.
- A body has one length, ``Host`` occurs once, and the only transfer coding is ``chunked``.  Anything else is refused,
  the connection is closed, and nothing behind it is parsed (RFC 9112, sections 3.2, 6.1 and 6.3).
- ``Upgrade`` is ignored (RFC 9110, section 7.8): the request is handled as it is, with its body.
- Trailer fields are dropped; they are limited to ``max_header_bytes``, as is a chunk's line.
- A client that reads nothing of its response for ``idle_client_s`` is disconnected, so that an unread stream holds
  neither memory in the gateway nor pages in a worker.
- Input is parsed in bounded pieces per turn of the event loop, over all connections (``ParseTurns``).
- What is not HTTP is refused with the same JSON envelope as everything else.

Knows nothing about paths or bodies.
"""

from __future__ import annotations

import asyncio
import re
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from http import HTTPStatus
from typing import Any

import httptools
import msgspec
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from penstock.api.http import BODY_WRITER, DISCONNECT_SIGNAL
from penstock.config.limits import RequestLimits, TurnLimits


class SlimEvent:
    """Used by one event loop."""

    __slots__ = ("_is_set", "_waiting")

    def __init__(self, *, is_set: bool = False) -> None:
        self._is_set = is_set
        self._waiting: tuple[asyncio.Future[None], ...] = ()

    def is_set(self) -> bool:
        """Whether ``wait`` returns at once."""
        return self._is_set

    def set(self) -> None:
        """All who wait go on."""
        self._is_set = True
        waiting, self._waiting = self._waiting, ()
        for each in waiting:
            if not each.done():
                each.set_result(None)

    def clear(self) -> None:
        """Make later callers wait."""
        self._is_set = False

    async def wait(self) -> bool:
        """Until it is set."""
        if not self._is_set:
            waiter = asyncio.get_running_loop().create_future()
            self._waiting = (*self._waiting, waiter)
            try:
                await waiter
            finally:
                self._waiting = tuple(each for each in self._waiting if each is not waiter)
        return True


class ParseTurns:
    """Allows a number of pieces a turn; the others wait in order of arrival."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn  # in this turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._next_turn_is_due = False

    def try_parse(self) -> bool:
        """Whether a piece may be parsed now; otherwise it waits."""
        if self._waiting or not self._left:
            return False
        self._left -= 1
        self._look_again()
        return True

    def enqueue(self, parse: Callable[[], None]) -> None:
        """Call this when it is its turn.  There is no way to take it back: of who has gone it may do nothing."""
        self._waiting.append(parse)
        self._look_again()

    def _look_again(self) -> None:
        if not self._next_turn_is_due:
            self._next_turn_is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._next_turn_is_due, self._left = False, self._per_turn
        try:
            while self._waiting and self._left:
                self._left -= 1
                self._waiting.popleft()()
        finally:
            if self._waiting or self._left < self._per_turn:
                self._look_again()


MAX_PIPELINED = 16
_SEPARATORS = len(": \r\n")
_HOST = re.compile(rb"(?:[\w.~%!$&'()*+,;=-]*|\[[0-9A-Fa-f:.vV%\w-]+\])(?::\d*)?", re.ASCII)  # RFC 3986, section 3.2.2


class _BadHeadError(Exception):
    """Stops the parser; uvicorn then asks for ``send_400_response``."""


def guarded_protocol(limits: RequestLimits, turns: TurnLimits | None = None) -> type[asyncio.Protocol]:
    """uvicorn's protocol class with these limits built in (uvicorn makes one object of it a connection)."""
    reads = ParseTurns((turns or TurnLimits()).client_reads_per_turn)
    return type("GuardedConnection", (_GuardedConnection,), {"limits": limits, "reads": reads, "__slots__": ()})


class ConnectionWriter:
    """``api.http.BodyWriter`` of one answer: what uvicorn's ``send`` does with a part of a body, no more.

    And ``api.http.DisconnectSignal`` of its request.
    """

    __slots__ = ("_connection", "_cycle", "_flow", "_when_gone", "_write")

    def __init__(self, connection: _GuardedConnection) -> None:
        self._connection = connection
        self._cycle: RequestResponseCycle | None = None
        self._flow = connection.flow
        self._write: Callable[[bytes], None] = connection.transport.write
        self._when_gone: Callable[[], None] | None = None

    def begin(self, cycle: RequestResponseCycle) -> None:
        """uvicorn's own object for this answer."""
        self._cycle = cycle

    def on_disconnect(self) -> None:
        """The client is: what is written from now on goes nowhere."""
        self._write = _nowhere
        call, self._when_gone = self._when_gone, None
        if call is not None:
            call()

    def when_gone(self, call: Callable[[], None] | None) -> None:
        if call is not None and self._cycle is not None and self._cycle.disconnected:
            self._connection.loop.call_soon(call)
            return
        self._when_gone = call
        if call is not None:
            self._flow.resume_reading()  # or its going would not be noticed
            self._connection.rest()

    def belongs_to(self, cycle: RequestResponseCycle) -> bool:
        """Whether it writes this response."""
        return self._cycle is cycle

    @property
    def complete(self) -> bool:
        """Whether the response is complete."""
        return self._cycle is not None and self._cycle.response_complete

    @property
    def usable(self) -> bool:
        cycle = self._cycle
        if cycle is None or not cycle.response_started or cycle.response_complete:
            return False
        return bool(cycle.chunked_encoding) and cycle.scope["method"] != "HEAD"

    @property
    def paused(self) -> bool:
        return self._flow.write_paused  # uvicorn takes it back when the connection is lost

    def write(self, body: bytes) -> bool:
        self._write(b"%x\r\n%b\r\n" % (len(body), body))
        return self._flow.write_paused

    def when_writable(self, ready: Callable[[], None]) -> None:
        self._connection.when_writable(ready)


def _nowhere(_: bytes) -> None:
    """What is written to a client that has gone."""


class _Flow(FlowControl):
    """uvicorn's, with a signal that keeps no queue."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.read_paused = False
        self.write_paused = False
        self._is_writable_event = SlimEvent(is_set=True)  # type: ignore[assignment]


_ASGI: Any = {"version": "3.0", "spec_version": "2.3"}


@lru_cache(maxsize=64)
def _shared_address(address: tuple[str, int | None] | None) -> Any:
    """The same object for equal addresses: all connections have one of a few at this end."""
    return address


class _Pipeline(list[Any]):
    """What uvicorn uses of a deque, which takes 0.7 KiB while it is empty."""

    __slots__ = ()

    def appendleft(self, item: Any) -> None:
        self.insert(0, item)


class _GuardedConnection(HttpToolsProtocol):
    # All connections share the names of uvicorn's attributes; of more than thirty each would have a table of its own.
    __slots__ = (
        "_cycles",
        "_framing_bytes",
        "_head_begun",
        "_head_bytes",
        "_head_timer",
        "_in_head",
        "_refusal",
        "_rests",
        "_unparsed",
        "_wait_to_write",
        "_without_upgrade",
        "_write_timer",
        "_writers",
    )

    limits: RequestLimits
    reads: ParseTurns

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.pipeline = _Pipeline()  # type: ignore[assignment]
        self._head_bytes = 0  # of the head that is being received
        self._cycles: list[RequestResponseCycle] = []  # requests of this connection that are not answered yet
        self._rests = False  # a new parser is to be made for what comes next
        self._in_head = True  # also between two requests
        self._head_begun = False
        self._refusal: tuple[HTTPStatus, str] | None = None  # what to say instead of uvicorn's own words
        self._without_upgrade: bytes | None = None  # the head that has just ended, if it asks for an upgrade
        self._framing_bytes = 0  # received of a body since its last byte: a chunk's line, or trailer fields
        self._unparsed = b""  # received, and waits for its turn
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._wait_to_write: tuple[Callable[[], None], ...] = ()
        self._writers: list[ConnectionWriter] = []  # of answers that are not over

    # --- the head ----------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.flow = _Flow(transport)
        self.server = _shared_address(self.server)
        self._start_head_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timers()
        self._unparsed = b""
        for cycle in self._cycles:  # uvicorn tells only the last of those that are pipelined
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)
        for writer in self._writers:
            writer.on_disconnect()
        self._writable()

    def data_received(self, data: bytes) -> None:
        self._unset_keepalive_if_required()
        if self._unparsed:
            self._unparsed += data
        elif self.reads.try_parse():
            self._received(data)
        else:
            self._unparsed = data
            self.flow.pause_reading()
            self.reads.enqueue(self._on_turn)

    def _on_turn(self) -> None:
        """What was received may be parsed.  Nothing is left of it when the client has gone meanwhile."""
        data, self._unparsed = self._unparsed, b""
        if data and not self.transport.is_closing():
            self.flow.resume_reading()
            self._received(data)

    def shutdown(self) -> None:
        self._on_turn()  # a request that has come is answered
        super().shutdown()

    def _received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse(*(self._refusal or (HTTPStatus.BAD_REQUEST, "Invalid HTTP request received.")))
            return
        if self._in_head and self._head_bytes > self.limits.max_header_bytes:
            self._refuse(*self._too_large())
        elif not self._in_head and self._framing_bytes > self.limits.max_header_bytes:
            limit = self.limits.max_header_bytes
            self._refuse(
                HTTPStatus.BAD_REQUEST,
                f"A chunk's line or the trailer fields are larger than the limit of {limit} bytes.",
            )

    def _parse(self, data: bytes) -> None:
        """Feed the parser.

        It takes the end of a head that asks for an upgrade for the end of HTTP, and would read the body as the next
        request.  So a new parser reads that head again without ``Upgrade``, and goes on with what follows.
        Raises HttpParserError.
        """
        rest = memoryview(data)
        if self._rests:
            self._rests, self.parser = False, self._new_parser()
        while True:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as upgrade:
                head, self._without_upgrade = self._without_upgrade, None
                assert head is not None, "on_headers_complete notes it"
                rest = rest[upgrade.args[0] :]
                self.parser = self._new_parser()
                self.parser.feed_data(head)

    def _new_parser(self) -> httptools.HttpRequestParser:
        """As uvicorn's own."""
        parser = httptools.HttpRequestParser(self)
        parser.set_dangerous_leniencies(lenient_data_after_close=True)
        return parser

    def rest(self) -> None:
        """A request has come whole, and its answer may take long.  What comes behind it is for another parser (they
        take 1 KiB each), as long as there is nothing of it yet.  Not to be called by the parser."""
        if self._in_head and not self._head_begun:
            self._rests, self.parser = True, None  # type: ignore[assignment]

    def on_message_begin(self) -> None:
        self._in_head = self._head_begun = True
        self._start_head_timer()
        super().on_message_begin()
        self.scope["asgi"] = _ASGI  # uvicorn makes one a request
        del self.scope["state"]  # an empty one a request: nothing here has a state

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # what the application reads as the head may not change afterwards
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        size = len(self.url) + sum(len(name) + len(value) + _SEPARATORS for name, value in self.headers)
        if size > self.limits.max_header_bytes:
            self._refusal = self._too_large()
        elif len(self.pipeline) >= MAX_PIPELINED:
            self._refusal = HTTPStatus.BAD_REQUEST, f"More than {MAX_PIPELINED} requests are pipelined."
        else:
            self._refusal = self._bad_framing()
        if self._refusal is not None:
            raise _BadHeadError
        if self.parser.should_upgrade():
            self._without_upgrade = self._head_without_upgrade()
            return
        self._in_head = self._head_begun = False
        self._head_bytes = 0
        self._stop_head_timer()
        writer = ConnectionWriter(self)
        self.scope["extensions"] = {BODY_WRITER: writer, DISCONNECT_SIGNAL: writer}  # type: ignore[dict-item]
        super().on_headers_complete()
        self.cycle.message_event = SlimEvent()  # type: ignore[assignment]  # nothing waits for it yet
        writer.begin(self.cycle)
        self._writers = [each for each in self._writers if not each.complete] + [writer]
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete] + [self.cycle]
        if self.pipeline:
            # uvicorn reads no further behind a running request, and so would not hear that the client has gone.
            self.flow.resume_reading()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)

    def on_chunk_header(self) -> None:
        self._framing_bytes = 0

    def on_message_complete(self) -> None:
        if self._without_upgrade is not None:
            return  # it has only been read for the first time
        super().on_message_complete()
        self._in_head = True
        self._framing_bytes = 0

    def _bad_framing(self) -> tuple[HTTPStatus, str] | None:
        """Why a proxy and we could disagree on where this request ends, or for whom it is; None where we cannot.

        The parser itself refuses two lengths, and a length together with a transfer coding.
        """
        old = self.parser.get_http_version() == "1.0"
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) > 1 or not (hosts or old):
            return HTTPStatus.BAD_REQUEST, f"A request needs one Host header; this one has {len(hosts)}."
        if hosts and not _HOST.fullmatch(hosts[0]):
            return HTTPStatus.BAD_REQUEST, "The Host header names no host."
        if self.parser.get_method() == b"CONNECT":
            return HTTPStatus.BAD_REQUEST, "CONNECT is for proxies, which this is not."
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings and old:
            return HTTPStatus.BAD_REQUEST, "HTTP/1.0 has no Transfer-Encoding."
        if codings and codings != [b"chunked"]:
            return HTTPStatus.NOT_IMPLEMENTED, "The only Transfer-Encoding that is read here is chunked."
        return None

    def _head_without_upgrade(self) -> bytes:
        """The head as it came, without ``Upgrade`` and without its name in ``Connection``."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                lines.append(b"connection: " + b", ".join(each for each in options if each.lower() != b"upgrade"))
            elif name != b"upgrade":
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"

    @property
    def _answering(self) -> bool:
        return bool(self.cycle) and not self.cycle.response_complete

    def _too_large(self) -> tuple[HTTPStatus, str]:
        limit = self.limits.max_header_bytes
        return (
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"The request's head is larger than the limit of {limit} bytes.",
        )

    def _start_head_timer(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.header_s, self._on_slow_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self._answering or self._unparsed:
            self._start_head_timer()  # an answer is on its way: not to be cut off for what comes behind it
            return
        if not self._head_begun:
            self.transport.close()  # it never said a word
            return
        seconds = self.limits.header_s
        self._refuse(HTTPStatus.REQUEST_TIMEOUT, f"The request's head took longer than the limit of {seconds:g} s.")

    # --- the answer --------------------------------------------------------------------------------------------------

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader(self.transport.get_write_buffer_size())

    def when_writable(self, ready: Callable[[], None]) -> None:
        self._wait_to_write += (ready,)

    def _writable(self) -> None:
        waiting, self._wait_to_write = self._wait_to_write, ()
        for ready in waiting:
            ready()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._writable()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def _watch_reader(self, unread: int) -> None:
        self._write_timer = self.loop.call_later(self.limits.idle_client_s, self._on_idle_reader, unread)

    def _on_idle_reader(self, unread: int) -> None:
        """Anything taken since the last look keeps the connection, however little."""
        now = self.transport.get_write_buffer_size()
        if now < unread:
            self._watch_reader(now)
        else:
            self.transport.abort()

    def _stop_timers(self) -> None:
        self._stop_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    # --- refusals ----------------------------------------------------------------------------------------------------

    def _refuse(self, status: HTTPStatus, message: str) -> None:
        """Answer in OpenAI's envelope and close.  Amid an answer there is nothing to say: only close."""
        self._stop_timers()
        if self.transport.is_closing():
            return
        if self._answering:
            own_body = not (self._in_head or self.pipeline)
            if not own_body or self.cycle.response_started:
                self.transport.close()
                return
            self.cycle.disconnected = True  # so that the application sends nothing after the refusal
            self.cycle.message_event.set()
            for writer in self._writers:
                if writer.belongs_to(self.cycle):
                    writer.on_disconnect()
        error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status.value} {status.phrase}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode("ascii") + body)
        self.transport.close()
