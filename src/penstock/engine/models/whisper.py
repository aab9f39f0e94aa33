"""Whisper (arXiv:2212.04356), built from a ``WhisperConfig``: an encoder, and a decoder that reads its rows.

::

    position   0 .................... source | padding |  begin ............
    pages      keys and values of cross-attention      |  of self-attention      in the same layers of a page
    a token    reads all of these in every layer       |  and those up to its own

Both ways of reading are ``paged_attention``.  Knows the order of operations and nothing about files, batching or
sampling.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.engine.layers.attention import EncoderAttention, SelfAttention
from penstock.engine.layers.mlp import PlainMlp
from penstock.engine.layers.norm import LayerNorm, LinearLayer, OutputProjection
from penstock.errors import ImageRefused
from penstock.kernels.operands import Activation, Array, AttentionSpec, StepBatch
from penstock.kernels.ops import Ops
from penstock.types import AudioInput, MediaInput
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.families.whisper import EPS, KERNEL, WhisperConfig, WhisperStackConfig


class WhisperLayerFactory:
    """Building blocks out of packed weights, by the names of ``weights.families.whisper.whisper_layout``."""

    def __init__(self, spec: ModelSpec, weights: Mapping[str, Any], ops: Ops) -> None:
        self.whisper = spec.details_as(WhisperConfig)
        self.width = spec.hidden
        self.weights = weights
        self._ops = ops

    def norm(self, name: str) -> LayerNorm:
        """The norm with this weight."""
        return LayerNorm(self.weights[name], self.weights[f"{name}_bias"], EPS)

    def linear(self, name: str, *biases: str) -> LinearLayer:
        """The product with this weight; ``biases`` side by side, "" for numbers that have none."""
        if not biases:
            return LinearLayer(self.weights[name], self.weights[f"{name}_bias"])
        none = np.zeros(self.width, np.float32)
        parts = [self._ops.to_numpy(self.weights[bias]) if bias else none for bias in biases]
        return LinearLayer(self.weights[name], self._ops.vector(np.concatenate(parts)))

    def scale(self, stack: WhisperStackConfig) -> float:
        """What products of queries and keys are multiplied by."""
        return float((self.width // stack.heads) ** -0.5)

    def attention(self, name: str, stack: WhisperStackConfig) -> dict[str, Any]:
        """What self-attention of either side is made of."""
        return {
            "heads": stack.heads,
            "kv_heads": stack.heads,
            "norm": self.norm(f"{name}attention_norm"),
            "qkv": self.linear(f"{name}qkv", f"{name}q_bias", "", f"{name}v_bias"),
            "out": OutputProjection(self.linear(f"{name}out")),
            "rope": None,
        }

    def mlp(self, name: str) -> PlainMlp:
        """The feed-forward block of a layer."""
        up, down = self.linear(f"{name}up"), OutputProjection(self.linear(f"{name}down"))
        return PlainMlp(self.norm(f"{name}mlp_norm"), up, down, self.whisper.activation)

    def cross(self, index: int) -> CrossAttention:
        """The block of a decoder's layer that reads the encoder's rows."""
        name, stack = f"{index}.cross_", self.whisper.decoder
        return CrossAttention(
            layer=index,
            heads=stack.heads,
            spec=AttentionSpec(self.scale(stack), until=self.whisper.source),
            norm=self.norm(f"{name}norm"),
            query=self.linear(f"{name}q"),
            keys_values=self.linear(f"{name}kv", "", f"{name}v_bias"),
            out=OutputProjection(self.linear(f"{name}out")),
        )


# --- the encoder -----------------------------------------------------------------------------------------------------


class SoundEncoder:
    """A ``MediaEncoder``; audio is checked before its encoding begins."""

    has_axes = False

    def __init__(self, parts: WhisperLayerFactory) -> None:
        whisper, layers = parts.whisper, range(parts.whisper.encoder.layers)
        self.whisper = whisper
        self.width = parts.width
        self.leading_tokens = whisper.begin
        self.attention = [
            EncoderAttention(**parts.attention(f"encoder.{i}.", whisper.encoder), scale=parts.scale(whisper.encoder))
            for i in layers
        ]
        self.mlps = [parts.mlp(f"encoder.{i}.") for i in layers]
        self._first, self._second = parts.linear("encoder.first"), parts.linear("encoder.second")
        self._positions = parts.weights["positions"]
        self._norm = parts.norm("encoder.norm")

    def check(self, medium: MediaInput) -> None:
        """Raises ImageRefused unless this is a sound of the length and the bands that the model hears."""
        whisper = self.whisper
        if not isinstance(medium, AudioInput):
            raise ImageRefused("this model hears sounds, and sees no images")
        if (medium.columns, medium.bands) != (whisper.begin, whisper.bands):
            raise ImageRefused(f"a sound must have {whisper.bands} bands, and stand for {whisper.begin} tokens")
        if len(medium.features) != 4 * whisper.bands * whisper.frames:
            raise ImageRefused(f"a sound must have {whisper.frames} frames of features")

    def begin(self, ops: Ops, medium: MediaInput) -> SoundEncoding:
        """The encoding of this sound: both convolutions are computed, and no layer."""
        sound = cast(AudioInput, medium)
        features_BF = np.frombuffer(sound.features, "<f4").reshape(self.whisper.bands, -1)
        inner_FD = self._convolved(ops, self._first, features_BF.T, step=1)
        hidden_TD = ops.hidden(ops.to_numpy(self._convolved(ops, self._second, ops.to_numpy(inner_FD), step=2)))
        ops.embed_add(self._positions, np.arange(self.whisper.source, dtype=np.int32), hidden_TD)
        return SoundEncoding(self, hidden_TD)

    def _convolved(self, ops: Ops, kernel: LinearLayer, rows_FK: NDArray[np.float32], *, step: int) -> Array:
        """compute [F / step, D]: the activated product of the kernel with every ``step``-th row and its neighbors."""
        return ops.activate(kernel(ops, ops.compute(unfold(rows_FK, step))), Activation.GELU)

    def finish(self, ops: Ops, hidden_TD: Array) -> NDArray[np.float32]:
        """fp32 [tokens, D]; behind the sound's rows zeros, which are not read."""
        rows_ND = np.zeros((self.whisper.begin, self.width), np.float32)
        rows_ND[: self.whisper.source] = ops.to_numpy(self._norm(ops, hidden_TD))
        return rows_ND


