"""How long an exchange over shared memory takes: every rank writes an array and reads those of the others.

    ./dev bench collectives                 two processes, 64 B to 128 KB, spinning and asleep
    ./dev bench collectives --ranks 4
    ./dev bench collectives --links         two processes as on two machines: encrypted, over the loopback

Needs a core for each rank: a rank that waits for a processor is waited for by all.
"""

from __future__ import annotations

import argparse
import mmap
import os
import time

import numpy as np

from penstock.parallel.collectives.nodes import RemoteRank
from penstock.parallel.collectives.shm import ShmMemory
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.rank_link import accept_rank, connect_rank, listen_for_ranks

SIZES = (64, 8 << 10, 32 << 10, 128 << 10)
LINKED_SIZES = (8 << 10, 1 << 20, 16 << 20)
SPINNING_US, ASLEEP_US = 1e6, 0.0
PAUSE_US = 200.0
"""Of the rank that comes last: the others must have fallen asleep."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--exchanges", type=int, default=20_000)
    parser.add_argument("--links", action="store_true", help="between machines, instead of over shared memory")
    args = parser.parse_args()
    if args.links:
        show_links(args.exchanges)
        return
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


def show_links(count: int) -> None:
    """Half of the way there and back, and the bytes a second that are sent meanwhile."""
    print("bytes      there, p50 us   p90 us   p99 us   MB/s")
    for nbytes in LINKED_SIZES:
        times = there_and_back(nbytes, max(20, count * LINKED_SIZES[0] // nbytes // 10)) / 2
        p50, p90, p99 = np.percentile(1e6 * times, (50, 90, 99))
        print(f"{nbytes:9,}  {p50:13.1f}  {p90:7.1f}  {p99:7.1f}  {nbytes / p50:6.0f}")


def there_and_back(nbytes: int, count: int) -> np.ndarray:
    """Seconds until another process has an array of so many bytes, and this one has it back."""
    keys, door = CurveKeys.ephemeral(), listen_for_ranks("127.0.0.1", 0)
    door.setblocking(True)
    array = np.zeros((1, nbytes // 4), np.float32)
    child = os.fork()
    if not child:
        other = RemoteRank(
            connect_rank("127.0.0.1", door.getsockname()[1], keys), "the first", on_lost=lambda _: os._exit(0)
        )
        other.start()
        while True:
            other.send_array(other.recv_array(array.shape, _nothing))
    rank = RemoteRank(accept_rank(door.accept()[0], keys), "the second", on_lost=print)
    rank.start()
    times = []
    for _ in range(count):
        begun = time.perf_counter()
        rank.send_array(array)
        rank.recv_array(array.shape, _nothing)
        times.append(time.perf_counter() - begun)
    rank.close()
    door.close()
    os.waitpid(child, 0)
    return np.array(times[count // 10 :])


def _nothing() -> None:
    """What is done while an array is on its way."""


if __name__ == "__main__":
    main()
