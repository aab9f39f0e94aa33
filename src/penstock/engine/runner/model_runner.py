"""Plan -> arrays -> program -> drawn tokens.

Knows the model only as ``Model``, the backend only as ``Ops``, which makes one program of a whole step.  Holds no page
and no request of its own: pages are the scheduler's, and what it keeps between steps can be made again (``answer``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import Drawn, Plan
from penstock.engine.images.stage import ImageStage
from penstock.engine.models.port import Model
from penstock.engine.runner.adapters import Adapters
from penstock.engine.runner.answer import Answers, no_grammars
from penstock.engine.runner.batch import Span, StepArrays, token_logprob
from penstock.engine.runner.constraint import Lookahead
from penstock.grammar.matcher import Matcher
from penstock.kernels.operands import Array
from penstock.kernels.ops import Ops, StepProgram
from penstock.types import Grammar, RequestId

SCORED_ROWS = 64
"""Prompt positions scored at once: bounds the logits held in memory to this many rows of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Aids:
    """What a runner needs beside model and memory, for requests that ask for it.

    ``matcher_of``: a grammar's matcher at the beginning of an answer, compiled before a request with that grammar is
    planned.  ``images``: where rows of images come from, for a model that reads them.  ``adapters``: those of planned
    requests are in memory.
    """

    matcher_of: Callable[[Grammar], Matcher] = no_grammars
    images: ImageStage | None = None
    adapters: Adapters | None = None


class ModelRunner:
    """See ``engine.runner.port.Runner``."""

    def __init__(
        self,
        model: Model,
        ops: Ops,
        kv: Array,
        program: StepProgram | None = None,
        aids: Aids | None = None,
    ) -> None:
        """``kv``: memory made by ``ops.new_kv`` that holds the pages the plans speak of.

        ``program``: the model's step over this memory; by default as the backend records it.
        """
        aids = aids or Aids()
        images, adapters = aids.images, aids.adapters
        self._model = model
        self._ops = ops
        self.program = ops.record(model, kv) if program is None else program
        self._answers = Answers(aids.matcher_of)
        self._images = images
        self._kv = kv
        self._tapped: tuple[int, ...] = ()
        self._adapters = adapters
        self.adapted: StepProgram | None = None  # with what adapters add; recorded when the first of them is used
        self._arrays = StepArrays(images, ops.hidden, slot_of=None if adapters is None else adapters.slot)
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="masks")  # has a thread once a grammar was followed

    def run(self, plan: Plan) -> Sequence[Drawn]:
        if not plan.rows:
            return ()
        arrays = self._arrays
        if not arrays.go_on(plan.rows, spans=plan.steps > 1):
            arrays.fill([Span(row, self._answers.of(row.request)) for row in plan.rows])
            self._let_go(plan)
        if plan.steps == 1 and arrays.only_picks:
            self._program().run(arrays.batch, 0, [], arrays.picks)
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
        self._tapped = tapped
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
        program = self._program()
        arrays.take(program.run(arrays.batch, arrays.scored, rows, arrays.picks, ready))
        if arrays.scored:
            self._score(arrays.spans, program.hidden())

    def _program(self) -> StepProgram:
        """The model's step, or the one with adapters where a row has one: a row without has the same bits in both."""
        if self._adapters is None or self._arrays.batch.adapters_S is None:
            return self.program
        if self.adapted is None:
            self.adapted = self._ops.record(self._adapters.adapted(self._model), self._kv, tapped=self._tapped)
        return self.adapted

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
