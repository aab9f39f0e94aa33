"""A rank's part of a model as a ``Model``: its sums are joined with those of its stage, its hidden state goes on.

::

    tensor parallelism    product of a rank's columns -> all_gather -> join -> added to the hidden state, on every rank
    pipeline stages       hidden state of all tokens -> send ............ recv -> features of the next stage's batch

Layers do not know which rank they are: a matrix says that it has a part of K (``PackedLinear.partial``).  Both models
are run operation by operation (``ops.DirectProgram``); exchanges cannot be recorded yet.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np

from penstock.engine.models.interface import Model
from penstock.kernels.operands import Array, Gate, GatheredNorm, PackedExperts, PackedLinear, Routes, StepBatch
from penstock.kernels.ops import Ops
from penstock.parallel.collectives.interface import Collectives
from penstock.parallel.shard import ModelShard


class TensorParallelModel:
    """A ``Model`` over the parts of layers that one rank has.  ``group``: the ranks that have the other parts."""

    def __init__(self, model: Model, group: Collectives) -> None:
        self._model = model
        self._group = group

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        return self._model.forward(cast(Ops, _JoiningOps(ops, self._group)), batch, kv)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return self._model.logits(ops, hidden_RD)


class _JoiningOps:
    """The backend's operations; what has a rank's part of a sum or of a norm exchanges it with the other ranks."""

    def __init__(self, ops: Ops, group: Collectives) -> None:
        self._ops = ops
        self._group = group
        self._join = ops.join  # refused at once by a backend that records, before any rank waits for another

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        out_TN = self._ops.linear(x_TK, weight)
        return self._join(self._group.all_gather(out_TN)) if weight.partial else out_TN

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        if weight.partial:
            self._ops.add(hidden_TN, self.linear(x_TK, weight))
        else:
            self._ops.linear_add(x_TK, weight, hidden_TN)

    def experts_add(self, x_TK: Array, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Array) -> None:
        if not experts.partial:
            self._ops.experts_add(x_TK, routes, experts, kind, hidden_TD)
            return
        part_TD = self._ops.hidden(np.zeros((len(x_TK), experts.n), np.float32))
        self._ops.experts_add(x_TK, routes, experts, kind, part_TD)
        self._ops.add(hidden_TD, self._join(self._group.all_gather(part_TD)))

    def norm_heads(self, x_TN: Array, weight_C: Array | GatheredNorm, eps: float, *, first: int, count: int) -> None:
        if isinstance(weight_C, GatheredNorm):
            self._ops.norm_gathered(x_TN, self._group.all_gather(x_TN), weight_C.weight, eps, weight_C.heads)
        else:
            self._ops.norm_heads(x_TN, weight_C, eps, first=first, count=count)


class PipelineStage:
    """A ``Model`` over the layers of one stage.  ``stages``: the ranks of all stages with the same part of a layer.

    Batches are those of the whole model.  A stage before the last computes all tokens and returns no rows; it has no
    logits.
    """

    def __init__(self, model: Model, stages: Collectives, shard: ModelShard) -> None:
        self._model = model
        self._stages = stages
        self._shard = shard

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        to_host = ops.to_numpy  # refused at once by a backend that records, before any rank waits for another
        stages, shard, tokens = self._stages, self._shard, len(batch.tokens_T)
        if not shard.is_first:
            batch = replace(batch, features_TW=stages.recv(stages.rank - 1, (tokens, shard.whole.hidden)))
        if shard.is_last:
            return self._model.forward(ops, batch, kv)
        every = replace(batch, sample_rows_R=np.arange(tokens, dtype=np.int32))
        stages.send(to_host(self._model.forward(ops, every, kv)), stages.rank + 1)
        return None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return self._model.logits(ops, hidden_RD)
