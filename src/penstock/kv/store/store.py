"""All tiers of one worker, nearest first: which tier has a page, how long fetching takes, and which tiers store a page.

No call blocks: threads do the work (``tier_worker``), and results come as events.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue

from blake3 import blake3

from penstock.config.base import expanded_path
from penstock.config.schema import KvStoreConfig
from penstock.errors import ConfigError
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.store.envelope import AnyEnvelope, PageEnvelope, check_cipher, make_envelope, read_key
from penstock.kv.store.mooncake.tier import MooncakeConfig, MooncakeTier
from penstock.kv.store.page_index import index_bytes
from penstock.kv.store.peer_tier import PeerTier
from penstock.kv.store.redis_tier import RedisTier, check_redis_url
from penstock.kv.store.slab_tier import SlabFile, SlabTier, slab_head
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.kv.store.tier_worker import (
    JobRunner,
    JobThread,
    PageLoad,
    StoreEvent,
    StoreRequest,
    TierContext,
    TierWorker,
)
from penstock.telemetry.metrics import tier_counter
from penstock.types import ModelIdentity, PageId, WorkerId


class PageStore:
    """Without tiers it holds nothing and stores nothing."""

    def __init__(
        self,
        tiers: Sequence[KvTier],
        memory: KvMemory,
        generation: Callable[[PageId], int],
        clock: Callable[[], float],
        config: KvStoreConfig,
        *,
        job_runner: Callable[[str, Callable[[], float], float], JobRunner] = JobThread,
    ) -> None:
        """``tiers``: nearest first.  Starts their threads (``job_runner`` creates one), so create it after every
        fork."""
        self._news: SimpleQueue[StoreEvent] = SimpleQueue()
        self._memory = memory
        self._clock = clock
        self.config = config
        context = TierContext(memory, generation, clock, config, self._news, job_runner)
        self._tiers = [TierWorker(number, tier, context) for number, tier in enumerate(tiers)]
        self._peers = [work.tier for work in self._tiers if work.tier.name == "peers"]

    def __bool__(self) -> bool:
        return bool(self._tiers)

    @property
    def remote_tiers(self) -> list[int]:
        """Working tiers whose content must be looked up asynchronously (``lookup``)."""
        now = self._clock()
        return [n for n, work in enumerate(self._tiers) if work.tier.is_remote and work.usable(now)]

    @property
    def local_tiers(self) -> list[int]:
        """Tiers that store copies and can be looked up at once, nearest first."""
        return [n for n, work in enumerate(self._tiers) if work.tier.stores_copies and not work.tier.is_remote]

    def find_pages(self, keys: Sequence[PageKey], among: Sequence[int] | None = None) -> list[int | None]:
        """For each page the nearest local tier (``among`` these) that has it."""
        found: list[int | None] = [None] * len(keys)
        now = self._clock()
        for number, work in enumerate(self._tiers):
            if work.tier.is_remote or (among is not None and number not in among):
                continue
            open_places = [place for place, tier in enumerate(found) if tier is None]
            if not open_places:
                break
            there = work.contains([keys[place] for place in open_places], now)
            for place, has in zip(open_places, there, strict=True):
                if has:
                    found[place] = number
        return found

    def lookup(self, tier: int, ticket: StoreRequest, keys: Sequence[PageKey]) -> None:
        """Look up in a remote tier how many of these pages, from the first on, it has.  Results in ``LookupDone``."""
        self._tiers[tier].lookup(ticket, keys)

    def load_page(self, tier: int, ticket: StoreRequest, place: int, wanted: tuple[PageKey, PageId]) -> PageLoad:
        """Fetch a page into this worker's memory.  The page belongs to the tier until ``LoadDone``, or until the
        load is withdrawn."""
        key, page = wanted
        return self._tiers[tier].load_page(ticket, place, key, self._memory.view(page))

    def tier_name(self, tier: int) -> str:
        """One of ``telemetry.metrics.TIERS``."""
        return self._tiers[tier].tier.name

    def read_s(self, tier: int) -> float:
        """Seconds to read a page."""
        return self._tiers[tier].read_s

    def on_fetch_skipped(self, tiers: Iterable[int]) -> None:
        """Pages of these tiers were recomputed because fetching was predicted to take longer."""
        for tier in set(tiers):
            self._tiers[tier].on_fetch_skipped()

    def peer_read_s(self) -> float | None:
        """Seconds to read a page from another worker's cache; None without that tier."""
        return next((work.read_s for work in self._tiers if work.tier.name == "peers"), None)

    def save_page(self, final: FinalPage) -> None:
        """Offer a full and final page to all tiers that find it worth storing."""
        now = self._clock()
        for work in self._tiers:
            if work.accepts(final, now):
                work.save_page(final)

    def on_evicted(self, key: PageKey) -> None:
        """The page has left this worker's memory."""
        for tier in self._peers:
            tier.on_evicted(key)

    def pop_events(self, most: int) -> list[StoreEvent]:
        """Events since the last call, at most ``most``."""
        news: list[StoreEvent] = []
        try:
            while len(news) < most:
                news.append(self._news.get_nowait())
        except Empty:
            pass
        return news

    def counters(self) -> dict[str, float]:
        """Counters of all tiers, by ``telemetry.metrics.tier_counter``."""
        return {
            tier_counter(work.tier.name, figure): value
            for work in self._tiers
            for figure, value in work.metrics().items()
        }

    def close(self) -> None:
        """Finish pending writes within ``close_s``, and close the tiers."""
        for work in self._tiers:
            work.finish()
        deadline = self._clock() + self.config.close_s
        for work in self._tiers:
            work.close(deadline)


