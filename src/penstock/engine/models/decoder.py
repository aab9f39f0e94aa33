"""The decoder that most families are (first Llama, arXiv:2302.13971), built from a ``DecoderConfig``.

Knows the order of operations and nothing about files, batching or sampling.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.layers import norm as norms
from penstock.engine.layers.attention import (
    AttentionBlock,
    EncoderAttention,
    GatedSelfAttention,
    HeadNorms,
    SelfAttention,
)
from penstock.engine.layers.embedding import HiddenSource, OutputHead, ReceivedHidden, TokenEmbedding
from penstock.engine.layers.gated_delta_net import GatedDeltaNet
from penstock.engine.layers.mla import LatentAttention, QueryDown
from penstock.engine.layers.mlp import FeedForward, GatedMlp, PlainMlp, RoutedExperts, SharedExpert
from penstock.engine.layers.norm import LinearLayer, OutputProjection
from penstock.engine.models.interface import Model
from penstock.engine.models.vision import ImageEncoder
from penstock.errors import ModelError
from penstock.kernels.operands import Array, AttentionSpec, Gate, PackedLinear, Sparse, StepBatch
from penstock.kernels.ops import Ops
from penstock.weights.architecture import decoder as forms
from penstock.weights.architecture.decoder import (
    AttentionConfig,
    AttentionTemperature,
    DecoderConfig,
    MlpConfig,
    QkNorm,
)
from penstock.weights.architecture.gated_delta_net import GatedDeltaNetConfig
from penstock.weights.architecture.mla import MlaConfig
from penstock.weights.architecture.moe import MoeConfig
from penstock.weights.architecture.rope import RopeConfig
from penstock.weights.architecture.spec import ModelSpec, PoolerConfig
from penstock.weights.architecture.vision import VisionDecoderConfig


class LayerFactory:
    """Building blocks of one model out of its packed weights, by the names of ``decoder_layout``."""

    def __init__(
        self,
        decoder: DecoderConfig,
        weights: Mapping[str, Any],
        ops: Ops,
        max_positions: int,
        *,
        causal: bool = True,
        sparse: Sparse | None = None,
    ) -> None:
        """``causal``: a token reads what stands before it; else all of its text, and nothing is kept of it.
        ``sparse``: what it reads in layers that have no window of their own."""
        self.decoder = decoder
        self._causal = causal
        self._sparse = sparse
        self.weights = weights
        self._ops = ops
        self._max_positions = max_positions
        self._tables: dict[RopeConfig, Array] = {}
        self._numbers = layer_numbers(decoder)

    def embed_scale(self) -> float:
        """Rounded to the compute type, as makers who scale embeddings do it."""
        if self.decoder.embed_scale == 1.0:
            return 1.0
        scale = self._ops.compute(np.array([self.decoder.embed_scale]))
        return float(self._ops.to_numpy(scale)[0])

    def rope(self, rope: RopeConfig | None) -> Array | None:
        """The table of rotary positions, one a recipe, whatever the number of layers that share it."""
        if rope is None:
            return None
        if rope not in self._tables:
            self._tables[rope] = self._ops.rope_table(
                rope.inv_freq(),
                self._max_positions,
                rope.attention_factor,
                interleaved=rope.interleaved,
                axes_C2=rope.axes,
            )
        return self._tables[rope]

    def rms_norm(self, name: str) -> norms.RmsNorm:
        """The norm with this weight."""
        return norms.RmsNorm(self.weights[name], self.decoder.norm.eps)

    def norm(self, name: str) -> norms.NormLayer:
        """The norm with this weight, of the model's kind."""
        if self.decoder.norm.kind == "rms":
            return self.rms_norm(name)
        return norms.LayerNorm(self.weights[name], self.weights.get(f"{name}_bias"), self.decoder.norm.eps)

    def norm_before(self, name: str) -> norms.NormLayer:
        """What a block reads the hidden state through."""
        return self.norm(name) if self.decoder.norm_before else norms.NoNorm()

    def mlp_norm(self, index: int) -> norms.NormLayer:
        """What a layer's second block reads the hidden state through."""
        return self.norm_before(f"{index}.attention_norm" if self.decoder.parallel else f"{index}.mlp_norm")

    def linear(self, name: str) -> LinearLayer:
        """The product with this weight, and its bias if there is one."""
        return LinearLayer(self.weights[name], self.weights.get(f"{name}_bias"))

    def output(self, name: str, norm: str) -> OutputProjection:
        """The product that goes to the residual stream, by way of a norm if the model has those."""
        return OutputProjection(self.linear(name), self.rms_norm(norm) if self.decoder.norm_after else None)

    def latent(self, index: int, latent: MlaConfig) -> LatentAttention:
        """The attention block of a layer that keeps latent vectors."""

        def norm(name: str) -> norms.RmsNorm:
            return norms.RmsNorm(self.weights[f"{index}.{name}"], latent.eps)

        return LatentAttention(
            layer=self._numbers[index],
            heads=latent.heads,
            spec=AttentionSpec(latent.scale, sparse=self._sparse),
            norm=self.norm_before(f"{index}.attention_norm"),
            query_down=None if latent.q_rank is None else QueryDown(self.linear(f"{index}.q_down"), norm("q_norm")),
            query=self.linear(f"{index}.q"),
            latent=self.linear(f"{index}.latent"),
            latent_norm=norm("latent_norm"),
            absorb=self.weights[f"{index}.absorb"],
            values=self.weights[f"{index}.values"],
            out=self.output(f"{index}.out", f"{index}.attention_norm_after"),
            rope=self.rope(latent.rope),
        )

    def delta(self, index: int, delta: GatedDeltaNetConfig) -> GatedDeltaNet:
        """The recurrent block of a layer."""
        ops, weights = self._ops, self.weights
        taps_CK = ops.to_numpy(weights[f"{index}.conv"])
        return GatedDeltaNet(
            layer=self._numbers[index],
            heads=delta.heads,
            channels=delta.channels,
            norm=self.norm_before(f"{index}.attention_norm"),
            inward=weights[f"{index}.delta_in"],
            taps=ops.vector(taps_CK.T),
            rates=ops.vector(np.exp(ops.to_numpy(weights[f"{index}.rates"]))),
            shifts=weights[f"{index}.shifts"],
            value_norm=self.rms_norm(f"{index}.delta_norm"),
            out=self.output(f"{index}.out", f"{index}.attention_norm_after"),
        )

    def attention(self, index: int, attention: AttentionConfig | MlaConfig | GatedDeltaNetConfig) -> AttentionBlock:
        """The attention block of a layer, or what it has in place of one."""
        if isinstance(attention, MlaConfig):
            return self.latent(index, attention)
        if isinstance(attention, GatedDeltaNetConfig):
            return self.delta(index, attention)
        shared: dict[str, Any] = {
            "heads": attention.heads,
            "kv_heads": attention.kv_heads,
            "norm": self.norm_before(f"{index}.attention_norm"),
            "qkv": self.linear(f"{index}.qkv"),
            "out": self.output(f"{index}.out", f"{index}.attention_norm_after"),
            "rope": self.rope(attention.rope),
            "head_norms": self.head_norms(index, attention),
        }
        if not self._causal:
            return EncoderAttention(**shared, scale=attention.scale, window=attention.window, softcap=attention.softcap)
        spec = AttentionSpec(
            attention.scale,
            window=attention.window,
            chunk=attention.chunk,
            softcap=attention.softcap,
            sinks_H=self.weights.get(f"{index}.sinks"),
            sparse=self._sparse if attention.window is None and attention.chunk is None else None,
        )
        causal = SelfAttention(
            **shared, layer=self._numbers[index], spec=spec, q_scale=self.q_scale(attention.temperature)
        )
        if not isinstance(attention, forms.GatedAttentionConfig):
            return causal
        return GatedSelfAttention(attention=causal, gate=self.weights[f"{index}.gate"])

    def q_scale(self, temperature: AttentionTemperature | None) -> Array | None:
        """What queries are multiplied by, for every position."""
        if temperature is None:
            return None
        reached = np.floor(np.arange(1, self._max_positions + 1) / temperature.floor)
        return self._ops.vector(np.log1p(reached) * temperature.scale + 1.0)

    def head_norms(self, index: int, attention: AttentionConfig) -> HeadNorms | None:
        """Norms of queries and keys."""
        if attention.qk_norm is QkNorm.NONE:
            return None
        by_head = attention.qk_norm is not QkNorm.ALL
        if attention.qk_norm is QkNorm.UNIT:
            q = k = norms.RmsNorm(self._ops.vector(np.ones(attention.head_dim)), self.decoder.norm.eps)
        else:
            q, k = self.rms_norm(f"{index}.q_norm"), self.rms_norm(f"{index}.k_norm")
        return HeadNorms(
            q=q,
            k=k,
            q_groups=attention.heads if by_head else 1,
            k_groups=attention.kv_heads if by_head else 1,
            k_first=attention.heads * attention.head_dim,
        )

    def experts(self, index: int, moe: MoeConfig) -> RoutedExperts:
        """The feed-forward block of a layer that chooses among experts; those without weights are on other ranks."""
        names = [f"{index}.experts.{expert}" for expert in range(moe.routing.experts)]
        weights, biased = self.weights, names if moe.bias else []
        return RoutedExperts(
            norm=self.mlp_norm(index),
            router=self.linear(f"{index}.router"),
            choice_bias=weights.get(f"{index}.choice_bias"),
            routing=moe.routing,
            experts=self._ops.pack_experts(
                [weights.get(f"{name}.gate_up") for name in names],
                [weights.get(f"{name}.down") for name in names],
                gate_up_biases=[weights.get(f"{name}.gate_up_bias") for name in biased],
                down_biases=[weights.get(f"{name}.down_bias") for name in biased],
                weighs_input=moe.weighs_input,
            ),
            gate=moe.gate,
            shared=self.shared_expert(index) if moe.shared else None,
        )

    def shared_expert(self, index: int) -> SharedExpert:
        """What every token passes in a layer of experts."""
        weights = self.weights
        return SharedExpert(
            weights[f"{index}.shared_gate_up"], weights[f"{index}.shared_down"], weights.get(f"{index}.shared_gate")
        )

    def mlp(self, index: int, mlp: MlpConfig | MoeConfig) -> FeedForward:
        """The feed-forward block of a layer."""
        if isinstance(mlp, MoeConfig):
            return self.experts(index, mlp)
        norm, inward = self.mlp_norm(index), self.linear(f"{index}.gate_up")
        down = self.output(f"{index}.down", f"{index}.mlp_norm_after")
        if mlp.gated:
            return GatedMlp(norm, inward, down, Gate(activation=mlp.activation))
        return PlainMlp(norm, inward, down, mlp.activation)

    def source(self, *, given_rows: bool) -> HiddenSource:
        """The embeddings that the first layer reads; ``given_rows``: rows of images take the place of some."""
        weights = self.weights
        return TokenEmbedding(weights["embed"], self.embed_scale(), weights.get("positions"), given_rows=given_rows)

    def head(self, *, tied: bool) -> OutputHead:
        """What follows the last layer."""
        return OutputHead(
            self.norm("norm"),
            self.weights["embed" if tied else "head"],
            scale=self.decoder.logit_scale,
            softcap=self.decoder.logit_softcap,
        )


