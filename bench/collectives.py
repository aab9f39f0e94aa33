"""How long an exchange over shared memory takes: every rank writes an array and reads those of the others.

    ./dev bench collectives                 two processes, 64 B to 128 KB, spinning and asleep
    ./dev bench collectives --ranks 4

Needs a core for each rank: a rank that waits for a processor is waited for by all.
"""

from __future__ import annotations

import argparse
import mmap
import os

import numpy as np

from penstock.parallel.collectives.shm import ShmMemory

SIZES = (64, 8 << 10, 32 << 10, 128 << 10)
SPINNING_US, ASLEEP_US = 1e6, 0.0
PAUSE_US = 200.0
"""Of the rank that comes last: the others must have fallen asleep."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exchanges", type=int, default=20_000)
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < args.ranks:
        print(f"{args.ranks} ranks share {len(cores)} cores: the figures are those of the scheduler")
    print("bytes    ranks wait by   p50 us   p90 us   p99 us")
    for nbytes in SIZES:
        for name, spin_us in (("spinning", SPINNING_US), ("futex", ASLEEP_US)):
            count = args.exchanges if spin_us else args.exchanges // 10
            times = exchange(args.ranks, nbytes, count, spin_us, cores)
            p50, p90, p99 = np.percentile(times[count // 10 :] / 1000, (50, 90, 99))
            print(f"{nbytes:7,}  {name:12}  {p50:7.2f}  {p90:7.2f}  {p99:7.2f}")


def exchange(ranks: int, nbytes: int, count: int, spin_us: float, cores: list[int]) -> np.ndarray:
    """Nanoseconds of each exchange, from when the last rank came until all had all.

    Asleep: rank 0 comes last and wakes the others.
    """
    memory = ShmMemory(ranks, slot_bytes=max(SIZES))
    shared = mmap.mmap(-1, ranks * count * 16)
    times = np.frombuffer(shared, np.int64).reshape(ranks, count, 2)
    children = []
    for rank in range(ranks):
        child = os.fork()
        if not child:
            os.sched_setaffinity(0, {cores[rank % len(cores)]})
            pause_us = 0.0 if spin_us or rank else PAUSE_US
            memory.native(rank, spin_us).time_exchanges(np.zeros(nbytes, np.uint8), times[rank], pause_us)
            os._exit(0)
        children.append(child)
    for child in children:
        os.waitpid(child, 0)
    return times[:, :, 1].max(axis=0) - times[:, :, 0].max(axis=0)


if __name__ == "__main__":
    main()
