"""Waits until this machine reads memory at the speed that it is known to have.

On a shared host two processors are two cores at one minute and one core's two threads at the next; then everything that
reads memory takes twice the time, whoever is measured.  What a ratio is made of must be measured in one state.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Final

from bench.peers import offline
from bench.peers.processes import own_environment

STEADY_SHARE: Final = 0.85
"""Of the best bandwidth so far: below it the machine is not what it was."""

LOOK_EVERY_S: Final = 5.0
LOOKS: Final = 60
"""How often one measurement looks for it in vain."""

TRIES: Final = 3
"""Of a measurement during which it changed."""


class Steady:
    """Remembers the best bandwidth.  ``read_gbs``: measures it now."""

    def __init__(self, read_gbs: Callable[[], float], pause: Callable[[float], None] = time.sleep) -> None:
        self._read_gbs = read_gbs
        self._pause = pause
        self._best = 0.0

    def look(self) -> tuple[float, bool]:
        """GB/s now, and whether that is what the machine can do."""
        found = self._read_gbs()
        self._best = max(self._best, found)
        return found, found >= STEADY_SHARE * self._best

    def wait(self) -> float:
        """GB/s when it was back, or after ``LOOKS``."""
        found, steady = self.look()
        for _ in range(LOOKS - 1):
            if steady:
                break
            self._pause(LOOK_EVERY_S)
            found, steady = self.look()
        return found


def usual_read_gbs(threads: int) -> float:
    """The median of short reads, by a process of its own (so that it gets memory as everybody does)."""
    command = [sys.executable, "-m", "bench.peers.roofline", str(threads), "--read"]
    return float(offline.run(command, own_environment()))
