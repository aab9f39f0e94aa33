"""The C++ backend: the operations of ``ops.Ops`` on NumPy arrays.

Arrays of the compute type bf16 are uint16.  Imports no torch and starts no thread before the first operation that is
worth more than one: a process may pack weights with this and fork afterwards.

Live results are never overwritten (``memory.StepBuffers``).  A process runs one operation at a time.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from ml_dtypes import bfloat16
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.compressed import AnyCompressed, ends_with_blocks, panels_of
from penstock.kernels.lora import AdapterTable, row_slots
from penstock.kernels.native.arguments import (
    ACTIVATIONS,
    NativeKv,
    angle_table,
    attention_rule,
    draw_row,
    fill_weights,
    gate_words,
    packed_experts,
    routing_words,
    sampled_tokens,
    with_zero_vectors,
)
from penstock.kernels.native.compression import cpu_layout
from penstock.kernels.native.lora import NativeAdapters
from penstock.kernels.native.memory import StepBuffers, WeightArena
from penstock.kernels.native.program import record_steps
from penstock.kernels.native.weights import CompressedBuffers, LoadingBackend, NativeWeightLoading, pack_quantized
from penstock.kernels.operands import (
    INT8,
    SILU,
    Activation,
    Array,
    AttentionSpec,
    Gate,
    HeadColumns,
    KvShape,
    PackedExperts,
    PackedLinear,
    Routes,
    Routing,
    StepBatch,
    numerics_with,
)
from penstock.kernels.ops import (
    DirectProgram,
    GathersArrays,
    Ops,
    RecordableModel,
    RecordingError,
    StepProgram,
    checked_widths,
)
from penstock.kernels.quantization import QuantizedMatrix
from penstock.kernels.sampling import Sampled, SampleRow
from penstock.kernels.sum_tree import join

_SOURCES = {np.dtype(bfloat16): "bf16", np.dtype(np.float16): "fp16", np.dtype(np.float32): "fp32"}


KV_LAYOUT = "cells16-1"
"""Per page and layer: K as [kv head][pairs of columns][16 tokens], V as [kv head][pairs of tokens][columns] (bf16);
fp32 the same with single columns and tokens.  Shared memory has K only."""


log = logging.getLogger(__name__)


def families() -> tuple[str, ...]:
    """Kernel families that this build has and this processor runs, best first."""
    return tuple(_native.families())


class NativeOps(Ops):
    """One kernel family and one compute type."""

    def __init__(
        self, family: str, compute_dtype: str, *, threads: int = 1, activation_dtype: str | None = None
    ) -> None:
        """``threads`` counts the calling one.  ``activation_dtype``: as in ``select.make_ops``.

        Raises KernelError for a family or type that cannot run here.
        """
        if family not in families():
            raise KernelError(f"kernel family {family!r} cannot run here; available: {', '.join(families())}")
        if compute_dtype not in ("bf16", "fp32"):
            raise KernelError(f"compute type {compute_dtype!r} is not one of bf16, fp32")
        self.family = family
        self.compute_dtype = compute_dtype
        self.numerics = numerics_with(f"cpp-{family}-{_native.VERSION}-{compute_dtype}", None, activation_dtype)
        self.activation_dtype = activation_dtype or compute_dtype
        self.kv_dtype = compute_dtype
        self.kv_layout = f"{KV_LAYOUT}-{compute_dtype}"
        narrow = compute_dtype == "bf16"
        self._dtype: np.dtype[Any] = np.dtype(np.uint16 if narrow else np.float32)  # of arrays of the compute type
        self._per_cell = 2 if narrow else 1  # numbers of the compute type in 32 bits
        self._buffers = StepBuffers()
        self._arena = WeightArena()
        self._batch: tuple[StepBatch, _native.Batch] | None = None
        self._kernels = _native.Kernels(family, compute_dtype)
        self._rows = _native.RowKernels(family, compute_dtype)
        self._attention = _native.AttentionKernels(family, compute_dtype)
        self._compressed = _native.CompressedKernels(family)
        self._quantized = _native.QuantKernels(family, compute_dtype)
        self._experts = _native.ExpertKernels(family, compute_dtype)
        self._adapters = _native.AdapterKernels(family, compute_dtype)
        self._states = _native.StateKernels(family, compute_dtype)
        _native.set_threads(threads)

    def record(self, steps: RecordableModel, kv: NativeKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """Steps that look into arrays run as they are."""
        try:
            return record_steps(steps, self.family, self.compute_dtype, kv, tapped)
        except RecordingError as error:
            log.warning("steps are computed operation by operation, which is slower: %s", error)
            return DirectProgram(self, steps, kv)

    # --- weights, KV memory, tables; looking inside arrays ------------------------------------------------------------

    def pack_linear(self, weight_NK: Array, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """Raises KernelError for another element type."""
        source = _SOURCES.get(weight_NK.dtype)
        if source is None:
            raise KernelError(f"weights of type {weight_NK.dtype} are not bfloat16, float16 or float32")
        n, k = weight_NK.shape
        ends = list(segments or (k,))
        cells = self._arena.cells(_native.Weights.cells_needed(n, k, ends, self._per_cell))
        weights = _native.Weights(cells, n, k, ends, self._per_cell)
        fill_weights(weights, weight_NK, source)
        return PackedLinear(n=n, k=k, segments=tuple(ends), data=weights, nbytes=cells.nbytes)

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """Where the family decodes in registers, else plain weights are faster."""
        ends = segments or (parts[0].k,)
        if not self._keeps_compressed(parts, ends):
            return None
        own = [matrix for part in parts if (matrix := cpu_layout(part)) is not None]
        if len(own) < len(parts):
            return None
        weight = CompressedBuffers(self._arena, own, ends)
        for part, place in zip(own, weight.places, strict=True):
            place.counts[:], place.blocks[:], place.escapes[:] = part.counts, part.blocks, part.escapes
        return weight.finish()

    def packed_rows(self, weight: PackedLinear, rows: range) -> PackedLinear | None:
        """Plain and compressed weights only; None for others."""
        if not isinstance(weight.data, _native.Weights | _native.CompressedWeights):
            return None
        part, panels = weight.data.rows(rows.start, rows.stop), panels_of(len(rows))
        return replace(weight, n=len(rows), data=part, nbytes=weight.nbytes * panels // panels_of(weight.n))

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear | None],
        down: Sequence[PackedLinear | None],
        *,
        gate_up_biases: Sequence[Array | None] | None = None,
        down_biases: Sequence[Array | None] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        biases = with_zero_vectors(gate_up_biases), with_zero_vectors(down_biases)
        return packed_experts((gate_up, down), biases, self._per_cell, weighs_input)

    def pack_quantized(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        ends = segments or (parts[0].k,)
        return pack_quantized(self._arena, parts, ends, threads, int8_inputs=self.activation_dtype == INT8)

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> NativeAdapters:
        return NativeAdapters(sites, slots, self._per_cell)

    def loading(self, nbytes: int) -> NativeWeightLoading:
        self._arena.reserve(nbytes)
        own = LoadingBackend(self._arena, self.family, self._per_cell, self._keeps_compressed, self.vector)
        return NativeWeightLoading(own)

    def vector(self, weight_D: Array) -> Array:
        return np.ascontiguousarray(weight_D, dtype=np.float32)

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> NativeKv:
        """Raises KernelError when the memory is too small."""
        nbytes = pages * self.page_bytes(shape)
        if memory is None:
            cells = np.zeros(nbytes // 4, np.uint32)
        else:
            if memory.nbytes < nbytes:
                raise KernelError(f"{pages} pages need {nbytes} bytes of KV memory, given are {memory.nbytes}")
            cells = np.frombuffer(memory, np.uint32, count=nbytes // 4)
        sizes = (shape.page_layers, shape.kv_heads, shape.key_dim, shape.value_dim)
        layers = (list(shape.places), shape.layer_groups)
        own_heads = [] if shape.share is None else list(shape.share.heads)
        form = (shape.shared, self._per_cell)
        handle = _native.KvMemory(cells, pages, *sizes, *form, *layers, shape.of_pages.kv_heads, own_heads)
        if shape.states is not None:
            own = shape.states
            heads = own.layers, own.key_heads, own.heads, own.key_dim, own.value_dim
            handle.keep_states((*heads, own.taps, own.cell, shape.state_rows_a_page))
        return NativeKv(memory=cells, handle=handle, shape=shape)

    def page_bytes(self, shape: KvShape) -> int:
        return shape.page_bytes(self.compute_dtype)

    def rope_table(
        self,
        inv_freq_C2: NDArray[np.float64],
        max_positions: int,
        attention_factor: float = 1.0,
        *,
        interleaved: bool = False,
        axes_C2: Sequence[int] | None = None,
    ) -> _native.Rope:
        angles = np.outer(np.arange(max_positions, dtype=np.float64), np.asarray(inv_freq_C2, np.float64))
        return angle_table(angles, attention_factor, interleaved=interleaved, axes_C2=axes_C2)

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> _native.Rope:
        return angle_table(angles_PC2, attention_factor, interleaved=interleaved)

    def compute(self, values: NDArray[Any]) -> Array:
        flat = np.ascontiguousarray(values, np.float32).reshape(-1)
        out = np.empty(flat.shape, self._dtype)
        self._kernels.to_compute(flat, out)
        return out.reshape(values.shape)

    def hidden(self, values: NDArray[Any]) -> Array:
        return np.array(values, np.float32)

    def to_numpy(self, array: Array) -> NDArray[np.float32]:
        wide = array.view(bfloat16) if array.dtype == np.uint16 else array
        return np.asarray(wide, np.float32)

    def _keeps_compressed(self, parts: Sequence[AnyCompressed], ends: tuple[int, ...]) -> bool:
        return self.compute_dtype == "bf16" and self._compressed.in_registers() and ends_with_blocks(parts, ends)

    # --- row by row ---------------------------------------------------------------------------------------------------

    def features(self, batch: StepBatch, width: int) -> Array:
        """Raises ValueError where the batch brings none of that width."""
        return np.array(batch.features(width), np.float32)

    def tap(self, hidden_TD: Array, batch: StepBatch, place: int) -> None:
        """Raises ValueError where there is not enough room."""
        if batch.taps_RW is not None:
            batch.store_taps(hidden_TD[batch.sample_rows_R], place)

    def place_rows(self, hidden_TD: Array, batch: StepBatch) -> None:
        if batch.given is not None:
            hidden_TD[batch.given.rows_G] = batch.given.values_GD

    def joined_rows(self, x_TK: Array, count: int) -> Array:
        return x_TK.reshape(-1, count * x_TK.shape[1])

    def rows(self, x_TD: Array, rows_R: NDArray[np.int32]) -> Array:
        return x_TD[rows_R]

    def rms_norm(self, hidden_TD: Array, weight_D: Array, eps: float) -> Array:
        out_TD = self._buffers.empty(hidden_TD.shape, self._dtype)
        self._kernels.rms_norm(hidden_TD, weight_D, eps, out_TD)
        return out_TD

    def norm_add(self, hidden_TD: Array, x_TD: Array, weight_D: Array, eps: float) -> None:
        self._rows.norm_add(x_TD, weight_D, eps, hidden_TD)

    def layer_norm(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> Array:
        out_TD = self._buffers.empty(hidden_TD.shape, self._dtype)
        self._rows.layer_norm(hidden_TD, weight_D, bias_D, eps, out_TD)
        return out_TD

    def layer_norm_in_place(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> None:
        self._rows.layer_norm_in_place(hidden_TD, weight_D, bias_D, eps)

    def norm_heads(self, x_TN: Array, weight_C: Array, eps: float, *, first: int, count: int) -> None:
        self._attention.norm_heads(x_TN, weight_C, eps, first, count)

    def gated(self, gate_up_T2I: Array, kind: Gate = SILU) -> Array:
        tokens, width = gate_up_T2I.shape
        out_TI = self._buffers.empty((tokens, width // 2), self._dtype)
        self._rows.gated(gate_up_T2I, gate_words(kind), out_TI)
        return out_TI

    def activate(self, x_TI: Array, kind: Activation, alpha: float = 1.0) -> Array:
        out_TI = self._buffers.empty(x_TI.shape, self._dtype)
        self._rows.activate(x_TI, ACTIVATIONS[kind], alpha, out_TI)
        return out_TI

    def add(self, hidden_TD: Array, x_TD: Array) -> None:
        self._rows.add(x_TD, hidden_TD)

    def add_bias(self, x_TN: Array, bias_N: Array) -> None:
        self._rows.add_bias(x_TN, bias_N)

    def scale(self, x_TN: Array, factor: float) -> None:
        self._rows.form(x_TN, factor, 0.0)

    def softcap(self, x_TN: Array, cap: float) -> None:
        self._rows.form(x_TN, 1.0, cap)

    def gated_norm(self, x_TN: Array, gate_TM: Array, weight_C: Array, eps: float, *, first: int) -> Array:
        out_TN = self._buffers.empty(x_TN.shape, self._dtype)
        self._states.gated_norm(x_TN, gate_TM, first, weight_C, eps, out_TN)
        return out_TN

    def sigmoid_gated(self, x_TN: Array, gate_TN: Array) -> Array:
        out_TN = self._buffers.empty(gate_TN.shape, self._dtype)
        self._states.sigmoid_gated(x_TN, gate_TN, out_TN)
        return out_TN

    def gated_add(self, hidden_TD: Array, x_TD: Array, gate_T1: Array) -> None:
        self._states.gated_add(x_TD, gate_T1, hidden_TD)

    # --- packed matrices ----------------------------------------------------------------------------------------------

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Array:
        hidden_TD = self._buffers.empty((len(tokens_T), table.k), np.float32)
        self._kernels_of(table).embed(table.data, tokens_T, hidden_TD)
        if scale != 1.0:
            self._rows.form(hidden_TD, scale, 0.0)
        return hidden_TD

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Array) -> None:
        self._rows.add(self.embed(table, positions_T), hidden_TD)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        out_TN = self._buffers.empty((x_TK.shape[0], weight.n), np.float32)
        self._kernels_of(weight).linear(x_TK, weight.data, out_TN, False)
        return out_TN

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        self._kernels_of(weight).linear(x_TK, weight.data, hidden_TN, True)

    def join(self, parts: Sequence[Array]) -> Array:
        return join(list(parts), self._added)

    def all_reduce(self, x_TN: Array, group: GathersArrays) -> Array:
        return self.join(group.all_gather(x_TN))

    def gather_columns(self, x_TN: Array, group: GathersArrays, widths: Sequence[int]) -> Array:
        return np.concatenate(checked_widths(group.all_gather(x_TN), widths), axis=1)

    def zeros(self, x_TK: Array, n: int) -> Array:
        return np.zeros((len(x_TK), n), np.float32)

    def norm_gathered(self, x_TN: Array, group: GathersArrays, weight_W: Array, eps: float, heads: HeadColumns) -> None:
        all_TN = self._buffers.empty((len(x_TN), len(weight_W)), np.float32)
        heads.collect(group.all_gather(x_TN), all_TN)
        self.norm_heads(all_TN, weight_W, eps, first=0, count=1)
        heads.put_own(all_TN, x_TN)

    def _added(self, left_TN: Array, right_TN: Array) -> Array:
        """The sum, in the place of the left one."""
        self._rows.add(right_TN, left_TN)
        return left_TN

    def lora_add(
        self, x_TK: Array, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Array, *, wanted: bool
    ) -> None:
        self._adapters.add(x_TK, row_slots(batch, wanted=wanted), adapters.data, site, out_TN)

    def heads_linear(self, x_THK: Array, weight: PackedLinear, *, heads: int) -> Array:
        out = self._buffers.empty((x_THK.shape[0], weight.n), self._dtype)
        self._attention.heads_linear(x_THK, weight.data, heads, out)
        return out

    def route(self, logits_TE: Array, routing: Routing, bias_E: Array | None = None) -> Routes:
        """Ids, then weights, 32 bits each."""
        routes = np.empty((len(logits_TE), 2 * routing.top_k), np.uint32)
        self._experts.route(logits_TE, routing_words(routing), bias_E, routes)
        return Routes(routes, routing.top_k)

    def experts_add(self, x_TK: Array, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Array) -> None:
        self._experts.add(x_TK, routes.data, experts.data, gate_words(kind), hidden_TD)

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        ids, weights = np.split(routes.data, 2, axis=1)
        return ids.astype(np.int32), np.ascontiguousarray(weights).view(np.float32)

    def _kernels_of(self, weight: PackedLinear) -> Any:
        """The kernels that read weights of this form."""
        forms = {_native.CompressedWeights: self._compressed, _native.QuantWeights: self._quantized}
        return forms.get(type(weight.data), self._kernels)

    # --- across a sequence --------------------------------------------------------------------------------------------

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
        if kv_heads != kv.shape.kv_heads:
            raise KernelError(f"the KV memory has {kv.shape.kv_heads} heads, not {kv_heads}")
        q_THC = self._buffers.empty((qkv_TN.shape[0], heads, kv.shape.key_dim), self._dtype)
        self._attention.rope_and_write(qkv_TN, rope, q_scale, kv.handle, layer, self._checked(batch), heads, q_THC)
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
        self._attention.latent_write(latent_TC, norm, eps, rope, kv.handle, layer, self._checked(batch))

    def latent_query(
        self, q_TN: Array, absorb: PackedLinear, rope: _native.Rope, kv: NativeKv, batch: StepBatch, *, heads: int
    ) -> Array:
        q_THC = self._buffers.empty((q_TN.shape[0], heads, kv.shape.key_dim), self._dtype)
        self._attention.latent_query(q_TN, absorb.data, rope, kv.handle, self._checked(batch), heads, q_THC)
        return q_THC

    def paged_attention(
        self,
        q_THC: Array,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        spec: AttentionSpec,
    ) -> Array:
        heads = math.prod(q_THC.shape[1:]) // kv.shape.key_dim
        out = self._buffers.empty((len(q_THC), heads * kv.shape.value_dim), self._dtype)
        rule = attention_rule(spec)
        self._attention.attention(q_THC, kv.handle, layer, self._checked(batch), heads, rule, out)
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
        tokens, width = qkv_TN.shape
        out = self._buffers.empty((tokens, width // (heads + 2 * kv_heads) * heads), self._dtype)
        rule = attention_rule(AttentionSpec(scale, window=window, softcap=softcap))
        self._attention.attention_once(qkv_TN, starts_S1, rope, rows_T, (heads, kv_heads), causal, rule, bias_HR, out)
        return out

    def _checked(self, batch: StepBatch) -> _native.Batch:
        """The step's tokens as the kernels hold them, made once a step."""
        if self._batch is None or self._batch[0] is not batch:
            table_SP = np.ascontiguousarray(batch.table_SP, np.int32)
            own = _native.Batch(batch.positions_T, batch.starts_S1, table_SP, batch.turns_T3)
            if batch.states_SW is not None:
                own.recur(batch.states_SW)
            self._batch = (batch, own)
        return self._batch[1]

    # --- recurrent layers ---------------------------------------------------------------------------------------------

    def causal_conv(self, x_TN: Array, weight_KC: Array, kv: NativeKv, layer: int, batch: StepBatch) -> Array:
        out_TC = self._buffers.empty((len(x_TN), weight_KC.shape[1]), np.float32)
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
        own = kv.shape.kept_states
        out = self._buffers.empty((len(qkv_TC), own.heads * own.value_dim), np.float32)
        step = kv.handle, layer, self._checked(batch)
        self._states.delta_rule(qkv_TC, gates_TN, (beta, decay), rates_H, shifts_H, *step, out)
        return out

    # --- from logits to tokens ----------------------------------------------------------------------------------------

    def sample(self, logits_RV: Array, rows: list[SampleRow]) -> list[Sampled]:
        """Temperatures below 1e-5 count as 0."""
        return sampled_tokens(rows, self._kernels.sample(logits_RV, [draw_row(row) for row in rows]))

    def token_logprobs(self, logits_RV: Array, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        scored = self._kernels.score_tokens(logits_RV, tokens_R, top)
        return [Sampled(token, logprob, tuple(likeliest)) for token, logprob, likeliest in scored]

    def gumbel(self, seed: int, position: int, choice: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The noise that ``sample`` adds for each of these token ids (tests and tools)."""
        out = np.empty(ids.shape, np.float32)
        self._kernels.gumbel(seed, position, choice, ids, out)
        return out

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
