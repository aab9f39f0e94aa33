"""``/v1/audio/transcriptions`` and ``/v1/audio/translations`` on the wire, as OpenAI writes them.

A segment is a window that was heard at once.
"""

from __future__ import annotations

import zlib
from typing import Any

import msgspec

from penstock.edge.errors import JSON_TYPE, Header
from penstock.edge.openai_shapes import Seed, encode
from penstock.wire.ports import AnswerPiece, Listening

TEXT_TYPE: Header = (b"content-type", b"text/plain; charset=utf-8")
VTT_TYPE: Header = (b"content-type", b"text/vtt; charset=utf-8")


class Segment(msgspec.Struct, kw_only=True):
    """A window, and what was heard in it so far; times in seconds."""

    id: int
    begin: float
    end: float
    text: str = ""
    tokens: list[int] = []
    logprob: float = 0.0  # of all that were counted
    counted: int = 0


class Told:
    """What was written so far of one sound."""

    def __init__(self, listening: Listening) -> None:
        self.listening = listening
        self.segments: list[Segment] = []
        self.tokens = 0
        self.text = ""
        self._blank = ""  # white space that text may follow

    def begin(self, segment: Segment) -> Segment:
        """A window more."""
        self.segments.append(segment)
        return segment

    def add(self, segment: Segment, piece: AnswerPiece) -> str:
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


def delta(text: str) -> bytes:
    """An event."""
    return encode({"type": "transcript.text.delta", "delta": text})


def done(told: Told) -> bytes:
    """The last event."""
    return encode({"type": "transcript.text.done", "text": told.text, **_more(told)})


def whole(told: Told) -> tuple[bytes, Header]:
    """The whole answer in the form that was asked for, and its type."""
    match told.listening.form:
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


def _more(told: Told) -> dict[str, Any]:
    """What every object ends with."""
    usage = {"type": "duration", "seconds": round(told.listening.seconds, 3)}
    return {"usage": usage, "penstock": Seed(told.listening.seed)}


def _verbose(told: Told) -> dict[str, Any]:
    listening = told.listening
    return {
        "task": listening.task,
        "language": listening.language or "en",
        "duration": round(listening.seconds, 3),
        "text": told.text,
        "segments": [_segment(own, listening.temperature) for own in told.segments],
        **_more(told),
    }


def _segment(own: Segment, temperature: float) -> dict[str, Any]:
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


def _srt(own: Segment) -> str:
    return f"{own.id + 1}\n{_time(own.begin, ',')} --> {_time(own.end, ',')}\n{own.text.strip()}\n\n"


def _vtt(own: Segment) -> str:
    return f"{_time(own.begin, '.')} --> {_time(own.end, '.')}\n{own.text.strip()}\n\n"


def _time(seconds: float, point: str) -> str:
    """Hours, minutes, seconds, thousandths."""
    thousandths = round(seconds * 1000)
    minutes, left = divmod(thousandths, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{left // 1000:02}{point}{left % 1000:03}"
