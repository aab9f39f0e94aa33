"""Lending of cores between the workers of one host, as one worker sees it.  The protocol is in
``cpp/threads/core_lending.hpp``.

Knows lines of shared memory, not whose they are: ``launch.board`` lays them out.  Imports nothing that starts a thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LINE_BYTES = 64


class CoreLending(Protocol):
    """The cores of this process, and of others who have nothing to do."""

    def lend(self) -> None:
        """There is nothing to do here until ``take``."""
        ...

    def take(self) -> None:
        """There may be something to do.  Waits for what others are just computing here: 1 ms at most."""
        ...

    def borrowed_s(self) -> float:
        """Core-seconds computed at cores of others."""
        ...


class NoLending:
    """Nothing is lent and nothing borrowed."""

    def lend(self) -> None:
        """See ``CoreLending.lend``."""

    def take(self) -> None:
        """See ``CoreLending.take``."""

    def borrowed_s(self) -> float:
        """See ``CoreLending.borrowed_s``."""
        return 0.0


@dataclass(frozen=True, slots=True)
class CoreSeats:
    """Cores of one owner: its line, the line of its first seat, how many seats, and the processors they are on."""

    owner: int
    first: int
    count: int
    cpus: tuple[int, ...] = ()  # empty: wherever the system decides


class SharedCores:
    """The C++ kernels' threads, with guests at the cores of others.  One at a time in a process."""

    def __init__(self, memory: mmap.mmap, me: int, own: CoreSeats, loans: Sequence[CoreSeats]) -> None:
        """``memory`` is shared by all who lend; ``me``, 1 to 255, tells borrowers apart."""
        from penstock.kernels import _native  # the reference kernels do without

        lines = memoryview(memory).cast("I", (len(memory) // LINE_BYTES, LINE_BYTES // 4))
        self._share = _native.CoreShare(lines, me, _loan(own), [_loan(loan) for loan in loans])
        self._guest_seconds = _native.guest_seconds

    def lend(self) -> None:
        """See ``CoreLending.lend``."""
        self._share.lend()

    def take(self) -> None:
        """See ``CoreLending.take``."""
        self._share.take()

    def borrowed_s(self) -> float:
        """See ``CoreLending.borrowed_s``."""
        return self._guest_seconds()

    def close(self) -> None:
        """Ends the guests; not while an operation runs.  Idempotent."""
        self._share.close()


def _loan(seats: CoreSeats) -> tuple[int, int, int, list[int]]:
    return seats.owner, seats.first, seats.count, list(seats.cpus)
