"""Where the bytes of a tensor lie, and what fills a model's weights from there: a backend's ``WeightLoading``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from penstock.errors import KernelError
from penstock.kernels.compressed import CompressedMatrix

PIECE_BYTES = 256 << 10
"""Bytes of a checksum's piece, about; a piece is at least one panel of a matrix
(docs/format.md)."""

ProgressCallback = Callable[[int, int], None]
"""Called with (bytes done, bytes in all) every now and then; what it raises ends the load."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor in an open file.  A vector has one row."""

    name: str
    file: int  # descriptor
    offset: int
    rows: int
    columns: int
    dtype: str  # "bf16", "fp16" or "fp32"
    column: int = 0  # of the weight at which its first column is, if it has not all of them


class LoadFailed(KernelError):  # noqa: N818 - as its siblings in ``errors``
    """A tensor, or a weight made of several, could not be read or contradicts itself."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name!r}: {reason}")
        self.name = name
        self.reason = reason


class WeightLoading(Protocol):
    """All weights of one model: named first, then read by ``run`` in one pass."""

    def add_vector(self, name: str, tensor: StoredTensor, dtype: np.dtype[Any]) -> None:
        """A weight that ``Ops.vector`` makes."""
        ...

    def add_matrix(self, name: str, parts: list[StoredTensor], segments: tuple[int, ...] | None) -> None:
        """A weight that ``Ops.pack_linear`` makes, of plain matrices one below the other."""
        ...

    def add_compressed(
        self, name: str, parts: list[tuple[StoredTensor, CompressedMatrix]], segments: tuple[int, ...] | None
    ) -> bool:
        """A weight that ``Ops.pack_compressed`` makes, or a plain one; only sizes and code of each matrix are used.

        Matrices lie one below the other; where they have not all columns, those of the same rows follow one another.

        False, and nothing is done, where the matrices fit neither.
        """
        ...

    def run(self, threads: int, watch: ProgressCallback) -> dict[str, Any]:
        """Read everything; the weights by name.  No thread is left afterwards.

        Raises LoadFailed, and what ``watch`` raises.
        """
        ...

    def checksum(self, tensor: str, text: str) -> str:
        """32 hexadecimal digits: the checksum of a tensor that ``run`` has read (docs/format.md)."""
        ...
