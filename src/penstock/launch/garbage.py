"""When a gateway's process looks for garbage in cycles (the ``gc`` module): soon among new objects, rarely among all.

A look among all stops the event loop, for 100 ms with 10,000 streams.  What a request leaves behind is in no cycle, so
it can wait until few streams are open.  What the process begins with is never looked at again.
"""

from __future__ import annotations

import asyncio
import gc
import resource
from collections.abc import Callable
from pathlib import Path

from penstock.config.limits import TurnLimits

MIDDLE_COLLECTIONS = 2
"""Looks among new objects, up to one among those that survived as many."""
NEVER = 1 << 30

_PAGE_BYTES = resource.getpagesize()


class GarbageCollection:
    """Of one process."""

    def __init__(self, limits: TurnLimits, open_streams: Callable[[], int]) -> None:
        self._limits = limits
        self._open_streams = open_streams
        self._resident = 0

    def begin(self) -> None:
        """What there is now stays.  From here on Python looks among all objects only when ``look`` has it done."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(self._limits.young_collection_objects, MIDDLE_COLLECTIONS, NEVER)
        self._resident = resident_bytes()

    async def run(self) -> None:
        """For as long as the process serves."""
        while True:
            await asyncio.sleep(self._limits.full_collection_s)
            self.look()

    def look(self) -> bool:
        """Look for garbage among all objects, if that takes no time or must be.  Was it done?"""
        few = self._open_streams() <= self._limits.full_collection_streams
        if not few and resident_bytes() - self._resident < self._limits.full_collection_bytes:
            return False
        gc.collect()
        self._resident = resident_bytes()
        return True


def resident_bytes() -> int:
    """Of this process's memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES
