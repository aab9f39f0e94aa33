"""Parts of compressed matrices are those of their weights, and make the same matrix again; nothing is coded anew."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels.compressed import CompressedMatrix, GpuCompressedMatrix, compress_for_gpu
from penstock.kernels.compressed_cuts import CHUNK_COLUMNS, cut_compressed, join_columns, join_rows
from penstock.weights.compression_format import decode_reference, encode_reference


def weights_of(n: int, k: int, seed: int = 0) -> NDArray[np.uint16]:
    """Some 3 % escapes, as in trained weights."""
    values = np.random.default_rng(seed).standard_normal((n, k), np.float32) * 0.02
    return (values.view(np.uint32) >> 16).astype(np.uint16)


def same(one: CompressedMatrix, other: CompressedMatrix) -> bool:
    facts = [(own.n, own.k, own.base, own.step) for own in (one, other)]
    arrays = [np.array_equal(getattr(one, name), getattr(other, name)) for name in ("counts", "blocks", "escapes")]
    return facts[0] == facts[1] and all(arrays)


def edges_of(size: int, unit: int) -> st.SearchStrategy[tuple[int, int]]:
    """First and stop of some whole units."""
    edges = st.sampled_from([*range(0, size, unit), size])
    return st.lists(edges, min_size=2, max_size=2, unique=True).map(lambda pair: (min(pair), max(pair)))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_a_part_has_the_weights_of_its_rows_and_columns(data: st.DataObject) -> None:
    n, k = data.draw(st.integers(1, 80)), data.draw(st.integers(1, 300))
    weight = weights_of(n, k)
    rows = data.draw(st.lists(st.sampled_from([*range(0, n, 16), n]), min_size=2, max_size=2, unique=True).map(sorted))
    columns = data.draw(
        st.lists(st.sampled_from([*range(0, k, 4), k]), min_size=2, max_size=2, unique=True).map(sorted)
    )
    part = cut_compressed(encode_reference(weight), (rows[0], rows[1]), (columns[0], columns[1]))
    assert isinstance(part, CompressedMatrix)
    wanted = weight[rows[0] : rows[1], columns[0] : columns[1]]
    np.testing.assert_array_equal(decode_reference(part), wanted)


@pytest.mark.parametrize(("n", "k"), [(48, 1024), (40, 700), (16, 36)])
def test_parts_make_the_matrix_that_they_were_cut_from(n: int, k: int) -> None:
    matrix = encode_reference(weights_of(n, k))
    columns = [(a, b) for a, b in pairwise([*range(0, k, 4 * CHUNK_COLUMNS), k])]
    rows = [(a, b) for a, b in pairwise([*range(0, n, 16), n])]
    assert same(join_columns([cut(matrix, None, own) for own in columns]), matrix)
    assert same(join_rows([cut(matrix, own, None) for own in rows]), matrix)


def cut(matrix: CompressedMatrix, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> CompressedMatrix:
    part = cut_compressed(matrix, rows, columns)
    assert isinstance(part, CompressedMatrix)
    return part


def test_rows_are_views() -> None:
    matrix = encode_reference(weights_of(64, 128))
    part = cut(matrix, (16, 48), None)
    assert np.shares_memory(part.blocks, matrix.blocks)
    assert np.shares_memory(part.escapes, matrix.escapes)


@pytest.mark.parametrize(
    "edges", [((8, 32), None), ((0, 24), None), (None, (2, 64)), (None, (0, 30)), ((16, 16), None)]
)
def test_what_does_not_end_with_panels_and_blocks_is_not_cut(
    edges: tuple[tuple[int, int] | None, tuple[int, int] | None],
) -> None:
    assert cut_compressed(encode_reference(weights_of(64, 128)), *edges) is None


def test_planes_that_contradict_the_table_are_refused() -> None:
    matrix = encode_reference(weights_of(32, 64))
    matrix.blocks[:24] ^= 0xFF
    with pytest.raises(KernelError, match="the planes count other escapes"):
        cut_compressed(matrix, None, (0, 32))


def test_the_layout_for_gpus_is_cut_as_well() -> None:
    weight = weights_of(64, 2304)
    matrix = compress_for_gpu(weight)
    assert matrix is not None
    part = cut_compressed(matrix, (16, 48), (1152, 2304))
    assert isinstance(part, GpuCompressedMatrix)
    np.testing.assert_array_equal(part.whole(), weight[16:48, 1152:])
    assert cut_compressed(matrix, (16, 48), (0, 4)) is None  # a block of 64 columns for four
