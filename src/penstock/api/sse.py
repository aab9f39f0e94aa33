"""Server-sent events (WHATWG HTML, section 9.2): their format, their ids, and how they are sent.

The status line waits for the first event, so that an earlier error has a status of its own; a later error is the last
event.  HTTP/1.0 clients, which have no chunks, get everything in one piece.  An id says how far each choice has been
sent, so that a client can resume after it (``Last-Event-ID``)::

    0:17                      17 tokens of choice 0 are sent (a request without an idempotency key)
    0:17/8c1f0a6e22d94b07     the same, signed: the id was given out for this request
    1:9;0:17+/8c1f0a…         choice 1 is at 9; choice 0 at 17, its held-back text included
    0:end;1:end/8c1f0a…       both have finished
    usage/8c1f0a…             the usage has been sent, too
    done                      nothing is left

A signature is a keyed hash of the id and the request (tenant, key, body, model): a client cannot name an event that it
did not receive, and so cannot get tokens that are not billed.  Text that may become part of a stop string or of a
character is held back until the response ends: "17" and "17+" tell the two apart.  Knows nothing about tokens or the
events' JSON.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from penstock.api.errors import ErrorResponse, Header, error_code, logged_error_response
from penstock.api.http import BodyWriter, HttpExchange
from penstock.errors import KeyReused, RequestError

DONE = b"id: done\ndata: [DONE]\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
)


def sse_event(identity: str, data: bytes, name: bytes = b"") -> bytes:
    """One event.  ``data`` is JSON, which has no line breaks; ``name`` is its type."""
    return b"id: %b\n%b" % (identity.encode(), sse_event_without_id(data, name))


def sse_event_without_id(data: bytes, name: bytes = b"") -> bytes:
    """An event behind which nobody can resume: the client's last id stays valid."""
    return b"event: %b\ndata: %b\n\n" % (name, data) if name else b"data: %b\n\n" % data


def openai_error_event(error: ErrorResponse) -> bytes:
    """An error as the last event of OpenAI's streams."""
    return sse_event_without_id(error.body)


async def send_events(
    exchange: HttpExchange,
    events: AsyncGenerator[bytes, None],
    last: Callable[[], bytes],
    headers: Callable[[], Sequence[Header]],
) -> None:
    """Sends all of ``events`` that are not empty, then ``last``.

    ``last`` and ``headers`` are called when they are sent.
    """
    out = EventStreamWriter(exchange, headers)
    try:
        async with aclosing(events) as parts:
            async for data in parts:
                if data:
                    out.write(data)
                    await out.flush()
    except Exception as error:
        if not out.started:
            raise
        await out.send_error(error)
        return
    await out.finish(last())


def _no_headers() -> Sequence[Header]:
    """The headers of a response that has sent its own."""
    return ()


class EventStreamWriter:
    """Writes the events of one response, in order.

    They go straight to the connection where the server allows it; else ``flush`` sends what was written, and until then
    the response is paused.  A client without chunks gets them at the end, in one piece.
    """

    __slots__ = ("_exchange", "_headers", "_kept", "_unsent", "_waiting", "_writer", "started", "wake")

    def __init__(self, exchange: HttpExchange, headers: Callable[[], Sequence[Header]]) -> None:
        self._exchange = exchange
        self._headers = headers
        self._kept: list[bytes] | None = None if exchange.chunked else []
        self._unsent = b""
        self._writer: BodyWriter | None = None
        self._waiting: tuple[Callable[[], None], ...] = ()  # for what is not sent yet
        self.started = False
        self.wake: Callable[[], None] = lambda: None  # called when there is something to flush

    @property
    def writer(self) -> BodyWriter | None:
        """The direct writer, if there is one and everything before is written."""
        return self._writer

    @property
    def pending(self) -> bool:
        """Whether there is something to flush."""
        return bool(self._unsent)

    @property
    def paused(self) -> bool:
        """Whether the client must read first."""
        return bool(self._unsent) if self._writer is None else self._writer.paused

    def on_writable(self, ready: Callable[[], None]) -> None:
        """Calls ``ready`` once when it is no longer paused.  Only while paused."""
        if self._writer is None:
            self._waiting += (ready,)
        else:
            self._writer.when_writable(ready)

    def write(self, data: bytes) -> bool:
        """Writes one event or several.  Returns ``paused``."""
        if self._writer is not None:
            return self._writer.write(data)
        self.started = True
        if self._kept is not None:
            self._kept.append(data)
            return False
        self._unsent += data
        self.wake()
        return True

    async def flush(self) -> None:
        """Sends what was written, the status line first."""
        if not self._unsent:
            return
        await self._start()
        data, self._unsent = self._unsent, b""
        writer = self._exchange.body_writer()
        if writer is not None:
            writer.write(data)
            self._writer = writer
            self._exchange.release_headers()
            self._headers = _no_headers
        else:
            await self._exchange.send(data)
        waiting, self._waiting = self._waiting, ()
        for ready in waiting:
            ready()

    async def finish(self, data: bytes) -> None:
        """Sends the last event."""
        if self._kept is not None:
            await self._exchange.send_response(200, b"".join((*self._kept, data)), *HEADERS, *self._headers())
            return
        await self._start()
        await self._exchange.finish(self._unsent + data)

    async def send_error(self, error: Exception, event: Callable[[ErrorResponse], bytes] = openai_error_event) -> None:
        """Sends an error as the last event, which ``event`` writes."""
        note = self._exchange.log_entry
        note.code = error_code(error)
        await self.finish(event(logged_error_response(error, note.id)))

    async def _start(self) -> None:
        if not self._exchange.started:
            await self._exchange.start(200, *HEADERS, *self._headers())


