"""A GGUF file: its header, its quantized types, and its tensors under the names of a Hugging Face checkpoint.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian): magic, version,
counts; metadata as key, type, value; tensors as name, dimensions (the fastest first), type, offset; padding; tensors.
No length, count or offset is trusted before it is seen to fit the file.

llama.cpp stores the rows of q and k of the architecture ``llama`` in another order, because its rotary embedding
rotates neighbors where Hugging Face's rotates halves: such tensors have ``interleaved_heads``, and readers of rows
restore the order.  Blocks of quantized types become codes and scales (``kernels.quantization``), as in ggml-quants.c.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from blake3 import blake3
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.compressed import CompressedMatrix
from penstock.kernels.quantization import (
    E2M1,
    MinimumType,
    QuantFormat,
    QuantizedMatrix,
    QuantRows,
    ScaleType,
    integer_values,
)
from penstock.weights.compression_format import OriginalTensor
from penstock.weights.files import FileRange, FileStamp, MappedFile
from penstock.weights.quantization.base import QuantizedTensor
from penstock.weights.safetensors_header import LFS_POINTER, TensorInfo
from penstock.weights.stored_slices import TensorSlice, slices_of

Blocks = NDArray[np.uint8]
"""[rows, blocks, bytes of a block]"""

_NON_LINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class GgufQuant:
    """One quantized type: columns and bytes of a block, the format that it becomes, and the conversion."""

    columns: int
    nbytes: int
    format: QuantFormat
    unpack: Callable[[Blocks], QuantRows]

    def rows(self, raw: NDArray[np.uint8]) -> QuantRows:
        """``raw``: [rows, bytes of a row]."""
        return self.unpack(raw.reshape(len(raw), -1, self.nbytes))


def _halves(blocks: Blocks, at: int) -> NDArray[Any]:
    """An fp16 number of each block."""
    return np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)[:, :, 0]


def _nibbles(packed: Blocks) -> NDArray[np.uint8]:
    """Lower halves of all bytes, then upper ones: [rows, blocks, 2 * bytes]."""
    return np.concatenate([packed & 15, packed >> 4], axis=2)


def _flat(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return codes.reshape(len(codes), -1)


def _q8_0(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(blocks[:, :, 2:] ^ np.uint8(128)), _halves(blocks, 0))


def _q4_0(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 2:])), _halves(blocks, 0))


def _q4_1(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 4:])), _halves(blocks, 0), _halves(blocks, 2))


def _fifth_bits(blocks: Blocks, at: int) -> NDArray[np.uint8]:
    bits: NDArray[np.uint8] = np.unpackbits(blocks[:, :, at : at + 4], axis=2, bitorder="little")
    return bits << np.uint8(4)


def _q5_0(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 6:]) | _fifth_bits(blocks, 2)), _halves(blocks, 0))


def _q5_1(blocks: Blocks) -> QuantRows:
    codes = _nibbles(blocks[:, :, 8:]) | _fifth_bits(blocks, 4)
    return QuantRows(_flat(codes), _halves(blocks, 0), _halves(blocks, 2))


def _mxfp4(blocks: Blocks) -> QuantRows:
    return QuantRows(_flat(_nibbles(blocks[:, :, 1:])), blocks[:, :, 0])


def _six_bits(packed: Blocks) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Eight scales and eight minimums of six bits each out of twelve bytes; [rows, 8 * blocks]."""
    first, second, third = packed[:, :, :4], packed[:, :, 4:8], packed[:, :, 8:]
    scales = np.concatenate([first & 63, third & 15 | first >> 6 << 4], axis=2)
    minimums = np.concatenate([second & 63, third >> 4 | second >> 6 << 4], axis=2)
    return _flat(scales), _flat(minimums)


