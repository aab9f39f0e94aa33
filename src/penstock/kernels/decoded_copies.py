"""Which compressed matrices get a decoded copy, and which products read it: decided from measurements.  Pure.

A product of few rows waits for memory, and compressed weights are fewer bytes; one of many rows waits for arithmetic,
and decoding is more of it.  From which number of rows on plain weights are faster depends on the processor, the threads
and the matrix.  Both give the same bits, so what is decided here changes the speed and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum

MEASURED_ROWS = (8, 16, 32, 64, 128, 256)
"""Rows of the products that are measured."""

MEASURING_S = 0.25
"""Time for measuring all shapes; what is not measured by then has no copies."""

MIN_GAIN = 1.05
"""How many times as fast plain weights must be for a copy to be worth its memory."""


class RowsOfStep(IntEnum):
    """Which rows of a step a matrix is multiplied with; those with more of them get their copies first."""

    ALL = 0
    ROUTED = 1  # an expert: tokens that chose it
    DRAWN = 2  # the head: rows that draw a token


@dataclass(frozen=True, slots=True)
class ProductTimes:
    """Seconds of one product from compressed weights, and from plain ones."""

    compressed: float
    plain: float


@dataclass(frozen=True, slots=True)
class ShapeTimes:
    """What was measured of matrices of one shape of K, on slices of them."""

    slice_bytes: int  # of a slice that is decoded
    by_rows: Mapping[int, ProductTimes]

    @property
    def decoded_from(self) -> int | None:
        """The least measured number of rows from which on plain weights are faster by MIN_GAIN; None: there is none."""
        found = None
        for rows in sorted(self.by_rows, reverse=True):
            times = self.by_rows[rows]
            if times.compressed < MIN_GAIN * times.plain:
                break
            found = rows
        return found

    @property
    def saved_s_a_byte(self) -> float:
        """Seconds that a byte of a copy saves a product, on average over the measured numbers of rows that read it."""
        first = self.decoded_from
        if first is None:
            return 0.0
        saved = [times.compressed - times.plain for rows, times in self.by_rows.items() if rows >= first]
        return sum(saved) / len(saved) / self.slice_bytes


@dataclass(frozen=True, slots=True)
class CopyCandidate:
    """A compressed matrix, and what a decoded copy of it takes and gains."""

    name: str
    nbytes: int  # of the copy
    rows: RowsOfStep
    times: ShapeTimes


@dataclass(frozen=True, slots=True)
class CopyBudget:
    """Memory for decoded copies."""

    nbytes: int
    all_or_none: bool = False  # copies of some matrices only are not wanted


@dataclass(frozen=True, slots=True)
class ChosenCopies:
    """Names of the matrices that get copies, with the rows from which on products read them."""

    decoded_from: Mapping[str, int]
    nbytes: int  # of all these copies
    wanted_bytes: int  # of the copies of all matrices that would gain


def choose_copies(candidates: Sequence[CopyCandidate], budget: CopyBudget) -> ChosenCopies:
    """The copies that fit the budget, those with the largest gain a byte first, in their order where it is equal."""
    gaining = [own for own in candidates if own.times.decoded_from is not None]
    wanted = sum(own.nbytes for own in gaining)
    chosen: dict[str, int] = {}
    left = budget.nbytes
    if budget.all_or_none and wanted > left:
        gaining = []
    for own in sorted(gaining, key=lambda own: (own.rows, -own.times.saved_s_a_byte)):
        if own.nbytes <= left and own.times.decoded_from is not None:
            chosen[own.name] = own.times.decoded_from
            left -= own.nbytes
    return ChosenCopies(chosen, budget.nbytes - left, wanted)
