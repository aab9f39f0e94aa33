"""Llama 2 and 3 (arXiv:2302.13971, 2407.21783) and what else calls itself so: ``config.json`` and tensor names."""

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


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "llama")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    bias = config.get("attention_bias", bool, False)
    layer = Layer(
        attention=sizes.attention(parse_rope(config, sizes.head_dim), qkv_bias=bias, out_bias=bias),
        mlp=Mlp(
            intermediate=config.size("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
            bias=config.get("mlp_bias", bool, False),
        ),
    )
    details = Decoder(layers=(layer,) * sizes.layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-6)))
    return decoder_spec(config, "LlamaForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())
