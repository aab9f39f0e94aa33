"""Causal self-attention over paged KV memory, grouped queries included."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.layers.linear import Linear, Output
from penstock.engine.layers.norm import Norm
from penstock.kernels.ops import Array, Ops, StepBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Attention block of layer ``layer``; ``qkv`` is one matrix: queries, keys, values."""

    layer: int
    heads: int
    kv_heads: int
    scale: float
    norm: Norm
    qkv: Linear
    out: Output
    rope: Array | None  # None: queries and keys know no position

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Array:
        """Keys and values of these tokens go to their pages; returns the queries, compute [T, H, C]."""
        qkv_TN = self.qkv(ops, self.norm(ops, hidden_TD))
        return ops.rope_and_write(qkv_TN, self.rope, kv, self.layer, batch, heads=self.heads, kv_heads=self.kv_heads)

    def mix(self, ops: Ops, q_THC: Array, batch: StepBatch, kv: Array) -> Array:
        """What every token reads from its sequence's pages, before the output projection; compute [T, H C]."""
        return ops.paged_attention(q_THC, kv, self.layer, batch, scale=self.scale)

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        self.out.add_to(ops, mixed_TK, hidden_TD)
