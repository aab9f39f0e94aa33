"""Ranks of one host, one process each: arrays go through memory that all of them map (cpp/collectives/shm_group.hpp).

The memory is a file without a name, made before the processes are forked.  A rank that waits spins for a while and then
sleeps.  No rank is given up by the clock: ``check`` is called while a rank waits, and raises when another one is known
to have ended.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from penstock.config.mesh import Mesh
from penstock.errors import GroupError

if TYPE_CHECKING:
    from penstock.kernels import _native

SLOT_BYTES = 1 << 18
"""A piece of an array that is written and read at once; larger arrays go piece by piece."""

SPIN_US = 20.0
"""How long a waiting rank spins before it sleeps."""

CHECK_S = 0.25
"""Between two calls of ``check``."""

_GATHER, _EXCHANGE, _SENT, _MESSAGE = range(4)
_NAMES = ("all_gather", "all_to_all", "send", "send_message")


def _group_class() -> type[_native.ShmGroup]:
    """The kernels' class.  A service whose workers have one rank is put together without the extension."""
    from penstock.kernels import _native

    return _native.ShmGroup


def _nothing() -> None:
    """The check of a group whose processes are watched by others."""


class ShmMemory:
    """The memory of one group.  Processes that are forked later have it too."""

    def __init__(self, ranks: int, *, slot_bytes: int = SLOT_BYTES) -> None:
        self.ranks = ranks
        self.slot_bytes = slot_bytes
        file = os.memfd_create("penstock-group")
        try:
            os.ftruncate(file, _group_class().bytes_needed(ranks, slot_bytes))
            self._map = mmap.mmap(file, 0)
        finally:
            os.close(file)

    def group(self, rank: int, *, spin_us: float = SPIN_US, check: Callable[[], None] = _nothing) -> ShmCollectives:
        """One rank's connection; once a rank, in its own process."""
        return ShmCollectives(self.native(rank, spin_us), rank, self, check)

    def end(self) -> None:
        """End the group: a rank that waits, or calls anything later, gets a GroupError."""
        self.native(0, 0.0).end()

    def native(self, rank: int, spin_us: float) -> _native.ShmGroup:
        """The same as the kernels have it."""
        return _group_class()(np.frombuffer(self._map, np.uint8), rank, self.ranks, self.slot_bytes, spin_us)


class ShmMesh:
    """The memory of all groups of a mesh.  Processes that are forked later have it too."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self._all = ShmMemory(mesh.ranks)
        ranks = range(mesh.ranks)
        self._tensor = {group: ShmMemory(len(group)) for group in {mesh.tensor_group(rank) for rank in ranks}}
        self._pipeline = {group: ShmMemory(len(group)) for group in {mesh.pipeline_group(rank) for rank in ranks}}

    def everybody(self, rank: int) -> ShmCollectives:
        """The group of all ranks."""
        return self._all.group(rank)

    def tensor(self, rank: int, *, spin_us: float = SPIN_US) -> ShmCollectives:
        """The group of the rank's stage."""
        group = self.mesh.tensor_group(rank)
        return self._tensor[group].group(group.index(rank), spin_us=spin_us)

    def pipeline(self, rank: int, *, spin_us: float = SPIN_US) -> ShmCollectives:
        """The group of ranks with the same part of a layer."""
        group = self.mesh.pipeline_group(rank)
        return self._pipeline[group].group(group.index(rank), spin_us=spin_us)


