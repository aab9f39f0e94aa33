"""Tensors of a checkpoint folder: one ``model.safetensors`` or an index of shards, mapped into memory.

Knows names, types and shapes; knows nothing of architectures.  Everything wrong with a file is a ``ModelError`` that
names the file, the tensor and the reason.  Nothing is read of a tensor before it is asked for.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.weights.header import LENGTH_BYTES, TensorInfo, header_length, parse_header
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
    """One file, mapped read-only."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be read or is not a sound safetensors file."""
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                prefix = file.read(64)
                length = header_length(prefix, size, str(path))
                self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error
        try:
            self.tensors = parse_header(self._map[LENGTH_BYTES : LENGTH_BYTES + length], size, str(path))
        except ModelError:
            self._map.close()
            raise

    def raw(self, info: TensorInfo) -> memoryview:
        """The tensor's bytes, a read-only view of the mapping."""
        return memoryview(self._map)[info.start : info.stop]

    def drop(self, info: TensorInfo) -> None:
        """Take the tensor's pages out of this process's resident memory."""
        first = info.start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self._map, "madvise") and info.nbytes:
            self._map.madvise(mmap.MADV_DONTNEED, first, info.stop - first)

    def close(self) -> None:
        """Unmap, unless arrays still look into the mapping: then it goes with the last of them."""
        try:
            self._map.close()
        except BufferError:
            del self._map


class Checkpoint:
    """All tensors of a folder by name, whichever file they are in.  Use as a context manager."""

    def __init__(self, folder: Path) -> None:
        """Opens and checks every file's header.  Raises ModelError."""
        self.folder = folder
        self._files: list[SafetensorsFile] = []
        self._home: dict[str, SafetensorsFile] = {}
        try:
            if (folder / SINGLE).exists():
                self._open(SINGLE)
            elif (folder / INDEX).exists():
                self._open_shards(folder / INDEX)
            else:
                raise ModelError(_no_weights(folder))
        except ModelError:
            self.close()
            raise

    @property
    def names(self) -> list[str]:
        """Names of all tensors, sorted: an order that does not depend on how they were sharded."""
        return sorted(self._home)

    def info(self, name: str) -> TensorInfo:
        """Type, shape and place of a tensor.  Raises ModelError if there is none of that name."""
        return self._file_of(name).tensors[name]

    def raw(self, name: str) -> memoryview:
        """The bytes of a tensor, a view of the mapping."""
        file = self._file_of(name)
        return file.raw(file.tensors[name])

    def array(self, name: str) -> NDArray[Any]:
        """The tensor as a read-only view: bfloat16 (ml_dtypes), float16 or float32.  Other types are refused."""
        self.weight_dtype(name)
        info = self.info(name)
        return np.frombuffer(self.raw(name), NUMPY_DTYPES[info.dtype]).reshape(info.shape)

    def weight_dtype(self, name: str) -> str:
        """ "bf16", "fp16" or "fp32".  Raises ModelError for a tensor that is of another type."""
        dtype = self.info(name).dtype
        if dtype not in SHORT_NAMES:
            raise ModelError(
                f"{self.path_of(name)}: tensor {name!r} has type {dtype}; weights in bf16, fp16 or fp32 can be served"
            )
        return SHORT_NAMES[dtype]

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

    def _file_of(self, name: str) -> SafetensorsFile:
        file = self._home.get(name)
        if file is None:
            raise ModelError(f"{self.folder}: tensor {name!r} is missing")
        return file

    def _open(self, name: str) -> SafetensorsFile:
        file = SafetensorsFile(self.folder / name)
        self._files.append(file)
        for tensor in file.tensors:
            if tensor in self._home:
                raise ModelError(f"{file.path}: tensor {tensor!r} is also in {self._home[tensor].path.name}")
            self._home[tensor] = file
        return file

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
            self._open(name)
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
        return f"{folder}: has its weights in {ggufs[0]} only; GGUF cannot be served, take the safetensors release"
    return f"{folder}: has no weights; expected {SINGLE} or {INDEX}"
