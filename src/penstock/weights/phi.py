"""Phi-3 and Phi-4 (arXiv:2404.14219): one matrix for queries, keys and values, one for gate and up; LongRoPE."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.decoder_fields import decoder_spec, parse_activation, parse_sizes, refuse_variants, window_of
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec

NAMES = Names(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant.

    The files bring Python code along that is what transformers has itself: it is neither run nor needed.
    """
    refuse_variants(config, "phi3")
    sizes = parse_sizes(config)
    layer = Layer(
        attention=sizes.attention(parse_rope(config, sizes.head_dim), window=window_of(config)),
        mlp=Mlp(
            intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
        ),
    )
    details = Decoder(layers=(layer,) * sizes.layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-5)))
    return decoder_spec(config, "Phi3ForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, NAMES)
