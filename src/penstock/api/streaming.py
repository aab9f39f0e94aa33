"""From prepared requests to a response: runs all choices at once, and gathers or streams them.

However a response ends, by a stop string, an error or a disconnect, every token stream that it had open is closed.
Text-only events are filled into a template (``TextEventTemplate``), which is learned from one event that the stream's
encoder wrote.  Knows nothing about JSON bodies or the fields of an API (``ResponseFormat`` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import msgspec

from penstock.api import sse
from penstock.api.errors import ErrorResponse
from penstock.api.http import BodyWriter
from penstock.api.idempotency import CachedStream, TokenStreamSource, UsageDedup
from penstock.api.load_shedding import AdmittedRequest
from penstock.api.response_format import (
    CompletedChoice,
    ResponseFormat,
    ResponseHead,
    StreamEvent,
    TextEventParts,
    TokenUsage,
    UsageCharge,
    whole_calls,
)
from penstock.api.sse import ChoicePosition, EventIds, EventSigner, EventStreamWriter, ResumePoint
from penstock.api.stream_polling import LoopTurns, SinkState, StreamPump, TextOnlyPath
from penstock.errors import RequestError
from penstock.interfaces import OutputDelta, OutputDetokenizer, PreparedGeneration, TokenStream
from penstock.types import TokenBatch


class ChoiceCounts:
    """What is counted of one choice."""

    __slots__ = ("cached", "reasoning", "served", "stored", "tokens")

    def __init__(self) -> None:
        self.cached = self.tokens = self.reasoning = self.stored = 0
        self.served = False  # it has a token of a worker


@dataclass(frozen=True, slots=True)
class TextOnlyChoice:
    """The text of one choice, and the counter of its tokens."""

    index: int
    text: OutputDetokenizer
    counts: ChoiceCounts


class TextEventTemplate:
    """Writes the events of one choice while they are text alone."""

    __slots__ = ("_behind", "_counts", "_escaped", "_head", "_index", "_write")

    def __init__(self, text: TextOnlyChoice, parts: TextEventParts, write: Callable[[bytes], bool]) -> None:
        """``write``: as ``BodyWriter``'s."""
        self._escaped = text.text.escaped
        self._index = text.index
        self._counts = text.counts
        name = b"event: %b\n" % parts.name if parts.name else b""
        self._head = b"%bdata: %b" % (name, parts.before)
        self._behind = parts.behind
        self._write = write

    def write(self, tokens: tuple[int, ...]) -> bool | None:
        """Write the event of these tokens, which do not end the answer; nothing if they show nothing yet.

        Returns what writing it did.  None: they are not taken, as they are more than text.
        """
        text = self._escaped(tokens)
        if text is None:
            return None
        counts = self._counts
        counts.tokens = sent = counts.tokens + len(tokens)
        if not text:
            return False
        return self._write(b"id: %d:%d\n%b%b%b\n\n" % (self._index, sent, self._head, text, self._behind))


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumeState:
    """What the client has already, the signer of event ids, and how the response is billed."""

    resume_point: ResumePoint = field(default_factory=ResumePoint)
    signer: EventSigner | None = None
    charge: UsageCharge | None = None
    computed: bool = True  # for this HTTP request; what another began or has left behind is not
    rated: UsageDedup = field(default_factory=UsageDedup)  # among its tenant's rates, of all that was computed
    metered: UsageDedup = field(default_factory=UsageDedup)  # for its tenant, however often it was computed
    shared: CachedStream | None = None  # the streams, of a request with a key: other gateways may have it, too


