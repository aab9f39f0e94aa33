"""The bytes of an image file to the pixels that its model reads.

Pillow (an extra, ``penstock[vision]``) decodes and resizes, as in transformers' own preparation.  A file's size in
pixels is looked at before anything of it is decoded.  Knows nothing about where files come from.
"""

from __future__ import annotations

import io
import struct
import zlib
from importlib.util import find_spec
from typing import TYPE_CHECKING

from penstock.config.schema import Limits
from penstock.errors import RequestError
from penstock.intake.images.recipe import MAX_ASPECT, ImageRecipe
from penstock.types import Picture

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP")
_BROKEN = (OSError, SyntaxError, ValueError, EOFError, IndexError, KeyError, TypeError, struct.error, zlib.error)
"""What Pillow raises for files that are cut off or damaged; which, depends on the decoder."""


def installed() -> bool:
    """Is there a decoder?"""
    return find_spec("PIL") is not None


def bad_image(where: str, why: str) -> RequestError:
    """A refusal in the words of OpenAI's."""
    return RequestError(f"Invalid image in '{where}': {why}", param=where, code="invalid_image")


def picture_of(raw: bytes, recipe: ImageRecipe, limits: Limits, where: str) -> Picture:
    """What the model sees of this file; of a moving one, the first frame.  Raises RequestError, naming ``where``."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(raw), formats=FORMATS) as image:
            rows, columns = _checked_size(image, recipe, limits, where)
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


def _prepared(image: Image.Image, size: tuple[int, int], recipe: ImageRecipe) -> Picture:
    from PIL import Image as Images
    from PIL import ImageOps

    rows, columns = size
    upright = ImageOps.exif_transpose(image).convert("RGB")
    resized = upright.resize((columns * recipe.side, rows * recipe.side), resample=Images.Resampling.BICUBIC)
    return Picture(
        rows=rows,
        columns=columns,
        pixels=resized.tobytes(),
        scale=recipe.scale,
        mean=recipe.mean,
        deviation=recipe.deviation,
    )
