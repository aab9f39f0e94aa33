"""The format of compressed safetensors files (docs/format.md): metadata, sections of a tensor, and checksums.

Metadata: every tensor of the original has an entry with its type, shape and BLAKE3, and the checksum of its stored
bytes.  A compressed tensor is a tensor of bytes (``U8``) under its own name, and its entry has the exponent code too.

Sections: a bf16 weight becomes a 3-bit code for its exponent (seven neighboring exponents; 0 is an escape) and a byte
with sign and mantissa; the exponents of escapes follow as bytes.  The kernels (``kernels.native.compression``) code and
decode; ``encode_reference`` and ``decode_reference`` are the oracle in NumPy.  This is the CPU's layout;
``kernels.compressed`` codes that of GPUs.

Checksums guard against damage on a drive or in memory, not against malice: XXH3-128 of a line that describes the
tensor, then of the XXH3-128 of each piece of its bytes.  Pieces are those in which weights are loaded, so loading
checks them at the speed of the copy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError, ModelError
from penstock.kernels.compressed import (
    BLOCK_BYTES,
    BLOCK_COLUMNS,
    BLOCK_WORDS,
    MAX_BASE,
    MAX_VALUES,
    PANEL_ROWS,
    AnyCompressed,
    CompressedMatrix,
    GpuCompressedMatrix,
    blocks_bytes,
    choose_code,
    column_blocks,
    panels_of,
    stretches_of,
    table_bytes,
    words_bytes,
)
from penstock.kernels.compressed_cuts import CHUNK_BLOCKS, CHUNK_COLUMNS, unchunked_blocks
from penstock.kernels.host_ops import xxh3_128
from penstock.kernels.weight_source import PIECE_BYTES
from penstock.weights.safetensors_header import DTYPE_BYTES, MAX_RANK, TensorInfo


def compress_matrix(weight_NK: NDArray[np.uint16]) -> CompressedMatrix | None:
    """The matrix (bf16 bits) compressed by the kernels, or None if that would not be smaller."""
    from penstock.kernels.native import compression  # headers can be read where the extension is not built

    return compression.compress(weight_NK)


def decode_parts(matrix: AnyCompressed, where: str) -> Iterator[NDArray[np.uint16]]:
    """Rows of the matrix as bf16 bits, some at a time; each array is valid until the next.

    Raises ModelError, beginning with ``where``, if its sections contradict each other, or nothing here decodes them.
    """
    try:
        if isinstance(matrix, GpuCompressedMatrix):
            yield from map(np.ascontiguousarray, matrix.decoded())
        else:
            from penstock.kernels.native import compression

            yield from compression.decoded_panels(matrix)
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
    if not is_exponent_code(base, step):
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


def gpu_sections_of(raw: memoryview, shape: tuple[int, int], base: int, where: str) -> GpuCompressedMatrix:
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
    return GpuCompressedMatrix(
        n, k, base, counts_PS, words.reshape(panels_of(n), column_blocks(k), BLOCK_WORDS), values
    )


def sections(matrix: AnyCompressed) -> list[memoryview]:
    """What a file holds of it, in order; empty ones are left out."""
    if isinstance(matrix, GpuCompressedMatrix):
        arrays: tuple[NDArray[Any], ...] = (matrix.counts_PS, matrix.words_PB, matrix.values)
    else:
        arrays = (matrix.counts, matrix.blocks, matrix.escapes)
    return [array.reshape(-1).data.cast("B") for array in arrays if array.size]


def is_exponent_code(base: int, step: int) -> bool:
    """Whether codes 1 to 7 with this base and step are valid exponents."""
    return (step == 1 and base % 2 == 0 and 0 <= base <= 248) or (step == -1 and base % 2 == 1 and 7 <= base <= 255)


# --- the oracle -------------------------------------------------------------------------------------------------------


def encode_reference(weight_NK: NDArray[np.uint16]) -> CompressedMatrix:
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


def decode_reference(matrix: CompressedMatrix) -> NDArray[np.uint16]:
    """The weights [n, k] as bf16 bits.  Raises ValueError if planes and escapes contradict each other."""
    panels, blocks = panels_of(matrix.n), -(-matrix.k // BLOCK_COLUMNS)
    planes_PB24, bytes_PB64 = unchunked_blocks(matrix.blocks.reshape(panels, -1))
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


VERSION_KEY = "penstock.compression"
TENSORS_KEY = "penstock.tensors"
VERSION = "1"
VERSION_OF_LAYOUTS = "2"
"""Of files with a tensor in another layout than the CPU's: what reads version 1 only must not read them."""

