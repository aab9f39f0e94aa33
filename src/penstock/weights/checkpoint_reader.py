"""Tensors of a checkpoint: a folder with one ``model.safetensors`` or an index of shards, or a GGUF model.

Tensors that several stored ones make together (codes and their scales; ``ComputedTensor``) are there as one.
Knows names, types and shapes; knows nothing of architectures.  Everything wrong with a file is a ``ModelError`` that
names the file, the tensor and the reason.  Nothing is read of a tensor before it is asked for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.compressed import AnyCompressed
from penstock.weights.compression_format import COLUMNS, OriginalTensor, decode_parts
from penstock.weights.computed_tensor import ComputedTensor
from penstock.weights.config_json import read_json_object
from penstock.weights.files import FileRange, FileStamp
from penstock.weights.gguf.blocks import GGUF_QUANTS
from penstock.weights.gguf.file import GgufModel
from penstock.weights.gguf.header import is_gguf
from penstock.weights.quantization.base import QuantizedTensor
from penstock.weights.quantization.config import UNUSED, Quantization
from penstock.weights.safetensors import SafetensorsFile
from penstock.weights.safetensors_header import TensorInfo
from penstock.weights.stored_slices import TensorSlice, joined_bytes, joined_matrix

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


class TensorFile(Protocol):
    """One file of a checkpoint; ``info`` is always one of its ``tensors``."""

    path: Path
    tensors: dict[str, TensorInfo]

    @property
    def stamp(self) -> FileStamp: ...
    @property
    def is_compressed(self) -> bool: ...
    def file_range(self, info: TensorInfo) -> FileRange: ...
    def stored(self, info: TensorInfo) -> memoryview: ...
    def raw(self, info: TensorInfo) -> memoryview: ...
    def digest(self, info: TensorInfo) -> bytes: ...
    def original(self, info: TensorInfo) -> OriginalTensor | None: ...
    def slices(self, info: TensorInfo) -> tuple[TensorSlice, ...]: ...
    def compressed_matrix(self, info: TensorInfo) -> AnyCompressed | None: ...
    def interleaved_heads(self, info: TensorInfo) -> int | None: ...
    def is_widened(self, info: TensorInfo) -> bool: ...
    def quantized_tensor(self, info: TensorInfo) -> QuantizedTensor | None: ...
    def drop(self, info: TensorInfo) -> None: ...
    def close(self) -> None: ...


class Checkpoint:
    """All tensors of a model by name, whichever file they are in.  Use as a context manager."""

    def __init__(self, folder: Path, quantization: Quantization | None = None) -> None:
        """Opens and checks every file's header; ``folder`` may be a GGUF file, the first of its parts.

        ``quantization``: how ``config.json`` says that matrices are stored.  Raises ModelError.
        """
        self.folder = folder
        self._quantization = quantization
        self._coded: dict[str, QuantizedTensor] = {}
        self._computed: dict[str, ComputedTensor] = {}
        self._files: list[TensorFile] = []
        self._home: dict[str, TensorFile] = {}
        try:
            if is_gguf(folder):
                self._add_model(GgufModel(folder))
            elif (folder / SINGLE).exists():
                self._add(SafetensorsFile(folder / SINGLE))
            elif (folder / INDEX).exists():
                self._open_shards(folder / INDEX)
            else:
                raise ModelError(_no_weights(folder))
            if quantization is not None:
                self._coded = quantization.found_in(self)
        except ModelError:
            self.close()
            raise

    @property
    def files(self) -> list[SafetensorsFile]:
        """The safetensors files, by name; none where the model is a GGUF file."""
        return [file for file in self._files if isinstance(file, SafetensorsFile)]

    @property
    def names(self) -> list[str]:
        """Names of all stored tensors, sorted: an order that does not depend on how they were sharded."""
        return sorted(self._home)

    def __contains__(self, name: str) -> bool:
        return name in self._home or name in self._coded or name in self._computed

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

    def file_range(self, name: str) -> FileRange:
        """Where the tensor's stored bytes lie."""
        file = self._file_of(name)
        return file.file_range(file.tensors[name])

    def stored(self, name: str) -> memoryview:
        """The tensor's bytes as they are in the file: a view of the mapping."""
        file = self._file_of(name)
        return file.stored(file.tensors[name])

    def original(self, name: str) -> OriginalTensor | None:
        """What a compressed file says of the tensor; None in a plain file."""
        file = self._file_of(name)
        return file.original(file.tensors[name])

    def slices(self, name: str) -> tuple[TensorSlice, ...]:
        """What a file has of the tensor, one after another: itself unless it is stored in slices."""
        file = self._file_of(name)
        return file.slices(file.tensors[name])

    def joined_matrix(self, slices: Sequence[TensorSlice]) -> AnyCompressed | None:
        """Slices of one tensor that follow one another as one compressed matrix; None if they are plain."""
        name = slices[0].tensor
        return joined_matrix(slices, self.stored(name), f"{self.path_of(name)}: tensor {name!r}")

    def joined_array(self, slices: Sequence[TensorSlice]) -> NDArray[Any]:
        """Such slices as a read-only array, decoded, but unlike ``array`` not compared with any hash."""
        name, matrix = slices[0].tensor, self.joined_matrix(slices)
        dtype = NUMPY_DTYPES[self.info(name).dtype]
        if matrix is not None:
            parts = decode_parts(matrix, f"{self.path_of(name)}: tensor {name!r}")
            return np.concatenate([part.copy() for part in parts]).view(dtype)
        entries = [own.entry for own in slices if own.entry is not None]
        across = sum(entry.shape[1] for entry in entries) if slices[0].axis == COLUMNS else entries[0].shape[1]
        return np.frombuffer(joined_bytes(slices, self.stored(name)), dtype).reshape(-1, across)

    def stamps(self) -> dict[str, FileStamp]:
        """The files' stamps by name."""
        return {file.path.name: file.stamp for file in self._files}

    def compressed_matrix(self, name: str) -> AnyCompressed | None:
        """The tensor in its compressed form, None if it is stored plain.  ``digest`` checks that it is sound."""
        file = self._file_of(name)
        return file.compressed_matrix(file.tensors[name])

    def quantized_tensor(self, name: str) -> QuantizedTensor | None:
        """A tensor of the model that is stored as codes; None if it is plain."""
        if name in self._coded:
            return self._coded[name]
        if name in self._computed:
            return None
        file = self._file_of(name)
        return file.quantized_tensor(file.tensors[name])

    def computed_tensor(self, name: str) -> ComputedTensor | None:
        """A tensor of the model that is made of stored ones; None if it is one of these, or codes."""
        return self._computed.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor of the model.  Raises ModelError if it is missing."""
        made = self.computed_tensor(name) or self.quantized_tensor(name)
        return self.info(name).shape if made is None else made.shape

    def sources(self, name: str) -> tuple[str, ...]:
        """The stored tensors that make a tensor of the model: itself where it is plain."""
        made = self.computed_tensor(name) or self.quantized_tensor(name)
        return (name,) if made is None else made.sources

    def is_redundant(self, name: str) -> bool:
        """Whether a stored tensor may be left out: it concerns what is not quantized here, or is a bias of zeros."""
        if self._quantization is None:
            return False
        if UNUSED.fullmatch(name):
            return True
        module, _, end = name.rpartition(".")
        return end == "bias" and f"{module}.weight" in self._coded and not np.any(self.array(name))

    def array(self, name: str) -> NDArray[Any]:
        """A tensor as a read-only view: bfloat16 (ml_dtypes), float16 or float32.  Others are refused.

        A matrix of codes becomes float32, all of it.
        """
        self.weight_dtype(name)
        if name in self._computed:
            return self._computed[name].array()
        coded = self.quantized_tensor(name)
        if coded is not None:
            return coded.matrix(0).dequantized()
        info = self.info(name)
        return np.frombuffer(self.raw(name), NUMPY_DTYPES[info.dtype]).reshape(info.shape)

    def weight_dtype(self, name: str) -> str:
        """ "bf16", "fp16" or "fp32"; bf16 for what is quantized, for it holds every code's value.

        Raises ModelError for a tensor that is of another type.
        """
        if name in self._computed:
            return self._computed[name].dtype
        if self.quantized_tensor(name) is not None:
            return "bf16"
        dtype = self.info(name).dtype
        if dtype not in SHORT_NAMES:
            raise ModelError(
                f"{self.path_of(name)}: tensor {name!r} has type {dtype}; weights in bf16, fp16 or fp32 can be served, "
                f"codes that a quantization_config explains, and in a GGUF file {', '.join(sorted(GGUF_QUANTS))}"
            )
        return SHORT_NAMES[dtype]

    def is_widened(self, name: str) -> bool:
        """Whether its type says nothing about the model's: a converter stores it as fp32 whatever it was."""
        file = self._home.get(name)
        return file is not None and file.is_widened(file.tensors[name])

    def is_plain(self, name: str) -> bool:
        """Whether it is stored as the model has it: rows in order, perhaps compressed, not quantized."""
        if name in self._coded or name in self._computed:
            return False
        file = self._file_of(name)
        info = file.tensors[name]
        return file.interleaved_heads(info) is None and file.quantized_tensor(info) is None

    def drop_pages(self, name: str) -> None:
        """Let go of the memory behind a stored tensor (the page cache keeps it); it can still be read again."""
        file = self._file_of(name)
        file.drop(file.tensors[name])

    def path_of(self, name: str) -> Path:
        """The file that a tensor is in, or the first of those that make it."""
        made = self._computed.get(name) or self._coded.get(name)
        return self._file_of(name if made is None else made.sources[0]).path

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
            raise ModelError(f"{self.folder}: tensor {name!r} is missing{self._hint(name)}")
        return file

    def _hint(self, name: str) -> str:
        """What a missing matrix may be stored as."""
        module = name.removesuffix(".weight")
        ends = (".weight_packed", ".qweight", "_blocks")
        found = next((module + end for end in ends if module + end in self._home), None)
        return "" if found is None else f"; there is {found!r}, which config.json's quantization_config must explain"

    def _add(self, file: TensorFile) -> None:
        self._files.append(file)
        for tensor in file.tensors:
            if tensor in self._home:
                raise ModelError(f"{file.path}: tensor {tensor!r} is also in {self._home[tensor].path.name}")
            self._home[tensor] = file

    def _add_model(self, model: GgufModel) -> None:
        for file in model.files:
            self._add(file)
        self._coded, self._computed = model.coded, model.computed

    def _open_shards(self, index: Path) -> None:
        places = read_json_object(index).get("weight_map")
        if not isinstance(places, dict) or not places:
            raise ModelError(f"{index}: has no weight_map")
        for tensor, name in places.items():
            if not _is_plain_name(name):
                raise ModelError(
                    f"{index}: tensor {tensor!r}: {name!r} is not the name of a .safetensors file in its folder"
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
    """Whether this names a file in the index's own folder."""
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