class ResponseStream:
    """One response: its choices and their usage."""

    __slots__ = ("_choices", "_prepared", "_streams", "_visit", "resume")

    def __init__(
        self,
        streams: TokenStreamSource,
        prepared: PreparedGeneration,
        visit: AdmittedRequest,
        course: ResumeState | None = None,
    ) -> None:
        self._streams = streams
        self._prepared = prepared
        self._visit = visit
        self.resume = course or ResumeState()
        self._choices = tuple([ChoiceCounts() for _ in prepared.requests])

    def usage(self) -> TokenUsage:
        """The usage so far; the choices of one prompt share its cached tokens."""
        return TokenUsage.of(
            prompt=self._prepared.prompt_tokens,
            completion=sum(choice.tokens for choice in self._choices),
            cached=sum(choice.cached for choice in self._choices[:: self._prepared.reply.n]),
            reasoning=sum(choice.reasoning for choice in self._choices),
            stored=sum(choice.stored for choice in self._choices),
            charge=self.resume.charge,
        )

    def record_usage(self) -> TokenUsage:
        """Records the usage that no other request recorded, at the end of the response; nothing without a token."""
        used = self.usage()
        if self._visit.has_started:
            counted = [(choice.tokens, choice.stored) for choice in self._choices]
            computed = self.resume.rated.new_usage(counted)
            self._visit.record_rates(computed)
            uncounted, bill = self.resume.metered.take_uncounted(counted), partial(self._visit.bill, used)
            if self.resume.shared is None:
                bill(uncounted.beyond())
            else:
                prompts = [len(request.prompt) for request in self._prepared.requests]
                self.resume.shared.settle(uncounted, bill, computed, prompts)
        return used

    def token_streams(self) -> list[TokenStream]:
        """The token stream of each choice, to be started and closed by its consumer."""
        return [self._streams.stream(request) for request in self._prepared.requests]

    def decode(self, index: int, came: TokenBatch) -> list[OutputDelta]:
        """The deltas of these tokens; a choice's last has ``finish``.  One ends where the client's part does."""
        text, pieces = self._prepared.answers[index], []
        for batch in self._parts(index, came):
            pieces.append(text.push(batch))
            if self._counted(index, batch, came, pieces[-1]):
                break
        return pieces

    async def decode_in_thread(self, index: int, came: TokenBatch) -> list[OutputDelta]:
        """As ``decode``, in a thread, for more than the event loop has time for."""
        text, pieces = self._prepared.answers[index], []
        for batch in self._parts(index, came):
            pieces.append(await asyncio.to_thread(text.push, batch))
            if self._counted(index, batch, came, pieces[-1]):
                break
        return pieces

    def has_computed_token(self, index: int) -> bool:
        """Whether a worker has sent a token of this choice, or never will."""
        return self._choices[index].served or not self.resume.computed

    def text_only_choice(self, index: int) -> TextOnlyChoice | None:
        """The text-only path of a choice, while only its tokens must be counted; else None."""
        if not self.has_computed_token(index) or self.resume.resume_point.positions or self.resume.signer is not None:
            return None
        return TextOnlyChoice(index, self._prepared.answers[index], self._choices[index])

    def _parts(self, index: int, came: TokenBatch) -> Sequence[TokenBatch]:
        choice = self._choices[index]
        if not choice.served:
            choice.served = computed = self.resume.computed and not (came.stored or came.resumed)
            self._visit.on_token(index, computed=computed)
        choice.cached += came.cached_tokens
        known = self.resume.resume_point.positions.get(index)
        return _split_batch(came, known.tokens - choice.tokens) if known else (came,)

    def _counted(self, index: int, batch: TokenBatch, came: TokenBatch, piece: OutputDelta) -> bool:
        """Counts ``piece``.  Returns whether it is the choice's last."""
        choice = self._choices[index]
        choice.tokens = piece.tokens
        choice.reasoning = piece.reasoning_tokens
        if batch.stored:
            choice.stored = piece.tokens
        if piece.finish is None:
            return False
        if came.finish is None:
            self._streams.mark_stopped(self._prepared.requests[index].id)
        self._visit.on_finished(index, piece.tokens)
        return True


MANY_LOGPROBS = 128
"""Logprobs of more tokens in one delta are encoded in a thread."""


