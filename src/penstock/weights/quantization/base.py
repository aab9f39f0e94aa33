"""What every quantization format shares: the stored tensors of a module, the tensor made of them, and module patterns.

Bytes are read in place; contradictions are a ModelError with file, tensor and reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import translate
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Protocol

import ml_dtypes
import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.kernels.quantization import QuantizedMatrix, ScaleType
from penstock.weights.safetensors_header import TensorInfo

NUMBERS: Mapping[str, np.dtype[Any]] = MappingProxyType(
    {
        "BF16": np.dtype(ml_dtypes.bfloat16),
        "F16": np.dtype(np.float16),
        "F32": np.dtype(np.float32),
        "F8_E4M3": np.dtype(np.uint8),
        "F8_E5M2": np.dtype(np.uint8),
        "F8_E8M0": np.dtype(np.uint8),
        "U8": np.dtype(np.uint8),
        "I8": np.dtype(np.uint8),
        "I32": np.dtype(np.uint32),
        "I64": np.dtype(np.int64),
    }
)
"""Types of stored tensors as NumPy sees them: floats of 8 bits, and codes, as the bits that they are."""

SCALES: Mapping[str, ScaleType] = MappingProxyType(
    {"F16": ScaleType.F16, "BF16": ScaleType.BF16, "F32": ScaleType.F32, "F8_E8M0": ScaleType.E8M0}
)
"""Types that scales may have."""


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A tensor of a model that is stored as codes: a matrix, or a stack of them."""

    shape: tuple[int, ...]  # as the model has it
    sources: tuple[str, ...]  # stored tensors that make it
    matrix: Callable[[int], QuantizedMatrix]  # by its number in the stack (0 for a matrix); raises ModelError
    transposed: bool = False  # rows of the matrix are columns of the tensor


class StoredTensors(Protocol):
    """All tensors of a checkpoint as they lie in its files."""

    @property
    def names(self) -> list[str]: ...
    def info(self, name: str) -> TensorInfo: ...
    def raw(self, name: str) -> memoryview: ...
    def path_of(self, name: str) -> Path: ...


class QuantizationScheme(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """How some modules' matrices are stored.  All fields are part of the model's fingerprint."""

    end: ClassVar[str]  # of the name of the tensor that has the codes
    types: ClassVar[frozenset[str]]  # that this tensor may have

    def bits_per_weight(self) -> float:
        """Bits per weight in the file, scales included."""
        raise NotImplementedError

    def find_tensor(self, module: StoredModule) -> tuple[str, QuantizedTensor]:
        """The tensor's name in the model, and its quantized form.  No bytes are read; raises ModelError."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class StoredModule:
    """The stored tensors whose names are ``name`` and an end."""

    stored: StoredTensors
    known: frozenset[str]  # names of all stored tensors
    name: str

    def has(self, end: str) -> bool:
        """Whether the module has such a tensor."""
        return self.name + end in self.known

    def sources(self, *ends: str) -> tuple[str, ...]:
        """Names of those of these tensors that exist."""
        return tuple(self.name + end for end in ends if self.has(end))

    def info(self, end: str, *types: str) -> TensorInfo:
        """The tensor's head.  Raises ModelError if it is missing or of another type than these."""
        if not self.has(end):
            own = next(name for name in (self.name + e for e in ENDS) if name in self.known)
            raise ModelError(f"{self.stored.path_of(own)}: tensor {own!r}: has no {self.name + end!r} with it")
        info = self.stored.info(self.name + end)
        if info.dtype not in types:
            raise self.error(end, f"has type {info.dtype}, it must be one of {', '.join(types)}")
        return info

    def array(self, end: str) -> NDArray[Any]:
        """Its numbers, see ``NUMBERS``: a read-only view."""
        info = self.stored.info(self.name + end)
        return np.frombuffer(self.stored.raw(info.name), NUMBERS[info.dtype]).reshape(info.shape)

    def scale(self, end: str) -> ScaleType:
        """How the scales in this tensor are written.  Raises ModelError."""
        return SCALES[self.info(end, *SCALES).dtype]

    def error(self, end: str, reason: str) -> ModelError:
        """A ModelError that names the tensor."""
        name = self.name + end
        return ModelError(f"{self.stored.path_of(name)}: tensor {name!r}: {reason}")

    def check_shape(self, end: str, wanted: tuple[int, ...], why: str) -> None:
        """Raises ModelError unless the tensor has this shape."""
        shape = self.stored.info(self.name + end).shape
        if shape != wanted:
            raise self.error(end, f"has shape {list(shape)}, {why} it must have {list(wanted)}")


ENDS = (".weight", ".weight_packed", ".qweight", "_blocks")
"""Of names of tensors with codes, in any format."""


def unpack_nibbles(packed_NB: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, 2 B]: of each byte the lower half, then the upper one."""
    rows, size = packed_NB.shape
    codes = np.empty((rows, size, 2), np.uint8)
    np.bitwise_and(packed_NB, 15, out=codes[:, :, 0])
    np.right_shift(packed_NB, 4, out=codes[:, :, 1])
    return codes.reshape(rows, 2 * size)


def unpack_words(words_NW: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """Codes of 4 or 8 bits out of 32-bit words, the lowest first: [N, 32 / bits W]."""
    raw = np.ascontiguousarray(words_NW).view(np.uint8)
    return raw if bits == 8 else unpack_nibbles(raw)


def group_columns(group: int | None, k: int) -> int:
    """Columns of a group; all of them where none is said."""
    return k if group is None or group > k else group


def column_order(module: StoredModule, end: str, k: int, group: int) -> NDArray[np.int32] | None:
    """Which columns stand in which place once groups lie side by side; None where they do already.

    The tensor says of every column in which group it is.  Raises ModelError unless all groups are full but the last.
    """
    if not module.has(end):
        return None
    module.info(end, "I32")
    module.check_shape(end, (k,), "for as many columns")
    groups_K = module.array(end).astype(np.int64)
    usual_K = np.arange(k) // group
    if np.array_equal(groups_K, usual_K):
        return None
    order = np.argsort(groups_K, kind="stable")
    if not np.array_equal(groups_K[order], usual_K):
        raise module.error(end, f"does not put {group} columns into each of {-(-k // group)} groups")
    return order.astype(np.int32)


MAX_PATTERNS = 100_000
MAX_PATTERN = 256
"""Modules that a configuration may name in one list, and characters of one."""

REGEX = "re:"
EVERY_LINEAR = "Linear"
"""The class of all matrices that are multiplied, in the words of torch."""


def module_pattern(names: Iterable[str], where: str) -> re.Pattern[str] | None:
    """One pattern of the tensors (or modules) that a list names; None for an empty list.

    An entry is a regular expression behind ``re:``, else a module's name, whole or its last parts, in which ``*``
    stands for anything.  Raises ModelError for a list that is too long, or an entry that is no pattern.
    """
    forms = list(names)
    if len(forms) > MAX_PATTERNS or any(len(form) > MAX_PATTERN for form in forms):
        raise ModelError(f"{where}: more than {MAX_PATTERNS} modules are named, or one has too long a name")
    wanted = []
    for form in forms:
        if form.startswith(REGEX):
            wanted.append(form.removeprefix(REGEX))
        else:
            glob = translate(form).removesuffix("\\Z").removesuffix("\\z")
            wanted.append(rf"(?:.*\.)?{glob}(?:\..*)?\Z")
    try:
        return re.compile("|".join(f"(?:{each})" for each in wanted)) if wanted else None
    except re.error as error:
        raise ModelError(f"{where}: names of modules: {error}") from error
