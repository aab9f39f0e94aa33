"""How two lanes share a GPU: by multiprocessors of their own, or by priority of their streams.

With multiprocessors of their own neither waits for the other, but for memory.  Writing answers reads weights, which
part of the multiprocessors does at nearly full rate; how many that takes is measured at the start: the fewest with
which a step of answers lasts no longer than ``SLOWER`` of the whole device's.  By priority, the blocks of answers are
placed before those of prompts, behind what runs already.

Which of both, and where the cut is, changes no bit.  This module imports torch.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from penstock.kernels.draws import Picks
from penstock.kernels.lanes import Lanes
from penstock.kernels.operands import StepBatch
from penstock.kernels.triton.green import GreenContextError, GreenDriver, Group, cuda_driver
from penstock.kernels.triton.program import DeviceProgram

log = logging.getLogger(__name__)

SLOWER = 1.1
"""What a step of answers may take with its part, by what it takes with all multiprocessors."""

EIGHTHS = (2, 3, 4, 5, 6)
"""Parts of the device that are tried for answers."""

MEASURE_S = 3.0
"""For trying them; what was not tried by then is taken not to be enough."""

PROBE_ROWS = 64
PROBES = 5

ProgramOf = Callable[[Any], DeviceProgram]
"""A program on this stream, with graphs of its own."""


def fewest(sizes: Sequence[int], enough: Callable[[int], bool], in_time: Callable[[], bool]) -> int | None:
    """The first of the ascending ``sizes`` that is enough, by halving; None where none was found to be."""
    low, high, found = 0, len(sizes), None
    while low < high and in_time():
        middle = (low + high) // 2
        if enough(sizes[middle]):
            found, high = sizes[middle], middle
        else:
            low = middle + 1
    return found


def lanes(device: torch.device, how: str, program_of: ProgramOf, alive: Callable[[], None] | None = None) -> Lanes:
    """See ``HasLanes.lanes``.  Where there is no GPU, one lane computes after the other."""
    if device.type != "cuda":
        return Lanes(program_of(None), program_of(None), "one after the other: there is no GPU")
    made = None
    if how in ("auto", "green"):
        try:
            driver = GreenDriver(cuda_driver(), device.index or 0)
            made = Cutting(device, driver, program_of, alive or (lambda: None)).lanes()
        except GreenContextError as error:
            log.warning("prompts and answers share all multiprocessors, answers first: %s", error)
    made = made or _by_priority(device, program_of)
    torch.cuda.synchronize(device)  # what was made on the way is there for both
    return made


def _by_priority(device: torch.device, program_of: ProgramOf) -> Lanes:
    last, first = _priorities()
    reading, writing = (torch.cuda.Stream(device, priority=priority) for priority in (last, first))
    return Lanes(program_of(reading), program_of(writing), "by priority: answers first")


def _priorities() -> tuple[int, int]:
    """The last and the first."""
    stream: Any = torch.cuda.Stream
    last, first = stream.priority_range()
    return int(last), int(first)


@dataclass(frozen=True, slots=True)
class Cutting:
    """The device in two groups of multiprocessors.  ``alive`` is called behind each step that is tried."""

    device: torch.device
    driver: GreenDriver
    program_of: ProgramOf
    alive: Callable[[], None]

    def lanes(self) -> Lanes:
        """Raises GreenContextError where the driver, torch or the measurement will not have it."""
        total = self.driver.multiprocessors()
        last, first = _priorities()
        whole_s = self.seconds(torch.cuda.Stream(self.device, priority=first))
        begun = time.monotonic()  # not sooner: the first step of all compiles kernels, which may take minutes

        def enough(count: int) -> bool:
            writing, reading = self.driver.cut(count, first=first, second=last)
            try:
                took_s = self.seconds(self.stream(writing))
            finally:
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()  # of memory that belongs to streams which end now
                for group in (writing, reading):
                    self.driver.give_back(group)
            log.info("a step of answers: %.2f ms on %d multiprocessors", took_s * 1e3, writing.multiprocessors)
            return took_s <= SLOWER * whole_s

        log.info("a step of answers: %.2f ms on all %d multiprocessors", whole_s * 1e3, total)
        count = fewest([total * part // 8 for part in EIGHTHS], enough, lambda: time.monotonic() - begun < MEASURE_S)
        if count is None:
            raise GreenContextError(f"no part of up to {EIGHTHS[-1]} eighths was seen to be enough for answers")
        writing, reading = self.driver.cut(count, first=first, second=last)
        how = f"answers on {writing.multiprocessors} of {total} multiprocessors, prompts on {reading.multiprocessors}"
        return Lanes(self.program_of(self.stream(reading)), self.program_of(self.stream(writing)), how)

    def stream(self, group: Group) -> Any:
        """Its stream, tried."""
        stream = torch.cuda.ExternalStream(group.stream, device=self.device)
        try:
            with torch.cuda.stream(stream):
                torch.zeros(1, device=self.device).add_(1)
                event = torch.cuda.Event()
                event.record()
            event.synchronize()
        except RuntimeError as error:
            raise GreenContextError(f"torch cannot use its stream: {str(error).partition(chr(10))[0]}") from error
        return stream

    def seconds(self, stream: Any) -> float:
        """A step of answers there, captured, the best of some.  Its keys go to the first page."""
        program = self.program_of(stream)
        try:
            took = [self.timed(program) for _ in range(2 + PROBES)]  # as it is, captured, and again and again
        except RuntimeError as error:
            raise GreenContextError(f"a step failed there: {str(error).partition(chr(10))[0]}") from error
        return min(took[2:])

    def timed(self, program: DeviceProgram) -> float:
        """One step, in seconds."""
        zeros_R, picks = np.zeros(PROBE_ROWS, np.int32), Picks.empty(PROBE_ROWS)
        table_RP = np.zeros((PROBE_ROWS, program.groups), np.int32)
        rows_R = np.arange(PROBE_ROWS + 1, dtype=np.int32)
        begun = time.perf_counter()
        program.run(StepBatch(zeros_R, zeros_R, rows_R, table_RP, rows_R[:-1]), 0, [], picks)
        took_s = time.perf_counter() - begun
        self.alive()
        return took_s
