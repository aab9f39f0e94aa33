"""Work for many streams, divided over turns of the event loop.

A host that dies has thousands of streams, and one that becomes ready is awaited by as many.  Each turn handles a
limited number of them (``TurnWork``), and other streams have their turns in between.  ``StreamChecks`` orders streams
by the time of their next check for something overdue.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from heapq import heapify, heappop, heappush

from penstock.router.stream import RequestStream

log = logging.getLogger("penstock.router")


@contextmanager
def log_errors(what: str) -> Iterator[None]:
    """Around what is done for one of many streams: an error in it is logged, and must not keep the others from theirs.

    Work that is given to ``TurnWork`` ends with the first error that it lets through.
    """
    try:
        yield
    except Exception:
        log.exception("%s", what)


class TurnWork:
    """``later`` runs what it is given in the next turn of the event loop."""

    def __init__(self, units_per_turn: int, later: Callable[[Callable[[], None]], object]) -> None:
        self._per_turn = units_per_turn
        self._left = units_per_turn  # units that may still be done in this turn
        self._later = later
        self._next_turn_is_due = False
        self._work: deque[Iterator[None]] = deque()
        self._running = False

    def __len__(self) -> int:
        """Pieces of work that are not finished."""
        return len(self._work)

    def add(self, work: Iterator[None]) -> None:
        """One unit is what ``work`` does up to its next ``yield``.  Begins at once, if this turn has room left."""
        self._work.append(work)
        self._run()

    def _run(self) -> None:
        if self._running:  # a unit has added work, which the loop below reaches
            return
        self._running = True
        try:
            while self._work and self._left > 0:
                self._left -= 1
                try:
                    next(self._work[0])
                except StopIteration:
                    self._work.popleft()
                except Exception:
                    log.exception("work for many streams failed")
                    self._work.popleft()
        finally:
            self._running = False
        if self._left < self._per_turn and not self._next_turn_is_due:
            self._next_turn_is_due = True
            self._later(self._turn)

    def _turn(self) -> None:
        self._next_turn_is_due = False
        self._left = self._per_turn
        self._run()


MIN_STALE = 64
"""Entries of finished streams are removed at this count, if they outnumber the others."""


class StreamChecks:
    """The streams of one gateway, by the time of their next check.  Taking one costs the same, however many there are,
    but for the logarithm."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._heap: list[tuple[float, int]] = []  # when, and the number of the entry; some are of finished streams
        self._streams: dict[int, RequestStream] = {}  # by the number of the entry; nothing is kept of finished ones
        self._numbers: dict[int, int] = {}  # of the entries, by the id of the stream
        self._added = 0  # orders those of one time

    def __len__(self) -> int:
        """Streams that are still to be looked at."""
        return len(self._streams)

    def add(self, stream: RequestStream, at: float) -> None:
        """It is to be looked at then: once for each that is new, and each that was taken and is not over."""
        number = self._added = self._added + 1
        self._streams[number], self._numbers[id(stream)] = stream, number
        heappush(self._heap, (at, number))

    def discard(self, stream: RequestStream) -> None:
        """It is over, and nothing of it is kept.  Harmless for one that is not to be looked at."""
        number = self._numbers.pop(id(stream), None)
        if number is None:
            return
        del self._streams[number]
        stale = len(self._heap) - len(self._streams)
        if stale > max(MIN_STALE, len(self._streams)):
            self._heap = [entry for entry in self._heap if entry[1] in self._streams]
            heapify(self._heap)

    def pop_due(self, now: float) -> list[RequestStream]:
        """Streams that are due, as many as a turn may check."""
        due: list[RequestStream] = []
        heap = self._heap
        while heap and heap[0][0] <= now and len(due) < self._per_turn:
            stream = self._streams.pop(heappop(heap)[1], None)
            if stream is not None:
                del self._numbers[id(stream)]
                due.append(stream)
        return due

    def has_due(self, now: float) -> bool:
        """Whether another check is due."""
        return bool(self._heap) and self._heap[0][0] <= now


TICK_S = 0.05
"""Between two ticks: retries are at most this late."""


async def sleep_to_multiple(period_s: float) -> None:
    """Sleep for a period, up to a time of the loop that is a multiple of it: 0.5 to 1.5 ``period_s``.

    So all that a gateway does periodically comes at the same moments.  To wake an idle process takes it longer than to
    do most of these things.
    """
    now = asyncio.get_running_loop().time()
    await asyncio.sleep((round(now / period_s) + 1) * period_s - now)
