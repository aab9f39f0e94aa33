"""From prepared requests to an answer: run all choices at once, gather them or stream them as they come.

Whatever ends an answer early, be it a stop string, an error or the client's leaving, closes every token stream it had
open.  Knows nothing about JSON bodies or the words of an API (``Shape`` does).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing

import msgspec

from penstock.edge import sse
from penstock.edge.admission import Permit
from penstock.edge.errors import Header, noted
from penstock.edge.exchange import Exchange
from penstock.edge.openai_shapes import Choice, Head, Shape, Usage
from penstock.errors import WorkerLost
from penstock.wire.ports import AnswerPiece, CallPiece, Prepared, TokenStreams

_AHEAD = 4
"""Pieces of all choices that may wait for a client that reads slowly; the rest waits in the token streams."""


class Answering:
    """One answer: its choices, and what they have used."""

    def __init__(self, streams: TokenStreams, prepared: Prepared, permit: Permit) -> None:
        self._streams = streams
        self._prepared = prepared
        self._permit = permit
        self._cached = [0] * len(prepared.requests)
        self._tokens = [0] * len(prepared.requests)

    def used(self) -> Usage:
        """So far; the choices of one prompt share what was cached of it."""
        return Usage.of(
            prompt=self._prepared.prompt_tokens,
            completion=sum(self._tokens),
            cached=sum(self._cached[:: self._prepared.reply.n]),
        )

    async def choice(self, index: int) -> AsyncGenerator[AnswerPiece, None]:
        """The pieces of one choice; the last has ``finish``."""
        request, text = self._prepared.requests[index], self._prepared.answers[index]
        stream = self._streams.stream(request)
        try:
            first = True
            async for batch in stream:
                if first:
                    self._permit.started(index)
                    self._cached[index] = batch.cached_tokens
                    first = False
                piece = text.push(batch)
                self._tokens[index] = piece.tokens
                if piece.finish is not None and batch.finish is None:
                    self._streams.stopped(request.id)
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
    """Send the answer as events.  ``headers`` are asked for when they are sent.

    The status line waits for the first piece, so that an error before it has a status of its own; one after it is an
    event, and the end of the stream.
    """
    events = _Events(shape, head)
    out = _Out(exchange, headers)
    try:
        async with aclosing(answering.pieces()) as pieces:
            async for index, piece in pieces:
                data = events.of(index, piece)
                if data:
                    await out.send(data)
    except Exception as error:
        if not out.started:
            raise
        await out.finish(sse.event("error", noted(error).body))
        return
    last = sse.event("usage", shape.usage(head, answering.used())) if head.include_usage else b""
    await out.finish(last + sse.DONE)


class _Events:
    """Turns pieces into events, in OpenAI's order."""

    def __init__(self, shape: Shape, head: Head) -> None:
        self._shape = shape
        self._head = head
        self._begun: set[int] = set()
        self._first = True

    def of(self, index: int, piece: AnswerPiece) -> bytes:
        """The events of one piece; none when it shows nothing yet."""
        data = b""
        if index not in self._begun:
            self._begun.add(index)
            data = self._begin(index)
        if piece.text or piece.reasoning or piece.calls or piece.logprobs or piece.token_ids:
            more = self._shape.delta(self._head, index, piece, first=self._first)
            self._first = False
            data += sse.event(f"{index}:{piece.tokens}", more)
        if piece.finish is not None:
            data += sse.event(f"{index}:end", self._shape.end(self._head, index, piece.finish, first=self._first))
            self._first = False
        return data

    def _begin(self, index: int) -> bytes:
        begun = self._shape.begin(self._head, index, first=self._first)
        if begun is None:
            return b""
        self._first = False
        return sse.event(f"{index}:0", begun)


class _Out:
    """Where events go: straight out, or, for a client that knows no chunks, out at the end in one piece."""

    def __init__(self, exchange: Exchange, headers: Callable[[], Sequence[Header]]) -> None:
        self._exchange = exchange
        self._headers = headers
        self._kept: list[bytes] | None = None if exchange.chunked else []
        self.started = False

    async def send(self, data: bytes) -> None:
        self.started = True
        if self._kept is not None:
            self._kept.append(data)
            return
        if not self._exchange.started:
            await self._exchange.start(200, *sse.HEADERS, *self._headers())
        await self._exchange.send(data)

    async def finish(self, data: bytes) -> None:
        if self._kept is not None:
            await self._exchange.reply(200, b"".join((*self._kept, data)), *sse.HEADERS, *self._headers())
            return
        if not self._exchange.started:
            await self._exchange.start(200, *sse.HEADERS, *self._headers())
        await self._exchange.finish(data)
