"""One safetensors file, mapped into memory; plain, or written by ``penstock compress`` or ``penstock shard``.

Compressed files are read like plain ones: type, shape and bytes of a tensor are those of the original, decoded and
checked against its hash when they are asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
from blake3 import blake3

from penstock.errors import ModelError
from penstock.kernels.compressed import AnyCompressed
from penstock.weights import compression_format
from penstock.weights.compression_format import OriginalTensor, original_info, parse_originals
from penstock.weights.files import FileRange, FileStamp, MappedFile
from penstock.weights.safetensors_header import (
    AGAIN,
    DTYPE_BYTES,
    LENGTH_BYTES,
    TensorInfo,
    header_length,
    parse_metadata,
    parse_safetensors_header,
)
from penstock.weights.stored_slices import TensorSlice, joined_bytes, matrix_of, slices_of


class SafetensorsFile:
    """One file, mapped read-only and open for reading."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be read or is not a sound safetensors file."""
        self._file = MappedFile(path)
        self.path = path
        try:
            size = self._file.size
            length = header_length(bytes(self._file.view(0, 64)), size, str(path))
            self._parse(bytes(self._file.view(LENGTH_BYTES, LENGTH_BYTES + length)), size)
        except ModelError:
            self.close()
            raise
        self._verified: set[str] = set()

    @property
    def stamp(self) -> FileStamp:
        """The stamp of the open file, even if its path names another one now."""
        return self._file.stamp

    def file_range(self, info: TensorInfo) -> FileRange:
        """Where the stored bytes lie."""
        return self._file.file_range(info.start, info.stop)

    def original(self, info: TensorInfo) -> OriginalTensor | None:
        """The tensor's entry in a compressed file's table."""
        return (self._originals or {}).get(info.name)

    def _parse(self, header: bytes, size: int) -> None:
        where = str(self.path)
        stored = parse_safetensors_header(header, size, where)
        self.metadata = parse_metadata(header, where)
        self._originals = parse_originals(self.metadata, stored, where)
        originals = self._originals or {}
        self.tensors = {
            name: original_info(info, originals[name]) if name in originals else info for name, info in stored.items()
        }

    @property
    def is_compressed(self) -> bool:
        """Whether the file was written by ``penstock compress`` or ``penstock shard``."""
        return self._originals is not None

    @property
    def is_sliced(self) -> bool:
        """Whether it has tensors in slices."""
        return any(original.slices for original in (self._originals or {}).values())

    @property
    def layouts(self) -> set[str]:
        """The layouts of its compressed tensors (``OriginalTensor.layout``)."""
        return {original.layout for original in (self._originals or {}).values() if original.code is not None}

    def stored(self, info: TensorInfo) -> memoryview:
        """The bytes in the file, a read-only view of the mapping."""
        return self._file.view(info.start, info.stop)

    def compressed_matrix(self, info: TensorInfo) -> AnyCompressed | None:
        """The tensor in its compressed form, unchecked but for its sizes; None if it is stored plain."""
        original = self.original(info)
        return None if original is None else matrix_of(original, self.stored(info), self._where(info))

    def slices(self, info: TensorInfo) -> tuple[TensorSlice, ...]:
        """What the file has of the tensor, one after another: itself unless it is stored in slices."""
        return slices_of(info.name, self.original(info), info.nbytes)

    def original_bytes(self, info: TensorInfo) -> int:
        """The number of bytes that ``raw`` returns."""
        return math.prod(info.shape) * DTYPE_BYTES[info.dtype]

    def raw(self, info: TensorInfo) -> memoryview:
        """The original's bytes: a read-only view of the mapping, or decoded.  Raises ModelError if a hash is wrong."""
        matrix = self.compressed_matrix(info)
        if matrix is None:
            raw = joined_bytes(self.slices(info), self.stored(info))
        else:
            parts = compression_format.decode_parts(matrix, self._where(info))
            whole = np.concatenate([part.reshape(-1).copy() for part in parts])
            raw = whole.data.cast("B").toreadonly()
        self._check(info, lambda: blake3(raw).hexdigest())
        return raw

    def digest(self, info: TensorInfo) -> bytes:
        """BLAKE3 of the original's bytes.  Raises ModelError if it is not the one that a compressed file promises."""
        if self._originals is not None and info.name in self._verified:
            return bytes.fromhex(self._originals[info.name].blake3)
        matrix = self.compressed_matrix(info)
        hasher = blake3()
        if matrix is None:
            with joined_bytes(self.slices(info), self.stored(info)) as raw:
                hasher.update(raw)
        else:
            for part in compression_format.decode_parts(matrix, self._where(info)):
                hasher.update(part.data.cast("B"))
        self._check(info, hasher.hexdigest)
        return hasher.digest()

    def _check(self, info: TensorInfo, hexdigest: Callable[[], str]) -> None:
        if self._originals is None or info.name in self._verified:
            return
        if hexdigest() != self._originals[info.name].blake3:
            raise ModelError(f"{self._where(info)}: damaged, its weights are not those that were compressed; {AGAIN}")
        self._verified.add(info.name)

    def _where(self, info: TensorInfo) -> str:
        return f"{self.path}: tensor {info.name!r}"

    def interleaved_heads(self, info: TensorInfo) -> None:
        """None: rows lie as the model has them."""
        return

    def is_widened(self, info: TensorInfo) -> bool:
        """Never: types are the model's own."""
        return False

    def quantized_tensor(self, info: TensorInfo) -> None:
        """None: what is quantized here takes several tensors."""
        return

    def drop(self, info: TensorInfo) -> None:
        """Drop the tensor's pages from this process's resident memory."""
        self._file.drop(info.start, info.stop)

    def close(self) -> None:
        """Views that are still held stay valid."""
        self._file.close()
