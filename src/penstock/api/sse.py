"""Server-sent events (WHATWG HTML, section 9.2): one JSON value each, and an id that says where the stream stands.

The id of an event of an answer is ``<choice>:<tokens>``: so many tokens of that choice are told with it, whatever the
batches were they came in.  Knows nothing about what the values mean.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Final

from penstock.api.errors import Header, error_code, logged_error_response
from penstock.api.http import BodyWriter, HttpExchange
from penstock.errors import KeyReused, RequestError

DONE = b"id: done\ndata: [DONE]\n\n"

HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would keep events back
)


def sse_event(identity: str, data: bytes) -> bytes:
    """One event.  ``data`` is JSON, which has no line breaks."""
    return b"id: %b\ndata: %b\n\n" % (identity.encode(), data)


def sse_error(data: bytes) -> bytes:
    """An error, after which nothing comes.  It has no id: the last one stays that of what was told."""
    return b"data: %b\n\n" % data


# MERGED: Sends events as they come: the status line waits for the first of them, so that an error before it
# MERGED: has a status.
# MERGED:
# MERGED: An error after it is an event, and the end.  A client that knows no chunks gets everything in one
# MERGED: piece.  Knows nothing
# MERGED: about what the events say.


async def send_events(
    exchange: HttpExchange,
    events: AsyncGenerator[bytes, None],
    last: Callable[[], bytes],
    headers: Callable[[], Sequence[Header]],
) -> None:
    """Send all of ``events``, then the ``last``; the empty ones say nothing yet.

    ``last`` and ``headers`` are asked for when they are sent.
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


class EventStreamWriter:
    """Where the events of one answer go, in order.

    Straight to the connection where the server allows it; else ``flush`` sends what was written, and until then the
    answer is paused.  For a client that knows no chunks, out at the end in one piece.
    """

    __slots__ = ("_exchange", "_headers", "_kept", "_unsent", "_waiting", "_writer", "started", "wake")

    def __init__(self, exchange: HttpExchange, headers: Callable[[], Sequence[Header]]) -> None:
        self._exchange = exchange
        self._headers = headers
        self._kept: list[bytes] | None = None if exchange.chunked else []
        self._unsent: list[bytes] = []
        self._writer: BodyWriter | None = None
        self._waiting: list[Callable[[], None]] = []  # for what is not sent yet
        self.started = False
        self.wake: Callable[[], None] = lambda: None  # told when there is something to flush

    @property
    def writer(self) -> BodyWriter | None:
        """The way straight to the connection, where there is one and all that came before is written."""
        return self._writer

    @property
    def pending(self) -> bool:
        """Is there something to flush?"""
        return bool(self._unsent)

    @property
    def paused(self) -> bool:
        """Has the client to read first?"""
        return bool(self._unsent) if self._writer is None else self._writer.paused

    def on_writable(self, ready: Callable[[], None]) -> None:
        """Call this once when it is no longer paused; asked while it is."""
        if self._writer is None:
            self._waiting.append(ready)
        else:
            self._writer.when_writable(ready)

    def write(self, data: bytes) -> bool:
        """An event, or several; is it ``paused`` now?"""
        if self._writer is not None:
            return self._writer.write(data)
        self.started = True
        if self._kept is not None:
            self._kept.append(data)
            return False
        self._unsent.append(data)
        self.wake()
        return True

    async def flush(self) -> None:
        """Send what was written.  The status line goes before the first of it."""
        if not self._unsent:
            return
        await self._start()
        data = b"".join(self._unsent)
        self._unsent.clear()
        writer = self._exchange.body_writer()
        if writer is not None:
            writer.write(data)
            self._writer = writer
        else:
            await self._exchange.send(data)
        waiting, self._waiting = self._waiting, []
        for ready in waiting:
            ready()

    async def finish(self, data: bytes) -> None:
        """The last event."""
        if self._kept is not None:
            await self._exchange.send_response(200, b"".join((*self._kept, data)), *HEADERS, *self._headers())
            return
        await self._start()
        await self._exchange.finish(b"".join((*self._unsent, data)))

    async def send_error(self, error: Exception) -> None:
        """The last event says what went wrong."""
        self._exchange.log_entry.code = error_code(error)
        await self.finish(sse_error(logged_error_response(error).body))

    async def _start(self) -> None:
        if not self._exchange.started:
            await self._exchange.start(200, *HEADERS, *self._headers())


