"""The queue of requests that wait for pages: class by class, within a class fairly among tenants, and within a tenant
by arrival.

Nobody is overtaken by a request of its own line (``core.fairness``), and whose line is next is the virtual clock's to
say: so nobody starves.  Whoever leaves from the middle is skipped when its turn comes.  The order depends on what was
said about requests alone, never on the order of anything in memory: ties end at the serial number.
"""

from __future__ import annotations

import heapq

from penstock.engine.core.fairness import FairClock, Line
from penstock.engine.core.request import OrderKey, Request, Status

Turn = tuple[int, float, OrderKey]
"""(rank of the class, virtual time of the line, order in it): the least is served next."""

_STALE = 64
"""Entries of those who left that a line may have besides as many as wait in it."""


class WaitingQueue:
    """A heap for each line, of the requests whose status is WAITING; first to be served on top."""

    def __init__(self, clock: FairClock) -> None:
        self._clock = clock
        self._lines: dict[Line, list[tuple[OrderKey, Request]]] = {}
        self._counts: dict[Line, int] = {}  # of those who wait; lines where nobody does are not there
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, request: Request) -> None:
        """Line up.  The order key decides the place, also of one that comes back."""
        line = request.line
        request.status = Status.WAITING
        if line not in self._counts:
            self._clock.queued(line)
        heapq.heappush(self._lines.setdefault(line, []), (request.order, request))
        self._counts[line] = self._counts.get(line, 0) + 1
        self._length += 1

    def turn(self, request: Request) -> Turn:
        """When this request is served, be it waiting or running, against others at this moment."""
        return request.rank, self._clock.at(request.line), request.order

    def heads(self) -> list[Request]:
        """The first of each line, who is served next first."""
        if len(self._counts) == 1:
            return [self._head(next(iter(self._counts)))]
        return sorted(map(self._head, self._counts), key=self.turn)

    def head(self) -> Request | None:
        """Who is served next."""
        if not self._counts:
            return None
        if len(self._counts) == 1:
            return self._head(next(iter(self._counts)))
        return min(map(self._head, self._counts), key=self.turn)

    def ranks(self) -> set[int]:
        """Of those who wait."""
        return {rank for rank, _ in self._counts}

    def take(self, request: Request, status: Status) -> None:
        """``request``, the first of its line, waits no more.  Raises ValueError for any other."""
        if self._counts.get(request.line) is None or self._head(request.line) is not request:
            raise ValueError(f"{request.id} is not the first of its line")
        heapq.heappop(self._lines[request.line])
        request.status = status
        self._one_less(request.line)

    def discard(self, request: Request) -> None:
        """``request``, which waits, leaves from wherever it stands."""
        line = request.line
        request.status = Status.GONE
        self._one_less(line)
        heap = self._lines.get(line)
        if heap is not None and len(heap) > 2 * self._counts[line] + _STALE:
            self._lines[line] = [entry for entry in heap if _waits(entry[1], line)]
            heapq.heapify(self._lines[line])

    def promote(self, request: Request) -> None:
        """``request``, which waits, goes on waiting as one of the first class."""
        self._one_less(request.line)
        request.promote()
        self.push(request)

    def _head(self, line: Line) -> Request:
        heap = self._lines[line]
        while not _waits(heap[0][1], line):
            heapq.heappop(heap)
        return heap[0][1]

    def _one_less(self, line: Line) -> None:
        self._length -= 1
        self._counts[line] -= 1
        if not self._counts[line]:
            del self._counts[line], self._lines[line]


def _waits(request: Request, line: Line) -> bool:
    return request.status is Status.WAITING and request.line == line
