"""The checksum of a tensor's stored bytes (docs/format.md): against damage on a drive or in memory, not against malice.

XXH3-128 of a line that says what the tensor is, then of the XXH3-128 of each piece of its bytes.  The pieces are those
in which weights are loaded (``kernels/cpp/loading.hpp``), so that loading checks them at the speed of the copy; here
is what it must come to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from penstock.kernels.compressed import BLOCK_BYTES, BLOCK_COLUMNS, PANEL_ROWS, panels_of
from penstock.kernels.compressed_gpu import table_bytes, words_bytes
from penstock.kernels.stored import PIECE_BYTES
from penstock.kernels.sums import xxh3_128
from penstock.weights.compressed import GPU, Original
from penstock.weights.header import DTYPE_BYTES


def checksum_text(name: str, tensor: Original) -> str:
    """What is hashed in front of the pieces: everything by which the bytes become weights."""
    code = "" if tensor.code is None else ",".join(map(str, (*tensor.code, tensor.layout))).rstrip(",")
    return "\n".join((name, tensor.dtype, ",".join(map(str, tensor.shape)), tensor.blake3, code, ""))


def checksum(name: str, tensor: Original, sections: Sequence[memoryview]) -> str:
    """32 hexadecimal digits for a tensor and its bytes in the file; ``sections`` end where pieces end."""
    whole = [checksum_text(name, tensor).encode()]
    left = list(sections)
    start = 0  # of the first section that is left
    for begin, end in pieces(tensor, sum(section.nbytes for section in sections)):
        while begin >= start + left[0].nbytes:
            start += left.pop(0).nbytes
        whole.append(xxh3_128(left[0][begin - start : end - start]))
    return xxh3_128(b"".join(whole)).hex()


def pieces(tensor: Original, nbytes: int) -> Iterator[tuple[int, int]]:
    """Where each piece of the ``nbytes`` stored bytes begins and ends."""
    if tensor.code is not None and tensor.layout == GPU:
        n, k = tensor.shape
        counts, words = table_bytes(n, k), words_bytes(n, k)
        panel = words // panels_of(n)
        yield from _cut(0, counts, PIECE_BYTES)
        yield from _cut(counts, counts + words, max(1, PIECE_BYTES // panel) * panel)
        yield from _cut(counts + words, nbytes, PIECE_BYTES)
    elif tensor.code is not None:
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
