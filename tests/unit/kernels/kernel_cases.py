"""Backends to face and steps to run: the data that the kernel tests share."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, reduce
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from blake3 import blake3
from numpy.typing import NDArray
from quick_interpreter import quicken

from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import AttentionSpec, KvShape, StepBatch
from penstock.kernels.reference.backend import ReferenceOps
from penstock.kernels.select import REFERENCE, TRITON, TRITON_INTERPRETER, make_ops
from penstock.kernels.sum_tree import EXPERT_GROUPS, expert_group, join
from penstock.types import FP8_E4M3

COMPUTE = ("bf16", "fp32")
NATIVE = [(family, compute) for family in families() for compute in COMPUTE]
EVERY = [*NATIVE, *((REFERENCE, compute) for compute in COMPUTE)]

INTERPRETED = "TRITON_INTERPRET" in os.environ  # see tests/conftest.py: there is no GPU
TRITONS = [(TRITON_INTERPRETER if INTERPRETED else TRITON, compute) for compute in COMPUTE]
"""The GPU's kernels: on a GPU, or interpreted, which is slow: what it runs by default must be small."""

ON_GPU = [] if INTERPRETED else TRITONS
"""The same where the interpreter would take too long; it faces smaller tests of the same in test_triton_*.py."""

SLOW_TRITONS = [
    *EVERY,
    *(pytest.param(pair, marks=[] if not INTERPRETED else pytest.mark.long) for pair in TRITONS),
]
SLOW_PAIRS = [
    *EVERY,
    *(pytest.param(*pair, marks=[] if not INTERPRETED else pytest.mark.long) for pair in TRITONS),
]
"""The same, two parameters."""

CODED = [
    *((REFERENCE, compute, FP8_E4M3) for compute in COMPUTE),
    *(pytest.param((*pair, FP8_E4M3), marks=[] if not INTERPRETED else pytest.mark.long) for pair in TRITONS),
]
"""Who keeps keys and values as codes of 8 bits."""

TOLERANCE = {"bf16": 1.2e-2, "fp32": 2e-5}
"""Relative to values around 1: two roundings to bf16 that fell apart, or sums of fp32 in another order."""


Vector = NDArray[np.float32]


@cache
def make(family: str, compute: str, kv_dtype: str | None = None) -> Any:
    if family == TRITON_INTERPRETER:
        quicken()
    if family in (TRITON, TRITON_INTERPRETER):
        where = "cuda" if family == TRITON else "cpu"
        return make_ops(family=family, compute_dtype=compute, device=where, kv_dtype=kv_dtype)
    if family == REFERENCE:
        return ReferenceOps(compute_dtype=compute, kv_dtype=kv_dtype)
    return NativeOps(family, compute)


def kept(ops: Any, rows: NDArray[Any]) -> NDArray[np.float64]:
    """What KV memory keeps of rows of keys or values: rounded to the compute type, or to codes (``kv_types``)."""
    if ops.kv_dtype != FP8_E4M3:
        return np.asarray(ops.to_numpy(ops.compute(rows)), np.float64)
    largest = np.abs(rows).max(-1, keepdims=True, initial=2.0**-100)
    scale = 2.0 ** np.ceil(np.log2(largest / 448))
    return (rows / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def short(ops: Any, lengths: list[int], instead: list[int]) -> list[int]:
    """What the interpreter takes instead: a token takes it milliseconds."""
    return instead if "interpreter" in ops.numerics else lengths


def kv_over(ops: Any, shape: KvShape, memory: bytearray) -> Any:
    """KV memory over these bytes; on a GPU, filled with them."""
    pages = len(memory) // ops.page_bytes(shape)
    if not on_gpu(ops):
        return ops.new_kv(shape, pages=pages, memory=memoryview(memory))
    kv = ops.new_kv(shape, pages=pages)
    bytes_on_gpu(kv)[:] = torch.frombuffer(memory, dtype=torch.uint8).to(ops.device)
    return kv


def on_gpu(ops: Any) -> bool:
    return getattr(ops, "device", torch.device("cpu")).type == "cuda"


def bytes_on_gpu(kv: Any) -> torch.Tensor:
    """All of KV memory, to read or to spoil."""
    storage = kv.keys.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=kv.keys.device).set_(storage, 0, (storage.nbytes(),))


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


_ORACLES: dict[tuple[Any, ...], NDArray[np.float64]] = {}


def once(oracle: Callable[[], NDArray[np.float64]], x: NDArray[Any], *rest: Hashable) -> NDArray[np.float64]:
    """What an oracle says of ``x`` and the rest: computed for the first of the backends that are compared with it."""
    key = (blake3(np.ascontiguousarray(x).tobytes()).digest(), x.shape, *rest)
    if key not in _ORACLES:
        _ORACLES[key] = oracle()
    return _ORACLES[key]


def assert_close(got: NDArray[Any], wanted: NDArray[Any], tolerance: float) -> None:
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


def assert_same_bits(got: NDArray[np.float32], wanted: NDArray[np.float32], what: str = "") -> None:
    """Not closeness, and not ``==`` either: that takes -0 for 0."""
    np.testing.assert_array_equal(got.view(np.uint32), wanted.view(np.uint32), err_msg=what)


def in_turn(parts: Sequence[Vector]) -> Vector:
    """From low to high, from zero."""
    return reduce(np.add, parts, np.zeros_like(parts[0]))


def sum_of_experts(parts: Mapping[int, Vector], experts: int, groups: range = range(EXPERT_GROUPS)) -> Vector | None:
    """The experts of a group one after another, groups by the tree: that of all, or the node over some."""
    leaves: list[Vector | None] = []
    for group in groups:
        own = [parts[expert] for expert in sorted(parts) if expert_group(expert, experts) == group]
        leaves.append(in_turn(own) if own else None)
    return join(leaves, np.add)


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
        self.kv = kv_over(ops, heads.shape, self.memory)
        self.prepare(way)
        self.qkv = [normal(seed + 7 * s + length, length, heads.width) for s, length in enumerate(lengths)]
        self.out = [np.full((length, heads.query * heads.value_dim), np.nan, np.float32) for length in lengths]

    def spoil(self, page: int) -> None:
        """Fill a page with NaN."""
        size = self.ops.page_bytes(self.heads.shape)
        self.memory[page * size : (page + 1) * size] = b"\xff" * size
        if on_gpu(self.ops):
            bytes_on_gpu(self.kv)[page * size : (page + 1) * size] = 255

    def written(self) -> bytes:
        """What the memory holds."""
        return bytes_on_gpu(self.kv).cpu().numpy().tobytes() if on_gpu(self.ops) else bytes(self.memory)

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
        return ops.paged_attention(q, self.kv, 1, batch, AttentionSpec(heads.dim**-0.5, **self.arguments))

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
