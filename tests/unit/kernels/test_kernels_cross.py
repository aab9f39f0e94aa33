"""Cross-attention: tokens that all read the first keys of their sequence; every backend against float64, and law 1."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kernel_cases import (
    EVERY,
    NATIVE,
    ON_GPU,
    TOLERANCE,
    Heads,
    Story,
    Way,
    assert_close,
    assert_same_bits,
    make,
    normal,
)
from kernel_ways import assert_recorded_as_run
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.operands import AttentionSpec, StepBatch
from penstock.kernels.sampling import GumbelRows

UNTIL = 1100  # 2 partitions of 512 keys and a part, which ends within a block of 64 and within a page
BEGIN = 1104


class Cross(Story):
    """Sequences that begin with keys and values alone; behind them stand tokens that read those."""

    def __init__(self, ops: Any, heads: Heads, lengths: list[int]) -> None:
        super().__init__(ops, heads, lengths, Way(rotated=0), poison=True)
        self.arguments = {"until": UNTIL}
        self.q = [row_TN[:, : heads.query * heads.dim] for row_TN in self.qkv]
        for s in range(len(lengths)):
            for start, end in ((0, 700), (700, UNTIL)):  # whole or in pieces is the same
                own_TN = self.qkv[s][start:end, heads.query * heads.dim :]
                sizes = {"heads": 0, "kv_heads": heads.kv}
                ops.rope_and_write(ops.hidden(own_TN), None, self.kv, 1, self.batch([(s, start, end)]), **sizes)

    def mix(self, qkv: Any, batch: StepBatch, ops: Any) -> Any:
        """Without writing anything."""
        return ops.paged_attention(qkv, self.kv, 1, batch, AttentionSpec(self.heads.dim**-0.5, **self.arguments))

    def step(self, parts: list[tuple[int, int, int]]) -> None:
        batch = self.batch(parts)
        q = self.ops.compute(np.concatenate([self.q[s][start:end] for s, start, end in parts]))
        out = self.ops.to_numpy(self.mix(q, batch, self.ops))
        for (s, start, end), first, last in zip(parts, batch.starts_S1, batch.starts_S1[1:], strict=False):
            self.out[s][start:end] = out[first:last]


def wanted(story: Cross, s: int) -> NDArray[np.float64]:
    heads, ops = story.heads, story.ops
    q, k, v = np.split(story.qkv[s], np.cumsum([heads.query * heads.dim, heads.kv * heads.dim]), axis=1)
    q, k, v = (ops.to_numpy(ops.compute(x)).astype(np.float64) for x in (q[BEGIN:], k[:UNTIL], v[:UNTIL]))
    k, v = (x.reshape(UNTIL, heads.kv, -1).repeat(heads.query // heads.kv, axis=1) for x in (k, v))
    scores = np.einsum("thc,shc->hts", q.reshape(len(q), heads.query, -1), k) * heads.dim**-0.5
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shc->thc", weights / weights.sum(-1, keepdims=True), v).reshape(len(q), -1)


@pytest.mark.parametrize(("family", "compute"), [*EVERY, *ON_GPU])
def test_tokens_read_the_first_keys_whatever_their_position(family: str, compute: str) -> None:
    ops, lengths = make(family, compute), [BEGIN + 90, BEGIN + 3]
    story = Cross(ops, Heads(4, 2, 20), lengths)
    story.step([(s, BEGIN, length) for s, length in enumerate(lengths)])
    for s, got in enumerate(story.out):
        assert_close(got[BEGIN:], wanted(story, s), 2 * TOLERANCE[compute])
    apart = Cross(ops, Heads(4, 2, 20), lengths)
    for position in range(BEGIN, BEGIN + 4):
        apart.step([(0, position, position + 1)])
    apart.step([(1, BEGIN, BEGIN + 2), (0, BEGIN + 4, BEGIN + 70)])
    _native.set_threads(4)
    apart.step([(0, BEGIN + 70, BEGIN + 90), (1, BEGIN + 2, BEGIN + 3)])
    _native.set_threads(1)
    for a, b in zip(story.out, apart.out, strict=True):
        assert_same_bits(a[BEGIN:], b[BEGIN:])


class CrossLayer:
    """A step with one such layer, and one that reads its own chunk beside it."""

    def __init__(self, story: Cross) -> None:
        self.story, ops, heads = story, story.ops, story.heads
        self.table = ops.pack_linear(normal(1, 40, 32))
        self.q = ops.pack_linear(normal(2, heads.query * heads.dim, 32))
        self.qkv = ops.pack_linear(normal(4, heads.width, 32))
        self.out = ops.pack_linear(normal(3, 32, heads.query * heads.value_dim))
        self.ones = ops.vector(np.ones(32))

    def forward(self, ops: Any, batch: StepBatch, kv: Any) -> Any:
        heads = self.story.heads
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        qkv_TN = ops.linear(ops.rms_norm(hidden_TD, self.ones, 1e-5), self.qkv)
        q_THC = ops.rope_and_write(qkv_TN, None, kv, 1, batch, heads=heads.query, kv_heads=heads.kv)
        own_TK = ops.paged_attention(q_THC, kv, 1, batch, AttentionSpec(0.2, chunk=BEGIN))
        ops.linear_add(own_TK, self.out, hidden_TD)
        q_TK = ops.rms_norm(ops.linear(ops.rms_norm(hidden_TD, self.ones, 1e-5), self.q), self.wide(ops), 1e-5)
        ops.linear_add(self.story.mix(q_TK, batch, ops), self.out, hidden_TD)
        return ops.rows(hidden_TD, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def wide(self, ops: Any) -> Any:
        return self.story.ops.vector(np.ones(self.story.heads.query * self.story.heads.dim))

    def logits(self, ops: Any, hidden_RD: Any) -> Any:
        return ops.linear(ops.rms_norm(hidden_RD, self.ones, 1e-5), self.table)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_steps_have_the_bits_of_direct_ones(family: str, compute: str) -> None:
    ops = make(family, compute)
    steps = ([(0, BEGIN, BEGIN + 30)], [(0, BEGIN + 30, BEGIN + 31), (1, BEGIN, BEGIN + 9)])
    run, story = assert_recorded_as_run(
        ops, lambda: Cross(ops, Heads(4, 2, 16), [BEGIN + 40, BEGIN + 9]), CrossLayer, steps
    )
    early = replace(story.batch([(0, 0, 30)]), sample_rows_R=np.empty(0, np.int32))
    with pytest.raises(ValueError, match="must reach the keys"):
        run.run(early, 0, [], GumbelRows.empty(0))


def test_arguments_without_sense_are_refused() -> None:
    story = Cross(make(*NATIVE[0]), Heads(2, 1, 16), [BEGIN + 1])
    with pytest.raises(ValueError, match="must reach the keys"):
        story.step([(0, 0, UNTIL - 1)])
    story.arguments = {"until": 0}
    with pytest.raises(KernelError, match="until must be above 0"):
        story.step([(0, BEGIN, BEGIN + 1)])
    story.arguments = {"until": 9, "window": 9}
    with pytest.raises(KernelError, match="neither window nor chunk"):
        story.step([(0, BEGIN, BEGIN + 1)])
