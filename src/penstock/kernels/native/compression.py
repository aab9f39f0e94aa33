"""Compressed bf16 weights: coding, decoding and checking them with the C++ kernels (format: docs/format.md).

Knows arrays, no files and no hashes.  Nothing here starts a thread; ``encode`` and ``decode`` let other threads run.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.compressed import (
    PANEL_ROWS,
    AnyCompressed,
    CompressedMatrix,
    GpuCompressedMatrix,
    blocks_bytes,
    choose_code,
    compress_for_gpu,
    compressed_bytes,
    panels_of,
)

ESCAPE_PADDING = 64
"""Bytes that the kernels may read behind the last escape."""

DECODED_BYTES = 1 << 20
"""bf16 bytes that ``decoded_panels`` yields at a time: they stay in a cache until they are read."""


def compress(weight_NK: NDArray[np.uint16]) -> CompressedMatrix | None:
    """The matrix (bf16 bits), compressed; None if that would not be smaller.  One thread."""
    n, k = weight_NK.shape
    if n == 0 or k == 0:
        return None
    base, step, escaped = choose_code(np.array(_native.count_exponents(weight_NK), np.int64))
    if compressed_bytes(n, k, escaped) >= weight_NK.nbytes:
        return None
    counts = np.empty(panels_of(n), np.uint32)
    blocks, escapes = np.empty(blocks_bytes(n, k), np.uint8), np.empty(escaped, np.uint8)
    _native.encode(weight_NK, base, step, blocks, escapes, counts)
    return CompressedMatrix(n, k, base, step, counts, blocks, escapes)


def decoded_panels(matrix: CompressedMatrix, family: str | None = None) -> Iterator[NDArray[np.uint16]]:
    """Rows of the matrix as bf16 bits, some at a time from the first to the last; each array is valid until the next.

    Raises KernelError if the sections contradict each other.
    """
    weights = native_weights([matrix], (matrix.k,), matrix.blocks, _padded(matrix.escapes))
    kernels = _native.CompressedKernels(family or _native.families()[0])
    rows = max(1, DECODED_BYTES // (2 * matrix.k * PANEL_ROWS)) * PANEL_ROWS
    buffer = np.empty((min(rows, matrix.n), matrix.k), np.uint16)
    for row in range(0, matrix.n, rows):
        part = buffer[: min(rows, matrix.n - row)]
        kernels.decode(weights, row // PANEL_ROWS, part)
        yield part


def cpu_layout(matrix: AnyCompressed) -> CompressedMatrix | None:
    """The same weights in the CPU's layout; None where that would not be smaller than plain ones."""
    return compress(matrix.whole()) if isinstance(matrix, GpuCompressedMatrix) else matrix


def gpu_layout(matrix: AnyCompressed) -> GpuCompressedMatrix | None:
    """The same weights in the GPU's layout; None where that would not be smaller than plain ones.

    Raises KernelError if the sections contradict each other.
    """
    if isinstance(matrix, GpuCompressedMatrix):
        return matrix
    return compress_for_gpu(np.concatenate([rows.copy() for rows in decoded_panels(matrix)]))


def native_weights(
    parts: list[CompressedMatrix],
    segments: tuple[int, ...],
    blocks: NDArray[np.uint8],
    escapes: NDArray[np.uint8],
    counted: NDArray[np.uint32] | None = None,
) -> Any:
    """The kernels' object for ``parts`` one below the other, whose sections lie in ``blocks`` and padded ``escapes``.

    ``counted``: escapes of each panel by its planes, if they have been counted.  Every part but the last must fill its
    panels.  Raises KernelError if escapes and planes contradict each other.
    """
    codes = np.concatenate([np.full((panels_of(p.n), 2), (p.base, p.step % 256), np.uint8) for p in parts])
    rows = sum(part.n for part in parts)
    try:
        weights = _native.CompressedWeights(blocks, escapes, codes, rows, parts[0].k, list(segments), counted)
    except ValueError as error:
        raise KernelError(str(error)) from error
    if not weights.counts_are(np.concatenate([part.counts for part in parts])):
        raise KernelError("the planes count other escapes than the table says")
    return weights


def _padded(escapes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.concatenate([escapes, np.zeros(ESCAPE_PADDING, np.uint8)])
