"""Decoded copies of compressed weights: products of many rows read them, with the same bits; which get one is decided
from measurements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import assert_same_bits, make, normal

from penstock.kernels import _native
from penstock.kernels.decoded_copies import (
    MEASURED_ROWS,
    MIN_GAIN,
    CopyBudget,
    CopyCandidate,
    ProductTimes,
    RowsOfStep,
    ShapeTimes,
    choose_copies,
)
from penstock.kernels.native import compression, decoded_copies
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.native.memory import WeightArena
from penstock.kernels.native.weights import CompressedBuffers
from penstock.kernels.operands import SILU, Array, KvShape, PackedLinear, Routing, StepBatch, segment_ends
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows

FROM = 12
"""Rows from which on products read the copy here."""

ROWS = (1, 4, FROM - 1, FROM, FROM + 1, 17, 40, 200)


@pytest.fixture(params=[1, 2], ids=["one thread", "two threads"])
def threads(request: pytest.FixtureRequest) -> Iterator[None]:
    _native.set_threads(request.param)
    yield
    _native.set_threads(1)


def values_of(n: int, k: int, seed: int = 1) -> np.ndarray[Any, Any]:
    return (normal(seed, n, k) * 0.02).astype(ml_dtypes.bfloat16)


def kept(*weights: np.ndarray[Any, Any], ends: tuple[int, ...] | None = None) -> PackedLinear:
    """The matrices, one below the other, compressed: also where the family would unpack them."""
    found = [compression.compress(weight.view(np.uint16)) for weight in weights]
    parts = [part for part in found if part is not None]
    assert len(parts) == len(weights)
    weight = CompressedBuffers(WeightArena(), parts, ends or (parts[0].k,))
    for part, place in zip(parts, weight.places, strict=True):
        place.counts[:], place.blocks[:], place.escapes[:] = part.counts, part.blocks, part.escapes
    return weight.finish()


def with_copy(weight: PackedLinear, family: str, rows: int = FROM) -> PackedLinear:
    assert decoded_copies.add_copies(family, [(weight, rows)], 2) == decoded_copies.copy_bytes(weight)
    return weight


def with_zeros(weight: PackedLinear, rows: int = FROM) -> PackedLinear:
    """A copy of another weight, so that it can be seen who reads it."""
    weight.data.keep_decoded(np.zeros(decoded_copies.copy_bytes(weight) // 4, np.uint32), rows)
    return weight


# --- kernels ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize(
    ("n", "k", "ends"), [(80, 320, (320,)), (50, 320, segment_ends(320, 64)), (300, 896, segment_ends(896, 32))]
)
def test_a_decoded_copy_is_the_plain_weight(family: str, n: int, k: int, ends: tuple[int, ...]) -> None:
    values, weight = values_of(n, k), kept(values_of(n, k), ends=ends)
    wanted = np.full(decoded_copies.copy_bytes(weight) // 4, 0xAB, np.uint32)
    _native.Weights(wanted, n, k, list(ends), 2).fill(values.view(np.uint16), "bf16")
    cells = np.full_like(wanted, 0xCD)
    _native.CompressedKernels(family).decode_cells(weight.data, 0, cells)
    assert np.array_equal(cells, wanted)
    last = np.full(len(cells) // -(-n // 16), 0xCD, np.uint32)
    _native.CompressedKernels(family).decode_cells(weight.data, -(-n // 16) - 1, last)
    assert np.array_equal(last, wanted[-len(last) :])


@pytest.mark.parametrize("family", families())
@pytest.mark.parametrize("ends", [(896,), segment_ends(896, 32)], ids=["one segment", "eight"])
def test_products_have_the_same_bits_on_both_sides_of_the_threshold(
    family: str, ends: tuple[int, ...], threads: None
) -> None:
    ops = make(family, "bf16")
    values = values_of(300, 896)
    plain = ops.pack_linear(values, segments=ends)
    small, copied = kept(values, ends=ends), with_copy(kept(values, ends=ends), family)
    x = ops.compute(normal(2, max(ROWS), 896))
    for rows in ROWS:
        wanted = ops.to_numpy(ops.linear(x[:rows], plain)).copy()
        assert_same_bits(ops.to_numpy(ops.linear(x[:rows], small)), wanted, f"{rows} rows, compressed")
        assert_same_bits(ops.to_numpy(ops.linear(x[:rows], copied)), wanted, f"{rows} rows, with a copy")
        onto, also = normal(3, rows, 300), normal(3, rows, 300)
        ops.linear_add(x[:rows], plain, onto)
        ops.linear_add(x[:rows], copied, also)
        assert_same_bits(also, onto, f"{rows} rows, added")
    tokens = np.array([5, 299, 0] * FROM, np.int32)
    assert_same_bits(ops.to_numpy(ops.embed(copied, tokens)), ops.to_numpy(ops.embed(plain, tokens)))


@pytest.mark.parametrize("family", families())
def test_the_copy_is_read_from_its_rows_on_and_by_parts(family: str) -> None:
    """Also by parts that were cut out before the weight had a copy."""
    ops: NativeOps = make(family, "bf16")
    values = values_of(96, 128)
    weight = kept(values)
    before = ops.packed_rows(weight, range(32, 80))
    with_zeros(weight)
    after = ops.packed_rows(weight, range(32, 96))
    assert before is not None
    assert after is not None
    assert not weight.data.is_part
    assert after.data.is_part
    assert (weight.data.decoded_from, before.data.decoded_from) == (FROM, FROM)
    x = ops.compute(normal(2, FROM, 128))
    for part in (weight, before, after):
        assert not ops.to_numpy(ops.linear(x, part)).any()
        assert ops.to_numpy(ops.linear(x[:-1], part)).all()
    true = with_copy(kept(values), family)
    own = ops.packed_rows(true, range(32, 80))
    assert own is not None
    assert_same_bits(
        ops.to_numpy(ops.linear(x, own)), ops.to_numpy(ops.linear(x, ops.pack_linear(np.asarray(values[32:80]))))
    )


class Block:
    """A step with a gate that is fused, a sum, and a head that tokens are picked from."""

    def __init__(self, ops: Ops, table: PackedLinear, gate_up: PackedLinear, down: PackedLinear) -> None:
        self.table, self.gate_up, self.down = table, gate_up, down
        self.weight_D = ops.vector(np.ones(table.k, np.float32))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        x_TI = ops.gated(ops.linear(ops.rms_norm(hidden_TD, self.weight_D, 1e-5), self.gate_up), SILU)
        ops.linear_add(x_TI, self.down, hidden_TD)
        return ops.rows(hidden_TD, batch.sample_rows_R)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.weight_D, 1e-5), self.table)


def batch_of(count: int) -> StepBatch:
    every = np.arange(count, dtype=np.int32)
    return StepBatch(every, every, np.array([0, count], np.int32), np.zeros((1, 16), np.int32), every)


@pytest.mark.parametrize("family", families())
def test_recorded_steps_read_copies(family: str, threads: None) -> None:
    ops = make(family, "bf16")
    kv = ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=16), pages=1)
    table, halves, down = values_of(517, 128, 1), (values_of(96, 128, 2), values_of(96, 128, 3)), values_of(128, 96, 4)
    ends = segment_ends(96, 32)

    def steps(form: Any) -> Block:
        return Block(ops, form(kept(table)), form(kept(*halves)), form(kept(down, ends=ends)))

    plain = Block(
        ops, ops.pack_linear(table), ops.pack_linear(np.concatenate(halves)), ops.pack_linear(down, segments=ends)
    )
    copied, compressed = steps(lambda weight: with_copy(weight, family)), steps(lambda weight: weight)
    programs = [ops.record(own, kv) for own in (plain, compressed, copied)]
    assert len({program.step.nodes for program in programs}) == 1
    zeros = ops.record(steps(with_zeros), kv)
    for rows in (FROM - 1, FROM, 100):
        batch, found = batch_of(rows), []
        for program in programs:
            picks = GumbelRows.empty(rows)
            picks.temperatures_F[:] = 0.7
            program.run(batch, 0, [], picks)
            found.append((program.hidden().tobytes(), picks.tokens_F.tolist()))
        assert found[1] == found[0], f"{rows} rows, compressed"
        assert found[2] == found[0], f"{rows} rows, with copies"
        direct = DirectProgram(ops, copied, kv)
        direct.run(batch, 0, [], GumbelRows.empty(rows))
        assert direct.hidden().tobytes() == found[0][0]
        zeros.run(batch, 0, [], GumbelRows.empty(rows))
        assert (zeros.hidden().tobytes() == found[0][0]) == (rows < FROM)


@pytest.mark.parametrize("family", families())
def test_experts_read_copies_by_their_own_rows(family: str, threads: None) -> None:
    """Of one step some experts read copies and others do not; one is plain."""
    ops, how = make(family, "bf16"), Routing(experts=6, top_k=2)
    ends = segment_ends(128, 32)
    wide, down = ([values_of(n, k, seed + e) for e in range(6)] for n, k, seed in ((256, 256, 1), (256, 128, 11)))
    plain = ops.pack_experts(
        [ops.pack_linear(one) for one in wide], [ops.pack_linear(one, segments=ends) for one in down]
    )

    def packed(form: Any) -> Any:
        first = [ops.pack_linear(one) if e == 2 else form(kept(one)) for e, one in enumerate(wide)]
        return ops.pack_experts(first, [form(kept(one, ends=ends)) for one in down])

    x = ops.compute(normal(4, 90, 256))
    logits = ops.hidden(normal(5, 90, 6) + np.array([2, 0, 1, 0, -2, -3], np.float32))

    def added(experts: Any, rows: int) -> np.ndarray[Any, Any]:
        hidden = ops.hidden(normal(6, rows, 256))
        ops.experts_add(x[:rows], ops.route(logits[:rows], how), experts, SILU, hidden)
        return ops.to_numpy(hidden).copy()

    copied, zeros = packed(lambda weight: with_copy(weight, family)), packed(with_zeros)
    for rows in (1, 3, 20, 90):
        assert_same_bits(added(copied, rows), added(plain, rows), f"{rows} rows")
    assert_same_bits(added(zeros, 3), added(plain, 3))
    assert (added(zeros, 90) != added(plain, 90)).any()


def test_what_does_not_fit_a_weight_is_refused() -> None:
    ops: NativeOps = make(families()[0], "bf16")
    weight = kept(values_of(50, 128))
    cells = np.zeros(decoded_copies.copy_bytes(weight) // 4, np.uint32)
    with pytest.raises(ValueError, match="cells do not fit"):
        weight.data.keep_decoded(cells[:-16], 8)
    for rows in (0, -1):
        with pytest.raises(ValueError, match="one row and more"):
            weight.data.keep_decoded(cells, rows)
    part = ops.packed_rows(weight, range(16, 50))
    assert part is not None
    with pytest.raises(ValueError, match="not a part"):
        part.data.keep_decoded(np.zeros(3 * 64 * 16, np.uint32), 8)
    kernels = _native.CompressedKernels(families()[0])
    for panel, count in ((0, len(cells) - 16), (1, len(cells)), (-1, 64 * 16), (4, 64 * 16)):
        with pytest.raises(ValueError, match="whole panels"):
            kernels.decode_cells(weight.data, panel, np.zeros(count, np.uint32))
    weight.data.keep_decoded(cells, 8)
    with pytest.raises(ValueError, match="a copy already"):
        weight.data.keep_decoded(cells, 9)
    assert weight.data.decoded_from == 8


def test_weights_that_can_have_copies_are_found_once() -> None:
    ops: NativeOps = make(families()[0], "bf16")
    whole, other = kept(values_of(64, 128)), kept(values_of(64, 128, 2))
    weights = {
        "plain": ops.pack_linear(values_of(64, 128)),
        "vector": ops.vector(np.ones(3)),
        "whole": whole,
        "again": whole,
        "part": ops.packed_rows(whole, range(16, 64)),
        "other": other,
    }
    assert decoded_copies.compressed_weights(weights) == {"whole": whole, "other": other}


def test_every_shape_is_measured_at_all_rows() -> None:
    family = families()[0]
    ends = segment_ends(384, 32)
    weights = [kept(values_of(n, 256, n)) for n in (512, 100, 528)] + [kept(values_of(64, 384), ends=ends)]
    try:
        found = decoded_copies.measure_shapes(family, weights, 2, budget_s=60.0)
        assert decoded_copies.measure_shapes(family, weights, 2, budget_s=0.0) == {}
    finally:
        _native.set_threads(1)
    assert set(found) == {(256, 256), (384, *ends)}
    for times in found.values():
        assert tuple(times.by_rows) == MEASURED_ROWS
        assert all(own.compressed > 0 and own.plain > 0 for own in times.by_rows.values())
    assert found[256, 256].slice_bytes == 2 * 256 * 256
    assert found[384, *ends].slice_bytes == 2 * 64 * 384


# --- the decision -----------------------------------------------------------------------------------------------------


def times_of(*gains: float, nbytes: int = 1000) -> ShapeTimes:
    """So many times as fast are plain weights, by rows."""
    return ShapeTimes(nbytes, {rows: ProductTimes(gain, 1.0) for rows, gain in zip(MEASURED_ROWS, gains, strict=True)})


@pytest.mark.parametrize(
    ("gains", "rows"),
    [
        ((0.8, 0.9, 1.2, 1.3, 1.2, 1.1), 32),
        ((1.2, 1.2, 1.2, 1.3, 1.2, 1.1), 8),
        ((0.8, 1.2, 0.9, 1.3, 1.2, 1.1), 64),  # faster at 16, but not at all larger ones
        ((0.8, 0.9, 1.2, 1.3, 1.2, 1.04), None),  # not by enough at the largest
        ((0.8, 0.9, 1.04, 1.04, 1.06, MIN_GAIN), 128),
        ((0.8,) * 6, None),
    ],
)
def test_the_threshold_is_the_least_from_which_on_plain_weights_are_faster(
    gains: tuple[float, ...], rows: int | None
) -> None:
    assert times_of(*gains).decoded_from == rows
    assert (times_of(*gains).saved_s_a_byte > 0) == (rows is not None)
    assert ShapeTimes(1, {}).decoded_from is None


def test_copies_are_chosen_by_gain_a_byte_within_the_budget() -> None:
    some, much, none = times_of(1, 1, 1.1, 1.1, 1.1, 1.1), times_of(1, 1, 1, 1.5, 1.5, 1.5), times_of(*[1.0] * 6)
    every = [
        CopyCandidate("head", 400, RowsOfStep.DRAWN, much),
        CopyCandidate("0.expert", 50, RowsOfStep.ROUTED, much),
        CopyCandidate("0.qkv", 100, RowsOfStep.ALL, some),
        CopyCandidate("0.down", 200, RowsOfStep.ALL, much),
        CopyCandidate("0.out", 100, RowsOfStep.ALL, none),
        CopyCandidate("1.qkv", 100, RowsOfStep.ALL, some),
        CopyCandidate("1.down", 200, RowsOfStep.ALL, much),
    ]

    def names(budget: int, *, all_or_none: bool = False) -> list[str]:
        chosen = choose_copies(every, CopyBudget(budget, all_or_none))
        assert chosen.wanted_bytes == 1050
        assert chosen.nbytes == sum(own.nbytes for own in every if own.name in chosen.decoded_from) <= budget
        return list(chosen.decoded_from)

    whole = ["0.down", "1.down", "0.qkv", "1.qkv", "0.expert", "head"]
    assert names(1050) == names(1 << 40) == names(1050, all_or_none=True) == whole
    assert names(1049) == whole[:-1]
    assert names(1049, all_or_none=True) == []
    assert names(350) == ["0.down", "0.qkv", "0.expert"]  # what is too large makes way for smaller ones
    assert names(0) == []
    assert choose_copies(every, CopyBudget(1050)).decoded_from["0.qkv"] == 32
    assert choose_copies(every, CopyBudget(1050)).decoded_from["head"] == 64
    assert choose_copies([], CopyBudget(5)).wanted_bytes == 0
