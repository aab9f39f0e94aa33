# ruff: noqa: N815  (field names carry shapes)
"""A draft head of EAGLE-3 (arXiv:2503.01840): one decoder layer that guesses what a model will draw.

Position i reads the model's hidden states there, side by side, and the token behind them, i + 1; what it says is token
i + 2.  A further guess reads what the layer itself said instead of hidden states.  Knows nothing of requests; positions
may be counted from anywhere.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.layers.attention import SelfAttention
from penstock.engine.layers.mlp import GatedMlp
from penstock.engine.layers.norm import LinearLayer, OutputProjection, RmsNorm
from penstock.kernels.operands import Activation, Array, AttentionSpec, Gate, KvShape, PackedLinear, StepBatch
from penstock.kernels.ops import Ops
from penstock.weights.eagle import LoadedDraftHead
from penstock.weights.load import LoadedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedProduct:
    """x W^T of two vectors side by side, each with its own norm and its own columns of W."""

    embed_norm: RmsNorm
    embed: PackedLinear
    feature_norm: RmsNorm
    feature: PackedLinear

    def __call__(self, ops: Ops, embed_TD: Array, feature_TD: Array) -> Array:
        """hidden [T, N]."""
        out_TN = ops.linear(self.embed_norm(ops, embed_TD), self.embed)
        ops.linear_add(self.feature_norm(ops, feature_TD), self.feature, out_TN)
        return out_TN


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleHead:
    """Weights and sizes; ``first`` and ``further`` are what is computed."""

    tapped: tuple[int, ...]  # layers behind which the model's hidden states are read
    hidden: int
    kv: KvShape
    ids_V: NDArray[np.int32] | None  # the model's token of each output; None: the same
    embed: PackedLinear
    fuse: LinearLayer
    qkv: PairedProduct
    attention: SelfAttention
    mlp: GatedMlp
    norm: RmsNorm
    output: PackedLinear

    @property
    def first(self) -> HeadPass:
        """Reads the model's hidden states."""
        return HeadPass(self, len(self.tapped) * self.hidden, self.fuse)

    @property
    def further(self) -> HeadPass:
        """Reads what a pass before it said (its program's ``hidden``)."""
        return HeadPass(self, self.hidden, None)


@dataclass(frozen=True, slots=True)
class HeadPass:
    """A ``RecordableModel``; a batch brings features [T, width]."""

    head: EagleHead
    width: int
    fuse: LinearLayer | None

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        head = self.head
        embed_TD = ops.embed(head.embed, batch.tokens_T)
        feature_TD = ops.features(batch, self.width)
        if self.fuse is not None:
            feature_TD = self.fuse(ops, ops.activate(feature_TD, Activation.NONE))
        qkv_TN = head.qkv(ops, embed_TD, feature_TD)
        attention = head.attention
        sizes = {"heads": attention.heads, "kv_heads": attention.kv_heads}
        q_THC = ops.rope_and_write(qkv_TN, attention.rope, kv, attention.layer, batch, **sizes)
        rows_R = batch.sample_rows_R
        if not len(rows_R):
            return None
        mixed_RK = ops.rows(attention.mix(ops, q_THC, batch, kv), rows_R)
        hidden_RD = ops.rows(feature_TD, rows_R)
        attention.add_to(ops, mixed_RK, hidden_RD)
        head.mlp.add_to(ops, hidden_RD)
        return hidden_RD

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(self.head.norm(ops, hidden_RD), self.head.output)


def build_head(loaded: LoadedDraftHead, model: LoadedModel, ops: Ops, positions: int) -> EagleHead:
    """The head over packed weights and what it shares with its model, for positions below ``positions``."""
    spec, weights = loaded.spec, loaded.weights
    attention, kv_heads = spec.attention, spec.attention.kv_heads

    def norm(name: str) -> RmsNorm:
        return RmsNorm(weights[name], spec.eps)

    def shared(name: str, instead: str) -> Any:
        return weights.get(name) or model.weights.get(instead) or model.weights["embed"]

    rope = attention.rope
    table = rope and ops.rope_table(rope.inv_freq(), positions, rope.attention_factor, interleaved=rope.interleaved)
    qkv = PairedProduct(
        embed_norm=norm("norm_embed"),
        embed=weights["qkv_embed"],
        feature_norm=norm("norm_feature"),
        feature=weights["qkv_feature"],
    )
    block = SelfAttention(
        layer=0,
        heads=attention.heads,
        kv_heads=kv_heads,
        spec=AttentionSpec(attention.scale),
        norm=norm("norm_feature"),
        qkv=LinearLayer(weights["qkv_feature"]),
        out=OutputProjection(LinearLayer(weights["out"])),
        rope=table,
    )
    gate = Gate(activation=spec.mlp.activation)
    return EagleHead(
        tapped=spec.tapped,
        hidden=spec.hidden,
        kv=KvShape.plain(layers=1, kv_heads=kv_heads, head_dim=attention.head_dim),
        ids_V=loaded.ids_V,
        embed=shared("embed", "embed"),
        fuse=LinearLayer(weights["fuse"]),
        qkv=qkv,
        attention=block,
        mlp=GatedMlp(
            norm("norm_mlp"), LinearLayer(weights["gate_up"]), OutputProjection(LinearLayer(weights["down"])), gate
        ),
        norm=norm("norm"),
        output=shared("head", "head"),
    )
