"""A rank's part of a model as a ``Model``, whose sums are added up with those of its stage, and its part of a step as a
``StepProgram``, whose hidden states go on to the next stage.

::

    tensor parallelism    product of a rank's columns -> all_reduce -> added to the hidden state, on every rank
    pipeline stages       hidden state of all tokens -> send ............ recv -> features of the next stage's batch

Layers do not know which rank they are: a matrix says that it has a part of K (``PackedLinear.partial``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import numpy as np

from penstock.engine.models.interface import Model
from penstock.kernels.operands import Array, Gate, GatheredNorm, PackedExperts, PackedLinear, Routes, StepBatch
from penstock.kernels.ops import Ops, SharedProgram
from penstock.kernels.sampling import GumbelRows, Sampled, SampleRow
from penstock.parallel.collectives.interface import Collectives, PointToPoint
from penstock.parallel.shard import ModelShard

KEPT_BATCHES = 8
"""Batches that a stage remembers: of micro-batches that take turns."""


class ShardedModel:
    """A ``Model`` over the parts of layers that one rank has.  ``group``: the ranks that have the other parts."""

    def __init__(self, model: Model, shard: ModelShard, group: Collectives) -> None:
        self._model = model
        self._shard = shard
        self._group = group

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        return self._model.forward(self._ops(ops), batch, kv)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        """hidden [R, V], of all ranks; before the last stage, which has the head, the hidden states themselves."""
        shard = self._shard
        if not shard.is_last:
            return hidden_RD
        logits_RV = self._model.logits(self._ops(ops), hidden_RD)
        return logits_RV if shard.mesh.tensor == 1 else ops.gather_columns(logits_RV, self._group, shard.head_widths)

    def _ops(self, ops: Ops) -> Ops:
        return ops if self._shard.mesh.tensor == 1 else cast(Ops, _ReducingOps(ops, self._group))


class _ReducingOps:
    """The backend's operations; what has a rank's part of a sum or of a norm exchanges it with the other ranks."""

    def __init__(self, ops: Ops, group: Collectives) -> None:
        self._ops = ops
        self._group = group

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        out_TN = self._ops.linear(x_TK, weight)
        return self._ops.all_reduce(out_TN, self._group) if weight.partial else out_TN

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        if weight.partial:
            self._ops.add(hidden_TN, self.linear(x_TK, weight))
        else:
            self._ops.linear_add(x_TK, weight, hidden_TN)

    def experts_add(self, x_TK: Array, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Array) -> None:
        if not experts.partial:
            self._ops.experts_add(x_TK, routes, experts, kind, hidden_TD)
            return
        part_TD = self._ops.zeros(x_TK, experts.n)
        self._ops.experts_add(x_TK, routes, experts, kind, part_TD)
        self._ops.add(hidden_TD, self._ops.all_reduce(part_TD, self._group))

    def norm_heads(self, x_TN: Array, weight_C: Array | GatheredNorm, eps: float, *, first: int, count: int) -> None:
        if isinstance(weight_C, GatheredNorm):
            self._ops.norm_gathered(x_TN, self._group, weight_C.weight, eps, weight_C.heads)
        else:
            self._ops.norm_heads(x_TN, weight_C, eps, first=first, count=count)


class StageProgram:
    """A ``SharedProgram`` of the layers of one stage.

    ``stages``: the ranks of all stages with the same part of a layer.  Batches are those of the whole model.  A stage
    before the last computes all tokens; only the last one is ``run``.
    """

    def __init__(self, program: SharedProgram, ops: Ops, stages: PointToPoint, shard: ModelShard) -> None:
        self._program = program
        self._ops = ops
        self._stages = stages
        self._shard = shard
        self._batches: list[tuple[StepBatch, StepBatch]] = []  # given, and its own, which has the same arrays

    def run(
        self,
        batch: StepBatch,
        scored: int,
        rows: list[SampleRow],
        picks: GumbelRows,
        ready: Callable[[], None] | None = None,
    ) -> list[Sampled]:
        return self._program.run(self._received(batch), scored, rows, picks, ready)

    def compute(self, batch: StepBatch, scored: int, picks: GumbelRows) -> None:
        own = self._received(batch)
        if self._shard.is_last:
            self._program.compute(own, scored, picks)
        else:
            self._program.compute(own, len(own.tokens_T), GumbelRows.empty(0))
            self._stages.send(self._ops.to_numpy(self._program.hidden()), self._stages.rank + 1)

    def _received(self, batch: StepBatch) -> StepBatch:
        """The stage's batch, with what the stage before it has computed."""
        own = next((own for given, own in self._batches if given is batch), None)
        if own is None:
            own = self._stage_batch(batch)
            self._batches = [*self._batches[1 - KEPT_BATCHES :], (batch, own)]
        stages = self._stages
        if own.features_TW is not None:
            own.features_TW[:] = stages.recv(stages.rank - 1, own.features_TW.shape)
        return own

    def hidden(self) -> Array:
        return self._program.hidden()

    def _stage_batch(self, batch: StepBatch) -> StepBatch:
        tokens, shard = len(batch.tokens_T), self._shard
        if not shard.is_first:
            batch = replace(batch, features_TW=np.empty((tokens, shard.whole.hidden), np.float32))
        return batch if shard.is_last else replace(batch, sample_rows_R=np.arange(tokens, dtype=np.int32))


def stage_program(program: SharedProgram, ops: Ops, stages: PointToPoint, shard: ModelShard) -> SharedProgram:
    """The program of a rank, whose model is a ``ShardedModel``."""
    return program if shard.mesh.pipeline == 1 else StageProgram(program, ops, stages, shard)
