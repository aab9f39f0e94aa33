"""Ranks of one process exchange copies, each in its turn, and end together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from penstock.errors import GroupError
from penstock.parallel.collectives.interface import Collectives
from penstock.parallel.collectives.local import LocalWorld

Rank = Callable[[Collectives], Any]


def run(*ranks: Rank) -> list[Any]:
    """One function a rank, all in one group."""
    world, members = LocalWorld(len(ranks)), range(len(ranks))
    return world.run([lambda rank=rank, fn=fn: fn(world.group(rank, members)) for rank, fn in enumerate(ranks)])


def row(*numbers: float) -> NDArray[np.float32]:
    return np.array([numbers], np.float32)


def test_all_ranks_get_copies_of_all_arrays_in_order() -> None:
    def rank(group: Collectives) -> list[list[float]]:
        own = row(*range(group.rank + 1))
        found = group.all_gather(own)
        own[:] = -1  # no other rank sees this
        for array in found:
            np.add(array, 10, out=array)
        second = group.all_gather(row(group.rank))
        return [array.ravel().tolist() for array in (*found, *second)]

    want = [[10], [10, 11], [10, 11, 12], [0], [1], [2]]
    assert run(rank, rank, rank) == [want] * 3


def test_each_rank_gets_what_the_others_have_for_it() -> None:
    def rank(group: Collectives) -> list[float]:
        found = group.all_to_all([row(10 * group.rank + other) for other in range(group.size)])
        return [array.item() for array in found]

    assert run(rank, rank) == [[0, 10], [1, 11]]
    with pytest.raises(ValueError, match="1 arrays for 2 ranks"):
        run(lambda group: group.all_to_all([row(1)]), rank)


def test_what_is_sent_arrives_in_order_also_to_one_who_comes_later() -> None:
    def first(group: Collectives) -> None:
        for number in range(3):
            group.send(row(number), 1)

    def second(group: Collectives) -> list[float]:
        return [group.recv(0, (1, 1)).item() for _ in range(3)]

    assert run(first, second)[1] == [0, 1, 2]
    assert run(lambda group: [group.recv(1, (1, 1)).item()], lambda group: group.send(row(7), 0))[0] == [7]


def test_groups_of_some_ranks_do_not_meet() -> None:
    world = LocalWorld(4)

    def rank(rank: int) -> list[float]:
        pair = world.group(rank, (0, 1) if rank < 2 else (2, 3))
        found = [array.item() for array in pair.all_gather(row(rank))]
        across = world.group(rank, (rank % 2, 2 + rank % 2))
        return [*found, *(array.item() for array in across.all_gather(row(rank)))]

    assert world.run([lambda own=own: rank(own) for own in range(4)]) == [
        [0, 1, 0, 2],
        [0, 1, 1, 3],
        [2, 3, 0, 2],
        [2, 3, 1, 3],
    ]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        (lambda group: group.all_gather(row(1)), lambda group: group.all_gather(np.zeros((2, 1))), "a rank calls"),
        (lambda group: group.all_gather(row(1)), lambda group: group.all_to_all([row(1)] * 2), "a rank calls"),
        (lambda group: group.all_gather(row(1)), lambda group: None, "waits for one that does not"),
        (lambda group: group.recv(1, (1, 1)), lambda group: group.recv(0, (1, 1)), "waits for one that does not"),
        (lambda group: group.recv(1, (1, 2)), lambda group: group.send(row(1), 0), r"sent an array \[1, 1\], expected"),
    ],
)  # fmt: skip
def test_ranks_that_disagree_end_the_group(first: Rank, second: Rank, says: str) -> None:
    with pytest.raises(GroupError, match=says):
        run(first, second)


def test_a_rank_that_fails_ends_those_that_wait_for_it() -> None:
    world, seen = LocalWorld(2), list[BaseException]()

    def fails() -> None:
        raise KeyError("broken")

    def waits() -> None:
        try:
            world.group(0, (0, 1)).all_gather(row(1))
        except GroupError as error:
            seen.append(error)
            raise

    with pytest.raises(KeyError, match="broken"):
        world.run([waits, fails])
    assert "rank 1 has ended" in str(seen[0])
    with pytest.raises(GroupError, match="rank 1 has ended"):
        world.run([waits, waits])