def _pairs(packed: Blocks) -> NDArray[np.uint8]:
    """The lower halves of every 32 bytes, then the upper ones: [rows, blocks, 8, 32]."""
    rows, blocks, _ = packed.shape
    quads = packed.reshape(rows, blocks, 4, 32)
    return np.stack([quads & 15, quads >> 4], axis=3).reshape(rows, blocks, 8, 32)


def _q4_k(blocks: Blocks) -> QuantRows:
    scales, minimums = _six_bits(blocks[:, :, 4:16])
    return QuantRows(_flat(_pairs(blocks[:, :, 16:])), scales, minimums, _halves(blocks, 0), _halves(blocks, 2))


def _q5_k(blocks: Blocks) -> QuantRows:
    scales, minimums = _six_bits(blocks[:, :, 4:16])
    places = np.arange(8, dtype=np.uint8)[:, None]
    fifth = (blocks[:, :, None, 16:48] >> places & np.uint8(1)) << np.uint8(4)
    return QuantRows(_flat(_pairs(blocks[:, :, 48:]) | fifth), scales, minimums, _halves(blocks, 0), _halves(blocks, 2))


def _q6_k(blocks: Blocks) -> QuantRows:
    rows, count, _ = blocks.shape
    low = blocks[:, :, :128].reshape(rows, count, 2, 1, 2, 32)  # half, nibble, 32 or 32 more, column
    nibbles = np.concatenate([low & 15, low >> 4], axis=3).reshape(rows, count, 2, 4, 32)
    places = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = blocks[:, :, 128:192].reshape(rows, count, 2, 1, 32) >> places & 3
    scales = _flat(blocks[:, :, 192:208]).view(np.int8)
    return QuantRows(_flat(nibbles | high << 4), scales, None, _halves(blocks, 208))


_SUPER = (ScaleType.U8_OF_F16, MinimumType.U8_OF_F16)

GGUF_QUANTS: Mapping[str, GgufQuant] = MappingProxyType(
    {
        "Q4_0": GgufQuant(32, 18, QuantFormat(4, integer_values(4, 8), 32, ScaleType.F16), _q4_0),
        "Q4_1": GgufQuant(32, 20, QuantFormat(4, integer_values(4, 0), 32, ScaleType.F16, MinimumType.F16), _q4_1),
        "Q5_0": GgufQuant(32, 22, QuantFormat(5, integer_values(5, 16), 32, ScaleType.F16), _q5_0),
        "Q5_1": GgufQuant(32, 24, QuantFormat(5, integer_values(5, 0), 32, ScaleType.F16, MinimumType.F16), _q5_1),
        "Q8_0": GgufQuant(32, 34, QuantFormat(8, integer_values(8, 128), 32, ScaleType.F16), _q8_0),
        "IQ4_NL": GgufQuant(32, 18, QuantFormat(4, tuple(map(float, _NON_LINEAR)), 32, ScaleType.F16), _q4_0),
        "MXFP4": GgufQuant(32, 17, QuantFormat(4, E2M1, 32, ScaleType.E8M0), _mxfp4),
        "Q4_K": GgufQuant(256, 144, QuantFormat(4, integer_values(4, 0), 32, *_SUPER), _q4_k),
        "Q5_K": GgufQuant(256, 176, QuantFormat(5, integer_values(5, 0), 32, *_SUPER), _q5_k),
        "Q6_K": GgufQuant(256, 210, QuantFormat(6, integer_values(6, 32), 16, ScaleType.I8_OF_F16), _q6_k),
    }
)
"""Types that can be served, by name."""


MAGIC = b"GGUF"
VERSIONS = (2, 3)
DEFAULT_ALIGNMENT = 32
MAX_ALIGNMENT = 1 << 20
MAX_KEYS = 1 << 13
MAX_TENSORS = 1 << 20
MAX_NAME_BYTES = 1 << 16
MAX_TEXT_BYTES = 64 << 20
MAX_ELEMENTS = 1 << 22
"""Of all arrays of the metadata together, which become Python's objects of 60 bytes and more; the largest known
vocabularies have some 2^18 tokens, each with a score and a type, and 2^19 merges."""

