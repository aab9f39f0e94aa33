"""Which streams are to be looked at now: each when something about it can be late, so many in a turn of the event loop.

Knows nothing about what is looked for.
"""

from __future__ import annotations

from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from penstock.router.stream import Stream

LEAST_STALE = 64
"""Entries of streams that are over are cleared away when there are so many, and more of them than of others."""


@dataclass(slots=True)
class _Entry:
    """When a stream is looked at; None in its place once it is over: nothing of it is kept until then."""

    at: float
    added: int
    stream: Stream | None

    def __lt__(self, other: _Entry) -> bool:
        return (self.at, self.added) < (other.at, other.added)


class Rounds:
    """Of one gateway's streams, by when they are to be looked at.  To take one costs the same, however many there are,
    but for the logarithm."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._heap: list[_Entry] = []
        self._entries: dict[int, _Entry] = {}  # by the id of a stream that is kept here
        self._added = 0  # orders those of one time

    def __len__(self) -> int:
        """Streams that are still to be looked at."""
        return len(self._entries)

    def add(self, stream: Stream, at: float) -> None:
        """It is to be looked at then: once for each that is new, and each that was taken and is not over."""
        self._added += 1
        entry = self._entries[id(stream)] = _Entry(at, self._added, stream)
        heappush(self._heap, entry)

    def discard(self, stream: Stream) -> None:
        """It is over, and nothing of it is kept.  Harmless for one that is not to be looked at."""
        entry = self._entries.pop(id(stream), None)
        if entry is None:
            return
        entry.stream = None
        stale = len(self._heap) - len(self._entries)
        if stale > max(LEAST_STALE, len(self._entries)):
            self._heap = [one for one in self._heap if one.stream is not None]
            heapify(self._heap)

    def take(self, now: float) -> list[Stream]:
        """Those whose time has come, as many as a turn may look at."""
        due: list[Stream] = []
        heap = self._heap
        while heap and heap[0].at <= now and len(due) < self._per_turn:
            stream = heappop(heap).stream
            if stream is not None:
                del self._entries[id(stream)]
                due.append(stream)
        return due

    def due(self, now: float) -> bool:
        """Is there more to look at?"""
        return bool(self._heap) and self._heap[0].at <= now
