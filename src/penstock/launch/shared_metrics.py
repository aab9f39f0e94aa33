"""What the gateways of a host count, in memory that they share, so that each of them can show the sum.

::

    gateway 0:  half 0 | half 1      each: number, length, hash; then a ``telemetry.merged_metrics.GatewaySnapshot``
    gateway 1:  half 0 | half 1
    ...

A gateway writes a snapshot every ``metrics_publish_s``, into the half that is not its latest.  Who reads takes the
latest half whose hash is right, so a gateway that is killed while it writes leaves the snapshot before.  The supervisor
holds the memory, and outlives gateways: a restarted one goes on counting where the one before it ended, and what a
gateway has counted is not lost with it, but for the last second.  The memory is anonymous and grows with what is
written; nothing of the unused rest of a half exists.
"""

from __future__ import annotations

import asyncio
import logging
import os
import struct
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from hashlib import blake2b

import msgspec

from penstock.clock import Clock
from penstock.config.limits import RequestLimits
from penstock.telemetry.merged_metrics import (
    GatewaySnapshot,
    MetricSamples,
    continue_counters,
    decode_snapshot,
    encode_snapshot,
    merge,
)
from penstock.telemetry.registry import Metrics, render_page

log = logging.getLogger(__name__)

_HEAD = struct.Struct("<QQ16s")
_HALF_BYTES = 64 << 20
_HASH_BYTES = 16
MAX_SNAPSHOT_BYTES = _HALF_BYTES - _HEAD.size


class SharedMetrics:
    """The memory.  Constructed before gateways are forked; each writes its own snapshots, and reads all."""

    def __init__(self, gateways: Sequence[str]) -> None:
        """``gateways``: their names."""
        self.gateways = tuple(gateways)
        self.descriptor = os.memfd_create("penstock-metrics")
        weakref.finalize(self, os.close, self.descriptor)

    def write(self, gateway: str, snapshot: GatewaySnapshot) -> None:
        """Replaces the gateway's snapshot.  One that is too large is logged, and not written."""
        encoded = encode_snapshot(snapshot)
        if len(encoded) > MAX_SNAPSHOT_BYTES:
            log.warning("metrics of %d bytes are not shared; at most %d are", len(encoded), MAX_SNAPSHOT_BYTES)
            return
        number = max(self._head(gateway, half)[0] for half in (0, 1)) + 1
        head = _HEAD.pack(number, len(encoded), _hash(number, encoded))
        os.pwrite(self.descriptor, head + encoded, self._offset(gateway, number % 2))

    def read(self, gateway: str) -> GatewaySnapshot | None:
        """Its latest snapshot; None: there is none yet."""
        heads = sorted((self._head(gateway, half), half) for half in (0, 1))
        for (number, length, digest), half in reversed(heads):
            if not 0 < length <= MAX_SNAPSHOT_BYTES:
                continue
            encoded = os.pread(self.descriptor, length, self._offset(gateway, half) + _HEAD.size)
            if _hash(number, encoded) == digest:
                try:
                    return decode_snapshot(encoded)
                except msgspec.DecodeError as error:  # a bug: who wrote it runs the same code
                    log.error("metrics of %s cannot be read: %s", gateway, error)
        return None

    def _head(self, gateway: str, half: int) -> tuple[int, int, bytes]:
        """Number, length and hash; zeros where nothing was written."""
        head = os.pread(self.descriptor, _HEAD.size, self._offset(gateway, half))
        return _HEAD.unpack(head.ljust(_HEAD.size, b"\0"))

    def _offset(self, gateway: str, half: int) -> int:
        return (2 * self.gateways.index(gateway) + half) * _HALF_BYTES


def _hash(number: int, encoded: bytes) -> bytes:
    return blake2b(encoded, digest_size=_HASH_BYTES, salt=number.to_bytes(16, "little")).digest()


class HostMetrics:
    """The metrics pages of one gateway: that of its host, and that of each gateway alone."""

    def __init__(
        self, metrics: Metrics, shared: SharedMetrics, gateway: str, *, clock: Clock, limits: RequestLimits
    ) -> None:
        """``metrics`` are those of this process, which is ``gateway``; ``clock``: CLOCK_MONOTONIC."""
        self._metrics = metrics
        self._shared = shared
        self._gateway = gateway
        self._clock = clock
        self._limits = limits
        self._writing = threading.Lock()
        self._ended = False
        before = shared.read(gateway)
        self._earlier = before.without_gauges() if before is not None else []
        for snapshot in filter(None, map(shared.read, shared.gateways)):
            metrics.totals.inherit(snapshot.carried)

    def snapshot(self) -> Callable[[], bytes]:
        """``api.admin.MetricsSnapshot`` of the host: all gateways, and what workers reported to this one."""
        own, seen, now = self._own(), self._metrics.look_at_workers(), self._clock.now()

        def make() -> bytes:
            siblings = (name for name in self._shared.gateways if name != self._gateway)
            others = [snapshot for snapshot in map(self._shared.read, siblings) if snapshot is not None]
            for snapshot in others:
                for worker, carried in snapshot.carried.items():
                    seen.totals.adopt(worker, carried)
            pages = [own(), *(self._counting(snapshot, now) for snapshot in others)]
            return render_page([*(family.metric() for family in merge(pages)), *seen.families()])

        return make

    def gateway_page(self, gateway: str) -> Callable[[], bytes] | None:
        """What one gateway of this host counted itself, at most ``metrics_publish_s`` ago; None: there is none of this
        name."""
        if gateway not in self._shared.gateways:
            return None
        snapshot, now = self._shared.read(gateway), self._clock.now()
        families = self._counting(snapshot, now) if snapshot is not None else ()
        return lambda: render_page(family.metric() for family in families)

    async def publish_periodically(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.to_thread(self._publisher(ended=False))
            await asyncio.sleep(self._limits.metrics_publish_s)

    def end(self) -> None:
        """This gateway ends: its gauges say nothing any more."""
        self._publisher(ended=True)()

    def _publisher(self, *, ended: bool) -> Callable[[], None]:
        own, carried, now = self._own(), self._metrics.totals.carried(), self._clock.now()

        def publish() -> None:
            with self._writing:  # a cancelled task does not end its thread
                if not self._ended:
                    self._ended = ended
                    self._shared.write(self._gateway, GatewaySnapshot(now, ended, own(), carried))

        return publish

    def _own(self) -> Callable[[], list[MetricSamples]]:
        """This gateway's families, with what its earlier incarnations counted."""
        look, workers = self._metrics.look(), set(self._metrics.totals.workers())
        return lambda: continue_counters(
            [MetricSamples.of(metric) for metric in look()], _of_workers(self._earlier, workers)
        )

    def _counting(self, snapshot: GatewaySnapshot, now: float) -> Sequence[MetricSamples]:
        if snapshot.ended or now - snapshot.at_s > self._limits.metrics_stale_s:
            return snapshot.without_gauges()
        return snapshot.families


def _of_workers(families: Iterable[MetricSamples], workers: set[str]) -> list[MetricSamples]:
    """Without series of workers that are gone; those are not shown for ever."""
    shown = {None, *workers}
    return [
        MetricSamples(
            family.name,
            family.help,
            family.kind,
            [sample for sample in family.samples if sample.labels.get("worker") in shown],
        )
        for family in families
    ]
