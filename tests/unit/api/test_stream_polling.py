"""Tokens are brought to answers by turns of the event loop that are bounded by what they do, whatever waits."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable

import pytest

from penstock.api.stream_polling import BATCH_UNITS, START_UNITS, LoopTurns, SinkState, StreamPump, TextOnlyPath
from penstock.errors import NoWorkers
from penstock.types import FinishReason, TokenBatch


class Polled:
    """``PollableTokenStream`` that a test fills."""

    def __init__(self) -> None:
        self.waits: deque[TokenBatch | Exception] = deque()
        self.polls = 0
        self.closed = False
        self._ready: Callable[[], None] = lambda: None

    def put(self, *tokens: int, finish: FinishReason | None = None) -> None:
        self.waits.append(TokenBatch(tokens=tokens, finish=finish))
        self._ready()

    def fail(self, error: Exception) -> None:
        self.waits.append(error)
        self._ready()

    def begin(self, ready: Callable[[], None]) -> Callable[[], TokenBatch | None]:
        self._ready = ready
        if self.waits:
            ready()
        return self.poll

    def poll(self) -> TokenBatch | None:
        self.polls += 1
        if not self.waits:
            return None
        batch = self.waits.popleft()
        if self.waits:
            self._ready()
        if isinstance(batch, Exception):
            raise batch
        return batch

    def close(self) -> None:
        self.closed = True

    async def aclose(self) -> None:
        self.close()

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        raise AssertionError("who polls does not iterate")

    async def __anext__(self) -> TokenBatch:
        raise AssertionError("who polls does not iterate")


class Taken:
    """``TokenSink`` that keeps what it gets, and is paused when a test says so."""

    def __init__(self) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.pause = False
        self.pending = False
        self.flushed = 0
        self.ended = False
        self.opened: list[Callable[[], None]] = []

    def on_writable(self, ready: Callable[[], None]) -> None:
        self.opened.append(ready)

    def open(self) -> None:
        self.pause = False
        opened, self.opened = self.opened, []
        for ready in opened:
            ready()

    def is_slow(self, batch: TokenBatch) -> bool:
        return True

    def push(self, index: int, batch: TokenBatch) -> SinkState:
        self.tokens.setdefault(index, []).extend(batch.tokens)
        if batch.finish is not None:
            return SinkState.FINISHED
        return SinkState.PAUSED if self.pause else SinkState.READY

    async def push_slowly(self, index: int, batch: TokenBatch) -> SinkState:
        await asyncio.sleep(0)
        return self.push(index, batch)

    def text_only(self, index: int) -> TextOnlyPath | None:
        return None

    async def flush(self) -> None:
        self.pending = False
        self.flushed += 1

    async def finish(self) -> None:
        self.ended = True

    async def fail(self, error: Exception) -> None:
        raise error


async def turns_of_the_loop(count: int = 6) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_turn_does_so_many_units_however_much_waits():
    turns, done = LoopTurns(10), []
    for number in range(100):
        turns.schedule(lambda number=number: done.append(number) or 3)
    sizes = []
    while turns:
        before = len(done)
        await asyncio.sleep(0)
        sizes.append(len(done) - before)
    assert done == list(range(100))
    assert max(sizes) == 4  # the last of them may exceed what is left


async def test_many_streams_with_tokens_at_once_are_served_over_several_turns():
    """What one turn takes from 1,000 streams is bounded by its units."""
    units = 4 * START_UNITS
    turns, taker = LoopTurns(units), Taken()
    streams = [Polled() for _ in range(1000)]
    running = asyncio.create_task(StreamPump(turns, taker).run(streams))
    while sum(stream.polls for stream in streams) < len(streams):  # the first polls, which find nothing
        await asyncio.sleep(0)
        for stream in streams[:1000:250]:
            stream._ready()
        if not turns:
            break
    for stream in streams:
        stream.put(7, finish=FinishReason.LENGTH)
    most = 0
    while len(taker.tokens) < len(streams):
        before = len(taker.tokens)
        await asyncio.sleep(0)
        most = max(most, len(taker.tokens) - before)
    await running
    assert 1 <= most <= units // BATCH_UNITS + 1
    assert all(stream.closed for stream in streams)


async def test_what_comes_while_the_client_reads_slowly_waits_and_is_all_taken_then():
    turns, taker, stream = LoopTurns(1024), Taken(), Polled()
    running = asyncio.create_task(StreamPump(turns, taker).run([stream]))
    await turns_of_the_loop()
    taker.pause = True
    stream.put(1)
    await turns_of_the_loop()
    polls = stream.polls
    stream.put(2)
    stream.put(3)
    await turns_of_the_loop()
    assert (taker.tokens[0], stream.polls) == ([1], polls)
    taker.open()
    await turns_of_the_loop()
    assert taker.tokens[0] == [1, 2, 3]
    stream.put(4, finish=FinishReason.STOP)
    await running
    assert taker.tokens[0] == [1, 2, 3, 4]


async def test_an_error_ends_the_answer_after_what_came_before_it_and_closes_every_choice():
    turns, taker, streams = LoopTurns(1024), Taken(), [Polled(), Polled()]
    running = asyncio.create_task(StreamPump(turns, taker).run(streams))
    await turns_of_the_loop()
    streams[0].put(1)
    streams[1].fail(NoWorkers("gone"))
    with pytest.raises(NoWorkers):
        await running
    assert taker.tokens == {0: [1]}
    assert [stream.closed for stream in streams] == [True, True]


async def test_a_client_that_leaves_closes_every_choice():
    streams = [Polled(), Polled()]
    running = asyncio.create_task(StreamPump(LoopTurns(1024), Taken()).run(streams))
    await turns_of_the_loop()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert [stream.closed for stream in streams] == [True, True]


class Iterated:
    """A stream that cannot be polled: it ends with an error when a test says so, and is slow to stop."""

    def __init__(self) -> None:
        self.broken, self.stopping, self.may_stop = asyncio.Event(), asyncio.Event(), asyncio.Event()

    def __aiter__(self) -> AsyncIterator[TokenBatch]:
        return self

    async def __anext__(self) -> TokenBatch:
        try:
            await self.broken.wait()
        except asyncio.CancelledError:
            self.stopping.set()
            await self.may_stop.wait()
            raise
        raise NoWorkers("The service has stopped.")

    async def aclose(self) -> None:
        return None


async def test_a_process_that_ends_takes_no_error_from_a_client_that_is_about_to_be_told_of_it() -> None:
    """The first choice's error is on its way while the second one's task is being stopped."""
    first, second = Iterated(), Iterated()
    running = asyncio.create_task(StreamPump(LoopTurns(100), Taken()).run([first, second]))
    await turns_of_the_loop()
    first.broken.set()
    await second.stopping.wait()
    running.cancel()  # as the loop does with all tasks at its end
    second.may_stop.set()
    with pytest.raises(NoWorkers, match="has stopped"):
        await running
