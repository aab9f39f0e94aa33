"""The rates of tenants, where all gateways of a host see them (``edge.rates.Buckets``): one that is forked anew begins
with what is left, and several share it.

::

    slot (32 bytes):  hash of tenant and unit, 16 | left, double | at, double     found by open addressing

A gateway holds the file's lock while it looks and writes, some microseconds.  The kernel takes the lock from one that
dies; where one is stopped while it holds it, others go on without, and a request may be counted wrongly.  The memory
has no name: it is gone when the last process that maps it is.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
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
_LOCK_TRIES = 1000
"""Some milliseconds: a thousand times as long as anybody holds the lock that is not stopped."""


class SharedTokenBuckets:
    """Made before gateways are forked; each of them uses it from one thread."""

    def __init__(self, max_tenants: int) -> None:
        """Room for twice the buckets of so many tenants."""
        self._slots = 1 << (4 * max_tenants - 1).bit_length()
        self.descriptor = os.memfd_create("penstock-rates")
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, self._slots * _SLOT.size)
        self._memory = mmap.mmap(self.descriptor, self._slots * _SLOT.size)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """See ``RateBuckets``."""
        locked = self._lock()
        try:
            yield
        finally:
            if locked:
                fcntl.lockf(self.descriptor, fcntl.LOCK_UN)

    def get(self, tenant: str, unit: str) -> BucketLevel | None:
        """See ``RateBuckets``."""
        name = _name(tenant, unit)
        at = self._find(name)
        return BucketLevel(*_LEVEL.unpack_from(self._memory, at + _HASH_BYTES)) if self._holds(at, name) else None

    def put(self, tenant: str, unit: str, level: BucketLevel) -> None:
        """See ``RateBuckets``."""
        name = _name(tenant, unit)
        _SLOT.pack_into(self._memory, self._find(name), name, *level)

    def _lock(self) -> bool:
        for _ in range(_LOCK_TRIES):
            try:
                fcntl.lockf(self.descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                continue
            return True
        return False

    def _holds(self, at: int, name: bytes) -> bool:
        return self._memory[at : at + _HASH_BYTES] == name

    def _find(self, name: bytes) -> int:
        """Where the slot of this name begins; or a free one; or the one that was used longest ago, which is full again
        unless there are far more tenants than there may be."""
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
