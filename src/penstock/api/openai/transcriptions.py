"""``/v1/audio/transcriptions`` and ``/v1/audio/translations``: runs one window after another, writes OpenAI's formats.

A segment is one window.  However a response ends, the token stream that it had open is closed.
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
from penstock.api.response_format import SeedExtension, TokenUsage, encode
from penstock.api.sse import send_events
from penstock.errors import WorkerLost
from penstock.interfaces import OutputDelta, OutputDetokenizer, PreparedTranscription
from penstock.types import Qos, ValidRequest

TEXT_TYPE: Header = (b"content-type", b"text/plain; charset=utf-8")
VTT_TYPE: Header = (b"content-type", b"text/vtt; charset=utf-8")


class TranscriptSegment(msgspec.Struct, kw_only=True):
    """A window and its text so far; times in seconds."""

    id: int
    begin: float
    end: float
    text: str = ""
    tokens: list[int] = []
    logprob: float = 0.0  # of all that were counted
    counted: int = 0


class Transcript:
    """The text of one recording so far."""

    def __init__(self, source: PreparedTranscription) -> None:
        self.listening = source
        self.segments: list[TranscriptSegment] = []
        self.tokens = 0
        self.text = ""
        self._blank = ""  # white space that text may follow

    def add_segment(self, segment: TranscriptSegment) -> TranscriptSegment:
        """A window more."""
        self.segments.append(segment)
        return segment

    def append(self, segment: TranscriptSegment, piece: OutputDelta) -> str:
        """Adds to a window.  Returns what it adds to the whole text, which has no white space at its ends."""
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


def done_event(transcript: Transcript) -> bytes:
    """The last event."""
    return encode({"type": "transcript.text.done", "text": transcript.text, **_more(transcript)})


def complete_transcript(transcript: Transcript) -> tuple[bytes, Header]:
    """The whole response in the requested format, and its type."""
    match transcript.listening.response_format:
        case "text":
            return f"{transcript.text}\n".encode(), TEXT_TYPE
        case "srt":
            return "".join(map(_srt, transcript.segments)).encode(), TEXT_TYPE
        case "vtt":
            return ("WEBVTT\n\n" + "".join(map(_vtt, transcript.segments))).encode(), VTT_TYPE
        case "verbose_json":
            return encode(_verbose(transcript)), JSON_TYPE
        case _:
            return encode({"text": transcript.text, **_more(transcript)}), JSON_TYPE


def _more(transcript: Transcript) -> dict[str, Any]:
    """What every object ends with."""
    usage = {"type": "duration", "seconds": round(transcript.listening.seconds, 3)}
    return {"usage": usage, "penstock": SeedExtension(transcript.listening.seed)}


def _verbose(transcript: Transcript) -> dict[str, Any]:
    source = transcript.listening
    return {
        "task": source.task,
        "language": source.language or "en",
        "duration": round(source.seconds, 3),
        "text": transcript.text,
        "segments": [_segment(own, source.temperature) for own in transcript.segments],
        **_more(transcript),
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


class TranscriptionResponse:
    """The response to one transcription."""

    def __init__(self, streams: TokenStreamSource, gate: LoadShedder) -> None:
        self._streams = streams
        self._gate = gate

    async def send(
        self, exchange: HttpExchange, source: PreparedTranscription, qos: Qos, headers: Sequence[Header]
    ) -> None:
        """Transcribes the recording and sends the text, streamed or whole."""
        question = await source.language_request()
        with await self._gate.admit(exchange, qos, [source.tokens]) as visit:
            if question is not None:
                source.set_language(await self._one_token(question, visit))
            transcript = Transcript(source)
            try:
                await self._tell(exchange, transcript, visit, headers)
            finally:
                visit.record_usage(TokenUsage.of(prompt=source.tokens, completion=transcript.tokens, cached=0))

    async def _tell(
        self, exchange: HttpExchange, transcript: Transcript, visit: AdmittedRequest, headers: Sequence[Header]
    ) -> None:
        if transcript.listening.stream:
            await self._stream(exchange, transcript, visit, headers)
            return
        async with aclosing(self._pieces(transcript, visit)) as pieces:
            async for _ in pieces:
                pass
        body, kind = complete_transcript(transcript)
        await exchange.send_response(200, body, kind, *headers)

    async def _stream(
        self, exchange: HttpExchange, transcript: Transcript, visit: AdmittedRequest, headers: Sequence[Header]
    ) -> None:
        """As events."""

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing(self._pieces(transcript, visit)) as pieces:
                async for text in pieces:
                    yield sse.sse_event(f"0:{transcript.tokens}", delta_event(text))

        def last() -> bytes:
            return sse.sse_event("0:end", done_event(transcript)) + sse.DONE

        await send_events(exchange, events(), last, lambda: headers)

    async def _pieces(self, transcript: Transcript, visit: AdmittedRequest) -> AsyncGenerator[str, None]:
        """Text as it comes, which ``transcript`` collects."""
        for index, (begin, end) in enumerate(transcript.listening.windows):
            request, text = await transcript.listening.window_request(index)
            segment = transcript.add_segment(TranscriptSegment(id=index, begin=begin, end=end))
            async with aclosing(self._window(request, text, visit)) as pieces:
                async for piece in pieces:
                    if more := transcript.append(segment, piece):
                        yield more
        visit.on_finished(0, transcript.tokens)  # only what is complete counts among those that were in time

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
