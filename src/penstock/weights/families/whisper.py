"""Whisper (arXiv:2212.04356): an encoder of sounds, and a decoder that reads its rows by cross-attention.

A sequence begins with the encoder's rows, filled up to whole pages; the decoder's own tokens follow them.  So a page of
the sound holds, layer by layer, the keys and values of cross-attention, a page of text those of self-attention: both
have one size.  ``engine.models.whisper`` computes it.
"""

from __future__ import annotations

import re

from penstock.kernels.operands import COLUMN_UNIT, Activation, KvShape, segment_ends
from penstock.types import PAGE_TOKENS
from penstock.weights.architecture.spec import ModelDetails, ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, RowSlice, TensorPart, Vector, WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    MAX_HEAD_DIM,
    layer_count,
    parse_activation,
    refuse_own_code,
    refuse_true,
    refuse_variants,
)

KERNEL = 3
"""Frames that either convolution reads; the second makes every other row."""

MAX_POSITIONS = 4096
MAX_BANDS = 512

EPS = 1e-5
"""Of every norm; no configuration says it."""


class WhisperStackConfig(ModelDetails, frozen=True, kw_only=True, tag="Stack"):
    """Layers of one side."""

    layers: int
    heads: int
    intermediate: int


class WhisperConfig(ModelDetails, frozen=True, kw_only=True, tag="Whisper"):
    """Both sides are equally wide."""

    bands: int  # of the mel scale
    source: int  # rows that the encoder makes
    target: int  # positions of the decoder
    activation: Activation
    encoder: WhisperStackConfig
    decoder: WhisperStackConfig

    @property
    def begin(self) -> int:
        """Position of the decoder's first token in a sequence: behind whole pages of the encoder's rows."""
        return -(-self.source // PAGE_TOKENS) * PAGE_TOKENS

    @property
    def frames(self) -> int:
        """Columns of features that the encoder reads."""
        return 2 * self.source


def parse_whisper(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "whisper")
    refuse_own_code(config)
    refuse_true(config, "scale_embedding")
    if not config.get("tie_word_embeddings", bool, True):
        raise config.error("tie_word_embeddings is false; only models whose head is the embedding can be served")
    width, bands = config.positive_int("d_model"), config.positive_int("num_mel_bins", 80)
    source, target = config.positive_int("max_source_positions", 1500), config.positive_int("max_target_positions", 448)
    if not PAGE_TOKENS <= source <= MAX_POSITIONS or target > source or bands > MAX_BANDS:
        raise config.error(
            f"max_source_positions ({source}) must be from {PAGE_TOKENS} to {MAX_POSITIONS}, max_target_positions "
            f"({target}) at most as many, num_mel_bins ({bands}) at most {MAX_BANDS}"
        )
    encoder, decoder = (_stack(config, side, width) for side in ("encoder", "decoder"))
    details = WhisperConfig(
        bands=bands,
        source=source,
        target=target,
        activation=parse_activation(config, "activation_function", "gelu"),
        encoder=encoder,
        decoder=decoder,
    )
    return ModelSpec(
        architecture="WhisperForConditionalGeneration",
        vocab=config.positive_int("vocab_size"),
        hidden=width,
        layers=decoder.layers,
        kv=KvShape.plain(layers=decoder.layers, kv_heads=decoder.heads, head_dim=width // decoder.heads),
        max_positions=details.begin + target,
        tied=True,
        details=details,
        audio_tokens=details.begin,
    )


def _stack(config: ConfigFields, side: str, width: int) -> WhisperStackConfig:
    heads = config.positive_int(f"{side}_attention_heads")
    head_dim, rest = divmod(width, heads)
    if rest or head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise config.error(
            f"d_model ({width}) must be {side}_attention_heads ({heads}) times an even number up to {MAX_HEAD_DIM}"
        )
    layers = layer_count(config, f"{side}_layers")
    return WhisperStackConfig(layers=layers, heads=heads, intermediate=config.positive_int(f"{side}_ffn_dim"))


def whisper_layout(spec: ModelSpec) -> WeightLayout:
    """Weights ``embed``; ``positions``, one table for all positions of a sequence, the encoder's first; ``norm``; of
    the encoder ``encoder.first`` and ``encoder.second`` (its convolutions) and ``encoder.norm``.

    Layer i of the decoder is ``i``, of the encoder ``encoder.i``.  Each has the matrices ``qkv``, ``out``, ``up`` and
    ``down`` with their biases; those of ``qkv`` are ``q_bias`` and ``v_bias``, for keys have none; and the norms
    ``attention_norm`` and ``mlp_norm``.  The decoder also has ``cross_q``, ``cross_kv`` (biases ``cross_q_bias``,
    ``cross_v_bias``), ``cross_out`` and ``cross_norm``.
    """
    whisper, width = spec.details_as(WhisperConfig), spec.hidden
    heard, written = "model.encoder.", "model.decoder."
    sounds = TensorPart(f"{heard}embed_positions.weight", (whisper.source, width))
    padding = TensorPart(
        sounds.tensor, sounds.shape, rows=RowSlice(0, whisper.begin - whisper.source)
    )  # never looked up
    texts = TensorPart(f"{written}embed_positions.weight", (whisper.target, width))
    between = (padding,) if whisper.begin > whisper.source else ()
    weights: list[Matrix | Vector] = [
        Matrix("embed", (TensorPart(f"{written}embed_tokens.weight", (spec.vocab, width)),)),
        Matrix("positions", (sounds, *between, texts)),
    ]
    for name, tensor, inputs in (("first", "conv1", whisper.bands), ("second", "conv2", width)):
        kernel = TensorPart(f"{heard}{tensor}.weight", (width, inputs, KERNEL), flat=True)
        bias = TensorPart(f"{heard}{tensor}.bias", (width,))
        weights += [Matrix(f"encoder.{name}", (kernel,)), Vector(f"encoder.{name}_bias", (bias,))]
    for index in range(whisper.encoder.layers):
        weights += _WhisperTensors(f"{heard}layers.{index}.", f"encoder.{index}.", width).layer(whisper.encoder)
    for index in range(whisper.decoder.layers):
        place = _WhisperTensors(f"{written}layers.{index}.", f"{index}.", width)
        weights += [*place.layer(whisper.decoder), *place.cross(whisper.decoder)]
    weights += _WhisperTensors(heard, "encoder.", width).norm("norm", "layer_norm")
    weights += _WhisperTensors(written, "", width).norm("norm", "layer_norm")
    return WeightLayout(tuple(weights), re.compile(r"proj_out\.weight"))


class _WhisperTensors:
    """Weights that begin with ``weights``, of tensors that begin with ``tensors``."""

    def __init__(self, tensors: str, weights: str, width: int) -> None:
        self._tensors = tensors
        self._weights = weights
        self._width = width

    def norm(self, weight: str, name: str) -> list[Matrix | Vector]:
        return [self._vector(weight, f"{name}.weight"), self._vector(f"{weight}_bias", f"{name}.bias")]

    def layer(self, stack: WhisperStackConfig) -> list[Matrix | Vector]:
        """What both sides have."""
        inner, units = stack.intermediate, self._width // stack.heads
        return [
            *self.norm("attention_norm", "self_attn_layer_norm"),
            self._matrix("qkv", *(f"self_attn.{name}_proj" for name in "qkv")),
            self._vector("q_bias", "self_attn.q_proj.bias"),
            self._vector("v_bias", "self_attn.v_proj.bias"),
            self._matrix("out", "self_attn.out_proj", segments=segment_ends(self._width, units)),
            self._vector("out_bias", "self_attn.out_proj.bias"),
            *self.norm("mlp_norm", "final_layer_norm"),
            self._matrix("up", "fc1", shape=(inner, self._width)),
            self._vector("up_bias", "fc1.bias", inner),
            self._matrix("down", "fc2", shape=(self._width, inner), segments=segment_ends(inner, COLUMN_UNIT)),
            self._vector("down_bias", "fc2.bias"),
        ]

    def cross(self, stack: WhisperStackConfig) -> list[Matrix | Vector]:
        """What reads the encoder's rows."""
        units = self._width // stack.heads
        return [
            *self.norm("cross_norm", "encoder_attn_layer_norm"),
            self._matrix("cross_q", "encoder_attn.q_proj"),
            self._vector("cross_q_bias", "encoder_attn.q_proj.bias"),
            self._matrix("cross_kv", "encoder_attn.k_proj", "encoder_attn.v_proj"),
            self._vector("cross_v_bias", "encoder_attn.v_proj.bias"),
            self._matrix("cross_out", "encoder_attn.out_proj", segments=segment_ends(self._width, units)),
            self._vector("cross_out_bias", "encoder_attn.out_proj.bias"),
        ]

    def _matrix(
        self,
        weight: str,
        *names: str,
        shape: tuple[int, int] | None = None,
        segments: tuple[int, ...] | None = None,
    ) -> Matrix:
        parts = (TensorPart(f"{self._tensors}{name}.weight", shape or (self._width, self._width)) for name in names)
        return Matrix(self._weights + weight, tuple(parts), segments)

    def _vector(self, weight: str, name: str, size: int | None = None) -> Vector:
        return Vector(self._weights + weight, (TensorPart(self._tensors + name, (size or self._width,)),))
