"""Qwen 2 to 3, with experts, with images, and Qwen 3 Next.

Qwen 2 and 2.5 (arXiv:2407.10671) have biases; Qwen 3 (arXiv:2505.09388) normalizes queries and keys head by head, and
has experts in all layers or in some.  Qwen 3 Next: three of four layers are gated delta nets (arXiv:2412.06464), the
fourth is attention with a gated output; experts everywhere, and a shared one with a gate of its own.  Its multi-token
prediction (``mtp.*``) is not computed: a state cannot be rolled back.  Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL
(arXiv:2502.13923: windows, gated units): Qwen 2 with three-axis positions behind a vision encoder.  Images are served,
videos are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from penstock.kernels.operands import STATE_UNIT, Activation, Gate
from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import (
    AttentionConfig,
    DecoderConfig,
    DecoderTensorNames,
    GatedAttentionConfig,
    LayerConfig,
    MlpConfig,
    NormConfig,
    QkNorm,
)
from penstock.weights.architecture.gated_delta_net import GatedDeltaNetConfig
from penstock.weights.architecture.moe import GatedSharedMoeConfig, MoeConfig, MoeTensorNames
from penstock.weights.architecture.rope import MropeSections, parse_rope
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.architecture.vision import VisionConfig, VisionDecoderConfig, VisionTensorNames, vision_layout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    DecoderSizes,
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
    sparse_layers,
    without_window,
)


def parse_qwen2(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen2")
    refuse_true(config, "use_mrope")
    sizes = parse_sizes(config)
    attention = sizes.attention(parse_rope(config, sizes.head_dim), window=sliding_window(config), qkv_bias=True)
    return _spec(config, "Qwen2ForCausalLM", sizes, attention)


def parse_qwen3(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen3")
    sizes = parse_sizes(config.with_defaults({"head_dim": 128}))
    bias = config.get("attention_bias", bool, False)
    attention = sizes.attention(
        parse_rope(config, sizes.head_dim),
        window=sliding_window(config),
        qk_norm=QkNorm.HEAD,
        qkv_bias=bias,
        out_bias=bias,
    )
    return _spec(config, "Qwen3ForCausalLM", sizes, attention)


def qwen_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())


def _spec(config: ConfigFields, architecture: str, sizes: DecoderSizes, sliding: AttentionConfig) -> ModelSpec:
    """``sliding`` in the layers from ``max_window_layers`` on, if windows are used at all; the same without before."""
    if not config.has("is_causal"):  # a release that looks both ways for vectors says so, and brings code that does it
        refuse_own_code(config)
    mlp = MlpConfig(
        intermediate=config.positive_int("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
    )
    first = config.get("max_window_layers", int, 28) if config.get("use_sliding_window", bool, False) else sizes.layers
    layers = tuple(
        LayerConfig(attention=sliding if slides else without_window(sliding), mlp=mlp)
        for slides in sliding_layers(config, sizes.layers, lambda index: index >= first)
    )
    details = DecoderConfig(layers=layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6)))
    return decoder_spec(config, architecture, sizes, details)


def parse_qwen3_moe(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen3_moe")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    bias = config.get("attention_bias", bool, False)
    attention = sizes.attention(
        parse_rope(config, sizes.head_dim),
        window=sliding_window(config) if config.get("use_sliding_window", bool, False) else None,
        qk_norm=QkNorm.HEAD,
        qkv_bias=bias,
        out_bias=bias,
    )
    activation = parse_activation(config, "hidden_act", "silu")
    dense = MlpConfig(intermediate=config.positive_int("intermediate_size"), activation=activation)
    sparse = MoeConfig(
        routing=parse_routing(config, experts="num_experts", normalised=config.get("norm_topk_prob", bool, False)),
        intermediate=config.positive_int("moe_intermediate_size"),
        gate=Gate(activation=activation),
    )
    layers = tuple(
        LayerConfig(attention=attention, mlp=sparse if has_experts else dense)
        for has_experts in sparse_layers(config, sizes.layers)
    )
    details = DecoderConfig(layers=layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6)))
    return decoder_spec(config, "Qwen3MoeForCausalLM", sizes, details)


def qwen3_moe_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())


FULL, LINEAR = "full_attention", "linear_attention"
MAX_TAPS = 8
MAX_KEY_DIM = 1024

QWEN3_NEXT_NAMES = DecoderTensorNames(
    moe=MoeTensorNames(
        shared_gate_up=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        shared_down="mlp.shared_expert.down_proj.weight",
        shared_gate="mlp.shared_expert_gate.weight",
    ),
    ignored=r".*\.rotary_emb\.inv_freq|mtp\..*",
)


def parse_qwen3_next(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen3_next")
    refuse_own_code(config)
    refuse_true(config, "use_sliding_window", "attention_bias")
    config = config.with_defaults({"head_dim": 256})
    sizes, activation = parse_sizes(config, max_positions=32768), parse_activation(config, "hidden_act", "silu")
    dense = MlpConfig(intermediate=config.positive_int("intermediate_size", 5632), activation=activation)
    sparse = GatedSharedMoeConfig(
        routing=parse_routing(config, experts="num_experts", normalised=config.get("norm_topk_prob", bool, True)),
        intermediate=config.positive_int("moe_intermediate_size"),
        gate=Gate(activation=activation),
        shared=config.positive_int("shared_expert_intermediate_size"),
    )
    blocks = parse_qwen3_next_blocks(config, sizes, activation)
    layers = tuple(
        LayerConfig(attention=block, mlp=sparse if has_experts else dense)
        for block, has_experts in zip(blocks, sparse_layers(config, sizes.layers), strict=True)
    )
    details = DecoderConfig(layers=layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6), offset=1.0))
    return decoder_spec(config, "Qwen3NextForCausalLM", sizes, details)


def qwen3_next_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, QWEN3_NEXT_NAMES)


def parse_qwen3_next_blocks(
    config: ConfigFields, sizes: DecoderSizes, activation: Activation
) -> list[GatedAttentionConfig | GatedDeltaNetConfig]:
    """The first block of every layer.  Raises ModelError where the kernels cannot compute them."""
    if activation is not Activation.SILU:
        raise config.error(f"hidden_act is {activation.value}; delta nets can be served with silu only")
    rope = parse_rope(config.with_defaults({"partial_rotary_factor": 0.25}), sizes.head_dim)
    full = GatedAttentionConfig(**msgspec.structs.asdict(sizes.attention(rope, qk_norm=QkNorm.HEAD)))
    delta = parse_gated_delta_net(config)
    return [delta if kind == LINEAR else full for kind in qwen3_next_layer_kinds(config, sizes.layers)]


def qwen3_next_layer_kinds(config: ConfigFields, layers: int) -> list[str]:
    """``layer_types``, or every ``full_attention_interval``-th layer full.  Both kinds must be there."""
    interval = config.positive_int("full_attention_interval", 4)
    usual = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    kinds = config.get("layer_types", list, usual)
    if len(kinds) != layers or set(kinds) != {FULL, LINEAR}:
        raise config.error(f"layer_types must name {layers} layers '{FULL}' or '{LINEAR}', some of each")
    return kinds


def parse_gated_delta_net(config: ConfigFields) -> GatedDeltaNetConfig:
    """The sizes of a delta net.  Raises ModelError for sizes that the kernels cannot compute."""
    delta = GatedDeltaNetConfig(
        key_heads=config.positive_int("linear_num_key_heads", 16),
        heads=config.positive_int("linear_num_value_heads", 32),
        key_dim=config.positive_int("linear_key_head_dim", 128),
        value_dim=config.positive_int("linear_value_head_dim", 128),
        taps=config.positive_int("linear_conv_kernel_dim", 4),
    )
    if delta.heads % delta.key_heads:
        raise config.error(
            f"linear_num_value_heads ({delta.heads}) must be a multiple of linear_num_key_heads ({delta.key_heads})"
        )
    if delta.key_dim % 2 or max(delta.key_dim, delta.value_dim) > MAX_KEY_DIM:
        raise config.error(f"linear_key_head_dim must be even, and no linear head larger than {MAX_KEY_DIM}")
    if delta.value_dim % STATE_UNIT or delta.channels % STATE_UNIT:
        raise config.error(f"linear_value_head_dim, and all channels together, must be multiples of {STATE_UNIT}")
    if not 2 <= delta.taps <= MAX_TAPS:
        raise config.error(f"linear_conv_kernel_dim must be from 2 to {MAX_TAPS}, got {delta.taps}")
    return delta


MAX_PATCH = 256
_GATED = VisionTensorNames(inward=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj")
_OLD, _NEW = DecoderTensorNames(), DecoderTensorNames(model="model.language_model.")


def parse_qwen2_vl(config: ConfigFields) -> ModelSpec:
    """Qwen2-VL.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen2_vl")
    return _parse(config, "Qwen2VLForConditionalGeneration", _plain_vision)


