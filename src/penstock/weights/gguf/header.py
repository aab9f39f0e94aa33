"""The header of a GGUF file: metadata and a table of tensors.

Format (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian): magic, version,
counts; metadata as key, type, value; tensors as name, dimensions (the fastest first), type, offset; padding up to
``general.alignment``; tensors.  No length, count or offset is trusted before it is seen to fit the file.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.errors import ModelError
from penstock.weights.safetensors_header import LFS_POINTER, TensorInfo

SUFFIX = ".gguf"

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
        16: GgufType("IQ2_XXS", 256, 66),
        17: GgufType("IQ2_XS", 256, 74),
        18: GgufType("IQ3_XXS", 256, 98),
        19: GgufType("IQ1_S", 256, 50),
        20: GgufType("IQ4_NL", 32, 18),
        21: GgufType("IQ3_S", 256, 110),
        22: GgufType("IQ2_S", 256, 82),
        23: GgufType("IQ4_XS", 256, 136),
        24: GgufType("I8", 1, 1),
        25: GgufType("I16", 1, 2),
        26: GgufType("I32", 1, 4),
        27: GgufType("I64", 1, 8),
        28: GgufType("F64", 1, 8),
        29: GgufType("IQ1_M", 256, 56),
        30: GgufType("BF16", 1, 2),
        34: GgufType("TQ1_0", 256, 54),
        35: GgufType("TQ2_0", 256, 66),
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


def is_gguf(path: Path) -> bool:
    """Whether this is the path of a GGUF file."""
    return path.suffix.lower() == SUFFIX and not path.is_dir()
