# ruff: noqa: N815  (field names carry shapes)
"""Low-rank adapters (LoRA, arXiv:2106.09685) as operations are given them: a table of slots, each of which holds what
one adapter adds to every product.

Knows no files and no requests.  ``ops`` says what the letters in the names mean; r is an adapter's rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.operands import Array, PackedLinear, StepBatch

NO_ADAPTER = -1
"""The slot of a sequence that has none."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """columns [first, first + n) of a product += scale * up (down x).  Matrices as in ``Ops.pack_linear``."""

    down_RK: Array
    up_NR: Array
    first: int
    scale: float


@dataclass(frozen=True, slots=True)
class PackedLowRank:
    """The same in the backend's layout; the segments of ``down`` are those of the product."""

    down: PackedLinear
    up: PackedLinear
    first: int
    scale: float


@dataclass(frozen=True, slots=True)
class PackedAdapter:
    """What one adapter adds, by the number of the product; parts of a product have columns of their own, ascending."""

    parts: Mapping[int, tuple[PackedLowRank, ...]]
    nbytes: int


class AdapterTable(Protocol):
    """Adapters in memory.  Made for the products ``sites`` of a model; ``put`` and ``clear`` between two steps."""

    data: Array
    """For the backend."""

    def pack(self, parts: Mapping[int, Sequence[LowRank]]) -> PackedAdapter:
        """Lay out an adapter in memory of its own, on any thread.  Raises ValueError for shapes that do not fit."""
        ...

    def put(self, slot: int, adapter: PackedAdapter) -> None:
        """This slot is that adapter, and no other any more."""
        ...

    def clear(self, slot: int) -> None:
        """This slot adds nothing; what it held is given back."""
        ...


def checked_parts(site: PackedLinear, parts: Sequence[LowRank]) -> list[LowRank]:
    """The parts of a product in order of their columns.  Raises ValueError for shapes that do not fit."""
    ordered = sorted(parts, key=lambda part: part.first)
    end = 0
    for part in ordered:
        (rank, k), (n, inner) = part.down_RK.shape, part.up_NR.shape
        if k != site.k or inner != rank or rank < 1 or part.first < end or part.first + n > site.n:
            raise ValueError(
                f"an adapter of shapes [{rank}, {k}] and [{n}, {inner}] at column {part.first} does not fit"
            )
        end = part.first + n
    return ordered


def row_slots(batch: StepBatch, *, wanted: bool) -> NDArray[np.int32]:
    """The slot of every token, or of every wanted row."""
    if batch.adapters_S is None:
        slots_T = np.full(len(batch.tokens_T), NO_ADAPTER, np.int32)
    else:
        slots_T = np.repeat(batch.adapters_S, np.diff(batch.starts_S1)).astype(np.int32)
    return slots_T[batch.sample_rows_R] if wanted else slots_T
