"""A model's step on a device: arrays go there in one copy, sampled tokens come back in one, and graphs run in between.

::

    host     fill n    launch n | fill n + 1   launch n + 1 | wait for n + 1
    device             copy, step n, tokens ----> fed to step n + 1, tokens --->| pinned memory

Decode steps, one token a sequence, are padded to a few sizes and replayed as graphs (``graphs``); prompts
and steps of recurrent layers run as they are.  Steps with images or taps go operation by operation over the host's
arrays (``kernels.ops.StepProgram``).  Padding changes no bit: see ``staging``.

Knows which arrays a step has, not what its operations do.  This module imports torch.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import CAPTURE_S, DirectProgram, MultiStepProgram, Ops, RecordableModel, StepProgram
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow
from penstock.kernels.triton.graphs import EagerRunner, GraphRunner
from penstock.kernels.triton.staging import (
    DeviceArrays,
    DeviceGumbelRows,
    PinnedArrays,
    StepShape,
    TokenReadback,
    buckets,
    by_group,
)
from penstock.types import PAGE_TOKENS

MOST_ROWS = 256
"""Sequences of a step that is padded and captured; larger ones run as they are."""

LEAST_BLOCKS = 32
"""Columns of the narrowest table that a captured step has, for each group of layers; wider ones double."""

TRIED_PROMPTS = ((16, 1), (65, 2 * LEAST_BLOCKS), (129, 1), (257, 2 * LEAST_BLOCKS), (520, 1), (1040, 1))
"""Tokens, and columns of the table a group of layers, of steps that are tried at the start.  Together they take every
kernel that prompts take: tiles of all heights, few and many rows to an expert, partitions apart and in turn."""


class PickRows(Protocol):
    """Samples by temperature alone, on the device: the tokens that ``Ops.sample`` samples."""

    def __call__(self, logits_RV: Tensor, draws: DeviceGumbelRows) -> Tensor:
        """int32 [R]."""
        ...


class DeviceProgram(StepProgram, MultiStepProgram):
    """Steps launched on the device, or replayed where their size has been captured."""

    def __init__(
        self,
        ops: Ops,
        steps: RecordableModel,
        kv: Array,
        *,
        device: torch.device,
        groups: int = 1,
        replays: GraphRunner | None = None,
        pick: PickRows | None = None,
        most_rows: int = MOST_ROWS,
        state_parts: int = 0,
    ) -> None:
        """``groups`` of layers have their own pages, ``state_parts`` pages hold a state.

        ``replays``: by default nothing is captured.  ``pick``: without it every row is sampled on the host.
        """
        self._ops = ops
        self._steps = steps
        self._kv = kv
        self._device = device
        self.groups = groups
        self._state_parts = state_parts
        self.pick = pick
        self.replays = EagerRunner() if replays is None else replays
        self._sizes = tuple(buckets(most_rows))
        self._direct = DirectProgram(ops, steps, kv)
        self._pinned = PinnedArrays(device)
        self._returned = TokenReadback(device)
        self._arrays: dict[StepShape, DeviceArrays] = {}  # of captured shapes; they stay
        self._words = torch.empty(0, dtype=torch.int32, device=device)  # of all other shapes, one at a time
        self._hidden: Array = None
        self._went_direct = False

    # --- one step -----------------------------------------------------------------------------------------------------

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        self._went_direct = not _is_plain(batch)
        if self._went_direct:
            sampled = self._direct.run(batch, scored, rows, picks, ready)
            self._wait()
            return sampled
        outputs = self._begun(batch, scored, picks)
        if not outputs:
            self._wait()  # else the next step would be taken to last as long as this one and itself
            return []
        logits_RV, tokens_R = outputs[0], outputs[1] if len(outputs) > 1 else None
        picked = len(picks.tokens_F)
        if tokens_R is not None and picked:
            self._returned.expect(1, len(tokens_R))
            self._returned.start_copy(0, tokens_R)
        if ready is not None:
            ready()
        listed = rows if tokens_R is not None else [*rows, *picks.rows()]
        sampled = self._ops.sample(logits_RV[: len(listed)], listed) if listed else []
        if tokens_R is None:
            picks.tokens_F[:] = [one.token for one in sampled[len(rows) :]]
        elif picked:
            count = len(batch.sample_rows_R) - scored  # of rows that sample
            picks.tokens_F[:] = self._returned.wait(1, count)[0, count - picked :]
        return sampled[: len(rows)]

    def compute(self, batch: StepBatch, scored: int, picks: GumbelRows) -> None:
        """The same launches as ``run`` makes, so ranks exchange the same arrays; nothing is sampled on the host."""
        self._went_direct = not _is_plain(batch)
        if self._went_direct:
            self._direct.compute(batch, scored, picks)
        else:
            self._begun(batch, scored, picks)
        self._wait()

    def hidden(self) -> Array:
        return self._direct.hidden() if self._went_direct else self._hidden

    def _begun(self, batch: StepBatch, scored: int, picks: GumbelRows) -> tuple[Tensor, ...]:
        """Logits and sampled tokens of a step that has begun; nothing where no row samples."""
        shape = self._padded(batch) if scored == 0 else None
        return self._whole(batch, scored, picks) if shape is None else self._launch(shape, batch, picks)

    # --- several, without the host in between -------------------------------------------------------------------------

    def can_run_ahead(self, batch: StepBatch, picks: GumbelRows) -> bool:
        every = len(picks.tokens_F) == len(batch.sample_rows_R) == len(batch.tokens_T)
        return every and self.pick is not None and _is_plain(batch) and self._padded(batch) is not None

    def run_ahead(
        self, picks: GumbelRows, steps: int, batch_of: Callable[[int], StepBatch | None]
    ) -> NDArray[np.int32]:
        count, tokens_R, done = len(picks.tokens_F), None, 0
        for step in range(steps):
            batch = batch_of(step)
            shape = None if batch is None else self._padded(batch)
            if batch is None or shape is None:
                break
            outputs = self._launch(shape, batch, picks, fed=tokens_R)
            tokens_R = outputs[1]
            if step == 0:
                self._returned.expect(steps, shape.wanted)
            self._returned.start_copy(step, tokens_R[:count])
            done += 1
        return self._returned.wait(done, count)

    def _wait(self) -> None:
        """For all that was launched."""
        self._returned.mark()
        self._returned.rest()

    # --- at the start -------------------------------------------------------------------------------------------------

    def capture(self, alive: Callable[[], None] | None = None, budget_s: float = CAPTURE_S) -> int:
        """Try prompts, then run and capture steps of all sizes, large ones first, until the time is over; how many.

        ``alive`` is called behind each step.  Only before there is anything in the KV memory: what they compute is
        written to its first page.
        """
        alive = alive or (lambda: None)
        if self._device.type == "cuda":  # elsewhere nothing is compiled
            self.try_prompts(alive)
        if self._state_parts:  # such steps run as they are
            return 0
        begun, done = time.monotonic(), 0
        for size in reversed(self._sizes):  # graphs share memory: the largest one's is enough for all
            if time.monotonic() - begun >= budget_s:
                break
            for _ in range(2):  # as it is, then captured
                self.run(_answers(size, LEAST_BLOCKS * self.groups), 0, [], GumbelRows.empty(size))
                alive()
            done += 1
        return done

    def try_prompts(self, alive: Callable[[], None]) -> None:
        """The first start on a host compiles kernels here, which takes minutes and is not timed: a kernel that is
        compiled while requests wait looks like a worker that hangs."""
        row = SampleRow(seed=0, position=0, choice=0, temperature=1.0, top_k=2, top_p=0.5)  # uses all sampling kernels
        for tokens, blocks in TRIED_PROMPTS:
            self.run(_prompt(tokens, blocks * self.groups, self._state_parts), 0, [row], GumbelRows.empty(0))
            self._wait()
            alive()

    # --- inside -------------------------------------------------------------------------------------------------------

    def _padded(self, batch: StepBatch) -> StepShape | None:
        """The shape that a step is padded to; None for one that runs as it is."""
        count, wanted = len(batch.tokens_T), len(batch.sample_rows_R)
        if batch.states_SW is not None:  # a copy of a sequence would write its state to the same pages
            return None
        if not 0 < wanted <= count == len(batch.starts_S1) - 1 <= self._sizes[-1]:
            return None
        size = self._sizes[bisect_left(self._sizes, count)]
        blocks = max(LEAST_BLOCKS, 1 << (batch.table_SP.shape[1] // self.groups - 1).bit_length())
        return StepShape(size, size, size, blocks * self.groups, adapted=batch.adapters_S is not None)

    def _launch(
        self, shape: StepShape, batch: StepBatch, picks: GumbelRows, fed: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Begin a padded step: logits and sampled tokens of its output rows.  ``fed``: its tokens are on the device."""
        arrays = self._arrays.get(shape)
        if arrays is None:
            words = torch.empty(shape.words, dtype=torch.int32, device=self._device)
            arrays = self._arrays[shape] = DeviceArrays(shape, words)
        if self.groups > 1:  # the columns of one group are widened where they are copied
            batch = replace(batch, table_SP=by_group(batch.table_SP, self.groups, shape.columns // self.groups))
        self._pinned.fill(shape, batch, picks, arrays)
        if fed is not None:
            arrays.feed(fed)
        hidden_RD, *outputs = self.replays.run(shape, partial(self._compute, arrays, 0))
        self._hidden = hidden_RD[: len(batch.sample_rows_R)]
        return tuple(outputs)

    def _whole(self, batch: StepBatch, scored: int, picks: GumbelRows) -> tuple[Tensor, ...]:
        """A step run eagerly; no outputs where no row samples."""
        shape = StepShape.of(batch)
        if len(self._words) < shape.words:
            self._words = torch.empty(1 << (shape.words - 1).bit_length(), dtype=torch.int32, device=self._device)
        arrays = DeviceArrays(shape, self._words)
        self._pinned.fill(shape, batch, picks, arrays)
        if shape.wanted == scored:
            self._hidden = self._steps.forward(self._ops, arrays.batch, self._kv)
            return ()
        self._hidden, *outputs = self._compute(arrays, scored)
        return tuple(outputs)

    def _compute(self, arrays: DeviceArrays, scored: int) -> tuple[Tensor, ...]:
        """hidden [R, D], logits [R - scored, V], and where rows are sampled on the device, tokens [R - scored]."""
        hidden_RD = self._steps.forward(self._ops, replace(arrays.batch), self._kv)
        assert isinstance(hidden_RD, Tensor)
        logits_RV = self._steps.logits(self._ops, hidden_RD[scored:])
        if self.pick is None:
            return hidden_RD, logits_RV
        draws = arrays.draws
        if scored:
            draws = DeviceGumbelRows(
                draws.seeds_R[scored:],
                draws.positions_R[scored:],
                draws.choices_R[scored:],
                draws.temperatures_R[scored:],
            )
        return hidden_RD, logits_RV, self.pick(logits_RV, draws)


def _is_plain(batch: StepBatch) -> bool:
    """Whether the step reads only tokens, positions, pages and adapter slots."""
    others = (batch.turns_T3, batch.given, batch.features_TW, batch.taps_RW)
    return all(other is None for other in others)


def _prompt(tokens: int, columns: int, state_parts: int) -> StepBatch:
    """Prompts of a page each, the last one shorter, all and their states in the first page; one row samples."""
    starts_S1 = np.array([*range(0, tokens, PAGE_TOKENS), tokens], np.int32)
    positions_T = np.arange(tokens, dtype=np.int32) % PAGE_TOKENS
    table_SP = np.zeros((len(starts_S1) - 1, columns), np.int32)
    states_SW = np.zeros((len(starts_S1) - 1, state_parts), np.int32) if state_parts else None
    zeros_T, wanted_R = np.zeros(tokens, np.int32), np.zeros(1, np.int32)
    return StepBatch(zeros_T, positions_T, starts_S1, table_SP, wanted_R, states_SW=states_SW)


def _answers(rows: int, columns: int) -> StepBatch:
    """The first decode tokens of ``count`` sequences, all in the first page."""
    zeros_R, starts_S1 = np.zeros(rows, np.int32), np.arange(rows + 1, dtype=np.int32)
    return StepBatch(zeros_R, zeros_R, starts_S1, np.zeros((rows, columns), np.int32), np.arange(rows, dtype=np.int32))
