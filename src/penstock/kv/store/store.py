"""All tiers of one worker, nearest first: who has a page, how long fetching it takes, and who should keep one.

No call blocks: what takes time is done by threads (``at_work``), and their answers are ``news``.
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

from penstock.config.schema import KvStoreConfig
from penstock.errors import ConfigError
from penstock.kv.layout import KvLayout
from penstock.kv.memory import KvMemory
from penstock.kv.store.envelope import AnyEnvelope, PageEnvelope, check_cipher, make_envelope, read_key
from penstock.kv.store.mooncake.tier import MooncakeConfig, MooncakeTier
from penstock.kv.store.page_index import index_bytes
from penstock.kv.store.peer_tier import PeerTier
from penstock.kv.store.redis_tier import RedisTier
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
    """See above.  Without tiers it has nothing and takes nothing."""

    def __init__(
        self,
        tiers: Sequence[KvTier],
        memory: KvMemory,
        generation: Callable[[PageId], int],
        clock: Callable[[], float],
        config: KvStoreConfig,
        *,
        hand: Callable[[str, Callable[[], float], float], JobRunner] = JobThread,
    ) -> None:
        """``tiers``: nearest first.  Begins their threads (``hand`` makes one): to be made after every fork."""
        self._news: SimpleQueue[StoreEvent] = SimpleQueue()
        self._memory = memory
        self._clock = clock
        self.config = config
        around = TierContext(memory, generation, clock, config, self._news, hand)
        self._tiers = [TierWorker(number, tier, around) for number, tier in enumerate(tiers)]
        self._peers = [work.tier for work in self._tiers if work.tier.name == "peers"]

    def __bool__(self) -> bool:
        return bool(self._tiers)

    @property
    def remote_tiers(self) -> list[int]:
        """Tiers that must be asked (``ask``) what they have, as far as they work now."""
        now = self._clock()
        return [n for n, work in enumerate(self._tiers) if work.tier.is_remote and work.usable(now)]

    @property
    def local_tiers(self) -> list[int]:
        """Tiers that keep copies and can be asked without a journey, nearest first."""
        return [n for n, work in enumerate(self._tiers) if work.tier.stores_copies and not work.tier.is_remote]

    def find_pages(self, keys: Sequence[PageKey], among: Sequence[int] | None = None) -> list[int | None]:
        """The nearest tier (``among`` these) that has each page, remote ones apart."""
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
        """How many of these pages, from the first on, does a remote tier have?  ``Found`` is the answer."""
        self._tiers[tier].lookup(ticket, keys)

    def load_page(self, tier: int, ticket: StoreRequest, place: int, wanted: tuple[PageKey, PageId]) -> PageLoad:
        """Bring a page into this worker's memory.  It belongs to the tier until ``Loaded`` says how it went, or the
        load is withdrawn."""
        key, page = wanted
        return self._tiers[tier].load_page(ticket, place, key, self._memory.view(page))

    def tier_name(self, tier: int) -> str:
        """One of ``telemetry.metrics.TIERS``."""
        return self._tiers[tier].tier.name

    def read_s(self, tier: int) -> float:
        """Seconds a page."""
        return self._tiers[tier].read_s

    def on_fetch_skipped(self, tiers: Iterable[int]) -> None:
        """Pages of these were not fetched because that was thought to take longer than computing them."""
        for tier in set(tiers):
            self._tiers[tier].on_fetch_skipped()

    def peer_read_s(self) -> float | None:
        """Seconds a page out of other workers' caches; None: they cannot be reached."""
        return next((work.read_s for work in self._tiers if work.tier.name == "peers"), None)

    def save_page(self, final: FinalPage) -> None:
        """A page is full and final: let those keep it that find it worth while."""
        now = self._clock()
        for work in self._tiers:
            if work.accepts(final, now):
                work.save_page(final)

    def on_evicted(self, key: PageKey) -> None:
        """This worker's memory does not have the page any more."""
        for tier in self._peers:
            tier.on_evicted(key)

    def pop_events(self, most: int) -> list[StoreEvent]:
        """What has come since the last call, so much of it at most."""
        news: list[StoreEvent] = []
        try:
            while len(news) < most:
                news.append(self._news.get_nowait())
        except Empty:
            pass
        return news

    def counters(self) -> dict[str, float]:
        """Of all tiers, by ``telemetry.metrics.tier_counter``."""
        return {
            tier_counter(work.tier.name, figure): value
            for work in self._tiers
            for figure, value in work.metrics().items()
        }

    def close(self) -> None:
        """Write what is left, within ``close_s`` of them all, and let go."""
        for work in self._tiers:
            work.finish()
        deadline = self._clock() + self.config.close_s
        for work in self._tiers:
            work.close(deadline)


