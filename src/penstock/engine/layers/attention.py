"""Self-attention, grouped queries included: causal over paged KV memory, or of whole texts, which keeps nothing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from penstock.engine.layers.norm import LinearLayer, NormLayer, OutputProjection, RmsNorm
from penstock.kernels.operands import Array, AttentionSpec, PackedLinear, StepBatch
from penstock.kernels.ops import Ops


class AttentionBlock(Protocol):
    """A layer's first block."""

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Any:
        """What later tokens need of these goes to their pages; returns what ``mix`` goes on with: the queries, and what
        other state of the block."""
        ...

    def mix(self, ops: Ops, written: Any, batch: StepBatch, kv: Array) -> Array:
        """What every token reads from its sequence's pages, before the output projection."""
        ...

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        ...


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of queries and keys, each over ``width`` columns: a head, or all heads together."""

    q: RmsNorm
    k: RmsNorm
    q_groups: int
    k_groups: int
    k_first: int  # column of the first key

    def __call__(self, ops: Ops, qkv_TN: Array) -> None:
        """In place."""
        ops.norm_heads(qkv_TN, self.q.weight, self.q.eps, first=0, count=self.q_groups)
        ops.norm_heads(qkv_TN, self.k.weight, self.k.eps, first=self.k_first, count=self.k_groups)


@dataclass(frozen=True, slots=True, kw_only=True)
class SelfAttention:
    """Attention block of layer ``layer``; ``qkv`` is one matrix: queries, keys, values."""

    layer: int
    heads: int
    kv_heads: int
    spec: AttentionSpec
    norm: NormLayer
    qkv: LinearLayer
    out: OutputProjection
    rope: Array | None  # None: queries and keys know no position
    head_norms: HeadNorms | None = None
    q_scale: Array | None = None  # by absolute position

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Array:
        """Keys and values of these tokens go to their pages; returns the queries, compute [T, H, C]."""
        return self.write_normed(ops, self.norm(ops, hidden_TD), batch, kv)

    def write_normed(self, ops: Ops, x_TD: Array, batch: StepBatch, kv: Array) -> Array:
        """The same for what the norm made of the tokens."""
        qkv_TN = self.qkv(ops, x_TD)
        if self.head_norms is not None:
            self.head_norms(ops, qkv_TN)
        sizes = {"heads": self.heads, "kv_heads": self.kv_heads}
        return ops.rope_and_write(qkv_TN, self.rope, kv, self.layer, batch, **sizes, q_scale=self.q_scale)

    def mix(self, ops: Ops, q_THC: Array, batch: StepBatch, kv: Array) -> Array:
        """What every token reads from its sequence's pages, before the output projection; compute [T, H C]."""
        return ops.paged_attention(q_THC, kv, self.layer, batch, self.spec)

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        self.out.add_to(ops, mixed_TK, hidden_TD)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedSelfAttention:
    """Attention whose output is multiplied, number by number, by a logistic function of what it reads."""

    attention: SelfAttention
    gate: PackedLinear

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> tuple[Array, Array]:
        """Keys and values of these tokens go to their pages; returns queries and gates."""
        x_TD = self.attention.norm(ops, hidden_TD)
        return self.attention.write_normed(ops, x_TD, batch, kv), ops.linear(x_TD, self.gate)

    def mix(self, ops: Ops, written: tuple[Array, Array], batch: StepBatch, kv: Array) -> Array:
        """What every token reads from its sequence's pages, gated; compute [T, H C]."""
        q_THC, gate_TN = written
        return ops.sigmoid_gated(self.attention.mix(ops, q_THC, batch, kv), gate_TN)

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        self.attention.add_to(ops, mixed_TK, hidden_TD)


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderAttention:
    """Attention block whose tokens read all of their text; every text of a batch is there as a whole."""

    heads: int
    kv_heads: int
    scale: float
    norm: NormLayer
    qkv: LinearLayer
    out: OutputProjection
    rope: Array | None = None
    head_norms: HeadNorms | None = None
    window: int | None = None
    softcap: float | None = None

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Array:
        """Nothing is kept; returns queries, keys and values, hidden [T, N]."""
        qkv_TN = self.qkv(ops, self.norm(ops, hidden_TD))
        if self.head_norms is not None:
            self.head_norms(ops, qkv_TN)
        return qkv_TN

    def mix(self, ops: Ops, qkv_TN: Array, batch: StepBatch, kv: Array) -> Array:
        """What every token reads from its text, before the output projection; compute [T, H C]."""
        return ops.attention(
            qkv_TN,
            batch.starts_S1,
            heads=self.heads,
            kv_heads=self.kv_heads,
            scale=self.scale,
            window=self.window,
            softcap=self.softcap,
            rope=self.rope,
        )

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        self.out.add_to(ops, mixed_TK, hidden_TD)