log = logging.getLogger("penstock.worker")


class SharedStoreMemory:
    """Anonymous memory that all workers of a service share; created before they are forked."""

    def __init__(self, config: KvStoreConfig, sizes: Sequence[tuple[WorkerId, int]]) -> None:
        """``sizes``: pages of each worker that has KV memory here.  Raises ConfigError."""
        self.sizes = tuple(sizes)
        self.directory = self.host = -1
        self.domain = ""  # names the workers that share it: they can read each other's pages
        if config.peers and len(self.sizes) > 1:
            self.directory = _memfd("kv-directory", index_bytes(sum(pages for _, pages in self.sizes)))
            self.domain = secrets.token_hex(8)
        if config.host_bytes:
            self.host = _memfd("kv-host", 0)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For a child to inherit."""
        return tuple(each for each in (self.directory, self.host) if each >= 0)

    def close(self) -> None:
        """The memory goes with its last user.  Idempotent."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.directory = self.host = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOwner:
    """The worker whose store it is."""

    worker: WorkerId
    identity: ModelIdentity
    layout: KvLayout
    peers: Mapping[WorkerId, KvMemory]  # mapped read-only


def check_store_config(config: KvStoreConfig) -> None:
    """Check the key file and the libraries before anything is started.  Raises ConfigError."""
    if config.disk is not None:
        expanded_path(config.disk, "--kv-disk")
    if config.key_file is not None:
        read_key(Path(config.key_file))
        check_cipher()
    if config.redis is not None:
        check_redis_url(config.redis, "--kv-redis")
    if config.mooncake is not None:
        MooncakeTier.check(config.mooncake)
        log.warning(
            "KV store: Mooncake's clients listen on all addresses of this host, in clear: keep others from them"
        )


def open_tiers(config: KvStoreConfig, share: SharedStoreMemory, place: StoreOwner) -> list[KvTier]:
    """Tiers, nearest first.  A tier that cannot be opened is left out with a log line: it costs computation, not
    responses."""
    key = None if config.key_file is None else read_key(Path(config.key_file))
    plain, sealed = PageEnvelope(place.identity, place.layout), make_envelope(place.identity, place.layout, key)
    names = [worker for worker, _ in share.sizes]
    if place.worker not in names:
        return []
    writer, writers = names.index(place.worker), len(names)
    tiers: list[KvTier] = []

    def peers() -> KvTier:
        return PeerTier(share.directory, share.sizes, place.worker, place.peers, plain)

    def host() -> KvTier:
        head = slab_head(place.identity, place.layout, config.host_bytes, encrypted=False)
        return SlabTier("host", SlabFile.memory(share.host, head, writer=writer, writers=writers), plain)

    def disk() -> KvTier:
        head = slab_head(place.identity, place.layout, config.disk_bytes, encrypted=key is not None)
        path = expanded_path(config.disk or "", "--kv-disk") / slab_file_name(place, encrypted=key is not None)
        return SlabTier(
            "disk", SlabFile.at(path, head, writer=writer, writers=writers, direct=config.direct_io), sealed
        )

    wanted = (
        (share.directory >= 0, "peers", peers),
        (share.host >= 0, "host", host),
        (config.disk is not None, "disk", disk),
        (config.redis is not None, "redis", lambda: _redis(config, sealed)),
        (config.mooncake is not None, "mooncake", lambda: _mooncake(config, sealed)),
    )
    for asked, name, make in wanted:
        if asked:
            try:
                tier = make()
            except ConfigError as error:
                log.error("KV store: no %s tier: %s", name, error)
                continue
            tiers.append(tier)
            if isinstance(tier, SlabTier):
                log.info("KV store: %s has room for %d pages, %d are there", name, tier.places, tier.pages)
    return tiers


def _redis(config: KvStoreConfig, seal: AnyEnvelope) -> KvTier:
    url = config.redis or ""
    return RedisTier(url, seal, timeout_s=config.remote_timeout_s, expire_s=config.remote_expire_s)


def _mooncake(config: KvStoreConfig, seal: AnyEnvelope) -> KvTier:
    at = MooncakeConfig(
        master=config.mooncake or "",
        metadata=config.mooncake_metadata,
        protocol=config.mooncake_protocol,
        devices=config.mooncake_devices,
        segment_bytes=config.mooncake_bytes,
    )
    return MooncakeTier(at, seal, timeout_s=config.remote_timeout_s)


def slab_file_name(place: StoreOwner, *, encrypted: bool) -> str:
    """A name for each model, numerics class and layout, so that they can share a folder."""
    kind = blake3(f"{place.identity.numerics} {place.layout.name} {encrypted}".encode()).hexdigest()[:8]
    return f"{place.identity.fingerprint[:16]}-{kind}.kv"


def _memfd(label: str, nbytes: int) -> int:
    try:
        descriptor = os.memfd_create(f"penstock-{label}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        raise ConfigError(f"cannot make shared memory for the KV store: {error.strerror}") from None
    return descriptor
