"""Programs by themselves: what can be recorded, the pool of buffers, and tokens picked without logits."""

from __future__ import annotations

import sys
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kernel_cases import EVERY, NATIVE, make, normal

from penstock.kernels.native import compression
from penstock.kernels.native.program import RecordedProgram
from penstock.kernels.operands import Array, KvShape, PackedLinear, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows, SampleRow

WIDTH = 32


class Lookup:
    """The smallest step: a table of hidden states, a norm and a head."""

    def __init__(self, ops: Ops, table: PackedLinear, head: PackedLinear) -> None:
        self.table, self.head = table, head
        self.weight = ops.vector(np.ones(WIDTH, np.float32))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        return ops.rows(hidden_TD, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.weight, 1e-5), self.head)


def lookup(ops: Any, head_VD: np.ndarray[Any, Any], tokens: int = 64) -> tuple[Lookup, Any]:
    steps = Lookup(ops, ops.pack_linear(normal(3, tokens, WIDTH)), ops.pack_linear(head_VD))
    return steps, ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=16), pages=4)


def batch_of(tokens: list[int], wanted: list[int]) -> StepBatch:
    count = len(tokens)
    return StepBatch(
        np.array(tokens, np.int32),
        np.arange(count, dtype=np.int32),
        np.array([0, count], np.int32),
        np.zeros((1, 8), np.int32),
        np.array(wanted, np.int32),
    )


def picks_of(rows: list[tuple[int, float]]) -> GumbelRows:
    picks = GumbelRows.empty(len(rows))
    for index, (seed, temperature) in enumerate(rows):
        picks.seeds_F[index], picks.temperatures_F[index], picks.positions_F[index] = seed, temperature, 7 + index
    return picks


class Formed(Lookup):
    """Logits are scaled, then capped, or one of both."""

    def __init__(self, ops: Ops, plain: Lookup, scale: float | None, cap: float | None) -> None:
        super().__init__(ops, plain.table, plain.head)
        self.scale, self.cap = scale, cap

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        logits_RV = super().logits(ops, hidden_RD)
        if self.scale is not None:
            ops.scale(logits_RV, self.scale)
        if self.cap is not None:
            ops.softcap(logits_RV, self.cap)
        return logits_RV


SPECIAL = [0.0, -0.0, 1.0, 1.0, -1.0, 0.25, 3e38, -3e38, float("inf"), -float("inf"), float("nan")]


@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_a_mask_may_come_while_the_step_is_computed(family: str, compute: str) -> None:
    """It is read after ``ready`` has returned; what that raises comes out, and the next run is sound."""
    ops = make(family, compute)
    steps, kv = lookup(ops, normal(8, 70, WIDTH))
    program = ops.record(steps, kv)
    words = np.zeros(3, np.uint32)
    row = SampleRow(seed=1, position=3, choice=0, temperature=1.0, allowed=words)

    def ready() -> None:
        words[2] = 1 << 4

    def fails() -> None:
        raise LookupError("no mask")

    batch = batch_of([1, 2], [0, 1])
    with pytest.raises(LookupError, match="no mask"):
        program.run(batch, 0, [row], picks_of([(5, 0.0)]), fails)
    assert [one.token for one in program.run(batch, 0, [row], picks_of([(5, 0.0)]), ready)] == [68]


@settings(max_examples=60, deadline=None)
@given(
    kinds=st.lists(st.integers(0, len(SPECIAL) - 1) | st.just(2), min_size=1, max_size=120),
    rows=st.lists(st.tuples(st.integers(0, 2**64 - 1), st.sampled_from([0.0, 1.0, 0.5, 2.0])), min_size=1, max_size=9),
)
def test_a_pick_is_the_draw_from_logits(kinds: list[int], rows: list[tuple[int, float]]) -> None:
    """Also with equal logits, infinite ones and such as are no numbers."""
    for family, _ in NATIVE[::2]:
        ops = make(family, "fp32")
        head_VD = np.array([[SPECIAL[kind] if column == 0 else 0.0 for column in range(WIDTH)] for kind in kinds])
        steps, kv = lookup(ops, head_VD.astype(np.float32))
        recorded, direct = ops.record(steps, kv), DirectProgram(ops, steps, kv)
        assert isinstance(recorded, RecordedProgram)
        got, want = picks_of(rows), picks_of(rows)
        batch = batch_of(list(range(len(rows))), list(range(len(rows))))
        recorded.run(batch, 0, [], got)
        direct.run(batch, 0, [], want)
        assert got.tokens_F.tolist() == want.tokens_F.tolist()


@pytest.mark.parametrize(("family", "compute"), EVERY)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 40])
def test_a_row_draws_the_same_token_either_way(family: str, compute: str, rows: int) -> None:
    """Law 1: picked, or from logits because a neighbour is, or all together."""
    ops = make(family, compute)
    steps, kv = lookup(ops, normal(8, 5003, WIDTH))
    program = ops.record(steps, kv)
    ways = [(index * 77, (0.0, 1.0, 0.7)[index % 3]) for index in range(rows)]
    batch = batch_of(list(range(rows)), list(range(rows)))
    picks = picks_of(ways)
    assert program.run(batch, 0, [], picks) == []
    from_logits = program.run(batch, 0, picks.rows(), GumbelRows.empty(0))
    assert picks.tokens_F.tolist() == [one.token for one in from_logits]
    for listed in range(1, rows):
        mixed = picks_of(ways)
        rest = GumbelRows(*(column[listed:] for column in (
            mixed.seeds_F, mixed.positions_F, mixed.choices_F, mixed.temperatures_F, mixed.tokens_F
        )))  # fmt: skip
        drawn = program.run(batch, 0, mixed.rows()[:listed], rest)
        assert [one.token for one in drawn] + rest.tokens_F.tolist() == picks.tokens_F.tolist()


