"""What some models take besides ``checks``: other norms, adapters, weights in fewer bits, masks, latents and states.

As there: against float64, with sizes that no tile divides, and law 1.  Not here are operations of encoders, images and
sounds, sparse and cross-attention, and logits with caps: ``tests/unit/kernels`` asks for those, also on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from bench.gpu.checks import Double, Story, close, each, normal, same
from bench.gpu.figures import Check
from numpy.typing import NDArray

from penstock.kernels.compressed import compress_for_gpu
from penstock.kernels.lora import LowRank
from penstock.kernels.operands import AttentionSpec, KvShape, PackedLinear, StateShape, StepBatch
from penstock.kernels.ops import Ops
from penstock.kernels.quantization import MinimumType, QuantFormat, QuantizedMatrix, QuantRows, ScaleType

EPS = 1e-6

Rows = NDArray[np.float32]


class KernelsOfSome:
    """The operations of one backend, tried one by one.  ``wide``: at sizes of real models."""

    def __init__(self, ops: Ops, *, wide: bool) -> None:
        self.ops = ops
        self.rows = (1, 2, 17, 64, 65, 200) if wide else (1, 3, 17)
        self.size = (1000, 4096) if wide else (50, 256)
        self.lengths = (1, 16, 65, 513, 1030) if wide else (1, 17, 34)
        self.heads = (32, 8, 128) if wide else (4, 2, 16)
        self.latent = (16, 576, 512, 128) if wide else (2, 24, 16, 8)  # heads, columns, values of them, absorbed
        self.states = StateShape(
            layers=2, key_heads=1, heads=2, key_dim=128 if wide else 8, value_dim=128 if wide else 16, taps=4, cell=32
        )

    def all(self) -> Iterator[Check]:
        """Every check."""
        return each(
            ("layer_norm", self._layer_norm),
            ("norm_heads", self._norm_heads),
            ("gated_norm", self._gated_norm),
            ("lora_add", self._adapters),
            ("linear, compressed", self._compressed),
            ("linear, 4 bits", self._quantized),
            ("paged_attention, windows, sinks, soft caps", self._masks),
            ("latent_write, latent_query, paged_attention", self._latent),
            ("causal_conv, delta_rule", self._states),
        )

    # --- rows ---------------------------------------------------------------------------------------------------------

    def _layer_norm(self) -> str:
        ops, (_, columns) = self.ops, self.size
        x_TD, weight_D, bias_D = normal(1, max(self.rows), columns) * 3 + 1, normal(2, columns), normal(3, columns)
        weight, bias = ops.vector(weight_D), ops.vector(bias_D)
        x = x_TD.astype(np.float64)
        far = x - x.mean(axis=1, keepdims=True)
        wanted = far / np.sqrt((far**2).mean(axis=1, keepdims=True) + EPS) * weight_D + bias_D
        return self._each_alone(wanted, lambda first: ops.layer_norm(ops.hidden(x_TD[first:]), weight, bias, EPS))

    def _norm_heads(self) -> str:
        ops, columns = self.ops, self.heads[2]
        x_TN, weight_C = normal(4, max(self.rows), 5 * columns) * 3, normal(5, columns)
        weight, wanted = ops.vector(weight_C), x_TN.astype(np.float64)
        own = wanted[:, columns : 4 * columns].reshape(len(x_TN), 3, columns)
        wanted[:, columns : 4 * columns] = _normed(own, weight_C).reshape(len(x_TN), -1)

        def normed(first: int) -> Any:
            hidden = ops.hidden(x_TN[first:])
            ops.norm_heads(hidden, weight, EPS, first=columns, count=3)
            return hidden

        return self._each_alone(wanted, normed)

    def _gated_norm(self) -> str:
        ops, columns = self.ops, self.heads[2]
        x_TN, gate_TM, weight_C = (normal(6 + i, *shape) for i, shape in enumerate(
            ((max(self.rows), 3 * columns), (max(self.rows), 4 * columns), (columns,))
        ))  # fmt: skip
        weight, gate = ops.vector(weight_C), gate_TM[:, columns:].astype(np.float64)
        wide = _normed(x_TN.astype(np.float64).reshape(len(x_TN), 3, columns), weight_C).reshape(len(x_TN), -1)

        def gated(first: int) -> Any:
            return ops.gated_norm(ops.hidden(x_TN[first:]), ops.hidden(gate_TM[first:]), weight, EPS, first=columns)

        return self._each_alone(wide * gate / (1 + np.exp(-gate)), gated)

    # --- products -----------------------------------------------------------------------------------------------------

    def _adapters(self) -> str:
        """Two adapters, one of them in two parts, and rows that have none."""
        ops, (n, k), rows = self.ops, self.size, max(self.rows)
        table = ops.adapter_table([ops.pack_linear(normal(9, n, k))], 3)
        adapters = {0: [_low_rank(10, 1, 0, n, k)], 2: [_low_rank(12, 16, 3, 30, k), _low_rank(14, 13, 40, n - 40, k)]}
        for slot, parts in adapters.items():
            table.put(slot, table.pack({0: parts}))
        x_TK, slots = normal(16, rows, k), np.array([(0, 2, 1, 2)[row % 4] for row in range(rows)], np.int32)
        wanted = normal(17, rows, n).astype(np.float64)
        for row, slot in enumerate(slots):
            for part in adapters.get(int(slot), ()):
                narrow_R = self._rounded(self._rounded(part.down_RK) @ self._rounded(x_TK[row]))
                own = slice(part.first, part.first + len(part.up_NR))
                wanted[row, own] += part.scale * (self._rounded(part.up_NR) @ narrow_R)

        def added(first: int) -> Any:
            out_TN, count = ops.hidden(normal(17, rows, n)[first:]), rows - first
            zeros, starts = np.zeros(count, np.int32), np.arange(count + 1, dtype=np.int32)
            table_SP = np.zeros((count, 1), np.int32)
            batch = StepBatch(zeros, zeros, starts, table_SP, starts[:-1], adapters_S=slots[first:])
            ops.lora_add(ops.compute(x_TK[first:]), batch, table, 0, out_TN, wanted=False)
            return out_TN

        return self._each_alone(wanted, added)

    def _compressed(self) -> str:
        """The bits of plain weights, and escapes among them."""
        ops, (n, k) = self.ops, self.size
        weight_NK = (normal(18, n, k) * 0.02).astype(ml_dtypes.bfloat16)
        weight_NK[5::11, 1::31] *= ml_dtypes.bfloat16(1e6)
        matrix = compress_for_gpu(weight_NK.view(np.uint16))
        small = None if matrix is None else ops.pack_compressed([matrix])
        if small is None:
            return "not kept so by this backend"
        x_TK, plain = normal(19, 300, k), ops.pack_linear(weight_NK)
        for rows in (*self.rows, 300):  # in registers, then in slabs
            x = ops.compute(x_TK[-rows:])
            same(ops.to_numpy(ops.linear(x, small)), ops.to_numpy(ops.linear(x, plain)), f"{rows} rows")
        return "the bits of plain weights"

    def _quantized(self) -> str:
        ops, (n, k), random = self.ops, self.size, np.random.default_rng(20)
        form = QuantFormat(4, tuple(map(float, range(16))), 128, ScaleType.F16, MinimumType.ZERO_POINT)
        rows = QuantRows(
            random.integers(0, 16, (n, k), np.uint8),
            (random.uniform(0.5, 1.5, (n, -(-k // 128))) * 0.01).astype(np.float16),
            random.integers(0, 16, (n, -(-k // 128)), np.uint8),
        )
        matrix = QuantizedMatrix(n, k, form, lambda first, stop: rows.map_arrays(lambda array: array[first:stop]))
        packed: PackedLinear | None = ops.pack_quantized([matrix])
        if packed is None:
            return "not kept so by this backend"
        x_TK, weight = normal(21, max(self.rows), k), packed
        wanted = self._rounded(x_TK) @ matrix.dequantized().astype(np.float64).T
        return self._each_alone(wanted, lambda first: ops.linear(ops.compute(x_TK[first:]), weight))

    # --- along sequences ----------------------------------------------------------------------------------------------

    def _masks(self) -> str:
        heads, kv_heads, dim = self.heads
        shape = KvShape.plain(layers=1, kv_heads=kv_heads, head_dim=dim)
        masks = {"window": max(self.lengths) // 3, "softcap": 20.0, "sinks_H": normal(22, heads)}
        story, chunk = Story(self.ops, shape, heads, self.lengths, masks), 48 if max(self.lengths) > 100 else 7
        whole = story.computed(max(self.lengths))
        worst = max(close(got, wanted) for got, wanted in zip(whole, story.wanted(self._rounded), strict=True))
        for cut in (story.computed(chunk), story.alone()):
            for got, other in zip(cut, whole, strict=True):
                same(got, other, f"chunks of {chunk}, or the last token alone")
        return f"{len(self.lengths)} lengths, worst {worst:.1e}"

    def _latent(self) -> str:
        """One sequence, whole and in chunks, against attention with nothing absorbed."""
        ops, (heads, columns, values, plain), tokens = self.ops, self.latent, max(self.lengths)
        shape = KvShape(layers=1, kv_heads=1, key_dim=columns, value_dim=values, shared=True)
        kv, pages = ops.new_kv(shape, pages=-(-tokens // 16)), np.arange(-(-tokens // 16), dtype=np.int32)[None, ::-1]
        frequencies = 10_000.0 ** -(np.arange(0, columns - values, 2) / (columns - values))
        rope = ops.rope_table(frequencies, tokens, interleaved=True)
        absorb_NK, weight_V = normal(23, heads * values, plain) / np.float32(plain**0.5), normal(24, values)
        absorb, weight = ops.pack_linear(absorb_NK), ops.vector(weight_V)
        query_TN, latent_TC = normal(25, tokens, heads * (plain + columns - values)), normal(26, tokens, columns)

        def computed(first: int, end: int) -> Rows:
            positions, starts = np.arange(first, end, dtype=np.int32), np.array([0, end - first], np.int32)
            batch = StepBatch(np.zeros_like(positions), positions, starts, pages.copy(), np.empty(0, np.int32))
            ops.latent_write(ops.hidden(latent_TC[first:end]), rope, kv, 0, batch, norm=weight, eps=EPS)
            q_THC = ops.latent_query(ops.hidden(query_TN[first:end]), absorb, rope, kv, batch, heads=heads)
            return ops.to_numpy(ops.paged_attention(q_THC, kv, 0, batch, AttentionSpec(columns**-0.5)))

        whole = computed(0, tokens)
        angles = np.exp(1j * np.outer(np.arange(tokens), frequencies))[:, None]
        latent, query = latent_TC.astype(np.float64)[:, None], query_TN.astype(np.float64).reshape(tokens, heads, -1)
        keys = [_normed(latent[..., :values], weight_V), _turned(latent[..., values:], angles)]
        k_SC = self._rounded(np.concatenate(keys, axis=-1)[:, 0])
        absorbed = self._rounded(query[..., :plain])
        absorbed = np.einsum("thk,hvk->thv", absorbed, self._rounded(absorb_NK).reshape(heads, values, plain))
        q = self._rounded(np.concatenate([absorbed, _turned(query[..., plain:], angles)], axis=-1))
        scores = np.where(np.tri(tokens, dtype=bool), np.einsum("thc,sc->hts", q, k_SC) * columns**-0.5, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        mixed = np.einsum("hts,sv->thv", weights / weights.sum(-1, keepdims=True), k_SC[:, :values])
        worst = close(whole, mixed.reshape(tokens, -1))
        cuts = (*range(0, tokens, 48 if tokens > 100 else 7), tokens - 1, tokens)
        pieces = [computed(first, end) for first, end in pairwise(sorted(set(cuts)))]
        same(np.concatenate(pieces), whole, "in chunks")
        return f"{tokens} tokens, worst {worst:.1e}"

    def _states(self) -> str:
        """One sequence over the ends of cells, whole and in pieces."""
        ops, own, tokens = self.ops, self.states, 70
        shape = KvShape(layers=1, kv_heads=1, key_dim=16, value_dim=16, states=own)
        cells = -(-tokens // own.cell)
        pages = np.arange(cells * shape.state_parts, dtype=np.int32)[::-1].reshape(cells, shape.state_parts)
        kv, first_gate = ops.new_kv(shape, pages=pages.size), own.channels
        x_TN, taps_KC = normal(27, tokens, own.channels + 2 * own.heads), normal(28, own.taps, own.channels)
        rates_H, shifts_H = np.exp(0.3 * normal(29, own.heads)), normal(30, own.heads)
        taps = ops.vector(taps_KC)
        gates = {"rates_H": ops.vector(rates_H), "shifts_H": ops.vector(shifts_H)}

        def computed(first: int, end: int) -> Rows:
            positions, starts = np.arange(first, end, dtype=np.int32), np.array([0, end - first], np.int32)
            states_SW = pages[own.first_cell(first) : (end - 1) // own.cell + 1].reshape(1, -1).copy()
            table_SP = np.zeros((1, 8), np.int32)
            batch = StepBatch(positions, positions, starts, table_SP, starts[1:] - 1, states_SW=states_SW)
            x, at = ops.hidden(x_TN[first:end]), {"beta": first_gate, "decay": first_gate + own.heads}
            qkv = ops.causal_conv(x, taps, kv, 1, batch)
            return np.asarray(ops.to_numpy(ops.delta_rule(qkv, x, kv, 1, batch, **gates, **at)))

        whole = computed(0, tokens)
        worst = close(whole, _delta_rule(own, x_TN.astype(np.float64), taps_KC, rates_H, shifts_H))
        for cuts in ((0, 31, 32, 33, 64, tokens), (0, 1, tokens)):
            same(np.concatenate([computed(*piece) for piece in pairwise(cuts)]), whole, f"{len(cuts) - 1} pieces")
        return f"{tokens} tokens, worst {worst:.1e}"

    def _each_alone(self, wanted: Double, rows_from: Callable[[int], Any]) -> str:
        """Of all rows, and of the last few by themselves."""
        whole = np.array(self.ops.to_numpy(rows_from(0)))
        worst = close(whole, wanted)
        for rows in self.rows:
            same(np.array(self.ops.to_numpy(rows_from(len(whole) - rows))), whole[-rows:], f"{rows} rows")
        return f"worst {worst:.1e}"

    def _rounded(self, values: NDArray[Any]) -> Double:
        return self.ops.to_numpy(self.ops.compute(np.asarray(values, np.float32))).astype(np.float64)


def _low_rank(seed: int, rank: int, first: int, n: int, k: int) -> LowRank:
    down_RK, up_NR = normal(seed, rank, k) / np.float32(k**0.5), normal(seed + 1, n, rank) / np.float32(rank**0.5)
    return LowRank(down_RK, up_NR, first, 0.5)


def _normed(x: Double, weight: Rows) -> Double:
    return np.asarray(x / np.sqrt((x**2).mean(-1, keepdims=True) + EPS) * weight)


def _turned(x: Double, angles: NDArray[Any]) -> Double:
    numbers = (x[..., 0::2] + 1j * x[..., 1::2]) * angles
    return np.stack([numbers.real, numbers.imag], -1).reshape(x.shape)


def _delta_rule(own: StateShape, x_TN: Double, taps_KC: Rows, rates_H: Rows, shifts_H: Rows) -> Double:
    """A token after another, as ``StateOps`` says it."""
    padded = np.concatenate([np.zeros((own.taps - 1, own.channels)), x_TN[:, : own.channels]])
    sums = sum(padded[tap : tap + len(x_TN)] * taps_KC[tap] for tap in range(own.taps))
    qkv = sums / (1 + np.exp(-sums))
    keys, shared = own.key_heads * own.key_dim, own.heads // own.key_heads
    out = np.zeros((len(x_TN), own.heads, own.value_dim))
    for head in range(own.heads):
        at, state = head // shared * own.key_dim, np.zeros((own.key_dim, own.value_dim))
        for t, row in enumerate(qkv):
            q, k = row[at : at + own.key_dim], row[keys + at : keys + at + own.key_dim]
            q, k = (part / np.sqrt((part**2).sum() + 1e-6) for part in (q, k))
            v = row[2 * keys + head * own.value_dim :][: own.value_dim]
            change, decay = x_TN[t, own.channels + head], x_TN[t, own.channels + own.heads + head] + shifts_H[head]
            state *= np.exp(-rates_H[head] * np.log1p(np.exp(decay)))
            state += np.outer(k, (v - state.T @ k) / (1 + np.exp(-change)))
            out[t, head] = state.T @ q / np.sqrt(own.key_dim)
    return out.reshape(len(x_TN), -1)
