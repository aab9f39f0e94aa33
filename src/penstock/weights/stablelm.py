"""StableLM 3B and StableLM 2 1.6B: layer norms, a quarter of every head rotated."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.decoder_fields import (
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "stablelm")
    refuse_own_code(config)
    refuse_true(config, "qk_layernorm")
    sizes = parse_sizes(config, max_positions=4096)
    rope = parse_rope(config.over({"partial_rotary_factor": 0.25}), sizes.head_dim)
    layer = Layer(
        attention=sizes.attention(rope, qkv_bias=config.get("use_qkv_bias", bool, False)),
        mlp=Mlp(
            intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
        ),
    )
    details = Decoder(
        layers=(layer,) * sizes.layers,
        norm=Norm(eps=config.real("layer_norm_eps", 1e-5), kind="layer"),
        parallel=config.get("use_parallel_residual", bool, False),
    )
    return decoder_spec(config, "StableLmForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())
