"""What gateways are sent of this worker besides tokens: its reports, and the changes of its prefix cache.

::

    something changes -------> one report to every gateway, at most every report_min_s and reports_per_s to all
    a gateway says Hello ----> one report to that gateway, at most every report_max_s (report_waiting_s while
                               requests wait here), with many gateways to several together; its first at once

    blocks become known or are evicted --note--> changed --take (once a step)--> KvEvents 7, 8, 9 …
    a gateway that missed some, or is new ----------------snapshot---------> KvEvents 9 in parts: all that is known

A report is made when it is sent, so of several that were due only the newest exists.  How many a gateway gets depends
not on the load, and up to 60 gateways not on their number.  Each gateway's report says which of that gateway's own
messages are counted in it.  What is lost is not repeated: the next report shows the loss, and a gateway that has
missed events asks for a snapshot.

A snapshot is sent in parts, one message a turn, once for all gateways that have asked by then; changes in the meantime
are sent after the last part, in order.  Within a batch only a block's last change counts.

A tier of the KV store does not say what it drops, so some of the demoted blocks are looked up again now and then; until
then they are an estimate, as all that gateways know of caches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from math import inf

import msgspec

from penstock.config.schema import WorkerConfig
from penstock.engine.core.prefix_cache import PrefixCache
from penstock.engine.service.gateways import ConnectedGateway
from penstock.types import BlockHash, WorkerId
from penstock.wire.gateway_messages import KV_EVENT_BLOCKS, KV_KEY_BYTES, Hello, KvEvents, WorkerReport
from penstock.wire.transport import Listener

MAX_DEMOTED = 1 << 18
"""Blocks that are known to be below; those that sank first are forgotten beyond that."""

RESPONSES_PAUSE_S, RESPONSES_PAUSE_GATEWAYS = 0.1, 300
"""An idle worker of so many gateways responds to Hellos once in so long, to all that have come by then, and with fewer
gateways sooner in proportion.  A message that leaves alone wakes the transport's thread, which costs more than to make
it: 300 gateways say 150 Hellos a second."""

LOOKED_AT = 8
"""Blocks that are looked at again at a time."""

NearestTier = Callable[[Sequence[BlockHash]], Sequence[int]]
"""The number of the nearest tier that has each block: 1, 2...; 0: none."""


@dataclass(frozen=True, slots=True)
class LowerTiers:
    """The tiers below this worker's cache."""

    nearest: NearestTier
    count: int


class DemotedBlocks:
    """Changes come out as (block, tier); 0: it is in none, and not in the cache."""

    def __init__(self, nearest: NearestTier) -> None:
        self._nearest = nearest
        self._tiers: dict[BlockHash, int] = {}  # looked at longest ago first

    def remove(self, block: BlockHash) -> None:
        """The cache has it again."""
        self._tiers.pop(block, None)

    def on_evicted(self, blocks: Sequence[BlockHash]) -> Iterator[tuple[BlockHash, int]]:
        """The cache has given these up.  The tiers are asked once for all of them."""
        # All that may have to go are found in one walk: the front of a dict from which much was taken is slow to find.
        oldest = iter(list(islice(self._tiers, max(0, len(self._tiers) + len(blocks) - MAX_DEMOTED))))
        for block, tier in zip(blocks, self._nearest(blocks) if blocks else (), strict=True):
            if tier:
                self._tiers[block] = tier
                if len(self._tiers) > MAX_DEMOTED:
                    forgotten = next(oldest, None) or next(iter(self._tiers))
                    del self._tiers[forgotten]
                    yield forgotten, 0
            yield block, tier

    def recheck(self) -> Iterator[tuple[BlockHash, int]]:
        """What has changed of some since they were looked at last."""
        blocks = list(islice(self._tiers, LOOKED_AT))
        for block, tier in zip(blocks, self._nearest(blocks) if blocks else (), strict=True):
            before = self._tiers.pop(block)
            if tier:
                self._tiers[block] = tier
            if tier != before:
                yield block, tier

    def tiers(self) -> Mapping[BlockHash, int]:
        """Every block, and its tier."""
        return self._tiers


