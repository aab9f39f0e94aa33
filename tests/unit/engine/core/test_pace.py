"""Even pace: who writes alone rests for those whose prompts are being read, within bounds, and hears everything."""

from __future__ import annotations

import pytest
from glass_model import prompt_of

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel, StepWork
from penstock.engine.core.events import AddRequest, CancelRequest, FirstTokenArrived, PagesArrived
from penstock.engine.core.pacing import MIN_REST_S, EvenPacing
from penstock.engine.core.plan import SampledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.types import BlockHash, RequestId, RequestStage, SamplingParams

STEP_S, ROW_S = 0.030, 0.005
BUDGET_S = 0.1


def rows(count: int) -> StepWork:
    work = StepWork()
    for _ in range(count):
        work.add(100, 1, 1)
    return work


def learned(step_s: float, row_s: float) -> StepCostModel:
    """Has seen steps of so long, and so much longer with each row."""
    cost = StepCostModel()
    for step in range(200):
        count = 1 + step % 8
        cost.update(rows(count), step_s + row_s * count)
    return cost


@pytest.fixture(scope="module")
def cost() -> StepCostModel:
    return learned(STEP_S, ROW_S)


@pytest.mark.parametrize(
    ("running", "awaiting", "expected_s"),
    [
        (1, 0, 0.0),  # nobody waits
        (1, 7, 0.035),  # as long as a step of eight, but no longer than twice its own
        (4, 4, 0.020),
        (8, 1, 0.005),
        (16, 1, 0.0),  # over the budget already
        (12, 12, 0.010),  # up to the budget
    ],
)
def test_a_rest_is_what_company_would_have_cost(
    cost: StepCostModel, running: int, awaiting: int, expected_s: float
) -> None:
    pace = EvenPacing(cost, BUDGET_S)
    seconds = STEP_S + ROW_S * running
    pace.on_step(rows(running), awaiting, seconds, 5.0)
    assert (pace.until - 5.0 if pace.until else 0.0) == pytest.approx(expected_s, abs=0.006)
    assert pace.until == 0.0 or pace.until - 5.0 + seconds <= min(2 * seconds, BUDGET_S) + 1e-9


def test_a_small_model_never_rests() -> None:
    pace = EvenPacing(learned(0.0004, 0.00005), BUDGET_S)
    pace.on_step(rows(1), 7, 0.00045, 5.0)
    assert pace.until == 0.0
    assert MIN_REST_S > 2 * 0.00045


def test_a_step_that_somebody_has_held_up_is_not_held_up_once_more(cost: StepCostModel) -> None:
    pace = EvenPacing(cost, BUDGET_S)
    pace.on_step(rows(1), 7, 0.069, 5.0)  # twice what was foreseen
    assert pace.until == 0.0


class Decoding:
    """A scheduler with decode legs: some are written, some wait for pages."""

    def __init__(self, **config: bool) -> None:
        self.scheduler = Scheduler(SchedulerConfig(pages=64, page_tokens=4, max_model_len=64, **config))
        self.now = 0.0

    def arrive(self, name: str, leg: RequestStage = RequestStage.DECODE) -> None:
        self.scheduler.apply(
            AddRequest(
                id=RequestId(name),
                epoch=0,
                stage=leg,
                prompt=prompt_of(0, 6),
                sampling=SamplingParams(seed=0, max_tokens=40),
                arrival=self.now,
                root=BlockHash(bytes(32)),
            ),
            self.now,
        )

    def handed_over(self, name: str) -> None:
        self.scheduler.apply(PagesArrived(id=RequestId(name), epoch=0, computed=6), self.now)
        self.scheduler.apply(FirstTokenArrived(id=RequestId(name), epoch=0, token=1), self.now)

    def step(self, seconds: float = 0.03) -> StepPlan:
        plan = self.scheduler.plan(self.now)
        drawn = [SampledTokens((1,)) if row.samples else SampledTokens() for row in plan.rows]
        self.now += seconds if plan.rows else 0.0
        self.scheduler.commit(plan, drawn, self.now, seconds if plan.rows else None)
        return plan

    def one_of_two(self) -> None:
        """The first is written, the second waits for its pages; some steps are over."""
        self.arrive("a")
        self.step()
        self.handed_over("a")
        for _ in range(3):
            self.step()
        self.arrive("b")
        while not self.step().rows:  # "b" is given room
            pass


def names(plan: StepPlan) -> list[str]:
    return [row.request.id for row in plan.rows]


def test_who_writes_alone_rests_for_who_waits_and_goes_on() -> None:
    world = Decoding(even_pace=True)
    world.one_of_two()
    assert names(world.step()) == []
    until = world.scheduler.resting_until
    assert until is not None
    assert world.now < until <= world.now + 0.03
    world.now = until
    assert names(world.step()) == ["a"]


def test_a_request_that_comes_in_a_rest_is_given_room_at_once() -> None:
    world = Decoding(even_pace=True)
    world.one_of_two()
    world.arrive("c")
    plan = world.step()
    assert [request.id for request in plan.reserved] == ["c"]
    assert world.scheduler.resting_until is not None


def test_a_prompt_of_this_workers_own_ends_the_rest() -> None:
    world = Decoding(even_pace=True)
    world.one_of_two()
    world.arrive("w", RequestStage.WHOLE)
    assert names(world.step()) == ["a", "w"]
    assert world.scheduler.resting_until is None


def test_when_nobody_waits_any_more_the_next_step_has_no_rest_behind_it() -> None:
    world = Decoding(even_pace=True)
    world.one_of_two()
    world.scheduler.apply(CancelRequest(id=RequestId("b"), epoch=0), world.now)
    assert names(world.step()) == []
    world.now = world.scheduler.resting_until or 0.0
    assert [names(world.step()) for _ in range(3)] == [["a"]] * 3


def test_without_borrowers_nobody_rests() -> None:
    world = Decoding()
    world.one_of_two()
    assert [names(world.step()) for _ in range(3)] == [["a"]] * 3
