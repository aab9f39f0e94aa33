"""The checksum of a tensor's stored bytes (docs/format.md): against damage on a drive or in memory, not against malice.

XXH3-128 of a line that says what the tensor is, then of the XXH3-128 of each piece of its bytes.  The pieces are those
in which weights are loaded (``kernels/cpp/loading.hpp``), so that loading checks them at the speed of the copy; here
is what it must come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import xxhash

from penstock.kernels.compressed import BLOCK_BYTES, BLOCK_COLUMNS, PANEL_ROWS, panels_of
from penstock.weights.compressed import Original
from penstock.weights.header import DTYPE_BYTES

PIECE_BYTES = 256 << 10
"""Pieces are about so long, or one panel of a matrix if that is longer."""


def checksum_text(name: str, tensor: Original) -> str:
    """What is hashed in front of the pieces: everything by which the bytes become weights."""
    code = "" if tensor.code is None else f"{tensor.code[0]},{tensor.code[1]}"
    return "\n".join((name, tensor.dtype, ",".join(map(str, tensor.shape)), tensor.blake3, code, ""))


def checksum(name: str, tensor: Original, sections: Sequence[memoryview]) -> str:
    """32 hexadecimal digits for a tensor and its bytes in the file; ``sections`` end where pieces end."""
    whole = xxhash.xxh3_128(checksum_text(name, tensor).encode())
    left = list(sections)
    start = 0  # of the first section that is left
    for begin, end in pieces(tensor, sum(section.nbytes for section in sections)):
        while begin >= start + left[0].nbytes:
            start += left.pop(0).nbytes
        whole.update(xxhash.xxh3_128_digest(left[0][begin - start : end - start]))
    return whole.hexdigest()


def pieces(tensor: Original, nbytes: int) -> Iterator[tuple[int, int]]:
    """Where each piece of the ``nbytes`` stored bytes begins and ends."""
    if tensor.code is not None:
        n, k = tensor.shape
        panel = -(-k // BLOCK_COLUMNS) * BLOCK_BYTES
        counts, blocks = panels_of(n) * 4, panels_of(n) * panel
        yield from _cut(0, counts, PIECE_BYTES)
        yield from _cut(counts, counts + blocks, max(1, PIECE_BYTES // panel) * panel)
        yield from _cut(counts + blocks, nbytes, PIECE_BYTES)
    elif len(tensor.shape) == 2 and nbytes:
        row = tensor.shape[1] * DTYPE_BYTES[tensor.dtype]
        yield from _cut(0, nbytes, max(PANEL_ROWS, PIECE_BYTES // row // PANEL_ROWS * PANEL_ROWS) * row)
    else:
        yield from _cut(0, nbytes, PIECE_BYTES)


def _cut(begin: int, end: int, step: int) -> Iterator[tuple[int, int]]:
    for start in range(begin, end, step):
        yield start, min(start + step, end)
