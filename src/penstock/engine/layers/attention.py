"""Causal self-attention with rotary positions over paged KV memory, grouped queries included."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.layers.norm import RmsNorm
from penstock.kernels.ops import Array, Ops, PackedLinear, StepBatch


@dataclass(frozen=True, slots=True)
class SelfAttention:
    """Attention block of layer ``layer``; ``qkv`` is one matrix: queries, keys, values."""

    layer: int
    heads: int
    kv_heads: int
    scale: float
    norm: RmsNorm
    qkv: PackedLinear
    out: PackedLinear
    rope: Array

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Array:
        """Keys and values of these tokens go to their pages; returns the queries, compute [T, H, C]."""
        qkv_TN = ops.linear(self.norm(ops, hidden_TD), self.qkv)
        return ops.rope_and_write(qkv_TN, self.rope, kv, self.layer, batch, heads=self.heads, kv_heads=self.kv_heads)

    def mix(self, ops: Ops, q_THC: Array, batch: StepBatch, kv: Array) -> Array:
        """What every token reads from its sequence's pages, before the output projection; compute [T, H C]."""
        return ops.paged_attention(q_THC, kv, self.layer, batch, scale=self.scale)

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        ops.linear_add(mixed_TK, self.out, hidden_TD)
