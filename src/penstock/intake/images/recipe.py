"""How a model's makers prepare its images, as ``preprocessor_config.json`` writes it.

The steps are those of transformers' Qwen2VLImageProcessor.  Knows nothing about files of images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.errors import ModelError
from penstock.weights.architecture.vision import VisionDecoderConfig
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import BUILT_IN
from penstock.weights.model_files import CONFIG, ModelFiles, load_json

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # where newer releases have it, under "image_processor"

MAX_ASPECT = 200
"""An image may be so many times as long as it is wide, or the other way round."""

BICUBIC = 3
"""Pillow's number."""

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class ImageRecipe(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of an image before its model sees it."""

    side: int  # pixels a side of one token
    min_pixels: int
    max_pixels: int
    scale: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    token: int  # that stands for a token of an image

    def size(self, width: int, height: int, max_tokens: int) -> tuple[int, int]:
        """(rows, columns) of tokens of an image of so many pixels: near its size and its shape, within the model's
        bounds and ``max_tokens``.

        An image so long and thin that this cannot be done keeps one token across, and may have more than
        ``max_tokens``.
        """
        side, most = self.side, min(self.max_pixels, max_tokens * self.side**2)
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > most:
            by = math.sqrt(height * width / most)
            return max(1, math.floor(height / by / side)), max(1, math.floor(width / by / side))
        if rows * columns * side**2 < self.min_pixels:
            by = math.sqrt(self.min_pixels / (height * width))
            return math.ceil(height * by / side), math.ceil(width * by / side)
        return rows, columns


def read_recipe(files: ModelFiles) -> ImageRecipe | None:
    """The recipe of a model whose images can be read here; None for one that reads text only.

    Raises ModelError if the model reads images, and its files ask for what is not done here.
    """
    values = load_json(files, CONFIG) or {}
    names = values.get("architectures")
    family = BUILT_IN.get(names[0]) if isinstance(names, list) and names and isinstance(names[0], str) else None
    if family is None or "vision_config" not in values:
        return None
    config = ConfigFields(values, files.path_of(CONFIG))
    details = family.parse(config).details
    if not isinstance(details, VisionDecoderConfig):
        return None
    return _parse(_processor(files), details.vision.token_side, config.get("image_token_id", int, 151_655))


def _processor(files: ModelFiles) -> ConfigFields:
    own = load_json(files, PREPROCESSOR)
    if own is not None:
        return ConfigFields(own, files.path_of(PREPROCESSOR))
    both = load_json(files, PROCESSOR) or {}
    inner = both.get("image_processor")
    if not isinstance(inner, dict):
        raise ModelError(
            f"{files.path_of(PREPROCESSOR)} is missing: it says how the model's images are prepared. It is part of "
            "the model's release"
        )
    return ConfigFields(inner, f"{files.path_of(PROCESSOR)}: image_processor")


def _parse(config: ConfigFields, side: int, token: int) -> ImageRecipe:
    for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
        if not config.get(name, bool, True):
            raise config.error(f"{name} is false; only images that are prepared in all steps can be served")
    if config.get("resample", int, BICUBIC) != BICUBIC:
        raise config.error(f"resample must be {BICUBIC} (bicubic), got {config.values['resample']!r}")
    own = config.positive_int("patch_size", 14) * config.positive_int("merge_size", 2)
    if own != side:
        raise config.error(f"patch_size times merge_size is {own}, by {CONFIG} a token is {side} pixels a side")
    sizes: Mapping[str, Any] = config.get("size", dict, {})
    inside = ConfigFields(dict(sizes), f"{config.where}: size")
    least = config.positive_int("min_pixels", inside.positive_int("shortest_edge", 56 * 56))
    most = config.positive_int("max_pixels", inside.positive_int("longest_edge", 28 * 28 * 1280))
    if least > most:
        raise config.error(f"min_pixels ({least}) is above max_pixels ({most})")
    return ImageRecipe(
        side=side,
        min_pixels=least,
        max_pixels=most,
        scale=config.positive_float("rescale_factor", 1 / 255),
        mean=_three(config, "image_mean", _MEAN, least=None),
        deviation=_three(config, "image_std", _DEVIATION, least=0.0),
        token=token,
    )


def _three(
    config: ConfigFields, name: str, default: tuple[float, float, float], least: float | None
) -> tuple[float, float, float]:
    values = config.get(name, list, list(default))
    if len(values) != 3 or not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        raise config.error(f"{name} must be three numbers, got {values!r}")
    if least is not None and min(values) <= least:
        raise config.error(f"{name} must be above {least:g}, got {values!r}")
    return (float(values[0]), float(values[1]), float(values[2]))
