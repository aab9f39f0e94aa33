"""What the processes of a host share without a name: the heartbeat board, and who lends whom a core.

The heartbeat board has one slot a worker, written by the worker, read by the supervisor.

Each slot has one writer, and a field is one aligned 8-byte word, so nothing is ever torn within a field and nothing
needs a lock.  Two fields may be seen from either side of a beat; a reader that judges by several looks in a row (as
``restart`` does) is not misled by that.  The board has no name: it is gone when the last process that maps it is.
Knows nothing about processes, messages or what a step is.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum

from penstock.config.schema import CoreLoan
from penstock.kernels.core_lending import LINE_BYTES, CoreSeats, SharedCores
from penstock.types import Role, WorkerId, WorkerState

SLOT_BYTES = 512
_WORDS = 8  # one cache line of counters ahead of the last words
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
    ROLE = 5  # one more than its number; 0: as it was started.  Outlives the process that wrote it
    CONNECTIONS = 6  # of a process with an HTTP face


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """What a slot said at one look.  Times are monotonic seconds of this host."""

    incarnation: int
    state: WorkerState
    beat_s: float  # when the worker last turned its loop
    predicted_end_s: float  # when it expects to turn it again at the latest
    steps: int


class HeartbeatSlot:
    """One worker's place on the board."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[: 8 * _WORDS].cast("Q")
        self._text = memory[8 * _WORDS : SLOT_BYTES]

    def reset(self, incarnation: int, now_ns: int) -> None:
        """Make the slot that of a new incarnation that has not started yet.  Only while no worker writes to it."""
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

    def on_progress(self) -> None:
        """I am not ready yet, but further than before."""
        now_ns = time.monotonic_ns()
        self.beat(now_ns, now_ns, 0)

    def set_state(self, state: WorkerState) -> None:
        """Tell the supervisor how far this worker is."""
        self._words[_Word.STATE] = _STATES.index(state)

    def set_connections(self, count: int) -> None:
        """So many connections of clients are this process' own."""
        self._words[_Word.CONNECTIONS] = count

    @property
    def connections(self) -> int:
        """What ``tell_connections`` was told last."""
        return self._words[_Word.CONNECTIONS]

    def assign_role(self, role: Role) -> None:
        """Another role was given to this worker: its next incarnation has it, too."""
        self._words[_Word.ROLE] = 1 + _ROLES.index(role)

    @property
    def assigned_role(self) -> Role | None:
        """The role that was given to this worker, or None if none ever was."""
        number = self._words[_Word.ROLE]
        return _ROLES[number - 1] if 0 < number <= len(_ROLES) else None

    def set_exit_reason(self, text: str) -> None:
        """Why this process is about to end, for the supervisor to repeat.  Cut to what fits."""
        raw = text.encode()[:_TEXT_BYTES]
        self._text[2 : 2 + len(raw)] = raw
        self._text[:2] = struct.pack("<H", len(raw))

    def read(self) -> Heartbeat:
        """The slot as it is now."""
        words = self._words
        return Heartbeat(
            incarnation=words[_Word.INCARNATION],
            state=_STATES[min(words[_Word.STATE], len(_STATES) - 1)],
            beat_s=words[_Word.BEAT_NS] / 1e9,
            predicted_end_s=words[_Word.PREDICTED_END_NS] / 1e9,
            steps=words[_Word.STEPS],
        )

    def exit_reason(self) -> str:
        """What ``last_words`` left, or the empty string."""
        (size,) = struct.unpack("<H", self._text[:2])
        return bytes(self._text[2 : 2 + min(size, _TEXT_BYTES)]).decode(errors="replace")


class HeartbeatBoard:
    """``slots`` slots in memory that every process forked after this shares."""

    def __init__(self, slots: int) -> None:
        self._map = mmap.mmap(-1, max(1, slots) * SLOT_BYTES)
        view = memoryview(self._map)
        self.slots = tuple(HeartbeatSlot(view[i * SLOT_BYTES : (i + 1) * SLOT_BYTES]) for i in range(slots))


class CoreLendingBoard:
    """Who lends whom a core: for each worker a cache line that says whether it is busy, and one for each of its seats.

    ``lends``: cores that each worker lends.  Workers that do not begin yet, or never come back, lend nothing.
    """

    def __init__(self, lends: Mapping[WorkerId, int]) -> None:
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
        """This worker begins anew: it is busy, and sits nowhere.  Only while no process of it runs."""
        self._words[self._line(self._seats[worker].owner)] = 1
        for seats in self._seats.values():
            for line in range(seats.first, seats.first + seats.count):
                if self._words[self._line(line)] & 0xFF == self._numbers[worker]:
                    self._words[self._line(line)] = 0

    def cores_of(self, worker: WorkerId, loans: Iterable[CoreLoan]) -> SharedCores:
        """This worker's part; to be called in its process."""
        borrowed = [
            CoreSeats(seats.owner, seats.first, min(loan.cores, seats.count), loan.cpus)
            for loan in loans
            for seats in [self._seats[loan.lender]]
        ]
        return SharedCores(self._map, self._numbers[worker], self._seats[worker], borrowed)

    @staticmethod
    def _line(number: int) -> int:
        return number * LINE_BYTES // 4
