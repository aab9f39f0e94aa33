"""Positions of three axes: whatever piece of a prompt is asked for."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.runner.input_batch import rope_axes
from penstock.types import PlacedImage


def placed(at: int, rows: int, columns: int) -> PlacedImage:
    return PlacedImage(bytes(32), at, rows, columns)


def test_an_image_counts_rows_and_columns_and_text_goes_on_above_both():
    got = rope_axes([placed(2, 2, 3)], 0, 10)
    assert got.tolist() == [
        [0, 0, 0],
        [1, 1, 1],
        *([2, 2, 2], [2, 2, 3], [2, 2, 4], [2, 3, 2], [2, 3, 3], [2, 3, 4]),
        [5, 5, 5],
        [6, 6, 6],
    ]


def test_two_images_side_by_side():
    got = rope_axes([placed(0, 1, 2), placed(2, 2, 1)], 0, 5)
    assert got.tolist() == [[0, 0, 0], [0, 0, 1], [2, 2, 2], [2, 3, 2], [4, 4, 4]]


shapes = st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.integers(1, 5)), max_size=4)


@given(shapes, st.integers(0, 60), st.integers(1, 60))
def test_any_piece_is_a_piece_of_the_whole_and_no_axis_is_ahead(
    given_shapes: list[tuple[int, int, int]], start: int, count: int
):
    images, end = [], 0
    for gap, rows, columns in given_shapes:
        images.append(placed(end + gap, rows, columns))
        end = images[-1].end
    whole = rope_axes(images, 0, 200)
    np.testing.assert_array_equal(rope_axes(images, start, start + count), whole[start : start + count])
    assert (whole <= np.arange(200)[:, None]).all()
    assert (whole >= 0).all()
    assert (whole[end:, 0] == whole[end:, 1]).all()
    assert (np.diff(whole[end:, 0]) == 1).all()
    assert whole[end, 0] == whole[:end].max(initial=-1) + 1
