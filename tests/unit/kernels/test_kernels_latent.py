"""Latent attention (MLA): every family and both compute types against its unabsorbed form in float64, and law 1."""

from __future__ import annotations

from dataclasses import dataclass, replace
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
    Story,
    Way,
    assert_close,
    assert_same_bits,
    kept,
    make,
    normal,
    short,
)
from kernel_ways import assert_any_cut_is_the_same, assert_recorded_as_run
from numpy.typing import NDArray

from penstock.kernels.operands import Array, AttentionSpec, KvShape, StepBatch
from penstock.kernels.ops import Ops
from penstock.kv.page_memory import KvLayout

EPS = 1e-6


@dataclass(frozen=True)
class Latent:
    """Heads that share one latent vector: ``values`` columns of it are values, the rest is rotated."""

    query: int
    dim: int
    values: int
    plain: int  # columns of a query that are absorbed
    kv: int = 1

    @property
    def value_dim(self) -> int:
        return self.values

    @property
    def turned(self) -> int:
        return self.dim - self.values

    @property
    def width(self) -> int:
        """Queries, then the latent vector."""
        return self.query * (self.plain + self.turned) + self.dim

    @property
    def shape(self) -> KvShape:
        return KvShape(layers=2, kv_heads=1, key_dim=self.dim, value_dim=self.values, shared=True)


class LatentStory(Story):
    """A story of which keys and values are latent vectors."""

    def prepare(self, way: Way) -> None:
        ops, heads = self.ops, self.heads
        self.inv_freq = 10000.0 ** -(np.arange(0, heads.turned, 2) / heads.turned)
        self.rope = ops.rope_table(self.inv_freq, 2048, interleaved=True)
        self.absorb = normal(3, heads.query * heads.values, heads.plain) / heads.plain**0.5
        self.packed = ops.pack_linear(self.absorb)
        self.weight = normal(4, heads.values)
        self.norm = ops.vector(self.weight)

    def parts(self, qkv: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        queries = self.heads.width - self.heads.dim
        return qkv[:, :queries], qkv[:, queries:]

    def mix(self, qkv: Any, batch: StepBatch, ops: Any) -> Any:
        query, latent = self.parts(qkv)
        if isinstance(qkv, np.ndarray):  # slices of one array, where a model has two products
            query, latent = np.ascontiguousarray(query), np.ascontiguousarray(latent)
        return self.attend(query, latent, batch, ops)

    def attend(self, query: Any, latent: Any, batch: StepBatch, ops: Any) -> Any:
        ops.latent_write(latent, self.rope, self.kv, 1, batch, norm=self.norm, eps=EPS)
        q = ops.latent_query(query, self.packed, self.rope, self.kv, batch, heads=self.heads.query)
        return ops.paged_attention(q, self.kv, 1, batch, AttentionSpec(self.heads.dim**-0.5))

    def plain_attention(self, qkv: NDArray[np.float32]) -> NDArray[np.float64]:
        ops, heads, tokens = self.ops, self.heads, len(qkv)

        def rounded(x: NDArray[Any]) -> NDArray[np.float64]:
            return ops.to_numpy(ops.compute(x)).astype(np.float64)

        angles = np.exp(1j * np.outer(np.arange(tokens), self.inv_freq))

        def turned(x: NDArray[np.float64]) -> NDArray[np.float64]:
            numbers = (x[..., 0::2] + 1j * x[..., 1::2]) * angles[:, None]
            return np.stack([numbers.real, numbers.imag], -1).reshape(x.shape)

        query, latent = self.parts(qkv.astype(np.float64))
        plain, rest = latent[:, : heads.values], latent[:, None, heads.values :]
        normed = plain / np.sqrt((plain**2).mean(1, keepdims=True) + EPS) * self.weight
        k_SC = kept(ops, np.concatenate([normed, turned(rest)[:, 0]], axis=1))
        q_THN = query.reshape(tokens, heads.query, -1)
        absorb_HVK = rounded(self.absorb).reshape(heads.query, heads.values, heads.plain)
        absorbed = np.einsum("thk,hvk->thv", rounded(q_THN[..., : heads.plain]), absorb_HVK)
        q_THC = rounded(np.concatenate([absorbed, turned(q_THN[..., heads.plain :])], axis=-1))
        scores = np.einsum("thc,sc->hts", q_THC, k_SC) * heads.dim**-0.5
        scores[:, ~np.tri(tokens, dtype=bool)] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,sv->thv", weights / weights.sum(-1, keepdims=True), k_SC[:, : heads.values])
        return mixed.reshape(tokens, -1)


SHAPES = [Latent(4, 48, 32, 16), Latent(3, 30, 22, 6), Latent(20, 24, 8, 12), Latent(2, 576, 512, 128)]


@pytest.fixture(params=SLOW_TRITONS, ids="-".join)
def ops(request: pytest.FixtureRequest) -> Any:
    return make(*request.param)


def test_pages_have_the_bytes_of_their_layout(ops: Any) -> None:
    for shape in (SHAPES[3].shape, replace(SHAPES[3].shape, shared=False)):
        assert KvLayout.for_shape(shape, ops.compute_dtype).page_bytes == ops.page_bytes(shape)


@pytest.mark.parametrize("heads", SHAPES, ids=str)
def test_latent_attention(ops: Any, heads: Latent) -> None:
    story = LatentStory(ops, heads, short(ops, [1, 33, 560], [1, 33]), PLAIN, poison=True)  # type: ignore[arg-type]
    for got, qkv in zip(story.whole(), story.qkv, strict=True):
        assert_close(got, story.plain_attention(qkv), 2 * TOLERANCE[ops.compute_dtype])


@pytest.mark.parametrize("heads", SHAPES, ids=str)
@pytest.mark.parametrize(("family", "compute"), [*EVERY, *ON_GPU])
def test_any_cut_in_any_company(family: str, compute: str, heads: Latent) -> None:
    ops = make(family, compute)
    lengths = [30, 90, 700] if (family, compute) in NATIVE else [30, 90]
    assert_any_cut_is_the_same(lambda own: LatentStory(ops, heads, own, PLAIN, poison=True), lengths, last=50)  # type: ignore[arg-type]


@pytest.mark.parametrize(("heads", "n", "k"), [(4, 16, 8), (3, 5, 32), (5, 40, 64), (2, 128, 512), (7, 24, 6)])
def test_heads_linear(ops: Any, heads: int, n: int, k: int) -> None:
    weight, x = normal(1, heads * n, k) / k**0.5, normal(2, 40, heads, k)
    packed, given = ops.pack_linear(weight), ops.compute(x)
    wide = [ops.to_numpy(ops.compute(values)).astype(np.float64) for values in (x, weight)]
    wanted = np.einsum("thk,hnk->thn", wide[0], wide[1].reshape(heads, n, k)).reshape(40, -1)
    got = ops.to_numpy(ops.heads_linear(given, packed, heads=heads))
    assert_close(got, wanted, TOLERANCE[ops.compute_dtype])
    for rows in (1, 2, 7, 33):
        assert_same_bits(ops.to_numpy(ops.heads_linear(given[:rows], packed, heads=heads)), got[:rows])


class LatentLayer:
    """A step with one layer of latent attention, as a model has it."""

    def __init__(self, story: LatentStory) -> None:
        self.story, ops, heads = story, story.ops, story.heads
        self.table = ops.pack_linear(normal(1, 40, 32))
        self.query = ops.pack_linear(normal(2, heads.width - heads.dim, 32) / 4)
        self.latent = ops.pack_linear(normal(5, heads.dim, 32) / 4)
        self.values = ops.pack_linear(normal(6, heads.query * 16, heads.values) / 4)
        self.out, self.ones = ops.pack_linear(normal(7, 32, heads.query * 16)), ops.vector(np.ones(32))

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.table, batch.tokens_T)
        x_TD = ops.rms_norm(hidden_TD, self.ones, 1e-5)
        mixed = self.story.attend(ops.linear(x_TD, self.query), ops.linear(x_TD, self.latent), batch, ops)
        ops.linear_add(ops.heads_linear(mixed, self.values, heads=self.story.heads.query), self.out, hidden_TD)
        return ops.rows(hidden_TD, batch.sample_rows_R) if len(batch.sample_rows_R) else None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(ops.rms_norm(hidden_RD, self.ones, 1e-5), self.table)


