"""The vision encoder that a ``VisionConfig`` describes: pixels to rows that take the place of tokens.

One image at a time, half a layer after the other, so that others can be served in between.  What an image gives depends
on nothing else.  Knows nothing about prompts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.engine.layers.mlp import FeedForward, GatedMlp, PlainMlp
from penstock.engine.layers.norm import LayerNorm, LinearLayer, NormLayer, OutputProjection, RmsNorm
from penstock.errors import ImageRefused
from penstock.kernels.operands import Activation, Array, Gate
from penstock.kernels.ops import Ops
from penstock.types import ImageInput, MediaInput
from penstock.weights.architecture.vision import VisionConfig


class VisionLayer:
    """Attention of every patch to all patches, or to those of its window; then the MLP."""

    def __init__(self, vision: VisionConfig, weights: Mapping[str, Any], index: int) -> None:
        name = f"vision.{index}."
        self._heads = vision.heads
        self._scale = vision.head_dim**-0.5
        self.windowed = vision.windowed(index)
        self._norm = _norm(vision, weights, f"{name}attention_norm")
        self._qkv = _linear(weights, f"{name}qkv")
        self._out = OutputProjection(_linear(weights, f"{name}out"))
        self._mlp = _mlp(vision, weights, name)

    def mix(self, ops: Ops, hidden_TD: Array, starts_S1: NDArray[np.int32], angles: Array) -> None:
        """hidden += attention(hidden), in place; row t of ``angles`` turns token t."""
        qkv_TN = self._qkv(ops, self._norm(ops, hidden_TD))
        rows_T = np.arange(starts_S1[-1], dtype=np.int32)
        mixed_TK = ops.attention(
            qkv_TN,
            starts_S1,
            heads=self._heads,
            kv_heads=self._heads,
            scale=self._scale,
            rope=angles,
            rows_T=rows_T,
        )
        self._out.add_to(ops, mixed_TK, hidden_TD)

    def feed(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += MLP(hidden), in place."""
        self._mlp.add_to(ops, hidden_TD)


class ImageEncoder:
    """A ``MediaEncoder``; images are checked before their encoding begins."""

    leading_tokens = 0

    def __init__(self, vision: VisionConfig, weights: Mapping[str, Any], *, axes: bool) -> None:
        self.vision = vision
        self.has_axes = axes
        self.layers = [VisionLayer(vision, weights, index) for index in range(vision.layers)]
        self._patches = LinearLayer(weights["vision.patches"])
        self._norm = _norm(vision, weights, "vision.norm")
        self._merge = _linear(weights, "vision.merge")
        self._merged = _linear(weights, "vision.merged")

    @property
    def width(self) -> int:
        """Numbers in a row."""
        return self.vision.out

    def check(self, medium: MediaInput) -> None:
        """Raises ImageRefused unless this is a picture of as many pixels as its size says."""
        if not isinstance(medium, ImageInput):
            raise ImageRefused("this model reads images, and no sounds")
        if len(medium.pixels) != 3 * medium.rows * medium.columns * self.vision.token_side**2:
            raise ImageRefused("a picture has another number of pixels than its size says")

    def begin(self, ops: Ops, medium: MediaInput) -> ImageEncoding:
        """The encoding of this picture, with its patches embedded and no layer computed."""
        picture = cast(ImageInput, medium)
        grid = Grid(self.vision, picture.rows, picture.columns)
        hidden_TD = self._patches(ops, ops.compute(image_patches(self.vision, picture)[grid.patches_T]))
        return ImageEncoding(self, grid, ops.angle_table(grid.angles()), hidden_TD)

    def finish(self, ops: Ops, hidden_TD: Array, grid: Grid) -> NDArray[np.float32]:
        """Neighbors made one row each; fp32 [tokens, width], row by row of the image."""
        joined_NK = ops.joined_rows(self._norm(ops, hidden_TD), self.vision.merge**2)
        inner_NK = ops.activate(self._merge(ops, joined_NK), Activation.GELU)
        rows_ND = ops.rows(self._merged(ops, inner_NK), np.argsort(grid.tokens_N).astype(np.int32))
        return np.array(ops.to_numpy(rows_ND), np.float32)


