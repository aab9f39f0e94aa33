# ruff: noqa: N815  (field names carry shapes)
"""Compressed bf16 matrices in two layouts: sections, sizes and the choice of a code (format: docs/format.md).

``CompressedMatrix`` is the CPU's layout: codes of three bits, escapes apart.  ``GpuCompressedMatrix``, with its coder
and decoder here, is that of GPUs: a weight is a code of four bits for its exponent (fifteen neighbors; 0 is an escape)
and a byte: sign and mantissa, or, of an escape, the place of the whole weight in a short dictionary.  Every weight is
decoded by itself, with shifts and masks of 32-bit words, as a GPU's registers can do it in front of its matrix units.
The CPU's layout is smaller and needs instructions that only CPUs have.

Knows arrays; no kernels, files or torch: importable where the extension is not built.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError

PANEL_ROWS = 16
BLOCK_COLUMNS = 4
BLOCK_BYTES = 88
CODES = 7
"""Exponents that have a code of three bits; code 0 is an escape."""


@dataclass(frozen=True, slots=True)
class CompressedMatrix:
    """A bf16 matrix [n, k] in the three sections of the format; escapes without padding."""

    n: int
    k: int
    base: int
    step: int
    counts: NDArray[np.uint32]  # escapes of each panel of 16 rows
    blocks: NDArray[np.uint8]
    escapes: NDArray[np.uint8]

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.blocks.nbytes + self.escapes.nbytes


def ends_with_blocks(parts: Sequence[AnyCompressed], ends: tuple[int, ...]) -> bool:
    """Whether matrices one below the other begin with panels, and segments of their inputs with blocks."""
    return not any(part.n % PANEL_ROWS for part in parts[:-1]) and not any(end % BLOCK_COLUMNS for end in ends)


def panels_of(n: int) -> int:
    """Panels of a matrix with ``n`` rows."""
    return -(-n // PANEL_ROWS)


def blocks_bytes(n: int, k: int) -> int:
    """Bytes of the blocks of a matrix [n, k]."""
    return panels_of(n) * -(-k // BLOCK_COLUMNS) * BLOCK_BYTES


def compressed_bytes(n: int, k: int, escapes: int) -> int:
    """Bytes of all sections of a matrix with this number of escapes."""
    return panels_of(n) * 4 + blocks_bytes(n, k) + escapes


def choose_code(counts_256: NDArray[np.int64]) -> tuple[int, int, int]:
    """(base, step, escapes) of the seven neighboring exponents that occur most: code c is exponent base + step * c.

    An even base counts up and an odd one down, so that the lowest bit of a code is that of the exponent or its
    opposite: what the kernels' decoder stands on.
    """
    sums = np.convolve(counts_256, np.ones(CODES, np.int64), "valid")
    low = int(sums.argmax())
    base, step = (low - 1, 1) if low % 2 else (low + CODES, -1)
    return base, step, int(counts_256.sum() - sums[low])


GPU_CODES = 15
"""Exponents that have a code of four bits; code 0 is an escape."""

MAX_BASE = 255 - GPU_CODES

GPU_BLOCK_COLUMNS = 64
GROUP_COLUMNS = 8
"""Columns whose codes are one word of 32 bits, and whose bytes are two."""

BLOCK_GROUPS = GPU_BLOCK_COLUMNS // GROUP_COLUMNS
BLOCK_WORDS = 384
"""Of 16 rows and 64 columns: 256 of bytes, then 128 of codes."""

STRETCH_COLUMNS = 1024
"""Columns of a panel that share a dictionary."""

MAX_VALUES = 256
"""Weights in a dictionary: what a byte can tell apart."""

CHUNK_PANELS = 16
"""Panels that are coded or decoded at a time, so that no matrix is in memory several times."""


@dataclass(frozen=True, slots=True)
class GpuCompressedMatrix:
    """A bf16 matrix [n, k] in the three sections of the layout.  Code c from 1 to 15 is exponent base + c."""

    n: int
    k: int
    base: int
    counts_PS: NDArray[np.uint32]  # weights in the dictionary of each panel of 16 rows and stretch of 1024 columns
    words_PB: NDArray[np.uint32]  # [panels, blocks, 384]
    values: NDArray[np.uint16]  # of all dictionaries, one after another

    @property
    def nbytes(self) -> int:
        return self.counts_PS.nbytes + self.words_PB.nbytes + self.values.nbytes

    def decoded(self) -> Iterator[NDArray[np.uint16]]:
        """Rows of the matrix as bf16 bits, some at a time.  Raises KernelError if a dictionary lacks a weight."""
        if self.counts_PS.max(initial=0) > MAX_VALUES or self.counts_PS.sum(dtype=np.int64) != len(self.values):
            raise KernelError("the sizes of the dictionaries are not those of the table")
        starts_P = np.concatenate([[0], np.cumsum(self.counts_PS.sum(axis=1, dtype=np.int64))])
        for panel in range(0, panels_of(self.n), CHUNK_PANELS):
            chunk = slice(panel, panel + CHUNK_PANELS)
            counts_PS = self.counts_PS[chunk]
            values = self.values[starts_P[panel] : starts_P[panel + len(counts_PS)]]
            rows_NK = _decoded_panels(self.words_PB[chunk], counts_PS, values, self.base)
            yield rows_NK[: self.n - panel * PANEL_ROWS, : self.k]

    def whole(self) -> NDArray[np.uint16]:
        """All rows as bf16 bits."""
        return np.concatenate(list(self.decoded()))


AnyCompressed = CompressedMatrix | GpuCompressedMatrix
"""A matrix in either layout; each holds what the other does, so either can be made of the other."""


def stretches_of(k: int) -> int:
    """Dictionaries of a panel."""
    return -(-k // STRETCH_COLUMNS)


def column_blocks(k: int) -> int:
    """Blocks of a panel."""
    return -(-k // GPU_BLOCK_COLUMNS)


def table_bytes(n: int, k: int) -> int:
    """Bytes of the table of counts."""
    return 4 * panels_of(n) * stretches_of(k)


def words_bytes(n: int, k: int) -> int:
    """Bytes of the words."""
    return 4 * BLOCK_WORDS * panels_of(n) * column_blocks(k)


def compress_for_gpu(weight_NK: NDArray[np.uint16]) -> GpuCompressedMatrix | None:
    """The matrix (bf16 bits), compressed; None if that would not be smaller, or a dictionary too large."""
    n, k = weight_NK.shape
    if n == 0 or k == 0 or table_bytes(n, k) + words_bytes(n, k) >= 2 * n * k:
        return None
    base = _choose_base(weight_NK)
    panels, blocks = panels_of(n), column_blocks(k)
    counts_PS = np.empty((panels, stretches_of(k)), np.uint32)
    words_PB, values = np.empty((panels, blocks, BLOCK_WORDS), np.uint32), []
    for panel in range(0, panels, CHUNK_PANELS):
        rows_NK = weight_NK[panel * PANEL_ROWS : (panel + CHUNK_PANELS) * PANEL_ROWS]
        padded_NK = np.full(
            (panels_of(len(rows_NK)) * PANEL_ROWS, blocks * GPU_BLOCK_COLUMNS), base + 1 << 7, np.uint16
        )
        padded_NK[: len(rows_NK), :k] = rows_NK
        chunk = slice(panel, panel + len(padded_NK) // PANEL_ROWS)
        found = _encode_panels(padded_NK, base, counts_PS[chunk], words_PB[chunk])
        if found is None:
            return None
        values.append(found)
    matrix = GpuCompressedMatrix(n, k, base, counts_PS, words_PB, np.concatenate(values))
    return matrix if matrix.nbytes < weight_NK.nbytes else None


def _choose_base(weight_NK: NDArray[np.uint16]) -> int:
    """The exponent below the fifteen adjacent ones that occur most; 0 at least."""
    counts = np.zeros(256, np.int64)
    for row in range(0, len(weight_NK), CHUNK_PANELS * PANEL_ROWS):
        part = weight_NK[row : row + CHUNK_PANELS * PANEL_ROWS]
        counts += np.bincount((part >> 7 & 0xFF).ravel(), minlength=256)
    return int(np.convolve(counts[1:], np.ones(GPU_CODES, np.int64), "valid").argmax())


def _encode_panels(
    padded_NK: NDArray[np.uint16], base: int, counts_PS: NDArray[np.uint32], words_PB: NDArray[np.uint32]
) -> NDArray[np.uint16] | None:
    """Fills counts and words of whole panels and returns their dictionaries; None if one is too large."""
    rows, columns = padded_NK.shape
    codes = (padded_NK >> 7 & 0xFF).astype(np.int16) - base
    codes[(codes < 1) | (codes > GPU_CODES)] = 0
    own = (padded_NK >> 8 & 0x80 | padded_NK & 0x7F).astype(np.uint8)
    row, column = np.nonzero(codes == 0)
    cells = row // PANEL_ROWS * counts_PS.shape[1] + column // STRETCH_COLUMNS
    keys = cells << 16 | padded_NK[row, column]
    distinct = np.unique(keys)
    counts = np.bincount(distinct >> 16, minlength=counts_PS.size)
    if counts.max(initial=0) > MAX_VALUES:
        return None
    counts_PS[:] = counts.reshape(counts_PS.shape)
    own[row, column] = np.searchsorted(distinct, keys) - (np.cumsum(counts) - counts)[cells]
    # columns 4 a + 2 b + c of a group: byte 4 a + 2 c + b, four bits at 4 (4 c + 2 a + b)
    shape = (rows // PANEL_ROWS, PANEL_ROWS, columns // GPU_BLOCK_COLUMNS, BLOCK_GROUPS, 2, 2, 2)
    bytes_PB = own.reshape(shape).transpose(0, 2, 1, 3, 4, 6, 5)
    words_PB[:, :, :256] = _words(bytes_PB).reshape(*words_PB.shape[:2], 256)
    nibbles = codes.astype(np.uint8).reshape(shape).transpose(0, 2, 1, 3, 6, 4, 5).reshape(-1, 4, 2)
    words_PB[:, :, 256:] = _words(nibbles[:, :, 0] | nibbles[:, :, 1] << 4).reshape(*words_PB.shape[:2], 128)
    return (distinct & 0xFFFF).astype(np.uint16)


def _words(array: NDArray[np.uint8]) -> NDArray[np.uint32]:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint32)


def _decoded_panels(
    words_PB: NDArray[np.uint32], counts_PS: NDArray[np.uint32], values: NDArray[np.uint16], base: int
) -> NDArray[np.uint16]:
    panels, blocks, _ = words_PB.shape
    shape = (panels, blocks, PANEL_ROWS, BLOCK_GROUPS, 2, 2, 2)
    rows, columns = panels * PANEL_ROWS, blocks * GPU_BLOCK_COLUMNS
    own = np.ascontiguousarray(words_PB[:, :, :256]).view(np.uint8).reshape(shape)
    own_NK = own.transpose(0, 2, 1, 3, 4, 6, 5).reshape(rows, columns).astype(np.uint16)
    pairs = np.ascontiguousarray(words_PB[:, :, 256:]).view(np.uint8)
    nibbles = np.stack([pairs & 0xF, pairs >> 4], axis=-1).reshape(shape)
    codes_NK = nibbles.transpose(0, 2, 1, 3, 5, 6, 4).reshape(rows, columns)
    exponents_NK = codes_NK + np.uint16(base)
    words_NK = np.asarray((own_NK & 0x80) << 8 | exponents_NK << 7 | own_NK & 0x7F, np.uint16)
    row, column = np.nonzero(codes_NK == 0)
    cells = row // PANEL_ROWS * counts_PS.shape[1] + column // STRETCH_COLUMNS
    counts = counts_PS.ravel().astype(np.int64)
    index = own_NK[row, column].astype(np.int64)
    if (index >= counts[cells]).any():
        raise KernelError("an escape is not in its dictionary")
    words_NK[row, column] = values[(np.cumsum(counts) - counts)[cells] + index]
    return words_NK
