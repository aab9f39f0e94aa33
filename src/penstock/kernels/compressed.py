"""What a compressed matrix is: its sections, their sizes, and the choice of its code (format: docs/format.md).

Knows no kernels: importable where the extension is not built.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    """(base, step, escapes) of the seven neighbouring exponents that occur most: code c is exponent base + step * c.

    An even base counts up and an odd one down, so that the lowest bit of a code is that of the exponent or its
    opposite: what the kernels' decoder stands on.
    """
    sums = np.convolve(counts_256, np.ones(CODES, np.int64), "valid")
    low = int(sums.argmax())
    base, step = (low - 1, 1) if low % 2 else (low + CODES, -1)
    return base, step, int(counts_256.sum() - sums[low])
