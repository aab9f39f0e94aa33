"""The oracle's operations over KV memory, tile by tile, and attention without one.

One of the parts that ``reference`` puts together; what happens in a tile is in ``reference_attention``.  This module
imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import PackedLinear, StepBatch
from penstock.kernels.reference_attention import (
    ReferenceKv,
    ReferenceRope,
    Rule,
    attend_tile,
    rotated,
)
from penstock.kernels.reference_once import Once
from penstock.kernels.reference_rows import rms_norm
from penstock.kernels.reference_tiles import TorchForm, on_host
from penstock.kernels.sparse import Sparse
from penstock.reach import blocks_of
from penstock.types import PAGE_TOKENS


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
