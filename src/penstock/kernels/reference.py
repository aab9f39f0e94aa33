"""The oracle: every operation in torch, on the CPU or a GPU, written to be read rather than to be fast.

Batch-invariant in the simple way: where torch chooses its arithmetic by shape, it is only ever given one.  On the CPU a
linear, a norm and an activation see one row at a time, elsewhere fixed tiles padded with zeros; attention sees tiles
of 16 positions aligned to absolute position, so a token stands in the same place of the same shapes in every call.
Products are in fp32 over operands rounded to the compute type.

This module imports torch; nothing imports this module but ``select``, when it is asked for.

Longer than 400 lines: every operation of ``Ops`` is here, each a few lines over functions of one tile.
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
from penstock.kernels import reference_adapters, reference_experts
from penstock.kernels.adapters import AdapterTable, row_slots
from penstock.kernels.compressed import CompressedMatrix
from penstock.kernels.draws import Sampled, SampleRow
from penstock.kernels.kinds import SILU, Activation, Gate
from penstock.kernels.operands import KvShape, PackedLinear, StepBatch
from penstock.kernels.ops import StepProgram, Steps
from penstock.kernels.program import DirectProgram
from penstock.kernels.quantised import QuantizedMatrix
from penstock.kernels.reference_attention import (
    ReferenceKv,
    ReferenceRope,
    Rule,
    attend_tile,
    gathered,
    kv_over,
    rotated,
)
from penstock.kernels.reference_once import Once
from penstock.kernels.reference_rows import activated, gated, layer_norm, rms_norm, softcapped
from penstock.kernels.reference_sampling import sample_row, with_logprobs
from penstock.kernels.reference_tiles import RowTiles, arithmetic_of
from penstock.kernels.routing import PackedExperts, Routes, Routing
from penstock.types import PAGE_TOKENS

_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class ReferenceOps:
    """See ``ops.Ops`` for what each operation does."""

    def __init__(self, *, compute_dtype: str, device: str = "cpu") -> None:
        """Raises KernelError for an unknown type or a device that torch does not find."""
        if compute_dtype not in _DTYPES:
            raise KernelError(f"compute type {compute_dtype!r} is not one of bf16, fp32")
        if device.startswith("cuda") and not torch.cuda.is_available():
            raise KernelError(f"device {device!r} was asked for, but torch finds no CUDA device")
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        self.numerics = f"torch-{arithmetic_of(self.device)}-{torch.__version__}-{compute_dtype}"
        self.kv_layout = f"plain-1-{compute_dtype}"
        self._dtype = _DTYPES[compute_dtype]
        self._tiles = RowTiles(self.device)
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # a library may cut K by threads

    # --- once a model -------------------------------------------------------------------------------------------------

    def pack_linear(self, weight_NK: Any, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """See ``Ops.pack_linear``: one contiguous fp32 matrix a segment, rounded to the compute type."""
        return self._packed(self._tensor(np.asarray(weight_NK, np.float32)).to(self._dtype).float(), segments)

    def _packed(self, whole: Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
        (n, k), ends = whole.shape, segments or (whole.shape[1],)
        begins = (0, *ends[:-1])
        parts = [whole[:, a:b].contiguous() for a, b in zip(begins, ends, strict=True)]
        return PackedLinear(n=n, k=k, segments=tuple(ends), data=parts, nbytes=whole.nbytes)

    def pack_compressed(
        self, parts: list[CompressedMatrix], *, segments: tuple[int, ...] | None = None
    ) -> PackedLinear | None:
        """See ``Ops.pack_compressed``: plain weights only."""
        return None

    def pack_experts(
        self,
        gate_up: Sequence[PackedLinear],
        down: Sequence[PackedLinear],
        *,
        gate_up_biases: Sequence[Tensor] | None = None,
        down_biases: Sequence[Tensor] | None = None,
        weighs_input: bool = False,
    ) -> PackedExperts:
        """See ``Ops.pack_experts``."""
        wide, narrow = (torch.stack(list(own)) if own else None for own in (gate_up_biases, down_biases))
        data = reference_experts.ReferenceExperts(list(gate_up), list(down), wide, narrow, weighs_input)
        if {(w.n, w.k) for w in gate_up} != {(2 * down[0].k, gate_up[0].k)} or len({(w.n, w.k) for w in down}) > 1:
            raise ValueError("all experts of a layer have one shape")
        nbytes = sum(weight.nbytes for weight in (*gate_up, *down))
        return PackedExperts(len(down), gate_up[0].k, down[0].k, down[0].n, data, nbytes)

    def pack_quantised(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear:
        """See ``Ops.pack_quantised``: dequantised to fp32, so that the products are those of the weights."""
        whole_NK = np.concatenate([part.dequantised() for part in parts])
        return self._packed(self._tensor(whole_NK), segments)

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> reference_adapters.ReferenceAdapters:
        """See ``Ops.adapter_table``."""
        return reference_adapters.ReferenceAdapters(sites, slots, self.pack_linear)

    def loading(self, nbytes: int) -> None:
        """See ``Ops.loading``: it cannot."""
        return

    def vector(self, weight_D: Any) -> Tensor:
        """See ``Ops.vector``."""
        return self._tensor(np.asarray(weight_D, np.float32))

    def page_bytes(self, shape: KvShape) -> int:
        """See ``Ops.page_bytes``."""
        return shape.numbers * PAGE_TOKENS * self._dtype.itemsize

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> ReferenceKv:
        """See ``Ops.new_kv``.  ``memory`` is served on the CPU only (KernelError elsewhere)."""
        nbytes = pages * self.page_bytes(shape)
        if memory is None:
            return kv_over(torch.zeros(nbytes // self._dtype.itemsize, dtype=self._dtype, device=self.device), shape)
        if self.device.type != "cpu":
            raise KernelError(f"KV memory on {self.device} cannot lie in the host's memory")
        if memory.nbytes < nbytes:
            raise KernelError(f"{pages} pages need {nbytes} bytes of KV memory, given are {memory.nbytes}")
        return kv_over(torch.frombuffer(memory, dtype=self._dtype, count=nbytes // self._dtype.itemsize), shape)

    def rope_table(
        self,
        inv_freq_C2: NDArray[np.float64],
        max_positions: int,
        attention_factor: float = 1.0,
        *,
        interleaved: bool = False,
        axes_C2: Sequence[int] | None = None,
    ) -> ReferenceRope:
        """See ``Ops.rope_table``."""
        angles = np.outer(np.arange(max_positions, dtype=np.float64), np.asarray(inv_freq_C2, np.float64))
        rope = self.angle_table(angles, attention_factor, interleaved=interleaved)
        return rope if axes_C2 is None else replace(rope, axes=self._indices(np.array(axes_C2, np.int32)))

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> ReferenceRope:
        """See ``Ops.angle_table``."""
        table = np.stack([np.cos(angles_PC2), np.sin(angles_PC2)], axis=1) * attention_factor
        return ReferenceRope(self._tensor(table.astype(np.float32)), interleaved)

    # --- looking inside -----------------------------------------------------------------------------------------------

    def compute(self, values: NDArray[Any]) -> Tensor:
        """See ``Ops.compute``."""
        return self._tensor(np.asarray(values, np.float32)).to(self._dtype)

    def hidden(self, values: NDArray[Any]) -> Tensor:
        """See ``Ops.hidden``."""
        return self._tensor(np.array(values, np.float32))

    def to_numpy(self, array: Tensor) -> NDArray[np.float32]:
        """See ``Ops.to_numpy``."""
        return np.asarray(array.float().cpu().numpy(), np.float32)

    # --- every step ---------------------------------------------------------------------------------------------------

    def record(self, steps: Steps, kv: ReferenceKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """See ``Ops.record``: run as they are."""
        return DirectProgram(self, steps, kv)

    def features(self, batch: StepBatch, width: int) -> Tensor:
        """See ``Ops.features``.  Raises ValueError where the batch brings none of that width."""
        return self.hidden(batch.features(width))

    def tap(self, hidden_TD: Tensor, batch: StepBatch, place: int) -> None:
        """See ``Ops.tap``.  Raises ValueError where there is not enough room."""
        if batch.taps_RW is not None:
            batch.hand_out(self.to_numpy(self.rows(hidden_TD, batch.sample_rows_R)), place)

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Tensor:
        """See ``Ops.embed``."""
        ids_T = self._indices(tokens_T)
        return torch.cat([part[ids_T] for part in table.data], dim=1) * scale

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Tensor) -> None:
        """See ``Ops.embed_add``."""
        hidden_TD += self.embed(table, positions_T)

    def place_rows(self, hidden_TD: Tensor, batch: StepBatch) -> None:
        """See ``Ops.place_rows``."""
        if batch.given is not None:
            hidden_TD[self._indices(batch.given.rows_G)] = batch.given.values_GD

    def joined_rows(self, x_TK: Tensor, count: int) -> Tensor:
        """See ``Ops.joined_rows``."""
        return x_TK.reshape(-1, count * x_TK.shape[1])

    def rms_norm(self, hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        return self._tiles.map(lambda tile: rms_norm(tile, weight_D, eps), hidden_TD).to(self._dtype)

    def norm_add(self, hidden_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> None:
        """See ``Ops.norm_add``."""
        hidden_TD += self._tiles.map(lambda tile: rms_norm(tile, weight_D, eps), x_TD)

    def layer_norm(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        """See ``Ops.layer_norm``."""
        return self._tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD).to(self._dtype)

    def layer_norm_in_place(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        """See ``Ops.layer_norm_in_place``."""
        hidden_TD.copy_(self._tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD))

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        """See ``Ops.linear``."""
        sums, begin = [], 0
        for part, end in zip(weight.data, weight.segments, strict=True):
            sums.append(self._tiles.product(x_TK[:, begin:end].float(), part))
            begin = end
        while len(sums) > 1:
            sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
        return sums[0]

    def linear_add(self, x_TK: Tensor, weight: PackedLinear, hidden_TN: Tensor) -> None:
        """See ``Ops.linear_add``."""
        hidden_TN += self.linear(x_TK, weight)

    def lora_add(
        self, x_TK: Tensor, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Tensor, *, wanted: bool
    ) -> None:
        """See ``Ops.lora_add``."""
        if not isinstance(adapters, reference_adapters.ReferenceAdapters):
            raise KernelError("the adapters are another backend's")
        slots_T = row_slots(batch, wanted=wanted)
        reference_adapters.lora_add(x_TK, slots_T, adapters, site, out_TN, linear=self.linear)

    def norm_heads(self, x_TN: Tensor, weight_C: Tensor, eps: float, *, first: int, count: int) -> None:
        """See ``Ops.norm_heads``."""
        size = len(weight_C)

        def norm(tile: Tensor) -> Tensor:
            groups = tile.view(-1, count, size)
            return (groups * torch.rsqrt(groups.square().mean(dim=2, keepdim=True) + eps) * weight_C).flatten(1)

        columns = slice(first, first + count * size)
        x_TN[:, columns] = self._tiles.map(norm, x_TN[:, columns])

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
        """See ``Ops.rope_and_write``."""
        key_dim, value_dim = kv.shape.key_dim, kv.shape.value_dim
        widths = [heads * key_dim, kv_heads * key_dim, kv_heads * value_dim]
        q_TN, k_TN, v_TN = qkv_TN.split_with_sizes(widths, dim=1)
        place, pages_T, slots_T = self._places(kv, layer, batch)
        positions_T = self._indices(batch.positions_T)
        turns_T3 = None if batch.turns_T3 is None else self._indices(batch.turns_T3)
        k_TGC = rotated(k_TN.reshape(-1, kv_heads, key_dim), rope, positions_T, turns_T3)
        kv.keys[pages_T, place, :, slots_T] = k_TGC.to(self._dtype)
        kv.values[pages_T, place, :, slots_T] = v_TN.reshape(-1, kv_heads, value_dim).to(self._dtype)
        q_THC = rotated(q_TN.reshape(-1, heads, key_dim), rope, positions_T, turns_T3)
        if q_scale is not None:
            q_THC = q_THC * q_scale[positions_T, None, None]
        return q_THC.to(self._dtype)

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
        """See ``Ops.latent_write``."""
        plain = kv.shape.value_dim
        place, pages_T, slots_T = self._places(kv, layer, batch)
        turned_T1R = rotated(latent_TC[:, None, plain:], rope, self._indices(batch.positions_T))
        normed_T1C = self.rms_norm(latent_TC[:, :plain], norm, eps).unsqueeze(1)
        kv.keys[pages_T, place, :, slots_T] = torch.cat([normed_T1C, turned_T1R.to(self._dtype)], dim=-1)

    def latent_query(
        self, q_TN: Tensor, absorb: PackedLinear, rope: ReferenceRope, kv: ReferenceKv, batch: StepBatch, *, heads: int
    ) -> Tensor:
        """See ``Ops.latent_query``."""
        q_THN = q_TN.view(len(q_TN), heads, -1)
        absorbed_TN = self.heads_linear(q_THN[..., : absorb.k].to(self._dtype), absorb, heads=heads)
        turned_THR = rotated(q_THN[..., absorb.k :], rope, self._indices(batch.positions_T))
        return torch.cat([absorbed_TN.view(len(q_TN), heads, -1), turned_THR.to(self._dtype)], dim=-1)

    def heads_linear(self, x_THK: Tensor, weight: PackedLinear, *, heads: int) -> Tensor:
        """See ``Ops.heads_linear``."""
        x_THK = x_THK.view(len(x_THK), heads, weight.k)
        (whole,) = weight.data
        products = [
            self._tiles.product(x_THK[:, head].float(), rows.contiguous())
            for head, rows in enumerate(whole.chunk(heads))
        ]
        return torch.cat(products, dim=1).to(self._dtype)

    def paged_attention(
        self,
        q_THC: Tensor,
        kv: ReferenceKv,
        layer: int,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """See ``Ops.paged_attention``."""
        rule = Rule(scale, window, chunk, softcap, sinks_H)
        place, table_SP = kv.table(layer, batch)
        out_THC = q_THC.new_empty((*q_THC.shape[:2], kv.shape.value_dim))
        for s in range(len(batch.starts_S1) - 1):
            start, end = int(batch.starts_S1[s]), int(batch.starts_S1[s + 1])
            token = start
            while token < end:  # up to the next multiple of 16 positions
                position = int(batch.positions_T[token])
                block = position // PAGE_TOKENS
                count = min(end - token, (block + 1) * PAGE_TOKENS - position)
                rows, pages = slice(token, token + count), self._indices(table_SP[s, : block + 1])
                seen = (rule.first_key(position), position + count)
                k_GNC = gathered(kv.keys[:, place], pages, seen)
                v_GNC = gathered(kv.values[:, place], pages, seen)
                out_THC[rows] = attend_tile(q_THC[rows], k_GNC, v_GNC, position, rule).to(self._dtype)
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
        """See ``Ops.attention``."""
        once = Once(heads, kv_heads, Rule(scale, window, None, softcap, None), causal, bias_HR)
        return once.attend(qkv_TN, starts_S1, rope, rows_T, self._dtype)

    def gated(self, gate_up_T2I: Tensor, kind: Gate = SILU) -> Tensor:
        """See ``Ops.gated``."""
        return self._tiles.map(lambda tile: gated(tile, kind), gate_up_T2I).to(self._dtype)

    def activate(self, x_TI: Tensor, kind: Activation, alpha: float = 1.0) -> Tensor:
        """See ``Ops.activate``."""
        return self._tiles.map(lambda tile: activated(tile, kind, alpha), x_TI).to(self._dtype)

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> Routes:
        """See ``Ops.route``."""
        rows = [reference_experts.route(row_1E, routing, bias_E) for row_1E in logits_TE.clone()[:, None]]
        ids_TK, weights_TK = torch.cat([row.ids for row in rows]), torch.cat([row.weights for row in rows])
        return Routes(reference_experts.Chosen(ids_TK, weights_TK), routing.top_k)

    def experts_add(self, x_TK: Tensor, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Tensor) -> None:
        """See ``Ops.experts_add``."""
        hidden_TD += reference_experts.mixed(
            x_TK, routes.data, experts, linear=self.linear, gated=lambda wide_RN: self.gated(wide_RN, kind)
        )

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See ``Ops.routes_to_numpy``."""
        return routes.data.ids.cpu().numpy().astype(np.int32), self.to_numpy(routes.data.weights)

    def add(self, hidden_TD: Tensor, x_TD: Tensor) -> None:
        """See ``Ops.add``."""
        hidden_TD += x_TD

    def add_bias(self, x_TN: Tensor, bias_N: Tensor) -> None:
        """See ``Ops.add_bias``."""
        x_TN += bias_N

    def scale(self, x_TN: Tensor, factor: float) -> None:
        """See ``Ops.scale``."""
        x_TN *= factor

    def softcap(self, x_TN: Tensor, cap: float) -> None:
        """See ``Ops.softcap``."""
        x_TN.copy_(self._tiles.map(lambda tile: softcapped(tile, cap), x_TN))

    def rows(self, x_TD: Tensor, rows_R: NDArray[np.int32]) -> Tensor:
        """See ``Ops.rows``."""
        return x_TD[self._indices(rows_R)]

    def sample(self, logits_RV: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """See ``Ops.sample``."""
        logits = self.to_numpy(logits_RV)
        return [sample_row(logits_V, row) for logits_V, row in zip(logits, rows, strict=True)]

    def token_logprobs(self, logits_RV: Tensor, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        """See ``Ops.token_logprobs``."""
        logits = self.to_numpy(logits_RV)
        return [with_logprobs(logits_V, int(token), top) for logits_V, token in zip(logits, tokens_R, strict=True)]

    # --- inside -------------------------------------------------------------------------------------------------------

    def _tensor(self, values: NDArray[Any]) -> Tensor:
        return torch.from_numpy(np.array(values, order="C")).to(self.device)

    def _indices(self, values: NDArray[np.int32]) -> Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(self.device)

    def _places(self, kv: ReferenceKv, layer: int, batch: StepBatch) -> tuple[int, Tensor, Tensor]:
        """The layer's place in its pages; of every token, page and place in it."""
        place, table_SP = kv.table(layer, batch)
        sequences_T = np.repeat(np.arange(len(batch.starts_S1) - 1), np.diff(batch.starts_S1))
        pages_T = table_SP[sequences_T, batch.positions_T // PAGE_TOKENS]
        return place, self._indices(pages_T), self._indices(batch.positions_T % PAGE_TOKENS)
