"""OLMo 2 (arXiv:2501.00656): blocks read the hidden state as it is, what they add is normed; queries and keys are
normed over all heads."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm, QkNorm
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

NAMES = Names(attention_norm_after="post_attention_layernorm", mlp_norm_after="post_feedforward_layernorm")


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "olmo2")
    refuse_own_code(config)
    refuse_true(config, "attention_bias")
    sizes = parse_sizes(config)
    layer = Layer(
        attention=sizes.attention(parse_rope(config, sizes.head_dim), qk_norm=QkNorm.ALL),
        mlp=Mlp(
            intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
        ),
    )
    details = Decoder(
        layers=(layer,) * sizes.layers,
        norm=Norm(eps=config.real("rms_norm_eps", 1e-5)),
        norm_before=False,
        norm_after=True,
    )
    return decoder_spec(config, "Olmo2ForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, NAMES)
