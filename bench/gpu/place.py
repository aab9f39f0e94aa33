"""Where it runs, how time is taken there, and how much of it is left."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class Clock:
    """All of a run has to end before ``limit_s``; parts ask before they begin."""

    limit_s: float
    began: float = field(default_factory=time.monotonic)

    @property
    def spent_s(self) -> float:
        return time.monotonic() - self.began

    def allows(self, wanted_s: float) -> bool:
        """Is there time for a part of so many seconds?"""
        return self.spent_s + wanted_s <= self.limit_s


@dataclass(frozen=True, slots=True)
class Place:
    """A device.  ``dry``: every step is walked with tiny shapes, and no figure means anything."""

    device: torch.device
    dry: bool

    @classmethod
    def found(cls, *, dry: bool) -> Place:
        """The first GPU, or in a dry run the processor."""
        return cls(torch.device("cpu" if dry else "cuda"), dry)

    @property
    def cuda(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Until everything that was begun is done."""
        if self.cuda:
            torch.cuda.synchronize()

    def seconds(self, work: Callable[[], object], repeats: int = 10, warm: int = 2) -> float:
        """The median of ``repeats`` turns of ``work``, each by itself; by the device's own clock where it has one."""
        if self.dry:
            repeats, warm = 1, 0
        for _ in range(warm):
            work()
        took = []
        for _ in range(repeats):
            took.append(self._once(work))
        return statistics.median(took)

    def _once(self, work: Callable[[], object]) -> float:
        if not self.cuda:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
