"""Two lanes over one scheduler: whatever ends in whatever order, answers and pages are those of one lane."""

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
from lane_world import LaneWorld
from test_any_interleaving import MOVES, Move, apply, configs, moves

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import Arrive, Cancelled, Drawn, Lane, Plan
from penstock.engine.core.scheduler import Scheduler
from penstock.types import Claim, Leg, RequestId, SamplingParams, ServiceClass

READING, WRITING = Lane.READING, Lane.WRITING


@given(config=configs(), max_steps=st.sampled_from([1, 1, 4]), seed=st.integers(0, 999), moves=moves)
@settings(
    max_examples=int(os.environ.get("PENSTOCK_EXAMPLES", "40")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
def test_no_page_is_lost_and_every_answer_is_right(
    config: SchedulerConfig, max_steps: int, seed: int, moves: list[Move]
) -> None:
    """Cancelled, preempted, replaced by a later epoch, released: at any time, also while a lane computes."""
    world = LaneWorld(config, seed=seed, max_steps=max_steps, clock_s=0.002)
    for move in moves:
        apply(world, move)
        world.check()
    world.run_to_completion()
    event(f"side by side {world.side_by_side > 0}, several {world.several}")
    event(f"pages of those who went {world.given_up > 0}")
    event(f"gave way to the other lane {world.pressed > 0}")
    event(f"preempted {min(world.scheduler.preemptions, 3)}, yielded {world.scheduler.yields > 0}")


def test_lanes_come_in_each_others_way() -> None:
    """Which the random ones above seldom do: pages are given up under way, and somebody is kept out to give way."""
    pressed = given_up = 0
    for seed in (10, 18, 47):
        random = Random(seed)
        config = SchedulerConfig(pages=11, page_tokens=4, max_model_len=32, max_chunk_tokens=3)
        world = LaneWorld(config, seed=seed, clock_s=0.002)
        for _ in range(60):
            apply(world, (random.choice(MOVES), *(random.randrange(1000) for _ in range(3))))
        world.run_to_completion()
        pressed, given_up = pressed + world.pressed, given_up + world.given_up
    assert pressed > 0
    assert given_up > 0


def request(name: str, tokens: int, *, answer: int = 8, rank: int = 0, family: int = 0) -> Arrive:
    return Arrive(
        id=RequestId(name),
        epoch=0,
        leg=Leg.WHOLE,
        prompt=prompt_of(family, tokens),
        sampling=SamplingParams(seed=1, max_tokens=answer),
        arrival=float(rank),
        root=ROOT,
        claim=Claim(service=ServiceClass(rank)),
    )


def scheduler(pages: int = 16, **changed: int) -> Scheduler:
    fields = {"page_tokens": 4, "max_model_len": 32, "max_chunk_tokens": 8}
    return Scheduler(SchedulerConfig(pages=pages, **{**fields, **changed}))


def names(plan: Plan) -> list[str]:
    return [row.request.id for row in plan.rows]


def drawn(plan: Plan) -> list[Drawn]:
    return [Drawn((7,) * plan.steps) if row.samples else Drawn() for row in plan.rows]


def arrive(own: Scheduler, *events: Arrive) -> None:
    for one in events:
        own.apply(one, 0.0)


def run(own: Scheduler, lanes: Iterable[Lane]) -> list[Plan]:
    """Plan these lanes one after the other, each committed at once."""
    plans = []
    for lane in lanes:
        plans.append(own.plan(0.0, 1, lane))
        own.commit(plans[-1], drawn(plans[-1]), 0.0)
    return plans


def test_answers_go_on_while_a_prompt_is_read() -> None:
    own = scheduler()
    arrive(own, request("a", 3))
    run(own, [READING])
    arrive(own, request("b", 20, family=1))
    chunk = own.plan(0.0, 1, READING)
    assert names(chunk) == ["b"]
    for _ in range(3):
        (step,) = run(own, [WRITING])
        assert names(step) == ["a"]
    assert own.free_lanes() == [WRITING]
    own.commit(chunk, drawn(chunk), 0.0)
    assert [names(plan) for plan in run(own, [WRITING, READING, READING, WRITING])] == [["a"], ["b"], ["b"], ["a", "b"]]
    assert own.check().total == 0


def test_a_lane_is_planned_once_and_not_beside_a_whole_step() -> None:
    own = scheduler()
    plan = own.plan(0.0, 1, READING)
    for lane in (READING, None):
        with pytest.raises(RuntimeError, match="not been committed"):
            own.plan(0.0, 1, lane)
    other = own.plan(0.0, 1, WRITING)
    own.commit(other, (), 0.0)
    own.commit(plan, (), 0.0)
    with pytest.raises(RuntimeError, match="not the plan in flight"):
        own.commit(plan, (), 0.0)
    own.plan(0.0)
    with pytest.raises(RuntimeError, match="not been committed"):
        own.plan(0.0, 1, WRITING)


def test_pages_of_who_goes_are_given_out_behind_the_lane() -> None:
    own = scheduler(pages=8)
    arrive(own, request("a", 30, answer=2))
    chunk = own.plan(0.0, 1, READING)
    own.apply(Cancelled(id=RequestId("a"), epoch=0), 0.0)
    arrive(own, request("b", 3))
    assert own.memory.pool.available == 0
    assert own.memory.importing
    assert own.check().total == 0
    assert names(own.plan(0.0, 1, WRITING)) == []
    assert own.commit(chunk, drawn(chunk), 0.0).progress == []
    assert own.memory.pool.available == 8
    assert own.check().total == 0
    assert names(own.plan(0.0, 1, READING)) == ["b"]


def test_a_later_epoch_begins_while_the_earlier_one_is_computed() -> None:
    own = scheduler()
    arrive(own, request("a", 20))
    chunk = own.plan(0.0, 1, READING)
    arrive(own, replace(request("a", 2), epoch=1))
    own.commit(chunk, drawn(chunk), 0.0)
    (plan,) = run(own, [READING])
    assert [(row.request.epoch, row.start) for row in plan.rows] == [(1, 0)]
    assert own.check().total == 0


def test_who_must_give_way_is_waited_for_by_its_lane() -> None:
    """The youngest would be preempted for the answer's next page, but is being read: the answer goes first next."""
    own = scheduler(pages=8)
    arrive(own, request("old", 4))
    run(own, [READING])
    arrive(own, replace(request("new", 24, family=1), arrival=1.0))
    chunk = own.plan(0.0, 1, READING)
    assert names(chunk) == ["new"]
    assert [names(step) for step in run(own, [WRITING] * 5)] == [["old"]] * 4 + [[]]
    assert own.free_lanes() == [WRITING]
    own.commit(chunk, drawn(chunk), 0.0)
    assert own.free_lanes() == [WRITING, READING]
    (step,) = run(own, [WRITING])
    assert (names(step), step.preempted) == (["old"], 1)
    assert own.check().total == 0


def test_a_lane_waits_for_the_other_that_needs_its_pages() -> None:
    """Batch answers would go on without an end beside a request of the first class that cannot be let in."""
    own = scheduler(pages=8)
    arrive(own, request("batch", 20, answer=12, rank=1))
    run(own, [READING] * 3)
    step = own.plan(0.0, 1, WRITING)
    assert names(step) == ["batch"]
    arrive(own, request("first", 20, family=1))
    assert names(*run(own, [READING])) == []
    assert own.free_lanes() == [READING]
    own.commit(step, drawn(step), 0.0)
    assert own.free_lanes() == [READING, WRITING]
    assert [names(plan) for plan in run(own, own.free_lanes())] == [["first"], []]
    assert (own.yields, own.check().total) == (1, 0)


def test_answers_go_on_while_one_of_them_is_to_give_way() -> None:
    """Reading needs a batch answer's pages, and has a chunk to compute first: only batch answers wait for that."""
    own = scheduler()
    arrive(own, request("batch", 12, answer=12, rank=1), request("first", 3, answer=20))
    run(own, [READING] * 3)
    arrive(own, request("long", 32 - 8, family=1))
    step = own.plan(0.0, 1, WRITING)
    assert names(step) == ["first", "batch"]
    arrive(own, request("needy", 20, family=2))
    chunk = own.plan(0.0, 1, READING)
    assert names(chunk) == ["long"]
    own.commit(step, drawn(step), 0.0)
    assert own.free_lanes() == [WRITING]
    assert {kept.id for kept in own.kept_out(WRITING)} == {"batch"}
    assert [names(plan) for plan in run(own, [WRITING] * 3)] == [["first"]] * 3
    own.commit(chunk, drawn(chunk), 0.0)
    assert own.free_lanes() == [READING, WRITING]
    assert [names(plan) for plan in run(own, own.free_lanes())] == [["long", "needy"], ["first"]]
    assert (own.yields, own.check().total) == (1, 0)
    assert not own.kept_out(WRITING)


@pytest.mark.parametrize("way", ["cancelled", "replaced"])
def test_who_was_to_give_way_may_go(way: str) -> None:
    """Nobody is kept out in its place, nor by its name."""
    own = scheduler(pages=10)
    arrive(own, request("old", 4, answer=20), request("other", 3, answer=20, family=2))
    run(own, [READING])
    arrive(own, replace(request("new", 24, family=1), arrival=1.0))
    chunk = own.plan(0.0, 1, READING)
    assert names(chunk) == ["new"]
    assert [names(plan) for plan in run(own, [WRITING] * 4)] == [["old", "other"]] * 4
    step = own.plan(0.0, 1, WRITING)
    assert names(step) == ["other"]
    assert {kept.id for kept in own.kept_out(READING)} == {"new"}
    if way == "cancelled":
        own.apply(Cancelled(id=RequestId("new"), epoch=0), 0.0)
    arrive(own, replace(request("new", 2), epoch=1))
    for plan in (chunk, step):
        own.commit(plan, drawn(plan), 0.0)
    (step, chunk) = run(own, [WRITING, READING])
    assert (names(step), names(chunk)) == (["old", "other"], ["new"])
    assert not own.kept_out(READING)
    assert own.check().total == 0


def test_each_lane_learns_by_itself() -> None:
    own = scheduler()
    arrive(own, request("a", 30, answer=2))
    for _ in range(3):
        plan = own.plan(0.0, 1, READING)
        own.commit(plan, drawn(plan), 0.0, 1.0)
    plan = own.plan(0.0, 1, READING)
    assert plan.predicted_s > 0.5
    own.commit(plan, drawn(plan), 0.0, 1.0)
    assert own.plan(0.0, 1, WRITING).predicted_s < 0.1


@pytest.mark.parametrize("seed", range(3))
def test_two_lanes_draw_what_one_draws(seed: int) -> None:
    """Of one list of requests, the same tokens whatever the lanes."""
    config = SchedulerConfig(pages=20, page_tokens=4, max_model_len=32, max_chunk_tokens=8)
    random, found = Random(seed), []
    events = [request(f"r{n}", random.randint(1, 20), answer=random.randint(1, 9), family=n % 2) for n in range(12)]
    for world in (World(config), LaneWorld(config, seed=seed, max_steps=2)):
        for one in events:
            world.arrive(one)
        world.run_to_completion()
        found.append({name: (client.tokens, client.finish) for name, client in world.clients.items()})
    assert found[0] == found[1]
