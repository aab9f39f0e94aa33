"""The C++ kernels behind the ``Ops`` signatures, on NumPy arrays: one backend put together from its parts.

The operations are in ``native_model``, ``native_rows``, ``native_products``, ``native_attention``, ``native_states``
and ``native_head``; here is the list, so that a backend is one object whose operations are found by one look.

Arrays of the compute type bf16 are held as uint16.  Imports no torch and starts no thread before the first operation
that is worth more than one: a zygote may pack weights with this and fork afterwards.

Results that are alive are never overwritten (see ``memory.StepBuffers``).  Operations run one at a time in a process.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.compressed import BLOCK_COLUMNS, PANEL_ROWS
from penstock.kernels.compressed_gpu import AnyCompressed
from penstock.kernels.lora import AdapterTable, row_slots
from penstock.kernels.native.arguments import (
    ACTIVATIONS,
    NativeForm,
    NativeKv,
    angle_table,
    attention_rule,
    draw_row,
    fill_weights,
    gate_words,
    packed_experts,
    routing_words,
    sampled,
)
from penstock.kernels.native.compression import for_cpu
from penstock.kernels.native.lora import NativeAdapters
from penstock.kernels.native.memory import StepBuffers, WeightArena
from penstock.kernels.native.program import recorded
from penstock.kernels.native.weights import Backend, CompressedPlaces, NativeLoading, pack
from penstock.kernels.operands import (
    SILU,
    Activation,
    Array,
    Gate,
    KvShape,
    PackedExperts,
    PackedLinear,
    Routes,
    Routing,
    Sparse,
    StepBatch,
)
from penstock.kernels.ops import StepProgram, Steps
from penstock.kernels.program import DirectProgram, RecordingError
from penstock.kernels.quantization import QuantizedMatrix
from penstock.kernels.sampling import Sampled, SampleRow

# MERGED: The C++ kernels on logits.  One of the parts that ``native`` puts together.


class NativeHead:
    """See ``ops_head.HeadOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._kernels = _native.Kernels(form.family, form.compute_dtype)

    def sample(self, logits_RV: Array, rows: list[SampleRow]) -> list[Sampled]:
        """See ``Ops.sample``.  Temperatures below 1e-5 count as 0."""
        return sampled(rows, self._kernels.sample(logits_RV, [draw_row(row) for row in rows]))

    def token_logprobs(self, logits_RV: Array, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        """See ``Ops.token_logprobs``."""
        answers = self._kernels.score_tokens(logits_RV, tokens_R, top)
        return [Sampled(token, logprob, tuple(likeliest)) for token, logprob, likeliest in answers]

    def gumbel(self, seed: int, position: int, choice: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The noise that ``sample`` adds for each of these token ids (tests and tools)."""
        out = np.empty(ids.shape, np.float32)
        self._kernels.gumbel(seed, position, choice, ids, out)
        return out


# MERGED: The C++ kernels of recurrent layers.  One of the parts that ``native`` puts together.


class NativeStates:
    """See ``ops_states.StateOps``."""

    def __init__(self, form: NativeForm, checked: Callable[[StepBatch], _native.Batch]) -> None:
        """``checked``: a step's tokens as the kernels hold them."""
        self._form = form
        self._checked = checked
        self._states = _native.StateKernels(form.family, form.compute_dtype)

    def causal_conv(self, x_TN: Array, weight_KC: Array, kv: NativeKv, layer: int, batch: StepBatch) -> Array:
        """See ``Ops.causal_conv``."""
        out_TC = self._form.buffers.empty((len(x_TN), weight_KC.shape[1]), np.float32)
        self._states.causal_conv(x_TN, weight_KC, kv.handle, layer, self._checked(batch), out_TC)
        return out_TC

    def delta_rule(
        self,
        qkv_TC: Array,
        gates_TN: Array,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        rates_H: Array,
        shifts_H: Array,
        beta: int,
        decay: int,
    ) -> Array:
        """See ``Ops.delta_rule``."""
        own = kv.shape.kept_states
        out = self._form.buffers.empty((len(qkv_TC), own.heads * own.value_dim), np.float32)
        step = kv.handle, layer, self._checked(batch)
        self._states.delta_rule(qkv_TC, gates_TN, (beta, decay), rates_H, shifts_H, *step, out)
        return out


# MERGED: The C++ kernels over KV memory, and attention without one.  One of the parts that ``native`` puts
# MERGED: together.


class NativeAttention:
    """See ``ops_attention.AttentionOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._attention = _native.AttentionKernels(form.family, form.compute_dtype)
        self._batch: tuple[StepBatch, _native.Batch] | None = None

    def rope_and_write(
        self,
        qkv_TN: Array,
        rope: _native.Rope | None,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Array | None = None,
    ) -> Array:
        """See ``Ops.rope_and_write``."""
        if kv_heads != kv.shape.kv_heads:
            raise KernelError(f"the KV memory has {kv.shape.kv_heads} heads, not {kv_heads}")
        q_THC = self._form.buffers.empty((qkv_TN.shape[0], heads, kv.shape.key_dim), self._form.dtype)
        self._attention.rope_and_write(qkv_TN, rope, q_scale, kv.handle, layer, self.checked(batch), heads, q_THC)
        return q_THC

    def latent_write(
        self,
        latent_TC: Array,
        rope: _native.Rope,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        norm: Array,
        eps: float,
    ) -> None:
        """See ``Ops.latent_write``."""
        self._attention.latent_write(latent_TC, norm, eps, rope, kv.handle, layer, self.checked(batch))

    def latent_query(
        self, q_TN: Array, absorb: PackedLinear, rope: _native.Rope, kv: NativeKv, batch: StepBatch, *, heads: int
    ) -> Array:
        """See ``Ops.latent_query``."""
        q_THC = self._form.buffers.empty((q_TN.shape[0], heads, kv.shape.key_dim), self._form.dtype)
        self._attention.latent_query(q_TN, absorb.data, rope, kv.handle, self.checked(batch), heads, q_THC)
        return q_THC

    def paged_attention(
        self,
        q_THC: Array,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks_H: Array | None = None,
        until: int | None = None,
        sparse: Sparse | None = None,
    ) -> Array:
        """See ``Ops.paged_attention``."""
        heads = math.prod(q_THC.shape[1:]) // kv.shape.key_dim
        out = self._form.buffers.empty((len(q_THC), heads * kv.shape.value_dim), self._form.dtype)
        rule = attention_rule(scale, window, chunk, softcap, sinks_H, until=until, sparse=sparse)
        self._attention.attention(q_THC, kv.handle, layer, self.checked(batch), heads, rule, out)
        return out

    def attention(
        self,
        qkv_TN: Array,
        starts_S1: NDArray[np.int32],
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        rope: _native.Rope | None = None,
        rows_T: NDArray[np.int32] | None = None,
        bias_HR: Array | None = None,
    ) -> Array:
        """See ``Ops.attention``."""
        tokens, width = qkv_TN.shape
        out = self._form.buffers.empty((tokens, width // (heads + 2 * kv_heads) * heads), self._form.dtype)
        rule = attention_rule(scale, window, None, softcap, None)
        self._attention.attention_once(qkv_TN, starts_S1, rope, rows_T, (heads, kv_heads), causal, rule, bias_HR, out)
        return out

    def checked(self, batch: StepBatch) -> _native.Batch:
        """The step's tokens as the kernels hold them, made once a step."""
        if self._batch is None or self._batch[0] is not batch:
            table_SP = np.ascontiguousarray(batch.table_SP, np.int32)
            own = _native.Batch(batch.positions_T, batch.starts_S1, table_SP, batch.turns_T3)
            if batch.states_SW is not None:
                own.recur(batch.states_SW)
            self._batch = (batch, own)
        return self._batch[1]


# MERGED: The C++ kernels over packed matrices, whatever form these have.  One of the parts that ``native``
# MERGED: puts together.


class NativeProducts:
    """See ``ops_products.ProductOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._kernels = _native.Kernels(form.family, form.compute_dtype)
        self._attention = _native.AttentionKernels(form.family, form.compute_dtype)
        self._compressed = _native.CompressedKernels(form.family)
        self._experts = _native.ExpertKernels(form.family, form.compute_dtype)
        self._quantised = _native.QuantKernels(form.family, form.compute_dtype)
        self._rows = _native.RowKernels(form.family, form.compute_dtype)
        self._adapters = _native.AdapterKernels(form.family, form.compute_dtype)

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Array:
        """See ``Ops.embed``."""
        hidden_TD = self._form.buffers.empty((len(tokens_T), table.k), np.float32)
        self._kernels_of(table).embed(table.data, tokens_T, hidden_TD)
        if scale != 1.0:
            self._rows.form(hidden_TD, scale, 0.0)
        return hidden_TD

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Array) -> None:
        """See ``Ops.embed_add``."""
        self._rows.add(self.embed(table, positions_T), hidden_TD)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        """See ``Ops.linear``."""
        out_TN = self._form.buffers.empty((x_TK.shape[0], weight.n), np.float32)
        self._kernels_of(weight).linear(x_TK, weight.data, out_TN, False)
        return out_TN

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        """See ``Ops.linear_add``."""
        self._kernels_of(weight).linear(x_TK, weight.data, hidden_TN, True)

    def lora_add(
        self, x_TK: Array, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Array, *, wanted: bool
    ) -> None:
        """See ``Ops.lora_add``."""
        self._adapters.add(x_TK, row_slots(batch, wanted=wanted), adapters.data, site, out_TN)

    def heads_linear(self, x_THK: Array, weight: PackedLinear, *, heads: int) -> Array:
        """See ``Ops.heads_linear``."""
        out = self._form.buffers.empty((x_THK.shape[0], weight.n), self._form.dtype)
        self._attention.heads_linear(x_THK, weight.data, heads, out)
        return out

    def route(self, logits_TE: Array, routing: Routing, bias_E: Array | None = None) -> Routes:
        """See ``Ops.route``: ids, then weights, 32 bits each."""
        routes = np.empty((len(logits_TE), 2 * routing.top_k), np.uint32)
        self._experts.route(logits_TE, routing_words(routing), bias_E, routes)
        return Routes(routes, routing.top_k)

    def experts_add(self, x_TK: Array, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Array) -> None:
        """See ``Ops.experts_add``."""
        self._experts.add(x_TK, routes.data, experts.data, gate_words(kind), hidden_TD)

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See ``Ops.routes_to_numpy``."""
        ids, weights = np.split(routes.data, 2, axis=1)
        return ids.astype(np.int32), np.ascontiguousarray(weights).view(np.float32)

    def _kernels_of(self, weight: PackedLinear) -> Any:
        """Those that read weights of this form."""
        forms = {_native.CompressedWeights: self._compressed, _native.QuantWeights: self._quantised}
        return forms.get(type(weight.data), self._kernels)


# MERGED: The C++ kernels that work row by row.  One of the parts that ``native`` puts together.


class NativeRows:
    """See ``ops_rows.RowOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._kernels = _native.Kernels(form.family, form.compute_dtype)
        self._attention = _native.AttentionKernels(form.family, form.compute_dtype)
        self._rows = _native.RowKernels(form.family, form.compute_dtype)
        self._states = _native.StateKernels(form.family, form.compute_dtype)

    def features(self, batch: StepBatch, width: int) -> Array:
        """See ``Ops.features``.  Raises ValueError where the batch brings none of that width."""
        return np.array(batch.features(width), np.float32)

    def tap(self, hidden_TD: Array, batch: StepBatch, place: int) -> None:
        """See ``Ops.tap``.  Raises ValueError where there is not enough room."""
        if batch.taps_RW is not None:
            batch.hand_out(hidden_TD[batch.sample_rows_R], place)

    def place_rows(self, hidden_TD: Array, batch: StepBatch) -> None:
        """See ``Ops.place_rows``."""
        if batch.given is not None:
            hidden_TD[batch.given.rows_G] = batch.given.values_GD

    def joined_rows(self, x_TK: Array, count: int) -> Array:
        """See ``Ops.joined_rows``."""
        return x_TK.reshape(-1, count * x_TK.shape[1])

    def rows(self, x_TD: Array, rows_R: NDArray[np.int32]) -> Array:
        """See ``Ops.rows``."""
        return x_TD[rows_R]

    def rms_norm(self, hidden_TD: Array, weight_D: Array, eps: float) -> Array:
        """See ``Ops.rms_norm``."""
        out_TD = self._form.buffers.empty(hidden_TD.shape, self._form.dtype)
        self._kernels.rms_norm(hidden_TD, weight_D, eps, out_TD)
        return out_TD

    def norm_add(self, hidden_TD: Array, x_TD: Array, weight_D: Array, eps: float) -> None:
        """See ``Ops.norm_add``."""
        self._rows.norm_add(x_TD, weight_D, eps, hidden_TD)

    def layer_norm(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> Array:
        """See ``Ops.layer_norm``."""
        out_TD = self._form.buffers.empty(hidden_TD.shape, self._form.dtype)
        self._rows.layer_norm(hidden_TD, weight_D, bias_D, eps, out_TD)
        return out_TD

    def layer_norm_in_place(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> None:
        """See ``Ops.layer_norm_in_place``."""
        self._rows.layer_norm_in_place(hidden_TD, weight_D, bias_D, eps)

    def norm_heads(self, x_TN: Array, weight_C: Array, eps: float, *, first: int, count: int) -> None:
        """See ``Ops.norm_heads``."""
        self._attention.norm_heads(x_TN, weight_C, eps, first, count)

    def gated(self, gate_up_T2I: Array, kind: Gate = SILU) -> Array:
        """See ``Ops.gated``."""
        tokens, width = gate_up_T2I.shape
        out_TI = self._form.buffers.empty((tokens, width // 2), self._form.dtype)
        self._rows.gated(gate_up_T2I, gate_words(kind), out_TI)
        return out_TI

    def activate(self, x_TI: Array, kind: Activation, alpha: float = 1.0) -> Array:
        """See ``Ops.activate``."""
        out_TI = self._form.buffers.empty(x_TI.shape, self._form.dtype)
        self._rows.activate(x_TI, ACTIVATIONS[kind], alpha, out_TI)
        return out_TI

    def add(self, hidden_TD: Array, x_TD: Array) -> None:
        """See ``Ops.add``."""
        self._rows.add(x_TD, hidden_TD)

    def add_bias(self, x_TN: Array, bias_N: Array) -> None:
        """See ``Ops.add_bias``."""
        self._rows.add_bias(x_TN, bias_N)

    def scale(self, x_TN: Array, factor: float) -> None:
        """See ``Ops.scale``."""
        self._rows.form(x_TN, factor, 0.0)

    def softcap(self, x_TN: Array, cap: float) -> None:
        """See ``Ops.softcap``."""
        self._rows.form(x_TN, 1.0, cap)

    def gated_norm(self, x_TN: Array, gate_TM: Array, weight_C: Array, eps: float, *, first: int) -> Array:
        """See ``Ops.gated_norm``."""
        out_TN = self._form.buffers.empty(x_TN.shape, self._form.dtype)
        self._states.gated_norm(x_TN, gate_TM, first, weight_C, eps, out_TN)
        return out_TN

    def sigmoid_gated(self, x_TN: Array, gate_TN: Array) -> Array:
        """See ``Ops.sigmoid_gated``."""
        out_TN = self._form.buffers.empty(gate_TN.shape, self._form.dtype)
        self._states.sigmoid_gated(x_TN, gate_TN, out_TN)
        return out_TN

    def gated_add(self, hidden_TD: Array, x_TD: Array, gate_T1: Array) -> None:
        """See ``Ops.gated_add``."""
        self._states.gated_add(x_TD, gate_T1, hidden_TD)


# MERGED: The C++ kernels' weights, KV memory and tables: what is made once a model, and looking inside
# MERGED: arrays.
# MERGED:
# MERGED: One of the parts that ``native`` puts together.  Starts no thread: a zygote may pack weights with
# MERGED: this and fork
# MERGED: afterwards.

_SOURCES = {np.dtype(bfloat16): "bf16", np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}


class NativeModel:
    """See ``ops_model.ModelOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._arena = WeightArena()
        self._kernels = _native.Kernels(form.family, form.compute_dtype)
        self._compressed = _native.CompressedKernels(form.family)

    def pack_linear(self, weight_NK: Array, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """See ``Ops.pack_linear``.  Raises KernelError for another element type."""
        source = _SOURCES.get(weight_NK.dtype)
        if source is None:
            raise KernelError(f"weights of type {weight_NK.dtype} are not bfloat16, float16 or float32")
        n, k = weight_NK.shape
        ends = list(segments or (k,))
        cells = self._arena.cells(_native.Weights.cells_needed(n, k, ends, self._form.per_cell))
        weights = _native.Weights(cells, n, k, ends, self._form.per_cell)
        fill_weights(weights, weight_NK, source)
        return PackedLinear(n=n, k=k, segments=tuple(ends), data=weights, nbytes=cells.nbytes)

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """See ``Ops.pack_compressed``: where the family decodes in registers, else plain weights are faster."""
        ends = segments or (parts[0].k,)
        if not self._keeps_compressed(parts, ends):
            return None
        own = [matrix for part in parts if (matrix := for_cpu(part)) is not None]
        if len(own) < len(parts):
            return None
        weight = CompressedPlaces(self._arena, own, ends)
        for part, place in zip(own, weight.places, strict=True):
            place.counts[:], place.blocks[:], place.escapes[:] = part.counts, part.blocks, part.escapes
        return weight.finish()

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        *,
        gate_up_biases: Sequence[Array] | None = None,
        down_biases: Sequence[Array] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """See ``Ops.pack_experts``."""
        return packed_experts((gate_up, down), (gate_up_biases, down_biases), self._form.per_cell, weighs_input)

    def pack_quantised(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """See ``Ops.pack_quantised``."""
        return pack(self._arena, parts, segments or (parts[0].k,), threads)

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> NativeAdapters:
        """See ``Ops.adapter_table``."""
        return NativeAdapters(sites, slots, self._form.per_cell)

    def loading(self, nbytes: int) -> NativeLoading:
        """See ``Ops.loading``."""
        self._arena.reserve(nbytes)
        return NativeLoading(Backend(self._arena, self._form.per_cell, self._keeps_compressed, self.vector))

    def vector(self, weight_D: Array) -> Array:
        """See ``Ops.vector``."""
        return np.ascontiguousarray(weight_D, dtype=np.float32)

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> NativeKv:
        """See ``Ops.new_kv``.  Raises KernelError when the memory is too small."""
        nbytes = pages * self.page_bytes(shape)
        if memory is None:
            cells = np.zeros(nbytes // 4, np.uint32)
        else:
            if memory.nbytes < nbytes:
                raise KernelError(f"{pages} pages need {nbytes} bytes of KV memory, given are {memory.nbytes}")
            cells = np.frombuffer(memory, np.uint32, count=nbytes // 4)
        sizes = (shape.page_layers, shape.kv_heads, shape.key_dim, shape.value_dim)
        handle = _native.KvMemory(cells, pages, *sizes, shape.shared, self._form.per_cell, list(shape.places))
        if shape.states is not None:
            own = shape.states
            heads = own.layers, own.key_heads, own.heads, own.key_dim, own.value_dim
            handle.keep_states((*heads, own.taps, own.cell, shape.state_rows_a_page))
        return NativeKv(memory=cells, handle=handle, shape=shape)

    def page_bytes(self, shape: KvShape) -> int:
        """See ``Ops.page_bytes``."""
        return shape.page_bytes(self._form.compute_dtype)

    def rope_table(
        self,
        inv_freq_C2: NDArray[np.float64],
        max_positions: int,
        attention_factor: float = 1.0,
        *,
        interleaved: bool = False,
        axes_C2: Sequence[int] | None = None,
    ) -> _native.Rope:
        """See ``Ops.rope_table``."""
        angles = np.outer(np.arange(max_positions, dtype=np.float64), np.asarray(inv_freq_C2, np.float64))
        return angle_table(angles, attention_factor, interleaved=interleaved, axes_C2=axes_C2)

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> _native.Rope:
        """See ``Ops.angle_table``."""
        return angle_table(angles_PC2, attention_factor, interleaved=interleaved)

    def compute(self, values: NDArray[Any]) -> Array:
        """See ``Ops.compute``."""
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        out = np.empty(flat.shape, self._form.dtype)
        self._kernels.to_compute(flat, out)
        return out.reshape(values.shape)

    def hidden(self, values: NDArray[Any]) -> Array:
        """See ``Ops.hidden``."""
        return np.array(values, np.float32)

    def to_numpy(self, array: Array) -> NDArray[np.float32]:
        """See ``Ops.to_numpy``."""
        wide = array.view(bfloat16) if array.dtype == np.uint16 else array
        return np.asarray(wide, np.float32)

    def _keeps_compressed(self, parts: Sequence[AnyCompressed], ends: tuple[int, ...]) -> bool:
        fits = not any(part.n % PANEL_ROWS for part in parts[:-1]) and not any(end % BLOCK_COLUMNS for end in ends)
        return self._form.compute_dtype == "bf16" and self._compressed.in_registers() and fits


KV_LAYOUT = "cells16-1"
"""Per page and layer: K as [kv head][pairs of columns][16 tokens], V as [kv head][pairs of tokens][columns] (bf16);
fp32 the same with single columns and tokens.  Shared memory has K only."""


log = logging.getLogger(__name__)


def families() -> tuple[str, ...]:
    """Kernel families that this build has and this processor runs, best first."""
    return tuple(_native.families())


class NativeOps:
    """One kernel family and one compute type (see ``ops.Ops`` for what each operation does)."""

    def __init__(self, family: str, compute_dtype: str, *, threads: int = 1) -> None:
        """``threads`` counts the calling one.  Raises KernelError for a family or type that cannot run here."""
        if family not in families():
            raise KernelError(f"kernel family {family!r} cannot run here; available: {', '.join(families())}")
        if compute_dtype not in ("bf16", "fp32"):
            raise KernelError(f"compute type {compute_dtype!r} is not one of bf16, fp32")
        self.family = family
        self.compute_dtype = compute_dtype
        self.numerics = f"cpp-{family}-{_native.VERSION}-{compute_dtype}"
        self.kv_dtype = compute_dtype
        self.kv_layout = f"{KV_LAYOUT}-{compute_dtype}"
        self._kernels = _native.Kernels(family, compute_dtype)
        _native.set_threads(threads)
        form = NativeForm.of(family, compute_dtype, StepBuffers())
        model = NativeModel(form)
        self.pack_linear, self.pack_compressed = model.pack_linear, model.pack_compressed
        self.pack_experts, self.pack_quantised = model.pack_experts, model.pack_quantised
        self.adapter_table, self.loading = model.adapter_table, model.loading
        self.vector, self.new_kv = model.vector, model.new_kv
        self.page_bytes, self.rope_table = model.page_bytes, model.rope_table
        self.angle_table, self.compute = model.angle_table, model.compute
        self.hidden, self.to_numpy = model.hidden, model.to_numpy
        rows = NativeRows(form)
        self.features, self.tap = rows.features, rows.tap
        self.place_rows, self.joined_rows = rows.place_rows, rows.joined_rows
        self.rows, self.rms_norm = rows.rows, rows.rms_norm
        self.norm_add, self.layer_norm = rows.norm_add, rows.layer_norm
        self.layer_norm_in_place, self.norm_heads = rows.layer_norm_in_place, rows.norm_heads
        self.gated, self.activate = rows.gated, rows.activate
        self.add, self.add_bias = rows.add, rows.add_bias
        self.scale, self.softcap = rows.scale, rows.softcap
        self.gated_norm, self.sigmoid_gated, self.gated_add = rows.gated_norm, rows.sigmoid_gated, rows.gated_add
        products = NativeProducts(form)
        self.embed, self.embed_add = products.embed, products.embed_add
        self.linear, self.linear_add = products.linear, products.linear_add
        self.lora_add, self.heads_linear = products.lora_add, products.heads_linear
        self.route, self.experts_add = products.route, products.experts_add
        self.routes_to_numpy = products.routes_to_numpy
        attention = NativeAttention(form)
        self.rope_and_write, self.latent_write = attention.rope_and_write, attention.latent_write
        self.latent_query, self.paged_attention = attention.latent_query, attention.paged_attention
        self.attention = attention.attention
        states = NativeStates(form, attention.checked)
        self.causal_conv, self.delta_rule = states.causal_conv, states.delta_rule
        head = NativeHead(form)
        self.sample, self.token_logprobs = head.sample, head.token_logprobs
        self.gumbel = head.gumbel

    def record(self, steps: Steps, kv: NativeKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """See ``Ops.record``.  Steps that look into arrays run as they are."""
        try:
            return recorded(steps, self.family, self.compute_dtype, kv, tapped)
        except RecordingError as error:
            log.warning("steps are computed operation by operation, which is slower: %s", error)
            return DirectProgram(self, steps, kv)

    # --- measuring ----------------------------------------------------------------------------------------------------

    def read_bandwidth(self, memory: NDArray[np.uint32]) -> float:
        """Bytes a second at which all threads together just read ``memory``, once."""
        start = time.perf_counter()
        self._kernels.read_cells(memory)
        return memory.nbytes / (time.perf_counter() - start)

    def peak_flops(self, repeats: int = 1_000) -> float:
        """Floating-point operations a second of all threads together, multiplying out of the first-level cache."""
        start = time.perf_counter()
        operations = self._kernels.multiply(repeats)
        return operations / (time.perf_counter() - start)
