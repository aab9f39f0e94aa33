"""Image files to the pixels that a model reads, as its ``preprocessor_config.json`` says.

Pillow (an extra, ``penstock[vision]``) decodes and resizes, as transformers' Qwen2VLImageProcessor does.  An image's
size is checked before any of it is decoded.  Knows nothing about the files' origin.
"""

from __future__ import annotations

import io
import math
import re
import struct
import zlib
from collections.abc import Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import msgspec

from penstock.config.limits import RequestLimits
from penstock.errors import ModelError, RequestError
from penstock.types import ImageInput
from penstock.weights.architecture.vision import VisionDecoderConfig
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import BUILT_IN
from penstock.weights.model_files import CONFIG, ModelFiles, load_json

if TYPE_CHECKING:
    from PIL import Image

PREPROCESSOR = "preprocessor_config.json"
PROCESSOR = "processor_config.json"  # where newer releases have it, under "image_processor"

MAX_ASPECT = 200
"""The largest ratio of an image's sides."""

BICUBIC = 3
"""Pillow's number."""

_MEAN = (0.48145466, 0.4578275, 0.40821073)
_DEVIATION = (0.26862954, 0.26130258, 0.27577711)


class ImagePreprocessorConfig(msgspec.Struct, frozen=True, kw_only=True):
    """What becomes of an image before its model sees it."""

    side: int  # pixels a side of one token
    min_pixels: int
    max_pixels: int
    scale: float
    mean: tuple[float, float, float]
    deviation: tuple[float, float, float]
    token: int  # that stands for a token of an image

    def token_grid(self, width: int, height: int, max_tokens: int) -> tuple[int, int]:
        """(rows, columns) of tokens of an image: near its size and its shape, within the model's
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


def read_image_config(files: ModelFiles) -> ImagePreprocessorConfig | None:
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


def _parse(config: ConfigFields, side: int, token: int) -> ImagePreprocessorConfig:
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
    return ImagePreprocessorConfig(
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


FORMATS = ("PNG", "JPEG", "WEBP")
DECODED_PIXEL_BYTES = 12
"""What a pixel takes while an image is decoded, turned upright and made smaller: twice or three times four bytes."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)
"""What Pillow raises for files that are cut off or damaged; which, depends on the decoder."""


def pillow_installed() -> bool:
    """Whether Pillow is installed."""
    return find_spec("PIL") is not None


def bad_image(where: str, why: str) -> RequestError:
    """A refusal in the words of OpenAI's."""
    return RequestError(f"Invalid image in '{where}': {why}", param=where, code="invalid_image")


def decoding_bytes(raw: bytes, where: str, limits: RequestLimits) -> int:
    """What ``decode_image`` takes at its peak.  From the file's head alone; 0 for a file that will be refused."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
            width, height = image.size
    except (*_BROKEN, Image.DecompressionBombError, Image.DecompressionBombWarning, MemoryError):
        return 0
    if width * height > limits.max_image_pixels:
        raise _too_many_pixels(where, limits)
    return width * height * DECODED_PIXEL_BYTES


def has_more_scans(raw: bytes, most: int) -> bool:
    """Whether a JPEG file has more than ``most`` start-of-scan markers (ITU-T T.81, B.1.1).

    Each is a pass over all its pixels.  Those of a small picture inside it do not count, nor what comes behind its end.
    A file of more than ``_MAX_MARKERS`` markers is taken for one that has.
    """
    scans, at = 0, 2
    for _ in range(_MAX_MARKERS):
        found = _MARKER.search(raw, at)
        if found is None or raw[found.end() - 1] == _END_OF_IMAGE:
            return False
        scans += raw[found.end() - 1] == _START_OF_SCAN
        if scans > most:
            return True
        at = found.end() + int.from_bytes(raw[found.end() : found.end() + 2], "big")
    return True


_MAX_MARKERS = 4096
_START_OF_SCAN, _END_OF_IMAGE = 0xDA, 0xD9
_MARKER = re.compile(rb"\xff[^\x00\x01\xff\xd0-\xd8]")
"""With a length behind it: not a byte of entropy-coded data, fill bytes, or one of the markers that stand alone."""


def decode_image(raw: bytes, recipe: ImagePreprocessorConfig, limits: RequestLimits, where: str) -> ImageInput:
    """What the model sees of this file; of a moving one, the first frame.  Raises RequestError, naming ``where``."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
            rows, columns = _checked_size(image, recipe, limits, where)
            if image.format == "JPEG" and has_more_scans(raw, limits.max_image_scans):
                raise bad_image(where, f"it has more than {limits.max_image_scans} scans (max_image_scans).")
            return _prepared(image, (rows, columns), recipe)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning):
        raise _too_many_pixels(where, limits) from None
    except UnidentifiedImageError:
        raise bad_image(where, f"it is none of {', '.join(FORMATS)}.") from None
    except _BROKEN as error:
        raise bad_image(where, f"the file is damaged ({str(error)[:200] or type(error).__name__}).") from None
    except MemoryError:
        raise bad_image(where, "there is no memory to decode it.") from None


def _too_many_pixels(where: str, limits: RequestLimits) -> RequestError:
    return bad_image(where, f"it has more than {limits.max_image_pixels} pixels (max_image_pixels).")


def _checked_size(
    image: Image.Image, recipe: ImagePreprocessorConfig, limits: RequestLimits, where: str
) -> tuple[int, int]:
    """(rows, columns) of tokens.  From the file's head alone."""
    width, height = image.size
    if width * height > limits.max_image_pixels:
        raise _too_many_pixels(where, limits)
    if max(width, height) > MAX_ASPECT * min(width, height):
        raise bad_image(
            where, f"it is {width} x {height} pixels; one side may be {MAX_ASPECT} times the other at most."
        )
    if _turned(image):
        width, height = height, width
    rows, columns = recipe.token_grid(width, height, limits.max_image_tokens)
    if rows * columns > limits.max_image_tokens:
        most = limits.max_image_tokens
        raise bad_image(
            where, f"its shape needs {rows * columns} tokens, at most {most} are allowed (max_image_tokens)."
        )
    return rows, columns


def _turned(image: Image.Image) -> bool:
    """Whether the EXIF orientation exchanges width and height."""
    from PIL import ExifTags

    return image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)


def _prepared(image: Image.Image, size: tuple[int, int], recipe: ImagePreprocessorConfig) -> ImageInput:
    from PIL import Image as Images
    from PIL import ImageOps

    rows, columns = size
    ImageOps.exif_transpose(image, in_place=True)
    upright = image if image.mode == "RGB" else image.convert("RGB")
    resized = upright.resize((columns * recipe.side, rows * recipe.side), resample=Images.Resampling.BICUBIC)
    return ImageInput(
        rows=rows,
        columns=columns,
        pixels=resized.tobytes(),
        scale=recipe.scale,
        mean=recipe.mean,
        deviation=recipe.deviation,
    )
