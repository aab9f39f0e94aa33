"""What lossless compression of the weights costs and gains here: sizes, the coder's speed, and products of matrices.

Plain and compressed weights are multiplied in turns, over more matrices than any cache holds; each ratio is the median
over the rounds of (time of plain / time of compressed) in one round, so above 1 compressed weights are faster.

    python bench/compression.py
    python bench/compression.py --threads 1 2 --rows 1 8 --rounds 25
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.bundled import storyteller
from penstock.kernels import _native
from penstock.kernels.native import compression
from penstock.kernels.native.backend import NativeOps, families
from penstock.weights.checkpoint_reader import Checkpoint

COLD_BYTES = 256 << 20


def seconds(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def gaussian(n: int, k: int) -> NDArray[np.uint16]:
    values = np.random.default_rng(0).standard_normal((n, k), dtype=np.float32) * 0.02
    return values.astype(ml_dtypes.bfloat16).view(np.uint16)


def bundled_ratio() -> float:
    """Size of the bundled model's tensors, compressed where that pays, by their size in bf16."""
    before = after = 0
    with Checkpoint(storyteller()) as checkpoint:
        for name in checkpoint.names:
            array = checkpoint.array(name)
            matrix = compression.compress(np.ascontiguousarray(array).view(np.uint16)) if array.ndim == 2 else None
            before += array.nbytes
            after += array.nbytes if matrix is None else matrix.nbytes
    return after / before


def coder_figures(weight: NDArray[np.uint16], family: str) -> dict[str, float]:
    """MB/s of bf16 on one core, best of seven; decoding is that of loading, a megabyte at a time."""
    matrix = compression.compress(weight)
    assert matrix is not None
    encode = min(seconds(lambda: compression.compress(weight)) for _ in range(7))
    decode = min(
        seconds(lambda: sum(len(part) for part in compression.decoded_panels(matrix, family))) for _ in range(7)
    )
    return {
        "ratio": matrix.nbytes / weight.nbytes,
        "encode_mbs": weight.nbytes * 1e-6 / encode,
        "decode_mbs": weight.nbytes * 1e-6 / decode,
    }


def linear_figures(ops: NativeOps, args: argparse.Namespace) -> list[dict[str, float]]:
    """One entry a number of rows and of threads."""
    first = gaussian(args.outputs, args.inputs)
    copies = max(2, COLD_BYTES // first.nbytes)
    weights = [np.roll(first, 777 * i) for i in range(copies)]
    plain = [ops.pack_linear(weight.view(ml_dtypes.bfloat16)) for weight in weights]
    small = [ops.pack_compressed([matrix]) for weight in weights if (matrix := compression.compress(weight))]
    figures = []
    for rows in args.rows:
        x_TK = ops.compute(np.random.default_rng(1).standard_normal((rows, args.inputs)))
        for threads in args.threads:
            _native.set_threads(threads)
            took = []
            for _ in range(args.rounds + 1):
                one, other = (
                    seconds(lambda own=own, x_TK=x_TK: [ops.linear(x_TK, weight) for weight in own]) / copies
                    for own in (plain, small)
                )
                took.append((one, other))
            figures.append({"rows": rows, "threads": threads, **summary(took[1:], first.nbytes)})
    return figures


def summary(took: list[tuple[float, float]], nbytes: int) -> dict[str, float]:
    """Medians, and the quartiles of the ratios, of rounds of (plain, compressed) seconds."""
    ratios = sorted(one / other for one, other in took)
    plain_s, small_s = (float(np.median([pair[i] for pair in took])) for i in (0, 1))
    return {
        "plain_us": plain_s * 1e6,
        "compressed_us": small_s * 1e6,
        "plain_gbs": nbytes * 1e-9 / plain_s,
        "ratio": ratios[len(ratios) // 2],
        "low": ratios[len(ratios) // 4],
        "high": ratios[-1 - len(ratios) // 4],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default=families()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--outputs", type=int, default=8192)
    parser.add_argument("--inputs", type=int, default=2048)
    parser.add_argument("--rows", type=int, nargs="*", default=[1, 4, 8, 16, 32, 64, 256])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    ops = NativeOps(args.family, "bf16", threads=max(args.threads))
    coder = coder_figures(gaussian(8192, 2048), args.family)
    bundled = bundled_ratio()
    probe = compression.compress(gaussian(64, 64))
    keeps = probe is not None and ops.pack_compressed([probe]) is not None
    linear = linear_figures(ops, args) if keeps else []
    if args.json:
        print(json.dumps({"coder": coder, "bundled_ratio": bundled, "linear": linear}))
        return
    print(f"size of bf16: Gaussian {coder['ratio']:.2%}, bundled model {bundled:.2%}")
    print(f"one core: compress {coder['encode_mbs']:.0f} MB/s, decompress {coder['decode_mbs']:.0f} MB/s")
    print(f"{args.family}, {args.outputs} x {args.inputs}, medians; ratio above 1: compressed is faster (quartiles)")
    print(f"{'rows':>6}{'threads':>9}{'plain us':>10}{'GB/s':>7}{'compressed us':>15}   ratio")
    for own in linear:
        print(
            f"{own['rows']:>6}{own['threads']:>9}{own['plain_us']:>10.0f}{own['plain_gbs']:>7.1f}"
            f"{own['compressed_us']:>15.0f}   {own['ratio']:.2f} ({own['low']:.2f} to {own['high']:.2f})"
        )
    if not keeps:
        print("this family multiplies plain weights only; compressed files are unpacked when they are loaded")


if __name__ == "__main__":
    main()
