"""How long the router's own work takes: hashing a prompt, keeping the index of all caches, choosing workers.

One thread, no processes, no messages; times are the thread's own, for others use the processor, too.  The bars are for
a prompt of 100,000 tokens (hashed already), 256 workers and a million indexed blocks: 99 of 100 decisions within 200
us; and 1 GB/s of hashed bytes (a parent of 32, and tokens of 64, a block).

    python bench/router.py                            # the bars
    python bench/router.py --blocks 100000000 --scenes index   # 2 GB of memory
    python bench/router.py --json router.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.hashing import block_hashes
from penstock.kernels.host_ops import BlockIndex, hash_blocks, hash_chain
from penstock.router.decide import PlacementRequest, PlacementRules, choose_workers
from penstock.router.fleet import Fleet
from penstock.router.policy.baselines import NAMES, make_policy
from penstock.router.prefix_index import SWEEP_ENTRIES, PrefixIndex
from penstock.router.worker_load import ExpectedWork
from penstock.types import (
    PAGE_TOKENS,
    BlockHash,
    ModelIdentity,
    RequestId,
    Role,
    SamplingParams,
    ValidRequest,
    WorkerId,
    WorkerState,
    pack_token_ids,
)
from penstock.wire.gateway_messages import KV_EVENT_BLOCKS, KvEvents, StepRates, WorkerReport
from penstock.wire.supervisor_messages import WorkerUp

IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="bench-1")
ROOT = BlockHash(bytes(32))
HASHED_BYTES = 32 + 4 * PAGE_TOKENS  # a block
Row = dict[str, Any]


def timed(work: Callable[[], object], rounds: int) -> list[float]:
    """Seconds of each round, of this thread's own: what others do to the processor meanwhile is not counted."""
    took = []
    for _ in range(rounds):
        began = time.thread_time()
        work()
        took.append(time.thread_time() - began)
    return took


def row(name: str, took: list[float], **more: Any) -> Row:
    """Quantiles in microseconds."""
    p50, p99, most = (float(np.quantile(took, q)) * 1e6 for q in (0.5, 0.99, 1.0))
    return {"name": name, "p50_us": round(p50, 2), "p99_us": round(p99, 2), "max_us": round(most, 2)} | more


