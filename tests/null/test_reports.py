"""What workers tell gateways beside tokens: how often, to whom, and what it costs to hear it.  Counted, not timed."""

from __future__ import annotations

import gc
import statistics
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from penstock.clock import VirtualClock
from penstock.config.schema import GatewayConfig
from penstock.launch.members.interface import Member
from penstock.launch.remote_workers import RemoteWorkers
from penstock.router.service import RouterService
from penstock.telemetry.metrics import WORKER_COUNTERS
from penstock.types import RequestId, Role, WorkerId, WorkerState
from penstock.wire.gateway_messages import (
    AwaitedStage,
    Hello,
    KvEvents,
    RequestReturned,
    StepRates,
    Tokens,
    WorkerReport,
)
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.supervisor_messages import WorkerUp
from penstock.wire.transport import AsyncLink, Received

from .router_town import Town
from .worker_stage import IDENTITY, Stage, StageWorker

IDLE_PER_S, BUSY_PER_S = 2, 12
TICK_S = 0.05


class CountedLink:
    """Counts what a gateway receives beside tokens."""

    def __init__(self, link: AsyncLink, note: Callable[[], None]) -> None:
        self._link = link
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)

    async def __aiter__(self) -> AsyncIterator[Received]:
        async for received in self._link:
            if not isinstance(received.message, Tokens):
                self._note()
            yield received


class Gateway:
    """A router whose only worker was joined."""

    def __init__(self, name: str, town: Town, endpoint: str) -> None:
        self.received = 0
        self._hub = town.stage.hub
        self.router = RouterService(
            GatewayConfig(name=name, model_name="null"),
            connect=self._connect,
            clock=town.clock,
            suspect=lambda suspect: None,
        )
        self.joined = RemoteWorkers(
            self._connect,
            self.router.on_supervisor,
            Hello(gateway=name, incarnation=1, discovery=True),
            clock=town.clock,
            beat_s=0.25,
        )
        self.joined.set_members([Member(name=endpoint, endpoint=endpoint)])
        self.router.add_report_listener(self.joined.on_report)

    def _connect(self, endpoint: str, *, worker: str = "") -> Any:
        return CountedLink(self._hub.connect_async(endpoint, worker=worker), self._count)

    def _count(self) -> None:
        self.received += 1


async def received_in(seconds: float, town: Town, gateways: list[Gateway]) -> list[int]:
    """How many messages beside tokens each gateway gets, with a worker that turns its loop every millisecond."""
    for gateway in gateways:
        gateway.received = 0
    for turn in range(round(seconds / 0.005)):
        await town.turn(0.005)
        for number, gateway in enumerate(gateways):
            if (turn + number) % 10 == 0:
                gateway.router.tick()
            if (turn + 3 * number) % 50 == 0:
                gateway.joined.tick()
    return [gateway.received for gateway in gateways]


@pytest.mark.parametrize("number", [1, 4, 16])
async def test_how_much_a_gateway_is_told_depends_neither_on_load_nor_on_other_gateways(number: int) -> None:
    async with Town(pages=256, max_model_len=2048) as town:
        worker = StageWorker(town.stage, "both-0", Role.BOTH, pages=256, max_model_len=2048)
        town.stage.workers.append(worker)
        gateways = [Gateway(f"g{index}", town, worker.endpoint) for index in range(number)]
        for gateway in gateways:
            gateway.joined.start()
        await received_in(1.0, town, gateways)
        assert all(gateway.router.ready() for gateway in gateways)
        assert max(await received_in(3.0, town, gateways)) <= 3 * IDLE_PER_S
        town.router = gateways[0].router
        clients = [town.ask(f"r{index}", prompt=40 + index, max_tokens=1900) for index in range(2)]
        await received_in(0.5, town, gateways)
        assert max(await received_in(2.0, town, gateways)) <= 2 * BUSY_PER_S
        assert all(client.tokens and not client.over for client in clients), "it was not busy all the time"
        for client in clients:
            await town.leave(client)
        for gateway in gateways:
            await gateway.joined.close()
            await gateway.router.close()


