"""Parts of compressed matrices, and matrices of parts: panels of rows, or blocks of columns; nothing is coded anew.

A panel's blocks and escapes follow one another, so rows are a view of each section.  Of columns the planes say how many
escapes lie before them in each panel: a part has its own blocks, grouped in chunks from its first one, and escapes.
Knows arrays; no kernels, files or torch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels.compressed import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    PANEL_ROWS,
    AnyCompressed,
    CompressedMatrix,
    GpuCompressedMatrix,
    blocks_bytes,
    compress_for_gpu,
    panels_of,
)

CHUNK_BLOCKS = 8
"""Blocks whose planes lie together, followed by their bytes."""

PLANE_BYTES = 24
"""Bytes of the three planes of one block."""

CHUNK_COLUMNS = CHUNK_BLOCKS * BLOCK_COLUMNS
"""Parts that begin at multiples of this have chunks that the whole matrix has."""


def cut_compressed(
    matrix: AnyCompressed, rows: tuple[int, int] | None, columns: tuple[int, int] | None
) -> AnyCompressed | None:
    """Rows [first, stop) and columns [first, stop) of a matrix, all of them if None.

    None where they do not begin and end with panels and blocks, or would not be smaller than plain ones.
    Raises KernelError if the sections contradict each other.
    """
    first, stop = rows or (0, matrix.n)
    left, right = columns or (0, matrix.k)
    if not ends_units(first, stop, matrix.n, PANEL_ROWS) or not ends_units(left, right, matrix.k, BLOCK_COLUMNS):
        return None
    all_columns = (left, right) == (0, matrix.k)
    if isinstance(matrix, GpuCompressedMatrix):
        panels = _gpu_rows(matrix, first, stop)
        return panels if all_columns else compress_for_gpu(np.ascontiguousarray(panels.whole()[:, left:right]))
    own = _rows(matrix, first, stop)
    return own if all_columns else _columns(own, left, right)


def ends_units(first: int, stop: int, last: int, unit: int) -> bool:
    """Whether [first, stop) of ``last`` rows or columns are whole units; the last one may be shorter."""
    return first < stop and first % unit == 0 and (stop % unit == 0 or stop == last)


def _rows(matrix: CompressedMatrix, first: int, stop: int) -> CompressedMatrix:
    if (first, stop) == (0, matrix.n):
        return matrix
    panels, panel_bytes = slice(first // PANEL_ROWS, panels_of(stop)), blocks_bytes(1, matrix.k)
    begin, end = (int(matrix.counts[:panel].sum(dtype=np.int64)) for panel in (panels.start, panels.stop))
    return CompressedMatrix(
        stop - first,
        matrix.k,
        matrix.base,
        matrix.step,
        matrix.counts[panels],
        matrix.blocks[panels.start * panel_bytes : panels.stop * panel_bytes],
        matrix.escapes[begin:end],
    )


def _gpu_rows(matrix: GpuCompressedMatrix, first: int, stop: int) -> GpuCompressedMatrix:
    panels = slice(first // PANEL_ROWS, panels_of(stop))
    begin, end = (int(matrix.counts_PS[:panel].sum(dtype=np.int64)) for panel in (panels.start, panels.stop))
    counts_PS, words_PB = matrix.counts_PS[panels], matrix.words_PB[panels]
    return GpuCompressedMatrix(stop - first, matrix.k, matrix.base, counts_PS, words_PB, matrix.values[begin:end])


def _columns(matrix: CompressedMatrix, left: int, right: int) -> CompressedMatrix:
    """Its own copy of some columns."""
    begin, end = left // BLOCK_COLUMNS, -(-right // BLOCK_COLUMNS)
    panels_PX = matrix.blocks.reshape(panels_of(matrix.n), -1)
    escapes_PB = _escapes_of_blocks(panels_PX)
    if not np.array_equal(escapes_PB.sum(axis=1), matrix.counts):
        raise KernelError("the planes count other escapes than the table says")
    counts_P = escapes_PB[:, begin:end].sum(axis=1)
    starts_P = np.cumsum(escapes_PB.sum(axis=1)) - escapes_PB[:, begin:].sum(axis=1)
    return CompressedMatrix(
        matrix.n,
        right - left,
        matrix.base,
        matrix.step,
        counts_P.astype(np.uint32),
        _blocks_between(panels_PX, begin, end).reshape(-1),
        matrix.escapes[_positions(starts_P, counts_P)],
    )


def join_rows(parts: Sequence[CompressedMatrix]) -> CompressedMatrix:
    """Parts with one code and equally many columns, one below the other; all but the last fill their panels."""
    if len(parts) == 1:
        return parts[0]
    counts, blocks, escapes = (
        np.concatenate([getattr(part, name) for part in parts]) for name in ("counts", "blocks", "escapes")
    )
    first = parts[0]
    return CompressedMatrix(sum(p.n for p in parts), first.k, first.base, first.step, counts, blocks, escapes)


def join_columns(parts: Sequence[CompressedMatrix]) -> CompressedMatrix:
    """Parts with one code and equally many rows side by side; all but the last have a multiple of ``CHUNK_COLUMNS``."""
    first, panels = parts[0], panels_of(parts[0].n)
    if len(parts) == 1:
        return first
    counts_SP = np.array([part.counts for part in parts], np.int64)
    blocks_PX = np.concatenate([part.blocks.reshape(panels, -1) for part in parts], axis=1)
    ends_SP = np.cumsum(counts_SP.T.reshape(-1)).reshape(panels, -1).T
    escapes = np.empty(int(counts_SP.sum()), np.uint8)
    for part, counts_P, ends_P in zip(parts, counts_SP, ends_SP, strict=True):
        escapes[_positions(ends_P - counts_P, counts_P)] = part.escapes
    counts = counts_SP.sum(axis=0).astype(np.uint32)
    k = sum(part.k for part in parts)
    return CompressedMatrix(first.n, k, first.base, first.step, counts, blocks_PX.reshape(-1), escapes)


def unchunked_blocks(panels_PX: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Planes [P, blocks, 24] and bytes [P, blocks, 64] of panels in chunks of eight blocks."""
    planes, signs = [], []
    for block in range(0, panels_PX.shape[1] // BLOCK_BYTES, CHUNK_BLOCKS):
        chunk = panels_PX[:, block * BLOCK_BYTES : (block + CHUNK_BLOCKS) * BLOCK_BYTES]
        count = chunk.shape[1] // BLOCK_BYTES
        planes.append(chunk[:, : count * PLANE_BYTES].reshape(-1, count, PLANE_BYTES))
        signs.append(chunk[:, count * PLANE_BYTES :].reshape(-1, count, BLOCK_BYTES - PLANE_BYTES))
    return np.concatenate(planes, axis=1), np.concatenate(signs, axis=1)


def _escapes_of_blocks(panels_PX: NDArray[np.uint8]) -> NDArray[np.int64]:
    """Escapes of every block [P, blocks]: weights whose code is zero in all three planes."""
    counts = []
    for block in range(0, panels_PX.shape[1] // BLOCK_BYTES, CHUNK_BLOCKS):
        chunk = panels_PX[:, block * BLOCK_BYTES : (block + CHUNK_BLOCKS) * BLOCK_BYTES]
        count = chunk.shape[1] // BLOCK_BYTES
        planes = np.ascontiguousarray(chunk[:, : count * PLANE_BYTES]).view(np.uint64).reshape(-1, count, 3)
        counts.append(np.bitwise_count(~(planes[:, :, 0] | planes[:, :, 1] | planes[:, :, 2])))
    return np.concatenate(counts, axis=1).astype(np.int64)


def _blocks_between(panels_PX: NDArray[np.uint8], begin: int, end: int) -> NDArray[np.uint8]:
    """Blocks [begin, end) of every panel, in chunks of their own."""
    first, last = begin // CHUNK_BLOCKS * CHUNK_BLOCKS, -(-end // CHUNK_BLOCKS) * CHUNK_BLOCKS
    cover_PX = panels_PX[:, first * BLOCK_BYTES : last * BLOCK_BYTES]
    if first == begin and cover_PX.shape[1] == (end - begin) * BLOCK_BYTES:
        return np.ascontiguousarray(cover_PX)
    planes_PB, bytes_PB = (own[:, begin - first : end - first] for own in unchunked_blocks(cover_PX))
    chunks = [
        own[:, block : block + CHUNK_BLOCKS].reshape(len(own), -1)
        for block in range(0, end - begin, CHUNK_BLOCKS)
        for own in (planes_PB, bytes_PB)
    ]
    return np.concatenate(chunks, axis=1)


def _positions(starts: NDArray[np.int64], counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """``counts[i]`` numbers from ``starts[i]`` on, for one i after another."""
    return np.repeat(starts - (np.cumsum(counts) - counts), counts) + np.arange(counts.sum())