def hashing(options: argparse.Namespace) -> Iterator[Row]:
    """From tokens to hashes."""
    tokens = np.arange(options.tokens, dtype=np.uint32) * np.uint32(2654435761) % np.uint32(128_000)
    blocks = len(tokens) // PAGE_TOKENS
    whole = tokens[: blocks * PAGE_TOKENS]
    out = np.empty((blocks, 32), np.uint8)
    ids = tuple(tokens.tolist())

    def speed(took: list[float]) -> Row:
        best = min(took)
        return {"GB_s": round(blocks * HASHED_BYTES / best / 1e9, 3), "tokens_s": round(len(tokens) / best)}

    took = timed(lambda: hash_chain(ROOT, whole, out), options.rounds // 4 + 1)
    yield row("hash: an array of ids", took, **speed(took))
    took = timed(lambda: hash_blocks(ROOT, ids, 0, len(ids)), options.rounds // 4 + 1)
    yield row("hash: a tuple of Python's ints to hashes as bytes", took, **speed(took))
    took = timed(lambda: list(block_hashes(ROOT, ids)), 5)
    yield row("hash: the same, block by block in Python", took, **speed(took))


def some_keys(count: int, seed: int) -> bytes:
    """Keys of blocks, as random as hashes are."""
    return np.random.default_rng(seed).integers(0, 1 << 63, count, np.uint64).tobytes()


def index(options: argparse.Namespace) -> Iterator[Row]:
    """The table of blocks alone."""
    table = BlockIndex(max(options.blocks, 1) * 2, options.workers + 1)
    owners = [table.open() or 0 for _ in range(options.workers)]
    took = []
    for start in range(0, options.blocks, KV_EVENT_BLOCKS):
        keys = some_keys(min(KV_EVENT_BLOCKS, options.blocks - start), start)
        took += timed(lambda keys=keys, start=start: table.add(owners[start % len(owners)], keys), 1)
    rate = round(options.blocks / sum(took))
    size = round(table.memory_bytes() / max(1, table.blocks()), 2)
    yield row("index: store 4,096 blocks", took, blocks=table.blocks(), blocks_s=rate, bytes_a_block=size)
    batches = [some_keys(KV_EVENT_BLOCKS, start) for start in range(0, min(options.blocks, 1 << 20), KV_EVENT_BLOCKS)]
    took = []
    for number, keys in enumerate(batches):
        owner = owners[(number * KV_EVENT_BLOCKS) % len(owners)]
        took += timed(lambda keys=keys, owner=owner: table.remove(owner, keys), 1)
    yield row("index: remove 4,096 blocks", took, blocks_s=round(len(batches) * KV_EVENT_BLOCKS / sum(took)))
    table.close(owners[0])
    yield row("index: forget a worker, a step of it", timed(lambda: table.sweep(SWEEP_ENTRIES), 4))


def chain_of(seed: int, blocks: int, before: list[BlockHash]) -> list[BlockHash]:
    """``before``, and blocks that no other seed has up to ``blocks`` in all."""
    own = [
        BlockHash(hashlib.blake2b(f"{seed} {i}".encode(), digest_size=32).digest()) for i in range(blocks - len(before))
    ]
    return before + own


class Scene:
    """A fleet with caches full of other things, and a long prompt."""

    def __init__(self, options: argparse.Namespace, roles: tuple[Role, ...]) -> None:
        self.fleet, self.index = Fleet(), PrefixIndex(4 * options.blocks, options.workers + 1)
        rng = np.random.default_rng(1)
        for slot in range(options.workers):
            role = roles[slot % len(roles)]
            name = WorkerId(f"{role.value}-{slot}")
            self.fleet.on_worker_up(
                WorkerUp(worker=name, incarnation=1, role=role, pid=1, endpoint=f"memory://{name}"), 0.0
            )
            self.fleet.on_report(self._report(name, role, rng), 0.0)
            self.index.add_worker(slot, 1)
            self._tell(slot, some_keys(options.blocks // options.workers, slot))
        self.blocks = options.tokens // PAGE_TOKENS

    def _report(self, name: WorkerId, role: Role, rng: np.random.Generator) -> WorkerReport:
        answers = int(rng.integers(0, 64))
        return WorkerReport(
            worker=name,
            incarnation=1,
            role=role,
            state=WorkerState.READY,
            pid=1,
            identity=IDENTITY,
            max_model_len=200_000,
            kv_pages_free=100_000,
            prompt_tokens=int(rng.integers(0, 20_000)),
            decodes=answers,
            context_tokens=answers * 4000,
            page_bytes=2 << 20,
            rates=StepRates(0.012, 5e-5, 1e-9, 1e-6),
            measured=100,
            counters={"bytes_received": 1e9, "transfer_seconds": 0.04},
        )

    def _tell(self, slot: int, keys: bytes) -> None:
        size = 8 * KV_EVENT_BLOCKS
        parts = max(1, -(-len(keys) // size))
        for part in range(parts):
            stored = keys[part * size : (part + 1) * size]
            told = KvEvents(worker=WorkerId("w"), incarnation=1, sequence=0, stored=stored, part=part, parts=parts)
            self.index.on_kv_events(slot, told)

    def hold(self, slot: int, hashes: list[BlockHash], sequence: int) -> None:
        """A worker tells of a prompt's blocks."""
        for start in range(0, len(hashes), KV_EVENT_BLOCKS):
            stored = b"".join(block[:8] for block in hashes[start : start + KV_EVENT_BLOCKS])
            number = sequence + start // KV_EVENT_BLOCKS
            self.index.on_kv_events(slot, KvEvents(worker=WorkerId("w"), incarnation=1, sequence=number, stored=stored))


def asked(number: int, hashes: list[BlockHash], tokens: int) -> PlacementRequest:
    """A request with these blocks."""
    request = ValidRequest(
        id=RequestId(f"r{number}"),
        prompt=pack_token_ids((0,) * tokens),
        block_hashes=tuple(hashes),
        sampling=SamplingParams(seed=0, max_tokens=500),
        arrival=0.0,
    )
    return PlacementRequest(request=request)


def prompts_of(scene: Scene, workers: int, prompts: int, tokens: int) -> dict[str, list[PlacementRequest]]:
    """What may be known of a prompt: nothing, all of it by one, its beginning by all, and more by each than by the
    next."""
    system = chain_of(-1, 128, [])  # 2,048 tokens that everybody has
    ladder = chain_of(-2, scene.blocks, [])
    own = [chain_of(number, scene.blocks, system) for number in range(prompts)]
    for slot in range(workers):
        mine = [hashes[128:] for number, hashes in enumerate(own) if number % workers == slot]
        scene.hold(slot, system, 1)
        scene.hold(slot, ladder[: (slot + 1) * scene.blocks // workers], 2)
        sequence = 2 + -(-((slot + 1) * scene.blocks // workers) // KV_EVENT_BLOCKS)
        for hashes in mine:
            scene.hold(slot, hashes, sequence)
            sequence += -(-len(hashes) // KV_EVENT_BLOCKS)
    cold = [chain_of(prompts + number, scene.blocks, []) for number in range(prompts)]
    return {
        "nothing cached": [asked(n, hashes, tokens) for n, hashes in enumerate(cold)],
        "all at one worker, the beginning at all": [asked(n, hashes, tokens) for n, hashes in enumerate(own)],
        "at each worker more than at the one before": [asked(0, ladder, tokens)],
    }


def deciding(options: argparse.Namespace) -> Iterator[Row]:
    """Whole decisions, on fleets of both kinds and by each policy."""
    for kind, roles in (("split", (Role.PREFILL, Role.DECODE)), ("whole", (Role.BOTH,))):
        scene = Scene(options, roles)
        prompts = prompts_of(scene, options.workers, options.prompts, options.tokens)
        for policy in NAMES if kind == "whole" else NAMES[:1]:
            how = PlacementRules(policy=make_policy(policy))
            for known, asks in prompts.items():
                took = []
                for number in range(options.rounds):
                    ask = asks[number % len(asks)]
                    began = time.thread_time()
                    decision = choose_workers(ask, scene.fleet, scene.index, 0.0, how)
                    took.append(time.thread_time() - began)
                    chosen = decision.stages[0]
                    scene.fleet.add_work(
                        chosen.worker, 1, RequestId(f"x{number}"), 1, due=ExpectedWork(tokens=1), serial=number
                    )
                yield row(f"decide: {policy}, {kind}, {known}", took, blocks=len(scene.index))


def build_parser() -> argparse.ArgumentParser:
    """Flags."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=100_000, help="of a prompt")
    parser.add_argument("--workers", type=int, default=256)
    parser.add_argument("--blocks", type=int, default=1_000_000, help="indexed")
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--prompts", type=int, default=32, help="different ones that are asked in turn")
    parser.add_argument("--scenes", default="hash,index,decide")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    return parser


def main() -> None:
    """Measure and print."""
    options = build_parser().parse_args()
    scenes = {"hash": hashing, "index": index, "decide": deciding}
    rows: list[Row] = []
    for name in options.scenes.split(","):
        for each in scenes[name](options):
            rows.append(each)
            rest = "  ".join(f"{key} {value:,}" for key, value in list(each.items())[4:])
            quantiles = "".join(f"{each[key]:10.1f}" for key in ("p50_us", "p99_us", "max_us"))
            print(f"{each['name']:75s}{quantiles} us  {rest}", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"options": {**vars(options), "json": None}, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
