"""Attention and what stands before it: every family and both compute types against plain float64, and law 1."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from kernel_cases import (
    EVERY,
    NATIVE,
    ON_GPU,
    PLAIN,
    SLOW_TRITONS,
    TOLERANCE,
    Heads,
    Story,
    Way,
    assert_close,
    assert_same_bits,
    kept,
    make,
    normal,
    once,
    short,
)
from kernel_ways import assert_any_cut_is_the_same, assert_recorded_as_run
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops


@pytest.fixture(params=SLOW_TRITONS, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def rounded(ops: Any, values: NDArray[Any]) -> NDArray[np.float64]:
    return ops.to_numpy(ops.compute(values)).astype(np.float64)


def rotated(x: NDArray[np.float64], inv_freq: NDArray[np.float64], *, interleaved: bool) -> NDArray[np.float64]:
    """[T, H, C] with its first columns turned as complex numbers."""
    pairs, columns = len(inv_freq), 2 * len(inv_freq)
    turned = x[..., :columns]
    first, second = (
        (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :pairs], turned[..., pairs:])
    )
    angles = np.outer(np.arange(len(x)), inv_freq)[:, None]
    numbers = (first + 1j * second) * np.exp(1j * angles)
    axis = -1 if interleaved else -2
    back = np.stack([numbers.real, numbers.imag], axis=axis).reshape(turned.shape)
    return np.concatenate([back, x[..., columns:]], axis=-1)


def seen(tokens: int, masks: dict[str, Any]) -> NDArray[np.bool_]:
    """[position, key]"""
    positions, keys = np.arange(tokens)[:, None], np.arange(tokens)[None]
    visible = keys <= positions
    if "window" in masks:
        visible &= keys > positions - masks["window"]
    if "chunk" in masks:
        visible &= keys // masks["chunk"] == positions // masks["chunk"]
    if "read" in masks:
        visible &= masks["read"]
    return visible


def mixed(
    q: NDArray[np.float64], k: NDArray[np.float64], v: NDArray[np.float64], scale: float, arguments: dict[str, Any]
) -> NDArray[np.float64]:
    """Attention of [T, H, C] to [T, H, C] and [T, H, value_dim]."""
    scores = np.einsum("thc,shc->hts", q, k) * scale
    if cap := arguments.get("softcap"):
        scores = np.tanh(scores / cap) * cap
    scores[:, ~seen(len(q), arguments)] = -np.inf
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    sums = weights.sum(-1, keepdims=True)
    if "sinks_H" in arguments:
        sums = sums + np.exp(arguments["sinks_H"][:, None, None] - top)
    return np.einsum("hts,shc->thc", weights / sums, v).reshape(len(q), -1)


def plain_attention(ops: Any, heads: Heads, way: Way, qkv: NDArray[np.float32]) -> NDArray[np.float64]:
    """Backends of one type, and with pages of one type, round alike."""
    return once(lambda: computed_plainly(ops, heads, way, qkv), qkv, ops.compute_dtype, ops.kv_dtype, heads, way)


def computed_plainly(ops: Any, heads: Heads, way: Way, qkv: NDArray[np.float32]) -> NDArray[np.float64]:
    wide, tokens = qkv.astype(np.float64), len(qkv)
    ends = np.cumsum([heads.query * heads.dim, heads.kv * heads.dim])
    q, k, v = np.split(wide, ends, axis=1)
    q, k = (rotated(x.reshape(tokens, -1, heads.dim), way.inv_freq(heads), interleaved=way.interleaved) for x in (q, k))
    q = q * (1 + way.stretched * np.arange(tokens))[:, None, None]
    v = v.reshape(tokens, heads.kv, heads.value_dim)
    repeat = heads.query // heads.kv
    k, v = (kept(ops, x).repeat(repeat, axis=1) for x in (k, v))
    return mixed(rounded(ops, q), k, v, heads.dim**-0.5, way.arguments(heads))


WAYS = {
    "half": (Heads(4, 2, 32), Way(rotated=16)),
    "interleaved": (Heads(4, 2, 20), Way(interleaved=True)),
    "half interleaved": (Heads(2, 1, 64), Way(rotated=34, interleaved=True)),
    "no positions, scaled": (Heads(4, 2, 16), Way(rotated=0, stretched=1e-3)),
    "other values": (Heads(4, 2, 32, values=20), PLAIN),
    "window": (Heads(5, 1, 64), Way(masks=(("window", 100),))),
    "window of one": (Heads(2, 1, 16), Way(masks=(("window", 1),))),
    "short window": (Heads(2, 2, 24), Way(masks=(("window", 7),))),
    "long window": (Heads(2, 1, 16), Way(masks=(("window", 520),))),
    "chunks": (Heads(4, 2, 16), Way(masks=(("chunk", 90),))),
    "softcap": (Heads(4, 2, 16), Way(masks=(("softcap", 1.5),))),
    "sinks": (Heads(6, 2, 16), Way(sinks=True)),
    "everything": (
        Heads(6, 2, 24, values=6),
        Way(
            rotated=8, interleaved=True, stretched=1e-3, sinks=True,
            masks=(("window", 75), ("chunk", 128), ("softcap", 20.0)),
        ),
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "heads",
    [
        Heads(5, 1, 64),
        Heads(4, 2, 20),
        Heads(6, 2, 24),
        Heads(3, 3, 40),
        Heads(8, 2, 80),
        Heads(2, 1, 128),
        Heads(2, 2, 6),
    ],
    ids=str,
)
def test_attention(ops: Any, heads: Heads) -> None:
    story = Story(ops, heads, short(ops, [1, 17, 150, 600], [1, 70]), poison=True)
    for got, qkv in zip(story.whole(), story.qkv, strict=True):
        assert_close(got, plain_attention(ops, heads, PLAIN, qkv), 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("name", WAYS)
def test_attention_in_other_ways(ops: Any, name: str) -> None:
    heads, way = WAYS[name]
    story = Story(ops, heads, short(ops, [1, 33, 600], [1, 79]), way, poison=True)
    for got, qkv in zip(story.whole(), story.qkv, strict=True):
        assert_close(got, plain_attention(ops, heads, way, qkv), 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("family", "compute"), [*EVERY, *ON_GPU])
def test_any_cut_in_any_company(family: str, compute: str, name: str) -> None:
    """Law 1: token by token, in pieces, beside others, with more threads, partitions apart."""
    ops, (heads, way) = make(family, compute), WAYS[name]
    lengths = [30, 150, 1100] if (family, compute) in NATIVE else [30, 150]
    assert_any_cut_is_the_same(lambda own: Story(ops, heads, own, way, poison=True), lengths, last=100)


@pytest.mark.parametrize(("family", "compute"), [*EVERY, *ON_GPU])
def test_what_is_not_seen_is_not_read(family: str, compute: str) -> None:
    """Pages that fell out of the window may be anybody's: filled with NaN, they change no bit."""
    ops, heads, way = make(family, compute), Heads(4, 2, 16), Way(masks=(("window", 51),), sinks=True)
    kept, lost = (Story(ops, heads, [700], way) for _ in range(2))
    for story in (kept, lost):
        story.step([(0, 0, 640)])
    for block in range((641 - 51) // 16):
        lost.spoil(int(lost.table[0, block]))
    for story in (kept, lost):
        story.step([(0, 640, 641)])
        story.step([(0, 641, 700)])
    assert_same_bits(lost.out[0][640:], kept.out[0][640:])


@pytest.mark.parametrize(("first", "count", "size"), [(0, 3, 40), (40, 2, 20), (0, 1, 96), (3, 5, 7)])
def test_norm_heads(ops: Any, first: int, count: int, size: int) -> None:
    before, weight = normal(3, 9, 120) * 3, normal(4, size)
    wanted, wide = before.astype(np.float64), before.astype(np.float64)
    for head in range(count):
        columns = slice(first + head * size, first + (head + 1) * size)
        own = wide[:, columns]
        wanted[:, columns] = own / np.sqrt((own**2).mean(1, keepdims=True) + 1e-5) * weight
    x_TN = ops.hidden(before)
    ops.norm_heads(x_TN, ops.vector(weight), 1e-5, first=first, count=count)
    assert_close(ops.to_numpy(x_TN), wanted, 2e-6)
    for row in range(9):
        alone = ops.hidden(before[row : row + 1])
        ops.norm_heads(alone, ops.vector(weight), 1e-5, first=first, count=count)
        assert_same_bits(ops.to_numpy(alone), ops.to_numpy(x_TN)[row : row + 1])


@pytest.mark.parametrize(("family", "compute"), NATIVE[:2])
def test_arguments_without_sense_are_refused(family: str, compute: str) -> None:
    ops, heads = make(family, compute), Heads(2, 1, 16)
    for name in ("window", "chunk", "softcap"):
        with pytest.raises(KernelError, match=f"{name} must be above 0"):
            Story(ops, heads, [3], Way(masks=((name, 0),))).whole()
    story = Story(ops, heads, [3])
    story.arguments = {"sinks_H": ops.vector(normal(1, 3))}
    with pytest.raises(ValueError, match="a sink for every query head"):
        story.whole()
    story.rope = ops.rope_table(np.ones(9), 10)
    with pytest.raises(ValueError, match="more columns than a head"):
        story.whole()
    story.rope, story.q_scale = None, ops.vector(np.ones(2))
    with pytest.raises(ValueError, match="q_scale must reach"):
        story.whole()
    with pytest.raises(ValueError, match="columns of x"):
        ops.norm_heads(ops.hidden(normal(1, 2, 9)), ops.vector(np.ones(5)), 1e-5, first=0, count=2)


class Layer:
    """A step with one layer of attention, as a model has it, and a head."""

    def __init__(self, story: Story, vocabulary: int = 40) -> None:
        self.story, ops, heads = story, story.ops, story.heads
        self.table = ops.pack_linear(normal(1, vocabulary, 32))
        self.qkv = ops.pack_linear(normal(2, heads.width, 32) / 4)
        self.out = ops.pack_linear(normal(3, 32, heads.query * heads.value_dim))
        self.norm, self.ones = ops.vector(normal(4, heads.dim)), ops.vector(np.ones(32))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        qkv_TN = ops.linear(ops.rms_norm(hidden_TD, self.ones, 1e-5), self.qkv)
        ops.norm_heads(qkv_TN, self.norm, 1e-5, first=0, count=self.story.heads.query)
        ops.linear_add(self.story.mix(qkv_TN, batch, ops), self.out, hidden_TD)
        return ops.rows(hidden_TD, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.ones, 1e-5), self.table)


@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_steps_have_the_bits_of_direct_ones(family: str, compute: str, name: str) -> None:
    ops, (heads, way) = make(family, compute), WAYS[name]
    steps = ([(0, 0, 140)], [(0, 140, 150), (1, 0, 40)])
    assert_recorded_as_run(ops, lambda: Story(ops, heads, [150, 40], way), Layer, steps)
