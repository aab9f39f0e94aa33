"""Tenants' token buckets in memory that all gateways of a host share: a restarted gateway goes on with what is left.

::

    slot (32 bytes):  hash of tenant and unit, 16 | left, double | at, double     found by open addressing

A gateway holds the file's lock while it reads and writes, for some microseconds.  Linux releases the lock of a process
that dies; if one is stopped while it holds the lock, each of the others waits once, ``LOCK_WAIT_S``, and goes on
without it: a request may be miscounted.  The memory is anonymous: it is freed with the last process that maps it.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from hashlib import blake2b

from penstock.interfaces import BucketLevel

_SLOT = struct.Struct("<16sdd")
_LEVEL = struct.Struct("<dd")
_HASH_BYTES = 16
_FREE = b"\0" * _HASH_BYTES
_PROBES = 64
LOCK_WAIT_S = 0.02
"""A running process holds the lock for microseconds; one that lost its core in the middle has one again by then."""


class SharedTokenBuckets:
    """Constructed before gateways are forked; each of them uses it from one thread."""

    def __init__(self, max_tenants: int) -> None:
        """Allocates twice the buckets of ``max_tenants``."""
        self._holder_stopped = False
        self._slots = 1 << (4 * max_tenants - 1).bit_length()
        self.descriptor = os.memfd_create("penstock-rates")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self._slots * _SLOT.size)
        self._memory = mmap.mmap(self.descriptor, self._slots * _SLOT.size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        locked = self._lock()
        try:
            yield
        finally:
            if locked:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def get(self, tenant: str, unit: str) -> BucketLevel | None:
        name = _name(tenant, unit)
        at = self._find(name)
        return BucketLevel(*_LEVEL.unpack_from(self._memory, at + _HASH_BYTES)) if self._holds(at, name) else None

    def put(self, tenant: str, unit: str, level: BucketLevel) -> None:
        name = _name(tenant, unit)
        _SLOT.pack_into(self._memory, self._find(name), name, *level)

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

    def _holds(self, at: int, name: bytes) -> bool:
        return self._memory[at : at + _HASH_BYTES] == name

    def _find(self, name: bytes) -> int:
        """Offset of this name's slot, else of a free one, else of the least recently used one, whose bucket is full
        again unless there are far more tenants than allowed."""
        first = int.from_bytes(name[:8], "little")
        for i in range(_PROBES):
            at = (first + i) % self._slots * _SLOT.size
            if self._memory[at : at + _HASH_BYTES] in (name, _FREE):
                return at
        places = [(first + i) % self._slots * _SLOT.size for i in range(_PROBES)]
        return min(places, key=lambda at: _LEVEL.unpack_from(self._memory, at + _HASH_BYTES)[1])


@lru_cache(1 << 12)
def _name(tenant: str, unit: str) -> bytes:
    return blake2b(f"{unit}\0{tenant}".encode(), digest_size=_HASH_BYTES).digest()
