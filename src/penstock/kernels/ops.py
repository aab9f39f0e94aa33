"""The operations that layers may call: one signature each, whatever the backend.

Arrays are opaque to callers: a layer passes on what an op returned and never looks inside.  Shapes are given by the
letters in the names: T tokens of this step (all sequences one after another), S sequences, R rows that sample,
D hidden size, H query heads, G key-value heads, C size of a head's keys, N outputs of a linear, K its inputs,
V vocabulary, P pages in the longest table.  Types: *hidden* is fp32 (the residual stream and every accumulator),
*compute* is the backend's compute type (bf16 or fp32: what a matrix product reads).

Batch invariance (law 1) is part of every signature: one output row has the same bits whatever other rows are in the
call, whatever their number, and however a prompt is cut into calls.  So the order of every sum depends on the model
only: over K from low to high within a segment, segments joined by the fixed binary tree; attention over keys 64 at a
time by absolute position, in partitions of 512 keys joined from low to high.

The signatures stand by kind of operation: ``ops_model`` (once a model), ``ops_rows`` (row by row), ``ops_products``
(packed matrices, experts), ``ops_attention`` (across a sequence, KV memory), ``ops_states`` (recurrent layers),
``ops_head`` (logits to tokens).  The
oracle (``reference_*``) and the C++ calls (``native_*``) have a file for each of these, with the bodies; ``reference``
and ``native`` put them together.  A new operation goes into those three files of its kind, gets its line in both lists,
and its recorded form in ``recording``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.draws import Picks, Sampled, SampleRow
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops_attention import AttentionOps
from penstock.kernels.ops_head import HeadOps
from penstock.kernels.ops_model import ModelOps
from penstock.kernels.ops_products import ProductOps
from penstock.kernels.ops_rows import RowOps
from penstock.kernels.ops_states import StateOps


class Steps(Protocol):
    """What can be recorded: a model's order of operations.  Both methods call nothing but the given ``Ops``."""

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        """hidden [R, D] of the wanted rows, or None when there are none."""
        ...

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        """hidden [R, V]."""
        ...


class StepProgram(Protocol):
    """All operations of a model's step, ready to be run again and again, for any tokens and rows.

    The wanted rows of a batch stand in this order: rows that are only scored, rows that draw from logits, picks.
    """

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: Picks,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        """Compute the batch; the answers of ``rows``; those of ``picks`` stand in their array.

        A row gives the same token whichever way it is drawn.  Arrays are read anew in every run, so a batch whose
        arrays were overwritten may be given again.  Raises ValueError for indices out of range.

        ``ready``: called once the logits are there and before any of ``rows`` is drawn; until it returns, the rows'
        ``allowed`` may still be written by another thread.  What it raises comes out of ``run``.
        """
        ...

    def hidden(self) -> Array:
        """hidden [R, D] of the last run's wanted rows, valid until the next one; for ``Steps.logits``."""
        ...


@runtime_checkable
class RunsAhead(Protocol):
    """What a program has besides, if what one step draws can be the next one's input without going by the host."""

    def runs_ahead(self, batch: StepBatch, picks: Picks) -> bool:
        """Can steps like this one follow each other so?  Only where every token of it draws, and by picking."""
        ...

    def run_ahead(self, picks: Picks, steps: int, batch_of: Callable[[int], StepBatch | None]) -> NDArray[np.int32]:
        """Up to ``steps`` steps; the tokens they drew, [steps done, F], valid until the next run.

        ``batch_of(i)`` is called while step i - 1 is computed and makes the arrays, those of ``picks`` too, those of
        step i, but for its tokens (of step 0: with them); None ends the run before it.
        """
        ...


CAPTURE_S = 2.0
"""Time that making steps ready may take at the start; what is left is made ready when it comes."""


@runtime_checkable
class Captures(Protocol):
    """What a program has besides, if steps of some sizes can be made ready before the first of them is asked for."""

    def capture(self, alive: Callable[[], None] | None = None, budget_s: float = CAPTURE_S) -> int:
        """Make ready what so many seconds allow, but for kernels to be compiled; how many sizes.

        ``alive`` is called every now and then.  Only while the KV memory holds nothing."""
        ...


class Ops(ModelOps, RowOps, ProductOps, AttentionOps, StateOps, HeadOps, Protocol):
    """A backend."""

    numerics: str
    """Numerics class: two backends with one name give the same bits."""

    compute_dtype: str
    """"bf16" or "fp32"."""

    kv_dtype: str
    """What keys and values are kept in: the compute type, or "fp8_e4m3" (``kv_types``)."""

    kv_layout: str
    """Name of the layout of the bytes in a page; pages pass only between equal layouts of one numerics class."""

    def record(self, steps: Steps, kv: Array, *, tapped: tuple[int, ...] = ()) -> StepProgram:
        """The steps as one program over this KV memory: recorded where the backend can, else run as they are.

        ``tapped``: as that of every batch that it will be given.
        """
        ...
