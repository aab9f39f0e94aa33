"""Brings tokens to answers: one callback of the event loop for all streams that have some.

::

    router: tokens wait --notify--> ``LoopTurns`` --bounded work a turn--> batch --> text --> event --> connection

A stream that can be polled (``PollableTokenStream``) needs no task switch per token, and all its waiting tokens come as
one batch.  Any other stream, such as one that other requests may join, is read by its own task.  Knows nothing about
text and HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from enum import Enum
from functools import lru_cache
from typing import Any, Protocol, TypeGuard

from penstock.errors import WorkerLost
from penstock.interfaces import PollableTokenStream, TokenStream
from penstock.types import TokenBatch

START_UNITS = 128
BATCH_UNITS = 8
"""Units of work: to start a stream, which places it on a worker, and to send a batch.  Each token and each alternative
of it is one more unit; a unit is one to five microseconds."""


def _is_pollable(stream: TokenStream) -> TypeGuard[PollableTokenStream]:
    return _are_pollable(type(stream))


@lru_cache(maxsize=64)
def _are_pollable(kind: type[TokenStream]) -> bool:
    """Once for each class of streams: to look for a protocol takes 20 to 60 microseconds."""
    return issubclass(kind, PollableTokenStream)


MAX_TEXT_PATH_ATTEMPTS = 8
"""How often the text-only path is tried: there is none before the first text is out."""


class LoopTurns:
    """Work for many responses, in order, a bounded amount per turn of the event loop.  One per application."""

    def __init__(self, units: int) -> None:
        """``units``: of work in a turn."""
        self._units = units
        self._waiting: deque[Callable[[], int]] = deque()
        self._is_due = False

    def __len__(self) -> int:
        """Queued pieces of work."""
        return len(self._waiting)

    def schedule(self, work: Callable[[], int]) -> None:
        """Runs ``work`` soon.  It returns the units that it took, and must not raise."""
        self._waiting.append(work)
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        left, waiting = self._units, self._waiting
        for _ in range(len(waiting)):  # what is added meanwhile is for another turn
            left -= waiting.popleft()()
            if left <= 0:
                break
        self._is_due = bool(waiting)
        if waiting:
            asyncio.get_running_loop().call_soon(self._turn)


TextOnlyPath = Callable[[tuple[int, ...]], bool | None]
"""Consumes tokens within a choice that are nothing but text.  Whether the sink is paused now; None: call ``push``."""


class SinkState(Enum):
    """What a sink expects after the tokens that it took."""

    READY = "more"
    PAUSED = "paused"  # more, when it is open again
    FINISHED = "ended"  # no more of this choice


class TokenSink(Protocol):
    """Consumer of the tokens of one response, which may have several choices."""

    def on_writable(self, ready: Callable[[], None]) -> None:
        """Calls ``ready`` once when it is writable again; only after ``SinkState.PAUSED``."""
        ...

    def is_slow(self, batch: TokenBatch) -> bool:
        """Whether ``batch`` needs ``push_slowly``."""
        ...

    def push(self, index: int, batch: TokenBatch) -> SinkState:
        """Consumes tokens of a choice."""
        ...

    def text_only(self, index: int) -> TextOnlyPath | None:
        """The text-only path of a choice from now on, or None."""
        ...

    async def push_slowly(self, index: int, batch: TokenBatch) -> SinkState:
        """As ``push``, outside the event loop."""
        ...

    @property
    def pending(self) -> bool:
        """Whether there is something to ``flush``."""
        ...

    async def flush(self) -> None:
        """Sends what ``push`` has written, which may have to wait."""
        ...

    async def finish(self) -> None:
        """All choices are complete."""
        ...

    async def fail(self, error: Exception) -> None:
        """A choice has failed.  Sends the error, or raises it for others to send."""
        ...


class StreamPump:
    """Pumps the token streams of one response into its sink."""

    __slots__ = ("_error", "_open", "_sleeper", "_taker", "_tasks", "_turns")

    def __init__(self, turns: LoopTurns, sink: TokenSink) -> None:
        self._turns = turns
        self._taker = sink
        self._open = 0
        self._error: Exception | None = None
        self._sleeper: asyncio.Future[None] | None = None
        self._tasks: set[asyncio.Task[None]] | None = None  # with the first: most answers have none

    async def run(self, streams: Sequence[TokenStream]) -> None:
        """Runs until the sink is finished with all of them, or one fails; closes all in any case."""
        sink, polled = self._taker, list[_PolledStream]()
        self._open = len(streams)
        try:
            try:
                for index, stream in enumerate(streams):
                    if _is_pollable(stream):
                        polled.append(_PolledStream(self, index, stream))
                        self._turns.schedule(polled[-1].pull)
                    else:
                        self._spawn(self._read(index, stream))
                while True:
                    if sink.pending:
                        await sink.flush()
                    elif self._error is not None:
                        raise self._error
                    elif not self._open:
                        break
                    else:
                        self._sleeper = asyncio.get_running_loop().create_future()
                        await self._sleeper
            finally:
                await self._close(streams, polled)
        except Exception as error:  # noqa: BLE001 - the sink sends it, or raises it
            await sink.fail(error)
        else:
            await sink.finish()

    async def _close(self, streams: Sequence[TokenStream], polled: Sequence[_PolledStream]) -> None:
        for one in polled:
            one.close()
        reading = [task for task in self._tasks or () if not task.done()]
        for task in reading:
            task.cancel()
        if reading:
            # A cancellation now, as of all tasks when the process ends, must not replace the error that is on its
            # way to the client.
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.gather(*reading, return_exceptions=True)
        for stream in streams:
            await stream.aclose()

    def wake(self) -> None:
        """Wakes ``run``: there is something to flush, to raise or to return for."""
        if self._sleeper is not None and not self._sleeper.done():
            self._sleeper.set_result(None)

    def choice_finished(self) -> None:
        """A choice is complete."""
        self._open -= 1
        if not self._open:
            self.wake()

    def choice_failed(self, error: Exception) -> None:
        """A choice has failed."""
        self._error = self._error or error
        self.wake()

    def push_in_task(self, index: int, batch: TokenBatch, then: Callable[[SinkState], None]) -> None:
        """Has the sink consume ``batch`` in a task."""

        async def take() -> None:
            try:
                then(await self._taker.push_slowly(index, batch))
            except Exception as error:  # noqa: BLE001 - raised by ``run``
                self.choice_failed(error)

        task = self._spawn(take())
        task.add_done_callback(self._done)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        if self._tasks is None:
            self._tasks = set()
        self._tasks.add(task)
        return task

    def _done(self, task: asyncio.Task[None]) -> None:
        if self._tasks is not None:
            self._tasks.discard(task)

    async def _read(self, index: int, stream: TokenStream) -> None:
        """A stream that cannot be polled."""
        sink = self._taker
        try:
            async with aclosing(stream):
                async for batch in stream:
                    long = sink.is_slow(batch)
                    then = await sink.push_slowly(index, batch) if long else sink.push(index, batch)
                    if then is SinkState.FINISHED:
                        break
                    if then is SinkState.PAUSED:
                        await _opened(sink)
                else:
                    raise WorkerLost("The answer ended before its end.")
            self.choice_finished()
        except Exception as error:  # noqa: BLE001 - raised by ``run``
            self.choice_failed(error)

    @property
    def sink(self) -> TokenSink:
        """The consumer."""
        return self._taker

    @property
    def turns(self) -> LoopTurns:
        """The application's queue of work."""
        return self._turns


