"""Backends to face and steps to run: the data that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native import NativeOps, families
from penstock.kernels.operands import KvShape, StepBatch
from penstock.kernels.reference import ReferenceOps
from penstock.kernels.select import REFERENCE

COMPUTE = ("bf16", "fp32")
NATIVE = [(family, compute) for family in families() for compute in COMPUTE]
EVERY = [*NATIVE, *((REFERENCE, compute) for compute in COMPUTE)]

TOLERANCE = {"bf16": 1.2e-2, "fp32": 2e-5}
"""Relative to values around 1: two roundings to bf16 that fell apart, or sums of fp32 in another order."""


@cache
def make(family: str, compute: str) -> Any:
    return ReferenceOps(compute_dtype=compute) if family == REFERENCE else NativeOps(family, compute)


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_close(got: NDArray[Any], wanted: NDArray[Any], tolerance: float) -> None:
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def assert_same_bits(got: NDArray[np.float32], wanted: NDArray[np.float32], what: str = "") -> None:
    """Not closeness, and not ``==`` either: that takes -0 for 0."""
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32), err_msg=what)


@dataclass(frozen=True)
class Heads:
    """An attention shape: query heads, key-value heads, head size, size of values where it is another."""

    query: int
    kv: int
    dim: int
    values: int | None = None

    @property
    def value_dim(self) -> int:
        return self.values or self.dim

    @property
    def width(self) -> int:
        return (self.query + self.kv) * self.dim + self.kv * self.value_dim

    @property
    def shape(self) -> KvShape:
        return KvShape(layers=2, kv_heads=self.kv, key_dim=self.dim, value_dim=self.value_dim)


@dataclass(frozen=True)
class Way:
    """How a story is computed: rotation of queries and keys, and further arguments of ``paged_attention``."""

    rotated: int | None = None  # columns; None for all of a head
    interleaved: bool = False
    stretched: float = 0.0  # queries are multiplied by 1 + stretched * position
    masks: tuple[tuple[str, float], ...] = ()
    sinks: bool = False

    def columns(self, heads: Heads) -> int:
        return heads.dim if self.rotated is None else self.rotated

    def inv_freq(self, heads: Heads) -> NDArray[np.float64]:
        columns = self.columns(heads)
        return np.asarray(10000.0 ** -(np.arange(0, columns, 2) / max(1, columns)))

    def arguments(self, heads: Heads) -> dict[str, Any]:
        sinks = {"sinks_H": normal(5, heads.query) * 2} if self.sinks else {}
        return {**dict(self.masks), **sinks}


PLAIN = Way()


class Story:
    """Sequences with their own pages in one KV memory, computed in any cut of tokens and any company."""

    def __init__(
        self, ops: Any, heads: Heads, lengths: list[int], way: Way = PLAIN, *, seed: int = 0, poison: bool = False
    ) -> None:
        self.ops, self.heads, self.lengths = ops, heads, lengths
        blocks = [-(-length // 16) for length in lengths]
        pages = sum(blocks) + 3
        order = np.random.default_rng(99).permutation(pages).astype(np.int32)
        self.table = np.full((len(lengths), max(blocks)), 2**30, np.int32)  # never to be read beyond a sequence
        for s, count in enumerate(blocks):
            self.table[s, :count] = order[sum(blocks[:s]) : sum(blocks[: s + 1])]
        nbytes = pages * ops.page_bytes(heads.shape)
        self.memory = bytearray((b"\xff" if poison else b"\x00") * nbytes)  # all ones: NaN in every type
        self.kv = ops.new_kv(heads.shape, pages=pages, memory=memoryview(self.memory))
        self.prepare(way)
        self.qkv = [normal(seed + 7 * s + length, length, heads.width) for s, length in enumerate(lengths)]
        self.out = [np.full((length, heads.query * heads.value_dim), np.nan, np.float32) for length in lengths]

    def prepare(self, way: Way) -> None:
        """What the operations need beside the batch."""
        ops, heads = self.ops, self.heads
        self.rope = None
        if way.columns(heads):
            self.rope = ops.rope_table(way.inv_freq(heads), 2048, interleaved=way.interleaved)
        self.q_scale = ops.vector(1 + way.stretched * np.arange(2048)) if way.stretched else None
        arguments = way.arguments(heads)
        self.arguments = {**arguments, "sinks_H": ops.vector(arguments["sinks_H"])} if way.sinks else arguments

    def mix(self, qkv: Any, batch: StepBatch, ops: Any) -> Any:
        """The operations of one layer: compute [T, H value_dim] of hidden [T, N]."""
        heads = self.heads
        q = ops.rope_and_write(
            qkv, self.rope, self.kv, 1, batch, heads=heads.query, kv_heads=heads.kv, q_scale=self.q_scale
        )
        return ops.paged_attention(q, self.kv, 1, batch, scale=heads.dim**-0.5, **self.arguments)

    def step(self, parts: list[tuple[int, int, int]]) -> None:
        """Compute tokens [start, end) of each named sequence together."""
        batch = self.batch(parts)
        qkv = self.ops.hidden(np.concatenate([self.qkv[s][start:end] for s, start, end in parts]))
        out = self.ops.to_numpy(self.mix(qkv, batch, self.ops))
        for (s, start, end), first, last in zip(parts, batch.starts_S1, batch.starts_S1[1:], strict=False):
            self.out[s][start:end] = out[first:last]

    def batch(self, parts: list[tuple[int, int, int]]) -> StepBatch:
        """Tokens [start, end) of each named sequence together."""
        positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in parts])
        starts = np.cumsum([0, *(end - start for _, start, end in parts)]).astype(np.int32)
        sequences = [s for s, _, _ in parts]
        return StepBatch(np.zeros_like(positions), positions, starts, self.table[sequences], starts[1:] - 1)

    def whole(self) -> list[NDArray[np.float32]]:
        self.step([(s, 0, length) for s, length in enumerate(self.lengths)])
        return self.out

    def chunked(self, chunk: int) -> list[NDArray[np.float32]]:
        for s, length in enumerate(self.lengths):
            for start in range(0, length, chunk):
                self.step([(s, start, min(length, start + chunk))])
        return self.out
