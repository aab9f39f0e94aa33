"""Turns of tenants: shares by weight, nobody starved, nothing idle while somebody waits, one order in any case."""

from __future__ import annotations

from collections import Counter, defaultdict
from random import Random

import pytest
from engine_script import check
from glass_model import ROOT
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens
from penstock.engine.core.request import Request, RequestStatus
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.core.waiting_queue import MAX_FAIRNESS_KEYS, FairClock, WaitingQueue
from penstock.types import Qos, RequestId, RequestStage, SamplingParams, ServiceClass


def of(name: str, qos: Qos, *, prompt: int = 8, answer: int = 2, at: float = 0.0) -> AddRequest:
    """Prompts of their own, so that no cache saves anything."""
    random = Random(name)
    return AddRequest(
        id=RequestId(name),
        epoch=0,
        stage=RequestStage.WHOLE,
        prompt=tuple(random.randrange(1, 10_000) for _ in range(prompt)),
        sampling=SamplingParams(seed=0, max_tokens=answer),
        arrival=at,
        root=ROOT,
        qos=qos,
    )


class Machine:
    """A scheduler whose tokens are all alike, and what each tenant got of it."""

    def __init__(self, **config: float) -> None:
        defaults = {"pages": 64, "page_tokens": 4, "max_model_len": 64, "max_step_tokens": 16, "max_running": 8}
        self.scheduler = Scheduler(SchedulerConfig(**(defaults | config)))  # type: ignore[arg-type]
        self.now = 0.0
        self.prompt_tokens: Counter[str] = Counter()
        self.order: list[str] = []  # of first tokens
        self.ended: dict[str, float] = {}

    def step(self) -> int:
        plan = self.scheduler.plan(self.now)
        drawn = [SampledTokens((7,)) if row.samples else SampledTokens() for row in plan.rows]
        for row in plan.rows:
            if row.start < len(row.request.prompt):
                self.prompt_tokens[row.request.qos.tenant] += row.count
        self.now += 0.01
        for progress in self.scheduler.commit(plan, drawn, self.now).new_tokens:
            if progress.index == 0:
                self.order.append(progress.request.id)
            if progress.finish is not None:
                self.ended[progress.request.id] = self.now
        return len(plan.rows)


# --- shares ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [(1, 1), (3, 1), (5, 2)])
def test_tenants_who_want_all_get_what_they_weigh(weights: tuple[int, int]) -> None:
    machine = Machine()
    for tenant, weight in zip("xy", weights, strict=True):
        for number in range(120):
            qos = Qos(tenant=tenant, weight=weight)
            machine.scheduler.apply(of(f"{tenant}{number}", qos, at=number), 0.0)
    for _ in range(60):
        machine.step()
    served = machine.prompt_tokens
    assert served["x"] / served["y"] == pytest.approx(weights[0] / weights[1], rel=0.1)


def test_a_long_prompt_lets_another_tenants_short_one_pass() -> None:
    check(
        """
        whole x1 prompt=40 tenant=x max=1
        step -> x1 0+8
        whole x2 prompt=6 family=1 tenant=x max=1
        whole y1 prompt=6 family=2 tenant=y max=1
        step -> y1 0+6*
        step -> x1 8+8
        """,
        max_step_tokens=8,
    )


def test_who_is_read_in_a_step_does_not_wait_for_a_piece_of_anothers_prompt() -> None:
    check(
        """
        whole x1 prompt=40 tenant=x max=1
        step -> x1 0+16
        whole y1 prompt=6 family=2 tenant=y max=1
        whole z1 prompt=6 family=3 tenant=z max=1
        step -> y1 0+6*, z1 0+6*
        step -> x1 16+16
        step -> x1 32+8*
        """,
        max_step_tokens=16,
    )


def test_what_ends_with_a_step_is_not_cut_for_brevity() -> None:
    check(
        """
        whole y1 prompt=4 family=9 tenant=y max=1
        step -> y1 0+4*
        whole x1 prompt=30 tenant=x max=1
        step -> x1 0+30*         # a quarter millisecond a token, and a millisecond a step
        whole x2 prompt=60 family=1 tenant=x max=1
        step -> x2 0+16
        """,
        contended_step_ms=5.0,
    )


