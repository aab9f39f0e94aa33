"""Attention on a GPU: what only its kernels have.  Partitions in turn and apart, padding, arrays on the device, graphs.

The tests that every backend faces run its kernels too (``kernel_cases.TRITONS``); interpreted, most of them are long.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import (
    PLAIN,
    SLOW_TRITONS,
    TOLERANCE,
    TRITONS,
    Heads,
    Story,
    Way,
    assert_close,
    assert_same_bits,
    make,
    normal,
)
from numpy.typing import NDArray
from test_kernels_attention import plain_attention
from test_kernels_latent import Latent, LatentStory

from penstock.kernels.operands import AttentionSpec, KvShape, Sparse, StepBatch
from penstock.kernels.reference.backend import ReferenceOps
from penstock.kernels.triton.attention import AttentionTile, TritonAttention

LATENT = Latent(3, 30, 16, 6)
APART = Latent(3, 30, 22, 6)  # values that are not a power of two are read by themselves
HEADS = Heads(3, 1, 24, values=20)
WAY = Way(rotated=8, stretched=1e-3, sinks=True, masks=(("window", 9), ("softcap", 20.0)))


@pytest.fixture(params=[TRITONS[0], SLOW_TRITONS[-1]], ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def oracle_of(ops: Any) -> ReferenceOps:
    return ReferenceOps(compute_dtype=ops.compute_dtype, device=str(ops.device))


class Last(Story):
    """Everything is written, and only the last tokens attend: long sequences, little work."""

    attending = 2

    def attend(self, s: int, kernels: Any) -> NDArray[np.float32]:
        length = self.lengths[s]
        self.write(s, 0, length - self.attending)
        batch = self.batch([(s, length - self.attending, length)])
        q_THC = self.rotate(self.ops.hidden(self.qkv[s][length - self.attending :]), batch)
        return np.array(self.ops.to_numpy(self.mixed(kernels, q_THC, batch)))

    def write(self, s: int, start: int, end: int) -> Any:
        """By the oracle, which is quicker than the interpreter: memory is laid out alike.  The queries."""
        return self.rotate(self.ops.hidden(self.qkv[s][start:end]), self.batch([(s, start, end)]), oracle_of(self.ops))

    def rotate(self, qkv: Any, batch: StepBatch, ops: Any = None) -> Any:
        sizes = {"heads": self.heads.query, "kv_heads": self.heads.kv, "q_scale": self.q_scale}
        return (ops or self.ops).rope_and_write(qkv, self.rope, self.kv, 1, batch, **sizes)

    def mixed(self, kernels: Any, q_THC: Any, batch: StepBatch) -> Any:
        return kernels.paged_attention(q_THC, self.kv, 1, batch, AttentionSpec(self.heads.dim**-0.5, **self.arguments))


def test_a_prompt_and_its_tokens_one_by_one(ops: Any) -> None:
    """Against float64, with many masks at once; then the same bits in pieces and in other company."""
    together = Story(ops, HEADS, [1, 18], WAY, poison=True)
    for got, qkv in zip(together.whole(), together.qkv, strict=True):
        assert_close(got, plain_attention(ops, HEADS, WAY, qkv), 2 * TOLERANCE[ops.compute_dtype])
    apart = Story(ops, HEADS, [1, 18], WAY, poison=True)
    for parts in ([(1, 0, 15), (0, 0, 1)], [(1, 15, 17)], [(1, 17, 18)]):
        apart.step(parts)
    for got, wanted in zip(apart.out, together.out, strict=True):
        assert_same_bits(got, wanted)


def test_partitions_apart_equal_partitions_in_turn(ops: Any) -> None:
    answers = []
    for apart in (False, True):
        story = Last(ops, Heads(2, 1, 16), [530], Way(sinks=True), poison=True)
        answers.append(story.attend(0, TritonAttention(ops.form, apart=apart)))
    assert_same_bits(answers[0], answers[1])
    wanted = plain_attention(ops, story.heads, Way(sinks=True), story.qkv[0])[-Last.attending :]
    assert_close(answers[0], wanted, 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.long
def test_tokens_that_read_the_first_keys(ops: Any) -> None:
    """Up to a position within a page and a block, wherever they stand; alone and together."""
    story = Last(ops, Heads(4, 2, 20), [600], poison=True)
    story.write(0, 0, 550)
    story.arguments = {"until": 530}
    wide = plain_attention(ops, story.heads, Way(), story.qkv[0][:530])
    batch, q_THC = story.batch([(0, 550, 555)]), story.write(0, 550, 555)
    got = ops.to_numpy(story.mixed(ops, q_THC, batch))
    one = ops.to_numpy(story.mixed(ops, q_THC[3:4], story.batch([(0, 553, 554)])))
    assert_same_bits(one, np.ascontiguousarray(got[3:4]))
    same = ops.to_numpy(story.mixed(ops, story.write(0, 529, 530), story.batch([(0, 529, 530)])))
    assert_close(same, wide[529:], 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("heads", [LATENT, pytest.param(APART, marks=pytest.mark.long)])
def test_latent_tokens_one_by_one(ops: Any, heads: Latent) -> None:
    story, apart = (LatentStory(ops, heads, [4], PLAIN, poison=True) for _ in range(2))  # type: ignore[arg-type]
    assert_close(story.whole()[0], story.plain_attention(story.qkv[0]), 2 * TOLERANCE[ops.compute_dtype])
    assert_same_bits(apart.chunked(2)[0], story.out[0])


def on_device(ops: Any, batch: StepBatch) -> StepBatch:
    """Its arrays where a captured graph has them."""
    names = ("tokens_T", "positions_T", "starts_S1", "table_SP")
    return replace(batch, **{name: torch.from_numpy(getattr(batch, name)).to(ops.device) for name in names})


def test_padding_is_nobodys(ops: Any) -> None:
    """A step padded to more tokens and sequences, its arrays on the device: the same bits, nothing else written."""
    plain, padded = (Last(ops, HEADS, [2, 4], WAY, poison=True) for _ in range(2))
    wanted = plain.whole()
    batch = plain.batch([(0, 0, 2), (1, 0, 4)])
    more = np.zeros(3, np.int32)
    starts_S1 = np.append(batch.starts_S1, [6, 6]).astype(np.int32)
    table_SP = np.concatenate([batch.table_SP, np.zeros((2, batch.table_SP.shape[1]), np.int32)])
    wide = StepBatch(more, np.append(batch.positions_T, more), starts_S1, table_SP, batch.sample_rows_R)
    qkv = ops.hidden(np.concatenate([*padded.qkv, normal(9, 3, HEADS.width)]))
    got = ops.to_numpy(padded.mix(qkv, on_device(ops, wide), ops))
    assert_same_bits(got[:6], np.concatenate(wanted))
    assert not got[6:].any()
    assert padded.written() == plain.written()


def test_what_the_kernels_leave_to_others(ops: Any) -> None:
    """Sparse attention is the oracle's, over the same memory."""
    story = Last(ops, Heads(2, 1, 16), [300], Way(masks=()))
    story.write(0, 0, 299)
    batch, q_THC = story.batch([(0, 299, 300)]), story.write(0, 299, 300)
    story.arguments = {"sparse": Sparse(sinks=1, window=1, chosen=9, start=0)}  # more blocks than there are
    assert_close(
        ops.to_numpy(story.mixed(ops, q_THC, batch)), plain_attention(ops, story.heads, Way(), story.qkv[0])[299:], 0.03
    )
    for name in ("window", "until"):
        story.arguments = {name: 0}
        with pytest.raises(ValueError, match=f"{name} must be above 0, got 0"):
            story.mixed(ops, q_THC, batch)
    with pytest.raises(ValueError, match="more columns than a head"):
        ops.rope_and_write(q_THC, ops.rope_table(np.ones(9), 10), story.kv, 1, batch, heads=2, kv_heads=1)


