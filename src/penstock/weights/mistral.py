"""Mistral 7B and its successors (arXiv:2310.06825), whose first release reads through a sliding window."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.decoder_fields import (
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
    window_of,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "mistral")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    layer = Layer(
        attention=sizes.attention(parse_rope(config, sizes.head_dim), window=window_of(config)),
        mlp=Mlp(
            intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
        ),
    )
    details = Decoder(layers=(layer,) * sizes.layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-6)))
    return decoder_spec(config, "MistralForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())