class ImageEncoding:
    """One picture on its way through the encoder."""

    def __init__(self, encoder: ImageEncoder, grid: Grid, angles: Array, hidden_TD: Array) -> None:
        self._encoder = encoder
        self._grid = grid
        self._angles = angles
        self._hidden_TD = hidden_TD
        self._done = 0  # blocks: two a layer
        self._rows_ND: NDArray[np.float32] | None = None

    def advance(self, ops: Ops) -> bool:
        """One block more, half a layer; True when there is none left and ``rows`` are there."""
        layers = self._encoder.layers
        if self._done < 2 * len(layers):
            layer = layers[self._done // 2]
            if self._done % 2:
                layer.feed(ops, self._hidden_TD)
            else:
                starts_S1 = self._grid.windows_S1 if layer.windowed else self._grid.whole_S1
                layer.mix(ops, self._hidden_TD, starts_S1, self._angles)
            self._done += 1
            return False
        if self._rows_ND is None:
            self._rows_ND = self._encoder.finish(ops, self._hidden_TD, self._grid)
        return True

    @property
    def rows(self) -> NDArray[np.float32]:
        """What the picture gives, once it is finished."""
        if self._rows_ND is None:
            raise ValueError("the picture is not finished")
        return self._rows_ND


class Grid:
    """In which order the encoder has the patches of an image: those of one token together, the tokens of one window
    together."""

    def __init__(self, vision: VisionConfig, rows: int, columns: int) -> None:
        """``rows`` and ``columns`` of tokens."""
        self._vision = vision
        self._columns = columns
        own = np.arange(rows * columns)
        across = vision.window or max(rows, columns)
        windows_N = own // columns // across * columns + own % columns // across
        self.tokens_N = np.argsort(windows_N, kind="stable").astype(np.int32)
        each = vision.merge**2
        self.patches_T = (self.tokens_N[:, None] * each + np.arange(each, dtype=np.int32)).reshape(-1)
        sizes_W = np.unique(windows_N, return_counts=True)[1]
        self.windows_S1 = np.concatenate(([0], np.cumsum(sizes_W) * each)).astype(np.int32)
        self.whole_S1 = np.array([0, len(self.patches_T)], np.int32)

    def angles(self) -> NDArray[np.float64]:
        """[patches, head_dim / 2]: the first half follows a patch's row, the second its column."""
        merge, quarter = self._vision.merge, self._vision.head_dim // 4
        inv_freq = self._vision.theta ** -(np.arange(quarter, dtype=np.float64) / quarter)
        token_T, within_T = np.divmod(self.patches_T, merge**2)
        row_T = token_T // self._columns * merge + within_T // merge
        column_T = token_T % self._columns * merge + within_T % merge
        return np.concatenate((np.outer(row_T, inv_freq), np.outer(column_T, inv_freq)), axis=1)


def image_patches(vision: VisionConfig, picture: ImageInput) -> NDArray[np.float32]:
    """[patches, 3 frames patch patch]: those of one token together, tokens row by row."""
    merge, patch = vision.merge, vision.patch
    tones = np.frombuffer(picture.pixels, np.uint8)
    places = tones.reshape(picture.rows, merge, patch, picture.columns, merge, patch, 3)
    tones_T3PP = places.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3, patch, patch)
    numbers_3V = _numbers(picture)
    values_T3PP = np.stack([numbers_3V[color][tones_T3PP[:, color]] for color in range(3)], axis=1)
    frames_T3FPP = np.repeat(values_T3PP[:, :, None], vision.frames, axis=2)
    return frames_T3FPP.reshape(len(frames_T3FPP), vision.patch_numbers)


def _numbers(picture: ImageInput) -> NDArray[np.float32]:
    """[3, 256]: what each tone of each color is read as."""
    scaled_V = (np.arange(256, dtype=np.float64) * picture.scale).astype(np.float32)
    mean_31, deviation_31 = (np.array(own, np.float32)[:, None] for own in (picture.mean, picture.deviation))
    numbers_3V: NDArray[np.float32] = (scaled_V - mean_31) / deviation_31
    return numbers_3V


def _linear(weights: Mapping[str, Any], name: str) -> LinearLayer:
    return LinearLayer(weights[name], weights[f"{name}_bias"])


def _norm(vision: VisionConfig, weights: Mapping[str, Any], name: str) -> NormLayer:
    if vision.norm == "rms":
        return RmsNorm(weights[name], vision.eps)
    return LayerNorm(weights[name], weights[f"{name}_bias"], vision.eps)


def _mlp(vision: VisionConfig, weights: Mapping[str, Any], name: str) -> FeedForward:
    norm, inward = _norm(vision, weights, f"{name}mlp_norm"), _linear(weights, f"{name}inward")
    down = OutputProjection(_linear(weights, f"{name}down"))
    if vision.gated:
        return GatedMlp(norm, inward, down, Gate(activation=vision.activation, alpha=vision.alpha))
    return PlainMlp(norm, inward, down, vision.activation, vision.alpha)
