"""What this machine can do at most: bytes read from memory and multiply-adds of bf16, a second.

Run as a process of its own, ``python -m bench.peers.roofline THREADS`` prints JSON, ``... THREADS --read`` the usual
bandwidth alone, and ``... THREADS --stay`` that as JSON, now and for every line that it gets.
"""

from __future__ import annotations

import json
import statistics
import sys

import numpy as np

from penstock.kernels.native.backend import NativeOps, families

READ = "read_gbs"
READ_BYTES = 512 << 20
TRIES = 12


def measure(ops: NativeOps) -> dict[str, float | str]:
    """GB/s and GFLOP/s.  Each is the best of several tries: what is possible, not what is usual."""
    return {
        READ: max(_reads(ops)),
        "peak_gflops": max(ops.peak_flops(20_000) for _ in range(20 * TRIES)) * 1e-9,
        "family": families()[0],
    }


def usual_read_gbs(ops: NativeOps) -> float:
    """GB/s, the median of the tries: what is to be had just now."""
    return statistics.median(_reads(ops))


def stay(ops: NativeOps) -> None:
    print(json.dumps({READ: usual_read_gbs(ops)}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({READ: usual_read_gbs(ops)}), flush=True)


def _reads(ops: NativeOps) -> list[float]:
    pieces = np.array_split(np.ones(READ_BYTES // 4, np.uint32), 4)
    return [ops.read_bandwidth(piece) * 1e-9 for _ in range(TRIES) for piece in pieces]


if __name__ == "__main__":
    threads = int(sys.argv[1])
    own_ops = NativeOps(families()[0], "bf16", threads=threads)
    if "--stay" in sys.argv[2:]:
        stay(own_ops)
    else:
        print(usual_read_gbs(own_ops) if "--read" in sys.argv[2:] else json.dumps(measure(own_ops)))
