"""Llama 2 to 4, and models published under their architecture.

Llama 2 and 3: arXiv:2302.13971, 2407.21783.  Llama 4 for text: three layers of four rotate normalized heads and attend
to their chunk of the context, every fourth has no positions and attends to everything, with a temperature that grows
with the position; experts in every layer or in every second.
"""

from __future__ import annotations

from dataclasses import replace

from penstock.kernels.operands import Activation, Gate, Score
from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import (
    AttentionConfig,
    AttentionTemperature,
    DecoderConfig,
    DecoderTensorNames,
    LayerConfig,
    MlpConfig,
    NormConfig,
    QkNorm,
)
from penstock.weights.architecture.moe import MoeConfig, MoeTensorNames
from penstock.weights.architecture.rope import parse_rope
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    DecoderSizes,
    decoder_spec,
    parse_activation,
    parse_routing,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
)


def parse_llama(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "llama")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    bias = config.get("attention_bias", bool, False)
    layer = LayerConfig(
        attention=sizes.attention(parse_rope(config, sizes.head_dim), qkv_bias=bias, out_bias=bias),
        mlp=MlpConfig(
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
            bias=config.get("mlp_bias", bool, False),
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6))
    )
    return decoder_spec(config, "LlamaForCausalLM", sizes, details)


def llama_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())


LLAMA4_NAMES = DecoderTensorNames(
    gate_up=("feed_forward.gate_proj", "feed_forward.up_proj"),
    down="feed_forward.down_proj",
    moe=MoeTensorNames(
        router="feed_forward.router",
        gate_up=("feed_forward.experts.gate_up_proj",),
        down="feed_forward.experts.down_proj",
        stacked=True,
        shared_gate_up=(
            "feed_forward.shared_expert.gate_proj.weight",
            "feed_forward.shared_expert.up_proj.weight",
        ),
        shared_down="feed_forward.shared_expert.down_proj.weight",
    ),
)
LLAMA4_IMAGES = r"(model\.)?(vision_model|multi_modal_projector)\..*"


def parse_llama4_text(config: ConfigFields) -> ModelSpec:
    """The text model by itself.  Raises ModelError for what would be computed otherwise than its makers meant."""
    return _parse_llama4(config, "Llama4ForCausalLM")


def parse_llama4_with_images(config: ConfigFields) -> ModelSpec:
    """The text model inside one that also reads images.  Raises ModelError as the other."""
    refuse_variants(config, "llama4")
    text = config.section("text_config")
    if text is None:
        raise config.error("has no text_config")
    return _parse_llama4(text, "Llama4ForConditionalGeneration")


def llama4_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``): inside the model that also reads images, or by
    itself."""
    published = replace(
        LLAMA4_NAMES, model="language_model.model.", head="language_model.lm_head", ignored=LLAMA4_IMAGES
    )
    return decoder.decoder_layout(spec, published, LLAMA4_NAMES)


def _parse_llama4(config: ConfigFields, architecture: str) -> ModelSpec:
    refuse_variants(config, "llama4_text")
    sizes = parse_sizes(config, max_positions=131_072)
    near, far = _attention(config, sizes)
    activation = parse_activation(config, "hidden_act", "silu")
    dense = MlpConfig(intermediate=config.positive_int("intermediate_size_mlp", 16_384), activation=activation)
    experts, has_experts = _moe(config, activation), _layers_with_experts(config, sizes.layers)
    layers = tuple(
        LayerConfig(attention=near if is_near else far, mlp=experts if index in has_experts else dense)
        for index, is_near in enumerate(_near_layers(config, sizes.layers))
    )
    details = DecoderConfig(layers=layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-5)))
    return decoder_spec(config, architecture, sizes, details)


def _attention(config: ConfigFields, sizes: DecoderSizes) -> tuple[AttentionConfig, AttentionConfig]:
    """Blocks that rotate and read their chunk, and blocks that read everything without positions."""
    bias = config.get("attention_bias", bool, False)
    chunk = config.positive_int("attention_chunk_size", 8192)
    near = sizes.attention(
        parse_rope(config, sizes.head_dim, theta=500_000.0, interleaved=True),
        chunk=chunk if chunk < sizes.max_positions else None,
        qk_norm=QkNorm.UNIT if config.get("use_qk_norm", bool, True) else QkNorm.NONE,
        qkv_bias=bias,
        out_bias=bias,
    )
    tuned = config.values.get("attn_temperature_tuning")  # true or, in early files, a number
    temperature = AttentionTemperature(
        floor=config.positive_int("floor_scale", 8192), scale=config.positive_float("attn_scale", 0.1)
    )
    far = sizes.attention(
        None, temperature=temperature if tuned is None or tuned else None, qkv_bias=bias, out_bias=bias
    )
    return near, far


def _near_layers(config: ConfigFields, layers: int) -> list[bool]:
    """Which layers rotate: those with a 1 in ``no_rope_layers``, by default three of four."""
    interval = config.positive_int("no_rope_layer_interval", config.positive_int("nope_layer_interval", 4))
    rotates = config.get("no_rope_layers", list, []) or [int((index + 1) % interval != 0) for index in range(layers)]
    if len(rotates) != layers or not all(value in {0, 1} for value in rotates):
        raise config.error(f"no_rope_layers must hold a 0 or a 1 for each of {layers} layers")
    near = [value == 1 for value in rotates]
    kinds = config.get("layer_types", list, [])
    if kinds and kinds != ["chunked_attention" if one else "full_attention" for one in near]:
        raise config.error("layer_types must name 'chunked_attention' the layers that rotate and no others")
    return near


def _layers_with_experts(config: ConfigFields, layers: int) -> set[int]:
    """Their numbers: ``moe_layers``, by default every ``interleave_moe_layer_step``-th."""
    step = config.positive_int("interleave_moe_layer_step", 1)
    if config.has("moe_layers"):
        return set(config.get("moe_layers", list))
    return set(range(step - 1, layers, step))


def _moe(config: ConfigFields, activation: Activation) -> MoeConfig:
    inner = config.positive_int("intermediate_size")
    return MoeConfig(
        routing=parse_routing(config, experts="num_local_experts", score=Score.SIGMOID),
        intermediate=inner,
        gate=Gate(activation=activation),
        weighs_input=True,
        shared=inner,
    )