async def _opened(sink: TokenSink) -> None:
    """Waits until ``sink`` is writable."""
    opened = asyncio.get_running_loop().create_future()
    sink.on_writable(lambda: None if opened.done() else opened.set_result(None))
    await opened


class _PolledStream:
    """One choice's stream, polled when it has tokens."""

    __slots__ = ("_asked", "_feeds", "_index", "_over", "_paused", "_plain", "_poll", "_ready", "_tokens")

    def __init__(self, feeds: StreamPump, index: int, tokens: PollableTokenStream) -> None:
        self._feeds = feeds
        self._index = index
        self._tokens = tokens
        self._poll: Callable[[], TokenBatch | None] | None = None
        self._ready: Callable[[], None] = self._schedule
        self._plain: TextOnlyPath | None = None
        self._asked = 0  # how often for it
        self._paused = False
        self._over = False

    def _schedule(self) -> None:
        self._feeds.turns.schedule(self.pull)

    def pull(self) -> int:
        """Pushes the waiting tokens to the sink.  Returns units."""
        if self._over or self._paused:
            return 1
        if self._poll is None:
            return self._begin()
        try:
            batch = self._poll()
            if batch is None:
                return 1
            if self._plain is not None and batch.finish is None:
                paused = self._plain(batch.tokens)
                if paused:
                    self._stop(SinkState.PAUSED)
                if paused is not None:
                    return BATCH_UNITS + len(batch.tokens)
            return self._take(batch)
        except Exception as error:  # noqa: BLE001 - raised by ``StreamPump.run``
            self._fail(error)
            return BATCH_UNITS

    def _take(self, batch: TokenBatch) -> int:
        sink, cost = self._feeds.sink, BATCH_UNITS + token_units(batch)
        if batch.prompt_logprobs is not None and sink.is_slow(batch):
            self._paused = True
            self._feeds.push_in_task(self._index, batch, self._taken_slowly)
            return cost
        then = sink.push(self._index, batch)
        if then is not SinkState.READY:
            self._stop(then)
        elif self._asked < MAX_TEXT_PATH_ATTEMPTS:
            self._asked += 1
            self._plain = sink.text_only(self._index)
            if self._plain is not None:
                self._asked = MAX_TEXT_PATH_ATTEMPTS
        return cost

    def close(self) -> None:
        """Frees what the stream holds.  Idempotent."""
        if not self._over:
            self._over = True
            self._tokens.close()
            self._poll, self._plain, self._ready = None, None, _nothing  # or it would hold itself

    def _begin(self) -> int:
        try:
            self._poll = self._tokens.begin(self._ready)
        except Exception as error:  # noqa: BLE001 - raised by ``StreamPump.run``
            self._fail(error)
        return START_UNITS

    def _fail(self, error: Exception) -> None:
        self.close()
        self._feeds.choice_failed(error)

    def _stop(self, then: SinkState) -> None:
        if then is SinkState.FINISHED:
            self.close()
            self._feeds.choice_finished()
        else:
            self._paused = True
            self._feeds.sink.on_writable(self._go_on)

    def _go_on(self) -> None:
        self._paused = False
        self._ready()

    def _taken_slowly(self, then: SinkState) -> None:
        if then is SinkState.READY:
            self._go_on()
        else:
            self._stop(then)


def _nothing() -> None:
    """Placeholder of a closed stream's callback."""


def token_units(batch: TokenBatch) -> int:
    """The units of a batch, in addition to ``BATCH_UNITS``."""
    logprobs = batch.logprobs
    if logprobs is None:
        return len(batch.tokens)
    return sum(1 + len(each.top) for each in logprobs)