def test_one_tenant_alone_is_served_by_arrival() -> None:
    machine = Machine()
    for number in (3, 1, 2):
        machine.scheduler.apply(of(f"r{number}", Qos(tenant="x"), prompt=16, at=number), 0.0)
    while machine.step():
        pass
    assert machine.order == ["r1", "r2", "r3"]


def test_who_was_away_has_saved_up_nothing() -> None:
    machine = Machine()
    for number in range(40):
        machine.scheduler.apply(of(f"x{number}", Qos(tenant="x"), prompt=16, at=number), 0.0)
    for _ in range(20):
        machine.step()
    for number in range(40):
        machine.scheduler.apply(of(f"y{number}", Qos(tenant="y"), prompt=16, at=number), machine.now)
    before = len(machine.order)
    for _ in range(12):
        machine.step()
    first = Counter(name[0] for name in machine.order[before:])
    assert abs(first["x"] - first["y"]) <= 3


def test_who_comes_back_begins_at_the_present() -> None:
    machine = Machine()
    for tenant, numbers in (("y", 2), ("x", 80)):
        for number in range(numbers):
            machine.scheduler.apply(of(f"{tenant}{number}", Qos(tenant=tenant), prompt=16, at=number), 0.0)
    for _ in range(30):
        machine.step()
    assert {"y0", "y1"} <= machine.ended.keys()
    before = len(machine.order)
    for number in range(2, 40):
        machine.scheduler.apply(of(f"y{number}", Qos(tenant="y"), prompt=16, at=number), machine.now)
    for _ in range(12):
        machine.step()
    first = Counter(name[0] for name in machine.order[before:])
    assert min(first["x"], first["y"]) >= 4
    assert abs(first["x"] - first["y"]) <= 2


def test_steps_are_brief_while_others_are_there() -> None:
    long = {"prefill_step_budget_ms": 40.0, "contended_step_ms": 5.0, "max_step_tokens": 400, "max_model_len": 2000}
    machine = Machine(pages=2000, **long)
    machine.scheduler.apply(of("x1", Qos(tenant="x"), prompt=1000), 0.0)
    assert machine.scheduler.plan(0.0).predicted_s == pytest.approx(0.040, rel=0.1)
    machine = Machine(pages=2000, **long)
    machine.scheduler.apply(of("y1", Qos(tenant="y"), prompt=4, answer=1), 0.0)
    machine.step()
    machine.scheduler.apply(of("x1", Qos(tenant="x"), prompt=1000), machine.now)
    assert machine.scheduler.plan(machine.now).predicted_s < 0.010
    machine = Machine(pages=2000, **long)
    machine.scheduler.apply(of("y1", Qos(tenant="y", service=ServiceClass.BATCH), prompt=4, answer=1), 0.0)
    machine.step()
    machine.scheduler.apply(of("x1", Qos(tenant="x"), prompt=1000), machine.now)
    assert machine.scheduler.plan(machine.now).predicted_s == pytest.approx(0.040, rel=0.1)


# --- whatever comes --------------------------------------------------------------------------------------------------

claims = st.builds(
    Qos,
    tenant=st.sampled_from(["", "a", "b", "c"]),
    weight=st.sampled_from([0.5, 1.0, 4.0]),
    service=st.sampled_from(list(ServiceClass)),
)
arrivals = st.lists(
    st.tuples(claims, st.integers(1, 40), st.integers(1, 6), st.integers(0, 12)), min_size=1, max_size=24
)


def play(events: list[tuple[int, AddRequest]], **config: float) -> Machine:
    """Each arrives before the step of its number; to the end.  Fails when a step computes nothing though some wait."""
    machine = Machine(**config)
    left = sorted(events, key=lambda item: item[0])
    for step in range(4000):
        while left and left[0][0] <= step:
            machine.scheduler.apply(left.pop(0)[1], machine.now)
        load = machine.scheduler.load()
        rows = machine.step()
        assert rows or not (load.queued or load.running), "idle, though somebody waits"
        if not left and not rows:
            break
    return machine


@given(given_arrivals=arrivals, pages=st.sampled_from([16, 64]), places=st.sampled_from([1, 3, 8]))
@settings(max_examples=60, deadline=None)
def test_nothing_is_lost_nobody_starves_nothing_idles(
    given_arrivals: list[tuple[Qos, int, int, int]], pages: int, places: int
) -> None:
    events = [
        (step, of(f"r{number}", qos, prompt=prompt, answer=answer, at=number))
        for number, (qos, prompt, answer, step) in enumerate(given_arrivals)
    ]
    machine = play(events, pages=pages, max_running=places, batch_patience_s=0.05)
    assert set(machine.ended) == {event.id for _, event in events}
    assert machine.scheduler.check_leaks().total == 0


