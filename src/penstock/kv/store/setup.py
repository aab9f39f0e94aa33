"""From settings to tiers: what a worker opens when it begins, and what is made for it before it is forked."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from penstock.config.schema import KvStoreConfig
from penstock.errors import ConfigError
from penstock.kv.layout import KvLayout
from penstock.kv.memory import KvMemory
from penstock.kv.store.directory import area_bytes
from penstock.kv.store.mooncake.tier import MooncakeAt, MooncakeTier
from penstock.kv.store.peers import PeerTier
from penstock.kv.store.port import Tier
from penstock.kv.store.remote import RedisTier
from penstock.kv.store.seal import AnySeal, StoreSeal, check_cipher, read_key, seal_for
from penstock.kv.store.slab_file import SlabFile, head_for
from penstock.kv.store.slabs import SlabTier
from penstock.types import ModelIdentity, WorkerId

log = logging.getLogger("penstock.worker")


class StoreShare:
    """What the workers of one service share: made before they are forked, and without a name in the file system."""

    def __init__(self, config: KvStoreConfig, sizes: Sequence[tuple[WorkerId, int]]) -> None:
        """``sizes``: pages of each worker that has KV memory here.  Raises ConfigError."""
        self.sizes = tuple(sizes)
        self.directory = self.host = -1
        self.domain = ""  # names those who share it, for whoever asks what they can take from each other
        if config.peers and len(self.sizes) > 1:
            self.directory = _memfd("kv-directory", area_bytes(sum(pages for _, pages in self.sizes)))
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
class Place:
    """Whose store it is."""

    worker: WorkerId
    identity: ModelIdentity
    layout: KvLayout
    peers: Mapping[WorkerId, KvMemory]  # mapped read-only


def check(config: KvStoreConfig) -> None:
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


def open_tiers(config: KvStoreConfig, share: StoreShare, place: Place) -> list[Tier]:
    """Nearest first.  A tier that cannot be had is left out with a word in the log: it costs computing, no answers."""
    key = None if config.key_file is None else read_key(Path(config.key_file))
    plain, sealed = StoreSeal(place.identity, place.layout), seal_for(place.identity, place.layout, key)
    names = [worker for worker, _ in share.sizes]
    if place.worker not in names:
        return []
    own = (names.index(place.worker), len(names))
    tiers: list[Tier] = []

    def peers() -> Tier:
        return PeerTier(share.directory, share.sizes, place.worker, place.peers, plain)

    def host() -> Tier:
        head = head_for(place.identity, place.layout, config.host_bytes, encrypted=False)
        return SlabTier("host", SlabFile.memory(share.host, head, own), plain)

    def disk() -> Tier:
        head = head_for(place.identity, place.layout, config.disk_bytes, encrypted=key is not None)
        path = Path(config.disk or "").expanduser() / file_name(place, encrypted=key is not None)
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


def _redis(config: KvStoreConfig, seal: AnySeal) -> Tier:
    url = config.redis or ""
    return RedisTier(url, seal, timeout_s=config.remote_timeout_s, expire_s=config.remote_expire_s)


def _mooncake(config: KvStoreConfig, seal: AnySeal) -> Tier:
    at = MooncakeAt(
        master=config.mooncake or "",
        metadata=config.mooncake_metadata,
        protocol=config.mooncake_protocol,
        devices=config.mooncake_devices,
        segment_bytes=config.mooncake_bytes,
    )
    return MooncakeTier(at, seal, timeout_s=config.remote_timeout_s)


def file_name(place: Place, *, encrypted: bool) -> str:
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
