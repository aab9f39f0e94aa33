"""Positions of three axes for rotary attention (M-RoPE, arXiv:2409.12191): frame, row and column.

Text counts all three up alike.  An image's tokens share one frame and count their rows and columns from where the image
begins; text behind it goes on above the largest of these.  So no axis is ever ahead of the position.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.types import PlacedImage


def turns(images: Sequence[PlacedImage], start: int, stop: int) -> NDArray[np.int32]:
    """[stop - start, 3] of the tokens from ``start`` on of a text with these images, from left to right."""
    turns_T3 = np.repeat(np.arange(start, stop, dtype=np.int32)[:, None], 3, axis=1)
    saved = 0  # positions that the images so far have taken less than tokens
    for image in images:
        if image.at >= stop:
            break
        begin = image.at - saved
        first, last = max(start, image.at), min(stop, image.end)
        if first < last:
            own = np.arange(first - image.at, last - image.at, dtype=np.int32)
            places_T3 = np.stack((np.zeros_like(own), own // image.columns, own % image.columns), axis=1)
            turns_T3[first - start : last - start] = begin + places_T3
        saved += image.rows * image.columns - max(image.rows, image.columns)
        behind = max(start, image.end)
        if behind < stop:
            turns_T3[behind - start :] = np.arange(behind, stop, dtype=np.int32)[:, None] - saved
    return turns_T3
