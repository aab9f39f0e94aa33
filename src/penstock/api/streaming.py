"""From prepared requests to a response: runs all choices at once, and gathers or streams them.

However a response ends, by a stop string, an error or a disconnect, every token stream that it had open is closed.
Text-only events are filled into a template (``TextEventTemplate``), which is learned from one event that the stream's
encoder wrote.  Knows nothing about JSON bodies or the fields of an API (``ResponseFormat`` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import msgspec

from penstock.api import sse
from penstock.api.errors import ErrorResponse
from penstock.api.http import BodyWriter
from penstock.api.idempotency import TokenStreamSource, UsageDedup
from penstock.api.load_shedding import AdmittedRequest
from penstock.api.response_format import (
    CompletedChoice,
    ResponseFormat,
    ResponseHead,
    StreamEncoder,
    StreamEvent,
    TextEventParts,
    TokenUsage,
    UsageCharge,
)
from penstock.api.sse import ChoicePosition, EventIds, EventSigner, EventStreamWriter, ResumePoint
from penstock.api.stream_polling import LoopTurns, SinkState, StreamPump, TextOnlyPath
from penstock.errors import RequestError
from penstock.interfaces import OutputDelta, OutputDetokenizer, PreparedGeneration, TokenStream, ToolCallDelta
from penstock.types import TokenBatch


@dataclass(frozen=True, slots=True)
class TextOnlyChoice:
    """The text of one choice, and the counter of its tokens."""

    index: int
    text: OutputDetokenizer
    tokens: list[int]  # of all choices


class TextEventTemplate:
    """Writes the events of one choice while they are text alone."""

    __slots__ = ("_behind", "_escaped", "_head", "_index", "_tokens", "_write")

    def __init__(self, text: TextOnlyChoice, parts: TextEventParts, write: Callable[[bytes], bool]) -> None:
        """``write``: as ``BodyWriter``'s."""
        self._escaped = text.text.escaped
        self._index = text.index
        self._tokens = text.tokens
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
        sent = self._tokens[self._index] = self._tokens[self._index] + len(tokens)
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


class ResponseStream:
    """One response: its choices and their usage."""

    __slots__ = ("_cached", "_prepared", "_served", "_stored", "_streams", "_tokens", "_visit", "resume")

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
        self._cached = [0] * len(prepared.requests)
        self._tokens = [0] * len(prepared.requests)
        self._stored = [0] * len(prepared.requests)
        self._served = [False] * len(prepared.requests)  # choices that have a token of a worker

    def usage(self) -> TokenUsage:
        """The usage so far; the choices of one prompt share its cached tokens."""
        return TokenUsage.of(
            prompt=self._prepared.prompt_tokens,
            completion=sum(self._tokens),
            cached=sum(self._cached[:: self._prepared.reply.n]),
            stored=sum(self._stored),
            charge=self.resume.charge,
        )

    def record_usage(self) -> TokenUsage:
        """Records the usage that no other request recorded, at the end of the response; nothing without a token."""
        used = self.usage()
        if self._visit.has_started:
            counted = list(zip(self._tokens, self._stored, strict=True))
            self._visit.record_usage(
                used, rated=self.resume.rated.new_usage(counted), metered=self.resume.metered.new_usage(counted)
            )
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
        return self._served[index] or not self.resume.computed

    def text_only_choice(self, index: int) -> TextOnlyChoice | None:
        """The text-only path of a choice, while only its tokens must be counted; else None."""
        if not self.has_computed_token(index) or self.resume.resume_point.positions or self.resume.signer is not None:
            return None
        return TextOnlyChoice(index, self._prepared.answers[index], self._tokens)

    def _parts(self, index: int, came: TokenBatch) -> Sequence[TokenBatch]:
        if not self._served[index]:
            self._served[index] = computed = self.resume.computed and not came.stored
            self._visit.on_token(index, computed=computed)
        self._cached[index] += came.cached_tokens
        known = self.resume.resume_point.positions.get(index)
        return _split_batch(came, known.tokens - self._tokens[index]) if known else (came,)

    def _counted(self, index: int, batch: TokenBatch, came: TokenBatch, piece: OutputDelta) -> bool:
        """Counts ``piece``.  Returns whether it is the choice's last."""
        self._tokens[index] = piece.tokens
        if batch.stored:
            self._stored[index] = piece.tokens
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
        calls=_whole_calls(call for piece in pieces for call in piece.calls),
        logprobs=[token for piece in pieces for token in piece.logprobs],
        token_ids=[token for piece in pieces for token in piece.token_ids],
        finish=finish,
    )


def _whole_calls(parts: Iterable[ToolCallDelta]) -> list[ToolCallDelta]:
    calls: list[ToolCallDelta] = []
    for part in parts:
        if part.index == len(calls):
            calls.append(part)
        else:
            begun = calls[part.index]
            calls[part.index] = msgspec.structs.replace(begun, arguments=begun.arguments + part.arguments)
    return calls


async def stream_events(
    response: ResponseStream,
    turns: LoopTurns,
    out: EventStreamWriter,
    shape: ResponseFormat,
    head: ResponseHead,
) -> None:
    """Sends the response as events."""
    encoder = shape.stream(head, response.usage)
    events = _EventWriter(encoder, response.resume)
    feeds = StreamPump(turns, _StreamSink(response, events, out))
    out.wake = feeds.wake
    try:
        await feeds.run(response.token_streams())
        end = events.end()
        await shape.persist()
    except Exception as error:
        if not out.started:
            raise
        await out.send_error(error, events.error)
        return
    await out.finish(end + shape.terminator)


class _EventWriter:
    """Frames what an encoder writes, in order, without what the client has already.

    Of the events of one delta only the last has an id: behind the others nobody can resume.
    """

    __slots__ = ("_begun", "_encoder", "_places", "ids")

    def __init__(self, encoder: StreamEncoder, course: ResumeState) -> None:
        self.ids = EventIds(course.signer, course.resume_point)
        self._encoder = encoder
        self._places = dict(course.resume_point.positions)
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
                data = _framed(begun, lambda: self.ids.start_id(index))
        if piece.text or piece.reasoning or piece.calls or piece.logprobs or piece.token_ids:
            more = encoder.delta(index, piece)
            if not is_sent:
                data += _framed(more, lambda: self.ids.delta_id(index, piece.tokens, last=piece.finish is not None))
        if piece.finish is not None:
            end = encoder.finish(index, piece)
            if place is None or not place.ended:
                data += _framed(end, lambda: self.ids.finish_id(index))
        return data

    def end(self) -> bytes:
        """The events behind all choices."""
        return _framed(self._encoder.end(), self.ids.usage_id)

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