# MERGED: From settings to tiers: what a worker opens when it begins, and what is made for it before it is
# MERGED: forked.

log = logging.getLogger("penstock.worker")


class SharedStoreMemory:
    """What the workers of one service share: made before they are forked, and without a name in the file system."""

    def __init__(self, config: KvStoreConfig, sizes: Sequence[tuple[WorkerId, int]]) -> None:
        """``sizes``: pages of each worker that has KV memory here.  Raises ConfigError."""
        self.sizes = tuple(sizes)
        self.directory = self.host = -1
        self.domain = ""  # names those who share it, for whoever asks what they can take from each other
        if config.peers and len(self.sizes) > 1:
            self.directory = _memfd("kv-directory", index_bytes(sum(pages for _, pages in self.sizes)))
            self.domain = secrets.token_hex(8)
        if config.host_bytes:
            self.host = _memfd("kv-host", 0)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """For a child to keep."""
        return tuple(each for each in (self.directory, self.host) if each >= 0)

    def close(self) -> None:
        """The memory goes with its last user.  May be called twice."""
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.directory = self.host = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreOwner:
    """Whose store it is."""

    worker: WorkerId
    identity: ModelIdentity
    layout: KvLayout
    peers: Mapping[WorkerId, KvMemory]  # mapped read-only


def check_store_config(config: KvStoreConfig) -> None:
    """Before anything is started: the key's file, and the libraries.  Raises ConfigError."""
    if config.key_file is not None:
        read_key(Path(config.key_file))
        check_cipher()
    if config.redis is not None:
        RedisTier.check(config.redis)
    if config.mooncake is not None:
        MooncakeTier.check(config.mooncake)
        log.warning(
            "KV store: Mooncake's clients listen on all addresses of this host, in clear: keep others from them"
        )


def open_tiers(config: KvStoreConfig, share: SharedStoreMemory, place: StoreOwner) -> list[KvTier]:
    """Nearest first.  A tier that cannot be had is left out with a word in the log: it costs computing, no answers."""
    key = None if config.key_file is None else read_key(Path(config.key_file))
    plain, sealed = PageEnvelope(place.identity, place.layout), make_envelope(place.identity, place.layout, key)
    names = [worker for worker, _ in share.sizes]
    if place.worker not in names:
        return []
    own = (names.index(place.worker), len(names))
    tiers: list[KvTier] = []

    def peers() -> KvTier:
        return PeerTier(share.directory, share.sizes, place.worker, place.peers, plain)

    def host() -> KvTier:
        head = slab_head(place.identity, place.layout, config.host_bytes, encrypted=False)
        return SlabTier("host", SlabFile.memory(share.host, head, own), plain)

    def disk() -> KvTier:
        head = slab_head(place.identity, place.layout, config.disk_bytes, encrypted=key is not None)
        path = Path(config.disk or "").expanduser() / slab_file_name(place, encrypted=key is not None)
        return SlabTier("disk", SlabFile.at(path, head, own, direct=config.direct_io), sealed)

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
    """One for each model, numerics class and layout, so that a folder may serve several."""
    kind = blake3(f"{place.identity.numerics} {place.layout.name} {encrypted}".encode()).hexdigest()[:8]
    return f"{place.identity.fingerprint[:16]}-{kind}.kv"


def _memfd(label: str, nbytes: int) -> int:
    try:
        descriptor = os.memfd_create(f"penstock-{label}", os.MFD_CLOEXEC)
        os.ftruncate(descriptor, nbytes)
    except OSError as error:
        raise ConfigError(f"cannot make shared memory for the KV store: {error.strerror}") from None
    return descriptor
