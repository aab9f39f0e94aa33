"""The decoder that most families are: what its layers are, as data, and which tensors its weights are made of.

A family (``weights.llama`` and its like) reads its ``config.json`` into a ``Decoder`` and says by ``Names`` how its
tensors are called.  ``engine.models.decoder`` computes it.  Layers may differ in everything, one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.kernels.ops import COLUMN_UNIT, segment_ends
from penstock.weights.layout import Matrix, Part, Vector, WeightLayout
from penstock.weights.rope import Rope
from penstock.weights.spec import Details, ModelSpec


class Attention(Details, frozen=True, kw_only=True):
    """Causal self-attention, grouped queries included."""

    heads: int  # query heads
    kv_heads: int  # divides heads
    head_dim: int  # even
    scale: float  # of the scores
    rope: Rope | None  # None: queries and keys know no position


class Mlp(Details, frozen=True, kw_only=True):
    """down(silu(gate(x)) * up(x))."""

    intermediate: int


class Layer(Details, frozen=True, kw_only=True):
    """One attention block, one feed-forward block."""

    attention: Attention
    mlp: Mlp


class Decoder(Details, frozen=True, kw_only=True):
    """Layers of a pre-norm decoder with root-mean-square norms."""

    layers: tuple[Layer, ...]
    norm_eps: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """How a family calls its tensors.  A matrix that several tensors make is a tuple: their rows in this order."""

    model: str = "model."
    embed: str = "embed_tokens"
    norm: str = "norm"
    layer: str = "layers.{}."
    head: str = "lm_head"
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    out: str = "self_attn.o_proj"
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    ignored: str = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"  # a pattern


def layout(spec: ModelSpec, names: Names) -> WeightLayout:
    """Weights ``embed``, ``norm``, ``head`` (unless tied), and of layer i ``i.attention_norm``, ``i.qkv``, ``i.out``,
    ``i.mlp_norm``, ``i.gate_up``, ``i.down``.  Where tensor parallelism will cut K, it has the 8 segments of the tree.
    """
    decoder = spec.own(Decoder)
    table = (spec.vocab, spec.hidden)
    weights: list[Matrix | Vector] = [Matrix("embed", (Part(f"{names.model}{names.embed}.weight", table),))]
    for index, layer in enumerate(decoder.layers):
        place = _Place(names, index, spec.hidden)
        weights += [*_attention(layer.attention, place), *_mlp(layer.mlp, place)]
    weights.append(Vector("norm", (Part(f"{names.model}{names.norm}.weight", (spec.hidden,)),)))
    if not spec.tied:
        weights.append(Matrix("head", (Part(f"{names.head}.weight", table),)))
    ignored = names.ignored + (rf"|{re.escape(names.head)}\.weight" if spec.tied else "")
    return WeightLayout(tuple(weights), re.compile(ignored))


@dataclass(frozen=True, slots=True)
class _Place:
    """One layer's weights and tensors by name."""

    names: Names
    index: int
    hidden: int

    def part(self, name: str, *shape: int) -> Part:
        return Part(f"{self.names.model}{self.names.layer.format(self.index)}{name}.weight", shape)

    def vector(self, weight: str, name: str, size: int) -> Vector:
        return Vector(f"{self.index}.{weight}", (self.part(name, size),))

    def matrix(self, weight: str, tensors: tuple[str, ...], rows: tuple[int, ...]) -> Matrix:
        """Of the hidden state; ``rows`` of all parts, which one tensor may hold together."""
        if len(tensors) == 1:
            rows = (sum(rows),)
        parts = tuple(self.part(name, n, self.hidden) for name, n in zip(tensors, rows, strict=True))
        return Matrix(f"{self.index}.{weight}", parts)

    def output(self, weight: str, name: str, k: int, unit: int) -> Matrix:
        """Back to the hidden state, in the segments of the tree."""
        parts = (self.part(name, self.hidden, k),)
        return Matrix(f"{self.index}.{weight}", parts, segments=segment_ends(k, unit))


def _attention(attention: Attention, place: _Place) -> list[Matrix | Vector]:
    names = place.names
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    return [
        place.vector("attention_norm", names.attention_norm, place.hidden),
        place.matrix("qkv", names.qkv, (queries, keys, keys)),
        place.output("out", names.out, queries, attention.head_dim),
    ]


def _mlp(mlp: Mlp, place: _Place) -> list[Matrix | Vector]:
    names, inner = place.names, mlp.intermediate
    return [
        place.vector("mlp_norm", names.mlp_norm, place.hidden),
        place.matrix("gate_up", names.gate_up, (inner, inner)),
        place.output("down", names.down, inner, COLUMN_UNIT),
    ]
