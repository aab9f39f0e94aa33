"""The Llama family's ``config.json`` and tensor names, as Hugging Face transformers writes them (versions 4 and 5)."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names
from penstock.weights.decoder_fields import (
    activation,
    decoder_spec,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec

SILU = {"silu": "silu", "swish": "silu"}


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "llama")
    refuse_own_code(config)
    activation(config, "hidden_act", SILU, "silu")
    refuse_true(config, "attention_bias", "mlp_bias")
    sizes = parse_sizes(config)
    layer = Layer(
        attention=sizes.attention(parse_rope(config, sizes.head_dim)),
        mlp=Mlp(intermediate=config.size("intermediate_size")),
    )
    details = Decoder(layers=(layer,) * sizes.layers, norm_eps=config.real("rms_norm_eps", 1e-6))
    return decoder_spec(config, "LlamaForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())
