"""What the KV store's tiers take for a page, and how soon a cached prompt is back after a restart.

``tiers``: seconds a page and GB/s of every tier, written and read back, in one process and one thread, with checksums
or encryption, as a worker does it.  ``restart``: a service is started, asked prompts, stopped and started again with
the same disk; how long until the first token of each prompt, computed and fetched.

    PYTHONPATH=src python bench/store.py tiers --dir /var/tmp/kv
    PYTHONPATH=src python bench/store.py restart --dir /var/tmp/kv --tokens 2000
    PYTHONPATH=src python bench/store.py restart --dir /var/tmp/kv --model FOLDER --serve="--aggregated" --json
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from chats import ask, free_port, get, running, wait_for_workers

from penstock.errors import ConfigError
from penstock.kernels.operands import KvShape
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.store.envelope import AnyEnvelope, EncryptedEnvelope, PageEnvelope
from penstock.kv.store.mooncake.tier import MooncakeConfig, MooncakeTier
from penstock.kv.store.page_index import index_bytes
from penstock.kv.store.peer_tier import PeerTier
from penstock.kv.store.redis_tier import RedisTier
from penstock.kv.store.slab_tier import SlabFile, SlabTier, slab_head
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.types import BlockHash, ModelIdentity, PageId, WorkerId

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="bench")
WORKERS = (WorkerId("one"), WorkerId("two"))


def layout_of(page_bytes: int) -> KvLayout:
    """A page of so many bytes: 16 tokens, one layer, one head."""
    return KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=page_bytes // 64), "bf16")


def key_of(number: int) -> PageKey:
    return PageKey(BlockHash(number.to_bytes(32, "little")), 0)


def makers(
    options: argparse.Namespace, layout: KvLayout, folder: Path
) -> Iterator[tuple[str, Callable[[], list[KvTier]]]]:
    """(name, who writes and who reads) of every tier that can be had here."""
    plain, sealed = PageEnvelope(IDENTITY, layout), _sealed(layout)
    nbytes = (options.pages + 8) * 2 * (layout.page_bytes + 8192) + (4 << 20)

    def slabs(name: str, seal: AnyEnvelope, direct: bool) -> list[KvTier]:
        head = slab_head(IDENTITY, layout, nbytes, encrypted=seal.encrypts)
        files = [SlabFile.at(folder / name, head, writer=share, writers=2, direct=direct) for share in range(2)]
        return [SlabTier("disk", file, seal) for file in files]

    def host() -> list[KvTier]:
        descriptor = os.memfd_create("bench")
        head = slab_head(IDENTITY, layout, nbytes, encrypted=False)
        made = [
            SlabTier("host", SlabFile.memory(descriptor, head, writer=share, writers=2), plain) for share in range(2)
        ]
        os.close(descriptor)
        return made

    def peers() -> list[KvTier]:
        sizes = [(worker, options.pages) for worker in WORKERS]
        descriptor = os.memfd_create("bench")
        os.ftruncate(descriptor, index_bytes(2 * options.pages))
        memories = {WORKERS[0]: MEMORY[0]}
        made = [PeerTier(descriptor, sizes, worker, memories, plain) for worker in WORKERS]
        os.close(descriptor)
        return made

    yield "peers", peers
    yield "host", host
    yield "disk, direct", lambda: slabs("direct", plain, True)
    yield "disk, page cache", lambda: slabs("buffered", plain, False)
    if sealed is not None:
        yield "disk, direct, encrypted", lambda: slabs("encrypted", sealed, True)
    if options.mooncake:
        at = MooncakeConfig(master=options.mooncake)
        yield "mooncake", lambda: [MooncakeTier(at, plain, timeout_s=10.0) for _ in range(2)]
    if options.redis:
        yield "redis", lambda: [RedisTier(options.redis, plain, timeout_s=5.0, expire_s=300) for _ in range(2)]


MEMORY: list[KvMemory] = []  # the writer's, of the size that is measured


def _sealed(layout: KvLayout) -> AnyEnvelope | None:
    try:
        return EncryptedEnvelope(IDENTITY, layout, bytes(32))
    except ConfigError:
        return None


def measure(tiers: list[KvTier], layout: KvLayout, count: int) -> dict[str, float]:
    """Microseconds a page, medians."""
    writer, reader = tiers
    pages = [random.Random(number).randbytes(layout.page_bytes) for number in range(8)]
    into = memoryview(bytearray(layout.page_bytes))
    wrote, read = [], []
    for tier in tiers:
        tier.contains([key_of(count)])  # its connection, or its process, is there
    for number in range(count):
        MEMORY[0].view(PageId(number))[:] = pages[number % 8]
        final = FinalPage(key_of(number), PageId(number), 1, 1.0, 1.0, 0.5)
        began = perf_counter()
        writer.write_page(final, memoryview(pages[number % 8]))
        wrote.append(perf_counter() - began)
    os.sync()
    reader.contains([key_of(0)])
    for number in range(count):
        began = perf_counter()
        if not reader.read_page(key_of(number), into):
            raise RuntimeError(f"page {number} is not there")
        read.append(perf_counter() - began)
        if into != pages[number % 8]:
            raise RuntimeError(f"page {number} is another")
    return {"write_us": median(wrote) * 1e6, "read_us": median(read) * 1e6}


def tiers(options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row a size and tier."""
    rows = []
    for size in options.sizes:
        layout = layout_of(size)
        MEMORY[:] = [KvMemory.anonymous(layout, options.pages)]
        with tempfile.TemporaryDirectory(dir=options.dir) as folder:
            for name, make in makers(options, layout, Path(folder)):
                made = make()
                figures = measure(made, layout, options.pages)
                for tier in made:
                    tier.close()
                row = {"page_bytes": size, "tier": name} | {key: round(value, 1) for key, value in figures.items()}
                row |= {f"{way}_gb_s": round(size / figures[f"{way}_us"] / 1e3, 2) for way in ("write", "read")}
                rows.append(row)
                print(json.dumps(row), flush=True)
    return rows


