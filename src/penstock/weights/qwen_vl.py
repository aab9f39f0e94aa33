"""Qwen2-VL (arXiv:2409.12191) and Qwen2.5-VL (arXiv:2502.13923: windows, gated units): Qwen 2 with positions of three
axes behind a reader of images.  Images are served; films are not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec

from penstock.kernels.kinds import Activation
from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.decoder_fields import (
    decoder_spec,
    layer_count,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import Axes, parse_rope
from penstock.weights.spec import ModelSpec
from penstock.weights.vision import SeeingDecoder, Vision, VisionNames, vision_layout

MAX_PATCH = 256
_GATED = VisionNames(inward=("mlp.gate_proj", "mlp.up_proj"), down="mlp.down_proj")
_OLD, _NEW = Names(), Names(model="model.language_model.")


def parse_qwen2_vl(config: Fields) -> ModelSpec:
    """Qwen2-VL.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen2_vl")
    return _parse(config, "Qwen2VLForConditionalGeneration", _plain_vision)


def parse_qwen25_vl(config: Fields) -> ModelSpec:
    """Qwen2.5-VL.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen2_5_vl")
    return _parse(config, "Qwen2_5_VLForConditionalGeneration", _windowed_vision)


def layout(spec: ModelSpec) -> WeightLayout:
    """That of the decoder, see ``decoder.layout``, and of the reader of images, see ``vision.vision_layout``."""
    vision = spec.own(SeeingDecoder).vision
    names = _GATED if vision.gated else VisionNames()

    def whole(text: Names, visual: VisionNames, *others: WeightLayout) -> WeightLayout:
        own = decoder.layout(spec, text)
        return WeightLayout((*own.weights, *vision_layout(vision, visual)), own.ignored, others)

    return whole(_OLD, names, whole(_NEW, replace(names, prefix="model.visual.")))


def _parse(config: Fields, architecture: str, vision_of: Callable[[Fields], Vision]) -> ModelSpec:
    refuse_own_code(config)
    text = config.section("text_config") or config
    refuse_true(text, "use_sliding_window")
    sizes = parse_sizes(text, max_positions=32_768)
    rope = parse_rope(text, sizes.head_dim, theta=1_000_000.0)
    if not isinstance(rope.scaling, Axes):
        raise text.refuse("has no mrope_section: which columns of a head follow which axis of an image")
    layer = Layer(
        attention=sizes.attention(rope, qkv_bias=True),
        mlp=Mlp(intermediate=text.size("intermediate_size"), activation=parse_activation(text, "hidden_act", "silu")),
    )
    section = config.section("vision_config")
    if section is None:
        raise config.refuse("has no vision_config")
    vision = vision_of(section)
    if vision.out != sizes.hidden:
        raise section.refuse(f"gives rows of {vision.out} numbers, the decoder reads rows of {sizes.hidden}")
    plain = Decoder(layers=(layer,) * sizes.layers, norm=Norm(eps=text.real("rms_norm_eps", 1e-6)))
    fields = {name: getattr(plain, name) for name in plain.__struct_fields__}
    spec = decoder_spec(text, architecture, sizes, SeeingDecoder(**fields, vision=vision))
    return msgspec.structs.replace(spec, tied=spec.tied or config.get("tie_word_embeddings", bool, False))


def _plain_vision(config: Fields) -> Vision:
    width = config.size("embed_dim", 1280)
    kind = config.get("hidden_act", str, "quick_gelu")
    activation, alpha = (
        (Activation.SILU, 1.702) if kind == "quick_gelu" else (parse_activation(config, "hidden_act", kind), 1.0)
    )
    return _checked(
        config,
        Vision(
            **_common(config),
            width=width,
            intermediate=int(width * config.real("mlp_ratio", 4)),
            out=config.size("hidden_size"),
            norm="layer",
            activation=activation,
            alpha=alpha,
        ),
    )


def _windowed_vision(config: Fields) -> Vision:
    common = _common(config)
    side = common["patch"] * common["merge"]
    window = config.size("window_size", 112)
    full = config.get("fullatt_block_indexes", list, [7, 15, 23, 31])
    if window % side:
        raise config.refuse(f"window_size {window} is no multiple of a token's side of {side} pixels")
    if not all(type(index) is int and 0 <= index < common["layers"] for index in full):
        raise config.refuse(f"fullatt_block_indexes must name layers, got {full!r}")
    return _checked(
        config,
        Vision(
            **common,
            width=config.size("hidden_size"),
            intermediate=config.size("intermediate_size"),
            out=config.size("out_hidden_size"),
            norm="rms",
            activation=parse_activation(config, "hidden_act", "silu"),
            gated=True,
            window=window // side,
            full_layers=tuple(full),
        ),
    )


def _common(config: Fields) -> dict[str, Any]:
    channels = config.size("in_channels", config.size("in_chans", 3))
    if channels != 3:
        raise config.refuse(f"in_channels must be 3 (red, green, blue), got {channels}")
    return {
        "layers": layer_count(config, "depth"),
        "heads": config.size("num_heads", 16),
        "patch": config.size("patch_size", 14),
        "merge": config.size("spatial_merge_size", 2),
        "frames": config.size("temporal_patch_size", 2),
    }


def _checked(config: Fields, vision: Vision) -> Vision:
    if vision.width % (4 * vision.heads):
        raise config.refuse(f"a width of {vision.width} is not {vision.heads} heads of a multiple of 4 columns")
    if max(vision.patch, vision.merge, vision.frames) > MAX_PATCH:
        raise config.refuse(f"patches, what is merged of them, and frames may be at most {MAX_PATCH} a side")
    rope = config.section("rope_parameters")
    return vision if rope is None else msgspec.structs.replace(vision, theta=rope.real("rope_theta", vision.theta))
