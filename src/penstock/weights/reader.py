"""Tensors of a checkpoint: a folder with one ``model.safetensors`` or an index of shards, or one GGUF file.

Mapped into memory.

Compressed files are read like plain ones: type, shape and bytes of a tensor are those of the original, decoded and
checked against its hash when they are asked for.  Knows names, types and shapes; knows nothing of architectures.
Everything wrong with a file is a ``ModelError`` that names the file, the tensor and the reason.  Nothing is read of a
tensor before it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.compressed import CompressedMatrix
from penstock.kernels.quantised import QuantizedMatrix, dequantised
from penstock.weights import codec
from penstock.weights.compressed import Original, original_info, parse_originals
from penstock.weights.gguf_file import GgufFile, is_gguf
from penstock.weights.gguf_quants import GGUF_QUANTS
from penstock.weights.header import DTYPE_BYTES, LENGTH_BYTES, TensorInfo, header_length, parse_header, parse_metadata
from penstock.weights.mapped import MappedFile, Place, Stamp
from penstock.weights.strict_json import read_object

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

NUMPY_DTYPES: Mapping[str, np.dtype[Any]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
}
"""Types that weights may have."""

SHORT_NAMES: Mapping[str, str] = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}
"""The same types as the rest of Penstock names them."""


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
    def stamp(self) -> Stamp:
        """Of the open file, whatever stands under its name now."""
        return self._file.stamp

    def place(self, info: TensorInfo) -> Place:
        """Where the stored bytes lie."""
        return self._file.place(info.start, info.stop)

    def original(self, info: TensorInfo) -> Original | None:
        """The tensor's entry in a compressed file's table."""
        return (self._originals or {}).get(info.name)

    def _parse(self, header: bytes, size: int) -> None:
        where = str(self.path)
        stored = parse_header(header, size, where)
        self.metadata = parse_metadata(header, where)
        self._originals = parse_originals(self.metadata, stored, where)
        originals = self._originals or {}
        self.tensors = {
            name: original_info(info, originals[name]) if name in originals else info for name, info in stored.items()
        }

    @property
    def is_compressed(self) -> bool:
        """Was the file written by ``penstock compress``?"""
        return self._originals is not None

    def stored(self, info: TensorInfo) -> memoryview:
        """The bytes in the file, a read-only view of the mapping."""
        return self._file.view(info.start, info.stop)

    def matrix(self, info: TensorInfo) -> CompressedMatrix | None:
        """The tensor in its compressed form, unchecked but for its sizes; None if it is stored plain."""
        original = self.original(info)
        if original is None or original.code is None:
            return None
        n, k = info.shape
        return codec.sections_of(self.stored(info), (n, k), original.code, self._where(info))

    def original_bytes(self, info: TensorInfo) -> int:
        """How many bytes ``raw`` gives."""
        return math.prod(info.shape) * DTYPE_BYTES[info.dtype]

    def raw(self, info: TensorInfo) -> memoryview:
        """The original's bytes: a read-only view of the mapping, or decoded.  Raises ModelError if a hash is wrong."""
        matrix = self.matrix(info)
        if matrix is None:
            raw = self.stored(info)
            self._check(info, lambda: blake3(raw).hexdigest())
            return raw
        parts = codec.decoded(matrix, self._where(info))
        whole = np.concatenate([part.reshape(-1).copy() for part in parts])
        raw = whole.data.cast("B").toreadonly()
        self._check(info, lambda: blake3(raw).hexdigest())
        return raw

    def digest(self, info: TensorInfo) -> bytes:
        """BLAKE3 of the original's bytes.  Raises ModelError if it is not the one that a compressed file promises."""
        if self._originals is not None and info.name in self._verified:
            return bytes.fromhex(self._originals[info.name].blake3)
        matrix = self.matrix(info)
        hasher = blake3()
        if matrix is None:
            with self.stored(info) as raw:
                hasher.update(raw)
        else:
            for part in codec.decoded(matrix, self._where(info)):
                hasher.update(part.data.cast("B"))
        self._check(info, hasher.hexdigest)
        return hasher.digest()

    def _check(self, info: TensorInfo, hexdigest: Callable[[], str]) -> None:
        if self._originals is None or info.name in self._verified:
            return
        if hexdigest() != self._originals[info.name].blake3:
            raise ModelError(f"{self._where(info)}: damaged, its weights are not those that were compressed")
        self._verified.add(info.name)

    def _where(self, info: TensorInfo) -> str:
        return f"{self.path}: tensor {info.name!r}"

    def turned_heads(self, info: TensorInfo) -> None:
        """None: rows lie as the model has them."""
        return

    def quantised(self, info: TensorInfo) -> None:
        """None: what is quantised here takes several tensors."""
        return

    def drop(self, info: TensorInfo) -> None:
        """Take the tensor's pages out of this process's resident memory."""
        self._file.drop(info.start, info.stop)

    def close(self) -> None:
        """Views that are still held stay valid."""
        self._file.close()


