"""Anonymous shared memory of a host's processes: the table of heartbeats, and that of lent cores.

The heartbeat table has one slot per child, written by the child and read by the supervisor.

Each slot has one writer and each field is one aligned 8-byte word, so a field is never torn and no lock is needed.  Two
fields may be of different beats; ``restart_policy`` judges by several readings in a row.  The memory is freed with the
last process that maps it.
Knows nothing about processes, messages or what a step is.
"""

from __future__ import annotations

import mmap
import secrets
import struct
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from time import monotonic_ns

from penstock.config.schema import CoreLoan
from penstock.kernels.core_lending import LINE_BYTES, CoreSeats, SharedCores
from penstock.types import Role, WorkerId, WorkerState

SLOT_BYTES = 512
_WORDS = 8  # one cache line of counters ahead of the exit reason
_TEXT_BYTES = SLOT_BYTES - 8 * _WORDS - 2

_STATES = (
    WorkerState.STARTING,
    WorkerState.READY,
    WorkerState.DRAINING,
    WorkerState.WEDGED,
    WorkerState.DEAD,
)
_ROLES = (Role.PREFILL, Role.DECODE, Role.BOTH, Role.ENCODE)


class _Word(IntEnum):
    """Index of each 8-byte word of a slot."""

    BEAT_NS = 0
    PREDICTED_END_NS = 1
    STEPS = 2
    STATE = 3
    INCARNATION = 4
    ROLE = 5  # its number plus one; 0: as it was started.  Outlives the process that wrote it
    CONNECTIONS = 6  # of a process that serves HTTP


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """One reading of a slot.  Times are monotonic seconds of this host."""

    incarnation: int
    state: WorkerState
    beat_s: float  # last turn of its loop
    predicted_end_s: float  # when it expects the next one at the latest
    steps: int


class HeartbeatSlot:
    """One child's slot of the table."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[: 8 * _WORDS].cast("Q")
        self._text = memory[8 * _WORDS : SLOT_BYTES]

    def reset(self, incarnation: int, now_ns: int) -> None:
        """Prepare the slot for a new incarnation that has not started yet.  Only while no process writes to it."""
        self._text[:2] = b"\0\0"
        self._words[_Word.STEPS] = self._words[_Word.CONNECTIONS] = 0
        self._words[_Word.STATE] = _STATES.index(WorkerState.STARTING)
        self._words[_Word.PREDICTED_END_NS] = now_ns
        self._words[_Word.BEAT_NS] = now_ns
        self._words[_Word.INCARNATION] = incarnation

    def beat(self, now_ns: int, predicted_end_ns: int, steps: int) -> None:
        """I am alive, have finished ``steps`` steps, and shall be back by ``predicted_end_ns``."""
        self._words[_Word.PREDICTED_END_NS] = predicted_end_ns
        self._words[_Word.STEPS] = steps
        self._words[_Word.BEAT_NS] = now_ns

    def refresh(self) -> None:
        """I still wait for another machine."""
        self._words[_Word.BEAT_NS] = time.monotonic_ns()

    def on_progress(self) -> None:
        """I am not ready yet, but further than before."""
        now_ns = time.monotonic_ns()
        self.beat(now_ns, now_ns, 0)

    def set_state(self, state: WorkerState) -> None:
        """Set the state of this process."""
        self._words[_Word.STATE] = _STATES.index(state)

    def set_connections(self, count: int) -> None:
        """Set the number of client connections of this process."""
        self._words[_Word.CONNECTIONS] = count

    @property
    def connections(self) -> int:
        """The last value of ``set_connections``."""
        return self._words[_Word.CONNECTIONS]

    def assign_role(self, role: Role) -> None:
        """Set the role that this worker was given; its next incarnation has it, too."""
        self._words[_Word.ROLE] = 1 + _ROLES.index(role)

    @property
    def assigned_role(self) -> Role | None:
        """The role that this worker was given; None: it never was."""
        number = self._words[_Word.ROLE]
        return _ROLES[number - 1] if 0 < number <= len(_ROLES) else None

    def set_exit_reason(self, text: str) -> None:
        """Set why this process is about to end, for the supervisor's log.  Truncated to what fits."""
        raw = text.encode()[:_TEXT_BYTES]
        self._text[2 : 2 + len(raw)] = raw
        self._text[:2] = struct.pack("<H", len(raw))

    def read(self) -> Heartbeat:
        """The current content of the slot."""
        words = self._words
        return Heartbeat(
            incarnation=words[_Word.INCARNATION],
            state=_STATES[min(words[_Word.STATE], len(_STATES) - 1)],
            beat_s=words[_Word.BEAT_NS] / 1e9,
            predicted_end_s=words[_Word.PREDICTED_END_NS] / 1e9,
            steps=words[_Word.STEPS],
        )

    def exit_reason(self) -> str:
        """The last value of ``set_exit_reason``, or the empty string."""
        (size,) = struct.unpack("<H", self._text[:2])
        return bytes(self._text[2 : 2 + min(size, _TEXT_BYTES)]).decode(errors="replace")


