"""What holds of every policy, whatever the fleet: rules, not examples."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from router_words import chain, fleet_of, holds, report, request, up

from penstock.router.decide import Decision, PlacementRequest, PlacementRules, choose_workers, has_ready_workers
from penstock.router.fleet import Fleet
from penstock.router.policy.baselines import NAMES, make_policy
from penstock.router.prefix_index import PrefixIndex
from penstock.router.service import predict_by_role, predict_ttft
from penstock.router.worker_load import ExpectedWork
from penstock.types import Qos, RequestId, RequestStage, Role, ServiceClass, ValidRequest, WorkerId, WorkerState
from penstock.wire.gateway_messages import StepRates

ALL = [PlacementRules(policy=make_policy(name)) for name in NAMES]
PENSTOCK = ALL[0]


@dataclass(frozen=True)
class Worker:
    """One of a random fleet."""

    name: str
    ready: bool
    queued: int
    answers: int
    free: int
    cached: int
    measured: bool
    gateways: int


WORKERS = st.lists(
    st.builds(
        Worker,
        name=st.builds("{}-{}".format, st.sampled_from(["prefill", "decode", "both"]), st.integers(0, 9)),
        ready=st.sampled_from([True, True, True, False]),
        queued=st.sampled_from([0, 0, 50, 500]),
        answers=st.integers(0, 5),
        free=st.sampled_from([0, 2, 8, 100]),
        cached=st.integers(0, 8),
        measured=st.booleans(),
        gateways=st.sampled_from([1, 1, 3]),
    ),
    max_size=12,
    unique_by=lambda worker: worker.name,
)


def asked_for(number: int, blocks: int, write: int, session: str) -> ValidRequest:
    made = request(f"r{number}", prompt=(7,) * (16 * blocks + 3), max_tokens=write)
    return ValidRequest(
        id=made.id,
        prompt=made.prompt,
        block_hashes=tuple(chain(blocks)),
        sampling=made.sampling,
        arrival=0.0,
        session=session,
    )


REQUESTS = st.builds(
    asked_for,
    st.integers(0, 99),
    st.integers(0, 8),
    st.integers(1, 50),
    st.sampled_from(["", "s", "t"]),
)


def fleet_and_index(workers: list[Worker]) -> tuple[Fleet, PrefixIndex]:
    fleet, index = Fleet(), PrefixIndex(capacity=1000, max_workers=16)
    for slot, worker in enumerate(workers):
        up(fleet, worker.name)
        holds(index, slot, chain(worker.cached))
        said = report(
            worker.name,
            state=WorkerState.READY if worker.ready else WorkerState.DRAINING,
            prompt_tokens=worker.queued,
            decodes=worker.answers,
            context_tokens=100 * worker.answers,
            kv_pages_free=worker.free,
            rates=StepRates(1e-3, 1e-5, 1e-9, 1e-6),
            measured=int(worker.measured),
            gateways=worker.gateways,
        )
        assert fleet.on_report(said, 0.0)
    return fleet, index


def picked(decision: Decision) -> list[tuple[RequestStage, WorkerId]]:
    return [(chosen.stage, chosen.worker) for chosen in decision.stages]


@pytest.mark.parametrize("how", ALL, ids=NAMES)
@settings(max_examples=40, deadline=None)
@given(WORKERS, REQUESTS, st.randoms(use_true_random=False))
def test_the_order_of_the_fleet_decides_nothing_and_nobody_is_left_unserved(how, workers, asked, rng):
    fleet, index = fleet_and_index(workers)
    decision = choose_workers(PlacementRequest(request=asked), fleet, index, 0.0, how)
    shuffled = list(workers)
    rng.shuffle(shuffled)
    assert picked(choose_workers(PlacementRequest(request=asked), *fleet_and_index(shuffled), 0.0, how)) == picked(
        decision
    )
    assert bool(decision.stages) == has_ready_workers(fleet) or asked.sampling.max_tokens == 1
    ready = {WorkerId(worker.name): worker for worker in workers if worker.ready}
    assert all(chosen.worker in ready for chosen in decision.stages)
    assert {chosen.stage for chosen in decision.stages} in (
        {RequestStage.WHOLE},
        {RequestStage.PREFILL, RequestStage.DECODE},
        set(),
    )
    told = {(reason.worker, reason.stage) for reason in decision.reasons()}
    assert {(chosen.worker, chosen.stage) for chosen in decision.stages} <= told
    assert {worker for worker, _ in told} == {worker.name for worker in workers}


@settings(max_examples=60, deadline=None)
@given(WORKERS, st.lists(REQUESTS, max_size=12, unique_by=lambda asked: asked.id))
def test_no_worker_is_filled_beyond_its_room_while_another_has_room(workers, asked):
    workers = [worker for worker in workers if worker.gateways == 1]
    fleet, index = fleet_and_index(workers)
    room = {WorkerId(worker.name): worker.free for worker in workers}
    roles = {RequestStage.PREFILL: Role.PREFILL, RequestStage.DECODE: Role.DECODE}
    for serial, one in enumerate(asked, 1):
        decision = choose_workers(PlacementRequest(request=one), fleet, index, 0.0, PENSTOCK)
        pages = -(-len(one.prompt) // 16)
        for chosen in decision.stages:
            role = roles.get(chosen.stage, fleet.roles[chosen.slot])
            others = [fleet.ids[slot] for slot in fleet.ready(role, decision.identity)]
            assert room[chosen.worker] >= pages or all(room[other] < pages for other in others)
            room[chosen.worker] -= pages
            fleet.add_work(chosen.worker, 1, one.id, chosen.tokens, due=chosen.work, serial=serial)


def spread(fleets: list[Fleet], requests: int) -> Counter[WorkerId]:
    """Gateways that decide in turn, on reports of the same age; prompts have nothing in common."""
    given_to: Counter[WorkerId] = Counter()
    for number in range(requests):
        fleet = fleets[number % len(fleets)]
        one = request(f"r{number}", prompt=(number,) * 64)
        (chosen,) = choose_workers(PlacementRequest(request=one), fleet, PrefixIndex(100, 16), 0.0).stages
        fleet.add_work(chosen.worker, 1, one.id, chosen.tokens, due=chosen.work, serial=number + 1)
        given_to[chosen.worker] += 1
    return given_to


def test_a_gateway_knows_what_it_has_just_done():
    names = [f"both-{i}" for i in range(8)]
    assert set(spread([fleet_of(*names)], 32).values()) == {4}


def test_gateways_with_the_same_old_reports_do_not_all_run_to_one_worker():
    names = [f"both-{i}" for i in range(16)]
    fleets = [fleet_of(*names) for _ in range(8)]
    for fleet in fleets:
        for i, name in enumerate(names):
            fleet.on_report(report(name, gateways=8, prompt_tokens=10 * i), 0.0)
    given_to = spread(fleets, 32)
    assert max(given_to.values()) <= 8  # all of each gateway's first, and more, would be 8 and above for the least busy
    assert len(given_to) >= 8


Steps = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.integers(0, 5), st.integers(1, 30)),
        st.tuples(st.just("begin"), st.integers(0, 5)),
        st.tuples(st.just("end"), st.integers(0, 5)),
        st.tuples(st.just("report"), st.integers(0, 12)),
    ),
    max_size=30,
)


def batch_of(there: dict[str, tuple[int, int]], heard: int) -> list[int]:
    """Prompt tokens of batch work (those of odd names) that are still to read, of requests sent up to ``heard``."""
    return [tokens for name, (number, tokens) in there.items() if number <= heard and int(name[1:]) % 2]


@given(Steps)
def test_between_two_reports_nothing_counts_twice_and_nothing_is_forgotten(steps):
    """The worker's own numbers are always those that are shown, though it reports only now and then, and late."""
    fleet = fleet_of("both-0")
    worker, slots = WorkerId("both-0"), fleet.ready_slots(Role.BOTH, None)
    there: dict[str, tuple[int, int]] = {}  # serial, prompt tokens still to read
    serial = heard = 0
    for step in steps:
        name = f"r{step[1]}"
        match step:
            case ("send", _, tokens):
                serial += 1
                there[name] = (serial, tokens)
                batch = tokens if step[1] % 2 else 0
                due = ExpectedWork(tokens=tokens, pairs=3, rows=1, context=9, pages=2, batch_tokens=batch)
                fleet.add_work(worker, 1, RequestId(name), tokens, due=due, serial=serial)
            case ("begin", _) if name in there:
                there[name] = (there[name][0], 0)
                fleet.set_work_left(worker, RequestId(name), 5)
            case ("end", _):
                there.pop(name, None)
                fleet.remove_work(worker, 1, RequestId(name))
            case ("report", more):
                heard = min(serial, heard + more)
                known = [tokens for number, tokens in there.values() if number <= heard]
                said = {"prompt_tokens": sum(known), "decodes": len(known), "kv_pages_free": 100 - 2 * len(known)}
                said["batch_tokens"] = sum(batch_of(there, heard))
                fleet.on_report(report("both-0", acked=heard, **said), 0.0)
        load = fleet.loads.at_slots(slots)[0]
        assert load.tokens.tolist() == [sum(tokens for _, tokens in there.values())]
        assert load.batch_tokens.tolist() == [sum(batch_of(there, serial))]
        assert load.rows.tolist() == [len(there)]
        assert load.pages.tolist() == [100 - 2 * len(there)]
    fleet.mark_unresponsive(0, "silent")
    fleet.on_report(report("both-0", acked=serial), 0.0)
    assert [float(column[0]) for column in fleet.loads.at_slots(slots)[0]] == [0.0, 0.0, 0.0, 0.0, 100.0, 0.0, 0.0]


