"""The encoder that BERT and its relatives are: what its layers are, as data, and which tensors its weights are made of.

Every token reads all tokens of its text, and each block's sum is normed (arXiv:1810.04805).  ``engine.models.encoder``
computes it; a family (``weights.families.bert``) reads its ``config.json`` into an ``EncoderConfig``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.kernels.operands import COLUMN_UNIT, Activation, KvShape, segment_ends
from penstock.weights.architecture.spec import ModelDetails, ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, TensorPart, Vector, WeightLayout

NO_KV = KvShape(layers=1, kv_heads=1, key_dim=2, value_dim=2)
"""Encoders leave nothing in the KV memory.  Its pages, as small as they can be, only count the tokens that a worker has
taken on."""


class EncoderConfig(ModelDetails, frozen=True, kw_only=True, tag="Encoder"):
    """A bidirectional encoder, all of whose layers are alike."""

    layers: int
    heads: int
    head_dim: int
    intermediate: int
    activation: Activation
    eps: float
    positions: int  # rows of the table of positions
    first_position: int  # row of a text's first token
    types: int  # rows of the table that tells a first text from a second; the others are not used


@dataclass(frozen=True, slots=True, kw_only=True)
class EncoderTensorNames:
    """A family's tensor names."""

    model: str  # in front of all but the head
    dense: str = "pooler.dense"  # what stands before the head, where there is one; the model's, unless ``own_dense``
    score: str = "classifier"
    own_dense: bool = False
    ignored: str = r"cls\..*|lm_head\..*"


def encoder_layout(spec: ModelSpec, names: EncoderTensorNames, *others: EncoderTensorNames) -> WeightLayout:
    """Matrices ``embed``, ``positions``, ``types``, of layer i ``i.qkv``, ``i.out``, ``i.up``, ``i.down``, and with
    labels ``dense`` and ``score``; each but the tables with a bias ``i.qkv_bias``, ...; vectors ``norm``,
    ``i.attention_norm``, ``i.mlp_norm``, each with a bias.  ``others``: names in other releases.
    """
    encoder, place = spec.details_as(EncoderConfig), _EncoderTensors(names.model + "embeddings.", "")
    tables = {"embed": ("word", spec.vocab), "positions": ("position", encoder.positions)}
    tables["types"] = ("token_type", encoder.types)
    weights: list[Matrix | Vector] = [
        Matrix(weight, (place.part(f"{tensor}_embeddings.weight", rows, spec.hidden),))
        for weight, (tensor, rows) in tables.items()
    ]
    weights += place.norm("norm", "LayerNorm", spec.hidden)
    for index in range(encoder.layers):
        weights += _layer(encoder, spec.hidden, _EncoderTensors(f"{names.model}encoder.layer.{index}.", f"{index}."))
    ignored = rf"(.*\.)?embeddings\.position_ids|(.*\.)?pooler\.dense\.(weight|bias)|{names.ignored}"
    if spec.pooler is not None and spec.pooler.labels:
        head = _EncoderTensors("" if names.own_dense else names.model, "")
        weights += head.product("dense", (names.dense,), spec.hidden, spec.hidden)
        weights += _EncoderTensors("", "").product("score", (names.score,), spec.pooler.labels, spec.hidden)
    return WeightLayout(tuple(weights), re.compile(ignored), tuple(encoder_layout(spec, other) for other in others))


@dataclass(frozen=True, slots=True)
class _EncoderTensors:
    """Weights that begin with ``weights``, of tensors that begin with ``tensors``."""

    tensors: str
    weights: str

    def part(self, name: str, *shape: int) -> TensorPart:
        return TensorPart(self.tensors + name, shape)

    def norm(self, weight: str, name: str, size: int) -> list[Vector]:
        return [
            Vector(self.weights + weight, (self.part(f"{name}.weight", size),)),
            Vector(f"{self.weights}{weight}_bias", (self.part(f"{name}.bias", size),)),
        ]

    def product(
        self, weight: str, names: tuple[str, ...], rows: int, inputs: int, segments: tuple[int, ...] | None = None
    ) -> list[Matrix | Vector]:
        """A product with the same number of rows from each of ``names``."""
        return [
            Matrix(self.weights + weight, tuple(self.part(f"{n}.weight", rows, inputs) for n in names), segments),
            Vector(f"{self.weights}{weight}_bias", tuple(self.part(f"{n}.bias", rows) for n in names)),
        ]


def _layer(encoder: EncoderConfig, hidden: int, place: _EncoderTensors) -> list[Matrix | Vector]:
    inner, own = encoder.intermediate, "attention.self."
    return [
        *place.product("qkv", (f"{own}query", f"{own}key", f"{own}value"), hidden, hidden),
        *place.product("out", ("attention.output.dense",), hidden, hidden, segment_ends(hidden, encoder.head_dim)),
        *place.norm("attention_norm", "attention.output.LayerNorm", hidden),
        *place.product("up", ("intermediate.dense",), inner, hidden),
        *place.product("down", ("output.dense",), hidden, inner, segment_ends(inner, COLUMN_UNIT)),
        *place.norm("mlp_norm", "output.LayerNorm", hidden),
    ]
