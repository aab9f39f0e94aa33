"""Tensors of a GGUF file under the names of a Hugging Face checkpoint.

llama.cpp keeps the rows of q and k of the architecture ``llama`` in another order, for its rotary embedding turns
neighbours where Hugging Face's turns halves: such tensors say so (``turned_heads``), and whoever reads rows undoes it.
Knows bytes and names, not what a model computes.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.compressed import CompressedMatrix
from penstock.kernels.quantised import QuantizedMatrix, QuantRows
from penstock.weights.compressed import Original
from penstock.weights.formats.coded import Coded
from penstock.weights.gguf import GgufHeader, parse_header
from penstock.weights.gguf_quants import GGUF_QUANTS
from penstock.weights.header import TensorInfo
from penstock.weights.mapped import MappedFile, Place, Stamp

SUFFIX = ".gguf"
ROPE_FACTORS = "rope_freqs.weight"
"""Divisors of the rotary frequencies; a recipe in a config.json, so no tensor of a checkpoint."""

_OUTSIDE: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_LAYER: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.(\w+)\.(weight|bias)")


def is_gguf(path: Path) -> bool:
    """Is this the name of a GGUF file, and no folder?"""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def hugging_face_name(name: str) -> str:
    """The tensor's name in a Hugging Face checkpoint; a name that is not known stays, and is refused by the layout."""
    match = _LAYER_NAME.fullmatch(name)
    if match is not None and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[stem]}.{kind}" if stem in _OUTSIDE else name


def read_header(path: Path) -> GgufHeader:
    """Metadata and tensors by their own names.  Raises ModelError."""
    file = MappedFile(path)
    try:
        return parse_header(file.view(0, file.size), str(path))
    finally:
        file.close()


class GgufFile:
    """``reader.TensorFile`` for one GGUF file."""

    is_compressed = False

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be read or is not a sound GGUF file."""
        self.path = path
        self._file = MappedFile(path)
        try:
            header = parse_header(self._file.view(0, self._file.size), str(path))
            self.tensors = _renamed(header, str(path))
            self._heads = _turned(header)
        except ModelError:
            self.close()
            raise

    @property
    def stamp(self) -> Stamp:
        """See ``mapped.MappedFile.stamp``."""
        return self._file.stamp

    def turned_heads(self, info: TensorInfo) -> int | None:
        """Into how many heads the tensor's rows fall, in each of which halves are interleaved; None for plain rows."""
        return self._heads.get(info.name.rpartition(".")[0].rpartition(".")[2])

    def place(self, info: TensorInfo) -> Place:
        """Where the tensor's bytes lie."""
        return self._file.place(info.start, info.stop)

    def stored(self, info: TensorInfo) -> memoryview:
        """The bytes in the file."""
        return self._file.view(info.start, info.stop)

    def raw(self, info: TensorInfo) -> memoryview:
        """The same, with rows in the order of a Hugging Face checkpoint."""
        heads = self.turned_heads(info)
        if heads is None:
            return self.stored(info)
        rows = np.frombuffer(self.stored(info), np.uint8).reshape(info.shape[0], -1)
        turned: NDArray[np.uint8] = rows[row_order(info.shape[0], heads)]
        return turned.reshape(-1).data.toreadonly()

    def coded(self, info: TensorInfo) -> Coded | None:
        """The matrix as it is stored, rows in the order of a Hugging Face checkpoint; None if it is not quantised."""
        kind = GGUF_QUANTS.get(info.dtype)
        if kind is None or len(info.shape) != 2:
            return None
        n, k = info.shape
        heads = self.turned_heads(info)
        order = None if heads is None else row_order(n, heads)
        raw_NB = np.frombuffer(self.stored(info), np.uint8).reshape(n, -1)

        def read(first: int, stop: int) -> QuantRows:
            return kind.rows(raw_NB[first:stop] if order is None else raw_NB[order[first:stop]])

        matrix = QuantizedMatrix(n, k, kind.format, read)
        return Coded(info.shape, (info.name,), lambda _: matrix)

    def digest(self, info: TensorInfo) -> bytes:
        """BLAKE3 of the bytes in the file."""
        with self.stored(info) as raw:
            return blake3(raw).digest()

    def original(self, info: TensorInfo) -> Original | None:
        """None: a GGUF file promises nothing."""
        return None

    def matrix(self, info: TensorInfo) -> CompressedMatrix | None:
        """None: nothing is compressed without loss."""
        return None

    def drop(self, info: TensorInfo) -> None:
        """See ``mapped.MappedFile.drop``."""
        self._file.drop(info.start, info.stop)

    def close(self) -> None:
        """Views that are still held stay valid."""
        self._file.close()


def row_order(rows: int, heads: int) -> NDArray[np.int64]:
    """Which row of the file is row i of a Hugging Face checkpoint; [rows]."""
    return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)


def _renamed(header: GgufHeader, where: str) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for info in header.tensors.values():
        if info.name == ROPE_FACTORS:
            continue
        name = hugging_face_name(info.name)
        if name in tensors:
            raise ModelError(f"{where}: tensor {info.name!r}: there is another one that means {name!r}")
        tensors[name] = replace(info, name=name)
    return tensors


def _turned(header: GgufHeader) -> dict[str, int]:
    if header.metadata.get("general.architecture") != "llama":
        return {}
    heads = header.metadata.get("llama.attention.head_count")
    kv_heads = header.metadata.get("llama.attention.head_count_kv", heads)
    if type(heads) is not int or type(kv_heads) is not int:
        return {}  # the configuration says what is wrong
    return {"q_proj": heads, "k_proj": kv_heads}
