"""What every implementation of ``Collectives`` does: ranks in one process, over shared memory, and over gloo."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from forked_ranks import Rank, run_forked
from penstock.errors import GroupError
from penstock.parallel.collectives.interface import Collectives
from penstock.parallel.collectives.local import LocalWorld
from penstock.parallel.collectives.shm import ShmMemory

Run = Callable[..., list[Any]]


def run_local(ranks: Sequence[Rank]) -> list[Any]:
    world, members = LocalWorld(len(ranks)), range(len(ranks))
    return world.run([lambda rank=rank, fn=fn: fn(world.group(rank, members)) for rank, fn in enumerate(ranks)])


def run_asleep(ranks: Sequence[Rank]) -> list[Any]:
    return run_forked(ranks, spin_us=0)


def run_gloo(ranks: Sequence[Rank]) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        store = f"{folder}/store"

        def connect(rank: int) -> Collectives:
            from torch.distributed import FileStore

            from penstock.parallel.collectives.dist import connect_ranks

            return connect_ranks(FileStore(store, len(ranks)), rank, len(ranks), timeout_s=20, as_numpy=True)

        return run_forked(ranks, connect=connect)


@pytest.fixture(params=[run_local, run_forked, run_asleep, run_gloo], ids=["local", "shm", "shm asleep", "gloo"])
def run(request: pytest.FixtureRequest) -> Run:
    chosen: Run = request.param
    return chosen


def row(*numbers: float) -> NDArray[np.float32]:
    return np.array([numbers], np.float32)


def numbers_of(rank: int, rows: int, columns: int, turn: int = 0) -> NDArray[np.float32]:
    return np.random.default_rng((rank, turn)).standard_normal((rows, columns), np.float32)


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_all_ranks_get_copies_of_all_arrays_in_order(run: Run, ranks: int) -> None:
    def rank(group: Collectives) -> list[list[float]]:
        own = row(*range(group.rank + 1))
        found = group.all_gather(own)
        own[:] = -1  # no other rank sees this
        for array in found:
            np.add(array, 10, out=array)
        second = group.all_gather(row(group.rank))
        return [array.ravel().tolist() for array in (*found, *second)]

    want = [[10.0 + number for number in range(own + 1)] for own in range(ranks)] + [
        [float(own)] for own in range(ranks)
    ]
    assert run([rank] * ranks) == [want] * ranks


def test_arrays_of_any_size_have_all_their_bits(run: Run) -> None:
    """Smaller and larger than a slot, of another width on each rank, many of them, so that buffers alternate."""
    shapes = [(1, 1), (7, 300), (40, 33), (0, 5), (1, 1024), (1, 1025)]

    def rank(group: Collectives) -> bool:
        for turn, (rows, columns) in enumerate(shapes * 3):
            found = group.all_gather(numbers_of(group.rank, rows, columns + group.rank, turn))
            for peer, array in enumerate(found):
                want = numbers_of(peer, rows, columns + peer, turn)
                if rows and (array.shape != want.shape or array.tobytes() != want.tobytes()):
                    return False
        return True

    assert run([rank, rank]) == [True, True]


def test_each_rank_gets_what_the_others_have_for_it(run: Run) -> None:
    def rank(group: Collectives) -> list[list[float]]:
        found = group.all_to_all([row(*[10 * group.rank + other] * (other + 1)) for other in range(group.size)])
        return [array.ravel().tolist() for array in found]

    assert run([rank, rank]) == [[[0.0], [10.0]], [[1.0, 1.0], [11.0, 11.0]]]


def test_what_is_sent_arrives_in_order(run: Run) -> None:
    def first(group: Collectives) -> None:
        for turn in range(7):
            group.send(numbers_of(0, 9, 200, turn), 1)
        group.recv(1, (1, 1))

    def second(group: Collectives) -> list[bool]:
        found = [group.recv(0, (9, 200)).tobytes() == numbers_of(0, 9, 200, turn).tobytes() for turn in range(7)]
        group.send(row(1), 0)
        return found

    assert run([first, second])[1] == [True] * 7


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (lambda group: group.all_gather(row(1)), lambda group: group.all_gather(np.zeros((2, 1), np.float32))),
        (lambda group: group.all_gather(row(1)), lambda group: group.all_to_all([row(1)] * 2)),
        (lambda group: group.recv(1, (2, 2)), lambda group: group.send(row(1), 0)),
    ],
    ids=["rows", "operation", "shape"],
)
def test_ranks_that_disagree_end_the_group(run: Run, first: Rank, second: Rank) -> None:
    with pytest.raises(GroupError):
        run([first, second])


def test_a_rank_that_was_killed_is_noticed_by_who_watches() -> None:
    memory = ShmMemory(2)
    child = os.fork()
    if not child:
        time.sleep(600)
        os._exit(0)

    def check() -> None:
        if os.waitpid(child, os.WNOHANG)[0]:
            raise GroupError("rank 1 has ended")

    os.kill(child, signal.SIGKILL)
    with pytest.raises(GroupError, match="rank 1 has ended"):
        memory.group(0, check=check).all_gather(row(1))


def test_a_rank_that_sleeps_is_woken_when_the_group_ends() -> None:
    memory, (read, write) = ShmMemory(2), os.pipe()
    child = os.fork()
    if not child:
        try:
            memory.group(1, spin_us=0).all_gather(row(1))
        except GroupError as error:
            os.write(write, str(error).encode())
        os._exit(0)
    time.sleep(0.05)
    memory.end()
    assert os.read(read, 100) == b"the group is over"
    os.waitpid(child, 0)
    with pytest.raises(GroupError, match="the group is over"):
        memory.group(0).all_gather(row(1))
    for end in (read, write):
        os.close(end)
