"""Plan -> arrays -> program -> drawn tokens.

Knows the model only as ``Model``, the backend only as ``Ops``, which makes one program of a whole step.  Holds no page
and no request of its own: pages are the scheduler's, and what it keeps between steps can be made again (``answer``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import Drawn, Plan
from penstock.engine.images.stage import ImageStage
from penstock.engine.models.port import Model
from penstock.engine.runner.answer import Answers, no_grammars
from penstock.engine.runner.batch import Span, StepArrays, token_logprob
from penstock.engine.runner.constraint import Lookahead
from penstock.grammar.matcher import Matcher
from penstock.kernels.operands import Array
from penstock.kernels.ops import Ops, StepProgram
from penstock.types import Grammar, RequestId

SCORED_ROWS = 64
"""Prompt positions scored at once: bounds the logits held in memory to this many rows of the vocabulary."""


class ModelRunner:
    """See ``engine.runner.port.Runner``."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: Array,
        program: StepProgram | None = None,
        matcher_of: Callable[[Grammar], Matcher] = no_grammars,
        *,
        images: ImageStage | None = None,
    ) -> None:
        """``kv``: memory made by ``ops.new_kv`` that holds the pages the plans speak of.

        ``program``: the model's step over this memory; by default as the backend records it.  ``matcher_of``: a
        grammar's matcher at the beginning of an answer, compiled before a request with that grammar is planned.
        ``images``: where rows of images come from, for a model that reads them.
        """
        self._model = model
        self._ops = ops
        self.program = ops.record(model, kv) if program is None else program
        self._answers = Answers(matcher_of)
        self._images = images
        self._arrays = StepArrays(images, ops.hidden)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")  # has a thread once a grammar was followed

    def run(self, plan: Plan) -> Sequence[Drawn]:
        if not plan.rows:
            return ()
        arrays = self._arrays
        if not arrays.go_on(plan.rows, spans=plan.steps > 1):
            arrays.fill([Span(row, self._answers.of(row.request)) for row in plan.rows])
            self._let_go(plan)
        if plan.steps == 1 and arrays.only_picks:
            self.program.run(arrays.batch, 0, [], arrays.picks)
            return [Drawn((token,)) for token in arrays.picks.tokens_F.tolist()]
        self._step()
        for _ in range(plan.steps - 1):
            arrays.advance()
            self._step()
        return arrays.drawn()

    def forget(self, request: RequestId) -> None:
        self._answers.forget(request)
        if self._images is not None:
            self._images.forget(request)

    def _let_go(self, plan: Plan) -> None:
        """Requests whose images are in the arrays, or behind them, need them no longer."""
        if self._images is None:
            return
        for row in plan.rows:
            images = row.request.images
            if images and row.start < images[-1].end <= row.start + row.count:
                self._images.forget(row.request.id)

    def tap(self, tapped: tuple[int, ...], hidden: int) -> None:
        """The program was recorded to hand hidden states out, of ``hidden`` numbers, behind so many layers."""
        self._arrays.tap(tapped, hidden)

    def hand_out(self, wanted: bool) -> None:
        """Whether hidden states are to be handed out from the next step on; at first they are not."""
        self._arrays.handing_out = wanted

    def taps(self) -> Mapping[RequestId, tuple[int, NDArray[np.float32]]]:
        """See ``StepArrays.taps``."""
        return self._arrays.taps()

    def _step(self) -> None:
        """Compute every span; draw and score what was asked for."""
        arrays = self._arrays
        rows, ready = arrays.draws(), self._look_ahead(arrays.listed)
        arrays.take(self.program.run(arrays.batch, arrays.scored, rows, arrays.picks, ready))
        if arrays.scored:
            self._score(arrays.spans, self.program.hidden())

    def _look_ahead(self, spans: list[Span]) -> Callable[[], None] | None:
        """Work out masks beside the step that they are for; what is returned waits for them."""
        work = [
            (span.answer.constraint, tuple(span.drawn), span.draft)
            for span in spans
            if span.answer.constraint is not None
        ]
        return Lookahead(self._beside, work).finish if work else None

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
                span.prompt_logprobs.extend(token_logprob(one) for one in scored)
            begin += len(targets_R)
