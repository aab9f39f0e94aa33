"""Mistral 7B and its successors (arXiv:2310.06825), whose first release reads through a sliding window."""

from __future__ import annotations

from penstock.kernels.operands import Gate
from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.architecture.moe import Moe, MoeNames
from penstock.weights.architecture.rope import parse_rope
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import Fields
from penstock.weights.families.fields import (
    decoder_spec,
    parse_activation,
    parse_routing,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
    window_of,
)


def parse_mistral(config: Fields) -> ModelSpec:
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


def mistral_layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.decoder_layout(spec, Names())


# MERGED: Mixtral (arXiv:2401.04088): Mistral with eight experts in every layer, of which a token passes two.

MIXTRAL_NAMES = Names(
    moe=MoeNames(
        router="block_sparse_moe.gate",
        gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        down="block_sparse_moe.experts.{}.w2.weight",
    )
)


def parse_mixtral(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "mixtral")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    layer = Layer(
        attention=sizes.attention(parse_rope(config, sizes.head_dim, theta=1e6), window=window_of(config)),
        mlp=Moe(
            routing=parse_routing(config, experts="num_local_experts", normalised=True),
            intermediate=config.size("intermediate_size"),
            gate=Gate(activation=parse_activation(config, "hidden_act", "silu")),
        ),
    )
    details = Decoder(layers=(layer,) * sizes.layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-5)))
    return decoder_spec(config, "MixtralForCausalLM", sizes, details)


def mixtral_layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.decoder_layout(spec, MIXTRAL_NAMES)