MAX_TEXTS_BYTES = 256 << 20
"""Of all texts of the metadata together."""

MAX_RANK = 4

Value = int | float | bool | str | list[Any]
"""Of one key of the metadata."""


@dataclass(frozen=True, slots=True)
class GgufType:
    """A type of tensors: ``columns`` columns of a row are one block of ``nbytes`` bytes."""

    name: str
    columns: int
    nbytes: int


TYPES: Mapping[int, GgufType] = MappingProxyType(
    {
        0: GgufType("F32", 1, 4),
        1: GgufType("F16", 1, 2),
        2: GgufType("Q4_0", 32, 18),
        3: GgufType("Q4_1", 32, 20),
        6: GgufType("Q5_0", 32, 22),
        7: GgufType("Q5_1", 32, 24),
        8: GgufType("Q8_0", 32, 34),
        10: GgufType("Q2_K", 256, 84),
        11: GgufType("Q3_K", 256, 110),
        12: GgufType("Q4_K", 256, 144),
        13: GgufType("Q5_K", 256, 176),
        14: GgufType("Q6_K", 256, 210),
        15: GgufType("Q8_K", 256, 292),
        20: GgufType("IQ4_NL", 32, 18),
        23: GgufType("IQ4_XS", 256, 136),
        24: GgufType("I8", 1, 1),
        25: GgufType("I16", 1, 2),
        26: GgufType("I32", 1, 4),
        27: GgufType("I64", 1, 8),
        28: GgufType("F64", 1, 8),
        30: GgufType("BF16", 1, 2),
        39: GgufType("MXFP4", 32, 17),
    }
)
"""By number (ggml.h, ``ggml_type``), those whose sizes are known here; not all of them can be served."""

_SCALARS: Mapping[int, struct.Struct] = MappingProxyType(
    {
        0: struct.Struct("<B"),
        1: struct.Struct("<b"),
        2: struct.Struct("<H"),
        3: struct.Struct("<h"),
        4: struct.Struct("<I"),
        5: struct.Struct("<i"),
        6: struct.Struct("<f"),
        7: struct.Struct("<B"),
        10: struct.Struct("<Q"),
        11: struct.Struct("<q"),
        12: struct.Struct("<d"),
    }
)
_BOOL, _TEXT, _ARRAY = 7, 8, 9