_NOWHERE = -1


class KvEventLog:
    """The log of one incarnation.  ``known`` lists all blocks that the cache has now; ``lower`` those that only one of
    the lower ``tiers`` has, with the number of the nearest: 1, 2, ..."""

    def __init__(
        self,
        worker: WorkerId,
        incarnation: int,
        known: Callable[[], Iterable[BlockHash]],
        lower: Callable[[], Mapping[BlockHash, int] | Iterable[tuple[BlockHash, int]]] = tuple,
        tiers: int = 0,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._known = known
        self._lower = lower
        self._tiers = tiers
        self._changed: dict[bytes, int] = {}  # -> the nearest tier: 0 is the cache
        self.sequence = 0  # of the last message that was taken

    def __len__(self) -> int:
        return len(self._changed)

    def set_cached(self, block: BlockHash, known: bool) -> None:
        """A block is in the cache from now on, or is not any more."""
        self._changed[block[:KV_KEY_BYTES]] = 0 if known else _NOWHERE

    def set_tier(self, block: BlockHash, tier: int) -> None:
        """A block that the cache does not have is in this lower tier from now on, and in none that is nearer."""
        self._changed[block[:KV_KEY_BYTES]] = tier

    def drain(self) -> list[KvEvents]:
        """What has changed since the last call, in order of its numbers."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        by_tier: dict[int, list[bytes]] = {}
        for key, tier in changed.items():
            by_tier.setdefault(tier, []).append(key)
        messages = []
        for start in range(0, max(map(len, by_tier.values())), KV_EVENT_BLOCKS):
            self.sequence += 1
            messages.append(
                self._message(
                    {tier: keys[start : start + KV_EVENT_BLOCKS] for tier, keys in by_tier.items()}, self.sequence
                )
            )
        return messages

    def snapshot(self) -> Iterator[KvEvents]:
        """Everything as it stands after message ``sequence``, in parts.  To be called with nothing left to ``take``.

        Names are copied at once (some 10 ns a block); each part is made when it is asked for.  What changes between
        two parts is in the changes behind ``sequence``, and may or may not be in a part: sent after all parts, those
        changes are the last word either way.
        """
        lower = self._lower()
        tiers = lower if isinstance(lower, Mapping) else dict(lower)
        return self._parts(self.sequence, list(self._known()), list(tiers), tiers)

    def _parts(
        self, sequence: int, known: list[BlockHash], below: list[BlockHash], tiers: Mapping[BlockHash, int]
    ) -> Iterator[KvEvents]:
        entries = chain(((tiers.get(block, _NOWHERE), block) for block in below), ((0, block) for block in known))
        parts = max(1, -(-(len(known) + len(below)) // KV_EVENT_BLOCKS))
        for part in range(parts):
            by_tier: dict[int, list[bytes]] = {}
            for tier, block in islice(entries, KV_EVENT_BLOCKS):
                by_tier.setdefault(tier, []).append(block[:KV_KEY_BYTES])
            yield self._message(by_tier, sequence, part=part, parts=parts)

    def _message(self, by_tier: Mapping[int, list[bytes]], sequence: int, *, part: int = 0, parts: int = 0) -> KvEvents:
        return KvEvents(
            worker=self._worker,
            incarnation=self._incarnation,
            sequence=sequence,
            stored=b"".join(by_tier.get(0, ())),
            removed=b"".join(by_tier.get(_NOWHERE, ())),
            sunk=tuple(b"".join(by_tier.get(tier, ())) for tier in range(1, self._tiers + 1)),
            part=part,
            parts=parts,
        )


COUNTERS_S = 10.0
"""Between two reports to a gateway with all counters; those between them hold only what has changed."""


@dataclass(slots=True)
class _Snapshot:
    """All that is cached, on its way to those who asked for it."""

    to: list[ConnectedGateway]
    parts: Iterator[KvEvents]
    behind: list[KvEvents] = field(default_factory=list[KvEvents])  # changes since it was begun


class KvEventPublisher:
    """Sends them.  ``prefix`` tells this object of its changes from now on; ``make`` makes a report of this moment."""

    def __init__(
        self,
        config: WorkerConfig,
        prefix: PrefixCache,
        listener: Listener,
        make: Callable[[], WorkerReport],
        *,
        lower: LowerTiers | None = None,
    ) -> None:
        self._config = config
        self._listener = listener
        self._make = make
        self._name = (config.worker, config.incarnation)
        self._prefix = prefix
        self._demoted = None if lower is None else DemotedBlocks(lower.nearest)
        if self._demoted is None:
            self._log = KvEventLog(*self._name, prefix.known_blocks)
            prefix.on_change = self._log.set_cached
        else:
            self._log = KvEventLog(*self._name, prefix.known_blocks, self._demoted.tiers, lower.count if lower else 0)
            prefix.on_change = self._cache_changed
        self._evicted: dict[BlockHash, None] = {}  # given up by the cache; no tier was asked for them yet
        self._snapshot_requests: list[ConnectedGateway] = []  # who have asked for all that is cached
        self._snapshot: _Snapshot | None = None  # that is being sent
        self._unknown_peers: dict[bytes, None] = {}  # peers that only ask who listens here
        self._changed = True  # since the last report to all
        self._reported_at = -inf  # when that was
        self._step_s = 0.0  # the step time in it
        self._greeted: dict[ConnectedGateway, None] = {}  # who have said Hello since they were sent a report
        self._responded_at = -inf  # when gateways were last sent one in response to their Hellos

    def _cache_changed(self, block: BlockHash, known: bool) -> None:
        assert self._demoted is not None, "there are lower tiers"
        if known:
            self._evicted.pop(block, None)
            self._demoted.remove(block)
            self._log.set_cached(block, True)
        else:  # while a step is planned: no time to look for it below
            self._evicted[block] = None

    def _log_all(self, changes: Iterable[tuple[BlockHash, int]]) -> None:
        for block, tier in changes:
            if tier:
                self._log.set_tier(block, tier)
            else:
                self._log.set_cached(block, False)

    # --- what happens -----------------------------------------------------------------------------------------------

    def on_hello(self, gateway: ConnectedGateway, hello: Hello) -> None:
        """It will be sent a report.  A second request for a snapshot while one is being sent to it is ignored."""
        self._greeted[gateway] = None
        receives = self._snapshot is not None and gateway in self._snapshot.to
        if hello.kv_snapshot and not receives and gateway not in self._snapshot_requests:
            gateway.follows_cache = True
            self._snapshot_requests.append(gateway)

    @property
    def is_sending_snapshot(self) -> bool:
        """Whether more of a snapshot has to be sent."""
        return self._snapshot is not None

    def on_discovery(self, peer: bytes) -> None:
        """A peer asks which worker listens here."""
        self._unknown_peers[peer] = None

    def mark_changed(self) -> None:
        """Something has happened of which gateways should know."""
        self._changed = True

    # --- when -------------------------------------------------------------------------------------------------------

    def due_in(self, gateways: Sequence[ConnectedGateway], now: float, *, waiting: bool) -> float:
        """Seconds until a report is due; ``inf`` while none is due.  ``waiting``: requests wait here."""
        due = 0.0 if self._unknown_peers or (self._snapshot_requests and not self._log) else inf
        if gateways and self._has_news:
            due = min(due, self._reported_at + self._min_pause(gateways) - now)
        pause, together = self._pause(waiting), self._responded_at + self._responses_pause(gateways, waiting)
        owed = [gateway.reported_at + pause for gateway in self._greeted if not gateway.away]
        if owed:
            first = min(owed)
            due = min(due, (first if first == -inf else max(first, together)) - now)
        return max(0.0, due)

    def send_due(self, gateways: Sequence[ConnectedGateway], now: float, *, waiting: bool) -> None:
        """Called once a turn of the loop: sends what is due."""
        if self._unknown_peers:
            strangers, self._unknown_peers = self._unknown_peers, {}
            report = self._make()
            for peer in strangers:
                self._listener.send(peer, report)
        if self._has_news and now - self._reported_at >= self._min_pause(gateways):
            self.report(gateways, now)
        pause = self._pause(waiting)
        owed = [each for each in self._greeted if now - each.reported_at >= pause]
        together = now - self._responded_at >= self._responses_pause(gateways, waiting)
        if owed and (together or any(gateway.reported_at == -inf for gateway in owed)):
            self._responded_at = now
            for gateway in owed:
                del self._greeted[gateway]
            self._sink()
            self._send([gateway for gateway in owed if not gateway.away], gateways, self._make(), now)
        self._go_on()

    def has_announced(self, step_s: float, now: float) -> bool:
        """Whether all gateways have just been sent a step time of at least ``step_s``."""
        return self._step_s >= step_s and now - self._reported_at < self._config.report_min_s

    def report(self, gateways: Sequence[ConnectedGateway], now: float) -> None:
        """To all, at once: how this worker is, and what has changed in its cache."""
        self._sink()
        report = self._make()
        self._changed, self._reported_at, self._step_s = False, now, report.step_s
        cached = tuple(self._log.drain())
        if self._snapshot is not None:
            self._snapshot.behind += cached
        self._send(gateways, gateways, report, now, cached)

    def _go_on(self) -> None:
        """Send one more part of the snapshot, or begin the next one when all changes have been sent."""
        if self._snapshot is None:
            if not self._snapshot_requests or self._log:
                return
            self._snapshot, self._snapshot_requests = _Snapshot(self._snapshot_requests, self._log.snapshot()), []
        snapshot = self._snapshot
        part = next(snapshot.parts)
        last = part.part + 1 == part.parts
        for gateway in snapshot.to:
            for message in (part, *(snapshot.behind if last else ())):
                if not gateway.away:
                    self._listener.send(gateway.peer, message)
        if last:
            self._snapshot = None

    # --- parts ------------------------------------------------------------------------------------------------------

    @property
    def _has_news(self) -> bool:
        return self._changed or bool(len(self._log)) or bool(self._evicted)

    def _min_pause(self, gateways: Sequence[ConnectedGateway]) -> float:
        return max(self._config.report_min_s, len(gateways) / self._config.reports_per_s)

    def _responses_pause(self, gateways: Sequence[ConnectedGateway], waiting: bool) -> float:
        return 0.0 if waiting else RESPONSES_PAUSE_S * min(1.0, len(gateways) / RESPONSES_PAUSE_GATEWAYS)

    def _pause(self, waiting: bool) -> float:
        return self._config.report_waiting_s if waiting else self._config.report_max_s

    def _sink(self) -> None:
        """Ask lower tiers for what the cache gave up, and for some of what they had."""
        if self._demoted is not None:
            self._log_all(self._demoted.recheck())
            gone, self._evicted = tuple(self._evicted), {}
            self._log_all(self._demoted.on_evicted(gone))

    def _send(
        self,
        to: Sequence[ConnectedGateway],
        gateways: Sequence[ConnectedGateway],
        report: WorkerReport,
        now: float,
        cached: tuple[KvEvents, ...] = (),
    ) -> None:
        busy, sequence = max(1, sum(gateway.serial > 0 for gateway in gateways)), self._log.sequence
        in_parts = self._snapshot.to if self._snapshot is not None else ()
        changes: dict[int, dict[str, float]] = {}  # most gateways know the same
        for gateway in to:
            counters, known = report.counters, gateway.counters
            if gateway.reported_at == -inf or now - gateway.counted_at >= COUNTERS_S:
                gateway.counted_at = now
            elif id(known) in changes:
                counters = changes[id(known)]
            else:
                counters = {name: value for name, value in counters.items() if known.get(name) != value}
                changes[id(known)] = counters
            own = msgspec.structs.replace(
                report,
                counters=counters,
                cached=cached if gateway.follows_cache and gateway not in in_parts else (),
                acked=gateway.serial,
                gateways=busy,
                kv_sequence=sequence,
            )
            self._greeted.pop(gateway, None)
            gateway.reported_at, gateway.counters = now, report.counters
            if not self._listener.send(gateway.peer, own):
                gateway.counted_at = -inf