@given(given_arrivals=arrivals, seed=st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_the_order_of_what_is_said_at_one_time_decides_nothing(
    given_arrivals: list[tuple[Qos, int, int, int]], seed: int
) -> None:
    events = [
        (step, of(f"r{number}", qos, prompt=prompt, answer=answer, at=number))
        for number, (qos, prompt, answer, step) in enumerate(given_arrivals)
    ]
    shuffled = Random(seed).sample(events, len(events))
    one, other = play(events, max_running=3), play(shuffled, max_running=3)
    assert one.order == other.order
    assert one.ended == other.ended


@given(st.integers(1, 6), st.integers(1, 40))
@settings(max_examples=30, deadline=None)
def test_the_wait_of_each_class_is_bounded(batch: int, prompt: int) -> None:
    """Interactive work that would take everything for ever: batch work ends all the same, one after the other."""
    machine = Machine(max_running=2, batch_patience_s=0.1)
    waiting = {f"b{number}" for number in range(batch)}
    for name in sorted(waiting):
        machine.scheduler.apply(of(name, Qos(service=ServiceClass.BATCH), prompt=prompt, answer=3), 0.0)
    for step in range(batch * 60):
        for number in range(3):
            machine.scheduler.apply(of(f"i{step}-{number}", Qos(), prompt=12, at=step), machine.now)
        machine.step()
        if waiting <= machine.ended.keys():
            break
    # Each waits for its patience, and then for a place among two, and for its own steps.
    assert max(machine.ended[name] for name in waiting) <= batch * (0.1 + 0.01 * (12 + prompt / 4))


@given(
    moves=st.lists(st.tuples(st.sampled_from(["push", "take", "leave", "promote"]), claims), max_size=60),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_the_queue_is_what_a_list_would_be(moves: list[tuple[str, Qos]], seed: int) -> None:
    clock = FairClock(output_weight=2.0, memory_s=10.0)
    queue, model, random = WaitingQueue(clock), list[Request](), Random(seed)
    for number, (move, qos) in enumerate(moves):
        if move == "push":
            event = of(f"r{number}", qos, at=random.randrange(5))
            request = Request(event, serial=number, max_model_len=64)
            model.append(request)
            queue.push(request)
        elif move == "take" and (head := queue.head()) is not None:
            assert head is min(model, key=queue.position)
            queue.pop(head, RequestStatus.RUNNING)
            clock.charge_prompt(head.fairness_key, 8, head.qos.weight)
            model.remove(head)
        elif move == "leave" and model:
            gone = model.pop(random.randrange(len(model)))
            queue.remove(gone)
        elif move == "promote" and (behind := [r for r in model if r.rank]):
            queue.promote(random.choice(behind))
        assert len(queue) == len(model)
        lines = defaultdict(list)
        for request in model:
            lines[request.fairness_key].append(request)
        firsts = [min(line, key=lambda request: request.order) for line in lines.values()]
        assert queue.heads() == sorted(firsts, key=queue.position)


def test_who_is_not_the_first_of_its_line_cannot_be_taken() -> None:
    queue = WaitingQueue(FairClock(output_weight=2.0, memory_s=10.0))
    first, second = (Request(of(f"r{n}", Qos(), at=n), serial=n, max_model_len=64) for n in range(2))
    queue.push(first)
    queue.push(second)
    with pytest.raises(ValueError, match="not the first"):
        queue.pop(second, RequestStatus.RUNNING)


def test_tenants_that_have_gone_are_forgotten() -> None:
    clock = FairClock(output_weight=2.0, memory_s=10.0)
    for number in range(3 * MAX_FAIRNESS_KEYS):
        line = (0, f"t{number}")
        clock.on_arrival(line, float(number))
        clock.on_queued(line)
        clock.charge_prompt(line, 1, 1.0)
    assert len(vars(clock)["_times"]) <= MAX_FAIRNESS_KEYS + 1
    assert len(vars(clock)["_seen"]) <= MAX_FAIRNESS_KEYS + 1
