"""What will happen when: the simulator's one queue, and its clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Agenda:
    """Calls, in order of their times; of equal times the one that was entered first."""

    def __init__(self) -> None:
        self.now = 0.0  # seconds; never goes back
        self._serial = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []

    def at(self, when: float, call: Callable[..., None], *args: Any) -> None:
        """Have this called then, or now if that is past."""
        self._serial += 1
        heapq.heappush(self._heap, (max(when, self.now), self._serial, call, args))

    def after(self, seconds: float, call: Callable[..., None], *args: Any) -> None:
        """Have this called so much later."""
        self.at(self.now + seconds, call, *args)

    def turn(self) -> bool:
        """Make the next call.  False when there is none."""
        if not self._heap:
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)
        return True
