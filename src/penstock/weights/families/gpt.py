"""OpenAI's GPT-2 and gpt-oss.

GPT-2: learned positions, layer norms, biases everywhere, matrices stored inputs first.  gpt-oss (arXiv:2508.10925):
every second layer with a window, a sink in every head, biases everywhere, and experts whose gate and up columns
alternate in one stack.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.kernels.operands import SWIGLU_OAI, Gate, Score
from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import DecoderConfig, DecoderTensorNames, LayerConfig, MlpConfig, NormConfig
from penstock.weights.architecture.moe import MoeConfig, MoeTensorNames
from penstock.weights.architecture.rope import parse_rope
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    decoder_spec,
    layer_count,
    parse_activation,
    parse_routing,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
    sliding_layers,
    sliding_window,
    without_window,
)

GPT2_NAMES = DecoderTensorNames(
    model="transformer.",
    embed="wte",
    positions="wpe",
    norm="ln_f",
    layer="h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
)
"""As transformers writes them; the first releases have no "transformer." in front."""


def parse_gpt2(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "gpt2")
    refuse_own_code(config)
    refuse_true(config, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    if not config.get("scale_attn_weights", bool, True):
        raise config.error("scale_attn_weights is false; only scaled attention can be served")
    hidden = config.positive_int("n_embd")
    usual = {
        "hidden_size": hidden,
        "num_attention_heads": config.positive_int("n_head"),
        "num_hidden_layers": layer_count(config, "n_layer"),
        "max_position_embeddings": config.positive_int("n_positions", 1024),
    }
    sizes = parse_sizes(ConfigFields(usual, config.where))
    layer = LayerConfig(
        attention=sizes.attention(None, qkv_bias=True, out_bias=True),
        mlp=MlpConfig(
            intermediate=config.positive_int("n_inner", 4 * hidden),
            activation=parse_activation(config, "activation_function", "gelu_new"),
            gated=False,
            bias=True,
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers,
        norm=NormConfig(eps=config.positive_float("layer_norm_epsilon", 1e-5), kind="layer"),
        learned_positions=sizes.max_positions,
    )
    return decoder_spec(config, "GPT2LMHeadModel", sizes, details, tied=True)


def gpt2_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, GPT2_NAMES, replace(GPT2_NAMES, model=""))


GPT_OSS_NAMES = DecoderTensorNames(
    moe=MoeTensorNames(
        router="mlp.router",
        gate_up=("mlp.experts.gate_up_proj",),
        gate_up_bias="mlp.experts.gate_up_proj_bias",
        down="mlp.experts.down_proj",
        down_bias="mlp.experts.down_proj_bias",
        stacked=True,
    )
)


def parse_gpt_oss(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "gpt_oss")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    bias = config.get("attention_bias", bool, True)
    sliding = sizes.attention(
        parse_rope(config, sizes.head_dim, theta=150_000.0),
        window=sliding_window(config),
        qkv_bias=bias,
        out_bias=bias,
        sinks=True,
    )
    experts = MoeConfig(
        routing=parse_routing(config, experts="num_local_experts", score=Score.SOFTMAX_CHOSEN),
        intermediate=config.positive_int("intermediate_size"),
        gate=Gate(
            alpha=config.positive_float("swiglu_alpha", SWIGLU_OAI.alpha),
            limit=config.positive_float("swiglu_limit", SWIGLU_OAI.limit),
            shift=SWIGLU_OAI.shift,
            interleaved=True,
        ),
        router_bias=True,
        bias=True,
    )
    layers = tuple(
        LayerConfig(attention=sliding if slides else without_window(sliding), mlp=experts)
        for slides in sliding_layers(config, sizes.layers, lambda index: index % 2 == 0)
    )
    details = DecoderConfig(layers=layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-5)))
    return decoder_spec(config, "GptOssForCausalLM", sizes, details)


def gpt_oss_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, GPT_OSS_NAMES)