@contextmanager
def service(options: argparse.Namespace, folder: Path) -> Iterator[int]:
    """The port of a service that keeps its pages in ``folder``."""
    port = free_port()
    words = ["serve", *([options.model] if options.model else []), "--port", str(port), "--kv-disk", str(folder)]
    words += ["--kv-disk-size", options.disk_size, *shlex.split(options.serve)]
    with running(words, folder / "log") as process:
        try:
            wait_for_workers(port, None, process)
        except RuntimeError:
            print((folder / "log").read_text(), file=sys.stderr)
            raise
        yield port


def restart(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Milliseconds to the first token of each prompt: computed, and after a restart."""
    prompts = [
        [random.Random(seed).randrange(100, 4000) for _ in range(options.tokens)] for seed in range(options.prompts)
    ]
    options.answer = 1
    found: dict[str, list[float]] = {"computed": [], "fetched": []}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=options.dir)))
        for kind, times in found.items():
            with service(options, folder) as port:
                options.name = get(port, "/v1/models")["data"][0]["id"]
                for seed in range(options.warm_up):  # everybody learns what a step takes
                    ask(port, [4000 - seed] * (options.tokens // 2), options)
                for prompt in prompts:
                    ttft_s, _, cached = ask(port, prompt, options)
                    times.append(ttft_s)
                    if (cached > 0) != (kind == "fetched"):
                        raise RuntimeError(f"{kind}: {cached} of {options.tokens} tokens were cached")
                rows = get(port, "/admin/workers")["workers"]
            if options.cold:
                drop_page_cache(folder)
    row = {
        "tokens": options.tokens,
        "computed_ms": round(median(found["computed"]) * 1e3, 1),
        "fetched_ms": round(median(found["fetched"]) * 1e3, 1),
        "all_computed_ms": [round(each * 1e3, 1) for each in found["computed"]],
        "all_fetched_ms": [round(each * 1e3, 1) for each in found["fetched"]],
    }
    row["sooner"] = round(row["computed_ms"] / row["fetched_ms"], 2)
    row["tiers"] = {each["id"]: each["kv_tiers"] for each in rows}
    print(json.dumps(row), flush=True)
    return [row]


def drop_page_cache(folder: Path) -> None:
    """What was written is on the disk and nowhere else."""
    for path in folder.glob("*.kv"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def build_parser() -> argparse.ArgumentParser:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("tiers", "restart"))
    parser.add_argument("--dir", type=Path, default=Path(tempfile.gettempdir()), help="on the disk that is meant")
    parser.add_argument("--sizes", type=int, nargs="+", default=[16 << 10, 128 << 10, 512 << 10], help="bytes a page")
    parser.add_argument("--pages", type=int, default=200)
    parser.add_argument("--redis", metavar="URL", help="of a running one")
    parser.add_argument("--mooncake", metavar="HOST:PORT", help="of the master of a running one")
    parser.add_argument("--model", help="a folder; default: the bundled model")
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=5)
    parser.add_argument("--warm-up", type=int, default=3, help="prompts before those that count")
    parser.add_argument("--disk-size", default="1GiB")
    parser.add_argument("--serve", default="", help="further flags")
    parser.add_argument("--cold", action=argparse.BooleanOptionalAction, default=True, help="drop the page cache")
    parser.add_argument("--json", type=Path)
    return parser


def main() -> None:
    """Measure and print."""
    options = build_parser().parse_args()
    options.dir.mkdir(parents=True, exist_ok=True)
    rows = tiers(options) if options.what == "tiers" else restart(options)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
