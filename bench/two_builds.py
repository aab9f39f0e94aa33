"""Two builds of the kernels in turns in one run: what a change of them costs.

Each build computes in a process of its own, one call at a time, first one build and then the other; a figure is the
median ratio of the two over all turns, in seconds that the calling thread computed, so that a machine with other work
can be used.  One thread each; layers as models have them, weights and keys out of the caches.

    python -m bench.two_builds OLD [NEW]     # folders with a package `penstock` and its built kernels, as src/ is
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import SILU, AttentionSpec, KvShape, Routing, StepBatch

CHOSEN, HIDDEN, INNER = 8, 2048, 768
HEADS, KV_HEADS, HEAD_DIM = 16, 4, 128
MOE_ROWS = (1, 8, 64, 512)
KEY_ROWS = (1, 8)
LEAST_SECONDS = 0.02
"""Of a turn: calls are repeated until it has them."""

Case = Callable[[], Any]


def expert_cases(ops: NativeOps, count: int) -> Iterator[tuple[str, Case]]:
    """A layer of routed experts, by rows."""
    random = np.random.default_rng(0)

    def matrix(n: int, k: int) -> Any:
        return ops.pack_linear(random.standard_normal((n, k), dtype=np.float32) / k**0.5)

    experts = ops.pack_experts(
        [matrix(2 * INNER, HIDDEN) for _ in range(count)], [matrix(HIDDEN, INNER) for _ in range(count)]
    )
    how = Routing(experts=count, top_k=min(CHOSEN, count), normalised=True)
    for rows in MOE_ROWS:
        x, hidden = ops.compute(random.standard_normal((rows, HIDDEN))), ops.hidden(np.zeros((rows, HIDDEN)))
        routes = ops.route(ops.hidden(random.standard_normal((rows, count))), how)
        yield (
            f"experts, {rows} rows",
            lambda x=x, routes=routes, hidden=hidden: ops.experts_add(x, routes, experts, SILU, hidden),
        )


def attention_cases(ops: NativeOps, lengths: list[int]) -> Iterator[tuple[str, Case]]:
    """Tokens of as many sequences, by keys; then a prompt's last 64 tokens."""
    random = np.random.default_rng(1)
    blocks = -(-max(lengths) // 16)
    kv = ops.new_kv(KvShape.plain(layers=1, kv_heads=KV_HEADS, head_dim=HEAD_DIM), pages=max(KEY_ROWS) * blocks)
    table_SP = random.permutation(max(KEY_ROWS) * blocks).astype(np.int32).reshape(max(KEY_ROWS), blocks)
    width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
    for sequence in range(max(KEY_ROWS)):
        for first in range(0, max(lengths), 2048):
            tokens = min(2048, max(lengths) - first)
            batch = batch_of(table_SP[sequence : sequence + 1], first, tokens)
            qkv = ops.hidden(random.standard_normal((tokens, width), dtype=np.float32))
            ops.rope_and_write(qkv, None, kv, 0, batch, heads=HEADS, kv_heads=KV_HEADS)

    def case(rows: int, keys: int, tokens: int) -> Case:
        q = ops.compute(random.standard_normal((rows * tokens, HEADS, HEAD_DIM)))
        batch, spec = batch_of(table_SP[:rows], keys - tokens, tokens), AttentionSpec(HEAD_DIM**-0.5)
        return lambda: ops.paged_attention(q, kv, 0, batch, spec)

    for keys in lengths:
        for rows in KEY_ROWS:
            yield f"attention, {rows} of {keys} keys", case(rows, keys, 1)
        yield f"attention, 64 tokens of {keys} keys", case(1, keys, 64)


def batch_of(table_SP: Any, first: int, tokens: int) -> StepBatch:
    """The same tokens of every sequence."""
    rows = len(table_SP)
    return StepBatch(
        tokens_T=np.zeros(rows * tokens, np.int32),
        positions_T=np.tile(np.arange(first, first + tokens, dtype=np.int32), rows),
        starts_S1=np.arange(rows + 1, dtype=np.int32) * tokens,
        table_SP=np.ascontiguousarray(table_SP),
        sample_rows_R=np.zeros(0, np.int32),
    )


def compute(args: argparse.Namespace) -> None:
    """One build: the names of its cases, then for each name that comes in the seconds of a call."""
    ops = NativeOps(args.family, args.dtype, threads=1)
    cases = dict([*expert_cases(ops, args.experts), *attention_cases(ops, args.keys)])
    for case in cases.values():
        case()
    print(json.dumps(list(cases)), flush=True)
    for line in sys.stdin:
        case, calls, begin = cases[line.strip()], 0, time.thread_time()
        while time.thread_time() - begin < LEAST_SECONDS:
            case()
            calls += 1
        print((time.thread_time() - begin) / calls, flush=True)


class Build:
    """A process that computes with one build."""

    def __init__(self, source: Path, args: argparse.Namespace) -> None:
        command = [sys.executable, "-m", "bench.two_builds", "--child", "--family", args.family, "--dtype", args.dtype]
        command += ["--experts", str(args.experts), "--keys", *map(str, args.keys)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(source), str(Path(__file__).parents[1])])}
        self._process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def said(self) -> Any:
        """Its next line."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def seconds(self, case: str) -> float:
        """Of one call."""
        assert self._process.stdin is not None
        self._process.stdin.write(case + "\n")
        self._process.stdin.flush()
        return float(self.said())


def compare(args: argparse.Namespace) -> None:
    """Print old speed against new, case by case: above 1 the new build is faster."""
    builds = [Build(source, args) for source in (args.old, args.new)]
    names, _ = (build.said() for build in builds)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for turn in range(args.turns):
        for name in names:
            order = builds if turn % 2 == 0 else builds[::-1]
            first, second = (build.seconds(name) for build in order)
            taken[name].append((first, second) if turn % 2 == 0 else (second, first))
    print(f"{args.family}, {args.dtype}, one thread, {args.turns} turns; speed of new / old, median (quartiles)")
    for name, pairs in taken.items():
        low, middle, high = statistics.quantiles([old / new for old, new in pairs], n=4)
        least = " and ".join(f"{min(times) * 1e6:.0f}" for times in zip(*pairs, strict=True))
        print(f"{name:>36}  {middle:.3f} ({low:.3f} to {high:.3f}); least, old and new: {least} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("old", type=Path, nargs="?")
    parser.add_argument("new", type=Path, nargs="?", default=Path(__file__).parents[1] / "src")
    parser.add_argument("--family", default=families()[0], choices=families())
    parser.add_argument("--dtype", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--turns", type=int, default=40)
    parser.add_argument("--experts", type=int, default=48, help="of a layer (default 48)")
    parser.add_argument("--keys", type=int, nargs="+", default=(400, 4096, 32768))
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        compute(args)
    else:
        compare(args)


if __name__ == "__main__":
    main()