def parse_qwen25_vl(config: ConfigFields) -> ModelSpec:
    """Qwen2.5-VL.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen2_5_vl")
    return _parse(config, "Qwen2_5_VLForConditionalGeneration", _windowed_vision)


def qwen_vl_layout(spec: ModelSpec) -> WeightLayout:
    """The weights of the decoder, see ``decoder_layout``, and of the vision encoder, see ``vision_layout``."""
    vision = spec.details_as(VisionDecoderConfig).vision
    names = _GATED if vision.gated else VisionTensorNames()

    def whole(text: DecoderTensorNames, visual: VisionTensorNames, *others: WeightLayout) -> WeightLayout:
        own = decoder.decoder_layout(spec, text)
        return WeightLayout((*own.weights, *vision_layout(vision, visual)), own.ignored, others)

    return whole(_OLD, names, whole(_NEW, replace(names, prefix="model.visual.")))


def _parse(config: ConfigFields, architecture: str, vision_of: Callable[[ConfigFields], VisionConfig]) -> ModelSpec:
    refuse_own_code(config)
    text = config.section("text_config") or config
    refuse_true(text, "use_sliding_window")
    sizes = parse_sizes(text, max_positions=32_768)
    rope = parse_rope(text, sizes.head_dim, theta=1_000_000.0)
    if not isinstance(rope.scaling, MropeSections):
        raise text.error("has no mrope_section: which columns of a head follow which axis of an image")
    layer = LayerConfig(
        attention=sizes.attention(rope, qkv_bias=True),
        mlp=MlpConfig(
            intermediate=text.positive_int("intermediate_size"), activation=parse_activation(text, "hidden_act", "silu")
        ),
    )
    section = config.section("vision_config")
    if section is None:
        raise config.error("has no vision_config")
    vision = vision_of(section)
    if vision.out != sizes.hidden:
        raise section.error(f"gives rows of {vision.out} numbers, the decoder reads rows of {sizes.hidden}")
    plain = DecoderConfig(
        layers=(layer,) * sizes.layers, norm=NormConfig(eps=text.positive_float("rms_norm_eps", 1e-6))
    )
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
    spec = decoder_spec(text, architecture, sizes, VisionDecoderConfig(**fields, vision=vision))
    return msgspec.structs.replace(spec, tied=spec.tied or config.get("tie_word_embeddings", bool, False))


def _plain_vision(config: ConfigFields) -> VisionConfig:
    width = config.positive_int("embed_dim", 1280)
    kind = config.get("hidden_act", str, "quick_gelu")
    activation, alpha = (
        (Activation.SILU, 1.702) if kind == "quick_gelu" else (parse_activation(config, "hidden_act", kind), 1.0)
    )
    return _checked(
        config,
        VisionConfig(
            **_common(config),
            width=width,
            intermediate=int(width * config.positive_float("mlp_ratio", 4)),
            out=config.positive_int("hidden_size"),
            norm="layer",
            activation=activation,
            alpha=alpha,
        ),
    )


def _windowed_vision(config: ConfigFields) -> VisionConfig:
    common = _common(config)
    side = common["patch"] * common["merge"]
    window = config.positive_int("window_size", 112)
    full = config.get("fullatt_block_indexes", list, [7, 15, 23, 31])
    if window % side:
        raise config.error(f"window_size {window} is no multiple of a token's side of {side} pixels")
    if not all(type(index) is int and 0 <= index < common["layers"] for index in full):
        raise config.error(f"fullatt_block_indexes must name layers, got {full!r}")
    return _checked(
        config,
        VisionConfig(
            **common,
            width=config.positive_int("hidden_size"),
            intermediate=config.positive_int("intermediate_size"),
            out=config.positive_int("out_hidden_size"),
            norm="rms",
            activation=parse_activation(config, "hidden_act", "silu"),
            gated=True,
            window=window // side,
            full_layers=tuple(full),
        ),
    )


def _common(config: ConfigFields) -> dict[str, Any]:
    channels = config.positive_int("in_channels", config.positive_int("in_chans", 3))
    if channels != 3:
        raise config.error(f"in_channels must be 3 (red, green, blue), got {channels}")
    return {
        "layers": layer_count(config, "depth"),
        "heads": config.positive_int("num_heads", 16),
        "patch": config.positive_int("patch_size", 14),
        "merge": config.positive_int("spatial_merge_size", 2),
        "frames": config.positive_int("temporal_patch_size", 2),
    }


def _checked(config: ConfigFields, vision: VisionConfig) -> VisionConfig:
    if vision.width % (4 * vision.heads):
        raise config.error(f"a width of {vision.width} is not {vision.heads} heads of a multiple of 4 columns")
    if max(vision.patch, vision.merge, vision.frames) > MAX_PATCH:
        raise config.error(f"patches, what is merged of them, and frames may be at most {MAX_PATCH} a side")
    rope = config.section("rope_parameters")
    return (
        vision
        if rope is None
        else msgspec.structs.replace(vision, theta=rope.positive_float("rope_theta", vision.theta))
    )
