"""The header of a safetensors file: parsed strictly, from bytes to a table of tensors.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian length, that many bytes of JSON, then the
tensors' bytes without gap or overlap.  Knows no file: the caller passes bytes and the file's size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from penstock.errors import ModelError
from penstock.weights.config_json import parse_json_object

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 32 << 20
"""The cap of the format's own reader."""

MAX_RANK = 16

DTYPE_BYTES = {
    "BOOL": 1,
    "U8": 1,
    "I8": 1,
    "F8_E4M3": 1,
    "F8_E5M2": 1,
    "F8_E8M0": 1,
    "U16": 2,
    "I16": 2,
    "F16": 2,
    "BF16": 2,
    "U32": 4,
    "I32": 4,
    "F32": 4,
    "U64": 8,
    "I64": 8,
    "F64": 8,
}
"""Bytes an element.  Types of less than a byte are not listed: nothing here could use them."""

LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of one file.  ``start`` and ``stop`` are byte offsets in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        return self.stop - self.start


AGAIN = "download or copy the file again"
"""What helps where a file is cut off or another one."""


def header_length(prefix: bytes, file_bytes: int, where: str) -> int:
    """Length of the JSON after the first eight bytes.  ``prefix``: the first bytes of the file."""
    if prefix.startswith(LFS_POINTER):
        raise ModelError(f"{where}: a Git LFS pointer, not the file itself; fetch it with 'git lfs pull'")
    if len(prefix) < LENGTH_BYTES:
        raise ModelError(f"{where}: truncated, {file_bytes} bytes are too few for a safetensors file; {AGAIN}")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise ModelError(f"{where}: not a safetensors file (its header would have {length} bytes); {AGAIN}")
    if LENGTH_BYTES + length > file_bytes:
        raise ModelError(f"{where}: truncated, a header of {length} bytes does not fit {file_bytes} bytes; {AGAIN}")
    return length


def parse_safetensors_header(raw: bytes, file_bytes: int, where: str) -> dict[str, TensorInfo]:
    """Tensors by name, in the order of their bytes.

    Raises ModelError, naming the tensor, unless every tensor's type, shape and offsets agree and all tensors
    together cover the rest of the file without gap or overlap.
    """
    if not raw.startswith(b"{"):
        raise ModelError(f"{where}: not a safetensors file (its header does not begin with '{{'); {AGAIN}")
    table = parse_json_object(raw, where)
    _check_metadata(table.pop("__metadata__", {}), where)
    base = LENGTH_BYTES + len(raw)
    infos = [_parse_tensor(name, entry, base, where) for name, entry in table.items()]
    infos.sort(key=lambda info: (info.start, info.stop))
    end = base
    for info in infos:
        if info.start != end:
            fault = "overlaps the tensor before it" if info.start < end else f"leaves a gap of {info.start - end} bytes"
            raise ModelError(f"{where}: tensor {info.name!r} {fault}")
        end = info.stop
    if end != file_bytes:
        state = "truncated" if end > file_bytes else "longer than its tensors"
        raise ModelError(f"{where}: {state}, the tensors end at byte {end} and the file at {file_bytes}; {AGAIN}")
    return {info.name: info for info in infos}


def parse_metadata(raw: bytes, where: str) -> dict[str, str]:
    """The text-to-text table of a header.  Raises ModelError if it is none."""
    metadata = parse_json_object(raw, where).get("__metadata__", {})
    _check_metadata(metadata, where)
    return dict(metadata)


def _check_metadata(metadata: Any, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ModelError(f"{where}: __metadata__ must map text to text")


def _parse_tensor(name: str, entry: Any, base: int, where: str) -> TensorInfo:
    def refuse(reason: str) -> ModelError:
        return ModelError(f"{where}: tensor {name!r}: {reason}")

    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise refuse("expected exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BYTES:
        raise refuse(f"unknown dtype {dtype!r}")
    if not _are_sizes(shape) or len(shape) > MAX_RANK:
        raise refuse(f"bad shape {shape!r}")
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse(f"bad data_offsets {offsets!r}")
    want = math.prod(shape) * DTYPE_BYTES[dtype]
    if offsets[1] - offsets[0] != want:
        raise refuse(f"{dtype} {shape} needs {want} bytes, its data_offsets give {offsets[1] - offsets[0]}")
    return TensorInfo(name, dtype, tuple(shape), base + offsets[0], base + offsets[1])


def _are_sizes(values: Any) -> bool:
    return isinstance(values, list) and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
