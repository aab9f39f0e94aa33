"""Adapters beside a product: values against float64, law 1, and rows without one that keep every bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import SLOW_TRITONS, TOLERANCE, assert_close, assert_same_bits, make, normal
from numpy.typing import NDArray

from penstock.kernels.lora import LowRank
from penstock.kernels.operands import PackedLinear, StepBatch, segment_ends

K, N = 72, 90


@pytest.fixture(params=SLOW_TRITONS, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def batch_of(slots: list[int], wanted: list[int] | None = None) -> StepBatch:
    """One token a sequence."""
    count = len(slots)
    return StepBatch(
        np.zeros(count, np.int32),
        np.zeros(count, np.int32),
        np.arange(count + 1, dtype=np.int32),
        np.zeros((count, 1), np.int32),
        np.array(range(count) if wanted is None else wanted, np.int32),
        adapters_S=np.array(slots, np.int32),
    )


def low_rank(seed: int, rank: int, first: int, n: int, scale: float = 1.0, dtype: Any = np.float32) -> LowRank:
    down = (normal(seed, rank, K) / np.sqrt(K)).astype(dtype)
    return LowRank(down, (normal(seed + 1, n, rank) / np.sqrt(rank)).astype(dtype), first, scale)


ADAPTERS: dict[int, list[LowRank]] = {
    0: [low_rank(1, 1, 0, N)],
    1: [low_rank(3, 8, 50, 40, 0.5), low_rank(5, 16, 0, 33, 2.0)],  # columns of their own, in any order
    3: [low_rank(7, 13, 20, 70, dtype=np.float16)],
    4: [low_rank(9, 64, 1, 16, dtype=ml_dtypes.bfloat16)],
}


def filled(ops: Any, *, tree: bool = False) -> tuple[PackedLinear, Any]:
    ends = segment_ends(K, 8) if tree else None
    site = ops.pack_linear(normal(11, N, K), segments=ends)
    other = ops.pack_linear(normal(12, 7, K))
    table = ops.adapter_table([other, site], 5)
    for slot, parts in ADAPTERS.items():
        table.put(slot, table.pack({1: parts}))
    return site, table


def added(ops: Any, table: Any, x_TK: NDArray[np.float32], slots: list[int]) -> NDArray[np.float32]:
    out_TN = ops.hidden(normal(13, 400, N)[: len(slots)])
    ops.lora_add(ops.compute(x_TK), batch_of(slots), table, 1, out_TN, wanted=False)
    return np.array(ops.to_numpy(out_TN))


def plainly(ops: Any, x_TK: NDArray[np.float32], slots: list[int]) -> NDArray[np.float64]:
    """In float64, of operands rounded as the backend rounds them."""

    def rounded(values: NDArray[Any]) -> NDArray[np.float64]:
        return ops.to_numpy(ops.compute(np.asarray(values, np.float32))).astype(np.float64)

    out_TN = normal(13, 400, N)[: len(slots)].astype(np.float64)
    for row, slot in enumerate(slots):
        for part in ADAPTERS.get(slot, ()):
            narrow_R = rounded(rounded(part.down_RK) @ rounded(x_TK[row]))
            out_TN[row, part.first : part.first + len(part.up_NR)] += part.scale * (rounded(part.up_NR) @ narrow_R)
    return out_TN


@pytest.mark.parametrize("tree", [False, True], ids=["plain", "tree"])
def test_an_adapter_adds_its_low_rank_product(ops: Any, tree: bool) -> None:
    slots = [0, 1, -1, 3, 1, 4, 2, 0, 3, 1]
    x_TK = normal(14, len(slots), K)
    got_TN = added(ops, filled(ops, tree=tree)[1], x_TK, slots)
    assert_close(got_TN, plainly(ops, x_TK, slots), TOLERANCE[ops.compute_dtype])


def test_a_row_has_the_same_bits_in_any_company(ops: Any) -> None:
    """Law 1, over more rows than are computed at a time; a row whose slot is empty, or has none, is not touched."""
    _, table = filled(ops)
    rows = 300 if ops.numerics.startswith("cpp") else 40
    slots = [int(slot) for slot in np.random.default_rng(2).integers(-1, 5, rows)]
    x_TK = normal(15, rows, K)
    together_TN = added(ops, table, x_TK, slots)
    before_TN = normal(13, 400, N)
    for row in [*range(12), rows - 1]:
        out_1N = ops.hidden(before_TN[row : row + 1])
        ops.lora_add(ops.compute(x_TK[row : row + 1]), batch_of([slots[row]]), table, 1, out_1N, wanted=False)
        assert_same_bits(together_TN[row], np.array(ops.to_numpy(out_1N))[0], f"row {row} of slot {slots[row]}")
        if slots[row] not in ADAPTERS:
            assert_same_bits(together_TN[row], before_TN[row])


def test_wanted_rows_have_the_adapters_of_their_tokens(ops: Any) -> None:
    _, table = filled(ops)
    slots, wanted = [0, 1, -1, 3], [3, 0, 2]
    x_TK = normal(16, 4, K)
    all_TN = added(ops, table, x_TK, slots)
    out_RN = ops.hidden(normal(13, 400, N)[wanted])
    ops.lora_add(ops.compute(x_TK[wanted]), batch_of(slots, wanted), table, 1, out_RN, wanted=True)
    assert_same_bits(np.array(ops.to_numpy(out_RN)), all_TN[wanted])


def test_a_slot_can_be_cleared_and_given_anew(ops: Any) -> None:
    _, table = filled(ops)
    x_TK = normal(17, 1, K)
    first_TN = added(ops, table, x_TK, [1])
    table.clear(1)
    assert_same_bits(added(ops, table, x_TK, [1]), normal(13, 400, N)[:1])
    table.put(2, table.pack({1: ADAPTERS[1]}))
    assert_same_bits(added(ops, table, x_TK, [2]), first_TN)


@pytest.mark.parametrize(
    "parts",
    [
        [low_rank(1, 4, 60, 40)],  # beyond the last column
        [low_rank(1, 4, 0, 40), low_rank(3, 4, 39, 10)],  # the same column twice
        [LowRank(normal(1, 4, K + 1), normal(2, N, 4), 0, 1.0)],
        [LowRank(normal(1, 4, K), normal(2, N, 5), 0, 1.0)],
    ],
)
def test_what_does_not_fit_is_refused(ops: Any, parts: list[LowRank]) -> None:
    _, table = filled(ops)
    with pytest.raises(ValueError, match="does not fit"):
        table.pack({1: parts})
