"""The decoder that most families are: what its layers are, as data, and which tensors its weights are made of.

A family (a file of ``weights.families``) reads its ``config.json`` into a ``DecoderConfig`` and says by
``DecoderTensorNames`` how its tensors are called.  ``engine.models.decoder`` computes it.  Layers may differ in
everything, one by one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Literal

from penstock.kernels.operands import COLUMN_UNIT, Activation, segment_ends
from penstock.weights.architecture.gated_delta_net import GatedDeltaNetConfig, GatedDeltaNetTensors
from penstock.weights.architecture.mla import MlaConfig, MlaTensors
from penstock.weights.architecture.moe import GatedSharedMoeConfig, MoeConfig, MoeTensorNames, MoeTensors
from penstock.weights.architecture.rope import RopeConfig
from penstock.weights.architecture.spec import ModelDetails, ModelSpec
from penstock.weights.architecture.tensor_layout import HeadGroups, Matrix, TensorPart, Vector, WeightLayout


class QkNorm(StrEnum):
    """Whether queries and keys are normed before they are rotated, and over what."""

    NONE = "none"
    HEAD = "head"  # each head by itself, all with the same weight
    ALL = "all"  # all heads together
    UNIT = "unit"  # each head by itself, without a weight


class AttentionTemperature(ModelDetails, frozen=True, kw_only=True, tag="Temperature"):
    """Queries of position p are multiplied by ``1 + scale * log(1 + floor((p + 1) / floor))`` (arXiv:2501.19399)."""

    floor: int
    scale: float


class AttentionConfig(ModelDetails, frozen=True, kw_only=True, tag="Attention"):
    """Causal self-attention, grouped queries included."""

    heads: int  # query heads
    kv_heads: int  # divides heads
    head_dim: int  # even
    scale: float  # of the scores
    rope: RopeConfig | None  # None: queries and keys know no position
    window: int | None = None  # positions that a token reads, its own included; None: all before it
    chunk: int | None = None  # positions of a chunk, outside of which a token reads none; None: no chunks
    softcap: float | None = None  # scores become cap * tanh(score / cap)
    sinks: bool = False  # each head has one more score, which takes weight and gives nothing
    temperature: AttentionTemperature | None = None
    qk_norm: QkNorm = QkNorm.NONE
    qkv_bias: bool = False
    out_bias: bool = False


class GatedAttentionConfig(AttentionConfig, frozen=True, kw_only=True, tag="GatedAttention"):
    """Attention whose output, before its last product, is multiplied by a logistic function of what the block reads,
    number by number.  Rows of queries and of gates lie in one tensor, head by head; there are no biases."""


class MlpConfig(ModelDetails, frozen=True, kw_only=True, tag="Mlp"):
    """down(activation(gate(x)) * up(x)); not gated: down(activation(up(x)))."""

    intermediate: int
    activation: Activation = Activation.SILU
    gated: bool = True
    bias: bool = False


class LayerConfig(ModelDetails, frozen=True, kw_only=True, tag="Layer"):
    """One layer: an attention block and a feed-forward block."""

    attention: AttentionConfig | GatedAttentionConfig | MlaConfig | GatedDeltaNetConfig
    mlp: MlpConfig | MoeConfig | GatedSharedMoeConfig


class NormConfig(ModelDetails, frozen=True, kw_only=True, tag="Norm"):
    """All norms of a model are of one kind: root mean square, or mean and variance with a bias."""

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0  # is added to the stored weight
    bias: bool = True  # of the kind "layer"


class DecoderConfig(ModelDetails, frozen=True, kw_only=True, tag="Decoder"):
    """Layers, what is before the first and what is behind the last."""

    layers: tuple[LayerConfig, ...]
    norm: NormConfig
    norm_before: bool = True  # of what a block reads
    norm_after: bool = False  # of what a block adds
    parallel: bool = False  # both blocks of a layer read what the layer reads, through one norm
    embed_scale: float = 1.0
    learned_positions: int | None = None  # rows of a table that is added to the embeddings
    logit_scale: float = 1.0
    logit_softcap: float | None = None  # after the scale


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderTensorNames:
    """A family's tensor names.  A matrix that several tensors make is a tuple: their rows in this order."""

    model: str = "model."
    embed: str = "embed_tokens"
    positions: str = ""
    norm: str = "norm"
    head: str = "lm_head"
    layer: str = "layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    sinks: str = "self_attn.sinks"
    out: str = "self_attn.o_proj"
    attention_norm_after: str = ""
    mlp_norm: str = "post_attention_layernorm"
    gate_up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    mlp_norm_after: str = ""
    moe: MoeTensorNames = field(default_factory=MoeTensorNames)
    transposed: bool = False  # the matrices of layers are stored inputs first
    ignored: str = r".*\.rotary_emb\.inv_freq"  # a pattern of tensors that nothing needs


