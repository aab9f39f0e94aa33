"""What most models take, against float64, with sizes that no tile divides, and law 1: a row's bits are its own.

What some models take besides is in ``checks_of_some``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import ml_dtypes
import numpy as np
from bench.gpu.figures import Check
from numpy.typing import NDArray

from penstock.kernels.operands import COLUMN_UNIT, SILU, AttentionSpec, KvShape, Routing, StepBatch, segment_ends
from penstock.kernels.ops import Ops
from penstock.kernels.reference.sampling import sample_row
from penstock.kernels.sampling import SampleRow
from penstock.types import FP8_E4M3, PAGE_TOKENS

TOLERANCE = 1.2e-2
"""Relative to values around 1: two roundings to bf16 that fell apart."""

Double = NDArray[np.float64]


def normal(seed: int, *shape: int) -> NDArray[np.float32]:
    """Gaussian numbers."""
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def each(*checks: tuple[str, Callable[[], str]]) -> Iterator[Check]:
    """As it is done; one that raises has failed, and the others go on."""
    for name, check in checks:
        try:
            yield Check(name, passed=True, found=check())
        except Exception as error:  # noqa: BLE001 - whatever is wrong with a kernel is the finding
            lines = [line for line in str(error).splitlines() if line.strip()]
            yield Check(name, passed=False, found=f"{type(error).__name__}: {' | '.join(lines[:3])[:200]}")


class Kernels:
    """The operations of one backend, tried one by one.  ``wide``: at sizes of real models."""

    def __init__(self, ops: Ops, *, wide: bool) -> None:
        self.ops = ops
        self.rows = (1, 2, 3, 16, 17, 63, 64, 65, 200) if wide else (1, 3, 17)
        self.sizes = ((14_336, 4096), (4096, 14_336), (6144, 4096), (1000, 520)) if wide else ((96, 64), (72, 96))
        self.lengths = (1, 16, 63, 64, 65, 513, 1030) if wide else (1, 17, 34)
        self.heads = (32, 8, 128) if wide else (4, 2, 16)
        self.vocab = 128_256 if wide else 131

    def attention(self) -> Iterator[Check]:
        """What depends on what pages keep."""
        return each((f"rope_and_write, paged_attention, KV in {self.ops.kv_dtype}", self._attention))

    def all(self) -> Iterator[Check]:
        """What most models take."""
        checks: tuple[tuple[str, Callable[[], str]], ...] = (
            ("linear", lambda: self._linear(tree=False)),
            ("linear, 8 segments", lambda: self._linear(tree=True)),
            ("rms_norm", self._rms_norm),
            ("gated", self._gated),
            ("embed", self._embed),
            ("rope_and_write, paged_attention", self._attention),
            ("experts", self._experts),
            ("sample", self._sample),
        )
        return each(*checks)

    # --- products -----------------------------------------------------------------------------------------------------

    def _linear(self, *, tree: bool) -> str:
        worst, ops = 0.0, self.ops
        for n, k in self.sizes:
            x_TK, weight_NK = normal(1, max(self.rows), k), normal(2, n, k) * np.float32(k**-0.5)
            ends = segment_ends(k, COLUMN_UNIT) if tree else None
            weight = ops.pack_linear(weight_NK, segments=ends)
            whole = ops.to_numpy(ops.linear(ops.compute(x_TK), weight))
            wanted = self._rounded(x_TK) @ self._rounded(weight_NK).T
            worst = max(worst, close(whole, wanted))
            for rows in self.rows:
                part = ops.to_numpy(ops.linear(ops.compute(x_TK[-rows:]), weight))
                same(part, whole[-rows:], f"{n} x {k}, {rows} rows")
        return f"{len(self.sizes)} shapes, {len(self.rows)} counts of rows, worst {worst:.1e}"

    def _experts(self) -> str:
        ops, (inner, hidden, count) = self.ops, (48, 64, 4)
        rows = max(self.rows)
        gate_up = [normal(10 + e, 2 * inner, hidden) / 8 for e in range(count)]
        down = [normal(20 + e, hidden, inner) / 7 for e in range(count)]
        ends = segment_ends(inner, COLUMN_UNIT)
        packed = ops.pack_experts(
            [ops.pack_linear(weight) for weight in gate_up], [ops.pack_linear(weight, segments=ends) for weight in down]
        )
        routing = Routing(experts=count, top_k=2)
        x_TK, logits_TE = normal(3, rows, hidden), normal(4, rows, count)

        def mixed(first: int) -> NDArray[np.float32]:
            routes = ops.route(ops.hidden(logits_TE[first:]), routing)
            hidden_TD = ops.hidden(np.zeros((rows - first, hidden), np.float32))
            ops.experts_add(ops.compute(x_TK[first:]), routes, packed, SILU, hidden_TD)
            return ops.to_numpy(hidden_TD)

        whole = mixed(0)
        ids_TK, weights_TK = ops.routes_to_numpy(ops.route(ops.hidden(logits_TE), routing))
        x, wanted = self._rounded(x_TK), np.zeros((rows, hidden))
        for row in range(rows):
            for expert, weight in zip(ids_TK[row], weights_TK[row], strict=True):
                both = x[row] @ self._rounded(gate_up[expert]).T
                wide = self._rounded(_silu(both[:inner]) * both[inner:])
                wanted[row] += weight * (wide @ self._rounded(down[expert]).T)
        worst = close(whole, wanted)
        for rows_left in self.rows:
            same(mixed(rows - rows_left), whole[rows - rows_left :], f"{rows_left} rows")
        return f"worst {worst:.1e}"

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _rms_norm(self) -> str:
        ops, columns = self.ops, self.sizes[0][1]
        x_TD, weight_D = normal(5, max(self.rows), columns) * 3, normal(6, columns)
        weight = ops.vector(weight_D)
        whole = ops.to_numpy(ops.rms_norm(ops.hidden(x_TD), weight, 1e-5))
        x = x_TD.astype(np.float64)
        worst = close(whole, x / np.sqrt((x**2).mean(axis=1, keepdims=True) + 1e-5) * weight_D)
        for rows in self.rows:
            same(ops.to_numpy(ops.rms_norm(ops.hidden(x_TD[-rows:]), weight, 1e-5)), whole[-rows:], f"{rows} rows")
        return f"worst {worst:.1e}"

    def _gated(self) -> str:
        ops = self.ops
        both_T2I = normal(8, max(self.rows), 2 * self.sizes[0][1])
        whole = ops.to_numpy(ops.gated(ops.hidden(both_T2I)))
        gate, up = np.split(both_T2I.astype(np.float64), 2, axis=1)
        worst = close(whole, _silu(gate) * up)
        for rows in self.rows:
            same(ops.to_numpy(ops.gated(ops.hidden(both_T2I[-rows:]))), whole[-rows:], f"{rows} rows")
        return f"worst {worst:.1e}"

    def _embed(self) -> str:
        table_VD = normal(9, 300, self.sizes[0][1])
        ids = np.random.default_rng(0).integers(0, 300, 70).astype(np.int32)
        got = self.ops.to_numpy(self.ops.embed(self.ops.pack_linear(table_VD), ids))
        same(got, self._rounded(table_VD)[ids].astype(np.float32), "rows of the table")
        return "exact"

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> str:
        """Sequences of all lengths, as one step, in chunks of 16 and 48, and token by token."""
        heads, kv_heads, dim = self.heads
        shape = KvShape.plain(layers=1, kv_heads=kv_heads, head_dim=dim)
        story = Story(self.ops, shape, heads, self.lengths)
        whole = story.computed(max(self.lengths))
        worst = max(close(got, wanted) for got, wanted in zip(whole, story.wanted(self._rounded), strict=True))
        for chunk in (16, 48) if max(self.lengths) > 100 else (7,):
            for got, other in zip(story.computed(chunk), whole, strict=True):
                same(got, other, f"chunks of {chunk}")
        for got, other in zip(story.alone(), whole, strict=True):
            same(got, other, "the last token alone")
        return f"{len(self.lengths)} lengths, worst {worst:.1e}"

    # --- tokens -------------------------------------------------------------------------------------------------------

    def _sample(self) -> str:
        ops, count = self.ops, min(max(self.rows), 64)
        logits_RV = normal(11, count, self.vocab) * 4
        rows = [
            SampleRow(seed=row * 77, position=row, choice=0, temperature=(0.0, 1.0, 0.7)[row % 3], top_k=None)
            for row in range(count)
        ]
        drawn = [one.token for one in ops.sample(ops.hidden(logits_RV), rows)]
        wanted = [sample_row(logits_V, row).token for logits_V, row in zip(logits_RV, rows, strict=True)]
        differing = sum(a != b for a, b in zip(drawn, wanted, strict=True))
        if differing > count // 50:  # a near tie may be decided by the last bit of a logarithm
            raise AssertionError(f"{differing} of {count} tokens are others than in float64")
        first = [one.token for one in ops.sample(ops.hidden(logits_RV[:1]), rows[:1])]
        if first != drawn[:1]:
            raise AssertionError("a row alone draws another token")
        return f"{count} rows of {self.vocab}, {differing} near ties"

    def _rounded(self, values: NDArray[Any]) -> Double:
        return self.ops.to_numpy(self.ops.compute(np.asarray(values))).astype(np.float64)


class Story:
    """Sequences that stand in one KV memory, and what float64 makes of them.

    ``masks``: ``window``, ``softcap`` and ``sinks_H`` as ``Ops.paged_attention`` has them.
    """

    def __init__(
        self, ops: Ops, shape: KvShape, heads: int, lengths: tuple[int, ...], masks: Mapping[str, Any] | None = None
    ) -> None:
        self.ops, self.shape, self.heads, self.lengths = ops, shape, heads, lengths
        self.masks = masks or {}
        self.arguments = {name: ops.vector(value) if name == "sinks_H" else value for name, value in self.masks.items()}
        blocks = max(-(-length // PAGE_TOKENS) for length in lengths)
        pages = len(lengths) * blocks
        self.table_SP = np.random.default_rng(3).permutation(pages).astype(np.int32).reshape(len(lengths), blocks)
        self.kv = ops.new_kv(shape, pages=pages)
        self.frequencies = 10_000.0 ** -(np.arange(0, shape.key_dim, 2) / shape.key_dim)
        self.rope = ops.rope_table(self.frequencies, max(lengths))
        width = (heads + 2 * shape.kv_heads) * shape.key_dim
        self.qkv = [normal(40 + length, length, width) for length in lengths]

    def computed(self, chunk: int) -> list[NDArray[np.float32]]:
        """Every sequence's rows, computed together, so many tokens of each at a time."""
        done = [0] * len(self.lengths)
        found: list[list[NDArray[np.float32]]] = [[] for _ in self.lengths]
        while any(at < length for at, length in zip(done, self.lengths, strict=True)):
            own = [s for s, length in enumerate(self.lengths) if done[s] < length]
            spans = [(s, done[s], min(done[s] + chunk, self.lengths[s])) for s in own]
            for (s, _, end), rows in zip(spans, self._step(spans), strict=True):
                found[s].append(rows)
                done[s] = end
        return [np.concatenate(parts) for parts in found]

    def alone(self) -> list[NDArray[np.float32]]:
        """Every sequence's rows again, the last token in a step of its own."""
        found = []
        for s, length in enumerate(self.lengths):
            spans = [(s, 0, length - 1), (s, length - 1, length)] if length > 1 else [(s, 0, 1)]
            found.append(np.concatenate([self._step([span])[0] for span in spans]))
        return found

    def _step(self, spans: list[tuple[int, int, int]]) -> list[NDArray[np.float32]]:
        counts = [end - begin for _, begin, end in spans]
        starts = np.cumsum([0, *counts]).astype(np.int32)
        batch = StepBatch(
            np.zeros(starts[-1], np.int32),
            np.concatenate([np.arange(begin, end) for _, begin, end in spans]).astype(np.int32),
            starts,
            np.ascontiguousarray(self.table_SP[[s for s, _, _ in spans]]),
            np.empty(0, np.int32),
        )
        qkv = self.ops.hidden(np.concatenate([self.qkv[s][begin:end] for s, begin, end in spans]))
        sizes = {"heads": self.heads, "kv_heads": self.shape.kv_heads}
        q_THC = self.ops.rope_and_write(qkv, self.rope, self.kv, 0, batch, **sizes)
        spec = AttentionSpec(self.shape.key_dim**-0.5, **self.arguments)
        out = self.ops.paged_attention(q_THC, self.kv, 0, batch, spec)
        return np.split(self.ops.to_numpy(out), starts[1:-1])

    def wanted(self, rounded: Callable[[NDArray[Any]], Double]) -> Iterator[Double]:
        """Plain attention in float64."""
        heads, kv_heads, dim = self.heads, self.shape.kv_heads, self.shape.key_dim
        for qkv in self.qkv:
            q, k, v = np.split(qkv.astype(np.float64), [heads * dim, (heads + kv_heads) * dim], axis=1)
            q, k = (self._turned(x.reshape(len(qkv), -1, dim)) for x in (q, k))
            q, k, v = rounded(q), self._kept(k, rounded), self._kept(v.reshape(len(qkv), -1, dim), rounded)
            k, v = (np.repeat(x, heads // kv_heads, axis=1) for x in (k, v))
            scores = np.einsum("thc,shc->hts", q, k) * dim**-0.5
            yield np.einsum("hts,shc->thc", self._weights(scores), v).reshape(len(qkv), -1)

    def _weights(self, scores_HTS: Double) -> Double:
        tokens, cap = scores_HTS.shape[1], self.masks.get("softcap")
        if cap is not None:
            scores_HTS = cap * np.tanh(scores_HTS / cap)
        seen = np.tri(tokens, dtype=bool)
        if "window" in self.masks:
            seen &= ~np.tri(tokens, k=-self.masks["window"], dtype=bool)
        weights = np.exp(np.where(seen, scores_HTS, -np.inf))
        sinks_H = self.masks.get("sinks_H")
        beside = 0.0 if sinks_H is None else np.exp(np.float64(sinks_H))[:, None, None]
        return np.asarray(weights / (weights.sum(-1, keepdims=True) + beside))

    def _kept(self, x_THC: Double, rounded: Callable[[NDArray[Any]], Double]) -> Double:
        """What pages keep of keys or values."""
        if self.ops.kv_dtype != FP8_E4M3:
            return rounded(x_THC)
        scale = 2.0 ** np.ceil(np.log2(np.abs(x_THC).max(-1, keepdims=True) / 448))
        codes: Double = (x_THC / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64)
        return codes * scale

    def _turned(self, x_THC: Double) -> Double:
        angles = np.outer(np.arange(len(x_THC)), self.frequencies)[:, None]
        first, second = np.split(x_THC, 2, axis=-1)
        turned = (first + 1j * second) * np.exp(1j * angles)
        return np.concatenate([turned.real, turned.imag], axis=-1)


def _silu(x: Double) -> Double:
    return x / (1 + np.exp(-x))


def close(got: NDArray[Any], wanted: NDArray[Any]) -> float:
    """The greatest distance, relative to values around 1.  Raises AssertionError beyond the tolerance."""
    distance = np.abs(got - wanted) / (1 + np.abs(wanted))
    worst = float(distance.max(initial=0.0))
    if not worst <= TOLERANCE:  # also what is no number
        raise AssertionError(f"{worst:.2e} away from float64, {TOLERANCE:.1e} is allowed")
    return worst


def same(got: NDArray[np.float32], wanted: NDArray[np.float32], what: str) -> None:
    """Raises AssertionError unless all bits are equal."""
    differing = int((got.view(np.uint32) != wanted.view(np.uint32)).sum())
    if differing:
        raise AssertionError(f"law 1: {differing} of {got.size} numbers have other bits ({what})")
