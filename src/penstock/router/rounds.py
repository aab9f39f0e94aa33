"""Which streams are to be looked at now: each when something about it can be late, so many in a turn of the event loop.

Knows nothing about what is looked for.
"""

from __future__ import annotations

from heapq import heappop, heappush

from penstock.router.stream import Stream


class Rounds:
    """Of one gateway's streams, by when they are to be looked at.  To take one costs the same, however many there are,
    but for the logarithm."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._heap: list[tuple[float, int, Stream]] = []
        self._added = 0  # orders those of one time

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, stream: Stream, at: float) -> None:
        """It is to be looked at then: once for each that is new, and each that was taken and is not over."""
        self._added += 1
        heappush(self._heap, (at, self._added, stream))

    def take(self, now: float) -> list[Stream]:
        """Those whose time has come, as many as a turn may look at."""
        due: list[Stream] = []
        heap = self._heap
        while heap and heap[0][0] <= now and len(due) < self._per_turn:
            due.append(heappop(heap)[2])
        return due

    def due(self, now: float) -> bool:
        """Is there more to look at?"""
        return bool(self._heap) and self._heap[0][0] <= now