def decoder_layout(spec: ModelSpec, names: DecoderTensorNames, *others: DecoderTensorNames) -> WeightLayout:
    """Weights ``embed``, ``positions``, ``norm``, ``head`` (unless tied), and of layer i, as far as it has them, the
    matrices ``i.qkv``, ``i.out``, ``i.gate_up`` and ``i.down``, each with a bias ``i.qkv_bias``, ..., and the vectors
    ``i.q_norm``, ``i.k_norm``, ``i.sinks``, ``i.attention_norm``, ``i.attention_norm_after``, ``i.mlp_norm``,
    ``i.mlp_norm_after``; a norm of the kind "layer" has a bias too.  Gated attention has the matrix ``i.gate``.
    ``MoeTensors`` has the weights of routed experts, ``MlaTensors`` those of latent attention and
    ``GatedDeltaNetTensors`` those of delta nets.

    A pooling model has no ``head``, and with labels the matrix ``score``.
    Where tensor parallelism will cut K, it has the 8 segments of the tree.  ``others``: names in other releases.
    """
    decoder = spec.details_as(DecoderConfig)
    place = _LayerTensors(names, names.model, "", spec.hidden)
    table = (spec.vocab, spec.hidden)
    weights: list[Matrix | Vector] = [Matrix("embed", (place.part(f"{names.embed}.weight", *table),))]
    if decoder.learned_positions is not None:
        rows = place.part(f"{names.positions}.weight", decoder.learned_positions, spec.hidden)
        weights.append(Matrix("positions", (rows,)))
    for index, layer in enumerate(decoder.layers):
        inside = _LayerTensors(names, names.model + names.layer.format(index), f"{index}.", spec.hidden)
        weights += [*_attention(decoder, layer.attention, inside), *_mlp(decoder, layer.mlp, inside)]
    weights += place.norm(decoder.norm, "norm", names.norm)
    writes = spec.pooler is None
    if writes and not spec.tied:
        weights.append(Matrix("head", (TensorPart(f"{names.head}.weight", table),)))
    if spec.pooler is not None and spec.pooler.labels:
        weights.append(Matrix("score", (TensorPart("score.weight", (spec.pooler.labels, spec.hidden)),)))
    ignored = names.ignored + ("" if writes and not spec.tied else rf"|{re.escape(names.head)}\.weight")
    if not writes and names.model:
        others = (*others, replace(names, model=""))  # saved without what is around the layers
    return WeightLayout(tuple(weights), re.compile(ignored), tuple(decoder_layout(spec, other) for other in others))


@dataclass(frozen=True, slots=True)
class _LayerTensors:
    """Weights that begin with ``weights``, of tensors that begin with ``tensors``."""

    names: DecoderTensorNames
    tensors: str
    weights: str
    hidden: int

    def part(self, name: str, *shape: int, transposed: bool = False) -> TensorPart:
        return TensorPart(self.tensors + name, shape[::-1] if transposed else shape, transposed=transposed)

    def vector(self, weight: str, *names: str, sizes: tuple[int, ...], offset: float = 0.0) -> Vector:
        parts = tuple(self.part(name, size) for name, size in zip(names, sizes, strict=True))
        return Vector(self.weights + weight, parts, offset)

    def norm(self, norm: NormConfig, weight: str, name: str) -> list[Matrix | Vector]:
        """The norm of the hidden state."""
        vectors = [self.vector(weight, f"{name}.weight", sizes=(self.hidden,), offset=norm.offset)]
        if norm.kind == "layer" and norm.bias:
            vectors.append(self.vector(f"{weight}_bias", f"{name}.bias", sizes=(self.hidden,)))
        return [*vectors]

    def inward(self, weight: str, tensors: tuple[str, ...], rows: tuple[int, ...], bias: bool) -> list[Matrix | Vector]:
        """A product with the hidden state; ``rows`` of all parts, which one tensor may hold together."""
        if len(tensors) == 1:
            rows = (sum(rows),)
        parts = tuple(
            self.part(f"{name}.weight", n, self.hidden, transposed=self.names.transposed)
            for name, n in zip(tensors, rows, strict=True)
        )
        made: list[Matrix | Vector] = [Matrix(self.weights + weight, parts)]
        if bias:
            made.append(self.vector(f"{weight}_bias", *(f"{name}.bias" for name in tensors), sizes=rows))
        return made

    def outward(self, weight: str, tensor: str, ends: tuple[int, ...], bias: bool) -> list[Matrix | Vector]:
        """A product that is added to the hidden state, in the segments of the tree."""
        part = self.part(f"{tensor}.weight", self.hidden, ends[-1], transposed=self.names.transposed)
        made: list[Matrix | Vector] = [Matrix(self.weights + weight, (part,), segments=ends)]
        if bias:
            made.append(self.vector(f"{weight}_bias", f"{tensor}.bias", sizes=(self.hidden,)))
        return made


