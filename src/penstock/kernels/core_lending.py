"""Lending of cores between the workers of one host, as one worker sees it.  The protocol is in
``cpp/threads/core_lending.hpp``.

Knows lines of shared memory, not their owners: ``launch.heartbeat`` lays them out.  Imports nothing that starts a
thread.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

LINE_BYTES = 64


class CoreLending(Protocol):
    """The cores of this process, and those of idle workers."""

    def lend_cores(self) -> None:
        """Lend this process's cores until ``take``: it has no work."""
        ...

    def reclaim_cores(self) -> None:
        """Take the cores back before work begins.  Waits for guests that compute here: 1 ms at most."""
        ...

    def borrowed_s(self) -> float:
        """Core-seconds computed on borrowed cores."""
        ...


class NoLending(CoreLending):
    """Lends and borrows nothing."""

    def lend_cores(self) -> None:
        pass

    def reclaim_cores(self) -> None:
        pass

    def borrowed_s(self) -> float:
        return 0.0


@dataclass(frozen=True, slots=True)
class CoreSeats:
    """Cores of one owner: its line, the line of its first seat, how many seats, and the processors they are on."""

    owner: int
    first: int
    count: int
    cpus: tuple[int, ...] = ()  # empty: the system decides


class SharedCores(CoreLending):
    """The C++ kernels' threads, with guests on the cores of others.  One at a time in a process."""

    def __init__(self, memory: mmap.mmap, me: int, own: CoreSeats, loans: Sequence[CoreSeats]) -> None:
        """``memory`` is shared by all who lend; ``me``, 1 to 255, tells borrowers apart."""
        from penstock.kernels import _native  # the reference kernels do without

        lines = memoryview(memory).cast("I", (len(memory) // LINE_BYTES, LINE_BYTES // 4))
        self._share = _native.CoreShare(lines, me, _loan(own), [_loan(loan) for loan in loans])
        self._guest_seconds = _native.guest_seconds

    def lend_cores(self) -> None:
        self._share.lend()

    def reclaim_cores(self) -> None:
        self._share.take()

    def borrowed_s(self) -> float:
        return self._guest_seconds()

    def close(self) -> None:
        """Ends the guests; not while an operation runs.  Idempotent."""
        self._share.close()


def _loan(seats: CoreSeats) -> tuple[int, int, int, list[int]]:
    return seats.owner, seats.first, seats.count, list(seats.cpus)
