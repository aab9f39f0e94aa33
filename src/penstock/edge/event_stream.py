"""Sends events as they come: the status line waits for the first of them, so that an error before it has a status.

An error after it is an event, and the end.  A client that knows no chunks gets everything in one piece.  Knows nothing
about what the events say.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from penstock.edge import sse
from penstock.edge.body_writer import BodyWriter
from penstock.edge.errors import Header, code_of, noted
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
    out = EventOut(exchange, headers)
    try:
        async with aclosing(events) as parts:
            async for data in parts:
                if data:
                    out.write(data)
                    await out.flush()
    except Exception as error:
        if not out.started:
            raise
        await out.fail(error)
        return
    await out.finish(last())


class EventOut:
    """Where the events of one answer go, in order.

    Straight to the connection where the server allows it; else ``flush`` sends what was written, and until then the
    answer is paused.  For a client that knows no chunks, out at the end in one piece.
    """

    __slots__ = ("_exchange", "_headers", "_kept", "_unsent", "_waiting", "_writer", "started", "wake")

    def __init__(self, exchange: Exchange, headers: Callable[[], Sequence[Header]]) -> None:
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

    def when_open(self, ready: Callable[[], None]) -> None:
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
            await self._exchange.reply(200, b"".join((*self._kept, data)), *sse.HEADERS, *self._headers())
            return
        await self._start()
        await self._exchange.finish(b"".join((*self._unsent, data)))

    async def fail(self, error: Exception) -> None:
        """The last event says what went wrong."""
        self._exchange.note.code = code_of(error)
        await self.finish(sse.failure(noted(error).body))

    async def _start(self) -> None:
        if not self._exchange.started:
            await self._exchange.start(200, *sse.HEADERS, *self._headers())
