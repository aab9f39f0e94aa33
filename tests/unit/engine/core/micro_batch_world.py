"""The engine's world with several micro-batches: each is planned when it is free and ends in any order.

A device computes at some time between the beginning and the end of a step, in the pages that it was told of at the
beginning, whoever has them by then.  So does this one: at once, and then nobody may have written there until the end;
or at the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from random import Random

from engine_world import World
from glass_model import GlassRunner, context_of, extend

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepOutcome, StepPlan
from penstock.engine.core.request import PageTable, Request, RequestStatus


class MicroBatchWorld(World):
    """``step``: some of the micro-batches that are free are planned, and some of those in flight end."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        seed: int,
        micro_batches: int = 2,
        max_steps: int = 1,
        clock_s: float = 0.0,
        in_order: bool = False,
    ) -> None:
        """``in_order``: micro-batches are computed and end in the order in which they began, as in a pipeline."""
        super().__init__(config, max_steps=max_steps, clock_s=clock_s, micro_batches=micro_batches, in_order=in_order)
        self.micro_batches = micro_batches
        self.in_order = in_order
        self.followed = 0  # chunks that began while another one of their prompt was in flight
        self.random = Random(seed)
        self.under_way: dict[int, tuple[StepPlan, StepPlan, Sequence[SampledTokens] | None, float]] = {}
        self.side_by_side = 0  # ends of one while another was in flight
        self.given_up = 0  # pages held only because they are still written to
        self.pressed = 0  # times that a request of one waited to give way to another

    def step(self, *, cancel_in_flight: str | None = None) -> StepPlan:
        begun = [self.begin(number) for number in self.to_plan()]
        self.now += self.clock_s
        if cancel_in_flight is not None:
            self.cancel(cancel_in_flight)
        self.given_up += sum(map(len, (own() for own in self.scheduler.memory.foreign_owners)))
        ended = [number for number in self.under_way if self.random.random() < 0.6] or list(self.under_way)[:1]
        if self.in_order:
            ended = list(self.under_way)[: len(ended)]
        else:
            self.random.shuffle(ended)
        rows = tuple(row for plan in begun for row in plan.rows)
        self.outcome = StepOutcome()
        for number in ended:
            self.side_by_side += len(self.under_way) > 1
            rows += self.end(number)
        self.plan = StepPlan(
            rows=rows,
            reserved=tuple(request for plan in begun for request in plan.reserved),
            returned=tuple(one for plan in begun for one in plan.returned),
            preempted=sum(plan.preempted for plan in begun),
        )
        return self.plan

    def to_plan(self) -> list[int]:
        own = self.scheduler.micro_batches
        self.pressed += any(own.excluded(number) for number in range(self.micro_batches))
        return [number for number in own.free if not self.under_way or self.random.random() < 0.7]

    def begin(self, number: int) -> StepPlan:
        waiting = {r for r in self.requests() if r.status is RequestStatus.WAITING}
        excluded = {
            (r, r.preemptions)
            for r in self.scheduler.micro_batches.excluded(number)
            if r.status is RequestStatus.RUNNING
        }
        plan = self.scheduler.plan(self.now, self.max_steps, number)
        self.several = self.several or plan.steps > 1
        self._check_plan(plan, waiting)
        assert not excluded & {(row.request, row.request.preemptions) for row in plan.rows}
        elsewhere = [row for own in self.under_way.values() for row in own[0].rows]
        both = {row.request for row in plan.rows} & {row.request for row in elsewhere}
        assert self.in_order or not both
        assert not any(row.samples for row in elsewhere if row.request in both)
        self.followed += len(both)
        if plan.rows:
            frozen = StepPlan(rows=tuple(map(frozen_row, plan.rows)), steps=plan.steps)
            later = self.in_order and any(own[2] is None for own in self.under_way.values())
            early = self.runner.run(frozen) if self.random.random() < 0.5 and not later else None
            self.under_way[number] = (plan, frozen, early, self.now)
        else:
            self.take(self.scheduler.commit(plan, (), self.now))
        self.check()
        return plan

    def end(self, number: int) -> tuple[ScheduledTokens, ...]:
        plan, frozen, drawn, begun = self.under_way.pop(number)
        if drawn is None:
            drawn = self.runner.run(frozen)
        else:
            for row in frozen.rows:
                check_undisturbed(self.runner, row)
        self.take(self.scheduler.commit(plan, drawn, self.now, self.now - begun or None))
        self.check()
        return plan.rows

    def take(self, outcome: StepOutcome) -> None:
        self._deliver(outcome)
        self.outcome.new_tokens += outcome.new_tokens

    def run_to_completion(self, limit: int = 3000) -> None:
        super().run_to_completion(limit)
        while self.under_way:  # of requests that have gone
            self.step()
        assert self.scheduler.memory.pool.leased == 0
        assert not any(own() for own in self.scheduler.memory.foreign_owners)


def frozen_row(row: ScheduledTokens) -> ScheduledTokens:
    """What a device is told: the pages of now."""
    request = copy(row.request)
    request.computed = row.start  # by then, where chunks follow each other
    request.page_tables = [frozen_holding(own) for own in request.page_tables]
    request.output = list(request.output)
    return ScheduledTokens(request, row.start, row.count, row.samples, row.draft)


def frozen_holding(own: PageTable) -> PageTable:
    same = PageTable(page_tokens=own.page_tokens)
    same.first, same.pages = own.first, list(own.pages)
    return same


def check_undisturbed(runner: GlassRunner, row: ScheduledTokens) -> None:
    """What the row has written stands there still."""
    request: Request = row.request
    end = row.start + row.count
    tokens = request.tokens(0, end)
    for group, reach in enumerate(runner.reaches):
        if reach.state_interval is None:
            contexts, context = [], context_of(tokens[: row.start])
            for token in tokens[row.start :]:
                context = extend(context, token)
                contexts.append(context)
            first = max(row.start, request.page_tables[group].first * runner.size)
            runner.check(request, group, [0] * row.start + contexts, first)
