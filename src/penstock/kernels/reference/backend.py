"""The oracle: every operation in torch, on the CPU or a GPU, written to be read rather than to be fast.

Batch-invariant in the simple way: where torch chooses its arithmetic by shape, it is only ever given one.  On the CPU a
linear, a norm and an activation see one row at a time, elsewhere fixed tiles padded with zeros; attention sees tiles
of 16 positions aligned to absolute position, so a token stands in the same place of the same shapes in every call.
Products are in fp32 over operands rounded to the compute type.

This module imports torch; only ``select`` imports it, on demand, and the Triton backend.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.compressed import AnyCompressed
from penstock.kernels.lora import AdapterTable, row_slots
from penstock.kernels.operands import (
    INT8,
    SILU,
    Activation,
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
from penstock.kernels.ops import DirectProgram, GathersArrays, Ops, RecordableModel, StepProgram, checked_widths
from penstock.kernels.page_export import PageWriter
from penstock.kernels.quantization import QuantizedMatrix, integers_of
from penstock.kernels.reference.attention import (
    ReferenceKv,
    ReferenceRope,
    UncachedAttention,
    attend_tile,
    kv_over,
    rotated,
)
from penstock.kernels.reference.experts import (
    ChosenExperts,
    ReferenceExperts,
    choose_experts,
    expert_sums,
    stacked_biases,
)
from penstock.kernels.reference.int8_inputs import InputBlocks, input_blocks, quantized_inputs
from penstock.kernels.reference.lora import ReferenceAdapters, lora_add
from penstock.kernels.reference.page_writer import TorchPageWriter
from penstock.kernels.reference.sampling import sample_row, with_logprobs
from penstock.kernels.reference.states import causal_conv, delta_rule
from penstock.kernels.reference.tiles import (
    RowTiles,
    TorchContext,
    activated,
    arithmetic_of,
    gated,
    gated_norm,
    layer_norm,
    numpy_of,
    on_host,
    rms_norm,
    softcapped,
)
from penstock.kernels.sampling import Sampled, SampleRow
from penstock.kernels.sum_tree import join
from penstock.kernels.weight_source import WeightLoading
from penstock.kv_spec import blocks_for
from penstock.types import FP8_E4M3, PAGE_TOKENS

VERSION = 2
"""Of the oracle's bits: part of the numerics class, raised with every change that a sum could notice."""

COMPUTE_TYPES: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp32": torch.float32})


class Int8Segments(list[Tensor]):
    """The segments of a weight that is multiplied with inputs of 8 bits."""

    def __init__(self, segments: Sequence[Tensor], inputs: InputBlocks) -> None:
        super().__init__(segments)
        self.inputs = inputs