@pytest.mark.parametrize(
    ("sharing", "key_dim", "value_dim", "wanted"),
    [
        (4, 128, 128, AttentionTile(4, 16, 128, 16, value_block=128, stages=2, shared=False)),
        (1, 64, 64, AttentionTile(1, 64, 64, 16, value_block=64, stages=2, shared=False)),
        (5, 80, 80, AttentionTile(8, 8, 64, 16, value_block=128, stages=2, shared=False)),
        (128, 576, 512, AttentionTile(64, 1, 512, 64, value_block=512, stages=2, shared=True)),
    ],
)
def test_tiles_of_models_as_they_are(sharing: int, key_dim: int, value_dim: int, wanted: AttentionTile) -> None:
    shape = KvShape(layers=1, kv_heads=1, key_dim=key_dim, value_dim=value_dim, shared=key_dim != value_dim)
    assert AttentionTile.of(sharing, shape, torch.bfloat16, 227 << 10) == wanted
    assert AttentionTile.of(sharing, shape, torch.bfloat16, 163 << 10) == replace(
        wanted, stages=1 if wanted.shared else 2
    )


@pytest.mark.cuda
@pytest.mark.parametrize("heads", [Heads(32, 8, 128), Heads(8, 8, 64), Heads(10, 2, 80)], ids=str)
def test_a_token_has_the_same_bits_however_it_is_read(ops: Any, heads: Heads) -> None:
    """Law 1 on the device: one long prompt at once, in chunks, and its last tokens one by one beside others."""
    assert_the_same_however_read(ops, heads)


def assert_the_same_however_read(ops: Any, heads: Heads) -> None:
    length = 2100
    answers = []
    for cuts in ((0, length), (0, 1000, 1513, length - 3, length - 2, length - 1, length)):
        story = Story(ops, heads, [length, 700])
        story.step([(1, 0, 690)])
        for index, (start, end) in enumerate(pairwise(cuts)):
            story.step([(0, start, end), *([(1, 690 + index, 691 + index)] if len(cuts) > 2 else [])])
        answers.append(story.out[0])
    assert_same_bits(answers[0], answers[1])


@pytest.mark.cuda
def test_a_captured_step_takes_other_lengths() -> None:
    """Rotation, writing and attention of a decode step in one graph; positions and tables change between replays."""
    ops, heads = make(*TRITONS[0]), Heads(32, 8, 128)
    story = Last(ops, heads, [600, 40])
    for s, length in enumerate(story.lengths):
        story.write(s, 0, length - 4)
    qkv_TN = ops.hidden(np.zeros((2, heads.width), np.float32))
    held = on_device(ops, story.batch([(0, 596, 597), (1, 36, 37)]))
    story.mix(qkv_TN, held, ops)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out_TN = story.mix(qkv_TN, held, ops)
    for step in range(4):
        batch = story.batch([(0, 596 + step, 597 + step), (1, 36 + step, 37 + step)])
        held.positions_T.copy_(torch.from_numpy(batch.positions_T))
        qkv = np.stack([story.qkv[0][596 + step], story.qkv[1][36 + step]])
        qkv_TN.copy_(ops.hidden(qkv))
        graph.replay()
        got = np.array(ops.to_numpy(out_TN))
        assert_same_bits(got, np.array(ops.to_numpy(story.mix(ops.hidden(qkv), batch, ops))))