class TensorFile(Protocol):
    """One file of a checkpoint; ``info`` is always one of its ``tensors``."""

    path: Path
    tensors: dict[str, TensorInfo]

    @property
    def stamp(self) -> Stamp: ...
    @property
    def is_compressed(self) -> bool: ...
    def place(self, info: TensorInfo) -> Place: ...
    def stored(self, info: TensorInfo) -> memoryview: ...
    def raw(self, info: TensorInfo) -> memoryview: ...
    def digest(self, info: TensorInfo) -> bytes: ...
    def original(self, info: TensorInfo) -> Original | None: ...
    def matrix(self, info: TensorInfo) -> CompressedMatrix | None: ...
    def turned_heads(self, info: TensorInfo) -> int | None: ...
    def quantised(self, info: TensorInfo) -> QuantizedMatrix | None: ...
    def drop(self, info: TensorInfo) -> None: ...
    def close(self) -> None: ...


class Checkpoint:
    """All tensors of a model by name, whichever file they are in.  Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Opens and checks every file's header; ``folder`` may be a GGUF file.  Raises ModelError."""
        self.folder = folder
        self._files: list[TensorFile] = []
        self._home: dict[str, TensorFile] = {}
        try:
            if is_gguf(folder):
                self._add(GgufFile(folder))
            elif (folder / SINGLE).exists():
                self._add(SafetensorsFile(folder / SINGLE))
            elif (folder / INDEX).exists():
                self._open_shards(folder / INDEX)
            else:
                raise ModelError(_no_weights(folder))
        except ModelError:
            self.close()
            raise

    @property
    def files(self) -> list[SafetensorsFile]:
        """The safetensors files, by name; none where the model is a GGUF file."""
        return [file for file in self._files if isinstance(file, SafetensorsFile)]

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted: an order that does not depend on how they were sharded."""
        return sorted(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home

    def info(self, name: str) -> TensorInfo:
        """Type, shape and place of a tensor.  Raises ModelError if there is none of that name."""
        return self._file_of(name).tensors[name]

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor: a view of the mapping, or decoded from compressed ones."""
        file = self._file_of(name)
        return file.raw(file.tensors[name])

    def digest(self, name: str) -> bytes:
        """BLAKE3 of the tensor's bytes."""
        file = self._file_of(name)
        return file.digest(file.tensors[name])

    def place(self, name: str) -> Place:
        """Where the tensor's stored bytes lie."""
        file = self._file_of(name)
        return file.place(file.tensors[name])

    def stored(self, name: str) -> memoryview:
        """The tensor's bytes as they are in the file: a view of the mapping."""
        file = self._file_of(name)
        return file.stored(file.tensors[name])

    def original(self, name: str) -> Original | None:
        """What a compressed file says of the tensor; None in a plain file."""
        file = self._file_of(name)
        return file.original(file.tensors[name])

    def stamps(self) -> dict[str, Stamp]:
        """The files' stamps by name."""
        return {file.path.name: file.stamp for file in self._files}

    def matrix(self, name: str) -> CompressedMatrix | None:
        """The tensor in its compressed form, None if it is stored plain.  ``digest`` checks that it is sound."""
        file = self._file_of(name)
        return file.matrix(file.tensors[name])

    def quantised(self, name: str) -> QuantizedMatrix | None:
        """The matrix as it is stored, None if it is not quantised."""
        file = self._file_of(name)
        return file.quantised(file.tensors[name])

    def array(self, name: str) -> NDArray[Any]:
        """The tensor as a read-only view: bfloat16 (ml_dtypes), float16 or float32.  Other types are refused.

        What is quantised becomes float32, all of it.
        """
        self.weight_dtype(name)
        quantised = self.quantised(name)
        if quantised is not None:
            return dequantised(quantised.whole(), quantised.format)
        info = self.info(name)
        return np.frombuffer(self.raw(name), NUMPY_DTYPES[info.dtype]).reshape(info.shape)

    def weight_dtype(self, name: str) -> str:
        """ "bf16", "fp16" or "fp32"; bf16 for what is quantised, for it holds every code's value.

        Raises ModelError for a tensor that is of another type.
        """
        dtype = self.info(name).dtype
        if self.quantised(name) is not None:
            return "bf16"
        if dtype not in SHORT_NAMES:
            raise ModelError(
                f"{self.path_of(name)}: tensor {name!r} has type {dtype}; weights in bf16, fp16 or fp32 can be served, "
                f"and in a GGUF file {', '.join(sorted(GGUF_QUANTS))}"
            )
        return SHORT_NAMES[dtype]

    def is_plain(self, name: str) -> bool:
        """Does it lie as the model has it: rows in their order, compressed perhaps, but not quantised?"""
        file = self._file_of(name)
        info = file.tensors[name]
        return file.turned_heads(info) is None and file.quantised(info) is None

    def done_with(self, name: str) -> None:
        """Let go of the memory behind a tensor (the page cache keeps it); it can still be read again."""
        file = self._file_of(name)
        file.drop(file.tensors[name])

    def path_of(self, name: str) -> Path:
        """The file that a tensor is in."""
        return self._file_of(name).path

    def close(self) -> None:
        """Close all files; views that are still held stay valid."""
        for file in self._files:
            file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _file_of(self, name: str) -> TensorFile:
        file = self._home.get(name)
        if file is None:
            raise ModelError(f"{self.folder}: tensor {name!r} is missing")
        return file

    def _add(self, file: TensorFile) -> None:
        self._files.append(file)
        for tensor in file.tensors:
            if tensor in self._home:
                raise ModelError(f"{file.path}: tensor {tensor!r} is also in {self._home[tensor].path.name}")
            self._home[tensor] = file

    def _open_shards(self, index: Path) -> None:
        places = read_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelError(f"{index}: has no weight_map")
        for tensor, name in places.items():
            if not _is_plain_name(name):
                raise ModelError(
                    f"{index}: tensor {tensor!r}: {name!r} is not the name of a .safetensors file beside it"
                )
        for name in sorted(set(places.values())):
            self._add(SafetensorsFile(self.folder / name))
        for tensor, name in places.items():
            if self._file_of(tensor).path.name != name:
                raise ModelError(f"{self.folder / name}: tensor {tensor!r} is missing, {index.name} says it is here")
        for tensor in self._home:
            if tensor not in places:
                raise ModelError(f"{self.path_of(tensor)}: tensor {tensor!r} is not in {index.name}")


def _is_plain_name(name: Any) -> bool:
    """A file beside the index and nowhere else."""
    return (
        isinstance(name, str)
        and name.endswith(".safetensors")
        and not name.startswith(".")
        and not any(char in name for char in "/\\\0:")
    )


def _no_weights(folder: Path) -> str:
    pickles = sorted(path.name for path in folder.glob("*.bin") if path.name.startswith("pytorch_model"))
    pickles += sorted(path.name for pattern in ("*.pth", "*.pt", "*.ckpt") for path in folder.glob(pattern))
    if pickles:
        return (
            f"{folder}: has its weights in {pickles[0]} only, a pickle, which can run code when it is read; "
            "convert it, as transformers' from_pretrained(...).save_pretrained(...) does"
        )
    ggufs = sorted(path.name for path in folder.glob("*.gguf"))
    if ggufs:
        return f"{folder}: has its weights in GGUF files only; give one of them: penstock serve {folder / ggufs[0]}"
    return f"{folder}: has no weights; expected {SINGLE} or {INDEX}"
