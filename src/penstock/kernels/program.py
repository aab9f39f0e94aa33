"""A model's step run as it is, operation by operation: ``StepProgram`` for a backend, or a model, that records nothing.

Also the oracle of recorded programs: both must give the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops, RecordableModel, StepProgram
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow


class RecordingError(Exception):
    """The steps do something that cannot be recorded, such as looking into an array."""


class DirectProgram(StepProgram):
    """Runs the steps operation by operation; every row samples from stored logits."""

    def __init__(self, ops: Ops, steps: RecordableModel, kv: Array) -> None:
        self._ops = ops
        self._steps = steps
        self._kv = kv
        self._hidden: Array = None

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        self._hidden = self._steps.forward(self._ops, replace(batch), self._kv)
        wanted = batch.sample_rows_R
        if len(wanted) == scored:
            return []
        hidden_RD = (
            self._hidden
            if scored == 0
            else self._ops.rows(self._hidden, np.arange(scored, len(wanted), dtype=np.int32))
        )
        logits_RV = self._steps.logits(self._ops, hidden_RD)
        if ready is not None:
            ready()
        sampled = self._ops.sample(logits_RV, [*rows, *picks.rows()])
        picks.tokens_F[:] = [one.token for one in sampled[len(rows) :]]
        return sampled[: len(rows)]

    def hidden(self) -> Array:
        return self._hidden