@pytest.mark.parametrize(("workers", "a_second"), [(8, 2.0), (50, 2.0), (100, 1.0), (200, 0.5), (1000, 0.5)])
async def test_the_more_workers_are_idle_the_fewer_hellos_each_gets(workers: int, a_second: float) -> None:
    hub, clock, names = InMemoryHub(), VirtualClock(1.0), [WorkerId(f"both-{index}") for index in range(workers)]
    config = GatewayConfig(name="g", model_name="null")
    router = RouterService(config, connect=hub.connect_async, clock=clock, suspect=lambda suspect: None)
    listeners = {name: hub.listen(f"memory://{name}") for name in names}
    for name in names:
        router.on_supervisor(
            WorkerUp(worker=name, incarnation=1, role=Role.BOTH, pid=1, endpoint=listeners[name].endpoint)
        )
        router.on_message(name, 1, report_of(name, 1))

    def greeted(seconds: float) -> dict[WorkerId, int]:
        for listener in listeners.values():
            while listener.recv() is not None:
                pass
        for _ in range(round(seconds / 0.125)):
            clock.advance(0.125)
            router.tick()
        return {name: sum(1 for _ in iter(listener.recv, None)) for name, listener in listeners.items()}

    greeted(2.0)  # asks each for its cache
    for name in names:
        router.on_message(name, 1, KvEvents(worker=name, incarnation=1, sequence=0, part=0, parts=1))
    counts = greeted(8.0)
    assert set(counts.values()) == {round(8 * a_second)}, "evenly, whichever slot it has"
    router.fleet.add_work(names[0], 1, RequestId("r"), 10, now=clock.now())
    assert greeted(1.0)[names[0]] == 4, "one with a request gets all"
    await router.close()


@pytest.mark.parametrize(("gateways", "pause_s"), [(1, 0.1), (60, 0.1), (300, 0.5)])
def test_a_busy_worker_sends_a_bounded_number_of_reports_to_all_gateways(gateways: int, pause_s: float) -> None:
    stage = Stage()
    worker = stage.worker("both-0", Role.BOTH)
    links = [stage.hub.connect(worker.endpoint) for _ in range(gateways)]
    for number, link in enumerate(links):
        link.send(Hello(gateway=f"g{number}", incarnation=1))
    stage.turn(1.0)
    for link in links:
        while link.recv() is not None:
            pass
    for _ in range(300):
        worker.mailbox.publisher.mark_changed()
        stage.turn(0.01)
    counts = {sum(1 for _ in iter(link.recv, None)) for link in links}
    assert max(counts) - min(counts) <= 1
    assert 3.0 / pause_s - 2 <= max(counts) <= 3.0 / pause_s + 1


def test_a_worker_that_nobody_has_greeted_since_sends_nothing() -> None:
    stage = Stage()
    worker = stage.worker("both-0", Role.BOTH)
    stage.turn()
    stage.reports.clear()
    for _ in range(20):
        stage.turn(0.1)
    assert worker.name not in stage.reports


def test_a_first_hello_and_a_question_about_a_request_are_answered_at_once() -> None:
    stage = Stage()
    worker = stage.worker("both-0", Role.BOTH)
    stage.turn()
    assert worker.name in stage.reports
    other = stage.hub.connect(worker.endpoint)
    other.send(Hello(gateway="other", incarnation=1))
    stage.turn()
    received = other.recv()
    assert received is not None
    assert isinstance(received.message, WorkerReport)
    other.send(Hello(gateway="other", incarnation=1, awaited=(AwaitedStage(RequestId("r"), 1),)))
    stage.turn()
    received = other.recv()
    assert received is not None
    assert isinstance(received.message, RequestReturned)
    assert other.recv() is None, "the report is not due yet"


