"""``/v1/audio/transcriptions`` and ``/v1/audio/translations`` on the wire, as OpenAI writes them.

A segment is a window that was heard at once.
"""

from __future__ import annotations

import zlib
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

import msgspec

from penstock.api import sse
from penstock.api.errors import JSON_TYPE, Header
from penstock.api.http import HttpExchange
from penstock.api.idempotency import TokenStreamSource
from penstock.api.load_shedding import AdmittedRequest, LoadShedder
from penstock.api.openai.schema import SeedExtension, TokenUsage, encode
from penstock.api.sse import send_events
from penstock.errors import WorkerLost
from penstock.interfaces import OutputDelta, OutputDetokenizer, PreparedTranscription
from penstock.types import Qos, ValidRequest

TEXT_TYPE: Header = (b"content-type", b"text/plain; charset=utf-8")
VTT_TYPE: Header = (b"content-type", b"text/vtt; charset=utf-8")


class TranscriptSegment(msgspec.Struct, kw_only=True):
    """A window, and what was heard in it so far; times in seconds."""

    id: int
    begin: float
    end: float
    text: str = ""
    tokens: list[int] = []
    logprob: float = 0.0  # of all that were counted
    counted: int = 0


class Transcript:
    """What was written so far of one sound."""

    def __init__(self, listening: PreparedTranscription) -> None:
        self.listening = listening
        self.segments: list[TranscriptSegment] = []
        self.tokens = 0
        self.text = ""
        self._blank = ""  # white space that text may follow

    def add_segment(self, segment: TranscriptSegment) -> TranscriptSegment:
        """A window more."""
        self.segments.append(segment)
        return segment

    def append(self, segment: TranscriptSegment, piece: OutputDelta) -> str:
        """More of a window; what comes of it for the whole text, which neither begins nor ends with white space."""
        segment.text += piece.text
        segment.tokens += piece.token_ids
        self.tokens += len(piece.token_ids)
        for token in piece.logprobs:
            segment.logprob += token.logprob or 0.0
            segment.counted += 1
        written = (self._blank if self.text else "") + (piece.text if self.text else piece.text.lstrip())
        text = written.rstrip()
        if not text:
            self._blank = written
            return ""
        self._blank = written[len(text) :]
        self.text += text
        return text


def delta_event(text: str) -> bytes:
    """An event."""
    return encode({"type": "transcript.text.delta", "delta": text})


def done_event(told: Transcript) -> bytes:
    """The last event."""
    return encode({"type": "transcript.text.done", "text": told.text, **_more(told)})


def complete_transcript(told: Transcript) -> tuple[bytes, Header]:
    """The whole answer in the form that was asked for, and its type."""
    match told.listening.response_format:
        case "text":
            return f"{told.text}\n".encode(), TEXT_TYPE
        case "srt":
            return "".join(map(_srt, told.segments)).encode(), TEXT_TYPE
        case "vtt":
            return ("WEBVTT\n\n" + "".join(map(_vtt, told.segments))).encode(), VTT_TYPE
        case "verbose_json":
            return encode(_verbose(told)), JSON_TYPE
        case _:
            return encode({"text": told.text, **_more(told)}), JSON_TYPE


def _more(told: Transcript) -> dict[str, Any]:
    """What every object ends with."""
    usage = {"type": "duration", "seconds": round(told.listening.seconds, 3)}
    return {"usage": usage, "penstock": SeedExtension(told.listening.seed)}


def _verbose(told: Transcript) -> dict[str, Any]:
    listening = told.listening
    return {
        "task": listening.task,
        "language": listening.language or "en",
        "duration": round(listening.seconds, 3),
        "text": told.text,
        "segments": [_segment(own, listening.temperature) for own in told.segments],
        **_more(told),
    }


def _segment(own: TranscriptSegment, temperature: float) -> dict[str, Any]:
    raw = own.text.encode()
    return {
        "id": own.id,
        "seek": round(own.begin * 100),
        "start": round(own.begin, 3),
        "end": round(own.end, 3),
        "text": own.text,
        "tokens": own.tokens,
        "temperature": temperature,
        "avg_logprob": own.logprob / own.counted if own.counted else 0.0,
        "compression_ratio": len(raw) / len(zlib.compress(raw)),
    }