@pytest.mark.parametrize(("family", "compute"), EVERY)
@pytest.mark.parametrize(("scale", "cap"), [(0.0625, None), (None, 4.0), (-3.0, 0.5)])
def test_scaled_and_capped_logits_are_picked_from(family: str, compute: str, scale: float, cap: float) -> None:
    """Caps that make many logits nearly equal, and some equal, and a factor that turns their order; the head is
    compressed where the family computes from that."""
    ops = make(family, compute)
    head_VD = (normal(8, 5003, WIDTH) * 2).astype(ml_dtypes.bfloat16)
    plain, kv = lookup(ops, head_VD)
    matrix = compression.compress(head_VD.view(np.uint16))
    assert matrix is not None
    plain.head = ops.pack_compressed([matrix]) or plain.head
    steps = Formed(ops, plain, scale, cap)
    program, direct = ops.record(steps, kv), DirectProgram(ops, steps, kv)
    assert isinstance(program, DirectProgram) or program.step.picks
    ways = [(index * 77, (0.0, 1.0, 0.7)[index % 3]) for index in range(9)]
    for count in (1, 9):
        batch = batch_of(list(range(count)), list(range(count)))
        got, want = picks_of(ways[:count]), picks_of(ways[:count])
        program.run(batch, 0, [], got)
        direct.run(batch, 0, [], want)
        assert got.tokens_F.tolist() == want.tokens_F.tolist()
        from_logits = program.run(batch, 0, want.rows(), GumbelRows.empty(0))
        assert [one.token for one in from_logits] == want.tokens_F.tolist()


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_the_arena_grows_and_stays(family: str, compute: str) -> None:
    ops = make(family, compute)
    steps, kv = lookup(ops, normal(8, 301, WIDTH))
    program = ops.record(steps, kv)
    sizes = []
    for count in (1, 100, 3, 100, 60):
        program.run(batch_of([token % 64 for token in range(count)], [0]), 1, [], GumbelRows.empty(0))
        np.testing.assert_array_equal(program.hidden(), ops.to_numpy(ops.embed(steps.table, np.zeros(1, np.int32))))
        sizes.append(program.step.arena_bytes)
    assert sizes[0] < sizes[1] == sizes[2] == sizes[3] == sizes[4]


def test_nothing_is_kept_of_a_step() -> None:
    ops = make(*NATIVE[0])
    steps, kv = lookup(ops, normal(8, 5003, WIDTH))
    program = ops.record(steps, kv)
    batch, picks = batch_of([1, 2, 3, 4], [0, 1, 2, 3]), picks_of([(index, 1.0) for index in range(4)])
    program.run(batch, 0, [], picks)
    arena, blocks = program.step.arena_bytes, sys.getallocatedblocks()
    for _ in range(100):
        program.run(batch, 0, [], picks)
    assert sys.getallocatedblocks() - blocks < 10
    assert program.step.arena_bytes == arena


class Curious(Lookup):
    """Looks into what it computes."""

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return super().logits(ops, hidden_RD * 2)


class Unused(Lookup):
    """Ends with something else than a product, so that every row has logits."""

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        logits_RV = super().logits(ops, hidden_RD)
        ops.linear_add(ops.rms_norm(hidden_RD, self.weight, 1e-5), self.head, logits_RV)
        return logits_RV


@pytest.mark.parametrize(("kind", "program"), [(Curious, DirectProgram), (Unused, RecordedProgram)])
@pytest.mark.parametrize(("family", "compute"), NATIVE[:2])
def test_unusual_steps_draw_the_same(
    family: str, compute: str, kind: Any, program: Any, caplog: pytest.LogCaptureFixture
) -> None:
    ops = make(family, compute)
    plain, kv = lookup(ops, normal(8, 301, WIDTH))
    steps = kind(ops, plain.table, plain.head)
    recorded, direct = ops.record(steps, kv), DirectProgram(ops, steps, kv)
    assert isinstance(recorded, program)
    assert ("operation by operation, which is slower: a step that looks into" in caplog.text) == (kind is Curious)
    rows = [SampleRow(seed=1, position=3, choice=0, temperature=1.0, top_k=4, logprobs=2)]
    got, want = picks_of([(5, 1.0), (6, 0.0)]), picks_of([(5, 1.0), (6, 0.0)])
    batch = batch_of([1, 2, 3, 4], [3, 0, 2, 1])
    assert recorded.run(batch, 1, rows, got) == direct.run(batch, 1, rows, want)
    assert got.tokens_F.tolist() == want.tokens_F.tolist()


def test_indices_out_of_range_are_refused() -> None:
    ops = make(*NATIVE[0])
    steps, kv = lookup(ops, normal(8, 301, WIDTH))
    program = ops.record(steps, kv)
    with pytest.raises(ValueError, match="vocabulary"):
        program.run(batch_of([64], [0]), 0, [], picks_of([(0, 0.0)]))
    with pytest.raises(ValueError, match="no row of the step"):
        program.run(batch_of([1], [1]), 0, [], picks_of([(0, 0.0)]))
    with pytest.raises(ValueError, match="a draw for every row"):
        program.run(batch_of([1], [0]), 0, [], GumbelRows.empty(0))
    with pytest.raises(ValueError, match="page outside"):
        program.run(
            StepBatch(*(np.array(x, np.int32) for x in ([1], [0], [0, 1], [[4]], [0]))), 1, [], GumbelRows.empty(0)
        )
