"""Two plans at once: a program and arrays of its own for each lane, over the same pages.

A request's rows are in one lane at a time; what is kept of it between steps is shared, so it goes on in the other lane
as if there were none.  What a device cannot leave under way (rows with adapters, and those whose tokens the host must
see before the next step) is computed before ``begin`` returns, while the other lane goes on.

Knows the model only as ``Model``, the programs only as ``LaneProgram``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set

from penstock.engine.core.plan import Drawn, Lane, Plan
from penstock.engine.models.port import Model
from penstock.engine.runner.answer import Answers
from penstock.engine.runner.asked import go_on, look_ahead, score
from penstock.engine.runner.batch import StepArrays
from penstock.engine.runner.constraint import MaskThreads
from penstock.engine.runner.model_runner import Aids
from penstock.engine.runner.span import Span
from penstock.kernels.lanes import LaneProgram, Lanes
from penstock.kernels.operands import Array
from penstock.kernels.ops import Ops, StepProgram
from penstock.kernels.program import DirectProgram
from penstock.types import RequestId


class DeviceLanes:
    """See ``port.LaneRunner``.  For models that read no images and have no encoder."""

    def __init__(self, model: Model, ops: Ops, kv: Array, programs: Lanes, aids: Aids | None = None) -> None:
        """``kv``: the memory that both programs were made for."""
        aids = aids or Aids()
        self._answers = Answers(aids.matcher_of)
        self._masks = MaskThreads(aids.patience)
        self._lanes = {
            Lane.READING: _LaneWork(model, ops, kv, programs.reading, (aids, self._masks)),
            Lane.WRITING: _LaneWork(model, ops, kv, programs.writing, (aids, self._masks)),
        }

    @property
    def descriptors(self) -> Sequence[int]:
        """Readable when a lane may be done."""
        found = (lane.program.descriptor() for lane in self._lanes.values())
        return [descriptor for descriptor in found if descriptor is not None]

    def begin(self, plan: Plan) -> None:
        if plan.lane is None:
            raise RuntimeError("a plan for no lane")
        self._lanes[plan.lane].begin(plan, self._answers)

    def done(self, lane: Lane) -> bool:
        return self._lanes[lane].done()

    def finish(self, lane: Lane) -> Sequence[Drawn]:
        return self._lanes[lane].finish()

    def forget(self, request: RequestId) -> None:
        self._answers.forget(request)
        self._masks.forget(request)

    def sitting_out(self) -> Set[RequestId]:
        """See ``Scheduler.sitting_out``."""
        return self._masks.sitting_out()


class _LaneWork:
    """One lane: what is under way in it."""

    def __init__(
        self, model: Model, ops: Ops, kv: Array, program: LaneProgram, beside: tuple[Aids, MaskThreads]
    ) -> None:
        aids, masks = beside
        self.program = program
        self._model = model
        self._ops = ops
        self._kv = kv
        self._adapters = aids.adapters
        slot_of = None if aids.adapters is None else aids.adapters.slot
        self._arrays = StepArrays(None, ops.hidden, slot_of=slot_of)
        self._masks = masks
        self._ahead = False  # several steps are under way
        self._over = True  # nothing is under way
        self._may_sit_out = False  # those rows whose masks are late

    def begin(self, plan: Plan, answers: Answers) -> None:
        arrays = self._arrays
        with self.program.on():
            if not arrays.go_on(plan.rows, spans=True):
                arrays.fill([Span(row, answers.of(row.request)) for row in plan.rows])
            self._may_sit_out = plan.steps == 1 and not arrays.keeps_states
            left = plan.steps - self._begin(plan.steps)
            while left:
                self._take()
                arrays.advance()
                left -= self._begin(left)

    def done(self) -> bool:
        return self.program.done() or self._over  # the program is always asked: that silences its descriptor

    def finish(self) -> Sequence[Drawn]:
        self._take()
        go_on(self._arrays.listed, self._masks)
        return self._arrays.drawn()

    def _begin(self, steps: int) -> int:
        """As many of the steps as need no host in between, one at least."""
        arrays = self._arrays
        self._over = self._ahead = False
        if arrays.batch.adapters_S is not None:
            self._compute_now()
            return 1
        if steps > 1 and arrays.only_picks and self.program.runs_ahead(arrays.batch, arrays.picks):
            begun = self.program.begin_ahead(arrays.picks, steps, arrays.ahead)
            if begun:
                self._ahead = True
                return begun
        rows, ready = arrays.draws(), self._ahead_of(arrays)
        self.program.begin(arrays.batch, arrays.scored, rows, arrays.picks, ready)
        return 1

    def _take(self) -> None:
        """What the last of them has brought goes to the spans."""
        arrays = self._arrays
        if self._over:
            return
        self._over = True
        if self._ahead:
            arrays.take_ahead(self.program.finish_ahead())
            return
        arrays.take(self.program.finish())
        if arrays.scored:
            with self.program.on():
                score(self._model, self._ops, arrays.spans, self.program.hidden())

    def _ahead_of(self, arrays: StepArrays) -> Callable[[], None] | None:
        return look_ahead(arrays.listed, self._masks, may_sit_out=self._may_sit_out)

    def _compute_now(self) -> None:
        """Rows with adapters, operation by operation; they are over when this returns."""
        arrays = self._arrays
        assert self._adapters is not None, "a row has an adapter and nobody keeps any"
        program: StepProgram = DirectProgram(self._ops, self._adapters.adapted(self._model), self._kv)
        rows, ready = arrays.draws(), self._ahead_of(arrays)
        arrays.take(program.run(arrays.batch, arrays.scored, rows, arrays.picks, ready))
        if arrays.scored:
            score(self._model, self._ops, arrays.spans, program.hidden())
        self.program.rest()
        self._over = True
