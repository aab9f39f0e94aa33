"""The hot loop of a worker: events in, plan, run, commit, results out.

It knows neither messages nor models: the service turns messages into events and outcomes into messages, the runner
turns a plan into sampled tokens, and every decision is the scheduler's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.clock import Clock
from penstock.engine.core.events import EngineEvent
from penstock.engine.core.plan import SampledTokens, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.runner.interface import Runner


class EngineService(Protocol):
    """Where events come from and plans and outcomes go: the worker's service, or a list in a test."""

    def drain_events(self) -> Iterable[EngineEvent]:
        """Everything that came since the last call; does not wait."""
        ...

    def on_plan(self, plan: StepPlan) -> None:
        """A plan was made, and its step has not begun: what need not wait for the step is sent now."""
        ...

    def on_step_begin(self, predicted_s: float) -> None:
        """A step begins and should end after ``predicted_s`` seconds.  Not called for a plan without rows."""
        ...

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        """Send what came of a plan.  Called once for each, also when both are empty."""
        ...


class EngineHeartbeat(Protocol):
    """Shows that the loop turns (``launch.heartbeat``)."""

    def beat(self, predicted_s: float) -> None:
        """The loop turns, and its step should take ``predicted_s`` seconds; 0 for none."""
        ...


class NoHeartbeat:
    """For loops in tests and benchmarks, which are not watched."""

    def beat(self, predicted_s: float) -> None:
        pass


class EngineLoop:
    """One engine.  The caller decides when to call ``step``, and waits when there is nothing to do."""

    def __init__(
        self,
        service: EngineService,
        scheduler: Scheduler,
        runner: Runner,
        clock: Clock,
        *,
        heartbeat: EngineHeartbeat | None = None,
        max_steps: int = 1,
    ) -> None:
        """``max_steps``: how many steps a plan of decode rows alone may grant at once."""
        self.service = service
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.heartbeat: EngineHeartbeat = heartbeat or NoHeartbeat()
        self.max_steps = max_steps

    def step(self) -> bool:
        """One turn.  True when something happened: an event came, tokens were computed, or a request was moved."""
        now = self.clock.now()
        received = False
        for event in self.service.drain_events():
            self.scheduler.apply(event, now)
            received = True
        plan = self.scheduler.plan(now, self.max_steps)
        self.service.on_plan(plan)
        self.heartbeat.beat(plan.predicted_s)
        for request in plan.removed:
            self.runner.remove_request(request)
        sampled, seconds = self._run(plan)
        outcome = self.scheduler.commit(plan, sampled, self.clock.now(), seconds)
        self.service.publish(outcome, plan)
        moved = plan.rows or plan.reserved or plan.preempted or plan.verified_pages
        return received or bool(moved or outcome.new_tokens or outcome.completed_pages)

    def _run(self, plan: StepPlan) -> tuple[Sequence[SampledTokens], float | None]:
        """What the runner sampled, and how long it took."""
        if not plan.rows:
            return (), None
        self.service.on_step_begin(plan.predicted_s)
        begin = self.clock.now()
        sampled = self.runner.run(plan)
        return sampled, self.clock.now() - begin