@pytest.mark.parametrize(("service", "taken"), [(ServiceClass.INTERACTIVE, "both-0"), (ServiceClass.BATCH, "both-1")])
def test_batch_work_in_the_queue_is_in_the_way_of_batch_work_only(service: ServiceClass, taken: str):
    fleet = fleet_of("both-0", "both-1")
    rates = StepRates(1e-3, 1e-5, 0.0, 1e-6)
    fleet.on_report(report("both-0", prompt_tokens=9000, batch_tokens=9000, rates=rates, measured=9), 0.0)
    fleet.on_report(report("both-1", prompt_tokens=500, rates=rates, measured=9), 0.0)
    asked = msgspec.structs.replace(request("r", prompt=(7,) * 40), qos=Qos(service=service))
    decision = choose_workers(PlacementRequest(request=asked), fleet, PrefixIndex(100, 4), 0.0)
    assert picked(decision) == [(RequestStage.WHOLE, WorkerId(taken))]
    assert decision.stages[0].work.batch_tokens == (40 if service is ServiceClass.BATCH else 0)
    seen = predict_ttft(fleet, 100, service)
    assert seen is not None
    assert seen.wait_s == pytest.approx(0.0 if service is ServiceClass.INTERACTIVE else 0.005)
    assert seen.prefill_s == pytest.approx(0.002, rel=0.01)


