"""Plan -> arrays -> program -> drawn tokens.

Knows the model only as ``Model``, the backend only as ``Ops``, which makes one program of a whole step.  Holds no page
and no request of its own: pages are the scheduler's, and what it keeps between steps can be made again (``answer``).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.engine.core.plan import Drawn, Plan
from penstock.engine.images.stage import ImageStage
from penstock.engine.models.port import CrossReading, Model
from penstock.engine.runner.adapters import Adapters
from penstock.engine.runner.answer import Answers, no_grammars
from penstock.engine.runner.asked import go_on, look_ahead, score
from penstock.engine.runner.batch import StepArrays
from penstock.engine.runner.constraint import MaskThreads, Patience
from penstock.engine.runner.crossing import SourceWriter
from penstock.engine.runner.span import Span
from penstock.grammar.matcher import Matcher
from penstock.kernels.operands import Array
from penstock.kernels.ops import Ops, RunsAhead, StepProgram
from penstock.types import Grammar, RequestId


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
    patience: Patience | None = None  # with masks of grammars


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
        self._sources = None
        if isinstance(model, CrossReading):
            if images is None:
                raise ValueError("what an encoder makes is read, and there is no encoder")
            self._sources = SourceWriter(model, images, ops, kv)
        self._kv = kv
        self._tapped: tuple[int, ...] = ()
        self._adapters = adapters
        self.adapted: StepProgram | None = None  # with what adapters add; recorded when the first of them is used
        self._arrays = StepArrays(images, ops.hidden, slot_of=None if adapters is None else adapters.slot)
        self._masks = MaskThreads(aids.patience)

    def run(self, plan: Plan) -> Sequence[Drawn]:
        if self._sources is None or not self._sources.wanted(plan.rows):
            return self._run(plan)
        left = self._sources.write(plan.rows)
        self._let_go(plan)
        drawn = iter(self._run(replace(plan, rows=tuple(row for row in left if row is not None))))
        return [Drawn() if row is None else next(drawn) for row in left]

    def _run(self, plan: Plan) -> Sequence[Drawn]:
        if not plan.rows:
            return ()
        arrays = self._arrays
        if not arrays.go_on(plan.rows, spans=plan.steps > 1):
            arrays.fill([Span(row, self._answers.of(row.request)) for row in plan.rows])
            self._let_go(plan)
        if plan.steps == 1 and arrays.only_picks:
            self._program().run(arrays.batch, 0, [], arrays.picks)
            return [Drawn((token,)) for token in arrays.picks.tokens_F.tolist()]
        done = self._run_ahead(plan.steps) if plan.steps > 1 else 0
        if not done:
            self._step(may_sit_out=plan.steps == 1)
            done = 1
        for _ in range(plan.steps - done):
            arrays.advance()
            self._step(may_sit_out=False)
        go_on(arrays.listed, self._masks)
        return arrays.drawn()

    def sitting_out(self) -> Set[RequestId]:
        """See ``Scheduler.sitting_out``."""
        return self._masks.sitting_out()

    def _run_ahead(self, steps: int) -> int:
        """Steps that the program can take without the host in between; how many it took."""
        arrays, program = self._arrays, self._program()
        if not arrays.only_picks or not isinstance(program, RunsAhead):
            return 0
        if not program.runs_ahead(arrays.batch, arrays.picks):
            return 0
        tokens_NF = program.run_ahead(arrays.picks, steps, arrays.ahead)
        arrays.take_ahead(tokens_NF)
        return len(tokens_NF)

    def forget(self, request: RequestId) -> None:
        self._answers.forget(request)
        self._masks.forget(request)
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

    def _step(self, *, may_sit_out: bool) -> None:
        """Compute every span; draw and score what was asked for.  ``may_sit_out``: rows whose masks are late may."""
        arrays = self._arrays
        may_sit_out = may_sit_out and not arrays.keeps_states
        rows, ready = arrays.draws(), look_ahead(arrays.listed, self._masks, may_sit_out=may_sit_out)
        program = self._program()
        arrays.take(program.run(arrays.batch, arrays.scored, rows, arrays.picks, ready))
        if arrays.scored:
            score(self._model, self._ops, arrays.spans, program.hidden())

    def _program(self) -> StepProgram:
        """The model's step, or the one with adapters where a row has one: a row without has the same bits in both."""
        if self._adapters is None or self._arrays.batch.adapters_S is None:
            return self.program
        if self.adapted is None:
            self.adapted = self._ops.record(self._adapters.adapted(self._model), self._kv, tapped=self._tapped)
        return self.adapted
