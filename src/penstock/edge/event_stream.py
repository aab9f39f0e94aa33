"""Sends events as they come: the status line waits for the first of them, so that an error before it has a status.

An error after it is an event, and the end.  A client that knows no chunks gets everything in one piece.  Knows nothing
about what the events say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from penstock.edge import sse
from penstock.edge.errors import Header, noted
from penstock.edge.exchange import Exchange


async def tell(
    exchange: Exchange,
    events: AsyncGenerator[bytes, None],
    last: Callable[[], bytes],
    headers: Callable[[], Sequence[Header]],
) -> None:
    """Send all of ``events``, then the ``last``; the empty ones say nothing yet.

    ``last`` and ``headers`` are asked for when they are sent.
    """
    out = _Out(exchange, headers)
    try:
        async with aclosing(events) as parts:
            async for data in parts:
                if data:
                    await out.send(data)
    except Exception as error:
        if not out.started:
            raise
        await out.finish(sse.failure(noted(error).body))
        return
    await out.finish(last())


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