def test_nothing_is_foreseen_before_anything_was_measured():
    assert predict_ttft(fleet_of("both-0"), 100, ServiceClass.BATCH) is None


def test_each_role_is_foreseen_to_wait_for_what_its_own_workers_lack():
    fleet = fleet_of("prefill-0", "prefill-1", "decode-0", "decode-1")
    assert predict_by_role(fleet) == {}, "nothing has been measured"
    rates = StepRates(10e-3, 1e-3, 0.0, 1e-3)
    for name in ("prefill-0", "prefill-1"):
        fleet.on_report(report(name, prompt_tokens=5000, rates=rates, measured=9), 0.0)
    busy = {"running": 4, "decodes": 4, "context_tokens": 400, "tokens_in_flight": 400}
    for name in ("decode-0", "decode-1"):
        fleet.on_report(report(name, rates=rates, measured=9, **busy), 0.0)
    seen = predict_by_role(fleet)
    assert seen["decode"] == pytest.approx((0.0, 18e-3)), "what runs there makes a new one no later"
    assert seen["prefill"] == pytest.approx((5.0, 10e-3))
    full = {"running": 4, "queued": 4, "decodes": 4, "tokens_in_flight": 800}
    for name in ("decode-0", "decode-1"):
        fleet.on_report(report(name, rates=rates, measured=9, **full), 0.0)
    seen = predict_by_role(fleet)
    assert seen["decode"].queue_s == pytest.approx(100 * 18e-3), "400 tokens are queued, four come with each step"
    assert seen["prefill"].queue_s == pytest.approx(5.0 - 1.8), "more prefill workers would not make that less"
    fleet.on_report(report("decode-1", rates=rates, measured=9), 0.0)
    assert predict_by_role(fleet)["decode"].queue_s == 0.0, "one worker with room is enough"
