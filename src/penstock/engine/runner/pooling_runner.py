"""The runner of pooling models: plans of texts -> vectors, or scores of labels.

Knows the model only as ``PoolingModel``, the backend only as ``Ops``.  A vector's bits depend on its own text alone
(docs/determinism.md): so do the model's states, which are added up in order in float64; a norm is the root of an exact
sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan
from penstock.engine.models.interface import PoolingModel
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops
from penstock.kv_spec import blocks_for
from penstock.types import PAGE_TOKENS, PoolingParams, RequestId
from penstock.weights.architecture.spec import PoolingType, ScoreFunction

POOLED_TOKEN = (0,)
"""The token that says that a text has been read."""

MIN_LENGTH = 1e-12
"""A vector is divided by its length, or by this if that is more."""

PooledVector = NDArray[np.float64]


class PoolingRunner:
    """The ``Runner`` of a pooling model."""

    def __init__(self, model: PoolingModel, ops: Ops, kv: Array) -> None:
        """``kv``: memory made by ``ops.new_kv`` that holds the pages the plans speak of."""
        self._model = model
        self._ops = ops
        self._kv = kv
        self._sums: dict[RequestId, PooledVector] = {}  # of texts that are read in pieces

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        if not plan.rows:
            return ()
        wanted = [self._wanted(row) for row in plan.rows]
        batch, second_T = _arrays(plan.rows, wanted)
        states_RD = self._model.states(self._ops, batch, second_T, self._kv)
        if states_RD is None:
            return [SampledTokens() for _ in plan.rows]
        return self._scored(plan, states_RD) if self._model.pooler.labels else self._pooled(plan, wanted, states_RD)

    def remove_request(self, request: RequestId) -> None:
        self._sums.pop(request, None)

    def _wanted(self, row: ScheduledTokens) -> range:
        """Which of the row's tokens count."""
        match self._model.pooler.pooling:
            case PoolingType.CLS:
                return range(1 if row.start == 0 else 0)
            case PoolingType.LAST:
                return range(row.count - 1, row.count) if row.samples else range(0)
            case PoolingType.MEAN:
                return range(row.count)

    def _scored(self, plan: StepPlan, states_RD: Array) -> list[SampledTokens]:
        """A head reads one state of each text, which is wanted in the step that ends it."""
        scores_RL = iter(self._ops.to_numpy(self._model.scores(self._ops, states_RD)))
        how = self._model.pooler.scores
        return [
            SampledTokens(POOLED_TOKEN, pooled=_packed(activate_scores(next(scores_RL).tolist(), how)))
            if row.samples
            else SampledTokens()
            for row in plan.rows
        ]

    def _pooled(self, plan: StepPlan, wanted: list[range], states_RD: Array) -> list[SampledTokens]:
        states = self._ops.to_numpy(states_RD).astype(np.float64)
        drawn: list[SampledTokens] = []
        begin = 0
        for row, tokens in zip(plan.rows, wanted, strict=True):
            own = states[begin : begin + len(tokens)]
            begin += len(tokens)
            drawn.append(self._added(row, own))
        return drawn

    def _added(self, row: ScheduledTokens, states_RD: PooledVector) -> SampledTokens:
        """Adds one row's states to those of its text so far; the vector when the text ends."""
        request = row.request
        if row.start == 0:
            self._sums.pop(request.id, None)  # begun anew
        total = self._sums.get(request.id)
        for state_D in states_RD:
            total = state_D.copy() if total is None else total + state_D
        if not row.samples:
            if total is not None:
                self._sums[request.id] = total
            return SampledTokens()
        assert total is not None
        pooler = self._model.pooler
        if pooler.pooling is PoolingType.MEAN:
            total = total / request.known
        return SampledTokens(
            POOLED_TOKEN, pooled=_packed(final_embedding(total, request.pooling or PoolingParams(), pooler.normalised))
        )


def final_embedding(vector: PooledVector, wanted: PoolingParams, normalised: bool) -> PooledVector:
    """The vector as it is wanted: its first numbers, brought to length 1."""
    vector = vector[: wanted.dimensions]
    if not (normalised if wanted.normalised is None else wanted.normalised):
        return vector
    length = math.sqrt(math.fsum((vector * vector).tolist()))
    return vector / max(length, MIN_LENGTH)


def activate_scores(scores: Sequence[float], how: ScoreFunction) -> PooledVector:
    """A head's outputs as scores."""
    if how is ScoreFunction.SIGMOID:
        return np.array([1 / (1 + math.exp(-x)) if x > -700 else 0.0 for x in scores])
    if how is ScoreFunction.SOFTMAX:
        weights = [math.exp(x - max(scores)) for x in scores]
        return np.array(weights) / math.fsum(weights)
    return np.array(scores)


def _packed(vector: PooledVector) -> bytes:
    return vector.astype("<f4").tobytes()


def _arrays(rows: Sequence[ScheduledTokens], wanted: Sequence[range]) -> tuple[StepBatch, NDArray[np.int32]]:
    """The step's tokens, text after text, and which of them belong to a second text."""
    tokens, positions, seconds, picked = list[int](), list[int](), list[int](), list[int]()
    starts = [0]
    for row, own in zip(rows, wanted, strict=True):
        request, end = row.request, row.start + row.count
        second = request.pooling.second if request.pooling is not None else None
        picked += [starts[-1] + index for index in own]
        tokens += request.tokens(row.start, end)
        positions += range(row.start, end)
        seconds += [int(second is not None and position >= second) for position in range(row.start, end)]
        starts.append(len(tokens))
    blocks = max(blocks_for(row.start + row.count, PAGE_TOKENS) for row in rows)
    table_SP = np.zeros((len(rows), blocks * len(rows[0].request.page_tables)), np.int32)
    for index, row in enumerate(rows):
        for group, holding in enumerate(row.request.page_tables):
            pages = holding.pages[: blocks_for(row.start + row.count, PAGE_TOKENS)]
            table_SP[index, group * blocks : group * blocks + len(pages)] = pages
    tokens_T, positions_T, starts_S1 = (np.array(numbers, np.int32) for numbers in (tokens, positions, starts))
    batch = StepBatch(tokens_T, positions_T, starts_S1, table_SP, np.array(picked, np.int32))
    return batch, np.array(seconds, np.int32)
