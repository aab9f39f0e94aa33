"""Command R: both blocks of a layer read the same, through a layer norm without bias; neighbouring columns are rotated
together; logits are scaled."""

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
    refuse_variants(config, "cohere")
    refuse_own_code(config)
    refuse_true(config, "use_qk_norm", "attention_bias")
    sizes = parse_sizes(config, max_positions=8192)
    layer = Layer(
        attention=sizes.attention(parse_rope(config, sizes.head_dim, theta=500_000.0, interleaved=True)),
        mlp=Mlp(
            intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
        ),
    )
    details = Decoder(
        layers=(layer,) * sizes.layers,
        norm=Norm(eps=config.real("layer_norm_eps", 1e-5), kind="layer", bias=False),
        parallel=True,
        logit_scale=config.real("logit_scale", 0.0625),
    )
    return decoder_spec(config, "CohereForCausalLM", sizes, details, tied=True)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())