class ShmCollectives:
    """The ``Collectives`` of one rank; arrays are fp32, in NumPy.  ``native``: the same as the kernels have it."""

    def __init__(self, native: _native.ShmGroup, rank: int, memory: ShmMemory, check: Callable[[], None]) -> None:
        self.native = native
        self._slot = memory.slot_bytes
        self._check = check
        self.rank = rank
        self.size = memory.ranks

    def all_gather(self, own: NDArray[np.float32]) -> list[NDArray[np.float32]]:
        """The pieces of the largest array decide how often the ranks meet."""
        data, rows = _bytes_of(own), len(own)
        found: list[NDArray[np.float32]] = []
        first, most = 0, 1
        while first < most:
            totals = self._meet(_GATHER, rows, data[first : first + self._slot], len(data))
            if first == 0:
                found = [np.empty((rows, total // 4 // max(1, rows)), np.float32) for total in totals]
                most = max(totals)
            for rank, array in enumerate(found):
                self.native.read(rank, _piece(array, first, self._slot))
            first += self._slot
        return found

    def all_to_all(self, parts: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        """Piece by piece to all and from all, so that no rank waits for room while another one does too."""
        if len(parts) != self.size:
            raise ValueError(f"{len(parts)} arrays for {self.size} ranks")
        self._meet(_EXCHANGE, 0, np.empty(0, np.uint8), 0)
        peers = [rank for rank in range(self.size) if rank != self.rank]
        data = [_bytes_of(part) for part in parts]
        found = {self.rank: np.array(parts[self.rank], np.float32)}
        totals = dict.fromkeys(peers, 1)  # bytes of what comes; at least one piece does
        first = 0
        while any(first < max(1, len(data[rank]), totals[rank]) for rank in peers):
            for rank in peers:
                if first < max(1, len(data[rank])):
                    self._send(rank, data[rank][first:], (_EXCHANGE, len(parts[rank]), len(data[rank])))
            for rank in peers:
                if first < totals[rank]:
                    rows, total = self._await_sent(rank, _EXCHANGE)
                    totals[rank] = max(1, total)
                    array = found.setdefault(rank, np.empty((rows, total // 4 // max(1, rows)), np.float32))
                    self.native.receive(rank, _piece(array, first, self._slot))
            first += self._slot
        return [found[rank] for rank in range(self.size)]

    def send(self, array: NDArray[np.float32], to: int) -> None:
        data = _bytes_of(array)
        for first in range(0, max(1, len(data)), self._slot):
            self._send(to, data[first:], (_SENT, len(array), len(data)))

    def recv(self, source: int, shape: tuple[int, ...]) -> NDArray[np.float32]:
        array = np.empty(shape, np.float32)
        for first in range(0, max(1, array.nbytes), self._slot):
            if self._await_sent(source, _SENT) != (len(array), array.nbytes):
                raise self._fail(f"rank {source} sent an array of another shape than {list(shape)}")
            self.native.receive(source, _piece(array, first, self._slot))
        return array

    def send_message(self, message: bytes, to: int) -> None:
        """Bytes to another rank, which receives what one rank sends it in this order."""
        data = np.frombuffer(message, np.uint8)
        for first in range(0, max(1, len(data)), self._slot):
            self._send(to, data[first:], (_MESSAGE, 0, len(data)))

    def recv_message(self, source: int) -> bytes:
        """The next message of a rank."""
        message, first = np.empty(0, np.uint8), 0
        while first == 0 or first < len(message):
            _, total = self._await_sent(source, _MESSAGE)
            if first == 0:
                message = np.empty(total, np.uint8)
            self.native.receive(source, message[first : first + self._slot])
            first += self._slot
        return message.tobytes()

    def _send(self, to: int, data: NDArray[np.uint8], label: tuple[int, int, int]) -> None:
        """The first piece of the data."""
        piece = data[: self._slot]
        self._until(lambda: self.native.send(to, piece, label, CHECK_S))

    def _await_sent(self, source: int, operation: int) -> tuple[int, int]:
        """Rows and bytes of the array of which a piece has come."""
        self._until(lambda: self.native.wait_sent(source, CHECK_S))
        tag, rows, total = self.native.sent_label(source)
        if tag != operation:
            raise self._fail(f"rank {source} calls {_NAMES[tag]}, not {_NAMES[operation]}")
        return rows, total

    def _meet(self, operation: int, rows: int, piece: NDArray[np.uint8], total: int) -> list[int]:
        """Post a piece to all and wait for theirs; the bytes of each rank's whole array."""
        try:
            self.native.post(piece, (operation, rows, total))
        except RuntimeError as error:
            raise GroupError(str(error)) from error
        totals = []
        for rank in range(self.size):
            self._until(lambda rank=rank: self.native.wait(rank, CHECK_S))  # type: ignore[misc]
            tag, their_rows, their_total = self.native.label(rank)
            if (tag, their_rows) != (operation, rows):
                theirs, ours = f"{_NAMES[tag]} of {their_rows} rows", f"{_NAMES[operation]} of {rows}"
                raise self._fail(f"rank {rank} calls {theirs}, this one {ours}")
            totals.append(their_total)
        return totals

    def _until(self, ready: Callable[[], bool]) -> None:
        try:
            while not ready():
                self._check()
        except RuntimeError as error:
            raise GroupError(str(error)) from error

    def _fail(self, why: str) -> GroupError:
        """The error of a group that is over, for the other ranks too."""
        self.native.end()
        return GroupError(why)


def _bytes_of(array: NDArray[np.float32]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array, np.float32).reshape(-1).view(np.uint8)


def _piece(array: NDArray[np.float32], first: int, nbytes: int) -> NDArray[np.uint8]:
    """Bytes of an array that is filled piece by piece."""
    return array.reshape(-1).view(np.uint8)[first : first + nbytes]
