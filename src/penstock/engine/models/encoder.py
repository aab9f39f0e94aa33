"""The encoder that BERT and its relatives are (arXiv:1810.04805), built from an ``EncoderConfig``.

Knows the order of operations and nothing about files or batching.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.layers.attention import EncoderAttention
from penstock.engine.layers.mlp import PlainMlp
from penstock.engine.layers.norm import LayerNorm, LinearLayer, NoNorm, OutputProjection
from penstock.kernels.operands import Activation, Array, StepBatch
from penstock.kernels.ops import Ops
from penstock.weights.architecture.encoder import EncoderConfig
from penstock.weights.architecture.spec import ModelSpec, PoolerConfig


class EncoderLayer:
    """Attention, then MLP: each is added to the residual stream, which is normed after both."""

    def __init__(self, attention: EncoderAttention, mlp: PlainMlp, norms: tuple[LayerNorm, LayerNorm]) -> None:
        self.attention = attention
        self.mlp = mlp
        self.norms = norms

    def apply(self, ops: Ops, hidden_TD: Array, batch: StepBatch) -> None:
        """hidden = layer(hidden), in place."""
        qkv_TN = self.attention.write(ops, hidden_TD, batch, None)
        self.attention.add_to(ops, self.attention.mix(ops, qkv_TN, batch, None), hidden_TD)
        self.norms[0].in_place(ops, hidden_TD)
        self.mlp.add_to(ops, hidden_TD)
        self.norms[1].in_place(ops, hidden_TD)


class EncoderModel:
    """A ``PoolingModel`` that is an encoder."""

    def __init__(self, encoder: EncoderConfig, pooler: PoolerConfig, weights: Mapping[str, Any]) -> None:
        self.pooler = pooler
        self._encoder = encoder
        self._weights = weights
        self._norm = self._layer_norm("norm")
        self._layers = [self._layer(index) for index in range(encoder.layers)]

    def states(self, ops: Ops, batch: StepBatch, second_T: NDArray[np.int32], kv: Array) -> Array | None:
        """hidden [R, D]; nothing is written to the KV memory."""
        if not len(batch.sample_rows_R):
            return None
        encoder, weights = self._encoder, self._weights
        hidden_TD = ops.embed(weights["embed"], batch.tokens_T)
        kinds_T = np.minimum(second_T, encoder.types - 1).astype(np.int32)
        ops.embed_add(weights["types"], kinds_T, hidden_TD)
        ops.embed_add(weights["positions"], batch.positions_T + np.int32(encoder.first_position), hidden_TD)
        self._norm.in_place(ops, hidden_TD)
        for layer in self._layers:
            layer.apply(ops, hidden_TD, batch)
        return ops.rows(hidden_TD, batch.sample_rows_R)

    def scores(self, ops: Ops, states_RD: Array) -> Array:
        """By way of tanh(dense(state))."""
        dense_RD = self._linear("dense")(ops, ops.activate(states_RD, Activation.NONE))
        ops.softcap(dense_RD, 1.0)
        return self._linear("score")(ops, ops.activate(dense_RD, Activation.NONE))

    def _linear(self, name: str) -> LinearLayer:
        return LinearLayer(self._weights[name], self._weights[f"{name}_bias"])

    def _layer_norm(self, name: str) -> LayerNorm:
        return LayerNorm(self._weights[name], self._weights[f"{name}_bias"], self._encoder.eps)

    def _layer(self, index: int) -> EncoderLayer:
        encoder = self._encoder
        attention = EncoderAttention(
            heads=encoder.heads,
            kv_heads=encoder.heads,
            scale=encoder.head_dim**-0.5,
            norm=NoNorm(),
            qkv=self._linear(f"{index}.qkv"),
            out=OutputProjection(self._linear(f"{index}.out")),
        )
        mlp = PlainMlp(
            NoNorm(), self._linear(f"{index}.up"), OutputProjection(self._linear(f"{index}.down")), encoder.activation
        )
        norms = self._layer_norm(f"{index}.attention_norm"), self._layer_norm(f"{index}.mlp_norm")
        return EncoderLayer(attention, mlp, norms)


def build_encoder(spec: ModelSpec, weights: Mapping[str, Any]) -> EncoderModel:
    """The model over packed weights."""
    assert spec.pooler is not None, "an encoder only reads"
    return EncoderModel(spec.details_as(EncoderConfig), spec.pooler, weights)
