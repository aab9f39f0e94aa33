"""The decoder that most families are (first Llama, arXiv:2302.13971), as its ``weights.decoder.Decoder`` says.

Knows the order of operations and nothing about files, batching or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.engine.layers.attention import SelfAttention
from penstock.engine.layers.mlp import GatedMlp
from penstock.engine.layers.norm import RmsNorm
from penstock.kernels.ops import Array, Ops, StepBatch
from penstock.weights.decoder import Decoder
from penstock.weights.rope import Rope
from penstock.weights.spec import ModelSpec


class RopeTables:
    """Tables of rotary positions, one a recipe, whatever the number of layers that share it."""

    def __init__(self, ops: Ops, max_positions: int) -> None:
        self._ops = ops
        self._max_positions = max_positions
        self._tables: dict[Rope, Array] = {}

    def of(self, rope: Rope | None) -> Array:
        """The table, made when it is first asked for; None where nothing is rotated."""
        if rope is None:
            return None
        if rope not in self._tables:
            self._tables[rope] = self._ops.rope_table(rope.inv_freq(), self._max_positions, rope.attention_factor)
        return self._tables[rope]


class DecoderLayer:
    """One layer: attention, then MLP, each added to the residual stream."""

    def __init__(self, index: int, details: Decoder, weights: Mapping[str, Any], ropes: RopeTables) -> None:
        layer, eps = details.layers[index], details.norm_eps
        self.attention = SelfAttention(
            layer=index,
            heads=layer.attention.heads,
            kv_heads=layer.attention.kv_heads,
            scale=layer.attention.scale,
            norm=RmsNorm(weights[f"{index}.attention_norm"], eps),
            qkv=weights[f"{index}.qkv"],
            out=weights[f"{index}.out"],
            rope=ropes.of(layer.attention.rope),
        )
        self.mlp = GatedMlp(
            norm=RmsNorm(weights[f"{index}.mlp_norm"], eps),
            gate_up=weights[f"{index}.gate_up"],
            down=weights[f"{index}.down"],
        )

    def add_to(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> None:
        """hidden = layer(hidden), in place, for all tokens."""
        q_THC = self.attention.write(ops, hidden_TD, batch, kv)
        self.attention.add_to(ops, self.attention.mix(ops, q_THC, batch, kv), hidden_TD)
        self.mlp.add_to(ops, hidden_TD)

    def wanted(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Array | None:
        """The last layer: keys and values of all tokens, the rest for wanted rows only; hidden [R, D] or None."""
        q_THC = self.attention.write(ops, hidden_TD, batch, kv)
        rows_R = batch.sample_rows_R
        if not len(rows_R):
            return None
        mixed_RK = ops.rows(self.attention.mix(ops, q_THC, batch, kv), rows_R)
        hidden_RD = ops.rows(hidden_TD, rows_R)
        self.attention.add_to(ops, mixed_RK, hidden_RD)
        self.mlp.add_to(ops, hidden_RD)
        return hidden_RD


class DecoderModel:
    """See ``engine.models.port.Model``.  ``weights`` by the names of ``penstock.weights.decoder.layout``."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Any], ropes: RopeTables) -> None:
        details = spec.own(Decoder)
        self.embed = weights["embed"]
        self.layers = [DecoderLayer(index, details, weights, ropes) for index in range(spec.layers)]
        self.norm = RmsNorm(weights["norm"], details.norm_eps)
        self.head = self.embed if spec.tied else weights["head"]

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = ops.embed(self.embed, batch.tokens_T)
        for layer in self.layers[:-1]:
            layer.add_to(ops, hidden_TD, batch, kv)
        return self.layers[-1].wanted(ops, hidden_TD, batch, kv)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(self.norm(ops, hidden_RD), self.head)


def build(spec: ModelSpec, weights: Mapping[str, Any], ops: Ops, max_positions: int) -> DecoderModel:
    """The model over packed weights, for positions below ``max_positions``."""
    return DecoderModel(spec, weights, RopeTables(ops, max_positions))
