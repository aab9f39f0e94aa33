"""The queue of requests that wait for pages: strictly by priority, then by arrival.

Nobody overtakes, so nobody starves.  Whoever leaves from the middle is skipped when its turn comes.
"""

from __future__ import annotations

import heapq

from penstock.engine.core.request import OrderKey, Request, Status


class WaitingQueue:
    """A heap of the requests whose status is WAITING, first to be served on top."""

    def __init__(self) -> None:
        self._heap: list[tuple[OrderKey, Request]] = []
        self._length = 0

    def __len__(self) -> int:
        return self._length

    def push(self, request: Request) -> None:
        """Line up.  The order key decides the place, also of one that comes back."""
        request.status = Status.WAITING
        heapq.heappush(self._heap, (request.order, request))
        self._length += 1

    def head(self) -> Request | None:
        """Who is served next."""
        while self._heap:
            request = self._heap[0][1]
            if request.status is Status.WAITING:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self, status: Status) -> Request:
        """Take the head out and give it its new status.  Raises IndexError when nobody waits."""
        request = self.head()
        if request is None:
            raise IndexError("nobody waits")
        heapq.heappop(self._heap)
        request.status = status
        self._length -= 1
        return request

    def discard(self, request: Request) -> None:
        """``request``, which waits, leaves from wherever it stands."""
        request.status = Status.GONE
        self._length -= 1
        if len(self._heap) > 2 * self._length + 64:
            self._heap = [entry for entry in self._heap if entry[1].status is Status.WAITING]
            heapq.heapify(self._heap)
