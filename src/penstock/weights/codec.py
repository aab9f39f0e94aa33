"""Lossless compression of bf16 matrices: the sections of a compressed tensor, and the oracle in NumPy.

Of the CPU's layout; that of GPUs is in ``kernels.compressed_gpu``, and here only where both are meant.

A bf16 weight becomes a code of three bits for its exponent (seven neighbouring exponents; 0 is an escape) and a byte
with sign and mantissa; the exponents of escapes follow as bytes (docs/format.md).  The kernels' own coder and decoder
(``kernels.compression``) do the work; ``encode`` and ``decode`` here say what it is.  Knows no files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError, ModelError
from penstock.kernels.compressed import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    PANEL_ROWS,
    CompressedMatrix,
    blocks_bytes,
    choose_code,
    panels_of,
)
from penstock.kernels.compressed_gpu import (
    BLOCK_WORDS,
    MAX_VALUES,
    AnyCompressed,
    GpuMatrix,
    column_blocks,
    stretches_of,
    table_bytes,
    words_bytes,
)

CHUNK_BLOCKS = 8
PLANE_BYTES = 24
"""Bytes of the three planes of one block."""


def compress(weight_NK: NDArray[np.uint16]) -> CompressedMatrix | None:
    """The matrix (bf16 bits) compressed by the kernels, or None if that would not be smaller."""
    from penstock.kernels import compression  # headers can be read where the extension is not built

    return compression.compress(weight_NK)


def decoded(matrix: AnyCompressed, where: str) -> Iterator[NDArray[np.uint16]]:
    """Rows of the matrix as bf16 bits, some at a time; each array is valid until the next.

    Raises ModelError, beginning with ``where``, if its sections contradict each other, or nothing here decodes them.
    """
    try:
        if isinstance(matrix, GpuMatrix):
            yield from map(np.ascontiguousarray, matrix.decoded())
        else:
            from penstock.kernels import compression

            yield from compression.decoded(matrix)
    except ImportError as error:
        raise ModelError(
            f"{where}: compressed for processors, and the C++ extension that decodes it is not built ({error}): build "
            f"it, or write the model with 'penstock compress MODEL OUT --for gpu' where it is"
        ) from error
    except KernelError as error:
        raise ModelError(f"{where}: damaged, {error}") from error


def sections_of(raw: memoryview, shape: tuple[int, int], code: tuple[int, int], where: str) -> CompressedMatrix:
    """The matrix in a tensor's bytes: counts, blocks, escapes.  Views, not copies, where alignment allows.

    Raises ModelError if the bytes cannot be such a matrix.
    """
    n, k = shape
    base, step = code
    if not is_code(base, step):
        raise ModelError(f"{where}: damaged, there is no exponent code with base {base} and step {step}")
    table_bytes, fixed_bytes = panels_of(n) * 4, blocks_bytes(n, k)
    if raw.nbytes < table_bytes + fixed_bytes:
        raise ModelError(f"{where}: {raw.nbytes} bytes are too few for a compressed matrix of {n} x {k}")
    counts = np.frombuffer(raw[:table_bytes], np.uint8).copy().view(np.uint32)
    data = np.frombuffer(raw[table_bytes:], np.uint8)
    escapes = data[fixed_bytes:]
    if int(counts.sum(dtype=np.int64)) != escapes.nbytes:
        raise ModelError(
            f"{where}: damaged, {escapes.nbytes} escape bytes, its table says {counts.sum(dtype=np.int64)}"
        )
    return CompressedMatrix(n, k, base, step, counts, data[:fixed_bytes], escapes)


def gpu_sections_of(raw: memoryview, shape: tuple[int, int], base: int, where: str) -> GpuMatrix:
    """The same for a matrix in the layout for GPUs: counts, words, values.

    Raises ModelError if the bytes cannot be such a matrix.
    """
    n, k = shape
    begin, end = table_bytes(n, k), table_bytes(n, k) + words_bytes(n, k)
    if raw.nbytes < end or raw.nbytes % 2:
        raise ModelError(f"{where}: {raw.nbytes} bytes cannot be a matrix of {n} x {k} compressed for a GPU")
    data = np.frombuffer(raw, np.uint8)
    counts_PS = data[:begin].copy().view(np.uint32).reshape(panels_of(n), stretches_of(k))
    values = data[end:].copy().view(np.uint16)
    if counts_PS.max() > MAX_VALUES or int(counts_PS.sum(dtype=np.int64)) != len(values):
        raise ModelError(
            f"{where}: damaged, dictionaries of {len(values)} weights, its table says {counts_PS.sum(dtype=np.int64)} "
            f"and at most {counts_PS.max()} in one"
        )
    raw_words = data[begin:end]
    aligned = raw_words if raw_words.ctypes.data % 4 == 0 else raw_words.copy()
    words = aligned.view(np.uint32)
    return GpuMatrix(n, k, base, counts_PS, words.reshape(panels_of(n), column_blocks(k), BLOCK_WORDS), values)


def sections(matrix: AnyCompressed) -> list[memoryview]:
    """What a file holds of it, in order; empty ones are left out."""
    if isinstance(matrix, GpuMatrix):
        arrays: tuple[NDArray[Any], ...] = (matrix.counts_PS, matrix.words_PB, matrix.values)
    else:
        arrays = (matrix.counts, matrix.blocks, matrix.escapes)
    return [array.reshape(-1).data.cast("B") for array in arrays if array.size]


def is_code(base: int, step: int) -> bool:
    """Do codes 1 to 7 with this base and step mean exponents that there are?"""
    return (step == 1 and base % 2 == 0 and 0 <= base <= 248) or (step == -1 and base % 2 == 1 and 7 <= base <= 255)


# --- the oracle -------------------------------------------------------------------------------------------------------


def encode(weight_NK: NDArray[np.uint16]) -> CompressedMatrix:
    """What the kernels' coder must write, whether smaller or not."""
    n, k = weight_NK.shape
    base, step, _ = choose_code(np.bincount((weight_NK >> 7).ravel() & 0xFF, minlength=256))
    padding = np.uint16((base + step) << 7)
    rows, columns = panels_of(n) * PANEL_ROWS, -(-k // BLOCK_COLUMNS) * BLOCK_COLUMNS
    padded = np.full((rows, columns), padding, np.uint16)
    padded[:n, :k] = weight_NK
    # [panel, quarter, row, block, half, column] to [panel, block, quarter, half, row, column]
    panels = padded.reshape(-1, 4, 4, columns // BLOCK_COLUMNS, 2, 2).transpose(0, 3, 1, 4, 2, 5)
    words_PB64 = panels.reshape(rows // PANEL_ROWS, columns // BLOCK_COLUMNS, 64)
    exponents = (words_PB64 >> 7 & 0xFF).astype(np.int64)
    codes = (exponents - base) * step
    codes[(codes < 1) | (codes > 7)] = 0
    bytes_PB64 = (words_PB64 >> 8 & 0x80 | words_PB64 & 0x7F).astype(np.uint8)
    planes = np.stack([codes & 1, codes >> 1 & 1, codes >> 2], axis=2).astype(np.uint8)
    planes_PB24 = np.packbits(planes.reshape(*codes.shape[:2], 3 * 64), axis=2, bitorder="little")
    escaped = exponents[codes == 0]
    chunks = [
        np.concatenate([part[p, b : b + CHUNK_BLOCKS].ravel() for part in (planes_PB24, bytes_PB64)])
        for p in range(codes.shape[0])
        for b in range(0, codes.shape[1], CHUNK_BLOCKS)
    ]
    counts = (codes == 0).sum(axis=(1, 2)).astype(np.uint32)
    rotated = (escaped >> 1 | (escaped & 1) << 7).astype(np.uint8)
    return CompressedMatrix(n, k, base, step, counts, np.concatenate(chunks), rotated)


def decode(matrix: CompressedMatrix) -> NDArray[np.uint16]:
    """The weights [n, k] as bf16 bits.  Raises ValueError if planes and escapes contradict each other."""
    panels, blocks = panels_of(matrix.n), -(-matrix.k // BLOCK_COLUMNS)
    planes_PB24, bytes_PB64 = _unchunked(matrix.blocks.reshape(panels, blocks * BLOCK_BYTES), blocks)
    bits = np.unpackbits(planes_PB24, axis=2, bitorder="little").reshape(panels, blocks, 3, 64).astype(np.int64)
    codes = bits[:, :, 0] + 2 * bits[:, :, 1] + 4 * bits[:, :, 2]
    exponents = matrix.base + matrix.step * codes
    rotated = matrix.escapes.astype(np.int64)
    exponents[codes == 0] = (rotated << 1 | rotated >> 7) & 0xFF
    signs, mantissas = bytes_PB64.astype(np.int64) >> 7, bytes_PB64 & 0x7F
    words = (signs << 15 | exponents << 7 | mantissas).astype(np.uint16)
    rows_PBQHRC = words.reshape(panels, blocks, 4, 2, 4, 2)
    whole = rows_PBQHRC.transpose(0, 2, 4, 1, 3, 5).reshape(panels * PANEL_ROWS, blocks * BLOCK_COLUMNS)
    return whole[: matrix.n, : matrix.k].copy()


def _unchunked(panels_PX: NDArray[np.uint8], blocks: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """Planes [P, blocks, 24] and bytes [P, blocks, 64] of panels in chunks of eight blocks."""
    planes, signs = [], []
    for block in range(0, blocks, CHUNK_BLOCKS):
        count = min(CHUNK_BLOCKS, blocks - block)
        chunk = panels_PX[:, block * BLOCK_BYTES : (block + count) * BLOCK_BYTES]
        planes.append(chunk[:, : count * PLANE_BYTES].reshape(-1, count, PLANE_BYTES))
        signs.append(chunk[:, count * PLANE_BYTES :].reshape(-1, count, 64))
    return np.concatenate(planes, axis=1), np.concatenate(signs, axis=1)
