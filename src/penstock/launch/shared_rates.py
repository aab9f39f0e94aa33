"""Limits that all gateways of a host share, in memory: tenants' token buckets, and open requests of API keys.

::

    bucket:  hash of tenant and unit, 16 | left | at | size | demand | used at | share | set at (doubles)
    counts:             hash of a key's id, 16 | open requests of gateway 0, uint32 | of gateway 1 | ...

A bucket fills at this host's share of the tenant's rate, and holds a minute's worth of that share.  Where other hosts
have gateways, too, ``router.rate_shares`` sets shares.  A changed share changes no level, except that a level is never
above what the bucket holds: however shares move, all hosts together have no more than one bucket would.  A host that
joins others begins with its floor, not with full buckets.

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
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache
from hashlib import blake2b
from math import exp, inf, isnan, nan
from secrets import token_hex
from typing import NamedTuple

import numpy as np

from penstock.interfaces import BucketLevel
from penstock.router.rate_shares import MIN_SHARE

_MINUTE_S = 60.0
_DEMAND_S = 5.0
"""Demands decay with this time constant."""
_SLOT = struct.Struct("<16s7d")
_BUCKET = struct.Struct("<7d")
_NOT_USED_HERE = 1.0
"""The size of a bucket before its first use: its level is a part of a minute's rate."""
_COLUMNS = np.dtype(
    [("name", "V16"), *((name, "<f8") for name in ("left", "at", "size", "demand", "used", "share", "share_at"))]
)
_HEAD = struct.Struct("<3d")
_COUNT = struct.Struct("<I")
_HASH_BYTES = 16
_FREE = b"\0" * _HASH_BYTES
_PROBES = 64
LOCK_WAIT_S = 0.02
"""A running process holds the lock for microseconds; one that lost its core in the middle has one again by then."""


class _SharedTable:
    """Memory with slots that begin with the hash of a name, and its lock."""

    def __init__(self, label: str, slots: int, slot_bytes: int, more: int = 0) -> None:
        """With so many ``more`` bytes behind the slots."""
        self._holder_stopped = False
        self.slots, self.slot_bytes = slots, slot_bytes
        self.descriptor = os.memfd_create(label)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, slots * slot_bytes + more)
        self.memory = mmap.mmap(self.descriptor, slots * slot_bytes + more)

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


class _Bucket(NamedTuple):
    """A slot without its name."""

    left: float  # of ``size``, at ``at``
    at: float
    size: float  # tokens a minute, or _NOT_USED_HERE
    demand: float  # recent, as a part of a minute's rate
    used: float  # when there was last demand
    share: float  # 0: an equal one
    share_at: float


class _Head(NamedTuple):
    hosts: float  # with gateways; 0: not known, so there is one
    exchanged: float  # when demands were last sent
    joined: float  # when this host found others; -inf: it was there first; nan: not known