def _attention(
    decoder: DecoderConfig, attention: AttentionConfig | MlaConfig | GatedDeltaNetConfig, place: _LayerTensors
) -> list[Matrix | Vector]:
    names, norm = place.names, decoder.norm
    weights = place.norm(norm, "attention_norm", names.attention_norm) if decoder.norm_before else []
    if isinstance(attention, MlaConfig):
        return weights + MlaTensors(attention, place.tensors, place.weights, place.hidden).layout()
    if isinstance(attention, GatedDeltaNetConfig):
        return weights + GatedDeltaNetTensors(attention, place.tensors, place.weights, place.hidden).layout()
    queries, keys = attention.heads * attention.head_dim, attention.kv_heads * attention.head_dim
    if isinstance(attention, GatedAttentionConfig):
        weights += _gated_inward(attention, place)
    else:
        weights += place.inward("qkv", names.qkv, (queries, keys, keys), attention.qkv_bias)
    if attention.sinks:
        weights.append(place.vector("sinks", names.sinks, sizes=(attention.heads,)))
    if attention.qk_norm in {QkNorm.HEAD, QkNorm.ALL}:
        by_head = attention.qk_norm is QkNorm.HEAD
        for weight, name, size in (("q_norm", names.q_norm, queries), ("k_norm", names.k_norm, keys)):
            width = attention.head_dim if by_head else size
            weights.append(place.vector(weight, f"{name}.weight", sizes=(width,), offset=norm.offset))
    weights += place.outward("out", names.out, segment_ends(queries, attention.head_dim), attention.out_bias)
    if decoder.norm_after:
        weights += place.norm(norm, "attention_norm_after", names.attention_norm_after)
    return weights


def _gated_inward(attention: GatedAttentionConfig, place: _LayerTensors) -> list[Matrix | Vector]:
    """``qkv`` and ``gate``: in the first tensor every head has rows of both."""
    heads, size = attention.heads, attention.head_dim
    both, *others = place.names.qkv

    def rows(first: int) -> TensorPart:
        part = place.part(f"{both}.weight", 2 * heads * size, place.hidden)
        return replace(part, groups=HeadGroups(heads, first, first + size))

    keys = [place.part(f"{name}.weight", attention.kv_heads * size, place.hidden) for name in others]
    return [
        Matrix(f"{place.weights}qkv", (rows(0), *keys)),
        Matrix(f"{place.weights}gate", (rows(size),)),
    ]


def _mlp(decoder: DecoderConfig, mlp: MlpConfig | MoeConfig, place: _LayerTensors) -> list[Matrix | Vector]:
    names = place.names
    own_norm = decoder.norm_before and not decoder.parallel
    weights = place.norm(decoder.norm, "mlp_norm", names.mlp_norm) if own_norm else []
    if isinstance(mlp, MoeConfig):
        return weights + MoeTensors(mlp, names.moe, place.tensors, place.weights, place.hidden).layout()
    inner = mlp.intermediate
    weights += place.inward("gate_up", names.gate_up, (inner, inner) if mlp.gated else (inner,), mlp.bias)
    weights += place.outward("down", names.down, segment_ends(inner, COLUMN_UNIT), mlp.bias)
    if decoder.norm_after:
        weights += place.norm(decoder.norm, "mlp_norm_after", names.mlp_norm_after)
    return weights