# MERGED: Ids of a stream's events: how far each choice is told with an event, so that a client can ask for
# MERGED: what comes after.
# MERGED:
# MERGED: ::
# MERGED:
# MERGED:     0:17                      17 tokens of choice 0 are told (a request without an idempotency key)
# MERGED:     0:17/8c1f0a6e22d94b07     the same, with a mark that proves that it was given out for this
# MERGED: request
# MERGED:     1:9;0:17+/8c1f0a…         choice 1 stands at 9; choice 0 at 17, and what was held back of its
# MERGED: text is told, too
# MERGED:     0:end;1:end/8c1f0a…       both have ended
# MERGED:     usage/8c1f0a…             so is the usage told
# MERGED:     done                      nothing is left to tell
# MERGED:
# MERGED: A mark is a keyed hash of the id and of what was asked (tenant, key, body, model): a client can name
# MERGED: no event that it
# MERGED: was not told of, and so cannot have an answer that nobody counts.
# MERGED:
# MERGED: Text that may become part of a stop string, or of a character, is held back until the answer ends:
# MERGED: "17" and "17+" tell
# MERGED: which of the two a client has.  Knows nothing about tokens, JSON or HTTP.

MAX_ID_CHOICES = 64
"""An event's id tells of so many choices at most.  A stream with more of them cannot be resumed."""

MAX_ID_BYTES = 4096

SIGNATURE_BYTES = 8

_PLACE: Final = r"\d{1,4}:(?:\d{1,9}\+?|end)"
_ID: Final = re.compile(rf"(?P<places>{_PLACE}(?:;{_PLACE}){{0,{MAX_ID_CHOICES - 1}}}|usage)/(?P<mark>[0-9a-f]{{16}})")


@dataclass(frozen=True, slots=True)
class ChoicePosition:
    """How far one choice is told."""

    tokens: int
    flushed: bool = False  # what was held back is told, too
    ended: bool = False  # so is the end


class EventSigner:
    """The marks of one request's events.  ``key`` is known to every gateway and to no client."""

    def __init__(self, key: bytes, request: bytes) -> None:
        """``request``: what was asked, and by whom."""
        self._begun = blake2b(request, digest_size=SIGNATURE_BYTES, key=key, person=b"penstock event")

    def sign(self, places: str) -> str:
        """Of the event with this id."""
        mark = self._begun.copy()
        mark.update(places.encode())
        return mark.hexdigest()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """Where a stream goes on.  Without places it begins."""

    positions: Mapping[int, ChoicePosition] = field(default_factory=dict[int, ChoicePosition])
    complete: bool = False  # nothing is left but the last word

    @classmethod
    def parse(cls, raw: bytes, marks: EventSigner) -> ResumePoint:
        """What a client says it has.  Raises RequestError for what is no id of ours, KeyReused for another mark."""
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
                "model, or to another service, so its stream cannot go on here. Send a new request with another "
                "Idempotency-Key."
            )
        if match["places"] == "usage":
            return cls(complete=True)
        return cls(dict(map(_place, match["places"].split(";"))))


def _place(text: str) -> tuple[int, ChoicePosition]:
    choice, _, told = text.partition(":")
    if told == "end":
        return int(choice), ChoicePosition(0, flushed=True, ended=True)
    return int(choice), ChoicePosition(int(told.rstrip("+")), flushed=told.endswith("+"))


class EventIds:
    """The ids of one stream.  With ``marks`` each tells of all choices, so that any of them can be resumed from."""

    __slots__ = ("_marks", "_told")

    def __init__(self, marks: EventSigner | None = None, after: ResumePoint | None = None) -> None:
        self._marks = marks
        self._told: dict[int, str] = {}
        for choice, place in (after.positions if after is not None else {}).items():
            self._told[choice] = "end" if place.ended else f"{place.tokens}{'+' if place.flushed else ''}"

    def start_id(self, choice: int) -> str:
        """Of the event before a choice's first text."""
        return self._id(choice, "0")

    def delta_id(self, choice: int, tokens: int, *, last: bool) -> str:
        """Of one with text.  ``last``: with what was held back."""
        return self._id(choice, f"{tokens}+" if last and self._marks is not None else str(tokens))

    def finish_id(self, choice: int) -> str:
        """Of the one with the reason of the end."""
        return self._id(choice, "end")

    def usage_id(self) -> str:
        """Of the one with the figures."""
        return "usage" if self._marks is None else f"usage/{self._marks.sign('usage')}"

    def _id(self, choice: int, place: str) -> str:
        if self._marks is None:
            return f"{choice}:{place}"
        self._told[choice] = place
        if len(self._told) > MAX_ID_CHOICES:
            return f"{choice}:{place}"
        others = "".join(f";{other}:{told}" for other, told in self._told.items() if other != choice)
        places = f"{choice}:{place}{others}"
        return f"{places}/{self._marks.sign(places)}"
