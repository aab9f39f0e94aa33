"""Backends to face and steps to run: the data that the kernel tests share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.native import NativeOps, families
from penstock.kernels.ops import StepBatch
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
    """An attention shape: query heads, key-value heads, head size."""

    query: int
    kv: int
    dim: int

    @property
    def width(self) -> int:
        return (self.query + 2 * self.kv) * self.dim


class Story:
    """Sequences with their own pages in one KV memory, computed in any cut of tokens and any company."""

    def __init__(self, ops: Any, heads: Heads, lengths: list[int], *, seed: int = 0, poison: bool = False) -> None:
        self.ops, self.heads, self.lengths = ops, heads, lengths
        blocks = [-(-length // 16) for length in lengths]
        pages = sum(blocks) + 3
        order = np.random.default_rng(99).permutation(pages).astype(np.int32)
        self.table = np.full((len(lengths), max(blocks)), 2**30, np.int32)  # never to be read beyond a sequence
        for s, count in enumerate(blocks):
            self.table[s, :count] = order[sum(blocks[:s]) : sum(blocks[: s + 1])]
        nbytes = pages * ops.page_bytes(layers=2, kv_heads=heads.kv, head_dim=heads.dim)
        self.memory = bytearray((b"\xff" if poison else b"\x00") * nbytes)  # all ones: NaN in every type
        self.kv = ops.new_kv(
            pages=pages, layers=2, kv_heads=heads.kv, head_dim=heads.dim, memory=memoryview(self.memory)
        )
        self.rope = ops.rope_table(10000.0 ** -(np.arange(0, heads.dim, 2) / heads.dim), 2048)
        self.qkv = [normal(seed + 7 * s + length, length, heads.width) for s, length in enumerate(lengths)]
        self.out = [np.full((length, heads.query * heads.dim), np.nan, np.float32) for length in lengths]

    def step(self, parts: list[tuple[int, int, int]]) -> None:
        """Compute tokens [start, end) of each named sequence together."""
        positions = np.concatenate([np.arange(start, end, dtype=np.int32) for _, start, end in parts])
        starts = np.cumsum([0, *(end - start for _, start, end in parts)]).astype(np.int32)
        sequences = [s for s, _, _ in parts]
        batch = StepBatch(np.zeros_like(positions), positions, starts, self.table[sequences], starts[1:] - 1)
        qkv = self.ops.hidden(np.concatenate([self.qkv[s][start:end] for s, start, end in parts]))
        q = self.ops.rope_and_write(qkv, self.rope, self.kv, 1, batch, heads=self.heads.query, kv_heads=self.heads.kv)
        out = self.ops.to_numpy(self.ops.paged_attention(q, self.kv, 1, batch, scale=self.heads.dim**-0.5))
        for i, (s, start, end) in enumerate(parts):
            self.out[s][start:end] = out[starts[i] : starts[i + 1]]

    def whole(self) -> list[NDArray[np.float32]]:
        self.step([(s, 0, length) for s, length in enumerate(self.lengths)])
        return self.out

    def chunked(self, chunk: int) -> list[NDArray[np.float32]]:
        for s, length in enumerate(self.lengths):
            for start in range(0, length, chunk):
                self.step([(s, start, min(length, start + chunk))])
        return self.out
