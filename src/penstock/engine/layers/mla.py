"""Multi-head latent attention (MLA, arXiv:2405.04434) over paged KV memory, in its absorbed form: the matrix that makes
keys of latent vectors is applied to queries, the one that makes values to what a query read.

Reading prompts and writing answers are the same computation, so a token has the same bits either way.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.layers.norm import LinearLayer, NormLayer, OutputProjection, RmsNorm
from penstock.kernels.operands import Array, AttentionSpec, PackedLinear, StepBatch
from penstock.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class QueryDown:
    """Queries come by way of a shorter, normed vector."""

    linear: LinearLayer
    norm: RmsNorm


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentAttention:
    """Attention block of layer ``layer``."""

    layer: int
    heads: int
    spec: AttentionSpec
    norm: NormLayer
    query_down: QueryDown | None
    query: LinearLayer
    latent: LinearLayer
    latent_norm: RmsNorm
    absorb: PackedLinear
    values: PackedLinear
    out: OutputProjection
    rope: Array

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Array:
        """Latent vectors of these tokens go to their pages; returns the queries, compute [T, H, C]."""
        x_TD, norm = self.norm(ops, hidden_TD), self.latent_norm
        latent_TC = self.latent(ops, x_TD)
        ops.latent_write(latent_TC, self.rope, kv, self.layer, batch, norm=norm.weight, eps=norm.eps)
        if self.query_down is not None:
            x_TD = self.query_down.norm(ops, self.query_down.linear(ops, x_TD))
        return ops.latent_query(self.query(ops, x_TD), self.absorb, self.rope, kv, batch, heads=self.heads)

    def mix(self, ops: Ops, q_THC: Array, batch: StepBatch, kv: Array) -> Array:
        """What every head of a token reads from its sequence's pages, as values; compute [T, H value_dim]."""
        mixed_THC = ops.paged_attention(q_THC, kv, self.layer, batch, self.spec)
        return ops.heads_linear(mixed_THC, self.values, heads=self.heads)

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        self.out.add_to(ops, mixed_TK, hidden_TD)
