"""gpt-oss (arXiv:2508.10925): every second layer through a window, a sink in every head, biases everywhere, and experts
whose gate and up lie column by column in one stack."""

from __future__ import annotations

from penstock.kernels.kinds import SWIGLU_OAI, Gate
from penstock.kernels.routing import Score
from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Names, Norm
from penstock.weights.decoder_fields import (
    decoder_spec,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
    sliding_layers,
    window_of,
    without_window,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.moe import Moe, MoeNames
from penstock.weights.moe_fields import parse_routing
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec

NAMES = Names(
    moe=MoeNames(
        router="mlp.router",
        gate_up=("mlp.experts.gate_up_proj",),
        gate_up_bias="mlp.experts.gate_up_proj_bias",
        down="mlp.experts.down_proj",
        down_bias="mlp.experts.down_proj_bias",
        stacked=True,
    )
)


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "gpt_oss")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    bias = config.get("attention_bias", bool, True)
    sliding = sizes.attention(
        parse_rope(config, sizes.head_dim, theta=150_000.0),
        window=window_of(config),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    experts = Moe(
        routing=parse_routing(config, experts="num_local_experts", score=Score.SOFTMAX_CHOSEN),
        intermediate=config.size("intermediate_size"),
        gate=Gate(
            alpha=config.real("swiglu_alpha", SWIGLU_OAI.alpha),
            limit=config.real("swiglu_limit", SWIGLU_OAI.limit),
            shift=SWIGLU_OAI.shift,
            interleaved=True,
        ),
        router_bias=True,
        bias=True,
    )
    layers = tuple(
        Layer(attention=sliding if slides else without_window(sliding), mlp=experts)
        for slides in sliding_layers(config, sizes.layers, lambda index: index % 2 == 0)
    )
    details = Decoder(layers=layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-5)))
    return decoder_spec(config, "GptOssForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, NAMES)
