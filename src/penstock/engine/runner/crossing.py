"""The first tokens of sequences that stand for an encoder's rows: their keys and values go to the pages before a step
computes the tokens behind them.

What is written depends on the rows alone, so nothing is computed of one position that another position changes: chunks
may begin and end anywhere.  Knows the model only as ``CrossReading``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.engine.core.plan import Row
from penstock.engine.models.port import CrossReading
from penstock.engine.runner.batch import Images
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops
from penstock.reach import blocks_of
from penstock.types import PAGE_TOKENS


class SourceWriter:
    """One for a worker."""

    def __init__(self, model: CrossReading, images: Images, ops: Ops, kv: Array) -> None:
        self._model = model
        self._images = images
        self._ops = ops
        self._kv = kv

    def wanted(self, rows: Sequence[Row]) -> bool:
        """Does a row have tokens that stand for an encoder's rows?"""
        source = self._model.source
        return any(row.start < source for row in rows)

    def write(self, rows: Sequence[Row]) -> list[Row | None]:
        """Have done with those tokens; what is left of each row, None where nothing is."""
        source = self._model.source
        begun = [row for row in rows if row.start < source]
        ends = [min(row.start + row.count, source) for row in begun]
        values = [
            self._images.rows(row.request.images[0], row.request.pictures, 0)[row.start : end]
            for row, end in zip(begun, ends, strict=True)
        ]
        rows_TD = self._ops.compute(np.concatenate(values))
        self._model.write_source(self._ops, rows_TD, _batch(begun, ends), self._kv)
        return [_behind(row, source) for row in rows]


def _behind(row: Row, source: int) -> Row | None:
    """The part of a row from position ``source`` on."""
    if row.start >= source:
        return row
    count = row.start + row.count - source
    return Row(row.request, source, count, row.samples, row.draft) if count > 0 else None


def _batch(rows: Sequence[Row], ends: Sequence[int]) -> StepBatch:
    """Positions and pages of these rows' first tokens."""
    positions_T = np.concatenate(
        [np.arange(row.start, end, dtype=np.int32) for row, end in zip(rows, ends, strict=True)]
    )
    starts_S1 = np.cumsum([0, *(end - row.start for row, end in zip(rows, ends, strict=True))]).astype(np.int32)
    table_SP = np.zeros((len(rows), blocks_of(max(ends), PAGE_TOKENS)), np.int32)
    for index, (row, end) in enumerate(zip(rows, ends, strict=True)):
        (own,) = row.request.held
        blocks = blocks_of(end, PAGE_TOKENS)
        table_SP[index, :blocks] = own.pages[:blocks]
    none = np.empty(0, np.int32)
    return StepBatch(np.zeros_like(positions_T), positions_T, starts_S1, table_SP, none)
