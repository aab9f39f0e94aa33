"""Two programs of one model's step that a device computes side by side, over the same KV pages.

A step is begun and left to the device; the host comes back for what it brought.  Whoever gives the two programs pages
sees to it that none writes where the other reads or writes.  How the device is divided changes when something is
computed, and never which bits come of it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.draws import Picks, Sampled, SampleRow
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import RunsAhead, StepProgram, Steps


class LaneProgram(StepProgram, RunsAhead, Protocol):
    """One of two.  Between ``begin`` and ``finish`` nothing else is begun in it."""

    def begin(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: Picks,
        ready: Callable[[], None] | None = None,
    ) -> None:
        """The first part of ``StepProgram.run``: ``batch`` may be overwritten once this returns, the others not."""
        ...

    def finish(self) -> list[Sampled]:
        """The rest of it; waits for the device."""
        ...

    def begin_ahead(self, picks: Picks, steps: int, batch_of: Callable[[int], StepBatch | None]) -> int:
        """The first part of ``RunsAhead.run_ahead``; how many steps were begun."""
        ...

    def finish_ahead(self) -> NDArray[np.int32]:
        """The rest of it: tokens [steps begun, F]; waits for the device."""
        ...

    def done(self) -> bool:
        """Has the device computed what was begun?  Does not wait."""
        ...

    def capture(self, alive: Callable[[], None], budget_s: float) -> int:
        """See ``Captures.capture``; kernels are made ready first, whatever they take, then sizes of steps in time."""
        ...

    def on(self) -> AbstractContextManager[object]:
        """Operations in this scope are computed in this lane."""
        ...

    def rest(self) -> None:
        """Wait for all operations of this lane."""
        ...

    def descriptor(self) -> int | None:
        """Readable once something that was begun is done, until ``done`` is asked; None: ``begin`` waits for it."""
        ...


@dataclass(frozen=True, slots=True)
class Lanes:
    """Both, and how they share the device, for people."""

    reading: LaneProgram
    writing: LaneProgram
    how: str

    def make_ready(self, alive: Callable[[], None], budget_s: float) -> int:
        """Kernels of both, and sizes of steps that write answers; how many.  As ``Captures.capture``."""
        self.reading.capture(alive, 0.0)
        sizes = self.writing.capture(alive, budget_s)
        for program in (self.reading, self.writing):
            program.rest()
        return sizes


@runtime_checkable
class HasLanes(Protocol):
    """What a backend has besides, if it can compute two steps side by side."""

    def lanes(self, steps: Steps, kv: Array, how: str, alive: Callable[[], None] | None = None) -> Lanes:
        """Programs of these steps, as ``Ops.record`` makes one.

        ``how``: "priority", the writing one's work goes first; "green", each has multiprocessors of its own;
        "auto", the second where the driver can, else the first.  What cannot be had falls back, and the log says why.
        ``alive`` is called now and then: what is tried may have to be compiled.
        """
        ...