@dataclass(frozen=True, slots=True)
class GgufHeader:
    """What a GGUF file says of itself; tensors in the order of the file, by the file's own names."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, TensorInfo]


def parse_gguf_header(raw: memoryview, where: str) -> GgufHeader:
    """The header of the file whose bytes are ``raw``.

    Raises ModelError, beginning with ``where``, for anything that contradicts the format or itself.
    """
    reader = _Reader(raw, where)
    _check_version(reader)
    tensor_count = reader.count("tensors", MAX_TENSORS, least_bytes=24)
    key_count = reader.count("metadata keys", MAX_KEYS, least_bytes=13)
    metadata: dict[str, Value] = {}
    for _ in range(key_count):
        key = reader.text("a key of the metadata", MAX_NAME_BYTES)
        if key in metadata:
            raise reader.refuse(f"the metadata key {key!r} stands twice")
        metadata[key] = reader.value(key)
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 1 <= alignment <= MAX_ALIGNMENT or alignment & (alignment - 1):
        raise reader.refuse(f"general.alignment must be a power of 2 up to {MAX_ALIGNMENT}, got {alignment!r}")
    infos = [_tensor(reader) for _ in range(tensor_count)]
    base = -(-reader.at // alignment) * alignment
    return GgufHeader(MappingProxyType(metadata), MappingProxyType(_placed(reader, infos, base, alignment)))


def _check_version(reader: _Reader) -> None:
    start = bytes(reader.raw[:64])
    if start.startswith(LFS_POINTER):
        raise reader.refuse("a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
    if not start.startswith(MAGIC):
        raise reader.refuse("not a GGUF file (it does not begin with 'GGUF')")
    reader.at = len(MAGIC)
    version = reader.scalar(_SCALARS[4], "the version")
    if version in VERSIONS:
        return
    if version.to_bytes(4, "little")[::-1] in (v.to_bytes(4, "little") for v in VERSIONS):
        raise reader.refuse("big-endian; only little-endian GGUF files can be read")
    raise reader.refuse(f"GGUF version {version} is not known; versions 2 and 3 are")


def _tensor(reader: _Reader) -> TensorInfo:
    """One entry of the table; ``start`` is still an offset into the tensors' bytes."""
    name = reader.text("a tensor's name", MAX_NAME_BYTES)

    def refuse(reason: str) -> ModelError:
        return reader.refuse(f"tensor {name!r}: {reason}")

    rank = reader.scalar(_SCALARS[4], f"tensor {name!r}")
    if not 1 <= rank <= MAX_RANK:
        raise refuse(f"has {rank} dimensions; 1 to {MAX_RANK} can be")
    extents = [reader.scalar(_SCALARS[10], f"tensor {name!r}") for _ in range(rank)]
    number = reader.scalar(_SCALARS[4], f"tensor {name!r}")
    offset = reader.scalar(_SCALARS[10], f"tensor {name!r}")
    kind = TYPES.get(number)
    if kind is None:
        raise refuse(f"its type, number {number}, is not known")
    if not all(extents) or math.prod(extents) >= 1 << 63:
        raise refuse(f"bad dimensions {extents}")
    if extents[0] % kind.columns:
        raise refuse(f"{kind.name} comes in blocks of {kind.columns} columns, which {extents[0]} is no multiple of")
    nbytes = math.prod(extents) // kind.columns * kind.nbytes
    return TensorInfo(name, kind.name, tuple(reversed(extents)), offset, offset + nbytes)


def _placed(reader: _Reader, infos: list[TensorInfo], base: int, alignment: int) -> dict[str, TensorInfo]:
    """By name, with offsets in the file.  Raises ModelError for tensors that overlap or end outside it."""
    end = 0
    placed: dict[str, TensorInfo] = {}
    for info in sorted(infos, key=lambda info: info.start):
        if info.name in placed:
            raise reader.refuse(f"tensor {info.name!r} stands twice")
        if info.start % alignment:
            raise reader.refuse(f"tensor {info.name!r} begins at {info.start}, no multiple of {alignment}")
        if info.start < end:
            raise reader.refuse(f"tensor {info.name!r} overlaps the tensor before it")
        end = info.stop
        if base + end > len(reader.raw):
            raise reader.refuse(
                f"truncated, tensor {info.name!r} ends at byte {base + end} and the file at {len(reader.raw)}"
            )
        placed[info.name] = TensorInfo(info.name, info.dtype, info.shape, base + info.start, base + info.stop)
    return placed