def _srt(own: TranscriptSegment) -> str:
    return f"{own.id + 1}\n{_time(own.begin, ',')} --> {_time(own.end, ',')}\n{own.text.strip()}\n\n"


def _vtt(own: TranscriptSegment) -> str:
    return f"{_time(own.begin, '.')} --> {_time(own.end, '.')}\n{own.text.strip()}\n\n"


def _time(seconds: float, point: str) -> str:
    """Hours, minutes, seconds, thousandths."""
    thousandths = round(seconds * 1000)
    minutes, left = divmod(thousandths, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{left // 1000:02}{point}{left % 1000:03}"


# MERGED: From a sound that is to be written down to an answer: its windows are heard one after another.
# MERGED:
# MERGED: Whatever ends an answer early closes the token stream it had open.  Knows nothing about forms or
# MERGED: files.


class TranscriptionResponse:
    """One answer of a model that hears."""

    def __init__(self, streams: TokenStreamSource, gate: LoadShedder) -> None:
        self._streams = streams
        self._gate = gate

    async def send(
        self, exchange: HttpExchange, listening: PreparedTranscription, claim: Qos, headers: Sequence[Header]
    ) -> None:
        """Hear all of it and tell it, at once or as it is written."""
        question = await listening.language_request()
        with self._gate.admit(exchange, claim, [listening.tokens]) as visit:
            if question is not None:
                listening.set_language(await self._one_token(question, visit))
            told = Transcript(listening)
            try:
                await self._tell(exchange, told, visit, headers)
            finally:
                visit.record_usage(TokenUsage.of(prompt=listening.tokens, completion=told.tokens, cached=0))

    async def _tell(
        self, exchange: HttpExchange, told: Transcript, visit: AdmittedRequest, headers: Sequence[Header]
    ) -> None:
        if told.listening.stream:
            await self._stream(exchange, told, visit, headers)
            return
        async with aclosing(self._pieces(told, visit)) as pieces:
            async for _ in pieces:
                pass
        body, kind = complete_transcript(told)
        await exchange.send_response(200, body, kind, *headers)

    async def _stream(
        self, exchange: HttpExchange, told: Transcript, visit: AdmittedRequest, headers: Sequence[Header]
    ) -> None:
        """As events."""

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing(self._pieces(told, visit)) as pieces:
                async for text in pieces:
                    yield sse.sse_event(f"0:{told.tokens}", delta_event(text))

        def last() -> bytes:
            return sse.sse_event("0:end", done_event(told)) + sse.DONE

        await send_events(exchange, events(), last, lambda: headers)

    async def _pieces(self, told: Transcript, visit: AdmittedRequest) -> AsyncGenerator[str, None]:
        """Text as it comes; ``told`` knows it all."""
        for index, (begin, end) in enumerate(told.listening.windows):
            request, text = await told.listening.window_request(index)
            segment = told.add_segment(TranscriptSegment(id=index, begin=begin, end=end))
            async with aclosing(self._window(request, text, visit)) as pieces:
                async for piece in pieces:
                    if more := told.append(segment, piece):
                        yield more
        visit.on_finished(0, told.tokens)  # only what is complete counts among those that were in time

    async def _window(
        self, request: ValidRequest, text: OutputDetokenizer, visit: AdmittedRequest
    ) -> AsyncGenerator[OutputDelta, None]:
        stream = self._streams.stream(request)
        try:
            async for batch in stream:
                visit.on_token(0)
                piece = text.push(batch)
                yield piece
                if piece.finish is not None:
                    return
        finally:
            await stream.aclose()
        raise WorkerLost("The answer ended before its end.")

    async def _one_token(self, request: ValidRequest, visit: AdmittedRequest) -> int:
        stream = self._streams.stream(request)
        try:
            async for batch in stream:
                visit.on_token(0)
                if batch.tokens:
                    return batch.tokens[0]
        finally:
            await stream.aclose()
        raise WorkerLost("The language was asked for and nothing came of it.")