class _GatherSink:
    """``TokenSink`` of an answer that is counted whole."""

    pending = False

    def __init__(self, response: ResponseStream, choices: int) -> None:
        self.pieces: list[list[OutputDelta]] = [[] for _ in range(choices)]
        self._answering = response

    def on_writable(self, ready: Callable[[], None]) -> None:
        ready()

    def text_only(self, index: int) -> None:
        return None

    def is_slow(self, batch: TokenBatch) -> bool:
        return _is_long(batch)

    def push(self, index: int, batch: TokenBatch) -> SinkState:
        return self._keep(index, self._answering.decode(index, batch))

    async def push_slowly(self, index: int, batch: TokenBatch) -> SinkState:
        return self._keep(index, await self._answering.decode_in_thread(index, batch))

    def _keep(self, index: int, pieces: Sequence[OutputDelta]) -> SinkState:
        self.pieces[index] += pieces
        return SinkState.READY if pieces[-1].finish is None else SinkState.FINISHED

    async def flush(self) -> None:
        pass

    async def finish(self) -> None:
        pass

    async def fail(self, error: Exception) -> None:
        raise error


class _StreamSink:
    """``TokenSink`` of one that is counted as it comes."""

    __slots__ = ("_answering", "_events", "_out")

    def __init__(self, response: ResponseStream, events: _EventWriter, out: EventStreamWriter) -> None:
        self._answering = response
        self._events = events
        self._out = out

    @property
    def pending(self) -> bool:
        return self._out.pending

    def on_writable(self, ready: Callable[[], None]) -> None:
        self._out.on_writable(ready)

    def is_slow(self, batch: TokenBatch) -> bool:
        return _is_long(batch)

    def push(self, index: int, batch: TokenBatch) -> SinkState:
        pieces = self._answering.decode(index, batch)
        return self._send(b"".join([self._events.of(index, piece) for piece in pieces]), pieces[-1])

    def text_only(self, index: int) -> TextOnlyPath | None:
        text, writer = self._answering.text_only_choice(index), self._out.writer
        if text is None or writer is None:
            return None
        made = self._events.text_only(index, text, writer)
        return None if made is None else made.write

    async def push_slowly(self, index: int, batch: TokenBatch) -> SinkState:
        pieces = await self._answering.decode_in_thread(index, batch)
        events = [await asyncio.to_thread(self._events.of, index, piece) for piece in pieces]
        return self._send(b"".join(events), pieces[-1])

    def _send(self, data: bytes, last: OutputDelta) -> SinkState:
        paused = bool(data) and self._out.write(data)
        if last.finish is not None:
            return SinkState.FINISHED
        return SinkState.PAUSED if paused else SinkState.READY

    async def flush(self) -> None:
        await self._out.flush()

    async def finish(self) -> None:
        try:
            end = await self._events.end()
        except Exception as error:  # noqa: BLE001 - the client is sent it
            await self.fail(error)
        else:
            await self._out.finish(end)

    async def fail(self, error: Exception) -> None:
        if not self._out.started:
            raise error
        await self._out.send_error(error, self._events.error)


def _is_long(batch: TokenBatch) -> bool:
    return batch.prompt_logprobs is not None and len(batch.prompt_logprobs) > MANY_LOGPROBS


async def complete_body(
    shape: ResponseFormat, head: ResponseHead, choices: Sequence[CompletedChoice], usage: TokenUsage
) -> bytes:
    """The body of a response that is not streamed."""
    if sum(len(choice.logprobs) for choice in choices) <= MANY_LOGPROBS:
        return shape.complete(head, choices, usage)
    return await asyncio.to_thread(shape.complete, head, choices, usage)


def _split_batch(batch: TokenBatch, at: int) -> tuple[TokenBatch, ...]:
    """The batch split after ``at`` tokens, if it has more or ends there."""
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
        resumed=batch.resumed,
    )
    return before, behind


async def gather_choices(response: ResponseStream, turns: LoopTurns, choices: int) -> list[CompletedChoice]:
    """All choices, complete."""
    gathered = _GatherSink(response, choices)
    await StreamPump(turns, gathered).run(response.token_streams())
    return [_joined(pieces_of_one) for pieces_of_one in gathered.pieces]