def unfold(rows_FK: NDArray[np.float32], step: int) -> NDArray[np.float32]:
    """[F / step, K 3]: every ``step``-th row between its neighbors, column by column; beyond both ends are zeros."""
    padded_FK = np.pad(rows_FK, ((1, 1), (0, 0)))
    count = len(rows_FK) // step
    near_FK3 = np.stack([padded_FK[at : at + count * step : step] for at in range(KERNEL)], axis=2)
    return near_FK3.reshape(count, -1)


class SoundEncoding:
    """One sound on its way through the encoder: half a layer at a time."""

    def __init__(self, encoder: SoundEncoder, hidden_TD: Array) -> None:
        self._encoder = encoder
        self._hidden_TD = hidden_TD
        self._done = 0  # blocks: two a layer
        self._rows_ND: NDArray[np.float32] | None = None
        rows, none = encoder.whisper.source, np.empty(0, np.int32)
        self._batch = StepBatch(none, none, np.array([0, rows], np.int32), none.reshape(0, 0), none)

    def advance(self, ops: Ops) -> bool:
        encoder, hidden_TD = self._encoder, self._hidden_TD
        if self._done < 2 * len(encoder.mlps):
            layer, behind = divmod(self._done, 2)
            if behind:
                encoder.mlps[layer].add_to(ops, hidden_TD)
            else:
                attention = encoder.attention[layer]
                qkv_TN = attention.write(ops, hidden_TD, self._batch, None)
                attention.add_to(ops, attention.mix(ops, qkv_TN, self._batch, None), hidden_TD)
            self._done += 1
            return False
        if self._rows_ND is None:
            self._rows_ND = encoder.finish(ops, hidden_TD)
        return True

    @property
    def rows(self) -> NDArray[np.float32]:
        if self._rows_ND is None:
            raise ValueError("the sound is not finished")
        return self._rows_ND


