"""Plan -> arrays -> model -> drawn tokens.

Knows the model only as ``Model``, the backend only as ``Ops``.  Holds no page and no request of its own: pages are the
scheduler's, and what it keeps between steps can be made again (``answer``).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import Drawn, Plan
from penstock.engine.models.port import Model
from penstock.engine.runner.answer import Answers
from penstock.engine.runner.batch import Span, StepArrays
from penstock.kernels.ops import Array, Ops, Sampled
from penstock.types import RequestId, TokenLogprob

SCORED_ROWS = 64
"""Prompt positions scored at once: bounds the logits held in memory to this many rows of the vocabulary."""


class ModelRunner:
    """See ``engine.runner.port.Runner``."""

    def __init__(self, model: Model, ops: Ops, kv: Array) -> None:
        """``kv``: memory made by ``ops.new_kv`` that holds the pages the plans speak of."""
        self._model = model
        self._ops = ops
        self._kv = kv
        self._answers = Answers()
        self._arrays = StepArrays()

    def run(self, plan: Plan) -> Sequence[Drawn]:
        spans = [Span(row, self._answers.of(row.request)) for row in plan.rows]
        if not spans:
            return ()
        self._step(spans)
        for _ in range(plan.steps - 1):
            for span in spans:
                span.advance()
            self._step(spans)
        return [Drawn(tuple(span.drawn), tuple(span.logprobs), tuple(span.prompt_logprobs)) for span in spans]

    def forget(self, request: RequestId) -> None:
        self._answers.forget(request)

    def _step(self, spans: list[Span]) -> None:
        """Compute every span; draw and score what was asked for."""
        scored_R, sampled_R = _wanted_rows(spans)
        wanted_R = np.concatenate((scored_R, sampled_R)) if len(scored_R) else sampled_R
        batch = self._arrays.fill(spans, wanted_R)
        hidden_RD = self._model.forward(self._ops, batch, self._kv)
        if hidden_RD is None:
            return
        if len(scored_R):
            self._score(spans, hidden_RD)
            if not len(sampled_R):
                return
            hidden_RD = self._ops.rows(hidden_RD, np.arange(len(scored_R), len(wanted_R), dtype=np.int32))
        self._draw([span for span in spans if span.samples], hidden_RD)

    def _draw(self, spans: list[Span], hidden_RD: Array) -> None:
        rows = [span.answer.row(span.stop, span.drawn) for span in spans]
        drawn = self._ops.sample(self._model.logits(self._ops, hidden_RD), rows)
        for span, one in zip(spans, drawn, strict=True):
            span.drawn.append(one.token)
            if span.answer.request.sampling.logprobs is not None:
                span.logprobs.append(_token_logprob(one))

    def _score(self, spans: list[Span], hidden_RD: Array) -> None:
        """Log-probabilities of prompt tokens, for the first rows of ``hidden_RD``: span by span, piece by piece."""
        begin = 0
        for span in spans:
            targets_R = np.array(span.targets, np.int32)
            top = span.answer.request.sampling.prompt_logprobs or 0
            for first in range(0, len(targets_R), SCORED_ROWS):
                piece_R = targets_R[first : first + SCORED_ROWS]
                rows_R = np.arange(begin + first, begin + first + len(piece_R), dtype=np.int32)
                logits_RV = self._model.logits(self._ops, self._ops.rows(hidden_RD, rows_R))
                scored = self._ops.token_logprobs(logits_RV, piece_R, top)
                span.prompt_logprobs.extend(_token_logprob(one) for one in scored)
            begin += len(targets_R)


def _wanted_rows(spans: list[Span]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Rows of the batch whose prompt targets are scored, and rows that sample."""
    scored: list[int] = []
    sampled: list[int] = []
    begin = 0
    for span in spans:
        scored.extend(range(begin, begin + len(span.targets)))
        begin += len(span.tokens)
        if span.samples:
            sampled.append(begin - 1)
    return np.array(scored, np.int32), np.array(sampled, np.int32)


def _token_logprob(one: Sampled) -> TokenLogprob:
    assert one.logprob is not None  # the row asked for it
    return TokenLogprob(one.token, one.logprob, one.top)
