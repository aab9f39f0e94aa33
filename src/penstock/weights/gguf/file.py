"""The tensors of a GGUF model under the names of a Hugging Face checkpoint.

llama.cpp stores the rows of q and k of the architecture ``llama`` in another order, because its rotary embedding
rotates neighbors where Hugging Face's rotates halves: such tensors have ``interleaved_heads``, and readers of rows
restore the order.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.compressed import CompressedMatrix
from penstock.kernels.quantization import QuantizedMatrix, QuantRows
from penstock.weights.compression_format import OriginalTensor
from penstock.weights.files import FileRange, FileStamp
from penstock.weights.gguf.assembled import assembled_tensors
from penstock.weights.gguf.blocks import GGUF_QUANTS
from penstock.weights.gguf.header import GgufHeader
from penstock.weights.gguf.parts import GgufPart, close_parts, joined_header, open_parts
from penstock.weights.gguf.tensors import RECIPES, TENSOR_NAMES, GgufTensorNames, layer_of, renamed_tensors
from penstock.weights.quantization.base import QuantizedTensor
from penstock.weights.safetensors_header import TensorInfo
from penstock.weights.stored_slices import TensorSlice, slices_of

_ROUTER = re.compile(r"model\.layers\.\d+\.(mlp\.gate|mlp\.router|block_sparse_moe\.gate)\.weight")


class GgufFile:
    """The ``checkpoint_reader.TensorFile`` of one GGUF file."""

    is_compressed = False

    def __init__(self, part: GgufPart, tensors: dict[str, TensorInfo], heads: Mapping[str, int]) -> None:
        """``heads``: into how many heads the rows of projections fall that are interleaved in each."""
        self.path = part.path
        self.tensors = tensors
        self._file = part.file
        self._heads = heads

    @property
    def stamp(self) -> FileStamp:
        return self._file.stamp

    def interleaved_heads(self, info: TensorInfo) -> int | None:
        """Into how many heads the tensor's rows fall, in each of which halves are interleaved; None for plain rows."""
        return self._heads.get(info.name.rpartition(".")[0].rpartition(".")[2])

    def is_widened(self, info: TensorInfo) -> bool:
        """Whether converters write it as fp32 whatever it was: routers."""
        return info.dtype == "F32" and _ROUTER.fullmatch(info.name) is not None

    def file_range(self, info: TensorInfo) -> FileRange:
        """Where the tensor's bytes lie."""
        return self._file.file_range(info.start, info.stop)

    def stored(self, info: TensorInfo) -> memoryview:
        """The bytes in the file."""
        return self._file.view(info.start, info.stop)

    def raw(self, info: TensorInfo) -> memoryview:
        """The same, with rows in the order of a Hugging Face checkpoint."""
        heads = self.interleaved_heads(info)
        if heads is None:
            return self.stored(info)
        rows = np.frombuffer(self.stored(info), np.uint8).reshape(info.shape[0], -1)
        turned: NDArray[np.uint8] = rows[row_order(info.shape[0], heads)]
        return turned.reshape(-1).data.toreadonly()

    def quantized_tensor(self, info: TensorInfo) -> QuantizedTensor | None:
        """The matrix as it is stored, rows in the order of a Hugging Face checkpoint; None if it is not quantized."""
        kind = GGUF_QUANTS.get(info.dtype)
        if kind is None or len(info.shape) != 2:
            return None
        n, k = info.shape
        heads = self.interleaved_heads(info)
        order = None if heads is None else row_order(n, heads)
        raw_NB = np.frombuffer(self.stored(info), np.uint8).reshape(n, -1)

        def read(first: int, stop: int) -> QuantRows:
            return kind.rows(raw_NB[first:stop] if order is None else raw_NB[order[first:stop]])

        matrix = QuantizedMatrix(n, k, kind.format, read)
        return QuantizedTensor(info.shape, (info.name,), lambda _: matrix)

    def digest(self, info: TensorInfo) -> bytes:
        """BLAKE3 of the bytes in the file."""
        with self.stored(info) as raw:
            return blake3(raw).digest()

    def original(self, info: TensorInfo) -> OriginalTensor | None:
        """None: a GGUF file promises nothing."""
        return None

    def slices(self, info: TensorInfo) -> tuple[TensorSlice, ...]:
        """The tensor itself."""
        return slices_of(info.name, None, info.nbytes)

    def compressed_matrix(self, info: TensorInfo) -> CompressedMatrix | None:
        """None: nothing is compressed without loss."""
        return None

    def drop(self, info: TensorInfo) -> None:
        self._file.drop(info.start, info.stop)

    def close(self) -> None:
        """Views that are still held stay valid."""
        self._file.close()


class GgufModel:
    """All files of a model, and the tensors that are made of theirs (``gguf.assembled``)."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if a file is missing, cannot be read or is not a sound GGUF file."""
        parts = open_parts(path)
        try:
            header = joined_header(parts)
            architecture = header.metadata.get("general.architecture")
            names = TENSOR_NAMES.get(str(architecture), GgufTensorNames(layer={}))
            heads = _heads(header) if names.paired else {}
            self.files = [GgufFile(part, _renamed(part, header, names), heads) for part in parts]
            self._parts = {name: part for part in parts for name in part.header.tensors}
            self.infos = header.tensors
            made = assembled_tensors(self, str(architecture), names)
        except ModelError:
            close_parts(parts)
            raise
        self.coded, self.computed = made.coded, made.computed

    def error(self, name: str, reason: str) -> ModelError:
        """An error about a stored tensor, or one that is missing."""
        part = self._parts.get(name)
        return ModelError(f"{self.files[0].path if part is None else part.path}: tensor {name!r} {reason}")

    def rows(self, name: str) -> NDArray[np.uint8]:
        """The stored rows of a tensor, those of all matrices of a stack one below the other: [rows, bytes]."""
        info = self.infos[name]
        raw = self._parts[name].file.view(info.start, info.stop)
        columns = info.shape[-1]
        count = 1
        for extent in info.shape:
            count *= extent
        return np.frombuffer(raw, np.uint8).reshape(count // columns, -1)


def row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Which row of the file is row i of a Hugging Face checkpoint; [rows]."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _renamed(part: GgufPart, header: GgufHeader, names: GgufTensorNames) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    layers = _predicting_from(header)
    for info in part.header.tensors.values():
        layer = layer_of(info.name)
        if info.name in RECIPES or (layer is not None and layers is not None and layer >= layers):
            continue
        for own in renamed_tensors(info, names, str(part.path)):
            if own.name in tensors:
                raise ModelError(f"{part.path}: tensor {info.name!r}: there is another one that means {own.name!r}")
            tensors[own.name] = own
    return tensors


def _predicting_from(header: GgufHeader) -> int | None:
    """The first layer that predicts further tokens, which is not read; None if there is none."""
    prefix = header.metadata.get("general.architecture")
    layers, further = (header.metadata.get(f"{prefix}.{key}") for key in ("block_count", "nextn_predict_layers"))
    return layers - further if type(layers) is int and type(further) is int and further > 0 else None


def _heads(header: GgufHeader) -> dict[str, int]:
    heads = header.metadata.get("llama.attention.head_count")
    kv_heads = header.metadata.get("llama.attention.head_count_kv", heads)
    if type(heads) is not int or type(kv_heads) is not int:
        return {}  # the configuration says what is wrong
    return {"q_proj": heads, "k_proj": kv_heads}
