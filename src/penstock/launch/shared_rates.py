"""Limits that all gateways of a host share, in memory: tenants' token buckets, and open requests of API keys.

::

    bucket (32 bytes):  hash of tenant and unit, 16 | left, double | at, double     found by open addressing
    counts:             hash of a key's id, 16 | open requests of gateway 0, uint32 | of gateway 1 | ...

A restarted gateway goes on with what is left of the buckets; its count of open requests begins at 0, as their
connections have gone.  Each gateway changes its own counts only.

A gateway holds the lock of a table while it reads and writes, for some microseconds.  Linux releases the lock of a
process that dies; if one is stopped while it holds the lock, each of the others waits once, ``LOCK_WAIT_S``, and goes
on without it: a request may be miscounted.  The memory is anonymous: it is freed with the last process that maps it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from hashlib import blake2b

from penstock.interfaces import BucketLevel

_SLOT = struct.Struct("<16sdd")
_LEVEL = struct.Struct("<dd")
_COUNT = struct.Struct("<I")
_HASH_BYTES = 16
_FREE = b"\0" * _HASH_BYTES
_PROBES = 64
LOCK_WAIT_S = 0.02
"""A running process holds the lock for microseconds; one that lost its core in the middle has one again by then."""


class _SharedTable:
    """Memory with slots that begin with the hash of a name, and its lock."""

    def __init__(self, label: str, slots: int, slot_bytes: int) -> None:
        self._holder_stopped = False
        self.slots, self.slot_bytes = slots, slot_bytes
        self.descriptor = os.memfd_create(label)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, slots * slot_bytes)
        self.memory = mmap.mmap(self.descriptor, slots * slot_bytes)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """The scope of the lock."""
        locked = self._lock()
        try:
            yield
        finally:
            if locked:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def _lock(self) -> bool:
        until = 0.0 if self._holder_stopped else time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    self._holder_stopped = True
                    return False
                os.sched_yield()  # the holder may wait for this core
                continue
            self._holder_stopped = False
            return True

    def holds(self, at: int, name: bytes) -> bool:
        """Whether the slot at this offset has this name."""
        return self.memory[at : at + _HASH_BYTES] == name

    def probes(self, name: bytes) -> list[int]:
        """Offsets of the slots that a name may have, in order."""
        first = int.from_bytes(name[:8], "little")
        return [(first + i) % self.slots * self.slot_bytes for i in range(_PROBES)]


class SharedTokenBuckets:
    """Constructed before gateways are forked; each of them uses it from one thread."""

    def __init__(self, max_tenants: int) -> None:
        """Allocates twice the buckets of ``max_tenants``."""
        self._table = _SharedTable("penstock-rates", 1 << (4 * max_tenants - 1).bit_length(), _SLOT.size)
        self.descriptor = self._table.descriptor

    def locked(self) -> AbstractContextManager[None]:
        return self._table.locked()

    def get(self, tenant: str, unit: str) -> BucketLevel | None:
        name = _name(tenant, unit)
        at, table = self._find(name), self._table
        return BucketLevel(*_LEVEL.unpack_from(table.memory, at + _HASH_BYTES)) if table.holds(at, name) else None

    def put(self, tenant: str, unit: str, level: BucketLevel) -> None:
        name = _name(tenant, unit)
        _SLOT.pack_into(self._table.memory, self._find(name), name, *level)

    def _find(self, name: bytes) -> int:
        """Offset of this name's slot, else of a free one, else of the least recently used one, whose bucket is full
        again unless there are far more tenants than allowed."""
        table = self._table
        first = int.from_bytes(name[:8], "little")
        for i in range(_PROBES):
            at = (first + i) % table.slots * _SLOT.size
            if table.memory[at : at + _HASH_BYTES] in (name, _FREE):
                return at
        return min(table.probes(name), key=lambda at: _LEVEL.unpack_from(table.memory, at + _HASH_BYTES)[1])


class SharedRequestCounts:
    """Open requests by key and gateway.  Constructed before gateways are forked."""

    def __init__(self, max_keys: int, gateways: int) -> None:
        """Allocates four slots for each of ``max_keys``, so that names rarely meet."""
        self._counts = struct.Struct(f"<{gateways}I")
        self._table = _SharedTable(
            "penstock-open-requests", 1 << (4 * max_keys - 1).bit_length(), _HASH_BYTES + self._counts.size
        )
        self.descriptor = self._table.descriptor

    def of_gateway(self, number: int) -> GatewayRequestCounts:
        """What gateway ``number``, counted from 0, uses.  To be called in its process, which has no requests yet."""
        return GatewayRequestCounts(self._table, self._counts, number)


class GatewayRequestCounts:
    """``api.concurrency.RequestCounts`` of one gateway; from one thread."""

    def __init__(self, table: _SharedTable, counts: struct.Struct, number: int) -> None:
        self._table = table
        self._counts = counts
        self._own = _HASH_BYTES + number * _COUNT.size  # offset of this gateway's count in a slot
        for slot in range(table.slots):  # those of an earlier incarnation, whose connections have gone
            _COUNT.pack_into(table.memory, slot * table.slot_bytes + self._own, 0)

    def acquire(self, key: str, limit: int) -> int | None:
        """The ticket is the offset of the key's slot.  As at its limit is also a key for which there is no slot."""
        name = _name(key, "open requests")
        with self._table.locked():
            at = self._find(name)
            if at is None or sum(self._counts_at(at)) >= limit:
                return None
            self._table.memory[at : at + _HASH_BYTES] = name
            self._add(at, 1)
            return at

    def release(self, key: str, ticket: int) -> None:
        self._add(ticket, -1)  # no other process writes there

    def _add(self, at: int, more: int) -> None:
        (count,) = _COUNT.unpack_from(self._table.memory, at + self._own)
        _COUNT.pack_into(self._table.memory, at + self._own, max(0, count + more))

    def _counts_at(self, at: int) -> tuple[int, ...]:
        return self._counts.unpack_from(self._table.memory, at + _HASH_BYTES)

    def _find(self, name: bytes) -> int | None:
        """Offset of this name's slot, else of one without open requests; None: all that it may have are in use."""
        places = self._table.probes(name)
        own = next((at for at in places if self._table.holds(at, name)), None)
        return own if own is not None else next((at for at in places if not any(self._counts_at(at))), None)


@lru_cache(1 << 12)
def _name(tenant: str, unit: str) -> bytes:
    return blake2b(f"{unit}\0{tenant}".encode(), digest_size=_HASH_BYTES).digest()
