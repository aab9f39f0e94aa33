"""Workers of one machine, which take its memory, caches and power from each other: how much slower a step is for it.

A step is longer by a share ``beside`` (``fleet.StepTimes``) for each other worker that computes when it begins.  Who
has been granted several steps at once is told when that number changes, and plans anew.  Knows no cores.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.types import WorkerId

Stop = Callable[[], None]


class Crowd:
    """Who computes now."""

    def __init__(self, beside: float) -> None:
        self._beside = beside
        self._computing: dict[WorkerId, Stop] = {}

    def slower(self, worker: WorkerId) -> float:
        """What a step of this worker takes now, by what it takes alone."""
        return 1 + self._beside * (len(self._computing) - (worker in self._computing))

    def settle(self, worker: WorkerId, stop: Stop | None) -> None:
        """From now on this worker computes, and ``stop`` ends its steps after the present one; None: it has nothing."""
        before = len(self._computing)
        if stop is None:
            self._computing.pop(worker, None)
        else:
            self._computing[worker] = stop
        if self._beside and len(self._computing) != before:
            for other, theirs in tuple(self._computing.items()):
                if other != worker:
                    theirs()
