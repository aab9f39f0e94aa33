"""From prepared requests to an answer: run all choices at once, gather them or stream them as they come.

Whatever ends an answer early, be it a stop string, an error or the client's leaving, closes every token stream it had
open.  Knows nothing about JSON bodies or the words of an API (``Shape`` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

import msgspec

from penstock.edge import sse
from penstock.edge.counted import Counted
from penstock.edge.errors import Header
from penstock.edge.event_ids import After, EventIds, Place
from penstock.edge.event_stream import tell
from penstock.edge.exchange import Exchange
from penstock.edge.gate import Visit
from penstock.edge.kept import Answers
from penstock.edge.openai_shapes import Charge, Choice, Head, Shape, Usage
from penstock.errors import RequestError, WorkerLost
from penstock.types import FinishReason, TokenBatch
from penstock.wire.ports import AnswerPiece, AnswerText, CallPiece, Prepared

_AHEAD = 4
"""Pieces of all choices that may wait for a client that reads slowly; the rest waits in the token streams."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Course:
    """How an answer is told: what the client has of it already, its mark in event ids, whom it is charged to."""

    after: After = field(default_factory=After)
    mark: str = ""
    charge: Charge | None = None
    computed: bool = True  # for this HTTP request; what another began or has left behind is not
    rated: Counted = field(default_factory=Counted)  # among its tenant's rates, of all that was computed
    metered: Counted = field(default_factory=Counted)  # for its tenant, however often it was computed


class Answering:
    """One answer: its choices, and what they have used."""

    def __init__(self, streams: Answers, prepared: Prepared, visit: Visit, course: Course | None = None) -> None:
        self._streams = streams
        self._prepared = prepared
        self._visit = visit
        self.course = course or Course()
        self._cached = [0] * len(prepared.requests)
        self._tokens = [0] * len(prepared.requests)
        self._stored = [0] * len(prepared.requests)

    def used(self) -> Usage:
        """So far; the choices of one prompt share what was cached of it."""
        return Usage.of(
            prompt=self._prepared.prompt_tokens,
            completion=sum(self._tokens),
            cached=sum(self._cached[:: self._prepared.reply.n]),
            stored=sum(self._stored),
            charge=self.course.charge,
        )

    def settle(self) -> Usage:
        """It is over, however it ended: count what nobody has counted of it.  Nothing, when not a token came."""
        used = self.used()
        if self._visit.begun:
            told = list(zip(self._tokens, self._stored, strict=True))
            self._visit.used(used, rated=self.course.rated.take(told), metered=self.course.metered.take(told))
        return used

    async def choice(self, index: int) -> AsyncGenerator[AnswerPiece, None]:
        """The pieces of one choice; the last has ``finish``.  One ends where the client's part of it does."""
        request, text = self._prepared.requests[index], self._prepared.answers[index]
        known = self.course.after.places.get(index)
        stream = self._streams.stream(request)
        try:
            async for came in stream:
                self._visit.started(index, computed=self.course.computed and not came.stored)
                self._cached[index] += came.cached_tokens
                for batch in _parted(came, known.tokens - self._tokens[index] if known else 0):
                    piece = text.push(batch) if batch.prompt_logprobs is None else await _pushed(text, batch)
                    self._tokens[index] = piece.tokens
                    if batch.stored:
                        self._stored[index] = piece.tokens
                    if piece.finish is not None and came.finish is None:
                        self._streams.stopped(request.id)
                    if piece.finish is not None:
                        self._visit.ended(index, piece.tokens)
                    yield piece
                    if piece.finish is not None:
                        return
        finally:
            await stream.aclose()
        raise WorkerLost("The answer ended before its end.")

    async def pieces(self) -> AsyncGenerator[tuple[int, AnswerPiece], None]:
        """The pieces of all choices as they come."""
        if len(self._prepared.requests) > 1:
            async with aclosing(self._merged()) as merged:
                async for item in merged:
                    yield item
            return
        async with aclosing(self.choice(0)) as pieces:
            async for piece in pieces:
                yield 0, piece

    async def _merged(self) -> AsyncGenerator[tuple[int, AnswerPiece], None]:
        queue: asyncio.Queue[tuple[int, AnswerPiece | BaseException]] = asyncio.Queue(_AHEAD)

        async def pump(index: int) -> None:
            try:
                async with aclosing(self.choice(index)) as pieces:
                    async for piece in pieces:
                        await queue.put((index, piece))
            except Exception as error:  # noqa: BLE001 - handed to the one who reads the queue
                await queue.put((index, error))

        open_choices = len(self._prepared.requests)
        tasks = [asyncio.create_task(pump(index)) for index in range(open_choices)]
        try:
            while open_choices:
                index, item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                open_choices -= item.finish is not None
                yield index, item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


MANY_LOGPROBS = 128
"""Tokens in one piece whose log-probabilities are written on the event loop; those of more are written in a thread."""


async def _pushed(text: AnswerText, batch: TokenBatch) -> AnswerPiece:
    if len(batch.prompt_logprobs or ()) <= MANY_LOGPROBS:
        return text.push(batch)
    return await asyncio.to_thread(text.push, batch)


