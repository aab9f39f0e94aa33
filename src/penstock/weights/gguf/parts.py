"""The files of a GGUF model: one, or several parts that ``llama-gguf-split`` made.

Parts are called ``NAME-00001-of-00003.gguf`` and so on, and a model is named by its first.  The first has the metadata;
the keys of "split" say which part of how many a file is, and how many tensors all parts have.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from penstock.errors import ModelError
from penstock.weights.files import MappedFile
from penstock.weights.gguf.header import GgufHeader, parse_gguf_header
from penstock.weights.safetensors_header import TensorInfo

_PART = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})(?P<suffix>\.gguf)", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class GgufPart:
    """One open file and its header."""

    file: MappedFile
    header: GgufHeader

    @property
    def path(self) -> Path:
        return self.file.path


def open_parts(path: Path) -> list[GgufPart]:
    """All files of the model whose only or first file this is.

    Raises ModelError if one is missing, damaged, or not the part that its name says.
    """
    parts = [_open(path)]
    try:
        for other in _others(path, parts[0].header.metadata):
            if not other.is_file():
                raise ModelError(f"{path}: its part {other.name!r} is missing; all parts must be in one folder")
            parts.append(_open(other))
        for index, part in enumerate(parts):
            _check_part(part, index, len(parts))
        _check_count(parts)
    except ModelError:
        close_parts(parts)
        raise
    return parts


def close_parts(parts: Sequence[GgufPart]) -> None:
    """Close the files; views that are still held stay valid."""
    for part in parts:
        part.file.close()


def joined_header(parts: Sequence[GgufPart]) -> GgufHeader:
    """The metadata of the first part with the tensors of all; their places are those in their own files.

    Raises ModelError if two parts have a tensor of the same name.
    """
    tensors: dict[str, TensorInfo] = {}
    for part in parts:
        for name, info in part.header.tensors.items():
            if name in tensors:
                raise ModelError(f"{part.path}: tensor {name!r} is in another part, too")
            tensors[name] = info
    return GgufHeader(parts[0].header.metadata, MappingProxyType(tensors))


def _open(path: Path) -> GgufPart:
    file = MappedFile(path)
    try:
        return GgufPart(file, parse_gguf_header(file.view(0, file.size), str(path)))
    except ModelError:
        file.close()
        raise


def _others(path: Path, metadata: Mapping[str, Any]) -> list[Path]:
    """The parts after the first one."""
    count = metadata.get("split.count", 0)
    match = _PART.fullmatch(path.name)
    if count in (0, 1) and (match is None or int(match["count"]) == 1):
        return []
    if match is None:
        raise ModelError(
            f"{path}: is one of {count} parts; the first must be called NAME-00001-of-{count:05}.gguf, and the others "
            "like it"
            if type(count) is int
            else f"{path}: split.count must be a number, got {count!r}"
        )
    total = int(match["count"])
    if int(match["number"]) != 1:
        first = path.with_name(f"{match['name']}-00001-of-{match['count']}{match['suffix']}")
        raise ModelError(f"{path}: is a part of a model; give the first one: {first}")
    if count != total:
        raise ModelError(f"{path}: is the first of {total} parts by its name, but its split.count is {count!r}")
    names = (f"{match['name']}-{number:05}-of-{match['count']}{match['suffix']}" for number in range(2, total + 1))
    return [path.with_name(name) for name in names]


def _check_part(part: GgufPart, index: int, count: int) -> None:
    if count == 1:
        return
    said = part.header.metadata.get("split.no"), part.header.metadata.get("split.count")
    if said != (index, count):
        raise ModelError(
            f"{part.path}: is part {index + 1} of {count} by its name, but its split.no is {said[0]!r} "
            f"(from 0 on) and its split.count {said[1]!r}"
        )


def _check_count(parts: Sequence[GgufPart]) -> None:
    """The parts have as many tensors as the first says."""
    wanted = parts[0].header.metadata.get("split.tensors.count")
    found = sum(len(part.header.tensors) for part in parts)
    if len(parts) > 1 and wanted not in (None, found):
        raise ModelError(f"{parts[0].path}: its parts have {found} tensors together, split.tensors.count is {wanted!r}")
