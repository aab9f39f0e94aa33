"""How fast the kernels are here, beside what this machine can do at most.

Prints GFLOP/s and GB/s of one linear at several numbers of rows, and in the same run the measured peak of the same
multiply-adds out of the first-level cache and the bandwidth of just reading memory.  Machines are shared and noisy:
each figure is the best of several tries, and only ratios within one run mean much.

    python bench/kernels.py
    python bench/kernels.py --family avx2 --compute fp32 --threads 1
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import AttentionSpec, KvShape, StepBatch

ROWS = (1, 2, 4, 8, 16, 32, 128, 512)
COLD_BYTES = 192 << 20  # of weights, so that none is still in a cache when its turn comes again


def best_of(seconds: float, run: Callable[[], Any]) -> float:
    """Least duration of ``run``, tried for about so many seconds and at least three times."""
    run()
    durations: list[float] = []
    end = time.perf_counter() + seconds
    while len(durations) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        run()
        durations.append(time.perf_counter() - start)
    return min(durations)


def random_weight(rng: np.random.Generator, n: int, k: int) -> NDArray[np.float32]:
    return rng.standard_normal((n, k), dtype=np.float32)


def linear_figures(ops: NativeOps, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """One entry a number of rows."""
    rng = np.random.default_rng(0)
    first = ops.pack_linear(random_weight(rng, args.outputs, args.inputs))
    copies = max(1, COLD_BYTES // first.nbytes)
    weights = [first, *(ops.pack_linear(random_weight(rng, args.outputs, args.inputs)) for _ in range(copies - 1))]
    for rows in args.rows:
        x_TK = ops.compute(rng.standard_normal((rows, args.inputs)))
        turn = cycle(weights)
        took = best_of(args.seconds, lambda x_TK=x_TK, turn=turn: ops.linear(x_TK, next(turn)))
        yield {
            "rows": rows,
            "us": took * 1e6,
            "gflops": 2e-9 * rows * args.outputs * args.inputs / took,
            "gbs": first.nbytes * 1e-9 / took,
        }


def attention_figures(ops: NativeOps, seconds: float) -> Iterator[dict[str, Any]]:
    """Decode over long contexts, and reading a prompt, at the shape of a 1 B model (32 heads, 8 of keys, size 64)."""
    heads, kv_heads, dim, keys = 32, 8, 64, 2048
    rng = np.random.default_rng(1)
    for name, sequences, tokens in (
        ("decode, 1 of 2048", 1, 1),
        ("decode, 8 of 2048", 8, 1),
        ("prompt of 2048", 1, keys),
    ):
        blocks = keys // 16
        kv = ops.new_kv(KvShape.plain(layers=1, kv_heads=kv_heads, head_dim=dim), pages=sequences * blocks)
        rope = ops.rope_table(10000.0 ** -(np.arange(0, dim, 2) / dim), keys)
        table_SP = np.arange(sequences * blocks, dtype=np.int32).reshape(sequences, blocks)
        whole = StepBatch(
            tokens_T=np.zeros(sequences * keys, np.int32),
            positions_T=np.tile(np.arange(keys, dtype=np.int32), sequences),
            starts_S1=np.arange(sequences + 1, dtype=np.int32) * keys,
            table_SP=table_SP,
            sample_rows_R=np.zeros(0, np.int32),
        )
        qkv_TN = ops.hidden(rng.standard_normal((sequences * keys, (heads + 2 * kv_heads) * dim), dtype=np.float32))
        ops.rope_and_write(qkv_TN, rope, kv, 0, whole, heads=heads, kv_heads=kv_heads)
        batch = StepBatch(
            tokens_T=np.zeros(sequences * tokens, np.int32),
            positions_T=np.tile(np.arange(keys - tokens, keys, dtype=np.int32), sequences),
            starts_S1=np.arange(sequences + 1, dtype=np.int32) * tokens,
            table_SP=table_SP,
            sample_rows_R=np.zeros(0, np.int32),
        )
        q_THC = ops.compute(rng.standard_normal((sequences * tokens, heads, dim)))
        run = lambda q_THC=q_THC, kv=kv, batch=batch: ops.paged_attention(q_THC, kv, 0, batch, AttentionSpec(0.125))  # noqa: E731
        took = best_of(seconds, run)
        pairs = sequences * (keys if tokens == 1 else keys * (keys + 1) / 2)
        yield {"name": name, "us": took * 1e6, "gflops": 4e-9 * pairs * heads * dim / took}


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures of one family and one number of threads."""
    ops = NativeOps(args.family, args.compute, threads=args.threads)
    pieces = np.array_split(np.ones(COLD_BYTES // 4, np.uint32), 12)  # short, so that one is read undisturbed
    return {
        "family": args.family,
        "compute": args.compute,
        "threads": args.threads,
        "peak_gflops": max(ops.peak_flops() for _ in range(500)) * 1e-9,
        "read_gbs": max(ops.read_bandwidth(piece) for _ in range(20) for piece in pieces) * 1e-9,
        "outputs": args.outputs,
        "inputs": args.inputs,
        "linear": list(linear_figures(ops, args)),
        "attention": list(attention_figures(ops, args.seconds)),
    }


def show(figures: dict[str, Any]) -> None:
    """The same for people."""
    peak, bandwidth = figures["peak_gflops"], figures["read_gbs"]
    print(f"{figures['family']}, {figures['compute']}, {figures['threads']} thread(s)")
    print(f"peak {peak:.0f} GFLOP/s out of the first-level cache; memory reads {bandwidth:.1f} GB/s")
    print(f"\nlinear, {figures['inputs']} inputs, {figures['outputs']} outputs")
    print(f"{'rows':>6}{'us':>10}{'GFLOP/s':>10}{'of peak':>9}{'GB/s':>8}{'of reads':>10}")
    for row in figures["linear"]:
        print(
            f"{row['rows']:>6}{row['us']:>10.0f}{row['gflops']:>10.1f}{row['gflops'] / peak:>9.0%}"
            f"{row['gbs']:>8.1f}{row['gbs'] / bandwidth:>10.0%}"
        )
    print("\nattention, 32 query heads, 8 key-value heads, head size 64")
    for row in figures["attention"]:
        print(f"{row['name']:>20}{row['us']:>10.0f} us{row['gflops']:>10.1f} GFLOP/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=families()[0], choices=families())
    parser.add_argument("--compute", default="bf16", choices=("bf16", "fp32"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--inputs", type=int, default=2048, help="K of the linear (default 2048)")
    parser.add_argument("--outputs", type=int, default=8192, help="N of the linear (default 8192)")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--seconds", type=float, default=0.5, help="spent on each figure (default 0.5)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    args = parser.parse_args()
    figures = measure(args)
    if args.json:
        print(json.dumps({**figures, "version": _native.VERSION}))
    else:
        show(figures)


if __name__ == "__main__":
    main()