async def whole(shape: Shape, head: Head, choices: Sequence[Choice], usage: Usage) -> bytes:
    """The body of an answer that is not streamed."""
    if sum(len(choice.logprobs) for choice in choices) <= MANY_LOGPROBS:
        return shape.whole(head, choices, usage)
    return await asyncio.to_thread(shape.whole, head, choices, usage)


def _parted(batch: TokenBatch, at: int) -> tuple[TokenBatch, ...]:
    """In two, the first of ``at`` tokens, where it has more than that or ends with them."""
    if not 0 < at <= len(batch.tokens) or (at == len(batch.tokens) and batch.finish is None):
        return (batch,)
    logprobs = batch.logprobs
    before = msgspec.structs.replace(
        batch, tokens=batch.tokens[:at], logprobs=None if logprobs is None else logprobs[:at], finish=None
    )
    behind = TokenBatch(
        tokens=batch.tokens[at:],
        logprobs=None if logprobs is None else logprobs[at:],
        finish=batch.finish,
        stored=batch.stored,
    )
    return before, behind


async def gather(answering: Answering, choices: int) -> list[Choice]:
    """All choices, whole."""
    gathered: list[list[AnswerPiece]] = [[] for _ in range(choices)]
    async with aclosing(answering.pieces()) as pieces:
        async for index, piece in pieces:
            gathered[index].append(piece)
    return [_joined(pieces_of_one) for pieces_of_one in gathered]


def _joined(pieces: Sequence[AnswerPiece]) -> Choice:
    finish = pieces[-1].finish
    assert finish is not None
    return Choice(
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=_whole_calls(call for piece in pieces for call in piece.calls),
        logprobs=[token for piece in pieces for token in piece.logprobs],
        token_ids=[token for piece in pieces for token in piece.token_ids],
        finish=finish,
    )


def _whole_calls(parts: Iterable[CallPiece]) -> list[CallPiece]:
    calls: list[CallPiece] = []
    for part in parts:
        if part.index == len(calls):
            calls.append(part)
        else:
            begun = calls[part.index]
            calls[part.index] = msgspec.structs.replace(begun, arguments=begun.arguments + part.arguments)
    return calls


async def stream(
    exchange: Exchange, answering: Answering, shape: Shape, head: Head, headers: Callable[[], Sequence[Header]]
) -> None:
    """Send the answer as events.  ``headers`` are asked for when they are sent."""
    events = _Events(shape, head, answering.course)

    async def told() -> AsyncGenerator[bytes, None]:
        async with aclosing(answering.pieces()) as pieces:
            async for index, piece in pieces:
                many = len(piece.logprobs) > MANY_LOGPROBS
                yield await asyncio.to_thread(events.of, index, piece) if many else events.of(index, piece)

    def last() -> bytes:
        usage = sse.event(events.ids.usage(), shape.usage(head, answering.used())) if head.include_usage else b""
        return usage + sse.DONE

    await tell(exchange, told(), last, headers)


class _Events:
    """Turns pieces into events, in OpenAI's order, leaving out what the client has."""

    def __init__(self, shape: Shape, head: Head, course: Course) -> None:
        self.ids = EventIds(course.mark, course.after)
        self._shape = shape
        self._head = head
        self._places = dict(course.after.places)
        self._begun = set(self._places)
        self._first = not self._places

    def of(self, index: int, piece: AnswerPiece) -> bytes:
        """The events of one piece; none when it shows nothing yet."""
        place = self._places.get(index)
        if place is not None and _is_told(place, piece):
            return b"" if place.ended or piece.finish is None else self._end(index, piece.finish)
        data = b""
        if index not in self._begun:
            self._begun.add(index)
            data = self._begin(index)
        if piece.text or piece.reasoning or piece.calls or piece.logprobs or piece.token_ids:
            more = self._shape.delta(self._head, index, piece, first=self._first)
            self._first = False
            data += sse.event(self.ids.told(index, piece.tokens, last=piece.finish is not None), more)
        if piece.finish is not None:
            data += self._end(index, piece.finish)
        return data

    def _begin(self, index: int) -> bytes:
        begun = self._shape.begin(self._head, index, first=self._first)
        if begun is None:
            return b""
        self._first = False
        return sse.event(self.ids.begun(index), begun)

    def _end(self, index: int, finish: FinishReason) -> bytes:
        end = self._shape.end(self._head, index, finish, first=self._first)
        self._first = False
        return sse.event(self.ids.ended(index), end)


def _is_told(place: Place, piece: AnswerPiece) -> bool:
    """Has the client all of this piece but the word that it ends?  Raises RequestError for a place beyond the end."""
    if piece.finish is not None and piece.tokens < place.tokens:
        raise RequestError(
            f"The header Last-Event-ID names {place.tokens} tokens of an answer that has {piece.tokens}.",
            code="invalid_last_event_id",
        )
    if piece.finish is not None:
        return place.closed
    return place.closed or piece.tokens <= place.tokens
