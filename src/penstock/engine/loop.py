"""The hot loop: what happened, what to do, doing it, what came of it.

It knows neither messages nor models: the mailbox turns frames into events and outcomes into frames, the runner turns
a plan into drawn tokens, and every decision is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from penstock.clock import Clock
from penstock.engine.core.events import EngineEvent
from penstock.engine.core.plan import SampledTokens, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.runner.interface import Runner


class EngineService(Protocol):
    """Where events come from and outcomes go; the worker's service, or a list in a test."""

    def drain_events(self) -> Iterable[EngineEvent]:
        """Everything that came since the last call; does not wait."""
        ...

    def on_step_begin(self, predicted_s: float) -> None:
        """A step begins now and should end after ``predicted_s`` seconds.  Not called for a plan without rows."""
        ...

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        """Tell everybody concerned.  Called once for each plan, also when both are empty."""
        ...


def unseen(plan: StepPlan) -> None:
    """For loops whose plans nobody watches."""


class EngineLoop:
    """One engine.  ``step`` is all of it; whoever calls it decides when, and waits when there is nothing to do."""

    def __init__(
        self, mailbox: EngineService, scheduler: Scheduler, runner: Runner, clock: Clock, *, max_steps: int = 1
    ) -> None:
        self.mailbox = mailbox
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.max_steps = max_steps  # how many steps may be granted at once when only answers are written
        self.on_plan: Callable[[StepPlan], None] = (
            unseen  # sees each plan before it runs: credits need not wait for a step
        )

    def step(self) -> bool:
        """One turn.  True when something happened: an event came, tokens were computed, or a request was moved."""
        now = self.clock.now()
        heard = False
        for event in self.mailbox.drain_events():
            self.scheduler.apply(event, now)
            heard = True
        plan = self.scheduler.plan(now, self.max_steps)
        self.on_plan(plan)
        for request in plan.removed:
            self.runner.remove_request(request)
        drawn, seconds = self._run(plan)
        outcome = self.scheduler.commit(plan, drawn, self.clock.now(), seconds)
        self.mailbox.publish(outcome, plan)
        moved = (
            plan.rows
            or plan.reserved
            or plan.preempted
            or plan.verified_pages
            or outcome.new_tokens
            or outcome.completed_pages
        )
        return heard or bool(moved)

    def _run(self, plan: StepPlan) -> tuple[Sequence[SampledTokens], float | None]:
        """The runner's answer, and how long it took."""
        if not plan.rows:
            return (), None
        self.mailbox.on_step_begin(plan.predicted_s)
        begin = self.clock.now()
        drawn = self.runner.run(plan)
        return drawn, self.clock.now() - begin
