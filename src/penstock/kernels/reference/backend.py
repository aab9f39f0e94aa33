"""The oracle: every operation in torch, on the CPU or a GPU, written to be read rather than to be fast.

The operations are in ``reference_model``, ``reference_over_rows``, ``reference_products``, ``reference_sequences``,
``reference_states`` and ``reference_head``; here is the list.

Batch-invariant in the simple way: where torch chooses its arithmetic by shape, it is only ever given one.  On the CPU a
linear, a norm and an activation see one row at a time, elsewhere fixed tiles padded with zeros; attention sees tiles
of 16 positions aligned to absolute position, so a token stands in the same place of the same shapes in every call.
Products are in fp32 over operands rounded to the compute type.

This module imports torch; nothing imports this module but ``select``, when it is asked for, and the Triton backend.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.compressed_gpu import AnyCompressed
from penstock.kernels.lora import AdapterTable, row_slots
from penstock.kernels.operands import (
    SILU,
    Activation,
    Gate,
    KvShape,
    PackedExperts,
    PackedLinear,
    Routes,
    Routing,
    Sparse,
    StateShape,
    StepBatch,
    numerics_with,
)
from penstock.kernels.ops import StepProgram, Steps
from penstock.kernels.page_export import PageWriter
from penstock.kernels.program import DirectProgram
from penstock.kernels.quantization import QuantizedMatrix
from penstock.kernels.reference.attention import Once, ReferenceKv, ReferenceRope, Rule, attend_tile, kv_over, rotated
from penstock.kernels.reference.experts import Chosen, ReferenceExperts, mixed, route
from penstock.kernels.reference.lora import ReferenceAdapters, lora_add
from penstock.kernels.reference.page_writer import TorchPageWriter
from penstock.kernels.reference.sampling import sample_row, with_logprobs
from penstock.kernels.reference.tiles import (
    RowTiles,
    TorchForm,
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
from penstock.kernels.weight_source import Loading
from penstock.reach import blocks_of
from penstock.types import FP8_E4M3, PAGE_TOKENS

# MERGED: The oracle's operations on logits.  One of the parts that ``reference`` puts together.
# MERGED:
# MERGED: This module imports torch.


class ReferenceHead:
    """See ``ops_head.HeadOps``."""

    def sample(self, logits_RV: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """See ``Ops.sample``."""
        logits = numpy_of(logits_RV)
        return [sample_row(logits_V, row) for logits_V, row in zip(logits, rows, strict=True)]

    def token_logprobs(self, logits_RV: Tensor, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        """See ``Ops.token_logprobs``."""
        logits = numpy_of(logits_RV)
        return [with_logprobs(logits_V, int(token), top) for logits_V, token in zip(logits, tokens_R, strict=True)]


# MERGED: The oracle's recurrent layers: token after token, all heads of a token at once, so always in one
# MERGED: shape.
# MERGED:
# MERGED: One of the parts that ``reference`` puts together.  This module imports torch.


@dataclass(frozen=True, slots=True)
class _Cell:
    """Tokens ``[first, first + count)`` of a step that stand in one cell, and the rows of the state before and behind
    them; None before the first token."""

    first: int
    count: int
    before: Tensor | None
    pages: NDArray[np.int32]  # that the state behind goes to


class ReferenceStates:
    """See ``ops_states.StateOps``."""

    def causal_conv(self, x_TN: Tensor, weight_KC: Tensor, kv: ReferenceKv, layer: int, batch: StepBatch) -> Tensor:
        """See ``Ops.causal_conv``."""
        own, (taps, channels) = kv.shape.kept_states, weight_KC.shape
        rows = slice(layer * own.layer_rows + own.matrix_rows, (layer + 1) * own.layer_rows)
        out_TC = torch.empty((len(x_TN), channels), device=x_TN.device)
        for cell in self._cells(kv, rows, batch):
            inputs_KC = torch.zeros((taps, channels), device=x_TN.device)
            if cell.before is not None:
                inputs_KC[1:] = cell.before.flatten()[: (taps - 1) * channels].view(taps - 1, channels)
            for token in range(cell.first, cell.first + cell.count):
                inputs_KC = torch.cat([inputs_KC[1:], x_TN[token : token + 1, :channels]])
                out_TC[token] = activated((inputs_KC * weight_KC).sum(dim=0), Activation.SILU)
            kept = torch.zeros((rows.stop - rows.start) * own.value_dim, device=x_TN.device)
            kept[: (taps - 1) * channels] = inputs_KC[1:].flatten()
            _put(kv, rows, cell.pages, kept.view(-1, own.value_dim))
        return out_TC

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
        """See ``Ops.delta_rule``."""
        own = kv.shape.kept_states
        rows = slice(layer * own.layer_rows, layer * own.layer_rows + own.matrix_rows)
        shape = (own.heads, own.key_dim, own.value_dim)
        out_THV = torch.empty((len(qkv_TC), own.heads, own.value_dim), device=qkv_TC.device)
        for cell in self._cells(kv, rows, batch):
            state_HKV = torch.zeros(shape, device=qkv_TC.device) if cell.before is None else cell.before.view(shape)
            for token in range(cell.first, cell.first + cell.count):
                q_HK, k_HK, v_HV = _split(qkv_TC[token], own)
                beta_H = torch.sigmoid(gates_TN[token, beta : beta + own.heads])
                speed_H = torch.nn.functional.softplus(gates_TN[token, decay : decay + own.heads] + shifts_H)
                state_HKV = state_HKV * torch.exp(-rates_H * speed_H)[:, None, None]
                known_HV = (state_HKV * k_HK[:, :, None]).sum(dim=1)
                change_HV = (v_HV - known_HV) * beta_H[:, None]
                state_HKV = state_HKV + k_HK[:, :, None] * change_HV[:, None, :]
                out_THV[token] = (state_HKV * q_HK[:, :, None]).sum(dim=1)
            _put(kv, rows, cell.pages, state_HKV.reshape(-1, own.value_dim))
        return out_THV.flatten(1)

    def _cells(self, kv: ReferenceKv, rows: slice, batch: StepBatch) -> Iterator[_Cell]:
        """All cells that the step enters, in order; what one leaves behind is read by the next."""
        own, parts = kv.shape.kept_states, kv.shape.state_parts
        assert batch.states_SW is not None, "a step of recurrent layers brings the pages of its states"
        for s in range(len(batch.starts_S1) - 1):
            token, end = int(batch.starts_S1[s]), int(batch.starts_S1[s + 1])
            base = own.first_cell(int(batch.positions_T[token])) if token < end else 0
            while token < end:
                position = int(batch.positions_T[token])
                count = min(end - token, (position // own.cell + 1) * own.cell - position)
                before = None
                if position > 0:
                    at = (own.first_cell(position) - base) * parts
                    before = _taken(kv, rows, batch.states_SW[s, at : at + parts])
                at = (position // own.cell - base) * parts
                yield _Cell(token, count, before, batch.states_SW[s, at : at + parts])
                token += count


def _split(qkv_C: Tensor, own: StateShape) -> tuple[Tensor, Tensor, Tensor]:
    """Queries and keys of every head, normed, and values."""
    keys = own.key_heads * own.key_dim
    q_C, k_C, v_C = qkv_C.split_with_sizes([keys, keys, own.heads * own.value_dim])

    def normed(x_C: Tensor) -> Tensor:
        x_GK = x_C.view(own.key_heads, own.key_dim)
        unit_GK = x_GK * torch.rsqrt(x_GK.square().sum(dim=1, keepdim=True) + 1e-6)
        return unit_GK.repeat_interleave(own.heads // own.key_heads, dim=0)

    return normed(q_C) / own.key_dim**0.5, normed(k_C), v_C.view(own.heads, own.value_dim)


def _places(kv: ReferenceKv, rows: slice, pages: NDArray[np.int32]) -> tuple[Tensor, Tensor]:
    """Page and place in it of each of these rows of a state."""
    parts, places = np.divmod(np.arange(rows.start, rows.stop), kv.shape.state_rows_a_page)
    device = kv.states.device
    return torch.from_numpy(pages[parts].astype(np.int64)).to(device), torch.from_numpy(places).to(device)


def _taken(kv: ReferenceKv, rows: slice, pages: NDArray[np.int32]) -> Tensor:
    return kv.states[_places(kv, rows, pages)]


def _put(kv: ReferenceKv, rows: slice, pages: NDArray[np.int32], values: Tensor) -> None:
    kv.states[_places(kv, rows, pages)] = values


# MERGED: The oracle's operations over KV memory, tile by tile, and attention without one.
# MERGED:
# MERGED: One of the parts that ``reference`` puts together; what happens in a tile is in
# MERGED: ``reference_attention``.  This module
# MERGED: imports torch.


class ReferenceAttention:
    """See ``ops_attention.AttentionOps``."""

    def __init__(
        self,
        form: TorchForm,
        heads_linear: Callable[..., Tensor],
    ) -> None:
        """``heads_linear``: that of the products."""
        self._form = form
        self._heads_linear = heads_linear

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
        place, tokens = self._places(kv, layer, batch)
        positions_T = self._form.indices(batch.positions_T)
        turns_T3 = None if batch.turns_T3 is None else self._form.indices(batch.turns_T3)
        k_TGC = rotated(k_TN.reshape(-1, kv_heads, key_dim), rope, positions_T, turns_T3)
        kv.put_keys(place, tokens, k_TGC)
        kv.put_values(place, tokens, v_TN.reshape(-1, kv_heads, value_dim))
        q_THC = rotated(q_TN.reshape(len(q_TN), heads, key_dim), rope, positions_T, turns_T3)
        if q_scale is not None:
            q_THC = q_THC * q_scale[positions_T, None, None]
        return q_THC.to(self._form.dtype)

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
        place, tokens = self._places(kv, layer, batch)
        turned_T1R = rotated(latent_TC[:, None, plain:], rope, self._form.indices(batch.positions_T))
        normed_TC = self._form.tiles.map(lambda tile: rms_norm(tile, norm, eps), latent_TC[:, :plain])
        kv.put_keys(place, tokens, torch.cat([normed_TC.unsqueeze(1), turned_T1R], dim=-1))

    def latent_query(
        self, q_TN: Tensor, absorb: PackedLinear, rope: ReferenceRope, kv: ReferenceKv, batch: StepBatch, *, heads: int
    ) -> Tensor:
        """See ``Ops.latent_query``."""
        q_THN = q_TN.view(len(q_TN), heads, -1)
        absorbed_TN = self._heads_linear(q_THN[..., : absorb.k].to(self._form.dtype), absorb, heads=heads)
        turned_THR = rotated(q_THN[..., absorb.k :], rope, self._form.indices(batch.positions_T))
        return torch.cat([absorbed_TN.view(len(q_TN), heads, -1), turned_THR.to(self._form.dtype)], dim=-1)

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
        until: int | None = None,
        sparse: Sparse | None = None,
    ) -> Tensor:
        """See ``Ops.paged_attention``."""
        rule = Rule(scale, window, chunk, softcap, sinks_H, until, sparse)
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
                seen = (rule.seen(position)[0], rule.seen(position + count - 1)[1])
                blocks = block + 1 if until is None else blocks_of(until, PAGE_TOKENS)
                rows, pages = slice(token, token + count), self._form.indices(table_SP[s, :blocks])
                k_GNC, v_GNC = kv.gathered(place, pages, seen)
                out_THC[rows] = attend_tile(q_THC[rows], k_GNC, v_GNC, position, rule).to(self._form.dtype)
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
        return once.attend(qkv_TN, starts_S1, rope, rows_T, self._form.dtype)

    def _places(self, kv: ReferenceKv, layer: int, batch: StepBatch) -> tuple[int, tuple[Tensor, Tensor]]:
        """The layer's place in its pages; of every token, page and place in it."""
        place, paged_SP = kv.table(layer, batch)
        starts_S1, positions_T, table_SP = map(on_host, (batch.starts_S1, batch.positions_T, paged_SP))
        sequences_T = np.repeat(np.arange(len(starts_S1) - 1), np.diff(starts_S1))
        pages_T = table_SP[sequences_T, positions_T // PAGE_TOKENS]
        return place, (self._form.indices(pages_T), self._form.indices(positions_T % PAGE_TOKENS))


# MERGED: The oracle's operations over packed matrices.  One of the parts that ``reference`` puts together.
# MERGED:
# MERGED: This module imports torch.


class ReferenceProducts:
    """See ``ops_products.ProductOps``."""

    def __init__(self, form: TorchForm, gated: Callable[[Tensor, Gate], Tensor]) -> None:
        """``gated``: that of the rows."""
        self._form = form
        self._gated = gated

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Tensor:
        """See ``Ops.embed``."""
        ids_T = self._form.indices(tokens_T)
        return torch.cat([part[ids_T] for part in table.data], dim=1) * scale

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Tensor) -> None:
        """See ``Ops.embed_add``."""
        hidden_TD += self.embed(table, positions_T)

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        """See ``Ops.linear``."""
        sums, begin = [], 0
        for part, end in zip(weight.data, weight.segments, strict=True):
            sums.append(self._form.tiles.product(x_TK[:, begin:end].float(), part))
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
        if not isinstance(adapters, ReferenceAdapters):
            raise KernelError("the adapters are another backend's")
        slots_T = row_slots(batch, wanted=wanted)
        lora_add(x_TK, slots_T, adapters, site, out_TN, linear=self.linear)

    def heads_linear(self, x_THK: Tensor, weight: PackedLinear, *, heads: int) -> Tensor:
        """See ``Ops.heads_linear``."""
        x_THK = x_THK.view(len(x_THK), heads, weight.k)
        (whole,) = weight.data
        products = [
            self._form.tiles.product(x_THK[:, head].float(), rows.contiguous())
            for head, rows in enumerate(whole.chunk(heads))
        ]
        return torch.cat(products, dim=1).to(self._form.dtype)

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> Routes:
        """See ``Ops.route``."""
        rows = [route(row_1E, routing, bias_E) for row_1E in logits_TE.clone()[:, None]]
        ids_TK, weights_TK = torch.cat([row.ids for row in rows]), torch.cat([row.weights for row in rows])
        return Routes(Chosen(ids_TK, weights_TK), routing.top_k)

    def experts_add(self, x_TK: Tensor, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Tensor) -> None:
        """See ``Ops.experts_add``."""
        hidden_TD += mixed(
            x_TK, routes.data, experts, linear=self.linear, gated=lambda wide_RN: self._gated(wide_RN, kind)
        )

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See ``Ops.routes_to_numpy``."""
        return routes.data.ids.cpu().numpy().astype(np.int32), numpy_of(routes.data.weights)


# MERGED: The oracle's operations that work row by row: tiles of rows through the functions of
# MERGED: ``reference_rows``.
# MERGED:
# MERGED: One of the parts that ``reference`` puts together.  This module imports torch.


class ReferenceRows:
    """See ``ops_rows.RowOps``."""

    def __init__(self, form: TorchForm) -> None:
        self._form = form

    def features(self, batch: StepBatch, width: int) -> Tensor:
        """See ``Ops.features``.  Raises ValueError where the batch brings none of that width."""
        return self._form.tensor(np.array(batch.features(width), np.float32))

    def tap(self, hidden_TD: Tensor, batch: StepBatch, place: int) -> None:
        """See ``Ops.tap``.  Raises ValueError where there is not enough room."""
        if batch.taps_RW is not None:
            batch.hand_out(numpy_of(self.rows(hidden_TD, batch.sample_rows_R)), place)

    def place_rows(self, hidden_TD: Tensor, batch: StepBatch) -> None:
        """See ``Ops.place_rows``."""
        if batch.given is not None:
            hidden_TD[self._form.indices(batch.given.rows_G)] = batch.given.values_GD

    def joined_rows(self, x_TK: Tensor, count: int) -> Tensor:
        """See ``Ops.joined_rows``."""
        return x_TK.reshape(-1, count * x_TK.shape[1])

    def rows(self, x_TD: Tensor, rows_R: NDArray[np.int32]) -> Tensor:
        """See ``Ops.rows``."""
        return x_TD[self._form.indices(rows_R)]

    def rms_norm(self, hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        return self._form.tiles.map(lambda tile: rms_norm(tile, weight_D, eps), hidden_TD).to(self._form.dtype)

    def norm_add(self, hidden_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> None:
        """See ``Ops.norm_add``."""
        hidden_TD += self._form.tiles.map(lambda tile: rms_norm(tile, weight_D, eps), x_TD)

    def layer_norm(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        """See ``Ops.layer_norm``."""
        return self._form.tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD).to(
            self._form.dtype
        )

    def layer_norm_in_place(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        """See ``Ops.layer_norm_in_place``."""
        hidden_TD.copy_(self._form.tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD))

    def norm_heads(self, x_TN: Tensor, weight_C: Tensor, eps: float, *, first: int, count: int) -> None:
        """See ``Ops.norm_heads``."""
        size = len(weight_C)

        def norm(tile: Tensor) -> Tensor:
            groups = tile.view(-1, count, size)
            return (groups * torch.rsqrt(groups.square().mean(dim=2, keepdim=True) + eps) * weight_C).flatten(1)

        columns = slice(first, first + count * size)
        x_TN[:, columns] = self._form.tiles.map(norm, x_TN[:, columns])

    def gated(self, gate_up_T2I: Tensor, kind: Gate = SILU) -> Tensor:
        """See ``Ops.gated``."""
        return self._form.tiles.map(lambda tile: gated(tile, kind), gate_up_T2I).to(self._form.dtype)

    def activate(self, x_TI: Tensor, kind: Activation, alpha: float = 1.0) -> Tensor:
        """See ``Ops.activate``."""
        return self._form.tiles.map(lambda tile: activated(tile, kind, alpha), x_TI).to(self._form.dtype)

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
        x_TN.copy_(self._form.tiles.map(lambda tile: softcapped(tile, cap), x_TN))

    def gated_norm(self, x_TN: Tensor, gate_TM: Tensor, weight_C: Tensor, eps: float, *, first: int) -> Tensor:
        """See ``Ops.gated_norm``."""
        both_TNN = torch.cat([x_TN, gate_TM[:, first : first + x_TN.shape[1]]], dim=1)
        return self._form.tiles.map(lambda tile: gated_norm(tile, weight_C, eps), both_TNN).to(self._form.dtype)

    def sigmoid_gated(self, x_TN: Tensor, gate_TN: Tensor) -> Tensor:
        """See ``Ops.sigmoid_gated``."""
        gated_TN = self._form.tiles.map(torch.sigmoid, gate_TN) * x_TN.view(gate_TN.shape).float()
        return gated_TN.to(self._form.dtype)

    def gated_add(self, hidden_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> None:
        """See ``Ops.gated_add``."""
        hidden_TD += self._form.tiles.map(torch.sigmoid, gate_T1) * x_TD


# MERGED: The oracle's weights, KV memory and tables: what is made once a model, and looking inside arrays.
# MERGED:
# MERGED: One of the parts that ``reference`` puts together.  This module imports torch.


class ReferenceModel:
    """See ``ops_model.ModelOps``."""

    def __init__(self, form: TorchForm, *, coded: bool = False) -> None:
        """``coded``: keys and values are kept as codes (``kv_types``), not in the compute type."""
        self._form = form
        self._coded = coded

    def pack_linear(self, weight_NK: Any, *, segments: tuple[int, ...] | None = None) -> PackedLinear:
        """See ``Ops.pack_linear``: one contiguous fp32 matrix a segment, rounded to the compute type."""
        return self._packed(self._form.tensor(np.asarray(weight_NK, np.float32)).to(self._form.dtype).float(), segments)

    def pack_compressed(
        self, parts: Sequence[AnyCompressed], *, segments: tuple[int, ...] | None = None
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
        data = ReferenceExperts(list(gate_up), list(down), wide, narrow, weighs_input)
        if {(w.n, w.k) for w in gate_up} != {(2 * down[0].k, gate_up[0].k)} or len({(w.n, w.k) for w in down}) > 1:
            raise ValueError("all experts of a layer have one shape")
        nbytes = sum(weight.nbytes for weight in (*gate_up, *down))
        return PackedExperts(len(down), gate_up[0].k, down[0].k, down[0].n, data, nbytes)

    def pack_quantised(
        self, parts: list[QuantizedMatrix], *, segments: tuple[int, ...] | None = None, threads: int = 1
    ) -> PackedLinear | None:
        """See ``Ops.pack_quantised``: dequantised to fp32, so that the products are those of the weights."""
        whole_NK = np.concatenate([part.dequantised() for part in parts])
        return self._packed(self._form.tensor(whole_NK), segments)

    def adapter_table(self, sites: Sequence[PackedLinear], slots: int) -> AdapterTable:
        """See ``Ops.adapter_table``."""
        return ReferenceAdapters(sites, slots, self.pack_linear)

    def loading(self, nbytes: int) -> Loading | None:
        """See ``Ops.loading``: it cannot."""
        return None

    def vector(self, weight_D: Any) -> Tensor:
        """See ``Ops.vector``."""
        return self._form.tensor(np.asarray(weight_D, np.float32))

    def new_kv(self, shape: KvShape, *, pages: int, memory: memoryview | None = None) -> ReferenceKv:
        """See ``Ops.new_kv``.  ``memory`` is served on the CPU only, and codes have no states beside them (KernelError
        elsewhere)."""
        if self._coded and shape.states is not None:
            raise KernelError(f"states of recurrent layers are in fp32: the pages they lie in cannot be in {FP8_E4M3}")
        nbytes, dtype = pages * self.page_bytes(shape), torch.uint8 if self._coded else self._form.dtype
        if memory is None:
            return kv_over(torch.zeros(nbytes // dtype.itemsize, dtype=dtype, device=self._form.device), shape)
        if self._form.device.type != "cpu":
            raise KernelError(f"KV memory on {self._form.device} cannot lie in the host's memory")
        if memory.nbytes < nbytes:
            raise KernelError(f"{pages} pages need {nbytes} bytes of KV memory, given are {memory.nbytes}")
        return kv_over(torch.frombuffer(memory, dtype=dtype, count=nbytes // dtype.itemsize), shape)

    def page_bytes(self, shape: KvShape) -> int:
        """See ``Ops.page_bytes``."""
        return shape.page_bytes(FP8_E4M3 if self._coded else "bf16" if self._form.dtype.itemsize == 2 else "fp32")

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
        return rope if axes_C2 is None else replace(rope, axes=self._form.indices(np.array(axes_C2, np.int32)))

    def angle_table(
        self, angles_PC2: NDArray[np.float64], attention_factor: float = 1.0, *, interleaved: bool = False
    ) -> ReferenceRope:
        """See ``Ops.angle_table``."""
        table = np.stack([np.cos(angles_PC2), np.sin(angles_PC2)], axis=1) * attention_factor
        return ReferenceRope(self._form.tensor(table.astype(np.float32)), interleaved)

    def compute(self, values: NDArray[Any]) -> Tensor:
        """See ``Ops.compute``."""
        return self._form.tensor(np.asarray(values, np.float32)).to(self._form.dtype)

    def hidden(self, values: NDArray[Any]) -> Tensor:
        """See ``Ops.hidden``."""
        return self._form.tensor(np.array(values, np.float32))

    def to_numpy(self, array: Tensor) -> NDArray[np.float32]:
        """See ``Ops.to_numpy``."""
        return numpy_of(array)

    def _packed(self, whole: Tensor, segments: tuple[int, ...] | None) -> PackedLinear:
        (n, k), ends = whole.shape, segments or (whole.shape[1],)
        begins = (0, *ends[:-1])
        parts = [whole[:, a:b].contiguous() for a, b in zip(begins, ends, strict=True)]
        return PackedLinear(n=n, k=k, segments=tuple(ends), data=parts, nbytes=whole.nbytes)


COMPUTE_TYPES: Mapping[str, torch.dtype] = MappingProxyType({"bf16": torch.bfloat16, "fp32": torch.float32})


class ReferenceOps:
    """See ``ops.Ops`` for what each operation does."""

    def __init__(self, *, compute_dtype: str, device: str = "cpu", kv_dtype: str | None = None) -> None:
        """``kv_dtype``: what KV pages are in; None: the compute type.

        Raises KernelError for an unknown type or a device that torch does not find.
        """
        _check(compute_dtype, device, kv_dtype)
        self.compute_dtype = compute_dtype
        self.device = torch.device(device)
        numerics = f"torch-{arithmetic_of(self.device)}-{torch.__version__}-{compute_dtype}"
        self.numerics = numerics_with(numerics, kv_dtype)
        self.kv_dtype = kv_dtype or compute_dtype
        self.kv_layout = f"plain-1-{self.kv_dtype}"
        if self.device.type == "cpu":
            torch.set_num_threads(1)  # a library may cut K by threads
        form = TorchForm(self.device, COMPUTE_TYPES[compute_dtype], RowTiles(self.device))
        model = ReferenceModel(form, coded=kv_dtype is not None)
        self.pack_linear, self.pack_compressed = model.pack_linear, model.pack_compressed
        self.pack_experts, self.pack_quantised = model.pack_experts, model.pack_quantised
        self.adapter_table, self.loading = model.adapter_table, model.loading
        self.vector, self.new_kv = model.vector, model.new_kv
        self.page_bytes, self.rope_table = model.page_bytes, model.rope_table
        self.angle_table, self.compute = model.angle_table, model.compute
        self.hidden, self.to_numpy = model.hidden, model.to_numpy
        rows = ReferenceRows(form)
        self.features, self.tap = rows.features, rows.tap
        self.place_rows, self.joined_rows = rows.place_rows, rows.joined_rows
        self.rows, self.rms_norm = rows.rows, rows.rms_norm
        self.norm_add, self.layer_norm = rows.norm_add, rows.layer_norm
        self.layer_norm_in_place, self.norm_heads = rows.layer_norm_in_place, rows.norm_heads
        self.gated, self.activate = rows.gated, rows.activate
        self.add, self.add_bias = rows.add, rows.add_bias
        self.scale, self.softcap = rows.scale, rows.softcap
        self.gated_norm, self.sigmoid_gated, self.gated_add = rows.gated_norm, rows.sigmoid_gated, rows.gated_add
        products = ReferenceProducts(form, rows.gated)
        self.embed, self.embed_add = products.embed, products.embed_add
        self.linear, self.linear_add = products.linear, products.linear_add
        self.lora_add, self.heads_linear = products.lora_add, products.heads_linear
        self.route, self.experts_add = products.route, products.experts_add
        self.routes_to_numpy = products.routes_to_numpy
        attention = ReferenceAttention(form, products.heads_linear)
        self.rope_and_write, self.latent_write = attention.rope_and_write, attention.latent_write
        self.latent_query, self.paged_attention = attention.latent_query, attention.paged_attention
        self.attention = attention.attention
        states = ReferenceStates()
        self.causal_conv, self.delta_rule = states.causal_conv, states.delta_rule
        head = ReferenceHead()
        self.sample, self.token_logprobs = head.sample, head.token_logprobs

    def page_writer(self, kv: ReferenceKv, memory: memoryview, layout: str) -> PageWriter:
        """See ``page_writing.WritesPages``."""
        return TorchPageWriter(kv, memory, layout)

    def record(self, steps: Steps, kv: ReferenceKv, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """See ``Ops.record``: run as they are."""
        return DirectProgram(self, steps, kv)


def _check(compute_dtype: str, device: str, kv_dtype: str | None) -> None:
    """Raises KernelError."""
    if compute_dtype not in COMPUTE_TYPES:
        raise KernelError(f"compute type {compute_dtype!r} is not one of bf16, fp32")
    if kv_dtype not in (None, FP8_E4M3):
        raise KernelError(f"KV pages in {kv_dtype!r}: there is {FP8_E4M3}, or None for the compute type")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise KernelError(f"device {device!r} was asked for, but torch finds no CUDA device")
