"""Sums over ranks out of the memory of all of them: the bits of the undivided product, turn after turn.

Ranks are stepped in turn in one process, so the first half of a join, which begins its turn, is a launch of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import INTERPRETED, TRITONS, assert_same_bits, make, normal
from ml_dtypes import bfloat16

from peer_ranks import PROGRAMS, PeerMemories, WithPeers
from penstock.kernels.operands import COLUMN_UNIT, PackedLinear, segment_ends
from penstock.kernels.triton.fusion import FusingOps
from penstock.kernels.triton.peers import APART_ROWS, PeerMemory
from penstock.parallel.collectives.local import LocalWorld

N = 70
LONG = [pytest.mark.long] if INTERPRETED else []


class Peers(PeerMemories):
    """The ranks of one stage."""

    def __init__(self, ops: Any, ranks: int, half: int) -> None:
        super().__init__(ops, ranks, half=half)
        self._world = LocalWorld(ranks)
        self.groups = [self.connect(self._world.group(rank, range(ranks)), rank) for rank in range(ranks)]

    def run(self, step: Callable[[int, WithPeers], Any]) -> list[Any]:
        return self._world.run([lambda rank=rank, own=own: step(rank, own) for rank, own in enumerate(self.groups)])


def shares(ops: Any, weight_NK: Any, ends: Sequence[int], ranks: int) -> list[tuple[slice, PackedLinear]]:
    """Each rank's columns of a weight."""
    found = []
    for rank in range(ranks):
        own = ends[8 * rank // ranks : 8 * (rank + 1) // ranks]
        columns = slice((0, *ends)[8 * rank // ranks], own[-1])
        segments = tuple(end - columns.start for end in own)
        part = ops.pack_linear(np.ascontiguousarray(weight_NK[:, columns]), segments=segments)
        found.append((columns, replace(part, partial=True)))
    return found


@pytest.mark.parametrize("compute", [TRITONS[0], pytest.param(TRITONS[1], marks=LONG)], ids="-".join)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=LONG), 8])
def test_the_join_of_all_ranks_has_the_bits_of_the_whole_product(ranks: int, compute: tuple[str, str]) -> None:
    """Odd numbers of rows, added and not, so that turns of both halves follow one another."""
    ops, k = make(*compute), 300
    ends, weight_NK = segment_ends(k, COLUMN_UNIT), (normal(1, N, k) / 17).astype(bfloat16)
    whole, parts = ops.pack_linear(weight_NK, segments=ends), shares(ops, weight_NK, ends, ranks)
    peers = Peers(ops, ranks, half=64 * N)
    for turn, (rows, add) in enumerate([(1, True), (3, False), (APART_ROWS + 9, True)]):
        x_TK, hidden_TN = normal(rows, rows, k), normal(7 + turn, rows, N)
        want = ops.hidden(hidden_TN)
        ops.linear_add(ops.compute(x_TK), whole, want)

        def step(rank: int, group: WithPeers, x_TK: Any = x_TK, before_TN: Any = hidden_TN, add: bool = add) -> Any:
            (columns, weight), own = parts[rank], FusingOps(ops, ops.form)
            out = ops.hidden(before_TN)
            product = own.all_reduce(own.linear(ops.compute(np.ascontiguousarray(x_TK[:, columns])), weight), group)
            if add:
                own.add(out, product)
            else:
                ops.add(out, own.made(product))
            return ops.to_numpy(out)

        for got in peers.run(step):
            assert_same_bits(got, ops.to_numpy(want), f"{rows} rows")
        assert {memory.words[rank, 0].item() for memory in peers.memories for rank in range(ranks)} == {turn + 1}
    assert all((memory.words[:-1] == turn + 1).all() for memory in peers.memories)


def test_what_does_not_fit_is_gathered() -> None:
    """Many rows, products of too many numbers, and weights that are no part of a sum."""
    ops, k = make(*TRITONS[0]), 64
    ends, weight_NK = segment_ends(k, 8), normal(1, 20, k).astype(bfloat16)
    parts, peers = shares(ops, weight_NK, ends, 2), Peers(ops, 2, half=4 * 3 * 20)
    table = peers.groups[0].peers
    assert table.operand(parts[0][1], 3) is not None
    assert table.operand(parts[0][1], 4) is None
    assert table.operand(parts[0][1], APART_ROWS + 1) is not None  # one part a rank
    assert table.operand(parts[0][1], 65) is None
    assert table.operand(replace(parts[0][1], partial=False), 1) is None
    x_TK = normal(2, 5, k)
    want = ops.to_numpy(ops.linear(ops.compute(x_TK), ops.pack_linear(weight_NK, segments=ends)))

    def step(rank: int, group: WithPeers) -> Any:
        (columns, weight), own = parts[rank], FusingOps(ops, ops.form)
        product = own.linear(ops.compute(np.ascontiguousarray(x_TK[:, columns])), weight)
        return ops.to_numpy(own.made(own.all_reduce(product, group)))

    for got in peers.run(step):
        assert_same_bits(got, want)
    assert not any(memory.words.any() for memory in peers.memories)


def test_nobody_waits_for_a_group_that_is_over() -> None:
    """One rank alone, in one launch, as on a GPU: its peer never begins the turn."""
    ops, k = make(*TRITONS[0]), 64
    columns, weight = shares(ops, normal(1, 20, k).astype(bfloat16), segment_ends(k, 8), 2)[0]
    memories = [PeerMemory.allocate(ops.form, 2, half=4 * 20, programs=PROGRAMS) for _ in range(2)]
    table = memories[0].table(0, [memory.address for memory in memories])
    memories[0].end()
    operand = table.operand(weight, 1)
    assert operand is not None
    table.multiply(ops.form, ops.compute(normal(2, 1, k)[:, columns]), operand, ops.hidden(normal(3, 1, 20)), add=True)
    assert memories[0].words[:2].tolist() == memories[1].words[:2].tolist() == [[1, 1], [0, 0]]