class ReferenceOps(Ops):
    """For what each operation does."""

    def __init__(
        self,
        *,
        compute_dtype: str,
        device: str = "cpu",
        kv_dtype: str | None = None,
        activation_dtype: str | None = None,
    ) -> None:
        """``kv_dtype``: what KV pages are in; None: the compute type.  ``activation_dtype``: as in ``select.make_ops``.

        Raises KernelError for an unknown type or a device that torch does not find.
        """
        _check(compute_dtype, device, kv_dtype)
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        numerics = f"torch-{VERSION}-{arithmetic_of(self.device)}-{torch.__version__}-{compute_dtype}"
        self.numerics = numerics_with(numerics, kv_dtype, activation_dtype)
        self.activation_dtype = activation_dtype or compute_dtype
        self.kv_dtype = kv_dtype or compute_dtype
        self.kv_layout = f"plain-1-{self.kv_dtype}"
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # a library may cut K by threads
        self.context = TorchContext(self.device, COMPUTE_TYPES[compute_dtype], RowTiles(self.device))
        self._coded = kv_dtype is not None

    def page_writer(self, kv: ReferenceKv, memory: memoryview, layout: str) -> PageWriter:
        return TorchPageWriter(kv, memory, layout)

    def record(self, steps: RecordableModel, kv: ReferenceKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """Run as they are."""
        return DirectProgram(self, steps, kv)

    # --- weights, KV memory, tables; looking inside arrays ------------------------------------------------------------

    def pack_linear(self, weight_NK: Any, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """One contiguous fp32 matrix a segment, rounded to the compute type."""
        return self._packed(
            self.context.tensor(np.asarray(weight_NK, np.float32)).to(self.context.dtype).float(), segments
        )

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """Plain weights only."""
        return None

    def packed_rows(self, weight: PackedLinear, rows: range) -> PackedLinear | None:
        """Always a copy."""
        return None

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear | None],
        down: Sequence[PackedLinear | None],
        *,
        gate_up_biases: Sequence[Tensor | None] | None = None,
        down_biases: Sequence[Tensor | None] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        wide, narrow = (stacked_biases(own) for own in (gate_up_biases, down_biases))
        data = ReferenceExperts(list(gate_up), list(down), wide, narrow, weighs_input)
        inward, outward = ([weight for weight in own if weight is not None] for own in (gate_up, down))
        k, inner, n = inward[0].k, outward[0].k, outward[0].n
        if {(w.n, w.k) for w in inward} != {(2 * inner, k)} or {(w.n, w.k) for w in outward} != {(n, inner)}:
            raise ValueError("all experts of a layer have one shape")
        nbytes = sum(weight.nbytes for weight in (*inward, *outward))
        return PackedExperts(len(down), k, inner, n, data, nbytes, partial=None in gate_up)

    def pack_quantized(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """Dequantized to fp32, so that the products are those of the weights."""
        whole_NK = np.concatenate([part.dequantized() for part in parts])
        packed = self._packed(self.context.tensor(whole_NK), segments)
        if self.activation_dtype != INT8:
            return packed
        for part in parts:
            integers_of(part.format)
        return replace(packed, data=Int8Segments(packed.data, input_blocks(parts)))

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> AdapterTable:
        return ReferenceAdapters(sites, slots, self.pack_linear)

    def loading(self, nbytes: int) -> WeightLoading | None:
        """It cannot."""
        return None

    def vector(self, weight_D: Any) -> Tensor:
        return self.context.tensor(np.asarray(weight_D, np.float32))

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> ReferenceKv:
        """``memory`` is supported on the CPU only, and codes exclude states of recurrent layers (KernelError
        elsewhere)."""
        if self._coded and shape.states is not None:
            raise KernelError(f"states of recurrent layers are in fp32: the pages they lie in cannot be in {FP8_E4M3}")
        nbytes, dtype = pages * self.page_bytes(shape), torch.uint8 if self._coded else self.context.dtype
        if memory is None:
            return kv_over(torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=self.context.device), shape)
        if self.context.device.type != "cpu":
            raise KernelError(f"KV memory on {self.context.device} cannot lie in the host's memory")
        if memory.nbytes < nbytes:
            raise KernelError(f"{pages} pages need {nbytes} bytes of KV memory, given are {memory.nbytes}")
        return kv_over(torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize), shape)

    def page_bytes(self, shape: KvShape) -> int:
        return shape.page_bytes(FP8_E4M3 if self._coded else "bf16" if self.context.dtype.itemsize == 2 else "fp32")

    def rope_table(
        self,
        inv_freq_C2: NDArray[np.float64],
        max_positions: int,
        attention_factor: float = 1.0,
        *,
        interleaved: bool = False,
        axes_C2: Sequence[int] | None = None,
    ) -> ReferenceRope:
        angles = np.outer(np.arange(max_positions, dtype=np.float64), np.asarray(inv_freq_C2, np.float64))
        rope = self.angle_table(angles, attention_factor, interleaved=interleaved)
        return rope if axes_C2 is None else replace(rope, axes=self.context.indices(np.array(axes_C2, np.int32)))

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> ReferenceRope:
        table = np.stack([np.cos(angles_PC2), np.sin(angles_PC2)], axis=1) * attention_factor
        return ReferenceRope(self.context.tensor(table.astype(np.float32)), interleaved)

    def compute(self, values: NDArray[Any]) -> Tensor:
        return self.context.tensor(np.asarray(values, np.float32)).to(self.context.dtype)

    def hidden(self, values: NDArray[Any]) -> Tensor:
        return self.context.tensor(np.array(values, np.float32))

    def to_numpy(self, array: Tensor) -> NDArray[np.float32]:
        return numpy_of(array)

    def _packed(self, whole: Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
        (n, k), ends = whole.shape, segments or (whole.shape[1],)
        begins = (0, *ends[:-1])
        parts = [whole[:, a:b].contiguous() for a, b in zip(begins, ends, strict=True)]
        return PackedLinear(n=n, k=k, segments=tuple(ends), data=parts, nbytes=whole.nbytes)

    # --- row by row ---------------------------------------------------------------------------------------------------

    def features(self, batch: StepBatch, width: int) -> Tensor:
        """Raises ValueError where the batch brings none of that width."""
        return self.context.tensor(np.array(batch.features(width), np.float32))

    def tap(self, hidden_TD: Tensor, batch: StepBatch, place: int) -> None:
        """Raises ValueError where there is not enough room."""
        if batch.taps_RW is not None:
            batch.store_taps(numpy_of(self.rows(hidden_TD, batch.sample_rows_R)), place)

    def place_rows(self, hidden_TD: Tensor, batch: StepBatch) -> None:
        if batch.given is not None:
            hidden_TD[self.context.indices(batch.given.rows_G)] = batch.given.values_GD

    def joined_rows(self, x_TK: Tensor, count: int) -> Tensor:
        return x_TK.reshape(-1, count * x_TK.shape[1])

    def rows(self, x_TD: Tensor, rows_R: NDArray[np.int32]) -> Tensor:
        return x_TD[self.context.indices(rows_R)]

    def rms_norm(self, hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        return self.context.tiles.map(lambda tile: rms_norm(tile, weight_D, eps), hidden_TD).to(self.context.dtype)

    def norm_add(self, hidden_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> None:
        hidden_TD += self.context.tiles.map(lambda tile: rms_norm(tile, weight_D, eps), x_TD)

    def layer_norm(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        return self.context.tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD).to(
            self.context.dtype
        )

    def layer_norm_in_place(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        hidden_TD.copy_(self.context.tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD))

    def norm_heads(self, x_TN: Tensor, weight_C: Tensor, eps: float, *, first: int, count: int) -> None:
        size = len(weight_C)

        def norm(tile: Tensor) -> Tensor:
            groups = tile.view(-1, count, size)
            return (groups * torch.rsqrt(groups.square().mean(dim=2, keepdim=True) + eps) * weight_C).flatten(1)

        columns = slice(first, first + count * size)
        x_TN[:, columns] = self.context.tiles.map(norm, x_TN[:, columns])

    def gated(self, gate_up_T2I: Tensor, kind: Gate = SILU) -> Tensor:
        return self.context.tiles.map(lambda tile: gated(tile, kind), gate_up_T2I).to(self.context.dtype)

    def activate(self, x_TI: Tensor, kind: Activation, alpha: float = 1.0) -> Tensor:
        return self.context.tiles.map(lambda tile: activated(tile, kind, alpha), x_TI).to(self.context.dtype)

    def add(self, hidden_TD: Tensor, x_TD: Tensor) -> None:
        hidden_TD += x_TD

    def add_bias(self, x_TN: Tensor, bias_N: Tensor) -> None:
        x_TN += bias_N

    def scale(self, x_TN: Tensor, factor: float) -> None:
        x_TN *= factor

    def softcap(self, x_TN: Tensor, cap: float) -> None:
        x_TN.copy_(self.context.tiles.map(lambda tile: softcapped(tile, cap), x_TN))

    def gated_norm(self, x_TN: Tensor, gate_TM: Tensor, weight_C: Tensor, eps: float, *, first: int) -> Tensor:
        both_TNN = torch.cat([x_TN, gate_TM[:, first : first + x_TN.shape[1]]], dim=1)
        return self.context.tiles.map(lambda tile: gated_norm(tile, weight_C, eps), both_TNN).to(self.context.dtype)

    def sigmoid_gated(self, x_TN: Tensor, gate_TN: Tensor) -> Tensor:
        gated_TN = self.context.tiles.map(torch.sigmoid, gate_TN) * x_TN.view(gate_TN.shape).float()
        return gated_TN.to(self.context.dtype)

    def gated_add(self, hidden_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> None:
        hidden_TD += self.context.tiles.map(torch.sigmoid, gate_T1) * x_TD

    # --- packed matrices ----------------------------------------------------------------------------------------------

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Tensor:
        ids_T = self.context.indices(tokens_T)
        return torch.cat([part[ids_T] for part in table.data], dim=1) * scale

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Tensor) -> None:
        hidden_TD += self.embed(table, positions_T)

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        if not isinstance(weight.data, Int8Segments):
            return self._product(x_TK, weight)
        own, out_TN = weight.data.inputs, x_TK.new_empty((len(x_TK), weight.n), dtype=torch.float32)
        for block in sorted(set(own.block_N.tolist())):
            rounded_TK = quantized_inputs(x_TK, block, weight.segments, own.order_K)
            outputs = own.block_N == block
            out_TN[:, outputs] = self._product(rounded_TK, weight)[:, outputs]
        return out_TN

    def _product(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        sums, begin = [], 0
        for part, end in zip(weight.data, weight.segments, strict=True):
            sums.append(self.context.tiles.product(x_TK[:, begin:end].float(), part))
            begin = end
        return self.join(sums)

    def linear_add(self, x_TK: Tensor, weight: PackedLinear, hidden_TN: Tensor) -> None:
        hidden_TN += self.linear(x_TK, weight)

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        joined = join(parts, torch.add)
        assert joined is not None, "every part is there"
        return joined

    def all_reduce(self, x_TN: Tensor, group: GathersArrays) -> Tensor:
        return self.join(group.all_gather(x_TN))

    def gather_columns(self, x_TN: Tensor, group: GathersArrays, widths: Sequence[int]) -> Tensor:
        return torch.cat(checked_widths(group.all_gather(x_TN), widths), dim=1)

    def zeros(self, x_TK: Tensor, n: int) -> Tensor:
        return torch.zeros((len(x_TK), n), device=self.context.device)

    def norm_gathered(
        self, x_TN: Tensor, group: GathersArrays, weight_W: Tensor, eps: float, heads: HeadColumns
    ) -> None:
        all_TN = x_TN.new_empty((len(x_TN), len(weight_W)))
        heads.collect(group.all_gather(x_TN), all_TN)
        self.norm_heads(all_TN, weight_W, eps, first=0, count=1)
        heads.put_own(all_TN, x_TN)

    def lora_add(
        self, x_TK: Tensor, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Tensor, *, wanted: bool
    ) -> None:
        if not isinstance(adapters, ReferenceAdapters):
            raise KernelError("the adapters are another backend's")
        slots_T = row_slots(batch, wanted=wanted)
        lora_add(x_TK, slots_T, adapters, site, out_TN, linear=self.linear)

    def heads_linear(self, x_THK: Tensor, weight: PackedLinear, *, heads: int) -> Tensor:
        x_THK = x_THK.view(len(x_THK), heads, weight.k)
        (whole,) = weight.data
        products = [
            self.context.tiles.product(x_THK[:, head].float(), rows.contiguous())
            for head, rows in enumerate(whole.chunk(heads))
        ]
        return torch.cat(products, dim=1).to(self.context.dtype)

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> Routes:
        rows = [choose_experts(row_1E, routing, bias_E) for row_1E in logits_TE.clone()[:, None]]
        ids_TK, weights_TK = torch.cat([row.ids for row in rows]), torch.cat([row.weights for row in rows])
        return Routes(ChosenExperts(ids_TK, weights_TK), routing.top_k)

    def experts_add(self, x_TK: Tensor, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Tensor) -> None:
        hidden_TD += expert_sums(
            x_TK, routes.data, experts, linear=self.linear, gated=lambda wide_RN: self.gated(wide_RN, kind)
        )

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        return routes.data.ids.cpu().numpy().astype(np.int32), numpy_of(routes.data.weights)

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
        key_dim, value_dim = kv.shape.key_dim, kv.shape.value_dim
        widths = [heads * key_dim, kv_heads * key_dim, kv_heads * value_dim]
        q_TN, k_TN, v_TN = qkv_TN.split_with_sizes(widths, dim=1)
        place, tokens = self._places(kv, layer, batch)
        positions_T = self.context.indices(batch.positions_T)
        turns_T3 = None if batch.turns_T3 is None else self.context.indices(batch.turns_T3)
        k_TGC = rotated(k_TN.reshape(-1, kv_heads, key_dim), rope, positions_T, turns_T3)
        kv.put_keys(place, tokens, k_TGC)
        kv.put_values(place, tokens, v_TN.reshape(-1, kv_heads, value_dim))
        q_THC = rotated(q_TN.reshape(len(q_TN), heads, key_dim), rope, positions_T, turns_T3)
        if q_scale is not None:
            q_THC = q_THC * q_scale[positions_T, None, None]
        return q_THC.to(self.context.dtype)

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
        plain = kv.shape.value_dim
        place, tokens = self._places(kv, layer, batch)
        turned_T1R = rotated(latent_TC[:, None, plain:], rope, self.context.indices(batch.positions_T))
        normed_TC = self.context.tiles.map(lambda tile: rms_norm(tile, norm, eps), latent_TC[:, :plain])
        kv.put_keys(place, tokens, torch.cat([normed_TC.unsqueeze(1), turned_T1R], dim=-1))

    def latent_query(
        self, q_TN: Tensor, absorb: PackedLinear, rope: ReferenceRope, kv: ReferenceKv, batch: StepBatch, *, heads: int
    ) -> Tensor:
        q_THN = q_TN.view(len(q_TN), heads, -1)
        absorbed_TN = self.heads_linear(q_THN[..., : absorb.k].to(self.context.dtype), absorb, heads=heads)
        turned_THR = rotated(q_THN[..., absorb.k :], rope, self.context.indices(batch.positions_T))
        return torch.cat([absorbed_TN.view(len(q_TN), heads, -1), turned_THR.to(self.context.dtype)], dim=-1)

    def paged_attention(
        self,
        q_THC: Tensor,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        spec: AttentionSpec,
    ) -> Tensor:
        place, paged_SP = kv.table(layer, batch)
        starts_S1, positions_T, table_SP = map(on_host, (batch.starts_S1, batch.positions_T, paged_SP))
        q_THC = q_THC.reshape(len(q_THC), -1, kv.shape.key_dim)
        out_THC = q_THC.new_empty((*q_THC.shape[:2], kv.shape.value_dim))
        for s in range(len(starts_S1) - 1):
            start, end = int(starts_S1[s]), int(starts_S1[s + 1])
            token = start
            while token < end:  # up to the next multiple of 16 positions
                position = int(positions_T[token])
                block = position // PAGE_TOKENS
                count = min(end - token, (block + 1) * PAGE_TOKENS - position)
                seen = (spec.keys_of(position)[0], spec.keys_of(position + count - 1)[1])
                blocks = block + 1 if spec.until is None else blocks_for(spec.until, PAGE_TOKENS)
                rows, pages = slice(token, token + count), self.context.indices(table_SP[s, :blocks])
                k_GNC, v_GNC = kv.gathered(place, pages, seen)
                out_THC[rows] = attend_tile(q_THC[rows], k_GNC, v_GNC, position, spec).to(self.context.dtype)
                token += count
        return out_THC.flatten(1)

    def attention(
        self,
        qkv_TN: Tensor,
        starts_S1: NDArray[np.int32],
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        rope: ReferenceRope | None = None,
        rows_T: NDArray[np.int32] | None = None,
        bias_HR: Tensor | None = None,
    ) -> Tensor:
        once = UncachedAttention(heads, kv_heads, AttentionSpec(scale, window=window, softcap=softcap), causal, bias_HR)
        return once.attend(qkv_TN, starts_S1, rope, rows_T, self.context.dtype)

    def _places(self, kv: ReferenceKv, layer: int, batch: StepBatch) -> tuple[int, tuple[Tensor, Tensor]]:
        """The layer's place in its pages; of every token, page and place in it."""
        place, paged_SP = kv.table(layer, batch)
        starts_S1, positions_T, table_SP = map(on_host, (batch.starts_S1, batch.positions_T, paged_SP))
        sequences_T = np.repeat(np.arange(len(starts_S1) - 1), np.diff(starts_S1))
        pages_T = table_SP[sequences_T, positions_T // PAGE_TOKENS]
        return place, (self.context.indices(pages_T), self.context.indices(positions_T % PAGE_TOKENS))

    # --- recurrent layers ------------------------------------------------------------------------------------------

    def causal_conv(self, x_TN: Tensor, weight_KC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch) -> Tensor:
        return causal_conv(x_TN, weight_KC, kv, layer, batch)

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
        return delta_rule(
            qkv_TC, gates_TN, kv, layer, batch, rates_H=rates_H, shifts_H=shifts_H, beta=beta, decay=decay
        )

    # --- from logits to tokens ----------------------------------------------------------------------------------------

    def sample(self, logits_RV: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        logits = numpy_of(logits_RV)
        return [sample_row(logits_V, row) for logits_V, row in zip(logits, rows, strict=True)]

    def token_logprobs(self, logits_RV: Tensor, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        logits = numpy_of(logits_RV)
        return [with_logprobs(logits_V, int(token), top) for logits_V, token in zip(logits, tokens_R, strict=True)]


def _check(compute_dtype: str, device: str, kv_dtype: str | None) -> None:
    """Raises KernelError."""
    if compute_dtype not in COMPUTE_TYPES:
        raise KernelError(f"compute type {compute_dtype!r} is not one of bf16, fp32")
    if kv_dtype not in (None, FP8_E4M3):
        raise KernelError(f"KV pages in {kv_dtype!r}: there is {FP8_E4M3}, or None for the compute type")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KernelError(f"device {device!r} was asked for, but torch finds no CUDA device")
