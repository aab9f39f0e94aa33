"""Several micro-batches over one scheduler: in whatever order they end, answers and pages are those of one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import replace
from random import Random

import pytest
from engine_world import World
from glass_model import ROOT, prompt_of
from hypothesis import HealthCheck, event, given, settings
from hypothesis import strategies as st
from micro_batch_world import MicroBatchWorld
from test_any_interleaving import MOVES, Move, apply, configs, moves

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest, CancelRequest, CreditGranted, PagesReleased
from penstock.engine.core.plan import SampledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.types import Qos, RequestId, RequestStage, SamplingParams, ServiceClass


@given(
    config=configs(),
    micro_batches=st.integers(2, 4),
    max_steps=st.sampled_from([1, 1, 4]),
    seed=st.integers(0, 999),
    moves=moves,
)
@settings(
    max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_no_page_is_lost_and_every_answer_is_right(
    config: SchedulerConfig, micro_batches: int, max_steps: int, seed: int, moves: list[Move]
) -> None:
    """Cancelled, preempted, replaced by a later epoch, released: at any time, also while in flight."""
    world = MicroBatchWorld(config, seed=seed, micro_batches=micro_batches, max_steps=max_steps, clock_s=0.002)
    for move in moves:
        apply(world, move)
        world.check()
    world.run_to_completion()
    event(f"side by side {world.side_by_side > 0}, several {world.several}")
    event(f"pages of those who went {world.given_up > 0}")
    event(f"gave way to another micro-batch {world.pressed > 0}")
    event(f"preempted {min(world.scheduler.preemptions, 3)}, yielded {world.scheduler.yields > 0}")


@given(config=configs(), stages=st.integers(2, 4), seed=st.integers(0, 999), moves=moves)
@settings(
    max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_chunks_that_follow_each_other_lose_nothing(
    config: SchedulerConfig, stages: int, seed: int, moves: list[Move]
) -> None:
    world = MicroBatchWorld(config, seed=seed, micro_batches=stages, clock_s=0.002, in_order=True)
    for move in moves:
        apply(world, move)
        world.check()
    world.run_to_completion()
    event(f"chunks followed {world.followed > 0}")
    event(f"preempted {min(world.scheduler.preemptions, 3)}, pages of those who went {world.given_up > 0}")


def test_the_chunks_of_a_prompt_pass_the_stages_one_behind_another() -> None:
    own = Scheduler(SchedulerConfig(pages=16, max_model_len=128, max_chunk_tokens=16), micro_batches=3, in_order=True)
    own.apply(request("long", 70), 0.0)
    plans = [own.plan(0.0, 1, number) for number in range(3)]
    assert [[(row.start, row.count, row.samples) for row in plan.rows] for plan in plans] == [
        [(0, 16, False)],
        [(16, 16, False)],
        [(32, 16, False)],
    ]
    for turn, (start, count) in enumerate(((48, 16), (64, 6))):
        own.commit(plans[turn], [SampledTokens()], 0.0)
        plans.append(own.plan(0.0, 1, turn))
        assert [(row.start, row.count, row.samples) for row in plans[-1].rows] == [(start, count, count == 6)]
    own.commit(plans[2], [SampledTokens()], 0.0)
    assert own.plan(0.0, 1, 2).rows == ()  # its last token is not drawn yet


def test_micro_batches_come_in_each_others_way() -> None:
    """Which the random ones above seldom do: pages are given up under way, and requests are excluded to give way."""
    pressed = given_up = 0
    for seed in (10, 18, 47):
        random = Random(seed)
        config = SchedulerConfig(pages=11, page_tokens=4, max_model_len=32, max_chunk_tokens=3)
        world = MicroBatchWorld(config, seed=seed, clock_s=0.002)
        for _ in range(60):
            apply(world, (random.choice(MOVES), *(random.randrange(1000) for _ in range(3))))
        world.run_to_completion()
        pressed, given_up = pressed + world.pressed, given_up + world.given_up
    assert pressed > 0
    assert given_up > 0


def request(name: str, tokens: int, *, answer: int = 8, rank: int = 0, family: int = 0) -> AddRequest:
    return AddRequest(
        id=RequestId(name),
        epoch=0,
        stage=RequestStage.WHOLE,
        prompt=prompt_of(family, tokens),
        sampling=SamplingParams(seed=1, max_tokens=answer),
        arrival=float(rank),
        root=ROOT,
        qos=Qos(service=ServiceClass(rank)),
    )


def scheduler(pages: int = 16, **changed: int) -> Scheduler:
    fields = {"page_tokens": 4, "max_model_len": 32, "max_chunk_tokens": 8}
    return Scheduler(SchedulerConfig(pages=pages, **{**fields, **changed}), micro_batches=2)


def names(plan: StepPlan) -> list[str]:
    return [row.request.id for row in plan.rows]


def drawn(plan: StepPlan) -> list[SampledTokens]:
    return [SampledTokens((7,) * plan.steps) if row.samples else SampledTokens() for row in plan.rows]


def arrive(own: Scheduler, *events: AddRequest) -> None:
    for one in events:
        own.apply(one, 0.0)


def run(own: Scheduler, micro_batches: Iterable[int]) -> list[StepPlan]:
    """Plan these one after the other, each committed at once."""
    plans = []
    for number in micro_batches:
        plans.append(own.plan(0.0, 1, number))
        own.commit(plans[-1], drawn(plans[-1]), 0.0)
    return plans


def test_rows_are_shared_evenly_and_none_is_in_two_plans() -> None:
    own = scheduler()
    arrive(own, *(request(name, 3, family=n) for n, name in enumerate("abcd")))
    run(own, [0])
    first, second = own.plan(0.0, 1, 0), own.plan(0.0, 1, 1)
    assert (names(first), names(second)) == (["a", "b"], ["c", "d"])
    assert list(own.micro_batches.free) == []
    own.commit(second, drawn(second), 0.0)
    assert list(own.micro_batches.free) == [1]
    assert [names(plan) for plan in run(own, [1, 1])] == [["c", "d"]] * 2, "the first is still in flight"
    own.commit(first, drawn(first), 0.0)
    assert own.check_leaks().total == 0


def test_a_request_without_a_page_leaves_its_place_to_the_one_that_has_them() -> None:
    own = scheduler(pages=8, page_tokens=1, max_chunk_tokens=1, max_model_len=8)
    decode = request("decode", 2, answer=4)
    prefill = replace(request("prefill", 5, family=1), stage=RequestStage.PREFILL)
    arrive(own, decode, prefill, CreditGranted(id=prefill.id, epoch=0))
    plans = run(own, [0, 1] * 2)
    assert own.memory.pool.available == 0
    assert names(plans[-1]) == ["prefill"], "no page can be taken from it, and it is the last in order"
    assert names(run(own, [0, 1, 0])[-1]) == ["prefill"]
    own.apply(PagesReleased(id=prefill.id, epoch=0), 0.0)
    assert names(run(own, [0])[0]) == ["decode"]


def test_a_micro_batch_is_planned_once() -> None:
    own = scheduler()
    plan = own.plan(0.0, 1, 0)
    for number in (0, 2):
        with pytest.raises(RuntimeError, match="not been committed"):
            own.plan(0.0, 1, number)
    other = own.plan(0.0, 1, 1)
    own.commit(other, (), 0.0)
    own.commit(plan, (), 0.0)
    with pytest.raises(RuntimeError, match="not the plan in flight"):
        own.commit(plan, (), 0.0)


def test_pages_of_a_request_that_leaves_are_free_when_its_step_is_committed() -> None:
    own = scheduler(pages=8)
    arrive(own, request("a", 30, answer=2))
    chunk = own.plan(0.0, 1, 0)
    own.apply(CancelRequest(id=RequestId("a"), epoch=0), 0.0)
    arrive(own, request("b", 3))
    assert own.memory.pool.available == 0
    assert own.memory.has_foreign_pages
    assert own.check_leaks().total == 0
    assert names(own.plan(0.0, 1, 1)) == []
    assert own.commit(chunk, drawn(chunk), 0.0).new_tokens == []
    assert own.memory.pool.available == 8
    assert own.check_leaks().total == 0
    assert names(own.plan(0.0, 1, 0)) == ["b"]


def test_a_later_epoch_begins_while_the_earlier_one_is_in_flight() -> None:
    own = scheduler()
    arrive(own, request("a", 20))
    chunk = own.plan(0.0, 1, 0)
    arrive(own, replace(request("a", 2), epoch=1))
    own.commit(chunk, drawn(chunk), 0.0)
    (plan,) = run(own, [0])
    assert [(row.request.epoch, row.start) for row in plan.rows] == [(1, 0)]
    assert own.check_leaks().total == 0


def test_a_request_in_flight_gives_way_once_its_step_is_committed() -> None:
    """The youngest would be preempted for the answer's next page, but is in flight: the answer goes first next."""
    own = scheduler(pages=8)
    arrive(own, request("old", 4, answer=20))
    run(own, [0])
    step = own.plan(0.0, 1, 0)
    arrive(own, replace(request("new", 20, family=1), arrival=1.0))
    chunk = own.plan(0.0, 1, 1)
    assert names(chunk) == ["new"]
    own.commit(step, drawn(step), 0.0)
    steps = run(own, [0] * 8)
    assert [names(step) for step in steps] == [["old"]] * 7 + [[]]
    assert list(own.micro_batches.free) == [0]
    own.commit(chunk, drawn(chunk), 0.0)
    assert list(own.micro_batches.free) == [0, 1]
    (step,) = run(own, [0])
    assert (names(step), step.preempted) == (["old"], 1)
    assert own.check_leaks().total == 0


