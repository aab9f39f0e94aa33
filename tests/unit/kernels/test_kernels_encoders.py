"""Attention without a cache: every family and both compute types against plain float64, and law 1."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from kernel_cases import EVERY, TOLERANCE, assert_close, assert_same_bits, make, normal
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native


@dataclass(frozen=True)
class Case:
    """Heads, key-value heads, head size; what else is asked of the operation."""

    heads: int
    kv_heads: int
    dim: int
    causal: bool = False
    window: int | None = None
    softcap: float | None = None
    rotated: int = 0  # columns
    places: bool = False  # rows of the table are named
    reach: int | None = None  # of a bias
    lengths: tuple[int, ...] = (1, 17, 70, 64)

    @property
    def width(self) -> int:
        return (self.heads + 2 * self.kv_heads) * self.dim

    def angles(self, rows: int) -> NDArray[np.float64]:
        """Two halves of the pairs, as of rows and columns of an image."""
        inv_freq = 100.0 ** -np.linspace(0, 1, self.rotated // 2)
        return np.arange(rows)[:, None] * inv_freq + np.arange(rows)[::-1, None] * inv_freq[::-1] / 7

    def bias(self) -> NDArray[np.float32] | None:
        return None if self.reach is None else normal(8, self.heads, 2 * self.reach + 1)


LONG = (1, 90, 530)
"""The last one has keys of two partitions."""

CASES = {
    "both ways": Case(2, 2, 32, lengths=LONG),
    "grouped": Case(4, 2, 24),
    "causal": Case(2, 2, 20, causal=True),
    "window": Case(1, 1, 64, window=65, lengths=LONG),
    "causal window": Case(2, 1, 16, causal=True, window=70, lengths=LONG),
    "window of one": Case(2, 2, 6, window=1),
    "rotated": Case(4, 2, 40, rotated=40),
    "by named rows": Case(2, 2, 80, rotated=40, places=True),
    "near bias": Case(2, 2, 16, reach=20, lengths=LONG),
    "far bias": Case(2, 2, 64, reach=200, causal=True),
    "everything": Case(6, 3, 24, window=90, softcap=15.0, rotated=12, places=True, reach=33),
}


def places(case: Case, length: int) -> NDArray[np.int32]:
    """Rows of the table in no order."""
    return (np.arange(length) * 37 % 601).astype(np.int32) if case.places else np.arange(length, dtype=np.int32)


def computed(ops: Any, case: Case, sequences: list[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
    lengths = [len(qkv) for qkv in sequences]
    starts = np.cumsum([0, *lengths]).astype(np.int32)
    bias = case.bias()
    out = ops.attention(
        ops.hidden(np.concatenate(sequences)),
        starts,
        heads=case.heads,
        kv_heads=case.kv_heads,
        scale=case.dim**-0.5,
        causal=case.causal,
        window=case.window,
        softcap=case.softcap,
        rope=ops.angle_table(case.angles(640)) if case.rotated else None,
        rows_T=np.concatenate([places(case, length) for length in lengths]) if case.places else None,
        bias_HR=None if bias is None else ops.vector(bias),
    )
    return np.split(np.array(ops.to_numpy(out)), starts[1:-1])


def plain(ops: Any, case: Case, qkv: NDArray[np.float32]) -> NDArray[np.float64]:
    """The same in float64."""
    length = len(qkv)
    heads = qkv.astype(np.float64).reshape(length, -1, case.dim)
    q, k, v = np.split(heads, [case.heads, case.heads + case.kv_heads], axis=1)
    if case.rotated:
        turn = np.exp(1j * case.angles(640)[places(case, length)])[:, None]
        q, k = (turned(x, turn, case.rotated) for x in (q, k))
    q, k, v = (ops.to_numpy(ops.compute(x)).astype(np.float64) for x in (q, k, v))
    k, v = (x.repeat(case.heads // case.kv_heads, axis=1) for x in (k, v))
    scores = np.einsum("thc,shc->hts", q, k) * case.dim**-0.5
    if case.softcap:
        scores = np.tanh(scores / case.softcap) * case.softcap
    apart = np.arange(length)[None] - np.arange(length)[:, None]
    bias = case.bias()
    if bias is not None and case.reach is not None:
        scores = scores + bias[:, apart.clip(-case.reach, case.reach) + case.reach]
    hidden = (apart > 0) & case.causal
    if case.window:
        hidden |= np.abs(apart) >= case.window
    scores[:, hidden] = -np.inf
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("hts,shc->thc", weights / weights.sum(-1, keepdims=True), v).reshape(length, -1)


def turned(x: NDArray[np.float64], turn: NDArray[np.complex128], columns: int) -> NDArray[np.float64]:
    first, second = np.split(x[..., :columns], 2, axis=-1)
    numbers = (first + 1j * second) * turn
    return np.concatenate([numbers.real, numbers.imag, x[..., columns:]], axis=-1)


def sequences_of(case: Case) -> list[NDArray[np.float32]]:
    return [normal(length, length, case.width) for length in case.lengths]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("family", "compute"), EVERY)
def test_attention_without_a_cache(family: str, compute: str, name: str) -> None:
    """What the operation means, and law 1: a sequence alone, beside others, with more threads."""
    ops, case = make(family, compute), CASES[name]
    sequences = sequences_of(case)
    together = computed(ops, case, sequences)
    for got, qkv in zip(together, sequences, strict=True):
        assert_close(got, plain(ops, case, qkv), 2 * TOLERANCE[compute])
    _native.set_threads(3)
    backwards = computed(ops, case, sequences[::-1])[::-1]
    _native.set_threads(1)
    alone = [computed(ops, case, [qkv])[0] for qkv in sequences]
    for a, b, c in zip(together, backwards, alone, strict=True):
        assert_same_bits(a, b, f"{len(a)} tokens, backwards")
        assert_same_bits(a, c, f"{len(a)} tokens, alone")


def test_what_makes_no_sense_is_refused() -> None:
    ops = make(*EVERY[0])
    qkv, starts = ops.hidden(normal(1, 5, 48)), np.array([0, 2, 5], np.int32)
    heads = {"heads": 2, "kv_heads": 1, "scale": 1.0}
    assert ops.attention(qkv, starts, **heads).shape == (5, 24)
    with pytest.raises(KernelError, match="window must be above 0"):
        ops.attention(qkv, starts, **heads, window=0)
    with pytest.raises(ValueError, match="starts must span all tokens"):
        ops.attention(qkv, starts[:2], **heads)
    with pytest.raises(ValueError, match="starts must ascend"):
        ops.attention(qkv, np.array([0, 4, 3, 5], np.int32), **heads)
    with pytest.raises(ValueError, match="multiple of key-value heads"):
        ops.attention(qkv, starts, heads=3, kv_heads=2, scale=1.0)
    with pytest.raises(ValueError, match=r"bias must be \[H, 2 R"):
        ops.attention(qkv, starts, **heads, bias_HR=ops.vector(normal(1, 2, 4)))
    short = ops.rope_table(np.ones(3), 2)
    with pytest.raises(ValueError, match="must reach the last position"):
        ops.attention(qkv, starts, **heads, rope=short)
    with pytest.raises(ValueError, match="row outside the rope table"):
        ops.attention(qkv, starts, **heads, rope=short, rows_T=np.array([0, 1, 0, 1, 2], np.int32))
