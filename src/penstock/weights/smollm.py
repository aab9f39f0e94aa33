"""SmolLM3: every fourth layer knows no position (NoPE, arXiv:2501.18795)."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.decoder_fields import (
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
    sliding_layers,
    window_of,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "smollm3")
    refuse_own_code(config)
    sizes = parse_sizes(config.over({"num_key_value_heads": 4}), max_positions=32_768)
    rope, bias = parse_rope(config, sizes.head_dim, theta=2_000_000.0), config.get("attention_bias", bool, False)
    rotated = rotated_layers(config, sizes.layers)
    window = window_of(config) if config.get("use_sliding_window", bool, False) else None
    slides = sliding_layers(config, sizes.layers, lambda index: not rotated[index])
    mlp = Mlp(
        intermediate=config.size("intermediate_size"),
        activation=parse_activation(config, "hidden_act", "silu"),
        bias=config.get("mlp_bias", bool, False),
    )
    layers = tuple(
        Layer(
            attention=sizes.attention(
                rope if rotated[index] else None,
                window=window if slides[index] else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            mlp=mlp,
        )
        for index in range(sizes.layers)
    )
    details = Decoder(layers=layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-6)))
    return decoder_spec(config, "SmolLM3ForCausalLM", sizes, details, tied=True)


def rotated_layers(config: Fields, layers: int) -> list[bool]:
    """Which layers rotate queries and keys: 1 in ``no_rope_layers``, by default all but every fourth."""
    interval = config.size("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers", list, [int((index + 1) % interval != 0) for index in range(layers)])
    if len(flags) < layers or not set(flags[:layers]) <= {0, 1}:
        raise config.refuse(f"no_rope_layers must have {layers} entries, each 0 or 1")
    return [bool(flag) for flag in flags[:layers]]


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())