class HeartbeatTable:
    """``slots`` slots in memory that all processes forked later share."""

    def __init__(self, slots: int) -> None:
        self._map = mmap.mmap(-1, max(1, slots) * SLOT_BYTES)
        view = memoryview(self._map)
        self.slots = tuple(HeartbeatSlot(view[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for i in range(slots))


class CoreLendingTable:
    """The table of lent cores: for each worker a cache line that says whether it is busy, and one per lent core.

    ``lends``: the number of cores that each worker lends.  A worker that does not run lends nothing.
    """

    def __init__(self, lends: Mapping[WorkerId, int]) -> None:
        self.name = secrets.token_hex(8)  # no other host has one of this name
        self._seats: dict[WorkerId, CoreSeats] = {}
        lines = 0
        for worker, count in lends.items():
            self._seats[worker] = CoreSeats(lines, lines + 1, count)
            lines += 1 + count
        self._map = mmap.mmap(-1, max(1, lines) * LINE_BYTES)
        self._words = memoryview(self._map).cast("I")
        self._numbers = {worker: number for number, worker in enumerate(lends, start=1)}
        for worker in lends:
            self.reset(worker)

    def reset(self, worker: WorkerId) -> None:
        """Mark the worker as busy and return the cores that it borrowed.  Only while no process of it runs."""
        self._words[self._line(self._seats[worker].owner)] = 1
        for seats in self._seats.values():
            for line in range(seats.first, seats.first + seats.count):
                if self._words[self._line(line)] & 0xFF == self._numbers[worker]:
                    self._words[self._line(line)] = 0

    def cores_of(self, worker: WorkerId, loans: Iterable[CoreLoan]) -> SharedCores:
        """The worker's view of the table; to be called in its process."""
        borrowed = [
            CoreSeats(seats.owner, seats.first, min(loan.cores, seats.count), loan.cpus)
            for loan in loans
            for seats in [self._seats[loan.lender]]
        ]
        return SharedCores(self._map, self._numbers[worker], self._seats[worker], borrowed)

    @staticmethod
    def _line(number: int) -> int:
        return number * LINE_BYTES // 4


class HeartbeatWriter:
    """Beats before each step, with the predicted end of the step (``engine.loop.EngineHeartbeat``)."""

    def __init__(self, slot: HeartbeatSlot, steps: Callable[[], int], now_ns: Callable[[], int] = monotonic_ns) -> None:
        """``steps``: steps computed so far."""
        self._slot = slot
        self._steps = steps
        self._now_ns = now_ns

    def beat(self, predicted_s: float) -> None:
        now = self._now_ns()
        self._slot.beat(now, now + int(predicted_s * 1e9), self._steps())
