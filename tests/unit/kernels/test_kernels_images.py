"""What images need of kernels: positions of three axes, rows that are given, rows that are joined; recorded and not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import NATIVE, SLOW_TRITONS, TOLERANCE, assert_close, assert_same_bits, make, normal

from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import Array, AttentionSpec, GivenRows, KvShape, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows

WIDTH, HEAD, TOKENS = 32, 16, 21
INV_FREQ = 1e4 ** -(np.arange(8) / 8)
AXES = (0, 0, 1, 1, 1, 2, 2, 2)
SHAPE = KvShape.plain(layers=1, kv_heads=1, head_dim=HEAD)


@pytest.fixture(params=SLOW_TRITONS, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def turns() -> np.ndarray[Any, Any]:
    """No axis ahead of the position, and all of them apart."""
    rng = np.random.default_rng(3)
    return np.stack([rng.integers(0, position + 1, 3) for position in range(TOKENS)]).astype(np.int32)


def batch(turns_T3: Any = None, given: GivenRows | None = None) -> StepBatch:
    return StepBatch(
        np.arange(TOKENS, dtype=np.int32) % 9,
        np.arange(TOKENS, dtype=np.int32),
        np.array([0, TOKENS], np.int32),
        np.array([[1, 0]], np.int32),
        np.arange(TOKENS, dtype=np.int32),
        turns_T3,
        given,
    )


def test_each_pair_of_columns_follows_its_axis(ops: Any) -> None:
    qkv = normal(1, TOKENS, 4 * HEAD)  # two query heads
    rope = ops.rope_table(INV_FREQ, 64, axes_C2=AXES)
    kv = ops.new_kv(SHAPE, pages=2)
    turns_T3 = turns()
    got = ops.rope_and_write(ops.hidden(qkv), rope, kv, 0, batch(turns_T3), heads=2, kv_heads=1)
    angles = turns_T3[:, AXES] * INV_FREQ
    q = qkv[:, : 2 * HEAD].reshape(TOKENS, 2, HEAD).astype(np.float64)
    numbers = (q[..., :8] + 1j * q[..., 8:]) * np.exp(1j * angles)[:, None]
    wanted = np.concatenate((numbers.real, numbers.imag), axis=-1)
    assert_close(ops.to_numpy(got).reshape(wanted.shape), wanted, TOLERANCE[ops.compute_dtype])


def test_text_is_turned_as_without_axes(ops: Any) -> None:
    qkv, kv = normal(1, TOKENS, 4 * HEAD), ops.new_kv(SHAPE, pages=2)
    plain, axes = ops.rope_table(INV_FREQ, 64), ops.rope_table(INV_FREQ, 64, axes_C2=AXES)
    positions_T3 = np.repeat(np.arange(TOKENS, dtype=np.int32)[:, None], 3, axis=1)

    def turned(rope: Array, turns_T3: Any) -> Any:
        got = ops.rope_and_write(ops.hidden(qkv), rope, kv, 0, batch(turns_T3), heads=2, kv_heads=1)
        return np.array(ops.to_numpy(got))

    want = turned(plain, None)
    for rope, turns_T3 in ((axes, None), (axes, positions_T3), (plain, turns())):
        assert_same_bits(turned(rope, turns_T3), want)


def test_joined_rows_follow_one_another(ops: Any) -> None:
    x = normal(1, 12, 5)
    got = ops.to_numpy(ops.joined_rows(ops.compute(x), 4))
    assert_same_bits(got, np.ascontiguousarray(ops.to_numpy(ops.compute(x))).reshape(3, 20))


class Sight:
    """A step with given rows and attention by axes."""

    def __init__(self, ops: Ops) -> None:
        self.table, self.qkv = ops.pack_linear(normal(3, 9, WIDTH)), ops.pack_linear(normal(4, 4 * HEAD, WIDTH))
        self.out = ops.pack_linear(normal(5, WIDTH, 2 * HEAD))
        self.weight = ops.vector(np.ones(WIDTH, np.float32))
        self.rope = ops.rope_table(INV_FREQ, 64, axes_C2=AXES)

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        ops.place_rows(hidden_TD, batch)
        qkv_TN = ops.linear(ops.rms_norm(hidden_TD, self.weight, 1e-5), self.qkv)
        q_THC = ops.rope_and_write(qkv_TN, self.rope, kv, 0, batch, heads=2, kv_heads=1)
        ops.linear_add(ops.paged_attention(q_THC, kv, 0, batch, AttentionSpec(0.3)), self.out, hidden_TD)
        return ops.rows(hidden_TD, batch.sample_rows_R)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.weight, 1e-5), self.table)


def test_a_recorded_step_sees_what_a_direct_one_sees(ops: Any) -> None:
    steps, kv = Sight(ops), ops.new_kv(SHAPE, pages=2)
    program, direct = ops.record(steps, kv), DirectProgram(ops, steps, kv)
    rows_G = np.array([4, 2, 20], np.int32)
    seen = batch(turns(), GivenRows(rows_G, ops.hidden(normal(8, 3, WIDTH))))

    def hidden(way: Any, batch: StepBatch) -> Any:
        way.run(batch, TOKENS, [], GumbelRows.empty(0))
        return np.array(ops.to_numpy(way.hidden()))

    want = hidden(direct, seen)
    assert_same_bits(hidden(program, seen), want)
    blind = hidden(direct, batch())
    assert_same_bits(hidden(program, batch()), blind)
    assert (want[2] != blind[2]).any()
    assert_same_bits(want[:2], hidden(direct, batch(seen.turns_T3))[:2])  # rows before the first that was given


@pytest.mark.parametrize(("family", "compute"), NATIVE[:2])
def test_what_does_not_fit_is_refused(family: str, compute: str) -> None:
    ops = make(family, compute)
    steps, kv = Sight(ops), ops.new_kv(SHAPE, pages=2)
    program = ops.record(steps, kv)
    assert isinstance(program, RecordedProgram)

    def run(batch: StepBatch) -> None:
        program.run(batch, TOKENS, [], GumbelRows.empty(0))

    ahead = turns()
    ahead[3, 1] = 4
    with pytest.raises(ValueError, match="up to the position"):
        run(batch(ahead))
    with pytest.raises(ValueError, match=r"turns must be \[T, 3\]"):
        run(batch(turns()[:-1]))
    with pytest.raises(ValueError, match="no row of the step"):
        run(batch(None, GivenRows(np.array([TOKENS], np.int32), normal(8, 1, WIDTH))))
    with pytest.raises(ValueError, match=r"\[G, D\]"):
        run(batch(None, GivenRows(np.array([1], np.int32), normal(8, 1, WIDTH + 1))))
    with pytest.raises(ValueError, match="an axis for every pair"):
        ops.rope_table(INV_FREQ, 64, axes_C2=AXES[1:])
    with pytest.raises(ValueError, match="three axes"):
        ops.rope_table(INV_FREQ, 64, axes_C2=(*AXES[1:], 3))
    run(replace(batch(turns()), given=GivenRows(np.empty(0, np.int32), np.empty((0, WIDTH), np.float32))))
