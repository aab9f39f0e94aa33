"""What ranks compute of an operation is, put together, the whole of it, to the bit: sums, experts, norms over heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_cases import SLOW_TRITONS, assert_same_bits, make, normal
from ml_dtypes import bfloat16

from penstock.kernels.operands import COLUMN_UNIT, SILU, HeadColumns, Routing, segment_ends
from penstock.kernels.sum_tree import experts_of, join

ROWS = (1, 7, 40)
SUMS = [(9 * 16, 16), (300, COLUMN_UNIT), (1024, COLUMN_UNIT), (72, COLUMN_UNIT)]
SHARES = [(k, unit, ways) for k, unit in SUMS for ways in (1, 2, 4, 8) if ways <= -(-k // unit)]


@pytest.fixture(params=SLOW_TRITONS, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


@pytest.mark.parametrize(("k", "unit", "ways"), SHARES)
def test_products_of_segments_are_joined_to_the_whole_product(ops: Any, k: int, unit: int, ways: int) -> None:
    ends = segment_ends(k, unit)
    weight_NK = normal(1, 50, k).astype(bfloat16)
    whole = ops.pack_linear(weight_NK, segments=ends)
    for rows in ROWS:
        x_TK, parts = normal(rows, rows, k), []
        for rank in range(ways):
            own = ends[8 * rank // ways : 8 * (rank + 1) // ways]
            columns = slice((0, *ends)[8 * rank // ways], own[-1])
            segments = tuple(end - columns.start for end in own)
            part = ops.pack_linear(np.ascontiguousarray(weight_NK[:, columns]), segments=segments)
            parts.append(ops.linear(ops.compute(np.ascontiguousarray(x_TK[:, columns])), part))
        want = ops.to_numpy(ops.linear(ops.compute(x_TK), whole))
        assert_same_bits(ops.to_numpy(ops.join(parts)), want, f"{rows} rows")


def test_a_tree_has_a_power_of_two_parts(ops: Any) -> None:
    with pytest.raises(ValueError, match="not 3"):
        ops.join([ops.hidden(normal(1, 2, 16))] * 3)


@dataclass(frozen=True)
class GivenParts:
    """What the ranks of a group would give."""

    parts: list[Any]
    rank: int

    def all_gather(self, own: Any) -> list[Any]:
        assert own is not self.parts[self.rank]
        return [own if rank == self.rank else part for rank, part in enumerate(self.parts)]


def test_a_norm_over_all_heads_has_the_heads_of_all_ranks(ops: Any) -> None:
    """Ranks of 2 and 3 heads, behind other columns; the last one has one head twice, as ranks with slots may."""
    size, all_heads = 12, ((0, 1), (2, 3, 4, 4))
    whole_TN, weight = normal(3, 7, 5 * size), ops.vector(1 + normal(4, 5 * size) / 8)
    want = ops.hidden(whole_TN)
    ops.norm_heads(want, weight, 1e-5, first=0, count=1)
    want_THC = ops.to_numpy(want).reshape(-1, 5, size)
    parts = [
        np.concatenate([normal(rank, 7, 8), whole_TN.reshape(-1, 5, size)[:, list(heads)].reshape(7, -1)], axis=1)
        for rank, heads in enumerate(all_heads)
    ]
    for rank, heads in enumerate(all_heads):
        own_TN = ops.hidden(parts[rank])
        columns = HeadColumns(size, (8, 8), all_heads, rank)
        ops.norm_gathered(own_TN, GivenParts([ops.hidden(part) for part in parts], rank), weight, 1e-5, columns)
        got = ops.to_numpy(own_TN)
        assert_same_bits(got[:, :8], parts[rank][:, :8])
        assert_same_bits(got[:, 8:], want_THC[:, list(heads)].reshape(7, -1))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("experts", [8, 60, 64])
def test_experts_of_ranks_are_joined_to_the_sum_of_all(ops: Any, experts: int, biased: bool) -> None:
    inner, width = 32, 48
    quick, interpreted = ops.numerics.startswith("cpp"), ops.numerics.startswith("triton")
    rows = 3 if interpreted else 700 if quick and experts == 60 else 40  # the CPU takes many in several windows
    routing = Routing(experts=experts, top_k=4)
    gate_up = [ops.pack_linear(normal(expert, 2 * inner, width) / 4) for expert in range(experts)]
    ends = segment_ends(inner, COLUMN_UNIT)
    down = [ops.pack_linear(normal(99 + expert, width, inner) / 4, segments=ends) for expert in range(experts)]
    biases = [
        [ops.vector(normal(200 + expert, size)) for expert in range(experts)] if biased else [None] * experts
        for size in (2 * inner, width)
    ]
    x_TK, routes = ops.compute(normal(5, rows, width)), ops.route(ops.hidden(normal(6, rows, experts)), routing)

    def added(here: range) -> Any:
        all_of = [[one if e in here else None for e, one in enumerate(own)] for own in (gate_up, down, *biases)]
        own_biases = {"gate_up_biases": all_of[2], "down_biases": all_of[3]} if biased else {}
        packed = ops.pack_experts(all_of[0], all_of[1], **own_biases)
        assert packed.partial == (len(here) < experts)
        hidden = ops.hidden(np.zeros((rows, width), np.float32))
        ops.experts_add(x_TK, routes, packed, SILU, hidden)
        return hidden

    want = ops.to_numpy(added(range(experts)))
    for ways in (2, 4, 8, 16, 32, 64):
        if ways <= experts and (quick or ways in (2, 8, experts)):
            parts = [np.array(ops.to_numpy(added(experts_of(experts, rank, ways)))) for rank in range(ways)]
            assert_same_bits(join(parts, np.add), want, f"{ways} ranks")  # type: ignore[arg-type]
