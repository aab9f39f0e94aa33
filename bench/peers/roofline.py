"""What this machine can do at most: bytes read from memory and multiply-adds of bf16, a second.

Run as a process of its own, ``python -m bench.peers.roofline THREADS`` prints one JSON object.
"""

from __future__ import annotations

import json
import sys

import numpy as np

from penstock.kernels.native import NativeOps, families

READ_BYTES = 512 << 20
TRIES = 12


def measure(threads: int) -> dict[str, float | str]:
    """GB/s and GFLOP/s.  Each is the best of several tries: what is possible, not what is usual."""
    ops = NativeOps(families()[0], "bf16", threads=threads)
    pieces = np.array_split(np.ones(READ_BYTES // 4, np.uint32), 4)
    return {
        "read_gbs": max(ops.read_bandwidth(piece) for _ in range(TRIES) for piece in pieces) * 1e-9,
        "peak_gflops": max(ops.peak_flops(20_000) for _ in range(20 * TRIES)) * 1e-9,
        "family": families()[0],
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
