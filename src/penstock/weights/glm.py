"""GLM-4 9B and its 32B successor as transformers has them (``GlmForCausalLM``, ``Glm4ForCausalLM``): half of every head
is rotated, in neighbouring pairs; the later ones also norm what a block adds."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.decoder_fields import (
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec

NAMES = Names(
    gate_up=("mlp.gate_up_proj",),
    attention_norm_after="post_self_attn_layernorm",
    mlp_norm_after="post_mlp_layernorm",
)
DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072}


def parse_glm(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "glm")
    return _spec(config, "GlmForCausalLM", around=False)


def parse_glm4(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "glm4")
    return _spec(config, "Glm4ForCausalLM", around=True)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, NAMES)


def _spec(config: Fields, architecture: str, *, around: bool) -> ModelSpec:
    refuse_own_code(config)
    config = config.over(DEFAULTS)
    sizes = parse_sizes(config)
    halved = config.over({"partial_rotary_factor": 0.5})
    layer = Layer(
        attention=sizes.attention(
            parse_rope(halved, sizes.head_dim, interleaved=True), qkv_bias=config.get("attention_bias", bool, True)
        ),
        mlp=Mlp(
            intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
        ),
    )
    details = Decoder(
        layers=(layer,) * sizes.layers,
        norm=Norm(eps=config.real("rms_norm_eps", 1.5625e-07)),
        norm_after=around,
    )
    return decoder_spec(config, architecture, sizes, details)