@pytest.mark.parametrize(("family", "compute"), NATIVE)
def test_recorded_steps_have_the_bits_of_direct_ones(family: str, compute: str) -> None:
    ops, steps = make(family, compute), ([(0, 0, 140)], [(0, 140, 150), (1, 0, 40)])
    assert_recorded_as_run(ops, lambda: LatentStory(ops, SHAPES[0], [150, 40], PLAIN), LatentLayer, steps)  # type: ignore[arg-type]


@pytest.mark.parametrize(("family", "compute"), NATIVE[:2])
def test_what_does_not_fit_is_refused(family: str, compute: str) -> None:
    ops = make(family, compute)
    story = LatentStory(ops, SHAPES[0], [3], PLAIN)  # type: ignore[arg-type]
    batch = story.batch([(0, 0, 3)])
    with pytest.raises(ValueError, match="latent must be"):
        ops.latent_write(ops.hidden(normal(1, 3, 40)), story.rope, story.kv, 1, batch, norm=story.norm, eps=EPS)
    rope = ops.rope_table(np.ones(5), 10)
    with pytest.raises(ValueError, match="columns behind the values"):
        ops.latent_write(ops.hidden(normal(1, 3, 48)), rope, story.kv, 1, batch, norm=story.norm, eps=EPS)
    with pytest.raises(ValueError, match="must be a multiple of heads"):
        ops.heads_linear(ops.compute(normal(1, 2, 3, 8)), ops.pack_linear(normal(1, 10, 8)), heads=3)
    qkv = ops.hidden(normal(1, 3, 6 * 48))
    with pytest.raises(ValueError, match="holds latent vectors"):
        ops.rope_and_write(qkv, None, story.kv, 1, batch, heads=4, kv_heads=1)
