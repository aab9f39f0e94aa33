"""Tiers of the KV store for tests: small pages, files in a folder of the test, a Redis and a Mooncake of its own."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from tests.mooncake_rig import mooncake_store, mooncake_tier

from penstock.kernels.operands import KvShape
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.store.envelope import AnyEnvelope, PageEnvelope
from penstock.kv.store.page_index import index_bytes
from penstock.kv.store.peer_tier import PeerTier
from penstock.kv.store.redis_tier import RedisTier
from penstock.kv.store.slab_tier import SlabFile, SlabTier, slab_head
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.kv.store.tier_worker import Job
from penstock.types import BlockHash, ModelIdentity, PageId, WorkerId

IDENTITY = ModelIdentity(fingerprint="a" * 64, numerics="null-1")
LAYOUT = KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=32), "bf16")  # 2 KiB a page
SIZE = 1 << 21
"""Of files: places for some hundred pages, beside the directory's rings."""

WORKERS = ((WorkerId("one"), 32), (WorkerId("two"), 48))


def key_of(number: int, group: int = 0) -> PageKey:
    return PageKey(BlockHash(random.Random(number).randbytes(32)), group)


def page_of(number: int, layout: KvLayout = LAYOUT) -> bytes:
    return random.Random(-1 - number).randbytes(layout.page_bytes)


def final_of(number: int, *, page: int = 0, saves_s: float = 1.0) -> FinalPage:
    return FinalPage(key_of(number), PageId(page), 1, saves_s, gain_s=1.0, chance=0.5)


def slab_tier(
    path: Path,
    *,
    share: tuple[int, int] = (0, 1),
    nbytes: int = SIZE,
    identity: ModelIdentity = IDENTITY,
    seal: AnyEnvelope | None = None,
    direct: bool = True,
) -> SlabTier:
    seal = seal or PageEnvelope(identity, LAYOUT)
    head = slab_head(identity, LAYOUT, nbytes, encrypted=seal.encrypts)
    return SlabTier("disk", SlabFile.at(path, head, writer=share[0], writers=share[1], direct=direct), seal)


@dataclass
class Pair:
    """A tier as two workers see it; ``put`` has the first one keep a page, ``other`` is to find it."""

    writer: KvTier
    other: KvTier
    memory: KvMemory | None = None  # the first worker's own, where that matters
    damage: Callable[[int], None] | None = None  # flip a bit of what is kept of this page
    kept: dict[int, int] = field(default_factory=dict)  # number -> page in that memory

    def put(self, number: int) -> bool:
        page = self.kept.setdefault(number, len(self.kept)) if self.memory is not None else 0
        if self.memory is not None:
            self.memory.view(PageId(page))[:] = page_of(number)
        return self.writer.write_page(final_of(number, page=page), memoryview(page_of(number)))

    def get(self, number: int) -> bytes | None:
        self.other.contains([key_of(number)])
        into = bytearray(LAYOUT.page_bytes)
        return bytes(into) if self.other.read_page(key_of(number), memoryview(into)) else None


def flip(path: Path, start: int, stop: int, rng: random.Random) -> Callable[[], None]:
    """Turn one bit of a file round; what is returned turns it back."""
    at, bit = rng.randrange(start, stop), 1 << rng.randrange(8)

    def turn() -> None:
        with path.open("r+b") as file:
            file.seek(at)
            byte = file.read(1)[0]
            file.seek(at)
            file.write(bytes([byte ^ bit]))

    turn()
    return turn


TIERS = ("host", "disk", "disk, buffered", "disk, encrypted", "peers", "redis", "redis, encrypted")


@contextlib.contextmanager
def pair(kind: str, folder: Path, redis_url: Callable[[], str]) -> Iterator[Pair]:
    seal = _seal(kind)
    if kind.startswith("disk"):
        path = folder / "pages.kv"
        tiers = [slab_tier(path, share=(n, 2), seal=seal, direct="buffered" not in kind) for n in range(2)]
        yield Pair(tiers[0], tiers[1])
    elif kind == "host":
        descriptor = os.memfd_create("test-kv-host")
        head = slab_head(IDENTITY, LAYOUT, SIZE, encrypted=False)
        tiers = [SlabTier("host", SlabFile.memory(descriptor, head, writer=n, writers=2), seal) for n in range(2)]
        os.close(descriptor)
        yield Pair(tiers[0], tiers[1])
    elif kind == "peers":
        memories = {worker: KvMemory.anonymous(LAYOUT, pages) for worker, pages in WORKERS}
        descriptor = os.memfd_create("test-kv-directory")
        os.ftruncate(descriptor, index_bytes(sum(pages for _, pages in WORKERS)))
        tiers = [PeerTier(descriptor, WORKERS, worker, memories, seal) for worker, _ in WORKERS]
        os.close(descriptor)
        yield Pair(tiers[0], tiers[1], memory=memories[WORKERS[0][0]])
    elif kind.startswith("mooncake"):
        with mooncake_store(folder) as store:
            tiers = [mooncake_tier(store, seal) for _ in range(2)]
            yield Pair(tiers[0], tiers[1])
            for tier in tiers:
                tier.close()
    else:
        tiers = [RedisTier(redis_url(), seal, timeout_s=5.0, expire_s=60) for _ in range(2)]
        yield Pair(tiers[0], tiers[1])
    for tier in tiers:
        tier.close()


def _seal(kind: str) -> AnyEnvelope:
    if "encrypted" not in kind:
        return PageEnvelope(IDENTITY, LAYOUT)
    from penstock.kv.store.envelope import EncryptedEnvelope

    pytest.importorskip("cryptography", reason="the extra with cryptography is not installed")
    return EncryptedEnvelope(IDENTITY, LAYOUT, bytes(range(32)))


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    """The URL of a Redis that listens at a socket in ``folder`` and nowhere else."""
    server = shutil.which("redis-server")
    if server is None:
        pytest.skip("no redis-server: apt-get install redis-server")
    socket = folder / "redis"
    words = [
        server,
        "--port",
        "0",
        "--unixsocket",
        str(socket),
        "--save",
        "",
        "--appendonly",
        "no",
        "--dir",
        str(folder),
    ]
    process = subprocess.Popen([*words, "--maxmemory", "64mb"], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while not socket.exists():
            assert process.poll() is None, f"redis-server ended with {process.returncode}"
            assert time.monotonic() < deadline, "redis-server does not listen"
            time.sleep(0.01)
        yield f"unix://{socket}"
    finally:
        process.kill()
        process.wait()


class HandNow:
    """Does jobs when it is told to, on the thread that tells it."""

    def __init__(self, name: str, clock: Callable[[], float], pause_s: float) -> None:
        self.name = name
        self.busy_since: float | None = None
        self.jobs: list[Job] = []
        self.asleep = False
        del clock, pause_s

    @property
    def queued(self) -> int:
        return len(self.jobs)

    def submit(self, job: Job) -> None:
        self.jobs.append(job)
        if not self.asleep:
            self.work()

    def work(self) -> None:
        while self.jobs:
            self.jobs.pop(0)()

    def finish(self) -> None:
        self.work()

    def join(self, patience_s: float) -> bool:
        del patience_s
        return not self.jobs