VERSION_OF_SLICES = "3"
"""Of files with a tensor in slices (``weights.stored_slices``)."""

ROWS, COLUMNS = "rows", "columns"
"""Along what a tensor is cut into slices."""

GPU = "gpu"
DIGEST_DIGITS = 64
CHECKSUM_DIGITS = 32


class SliceEntry(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One slice of a tensor: where its rows or columns end, its bytes in the file, and their checksum."""

    end: int
    nbytes: int
    checksum: str


class OriginalTensor(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One tensor as it was before compression."""

    dtype: str
    shape: tuple[int, ...]
    blake3: str  # hexadecimal, of its bytes
    code: tuple[int, int] | None = None  # (base, step) if it is stored compressed
    checksum: str = ""  # of the stored bytes, see ``checksum``; files of earlier versions have none
    layout: str = ""  # "gpu", or empty for the CPU's
    axis: str = ""  # "rows" or "columns" if it is stored in slices
    slices: tuple[SliceEntry, ...] = ()


OriginalTensors = Mapping[str, OriginalTensor]


def compression_metadata(originals: OriginalTensors) -> dict[str, str]:
    """The entries for ``__metadata__``."""
    version = VERSION_OF_LAYOUTS if any(original.layout for original in originals.values()) else VERSION
    if any(original.slices for original in originals.values()):
        version = VERSION_OF_SLICES
    return {VERSION_KEY: version, TENSORS_KEY: msgspec.json.encode(originals).decode()}


def parse_originals(
    metadata: Mapping[str, str], stored: Mapping[str, TensorInfo], where: str
) -> OriginalTensors | None:
    """The table of original tensors; None if the file is a plain one.

    Raises ModelError unless every tensor of the file has one sound entry that fits it.
    """
    if VERSION_KEY not in metadata and TENSORS_KEY not in metadata:
        return None
    version = metadata.get(VERSION_KEY)
    if version not in (VERSION, VERSION_OF_LAYOUTS, VERSION_OF_SLICES):
        known = f"{VERSION!r}, {VERSION_OF_LAYOUTS!r} and {VERSION_OF_SLICES!r}"
        raise ModelError(f"{where}: compressed in a format of version {version!r}; this reader knows {known}")
    try:
        originals = msgspec.json.decode(metadata.get(TENSORS_KEY, ""), type=dict[str, OriginalTensor])
    except (msgspec.DecodeError, msgspec.ValidationError) as error:
        raise ModelError(f"{where}: its table of compressed tensors is damaged ({error})") from error
    if originals.keys() != stored.keys():
        name = min(originals.keys() ^ stored.keys())
        raise ModelError(f"{where}: tensor {name!r} is in its header or its table of originals, but not in both")
    for name, original in originals.items():
        if original.layout not in ("", GPU) or (original.layout and version == VERSION):
            raise ModelError(f"{where}: tensor {name!r} has layout {original.layout!r}; known is {GPU!r}, in version 2")
        if (original.axis or original.slices) and version != VERSION_OF_SLICES:
            raise ModelError(f"{where}: tensor {name!r} has slices, which a file of version 3 may have")
        _check(original, stored[name], f"{where}: tensor {name!r}")
    with_checksum = [name for name, original in originals.items() if original.checksum]
    if 0 < len(with_checksum) < len(originals):
        name = min(originals.keys() - set(with_checksum))
        raise ModelError(f"{where}: tensor {name!r} has no checksum, others have")
    return originals


def original_info(stored: TensorInfo, original: OriginalTensor) -> TensorInfo:
    """The tensor as it was, at the place where it is stored."""
    return TensorInfo(stored.name, original.dtype, original.shape, stored.start, stored.stop)


def _check(original: OriginalTensor, stored: TensorInfo, where: str) -> None:
    if not _is_hex(original.blake3, DIGEST_DIGITS):
        raise ModelError(f"{where}: bad hash {original.blake3!r}")
    if original.checksum and not _is_hex(original.checksum, CHECKSUM_DIGITS):
        raise ModelError(f"{where}: bad checksum {original.checksum!r}")
    if original.dtype not in DTYPE_BYTES or len(original.shape) > MAX_RANK or min(original.shape, default=0) < 0:
        raise ModelError(f"{where}: its original cannot be {original.dtype} {list(original.shape)}")
    if original.axis or original.slices:
        _check_slices(original, stored, where)
    if original.code is None and original.axis != COLUMNS:
        if (original.dtype, original.shape) != (stored.dtype, stored.shape) or original.layout:
            raise ModelError(f"{where}: stored as {stored.dtype} {list(stored.shape)}, which its entry denies")
        return
    if stored.dtype != "U8" or len(stored.shape) != 1:
        raise ModelError(f"{where}: not stored as bytes, though its entry says so")
    if original.code is None:
        return
    if original.dtype != "BF16" or len(original.shape) != 2 or min(original.shape) < 1 or not has_valid_code(original):
        raise ModelError(f"{where}: a compressed tensor must be a matrix of BF16 with a sound exponent code")
    if stored.nbytes >= 2 * math.prod(original.shape):
        raise ModelError(f"{where}: not stored as a compressed tensor, though its entry says so")


def _check_slices(original: OriginalTensor, stored: TensorInfo, where: str) -> None:
    """Raises ModelError unless they are a sound cut of the tensor's rows or columns and of its bytes."""
    if original.axis not in (ROWS, COLUMNS) or len(original.shape) != 2 or min(original.shape) < 1 or original.layout:
        raise ModelError(f"{where}: only matrices are cut, by {ROWS} or {COLUMNS}, and none in the layout {GPU!r}")
    by_rows = original.axis == ROWS
    length, across = original.shape if by_rows else original.shape[::-1]
    edges = [0, *(own.end for own in original.slices)]
    sizes = [own.nbytes for own in original.slices]
    rising = all(one < other for one, other in pairwise(edges))
    if not rising or edges[-1] != length or min(sizes, default=0) < 1 or sum(sizes) != stored.nbytes:
        raise ModelError(f"{where}: damaged, its slices do not cut {list(original.shape)} in {stored.nbytes} bytes")
    if original.code is None:
        each = across * DTYPE_BYTES[original.dtype]
        sound = [(end - first) * each for first, end in pairwise(edges)] == sizes
    else:
        sound = not any(edge % (PANEL_ROWS if by_rows else CHUNK_COLUMNS) for edge in edges[:-1])
    sums = [own.checksum for own in original.slices]
    if not sound or not all(_is_hex(found, CHECKSUM_DIGITS) for found in sums):
        raise ModelError(f"{where}: damaged, slices of other sizes than its rows and columns can have")
    if original.checksum != sliced_checksum(stored.name, original, sums):
        raise ModelError(f"{where}: damaged, its checksum is not that of its slices' checksums")


def has_valid_code(original: OriginalTensor) -> bool:
    """Whether its codes are valid exponents."""
    base, step = original.code or (-1, 0)
    if original.layout == GPU:
        return step == 1 and 0 <= base <= MAX_BASE
    return is_exponent_code(base, step)


def _is_hex(text: str, digits: int) -> bool:
    return len(text) == digits and set(text) <= set("0123456789abcdef")


def checksum_text(name: str, tensor: OriginalTensor) -> str:
    """What is hashed in front of the pieces: everything by which the bytes become weights."""
    code = "" if tensor.code is None else ",".join(map(str, (*tensor.code, tensor.layout))).rstrip(",")
    return "\n".join((name, tensor.dtype, ",".join(map(str, tensor.shape)), tensor.blake3, code, ""))


def checksum(name: str, tensor: OriginalTensor, sections: Sequence[memoryview]) -> str:
    """32 hexadecimal digits for a tensor and its bytes in the file; ``sections`` end where pieces end."""
    whole = [checksum_text(name, tensor).encode()]
    left = list(sections)
    start = 0  # of the first section that is left
    for begin, end in pieces(tensor, sum(section.nbytes for section in sections)):
        while begin >= start + left[0].nbytes:
            start += left.pop(0).nbytes
        whole.append(xxh3_128(left[0][begin - start : end - start]))
    return xxh3_128(b"".join(whole)).hex()


def sliced_checksum(name: str, tensor: OriginalTensor, sums: Sequence[str]) -> str:
    """The same for a tensor in slices, by theirs."""
    return xxh3_128(checksum_text(name, tensor).encode() + b"".join(map(bytes.fromhex, sums))).hex()


def pieces(tensor: OriginalTensor, nbytes: int) -> Iterator[tuple[int, int]]:
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