# --- the decoder -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossAttention:
    """Attention of every token to the first ``spec.until`` positions of its sequence, in pages of layer ``layer``."""

    layer: int
    heads: int
    spec: AttentionSpec
    norm: LayerNorm
    query: LinearLayer
    keys_values: LinearLayer
    out: OutputProjection

    def write(self, ops: Ops, rows_TD: Array, batch: StepBatch, kv: Array) -> None:
        """Keys and values of these rows go to their pages."""
        kv_TN = self.keys_values(ops, rows_TD)
        ops.rope_and_write(kv_TN, None, kv, self.layer, batch, heads=0, kv_heads=self.heads)

    def add_to(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> None:
        """hidden += block(hidden), in place."""
        q_TN = ops.activate(self.query(ops, self.norm(ops, hidden_TD)), Activation.NONE)
        mixed_TK = ops.paged_attention(q_TN, kv, self.layer, batch, self.spec)
        self.out.add_to(ops, mixed_TK, hidden_TD)


class WhisperLayer:
    """Self-attention, cross-attention, MLP, each added to the residual stream."""

    def __init__(self, attention: SelfAttention, cross: CrossAttention, mlp: PlainMlp) -> None:
        self.attention = attention
        self.cross = cross
        self.mlp = mlp

    def attend(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> None:
        """hidden += both attentions, in place; what later tokens need goes to the pages."""
        q_THC = self.attention.write(ops, hidden_TD, batch, kv)
        self.attention.add_to(ops, self.attention.mix(ops, q_THC, batch, kv), hidden_TD)
        self.cross.add_to(ops, hidden_TD, batch, kv)


class WhisperModel:
    """A ``Model`` that ``SupportsCrossAttention``."""

    def __init__(self, parts: WhisperLayerFactory) -> None:
        whisper, weights = parts.whisper, parts.weights
        self.encoder = SoundEncoder(parts)
        self.source_tokens = whisper.begin
        self.embed = weights["embed"]
        self.positions = weights["positions"]
        self.layers = [self._layer(parts, index) for index in range(whisper.decoder.layers)]
        self.norm = parts.norm("norm")

    def _layer(self, parts: WhisperLayerFactory, index: int) -> WhisperLayer:
        name, whisper = f"{index}.", parts.whisper
        # Text lies within the second chunk of positions: it reads itself, and not the sound before it.
        spec = AttentionSpec(parts.scale(whisper.decoder), chunk=whisper.begin)
        attention = SelfAttention(**parts.attention(name, whisper.decoder), layer=index, spec=spec)
        return WhisperLayer(attention, parts.cross(index), parts.mlp(name))

    def write_source(self, ops: Ops, rows_TD: Array, batch: StepBatch, kv: Array) -> None:
        for layer in self.layers:
            layer.cross.write(ops, rows_TD, batch, kv)

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        """As ``Model.forward``; all tokens are the decoder's own."""
        hidden_TD = ops.embed(self.embed, batch.tokens_T)
        ops.embed_add(self.positions, batch.positions_T, hidden_TD)
        for layer in self.layers[:-1]:
            layer.attend(ops, hidden_TD, batch, kv)
            layer.mlp.add_to(ops, hidden_TD)
        last = self.layers[-1]
        last.attend(ops, hidden_TD, batch, kv)
        if not len(batch.sample_rows_R):
            return None
        hidden_RD = ops.rows(hidden_TD, batch.sample_rows_R)
        last.mlp.add_to(ops, hidden_RD)
        return hidden_RD

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return ops.linear(self.norm(ops, hidden_RD), self.embed)


def build_whisper(spec: ModelSpec, weights: Mapping[str, Any], ops: Ops, max_positions: int) -> WhisperModel:
    """The model over packed weights; its tables have all positions anyway."""
    return WhisperModel(WhisperLayerFactory(spec, weights, ops))