class _Reader:
    """A place in the file; every step is checked against its end."""

    def __init__(self, raw: memoryview, where: str) -> None:
        self.raw = raw
        self.where = where
        self.at = 0
        self._elements = 0  # of arrays so far
        self._text_bytes = 0

    def refuse(self, reason: str) -> ModelError:
        return ModelError(f"{self.where}: {reason}")

    def advance(self, nbytes: int, what: str) -> int:
        """Skip ``nbytes`` bytes; returns where they begin."""
        begin = self.at
        if nbytes > len(self.raw) - begin:
            raise self.refuse(f"truncated, {what} would end behind the file's {len(self.raw)} bytes")
        self.at = begin + nbytes
        return begin

    def scalar(self, form: struct.Struct, what: str) -> Any:
        (value,) = form.unpack_from(self.raw, self.advance(form.size, what))
        return value

    def count(self, what: str, most: int, *, least_bytes: int) -> int:
        """A number of things that have at least ``least_bytes`` bytes each."""
        found: int = self.scalar(_SCALARS[10], f"the number of {what}")
        if found > most or found * least_bytes > len(self.raw) - self.at:
            raise self.refuse(f"damaged, it says that it has {found} {what}")
        return found

    def text(self, what: str, most: int) -> str:
        length: int = self.scalar(_SCALARS[10], what)
        if length > most:
            raise self.refuse(f"damaged, {what} would have {length} bytes")
        self._text_bytes += length
        if self._text_bytes > MAX_TEXTS_BYTES:
            raise self.refuse(f"its texts have more than {MAX_TEXTS_BYTES >> 20} MiB together")
        begin = self.advance(length, what)
        try:
            return str(self.raw[begin : begin + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self.refuse(f"{what} is not UTF-8") from error

    def value(self, key: str) -> Value:
        what = f"the metadata key {key!r}"
        kind = self.scalar(_SCALARS[4], what)
        if kind == _TEXT:
            return self.text(what, MAX_TEXT_BYTES)
        if kind == _ARRAY:
            return self._array(what)
        form = _SCALARS.get(kind)
        if form is None:
            raise self.refuse(f"{what} has a type that is not known, number {kind}")
        value = self.scalar(form, what)
        if kind != _BOOL:
            found: int | float = value
            return found
        if value > 1:
            raise self.refuse(f"{what} must be true or false, got {value}")
        return bool(value)

    def _length(self, what: str, *, least_bytes: int) -> int:
        """The length of an array.  Checked in sum before anything of it is read."""
        length = self.count(f"elements of {what}", MAX_ELEMENTS, least_bytes=least_bytes)
        self._elements += length
        if self._elements > MAX_ELEMENTS:
            raise self.refuse(f"its arrays have more than {MAX_ELEMENTS} elements together")
        return length

    def _array(self, what: str) -> list[Any]:
        kind = self.scalar(_SCALARS[4], what)
        if kind == _TEXT:
            length = self._length(what, least_bytes=8)
            return [self.text(what, MAX_TEXT_BYTES) for _ in range(length)]
        form = _SCALARS.get(kind)
        if form is None:
            raise self.refuse(f"{what} is an array of a type that is not known, number {kind}")
        length = self._length(what, least_bytes=form.size)
        begin = self.advance(length * form.size, what)
        values = struct.unpack_from(f"<{length}{form.format[1:]}", self.raw, begin)
        return [bool(value) for value in values] if kind == _BOOL else list(values)


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
    """Whether this is the path of a GGUF file."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()


def hugging_face_name(name: str) -> str:
    """The tensor's name in a Hugging Face checkpoint; a name that is not known stays, and is refused by the layout."""
    match = _LAYER_NAME.fullmatch(name)
    if match is not None and match[2] in _LAYER:
        return f"model.layers.{match[1]}.{_LAYER[match[2]]}.{match[3]}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[stem]}.{kind}" if stem in _OUTSIDE else name


def read_gguf_header(path: Path) -> GgufHeader:
    """Metadata and tensors by their own names.  Raises ModelError."""
    file = MappedFile(path)
    try:
        return parse_gguf_header(file.view(0, file.size), str(path))
    finally:
        file.close()


class GgufFile:
    """The ``checkpoint_reader.TensorFile`` of one GGUF file."""

    is_compressed = False

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be read or is not a sound GGUF file."""
        self.path = path
        self._file = MappedFile(path)
        try:
            header = parse_gguf_header(self._file.view(0, self._file.size), str(path))
            self.tensors = _renamed(header, str(path))
            self._heads = _turned(header)
        except ModelError:
            self.close()
            raise

    @property
    def stamp(self) -> FileStamp:
        return self._file.stamp

    def interleaved_heads(self, info: TensorInfo) -> int | None:
        """Into how many heads the tensor's rows fall, in each of which halves are interleaved; None for plain rows."""
        return self._heads.get(info.name.rpartition(".")[0].rpartition(".")[2])

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
