"""Time as an argument, so that pure code never reads a clock and tests can control it.

``now`` is monotonic seconds; wall time exists only in logs and in the ``created`` field of responses.
"""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """A source of monotonic seconds."""

    def now(self) -> float:
        """Monotonic seconds since an arbitrary start."""
        ...


class MonotonicClock:
    """The host's monotonic clock; the same for all processes of a host."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock that moves only when ``advance`` is called."""

    def __init__(self, start: float = 0.0) -> None:
        self._now = start

    def now(self) -> float:
        return self._now

    def advance(self, seconds: float) -> None:
        """Move forward.  Raises ValueError for a negative amount: this clock, too, is monotonic."""
        if seconds < 0:
            raise ValueError(f"a monotonic clock cannot go back by {-seconds} s")
        self._now += seconds
