"""A recorded product whose outputs only a gate reads stores what the gate makes of it: the bits of both, one by one."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from kernel_cases import NATIVE, assert_same_bits, make, normal

from penstock.kernels.native import compression
from penstock.kernels.native.backend import families
from penstock.kernels.operands import (
    SILU,
    SWIGLU_OAI,
    Activation,
    Array,
    Gate,
    KvShape,
    PackedLinear,
    StepBatch,
    segment_ends,
)
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows

WIDTH = 160
INNER = 176
ROWS = (1, 4, 7, 11, 16, 17, 40, 199)


class GatedBlock:
    """A table of hidden states, a gated block that adds to them, and a head.  ``twice``: two read gate and up."""

    def __init__(self, ops: Ops, gate_up: PackedLinear, gate: Gate, *, twice: bool = False) -> None:
        self.table, self.gate_up, self.gate, self.twice = ops.pack_linear(normal(3, 64, WIDTH)), gate_up, gate, twice
        self.down = ops.pack_linear(normal(4, WIDTH, gate_up.n // 2))
        self.weight = ops.vector(np.ones(WIDTH, np.float32))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        gate_up_T2I = ops.linear(ops.rms_norm(hidden_TD, self.weight, 1e-5), self.gate_up)
        ops.linear_add(ops.gated(gate_up_T2I, self.gate), self.down, hidden_TD)
        if self.twice:
            ops.linear_add(ops.gated(gate_up_T2I, self.gate), self.down, hidden_TD)
        return ops.rows(hidden_TD, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.weight, 1e-5), self.table)


def batch_of(rows: int) -> StepBatch:
    every = np.arange(rows, dtype=np.int32)
    return StepBatch(
        every * 7 % 64, every, np.array([0, rows], np.int32), np.zeros((1, rows // 16 + 1), np.int32), every
    )


def check(ops: Any, block: GatedBlock, *, nodes: int) -> None:
    kv = ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=16), pages=1)
    recorded, direct = ops.record(block, kv), DirectProgram(ops, block, kv)
    assert recorded.step.nodes == nodes
    for rows in ROWS:
        batch = batch_of(rows)
        recorded.run(batch, 0, [], GumbelRows.empty(rows))
        direct.run(batch, 0, [], GumbelRows.empty(rows))
        assert_same_bits(recorded.hidden(), direct.hidden(), f"{rows} rows")


@pytest.mark.parametrize(("family", "compute"), NATIVE)
@pytest.mark.parametrize("activation", [Activation.SILU, Activation.GELU_TANH])
def test_plain_weights(family: str, compute: str, activation: Activation) -> None:
    ops = make(family, compute)
    gate_up = ops.pack_linear(normal(1, 2 * INNER, WIDTH) / 8, segments=segment_ends(WIDTH, 32))
    check(ops, GatedBlock(ops, gate_up, Gate(activation=activation, alpha=1.5)), nodes=8)


@pytest.mark.parametrize("family", families())
def test_compressed_weights(family: str) -> None:
    """Gate and up have other codes here, so that few rows take panels of one code together."""
    ops = make(family, "bf16")
    halves = [(normal(seed, INNER, WIDTH) * size).astype(ml_dtypes.bfloat16) for seed, size in ((1, 0.02), (2, 0.2))]
    found = [compression.compress(half.view(np.uint16)) for half in halves]
    gate_up = ops.pack_compressed([part for part in found if part is not None])
    if gate_up is None:
        pytest.skip(f"{family} unpacks compressed weights when they are loaded")
    check(ops, GatedBlock(ops, gate_up, SILU), nodes=8)


@pytest.mark.parametrize(("family", "compute"), NATIVE[:2])
def test_what_does_not_fit_is_left_apart(family: str, compute: str) -> None:
    """Half a panel, other gates than activation(gate) * up, and a product that is read twice."""
    ops = make(family, compute)
    odd = ops.pack_linear(normal(1, 2 * (INNER - 8), WIDTH) / 8)
    check(ops, GatedBlock(ops, odd, SILU), nodes=9)
    whole = ops.pack_linear(normal(1, 2 * INNER, WIDTH) / 8)
    check(ops, GatedBlock(ops, whole, SWIGLU_OAI), nodes=9)
    check(ops, GatedBlock(ops, whole, SILU, twice=True), nodes=11)