def test_pages_are_counted_once_after_a_change_and_not_for_each_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle worker reports to every gateway, and the count takes milliseconds with thousands of pages."""
    stage = Stage()
    worker = stage.worker("both-0", Role.BOTH)
    stage.wait(1.0)
    checks, check = [], worker.scheduler.check_leaks
    monkeypatch.setattr(type(worker.scheduler), "check_leaks", lambda _: checks.append(check()) or checks[-1])
    stage.wait(5.0)
    assert checks == []
    stage.ask(range(20), to=worker, max_tokens=4)
    stage.run()
    stage.wait(1.0)
    assert 1 <= len(checks) <= 3
    lost = worker.scheduler.memory.pool.allocate(1).detach()
    stage.wait(1.0)
    assert stage.reports[worker.name].kv_pages_leaked == 1, "a page without an owner is found all the same"
    worker.scheduler.memory.pool.release(lost)
    stage.wait(1.0)
    assert stage.reports[worker.name].kv_pages_leaked == 0


def test_what_changed_is_told_once_when_it_is_due() -> None:
    """The last words after a request: nobody greets, and the gateway learns that the worker is idle again."""
    stage = Stage()
    worker = stage.worker("both-0", Role.BOTH)
    stage.turn()
    stage.ask(range(20), to=worker, max_tokens=4)
    stage.run()
    assert worker.mailbox.idle_timeout_s <= 0.1
    stage.turn(0.1)
    stage.turn()
    report = stage.reports[worker.name]
    assert (report.running, report.decodes, report.counters["generation_tokens"]) == (0, 0, 4)


# --- what handling one costs -----------------------------------------------------------------------------------------


def instructions(call: Callable[[], object]) -> int:
    """Instructions of Python that a call executes, whatever it calls."""
    count = 0

    def trace(frame: FrameType, event: str, arg: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    # A collection in its middle would count the finalizers of what other tests have left.
    gc.disable()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


def report_of(worker: WorkerId, steps: int) -> WorkerReport:
    counters = {name: 1000.0 * steps + index for index, name in enumerate(WORKER_COUNTERS)}
    return WorkerReport(
        worker=worker,
        incarnation=1,
        role=Role.BOTH,
        state=WorkerState.READY,
        pid=1,
        identity=IDENTITY,
        max_model_len=4096,
        steps=steps,
        counters=counters,
        rates=StepRates(1e-3, 1e-4, 1e-9, 1e-4),
        measured=steps,
    )


async def costs_of_reports(workers: int) -> list[int]:
    hub, names = InMemoryHub(), [WorkerId(f"both-{index}") for index in range(workers)]
    router = RouterService(
        GatewayConfig(name="g", model_name="null"),
        connect=hub.connect_async,
        clock=VirtualClock(1.0),
        suspect=lambda suspect: None,
    )
    joined = RemoteWorkers(
        hub.connect_async,
        router.on_supervisor,
        Hello(gateway="g", incarnation=1, discovery=True),
        clock=VirtualClock(1.0),
        beat_s=1.0,
    )
    joined.set_members([Member(name=name, endpoint=f"memory://{name}") for name in names])
    router.add_report_listener(joined.on_report)
    for name in names:
        joined.on_report(f"memory://{name}", report_of(name, 1))
        router.on_message(name, 1, report_of(name, 1))
    assert len(router.fleet) == workers
    router.on_supervisor(
        WorkerUp(worker=names[0], incarnation=1, role=Role.BOTH, pid=1, endpoint=f"memory://{names[0]}")
    )
    costs = []
    for name in names[:8]:
        report = report_of(name, 2)
        costs.append(instructions(partial(router.on_message, name, 1, report)))
    await router.close()
    return costs


async def test_handling_a_report_walks_no_list_of_workers() -> None:
    few, many = await costs_of_reports(8), await costs_of_reports(256)
    # One report of as many as there are workers finds their median rates anew, in numpy.
    assert statistics.median(many) == statistics.median(few)
    assert sum(cost != few[0] for cost in many) <= 1
