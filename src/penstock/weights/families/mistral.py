"""Mistral 7B and its successors (arXiv:2310.06825), whose first release has a sliding window; Mixtral
(arXiv:2401.04088) with eight experts in every layer, two per token."""

from __future__ import annotations

from penstock.kernels.operands import Gate
from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import DecoderConfig, DecoderTensorNames, LayerConfig, MlpConfig, NormConfig
from penstock.weights.architecture.moe import MoeConfig, MoeTensorNames
from penstock.weights.architecture.rope import parse_rope
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    decoder_spec,
    parse_activation,
    parse_routing,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
    sliding_window,
)


def parse_mistral(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "mistral")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    layer = LayerConfig(
        attention=sizes.attention(parse_rope(config, sizes.head_dim), window=sliding_window(config)),
        mlp=MlpConfig(
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6))
    )
    return decoder_spec(config, "MistralForCausalLM", sizes, details)


def mistral_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())


MIXTRAL_NAMES = DecoderTensorNames(
    moe=MoeTensorNames(
        router="block_sparse_moe.gate",
        gate_up=("block_sparse_moe.experts.{}.w1.weight", "block_sparse_moe.experts.{}.w3.weight"),
        down="block_sparse_moe.experts.{}.w2.weight",
    )
)


def parse_mixtral(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "mixtral")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    layer = LayerConfig(
        attention=sizes.attention(parse_rope(config, sizes.head_dim, theta=1e6), window=sliding_window(config)),
        mlp=MoeConfig(
            routing=parse_routing(config, experts="num_local_experts", normalised=True),
            intermediate=config.positive_int("intermediate_size"),
            gate=Gate(activation=parse_activation(config, "hidden_act", "silu")),
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-5))
    )
    return decoder_spec(config, "MixtralForCausalLM", sizes, details)


def mixtral_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, MIXTRAL_NAMES)
