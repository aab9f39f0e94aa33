"""The backend for a GPU: Triton kernels where they are hot, the oracle's torch operations on the same device elsewhere.

So every model runs, and an operation without a kernel of its own is slow, not wrong.

This module imports torch and triton; nothing imports it but ``select``, when it is asked for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.compressed import AnyCompressed
from penstock.kernels.lora import AdapterTable
from penstock.kernels.operands import (
    SILU,
    Activation,
    AttentionSpec,
    Gate,
    KvShape,
    PackedExperts,
    PackedLinear,
    Routes,
    Routing,
    StepBatch,
    numerics_with,
)
from penstock.kernels.ops import RecordableModel, StepProgram
from penstock.kernels.quantization import QuantizedMatrix, fits_kernels
from penstock.kernels.reference.attention import ReferenceKv, ReferenceRope
from penstock.kernels.reference.backend import ReferenceOps
from penstock.kernels.reference.tiles import numpy_of
from penstock.kernels.sampling import Sampled, SampleRow
from penstock.kernels.triton.attention import TritonAttention
from penstock.kernels.triton.compressed import compressed_weights, fits_gpu, workspace_of
from penstock.kernels.triton.fusion import FusedSteps
from penstock.kernels.triton.graphs import CudaGraphRunner, EagerRunner
from penstock.kernels.triton.linear import WeightForm, device_matrix, for_gpu
from penstock.kernels.triton.lora import TritonAdapters
from penstock.kernels.triton.matmul import multiply
from penstock.kernels.triton.moe import GroupedExperts, chosen_experts, stacked_experts
from penstock.kernels.triton.numerics import TritonContext, numerics_of
from penstock.kernels.triton.plain import PlainWeights
from penstock.kernels.triton.program import DeviceProgram
from penstock.kernels.triton.quantized import quantized_weights
from penstock.kernels.triton.rope import latent_query, latent_write, rope_and_write
from penstock.kernels.triton.rows import (
    ACTIVATE,
    GATED_ADD,
    SIGMOID_GATED,
    SOFTCAP,
    launch_each,
    launch_gated,
    launch_layer_norm,
    launch_norm,
    lined,
)
from penstock.kernels.triton.sampling import TritonSampler
from penstock.kernels.triton.staging import DeviceGumbelRows
from penstock.kernels.triton.states import causal_conv, delta_rule
from penstock.kernels.triton.weights import DeviceWeightLoading
from penstock.kernels.weight_source import WeightLoading


class TritonOps(ReferenceOps):
    """For what each operation does."""

    def __init__(self, *, compute_dtype: str, device: str = "cuda", kv_dtype: str | None = None) -> None:
        """``device``: "cuda", "cuda:1", ..., or "cpu" where Triton's interpreter runs the kernels.  ``kv_dtype``: what
        KV pages are in; None: the compute type.

        Raises KernelError for an unknown type or a device that torch does not find.
        """
        super().__init__(compute_dtype=compute_dtype, device=device, kv_dtype=kv_dtype)
        self.numerics = numerics_with(numerics_of(self.device, compute_dtype), kv_dtype)
        self.form = TritonContext(self.context)
        self.paged = TritonAttention(self.form)
        self.head = TritonSampler(self.form)
        self._workspace: Tensor | None = None

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> ReferenceKv:
        """Raises KernelError for pages that ranks share, too: each has a device's memory of its own."""
        if shape.share is not None:
            raise KernelError("the kernels of GPUs read pages that one rank has alone (KvShape.unshared)")
        return super().new_kv(shape, pages=pages, memory=memory)

    def record(self, steps: RecordableModel, kv: ReferenceKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        return DeviceProgram(
            self,
            FusedSteps(steps, self.form),
            kv,
            device=self.device,
            groups=kv.shape.layer_groups,
            replays=CudaGraphRunner(self.device) if self.device.type == "cuda" else EagerRunner(),
            pick=self._picked,
            state_parts=0 if kv.shape.states is None else kv.shape.state_parts,
        )

    # --- weights ------------------------------------------------------------------------------------------------------

    def pack_linear(self, weight_NK: NDArray[Any], *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """Raises KernelError for another element type."""
        return self.pack_tensor(device_matrix(self.form, weight_NK), segments=segments)

    def pack_tensor(self, matrix_NK: Tensor, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """The same for a matrix of the compute type that is on the device already, and is not copied.

        Raises ValueError for segments that are not the matrix's."""
        n, k = matrix_NK.shape
        ends = tuple(segments or (k,))
        if list(ends) != sorted(ends) or ends[-1] != k or len(ends) not in (1, 2, 4, 8):
            raise ValueError(f"segments {ends} do not cut {k} columns into 1, 2, 4 or 8")
        data = PlainWeights.over(self.form, matrix_NK, ends)
        return PackedLinear(n=n, k=k, segments=ends, data=data, nbytes=matrix_NK.nbytes)

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """Kept compressed under the compute type bf16; the CPU's layout is converted."""
        k = parts[0].k
        ends = tuple(segments or (k,))
        if self.form.dtype != torch.bfloat16 or not fits_gpu([(part.n, part.k) for part in parts], ends):
            return None
        found = [own for part in parts if (own := for_gpu(part)) is not None]
        if len(found) < len(parts):
            return None
        if self._workspace is None or len(self._workspace) < 128 * k:
            self._workspace = workspace_of(self.form, k)
        data = compressed_weights(self.form, found, ends, self._workspace)
        return PackedLinear(n=data.operands[0].n, k=k, segments=ends, data=data, nbytes=data.nbytes)

    def pack_quantized(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        k = parts[0].k
        ends = tuple(segments or (k,))
        if not fits_kernels(parts, ends):
            return None
        data = quantized_weights(self.form, parts, ends)
        return PackedLinear(n=sum(part.n for part in parts), k=k, segments=ends, data=data, nbytes=data.nbytes)

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear | None],
        down: Sequence[PackedLinear | None],
        *,
        gate_up_biases: Sequence[Tensor | None] | None = None,
        down_biases: Sequence[Tensor | None] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """The matrices stay usable, their memory becomes part of one tall matrix."""
        packed = super().pack_experts(
            gate_up, down, gate_up_biases=gate_up_biases, down_biases=down_biases, weighs_input=weighs_input
        )
        return replace(packed, data=stacked_experts(packed.data))

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> TritonAdapters:
        return TritonAdapters(self.form, self.pack_linear, sites, slots)

    def loading(self, nbytes: int) -> WeightLoading:
        def pack(matrix_NK: Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
            return self.pack_tensor(matrix_NK, segments=segments)

        return DeviceWeightLoading(self.form.device, self.form.dtype, pack)

    # --- row by row ---------------------------------------------------------------------------------------------------

    def features(self, batch: StepBatch, width: int) -> Tensor:
        """Raises ValueError where the batch brings none of that width."""
        brought_TW: Any = batch.features(width)
        return brought_TW.clone() if isinstance(brought_TW, Tensor) else self.form.tensor(brought_TW)

    def tap(self, hidden_TD: Tensor, batch: StepBatch, place: int) -> None:
        """Taps on the device are filled there, without synchronization.

        Raises ValueError where there is not enough room."""
        taps_RW: Any = batch.taps_RW
        if taps_RW is not None:
            wanted_RD: Any = self.rows(hidden_TD, batch.sample_rows_R)
            batch.store_taps(wanted_RD if isinstance(taps_RW, Tensor) else numpy_of(wanted_RD), place)

    def place_rows(self, hidden_TD: Tensor, batch: StepBatch) -> None:
        if batch.given is not None and len(batch.given.rows_G):
            rows_G = self.form.integers(batch.given.rows_G)
            hidden_TD.index_copy_(0, rows_G.long(), batch.given.values_GD)

    def rows(self, x_TD: Tensor, rows_R: NDArray[np.int32] | Tensor) -> Tensor:
        return x_TD.index_select(0, self.form.integers(rows_R))

    def rms_norm(self, hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        out_TD = self.form.empty(hidden_TD.shape, self.form.dtype)
        launch_norm(lined(hidden_TD), weight_D, eps, out_TD)
        return out_TD

    def norm_add(self, hidden_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> None:
        launch_norm(lined(x_TD), weight_D, eps, hidden_TD, added=True)

    def layer_norm(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        out_TD = self.form.empty(hidden_TD.shape, self.form.dtype)
        launch_layer_norm(lined(hidden_TD), weight_D, bias_D, eps, out_TD)
        return out_TD

    def layer_norm_in_place(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        launch_layer_norm(hidden_TD, weight_D, bias_D, eps, hidden_TD)

    def norm_heads(self, x_TN: Tensor, weight_C: Tensor, eps: float, *, first: int, count: int) -> None:
        columns_TN = x_TN[:, first : first + count * len(weight_C)]
        launch_norm(columns_TN, weight_C, eps, columns_TN)

    def gated(self, gate_up_T2I: Tensor, kind: Gate = SILU) -> Tensor:
        gate_up_T2I = lined(gate_up_T2I)
        out_TI = self.form.empty((len(gate_up_T2I), gate_up_T2I.shape[1] // 2), self.form.dtype)
        launch_gated(gate_up_T2I, out_TI, kind)
        return out_TI

    def activate(self, x_TI: Tensor, kind: Activation, alpha: float = 1.0) -> Tensor:
        out_TI = self.form.empty(x_TI.shape, self.form.dtype)
        launch_each(x_TI, None, out_TI, alpha, ACTIVATE, kind)
        return out_TI

    def softcap(self, x_TN: Tensor, cap: float) -> None:
        launch_each(x_TN, None, x_TN, cap, SOFTCAP)

    def gated_norm(self, x_TN: Tensor, gate_TM: Tensor, weight_C: Tensor, eps: float, *, first: int) -> Tensor:
        out_TN = self.form.empty(x_TN.shape, self.form.dtype)
        launch_norm(lined(x_TN), weight_C, eps, out_TN, gate=gate_TM[:, first : first + x_TN.shape[1]])
        return out_TN

    def sigmoid_gated(self, x_TN: Tensor, gate_TN: Tensor) -> Tensor:
        out_TN = self.form.empty(gate_TN.shape, self.form.dtype)
        launch_each(x_TN.view(gate_TN.shape), gate_TN, out_TN, 0.0, SIGMOID_GATED)
        return out_TN

    def gated_add(self, hidden_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> None:
        launch_each(x_TD, gate_T1, hidden_TD, 0.0, GATED_ADD)

    # --- packed matrices ----------------------------------------------------------------------------------------------

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32] | Tensor, scale: float = 1.0) -> Tensor:
        """The ids may be on the device already."""
        own: WeightForm = table.data
        rows_TD = own.rows(self.form.integers(tokens_T).long())
        return rows_TD if scale == 1.0 else rows_TD * scale

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32] | Tensor, hidden_TD: Tensor) -> None:
        hidden_TD += self.embed(table, positions_T)

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        """Raises ValueError for an input of another width."""
        out_TN = self.form.empty((len(x_TK), weight.n))
        self._multiply(x_TK, weight, out_TN, add=False)
        return out_TN

    def linear_add(self, x_TK: Tensor, weight: PackedLinear, hidden_TN: Tensor) -> None:
        self._multiply(x_TK, weight, hidden_TN, add=True)

    def heads_linear(self, x_THK: Tensor, weight: PackedLinear, *, heads: int) -> Tensor:
        """Raises KernelError for weights that are not plain."""
        operands = weight.data.operands
        if len(operands) > 1 or len(weight.segments) > 1:
            raise KernelError("products of heads need a plain weight of one segment")
        out_TN = self.form.empty((len(x_THK), weight.n), self.form.dtype)
        x_TK = x_THK.to(self.form.dtype).reshape(len(x_THK), heads * weight.k)
        multiply(self.form, x_TK, operands[0], out_TN, add=False, heads=heads)
        return out_TN

    def lora_add(
        self, x_TK: Tensor, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Tensor, *, wanted: bool
    ) -> None:
        if not isinstance(adapters, TritonAdapters):
            raise KernelError("the adapters are another backend's")
        adapters.add(x_TK, batch, site, out_TN, wanted=wanted)

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> Routes:
        return Routes(chosen_experts(self.form, logits_TE, routing, bias_E), routing.top_k)

    def experts_add(self, x_TK: Tensor, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Tensor) -> None:
        own = GroupedExperts(self.form, gated=lambda wide_RN: self.gated(wide_RN, kind))
        own.add(x_TK, routes.data, experts, hidden_TD)

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return routes.data.ids.cpu().numpy().astype(np.int32), numpy_of(routes.data.weights)

    def _multiply(self, x_TK: Tensor, weight: PackedLinear, out_TN: Tensor, *, add: bool) -> None:
        if x_TK.ndim != 2 or x_TK.shape[1] != weight.k:
            raise ValueError(f"an input {list(x_TK.shape)} does not fit a weight of {weight.k} columns")
        own: WeightForm = weight.data
        own.multiply(x_TK.to(self.form.dtype), out_TN, add=add)

    # --- across a sequence --------------------------------------------------------------------------------------------

    def rope_and_write(
        self,
        qkv_TN: Tensor,
        rope: ReferenceRope | None,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Tensor | None = None,
    ) -> Tensor:
        return rope_and_write(
            self.form, qkv_TN, rope, kv, layer, batch, heads=heads, kv_heads=kv_heads, q_scale=q_scale
        )

    def latent_write(
        self,
        latent_TC: Tensor,
        rope: ReferenceRope,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        *,
        norm: Tensor,
        eps: float,
    ) -> None:
        latent_write(self.form, latent_TC, rope, kv, layer, batch, norm=norm, eps=eps)

    def latent_query(
        self, q_TN: Tensor, absorb: PackedLinear, rope: ReferenceRope, kv: ReferenceKv, batch: StepBatch, *, heads: int
    ) -> Tensor:
        return latent_query(self.form, q_TN, absorb, rope, kv, batch, heads=heads, heads_linear=self.heads_linear)

    def paged_attention(
        self, q_THC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch, spec: AttentionSpec
    ) -> Tensor:
        """Rows of tokens that no sequence owns are zero.  Sparse attention is the oracle's."""
        if spec.sparse is not None:
            return super().paged_attention(q_THC, kv, layer, batch, spec)
        return self.paged.paged_attention(q_THC, kv, layer, batch, spec)

    # --- recurrent layers ---------------------------------------------------------------------------------------------

    def causal_conv(self, x_TN: Tensor, weight_KC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch) -> Tensor:
        return causal_conv(self.form, x_TN, weight_KC, kv, layer, batch)

    def delta_rule(
        self,
        qkv_TC: Tensor,
        gates_TN: Tensor,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        *,
        rates_H: Tensor,
        shifts_H: Tensor,
        beta: int,
        decay: int,
    ) -> Tensor:
        """Sums over the keys are a tile's."""
        return delta_rule(
            self.form, qkv_TC, gates_TN, kv, layer, batch, rates_H=rates_H, shifts_H=shifts_H, beta=beta, decay=decay
        )

    # --- from logits to tokens ----------------------------------------------------------------------------------------

    def sample(self, logits_RV: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        return self.head.sample(logits_RV, rows)

    def token_logprobs(self, logits_RV: Tensor, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        return self.head.token_logprobs(logits_RV, tokens_R, top)

    def gumbel(self, seed: int, position: int, choice: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The noise that ``sample`` adds for each of these token ids (tests and tools)."""
        return self.head.gumbel(seed, position, choice, ids)

    def _picked(self, logits_RV: Tensor, draws: DeviceGumbelRows) -> Tensor:
        return self.head.pick(logits_RV, draws.seeds_R, draws.positions_R, draws.choices_R, draws.temperatures_R)