class DecoderLayer:
    """One layer: attention, then MLP, each added to the residual stream.

    ``parallel``: the MLP reads what the layer read, so it is added first.
    """

    def __init__(self, attention: AttentionBlock, mlp: FeedForward, *, parallel: bool) -> None:
        self.attention = attention
        self.mlp = mlp
        self.parallel = parallel

    def add_to(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> None:
        """hidden = layer(hidden), in place, for all tokens."""
        written = self.attention.write(ops, hidden_TD, batch, kv)
        self._add(ops, self.attention.mix(ops, written, batch, kv), hidden_TD)

    def wanted(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> Array | None:
        """The last layer: keys and values of all tokens, the rest for wanted rows only; hidden [R, D] or None."""
        written = self.attention.write(ops, hidden_TD, batch, kv)
        rows_R = batch.sample_rows_R
        if not len(rows_R):
            return None
        mixed_RK = ops.rows(self.attention.mix(ops, written, batch, kv), rows_R)
        hidden_RD = ops.rows(hidden_TD, rows_R)
        self._add(ops, mixed_RK, hidden_RD)
        return hidden_RD

    def _add(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        if self.parallel:
            self.mlp.add_to(ops, hidden_TD)
            self.attention.add_to(ops, mixed_TK, hidden_TD)
        else:
            self.attention.add_to(ops, mixed_TK, hidden_TD)
            self.mlp.add_to(ops, hidden_TD)


class DecoderModel:
    """A ``Model``: a decoder, or one stage of it.  ``vision``: the encoder of its prompts' images."""

    def __init__(
        self,
        source: HiddenSource,
        layers: Sequence[DecoderLayer],
        head: OutputHead | None,
        vision: ImageEncoder | None = None,
    ) -> None:
        """``head``: None in a stage before the last."""
        self.encoder = vision
        self.source = source
        self.layers = layers
        self.head = head

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        hidden_TD = self.source(ops, batch)
        for depth, layer in enumerate(self.layers[:-1]):
            _hand_out(ops, hidden_TD, batch, depth)
            layer.add_to(ops, hidden_TD, batch, kv)
        _hand_out(ops, hidden_TD, batch, len(self.layers) - 1)
        return self.layers[-1].wanted(ops, hidden_TD, batch, kv)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return self.last.logits(ops, hidden_RD)

    @property
    def last(self) -> OutputHead:
        """What comes after the layers.  Raises ModelError in a stage before the last."""
        if self.head is None:
            raise ModelError("only the last stage of a pipeline has a head")
        return self.head


def _hand_out(ops: Ops, hidden_TD: Array, batch: StepBatch, depth: int) -> None:
    """The wanted rows of the hidden state behind ``depth`` layers, if they were asked for."""
    if depth in batch.tapped and len(batch.sample_rows_R):
        ops.tap(hidden_TD, batch, batch.tapped.index(depth))


def build_decoder(spec: ModelSpec, weights: Mapping[str, Any], ops: Ops, max_positions: int) -> DecoderModel:
    """The model over packed weights, for positions below ``max_positions``; of a stage's weights, that stage."""
    decoder = spec.details_as(DecoderConfig)
    vision = None
    if isinstance(decoder, VisionDecoderConfig):
        axes = any(
            isinstance(layer.attention, AttentionConfig) and has_axes(layer.attention) for layer in decoder.layers
        )
        vision = ImageEncoder(decoder.vision, weights, axes=axes)
    causal = spec.pooler is None or spec.pooler.causal
    headless = spec.pooler is not None  # nothing is written, so any table will do
    parts = LayerFactory(decoder, weights, ops, max_positions, causal=causal, sparse=spec.sparse)
    layers = [
        DecoderLayer(parts.attention(index, layer.attention), parts.mlp(index, layer.mlp), parallel=decoder.parallel)
        for index, layer in enumerate(decoder.layers)
    ]
    source = parts.source(given_rows=vision is not None) if "embed" in weights else ReceivedHidden(spec.hidden)
    head = parts.head(tied=spec.tied or headless) if "norm" in weights else None
    return DecoderModel(source, layers, head, vision)


def layer_numbers(decoder: DecoderConfig) -> list[int]:
    """Each layer's number in the KV memory: among those with keys and values, or among the recurrent ones."""
    counts, numbers = {True: 0, False: 0}, []
    for layer in decoder.layers:
        recurrent = isinstance(layer.attention, GatedDeltaNetConfig)
        numbers.append(counts[recurrent])
        counts[recurrent] += 1
    return numbers


def has_axes(attention: AttentionConfig) -> bool:
    """Whether the columns of a head follow more positions than one."""
    return attention.rope is not None and attention.rope.axes is not None


class PoolingDecoder:
    """A ``PoolingModel`` that is a decoder."""

    def __init__(self, decoder: Model, pooler: PoolerConfig, score: PackedLinear | None) -> None:
        """Raises ModelError for a model that is no decoder of ours."""
        if not isinstance(decoder, DecoderModel):
            raise ModelError("an installed package's model writes text, and gives no vectors")
        self.pooler = pooler
        self._decoder = decoder
        self._score = score

    def states(self, ops: Ops, batch: StepBatch, second_T: NDArray[np.int32], kv: Array) -> Array | None:
        """compute [R, D]; it knows no second text."""
        hidden_RD = self._decoder.forward(ops, batch, kv)
        return None if hidden_RD is None else self._decoder.last.norm(ops, hidden_RD)

    def scores(self, ops: Ops, states_RD: Array) -> Array:
        assert self._score is not None, "a model without labels"
        return ops.linear(states_RD, self._score)