class SharedTokenBuckets:
    """``api.load_shedding.RateBuckets`` and ``router.rate_shares.RateTable``.  Constructed before gateways are forked;
    each of them uses it from one thread."""

    def __init__(self, max_tenants: int, key: bytes = b"") -> None:
        """Allocates twice the buckets of ``max_tenants``.  ``key``: hosts with the same key name buckets alike."""
        slots = 1 << (4 * max_tenants - 1).bit_length()
        self._table = _SharedTable("penstock-rates", slots, _SLOT.size, _HEAD.size)
        self.descriptor = self._table.descriptor
        self.host = token_hex(8)  # ``Hello.host``
        self._key = blake2b(key, digest_size=32).digest()
        self._head_at = slots * _SLOT.size
        self._asked: dict[bytes, tuple[int, _Bucket]] = {}  # in this scope of the lock
        self._set_head(_Head(0.0, -inf, nan))

    def locked(self) -> AbstractContextManager[None]:
        self._asked.clear()
        return self._table.locked()

    # --- of a gateway that admits requests ---------------------------------------------------------------------------

    def ask(self, tenant: str, unit: str, size: int, amount: int, now: float) -> BucketLevel:
        name = _name(self._key, tenant, unit)
        at, head = self._find(name), self._head()
        bucket = self._bucket(at, name, head, now)
        level = _level(bucket, size, head, now)
        demand = _decayed(bucket, now) + amount / size
        asked = _Bucket(level.left, now, size, demand, now, bucket.share, bucket.share_at)
        self._write(at, name, asked)
        self._asked[name] = (at, asked)
        return level

    def put(self, tenant: str, unit: str, left: float, now: float) -> None:
        name = _name(self._key, tenant, unit)
        at, bucket = self._asked.pop(name)
        self._write(at, name, bucket._replace(left=left, at=now))

    @property
    def hosts(self) -> int:
        """Hosts with gateways, as far as known."""
        return max(1, int(self._head().hosts))

    # --- of the exchange with other hosts ----------------------------------------------------------------------------

    def claim_exchange(self, now: float, every_s: float) -> bool:
        head = self._head()
        if now - head.exchanged < every_s:
            return False
        self._set_head(head._replace(exchanged=now))
        return True

    def set_hosts(self, hosts: int, now: float) -> None:
        head = self._head()
        joined = head.joined
        if hosts != max(1.0, head.hosts):
            self._settle(now)
        if isnan(joined):
            joined = -inf if hosts <= 1 else now
            if joined > -inf:  # requests before the first report found full buckets
                columns = self._columns()
                columns["left"] = np.minimum(columns["left"], MIN_SHARE * columns["size"] / hosts)
        self._set_head(_Head(hosts, head.exchanged, joined))

    def expire_shares(self, before: float, now: float) -> None:
        columns = self._columns()
        expired = (columns["share"] > 0) & (columns["share_at"] < before)
        if expired.any():
            self._settle(now)
            columns["share"][expired] = 0.0

    def set_shares(self, shares: Mapping[bytes, float], now: float) -> None:
        self._settle(now)
        self._columns()["share"][:] = 0.0
        head = self._head()
        for name, share in shares.items():
            at = self._find(name)
            bucket = self._bucket(at, name, head, now)
            self._write(
                at, name, bucket._replace(left=min(bucket.left, share * bucket.size), share=share, share_at=now)
            )

    def busiest(self, most: int, now: float) -> dict[bytes, float]:
        columns = self._columns()
        (slots,) = np.nonzero((columns["demand"] > 0) & (columns["used"] > now - _MINUTE_S))
        quiet = np.maximum(0.0, now - columns["used"][slots])
        demands = np.minimum(columns["demand"][slots] * np.exp(-quiet / _DEMAND_S), 1e9)
        first = np.argsort(-demands, kind="stable")[:most]
        return {
            bytes(self._table.memory[at : at + _HASH_BYTES]): float(demand)
            for at, demand in zip((slots[first] * _SLOT.size).tolist(), demands[first].tolist(), strict=True)
        }

    # --- memory ------------------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> None:
        """Fills all buckets up to now, at the shares that held until now."""
        columns, hosts = self._columns(), max(1.0, self._head().hosts)
        share = np.where(columns["share"] > 0, columns["share"], 1 / hosts)
        holds = columns["size"] * share
        quiet = np.maximum(0.0, now - columns["at"])
        columns["left"] = np.minimum(holds, columns["left"] + quiet * holds / _MINUTE_S)
        columns["at"] = now

    def _columns(self) -> np.ndarray:
        return np.frombuffer(self._table.memory, _COLUMNS, self._table.slots)

    def _bucket(self, at: int, name: bytes, head: _Head, now: float) -> _Bucket:
        """What is at this place; a new bucket where it has another name."""
        if self._table.holds(at, name):
            return _Bucket(*_BUCKET.unpack_from(self._table.memory, at + _HASH_BYTES))
        share = 1 / max(1.0, head.hosts)
        left = share
        if head.joined > -inf:
            left = min(share, MIN_SHARE * share + max(0.0, now - head.joined) * share / _MINUTE_S)
        return _Bucket(left, now, _NOT_USED_HERE, 0.0, now, 0.0, now)

    def _write(self, at: int, name: bytes, bucket: _Bucket) -> None:
        _SLOT.pack_into(self._table.memory, at, name, *bucket)

    def _head(self) -> _Head:
        return _Head(*_HEAD.unpack_from(self._table.memory, self._head_at))

    def _set_head(self, head: _Head) -> None:
        _HEAD.pack_into(self._table.memory, self._head_at, *head)

    def _find(self, name: bytes) -> int:
        """Offset of this name's slot, else of a free one, else of the least recently used one, whose bucket is full
        again unless there are far more tenants than allowed."""
        table = self._table
        first = int.from_bytes(name[:8], "little")
        for i in range(_PROBES):
            at = (first + i) % table.slots * _SLOT.size
            if table.memory[at : at + _HASH_BYTES] in (name, _FREE):
                return at
        return min(
            table.probes(name), key=lambda at: _Bucket(*_BUCKET.unpack_from(table.memory, at + _HASH_BYTES)).used
        )


def _level(bucket: _Bucket, size: int, head: _Head, now: float) -> BucketLevel:
    """The level with what was refilled since.  The size may have changed in the file of keys."""
    share = bucket.share or 1 / max(1.0, head.hosts)
    left = bucket.left * size if bucket.size == _NOT_USED_HERE else bucket.left
    holds = size * share
    return BucketLevel(min(holds, left + max(0.0, now - bucket.at) * holds / _MINUTE_S), share)


def _decayed(bucket: _Bucket, now: float) -> float:
    return bucket.demand * exp(-max(0.0, now - bucket.used) / _DEMAND_S)


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
        name = _name(b"", key, "open requests")
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
def _name(key: bytes, tenant: str, unit: str) -> bytes:
    return blake2b(f"{unit}\0{tenant}".encode(), digest_size=_HASH_BYTES, key=key).digest()
