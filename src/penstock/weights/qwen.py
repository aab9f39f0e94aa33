"""Qwen 2 and 2.5 (arXiv:2407.10671: biases) and Qwen 3 (arXiv:2505.09388: queries and keys normed head by head)."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Attention, Decoder, Layer, Mlp, Names, Norm, QkNorm
from penstock.weights.decoder_fields import (
    Sizes,
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
    sliding_layers,
    window_of,
    without_window,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec


def parse_qwen2(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen2")
    refuse_true(config, "use_mrope")
    sizes = parse_sizes(config)
    attention = sizes.attention(parse_rope(config, sizes.head_dim), window=window_of(config), qkv_bias=True)
    return _spec(config, "Qwen2ForCausalLM", sizes, attention)


def parse_qwen3(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen3")
    sizes = parse_sizes(config.over({"head_dim": 128}))
    bias = config.get("attention_bias", bool, False)
    attention = sizes.attention(
        parse_rope(config, sizes.head_dim),
        window=window_of(config),
        qk_norm=QkNorm.HEAD,
        qkv_bias=bias,
        out_bias=bias,
    )
    return _spec(config, "Qwen3ForCausalLM", sizes, attention)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())


def _spec(config: Fields, architecture: str, sizes: Sizes, sliding: Attention) -> ModelSpec:
    """``sliding`` in the layers from ``max_window_layers`` on, if windows are used at all; the same without before."""
    if not config.has("is_causal"):  # a release that looks both ways for vectors says so, and brings code that does it
        refuse_own_code(config)
    mlp = Mlp(intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu"))
    first = config.get("max_window_layers", int, 28) if config.get("use_sliding_window", bool, False) else sizes.layers
    layers = tuple(
        Layer(attention=sliding if slides else without_window(sliding), mlp=mlp)
        for slides in sliding_layers(config, sizes.layers, lambda index: index >= first)
    )
    details = Decoder(layers=layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-6)))
    return decoder_spec(config, architecture, sizes, details)
