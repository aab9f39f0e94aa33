"""The hot loop of a worker: events in, plan, run, commit, results out.

It knows neither messages nor models: the service turns messages into events and outcomes into messages, the runner
turns a plan into sampled tokens, and every decision is the scheduler's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Protocol

from penstock.clock import Clock
from penstock.engine.core.events import EngineEvent
from penstock.engine.core.plan import SampledTokens, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.runner.interface import PipelinedRunner, Runner


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
        received = self._drain(now)
        plan = self._plan(now)
        self.heartbeat.beat(plan.predicted_s)
        moved = self._commit(plan, *self._run(plan))
        return received or moved

    def _drain(self, now: float) -> bool:
        """Apply all events that came; whether there were any."""
        received = False
        for event in self.service.drain_events():
            self.scheduler.apply(event, now)
            received = True
        return received

    def _plan(self, now: float, micro_batch: int = 0) -> StepPlan:
        plan = self.scheduler.plan(now, self.max_steps, micro_batch)
        self.service.on_plan(plan)
        for request in plan.removed:
            self.runner.remove_request(request)
        return plan

    def _commit(self, plan: StepPlan, sampled: Sequence[SampledTokens], seconds: float | None) -> bool:
        """Take up what came of a plan; whether anything happened."""
        outcome = self.scheduler.commit(plan, sampled, self.clock.now(), seconds)
        self.service.publish(outcome, plan)
        moved = plan.rows or plan.reserved or plan.preempted or plan.verified_pages
        return bool(moved or outcome.new_tokens or outcome.completed_pages)

    def _run(self, plan: StepPlan) -> tuple[Sequence[SampledTokens], float | None]:
        """What the runner sampled, and how long it took."""
        if not plan.rows:
            return (), None
        self.service.on_step_begin(plan.predicted_s)
        begin = self.clock.now()
        sampled = self.runner.run(plan)
        return sampled, self.clock.now() - begin


class PipelinedLoop(EngineLoop):
    """The loop of an engine whose model has stages: while the last one computes a plan, the others compute later ones.

    Each turn plans every micro-batch that is free, lets the first stage begin it, and takes the oldest plan in flight
    through the last stage.
    """

    def __init__(
        self,
        service: EngineService,
        scheduler: Scheduler,
        runner: PipelinedRunner,
        clock: Clock,
        *,
        heartbeat: EngineHeartbeat | None = None,
    ) -> None:
        super().__init__(service, scheduler, runner, clock, heartbeat=heartbeat)
        self._stages = runner
        self._in_flight: deque[tuple[StepPlan, float]] = deque()  # with when it was launched
        self._ended = 0.0  # the step before

    def step(self) -> bool:
        now = self.clock.now()
        moved = self._drain(now)
        for micro_batch in self.scheduler.micro_batches.free:
            plan = self._plan(now, micro_batch)
            if plan.rows:
                self._stages.launch(plan)
                self._in_flight.append((plan, now))
            else:
                moved = self._commit(plan, (), None) or moved
        self.heartbeat.beat(sum(plan.predicted_s for plan, _ in self._in_flight))
        if not self._in_flight:
            return moved
        plan, launched = self._in_flight.popleft()
        self.service.on_step_begin(plan.predicted_s)
        sampled = self.runner.run(plan)
        begun, self._ended = max(launched, self._ended), self.clock.now()
        self._commit(plan, sampled, self._ended - begun)
        return True