def _joined(pieces: Sequence[OutputDelta]) -> CompletedChoice:
    finish = pieces[-1].finish
    assert finish is not None
    return CompletedChoice(
        text="".join(piece.text for piece in pieces),
        reasoning="".join(piece.reasoning for piece in pieces),
        calls=whole_calls(call for piece in pieces for call in piece.calls),
        logprobs=[token for piece in pieces for token in piece.logprobs],
        token_ids=[token for piece in pieces for token in piece.token_ids],
        finish=finish,
        stop_text=pieces[-1].stop_text,
        deltas=pieces,
    )


def stream_events(
    response: ResponseStream, turns: LoopTurns, out: EventStreamWriter, shape: ResponseFormat, head: ResponseHead
) -> Awaitable[None]:
    """Sends the response as events.  No coroutine of its own: it would last as long as the response."""
    events = _EventWriter(shape, head, response)
    feeds = StreamPump(turns, _StreamSink(response, events, out))
    out.wake = feeds.wake
    return feeds.run(response.token_streams())


class _EventWriter:
    """Frames what an encoder writes, in order, without what the client has already.

    Of the events of one delta only the last has an id: behind the others nobody can resume.
    """

    __slots__ = ("_begun", "_encoder", "_format", "_ids", "_places")

    def __init__(self, form: ResponseFormat, head: ResponseHead, response: ResponseStream) -> None:
        resumed = response.resume.resume_point
        self._ids = EventIds(response.resume.signer, resumed)
        self._format = form
        self._encoder = form.stream(head, response.usage)
        self._places = resumed.positions
        self._begun: tuple[int, ...] = ()

    def of(self, index: int, piece: OutputDelta) -> bytes:
        """The events of one delta; empty if it shows nothing yet."""
        encoder, place = self._encoder, self._places.get(index)
        is_sent = place is not None and _is_already_sent(place, piece)
        data = b""
        if index not in self._begun:
            self._begun += (index,)
            begun = encoder.begin(index)
            if place is None:
                data = _framed(begun, lambda: self._ids.start_id(index))
        if piece.text or piece.reasoning or piece.calls or piece.logprobs or piece.token_ids:
            more = encoder.delta(index, piece)
            if not is_sent:
                data += _framed(more, lambda: self._ids.delta_id(index, piece.tokens, last=piece.finish is not None))
        if piece.finish is not None:
            end = encoder.finish(index, piece)
            if place is None or not place.ended:
                data += _framed(end, lambda: self._ids.finish_id(index))
        return data

    async def end(self) -> bytes:
        """The events behind all choices, once the response is kept where it must be."""
        end = _framed(self._encoder.end(), self._ids.usage_id)
        await self._format.persist()
        return end + self._format.terminator

    def error(self, error: ErrorResponse) -> bytes:
        """The last event of a stream that breaks off.  It has no id, so the client's last id stays valid."""
        return _framed((self._encoder.error(error),), None)

    def text_only(self, index: int, text: TextOnlyChoice, writer: BodyWriter) -> TextEventTemplate | None:
        """The template of this choice's events, while they are only text."""
        parts = self._encoder.text_parts(index) if index in self._begun else None
        return None if parts is None else TextEventTemplate(text, parts, writer.write)


def _framed(events: Sequence[StreamEvent], identity: Callable[[], str] | None) -> bytes:
    """The events as they are sent, of which the last has an id."""
    if not events:
        return b""
    framed = [sse.sse_event_without_id(event.data, event.name) for event in events[: -1 if identity else None]]
    if identity is not None:
        framed.append(sse.sse_event(identity(), events[-1].data, events[-1].name))
    return b"".join(framed)


def _is_already_sent(place: ChoicePosition, piece: OutputDelta) -> bool:
    """Whether the client has all of this delta but its finish.  Raises RequestError for a position beyond the end."""
    if piece.finish is not None and piece.tokens < place.tokens:
        raise RequestError(
            f"The header Last-Event-ID names {place.tokens} tokens of an answer that has {piece.tokens}.",
            code="invalid_last_event_id",
        )
    if piece.finish is not None:
        return place.flushed
    return place.flushed or piece.tokens <= place.tokens
