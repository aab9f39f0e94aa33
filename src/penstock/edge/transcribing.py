"""From a sound that is to be written down to an answer: its windows are heard one after another.

Whatever ends an answer early closes the token stream it had open.  Knows nothing about forms or files.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from penstock.edge import sse
from penstock.edge.errors import Header
from penstock.edge.event_stream import tell
from penstock.edge.exchange import Exchange
from penstock.edge.gate import Gate, Visit
from penstock.edge.kept import Answers
from penstock.edge.openai_shapes import Usage
from penstock.edge.transcript_shapes import Segment, Told, delta, done, whole
from penstock.errors import WorkerLost
from penstock.types import Qos, ValidRequest
from penstock.wire.ports import AnswerPiece, AnswerText, Listening


class Transcribing:
    """One answer of a model that hears."""

    def __init__(self, streams: Answers, gate: Gate) -> None:
        self._streams = streams
        self._gate = gate

    async def answer(self, exchange: Exchange, listening: Listening, claim: Qos, headers: Sequence[Header]) -> None:
        """Hear all of it and tell it, at once or as it is written."""
        question = await listening.asks_language()
        with self._gate.enter(exchange, claim, [listening.tokens]) as visit:
            if question is not None:
                listening.tell_language(await self._one_token(question, visit))
            told = Told(listening)
            try:
                await self._tell(exchange, told, visit, headers)
            finally:
                visit.used(Usage.of(prompt=listening.tokens, completion=told.tokens, cached=0))

    async def _tell(self, exchange: Exchange, told: Told, visit: Visit, headers: Sequence[Header]) -> None:
        if told.listening.stream:
            await self._stream(exchange, told, visit, headers)
            return
        async with aclosing(self._pieces(told, visit)) as pieces:
            async for _ in pieces:
                pass
        body, kind = whole(told)
        await exchange.reply(200, body, kind, *headers)

    async def _stream(self, exchange: Exchange, told: Told, visit: Visit, headers: Sequence[Header]) -> None:
        """As events."""

        async def events() -> AsyncGenerator[bytes, None]:
            async with aclosing(self._pieces(told, visit)) as pieces:
                async for text in pieces:
                    yield sse.event(f"0:{told.tokens}", delta(text))

        def last() -> bytes:
            return sse.event("0:end", done(told)) + sse.DONE

        await tell(exchange, events(), last, lambda: headers)

    async def _pieces(self, told: Told, visit: Visit) -> AsyncGenerator[str, None]:
        """Text as it comes; ``told`` knows it all."""
        for index, (begin, end) in enumerate(told.listening.windows):
            request, text = await told.listening.window(index)
            segment = told.begin(Segment(id=index, begin=begin, end=end))
            async with aclosing(self._window(request, text, visit)) as pieces:
                async for piece in pieces:
                    if more := told.add(segment, piece):
                        yield more
        visit.ended(0, told.tokens)  # only what is complete counts among those that were in time

    async def _window(self, request: ValidRequest, text: AnswerText, visit: Visit) -> AsyncGenerator[AnswerPiece, None]:
        stream = self._streams.stream(request)
        try:
            async for batch in stream:
                visit.started(0)
                piece = text.push(batch)
                yield piece
                if piece.finish is not None:
                    return
        finally:
            await stream.aclose()
        raise WorkerLost("The answer ended before its end.")

    async def _one_token(self, request: ValidRequest, visit: Visit) -> int:
        stream = self._streams.stream(request)
        try:
            async for batch in stream:
                visit.started(0)
                if batch.tokens:
                    return batch.tokens[0]
        finally:
            await stream.aclose()
        raise WorkerLost("The language was asked for and nothing came of it.")