MAX_ID_CHOICES = 64
"""The most choices that an id names.  A stream with more cannot be resumed."""

MAX_ID_BYTES = 4096

SIGNATURE_BYTES = 8

_PLACE: Final = r"\d{1,4}:(?:\d{1,9}\+?|end)"
_ID: Final = re.compile(rf"(?P<places>{_PLACE}(?:;{_PLACE}){{0,{MAX_ID_CHOICES - 1}}}|usage)/(?P<mark>[0-9a-f]{{16}})")


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    """How far one choice has been sent."""

    tokens: int
    flushed: bool = False  # held-back text included
    ended: bool = False  # and finished


class EventSigner:
    """Signs one request's event ids.  ``key`` is known to every gateway and to no client."""

    def __init__(self, key: bytes, request: bytes) -> None:
        """``request`` identifies the request and its tenant."""
        self._begun = blake2b(request, digest_size=SIGNATURE_BYTES, key=key, person=b"penstock event")

    def sign(self, places: str) -> str:
        """The signature of these positions."""
        mark = self._begun.copy()
        mark.update(places.encode())
        return mark.hexdigest()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a stream is resumed.  Without positions it starts from the beginning."""

    positions: Mapping[int, ChoicePosition] = field(default_factory=dict[int, ChoicePosition])
    complete: bool = False  # only the end marker is left

    @classmethod
    def parse(cls, raw: bytes, marks: EventSigner) -> ResumePoint:
        """Parses a client's last id.  Raises RequestError for an invalid one, KeyReused for another signature."""
        text = raw[: MAX_ID_BYTES + 1].decode("latin-1").strip()
        if text == "done":
            return cls(complete=True)
        match = _ID.fullmatch(text) if len(raw) <= MAX_ID_BYTES else None
        if match is None:
            raise RequestError(
                f"The header Last-Event-ID has {text[:80]!r}, which is not the id of an event of a request with an "
                "idempotency key. Send the request without it to get the answer from its beginning.",
                code="invalid_last_event_id",
            )
        if not hmac.compare_digest(match["mark"], marks.sign(match["places"])):
            raise KeyReused(
                "The event named in Last-Event-ID belongs to another request body, Idempotency-Key or version of the "
                "model or adapter, or to another service, so its stream cannot go on here. Send a new request with "
                "another Idempotency-Key."
            )
        if match["places"] == "usage":
            return cls(complete=True)
        return cls(dict(map(_place, match["places"].split(";"))))


def _place(text: str) -> tuple[int, ChoicePosition]:
    choice, _, position = text.partition(":")
    if position == "end":
        return int(choice), ChoicePosition(0, flushed=True, ended=True)
    return int(choice), ChoicePosition(int(position.rstrip("+")), flushed=position.endswith("+"))


class EventIds:
    """The ids of one stream.  With ``marks`` each id names all choices, so that any event can be resumed from."""

    __slots__ = ("_marks", "_told")

    def __init__(self, marks: EventSigner | None = None, after: ResumePoint | None = None) -> None:
        self._marks = marks
        self._told: dict[int, str] | None = None  # with ``marks`` only
        if marks is not None:
            self._told = {}
            for choice, place in (after.positions if after is not None else {}).items():
                self._told[choice] = "end" if place.ended else f"{place.tokens}{'+' if place.flushed else ''}"

    def start_id(self, choice: int) -> str:
        """The id of the event before a choice's first text."""
        return self._id(choice, "0")

    def delta_id(self, choice: int, tokens: int, *, last: bool) -> str:
        """The id of an event with text.  ``last``: with the held-back text."""
        return self._id(choice, f"{tokens}+" if last and self._marks is not None else str(tokens))

    def finish_id(self, choice: int) -> str:
        """The id of the event with the finish reason."""
        return self._id(choice, "end")

    def usage_id(self) -> str:
        """The id of the event with the usage."""
        return "usage" if self._marks is None else f"usage/{self._marks.sign('usage')}"

    def _id(self, choice: int, place: str) -> str:
        if self._marks is None or self._told is None:
            return f"{choice}:{place}"
        self._told[choice] = place
        if len(self._told) > MAX_ID_CHOICES:
            return f"{choice}:{place}"
        others = "".join(f";{other}:{position}" for other, position in self._told.items() if other != choice)
        places = f"{choice}:{place}{others}"
        return f"{places}/{self._marks.sign(places)}"
