"""The hot loop of an engine with two lanes: prompts are read in one, answers written in the other, side by side.

::

    reading  | chunk ................. | chunk ................. |
    writing  | step | step | step | step | step | step | step |
               ^ a lane is planned as soon as it is free, and committed as soon as it is done

As ``loop``, but that nothing here waits: whoever drives it sleeps until a lane is done or a message comes.  It knows
neither messages nor models, nor how the lanes share a device.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.clock import Clock
from penstock.engine.core.plan import Lane, Plan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import Mailbox, unseen
from penstock.engine.runner.port import LaneRunner


class LaneLoop:
    """One engine.  ``step`` is a turn of it; whoever calls it waits when nothing happened."""

    def __init__(
        self, mailbox: Mailbox, scheduler: Scheduler, runner: LaneRunner, clock: Clock, *, max_steps: int = 1
    ) -> None:
        self.mailbox = mailbox
        self.scheduler = scheduler
        self.runner = runner
        self.clock = clock
        self.max_steps = max_steps  # see ``EngineLoop``
        self.on_plan: Callable[[Plan], None] = unseen
        self._begun: dict[Lane, tuple[Plan, float]] = {}

    def step(self) -> bool:
        """One turn.  True when something happened: an event came, a lane was done or has begun, a request was moved.

        Lanes are committed before any is planned, so that a plan knows all that is known.
        """
        heard = False
        for event in self.mailbox.drain():
            self.scheduler.apply(event, self.clock.now())
            heard = True
        # All lanes are asked: one that was over before it could say so says so now, and is not heard while it idles.
        done = [lane for lane in Lane if self.runner.done(lane) and lane in self._begun]
        for lane in done:
            self._finish(lane)
        moved = [self._plan(lane) for lane in self.scheduler.free_lanes()]
        return heard or bool(done) or any(moved)

    def _plan(self, lane: Lane) -> bool:
        plan = self.scheduler.plan(self.clock.now(), self.max_steps, lane)
        self.on_plan(plan)
        for request in plan.gone:
            self.runner.forget(request)
        if plan.rows:
            self.mailbox.about_to_run(plan.predicted_s)
            self._begun[lane] = (plan, self.clock.now())
            self.runner.begin(plan)
            return True
        outcome = self.scheduler.commit(plan, (), self.clock.now())
        self.mailbox.publish(outcome, plan)
        return bool(plan.reserved or plan.preempted or plan.checked or outcome.progress or outcome.pages_done)

    def _finish(self, lane: Lane) -> None:
        plan, begun = self._begun.pop(lane)
        drawn = self.runner.finish(lane)
        now = self.clock.now()
        self.mailbox.publish(self.scheduler.commit(plan, drawn, now, now - begun), plan)