def test_a_preemption_target_is_computed_no_further() -> None:
    own = scheduler(pages=13)
    arrive(own, request("a", 4, answer=20))
    arrive(own, *(request(name, 3, answer=20, family=n) for n, name in enumerate("bc", 1)))
    run(own, [0])
    step = own.plan(0.0, 1, 0)
    arrive(own, replace(request("new", 24, family=3), arrival=1.0))
    chunk = own.plan(0.0, 1, 1)
    assert (names(step), names(chunk)) == (["a", "b"], ["c", "new"])
    while names(step) != ["b"]:
        own.commit(step, drawn(step), 0.0)
        step = own.plan(0.0, 1, 0)
    assert {request.id for request in own.micro_batches.excluded(1)} == {"new"}
    own.commit(chunk, drawn(chunk), 0.0)
    assert "new" not in names(*run(own, [1]))
    own.apply(CancelRequest(id=RequestId("new"), epoch=0), 0.0)
    own.commit(step, drawn(step), 0.0)
    assert not own.micro_batches.excluded(1)
    assert own.check_leaks().total == 0


@pytest.mark.parametrize("seed", range(3))
def test_several_micro_batches_draw_what_one_draws(seed: int) -> None:
    """Of one list of requests, the same tokens whatever the micro-batches."""
    config = SchedulerConfig(pages=20, page_tokens=4, max_model_len=32, max_chunk_tokens=8)
    random, found = Random(seed), []
    events = [request(f"r{n}", random.randint(1, 20), answer=random.randint(1, 9), family=n % 2) for n in range(12)]
    for world in (World(config), MicroBatchWorld(config, seed=seed, micro_batches=2 + seed, max_steps=2)):
        for one in events:
            world.arrive(one)
        world.run_to_completion()
        found.append({name: (client.tokens, client.finish) for name, client in world.clients.items()})
    assert found[0] == found[1]
