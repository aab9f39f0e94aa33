"""Qwen 3 with experts (arXiv:2505.09388): attention as in Qwen 3, experts in all layers or in some."""

from __future__ import annotations

from penstock.kernels.kinds import Gate
from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm, QkNorm
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
from penstock.weights.moe import Moe
from penstock.weights.moe_fields import parse_routing, sparse_layers
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen3_moe")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    bias = config.get("attention_bias", bool, False)
    attention = sizes.attention(
        parse_rope(config, sizes.head_dim),
        window=window_of(config) if config.get("use_sliding_window", bool, False) else None,
        qk_norm=QkNorm.HEAD,
        qkv_bias=bias,
        out_bias=bias,
    )
    activation = parse_activation(config, "hidden_act", "silu")
    dense = Mlp(intermediate=config.size("intermediate_size"), activation=activation)
    sparse = Moe(
        routing=parse_routing(config, experts="num_experts", normalised=config.get("norm_topk_prob", bool, False)),
        intermediate=config.size("moe_intermediate_size"),
        gate=Gate(activation=activation),
    )
    layers = tuple(
        Layer(attention=attention, mlp=sparse if has_experts else dense)
        for has_experts in sparse_layers(config, sizes.layers)
    )
    details = Decoder(layers=layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-6)))
    return decoder_spec(config, "Qwen3MoeForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, Names())
