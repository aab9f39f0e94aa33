"""The bytes of an image file to the pixels that its model reads.

Pillow (an extra, ``penstock[vision]``) decodes and resizes, as in transformers' own preparation.  A file's size in
pixels is looked at before anything of it is decoded.  Knows nothing about where files come from.
"""

from __future__ import annotations

import io
import re
import struct
import zlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from penstock.config.limits import Limits
from penstock.errors import RequestError
from penstock.intake.images.recipe import MAX_ASPECT, ImageRecipe
from penstock.types import ImageInput

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
DECODED_PIXEL_BYTES = 12
"""What a pixel takes while an image is decoded, turned upright and made smaller: twice or three times four bytes."""

_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)
"""What Pillow raises for files that are cut off or damaged; which, depends on the decoder."""


def installed() -> bool:
    """Is there a decoder?"""
    return find_spec("PIL") is not None


def bad_image(where: str, why: str) -> RequestError:
    """A refusal in the words of OpenAI's."""
    return RequestError(f"Invalid image in '{where}': {why}", param=where, code="invalid_image")


def decoding_bytes(raw: bytes, where: str, limits: Limits) -> int:
    """What ``picture_of`` takes at its peak.  From the file's head alone; 0 for a file that will be refused."""
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
    """Has a JPEG file more than so many start-of-scan markers (ITU-T T.81, B.1.1)?

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


def picture_of(raw: bytes, recipe: ImageRecipe, limits: Limits, where: str) -> ImageInput:
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


def _too_many_pixels(where: str, limits: Limits) -> RequestError:
    return bad_image(where, f"it has more than {limits.max_image_pixels} pixels (max_image_pixels).")


def _checked_size(image: Image.Image, recipe: ImageRecipe, limits: Limits, where: str) -> tuple[int, int]:
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
    rows, columns = recipe.size(width, height, limits.max_image_tokens)
    if rows * columns > limits.max_image_tokens:
        most = limits.max_image_tokens
        raise bad_image(
            where, f"its shape needs {rows * columns} tokens, at most {most} are allowed (max_image_tokens)."
        )
    return rows, columns


def _turned(image: Image.Image) -> bool:
    """Does the camera's note about how it was held exchange width and height?"""
    from PIL import ExifTags

    return image.getexif().get(ExifTags.Base.Orientation) in (5, 6, 7, 8)


def _prepared(image: Image.Image, size: tuple[int, int], recipe: ImageRecipe) -> ImageInput:
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
