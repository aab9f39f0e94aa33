"""What a step brings along and hands out beside its tokens, in every backend, recorded and as it is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from kernel_cases import EVERY, NATIVE, SLOW_PAIRS, assert_same_bits, make, normal

from penstock.kernels.operands import Array, KvShape, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows

WIDTH, VOCAB = 32, 40
TAPPED = (0, 1)


class Steps:
    """Adds what the batch brings to what the table says, and hands both sums out."""

    def __init__(self, ops: Ops) -> None:
        self.table, self.head = (ops.pack_linear(normal(seed, VOCAB, WIDTH)) for seed in (1, 2))
        self.weight = ops.vector(np.ones(WIDTH, np.float32))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        for place in range(len(batch.tapped)):
            if len(batch.sample_rows_R):
                ops.tap(hidden_TD, batch, place)
            if place == 0:
                ops.add(hidden_TD, ops.features(batch, WIDTH))
        return ops.rows(hidden_TD, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.weight, 1e-5), self.head)


def batch_of(tokens: int, wanted: list[int], seed: int = 3) -> StepBatch:
    return StepBatch(
        np.arange(tokens, dtype=np.int32) % VOCAB,
        np.arange(tokens, dtype=np.int32),
        np.array([0, tokens], np.int32),
        np.zeros((1, 8), np.int32),
        np.array(wanted, np.int32),
        features_TW=normal(seed, tokens, WIDTH),
        tapped=TAPPED,
        taps_RW=np.full((len(wanted), 2 * WIDTH), np.nan, np.float32),
    )


@pytest.mark.parametrize(("family", "compute"), SLOW_PAIRS)
def test_features_come_in_and_taps_go_out(family: str, compute: str) -> None:
    """Again and again, with other numbers of tokens, and no rows wanted in between."""
    ops = make(family, compute)
    steps, kv = Steps(ops), ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=16), pages=1)
    recorded, direct = ops.record(steps, kv, tapped=TAPPED), DirectProgram(ops, steps, kv)
    for tokens, wanted in ((5, [4, 0, 2]), (5, []), (1, [0]), (40, list(range(40)))):
        batch = batch_of(tokens, wanted, seed=tokens)
        assert batch.features_TW is not None
        assert batch.taps_RW is not None
        own_TD = np.array(ops.to_numpy(ops.embed(steps.table, batch.tokens_T)))
        wanted_RW = np.concatenate((own_TD[wanted], (own_TD + batch.features_TW)[wanted]), axis=1)
        told = []
        for program in (recorded, direct):
            batch.taps_RW.fill(np.nan)
            picks = GumbelRows.empty(len(wanted))
            program.run(batch, 0, [], picks)
            assert_same_bits(batch.taps_RW, wanted_RW)
            told.append(picks.tokens_F.tolist())
        assert told[0] == told[1]


@pytest.mark.parametrize(("family", "compute"), [NATIVE[0], EVERY[-1]])
def test_a_step_without_what_was_recorded_is_refused(family: str, compute: str) -> None:
    ops = make(family, compute)
    steps, kv = Steps(ops), ops.new_kv(KvShape.plain(layers=1, kv_heads=1, head_dim=16), pages=1)
    program, batch = ops.record(steps, kv, tapped=TAPPED), batch_of(3, [1])
    for wrong in (
        replace(batch, features_TW=None),
        replace(batch, features_TW=normal(1, 3, WIDTH + 1)),
        replace(batch, taps_RW=np.zeros((1, WIDTH), np.float32)),
    ):
        with pytest.raises(ValueError, match=r"features|taps"):
            program.run(wrong, 0, [], GumbelRows.empty(1))
    program.run(replace(batch, taps_RW=None), 0, [], GumbelRows.empty(1))
    program.run(batch, 0, [], GumbelRows.empty(1))
