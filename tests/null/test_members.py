"""Workers that are no members any more: what they have goes on, nothing new goes there, and nothing is left of them."""

from __future__ import annotations

import asyncio
import gc

from penstock.config.schema import GatewayConfig
from penstock.launch.members.interface import Member
from penstock.launch.remote_workers import RemoteWorkers
from penstock.router.health import NO_MEMBER
from penstock.router.service import RouterService
from penstock.types import ModelIdentity, Role, WorkerId, WorkerState
from penstock.wire.gateway_messages import Hello, WorkerReport
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.supervisor_messages import WorkerRemoved, WorkerUp

from .router_town import Client, Town, rows


def remove(town: Town, name: str) -> None:
    town.router.on_supervisor(WorkerRemoved(worker=WorkerId(name)))


def workers_of(town: Town, client: Client) -> set[str]:
    return {chosen.worker for decision in town.router.debug(client.request.id) for chosen in decision.stages}


async def begun(town: Town, name: str) -> Client:
    client = town.ask(name, max_tokens=60)
    await town.until(lambda: len(client.tokens) > 2)
    return client


async def test_requests_of_a_worker_that_is_no_member_any_more_go_on_there_and_new_ones_do_not_come() -> None:
    async with Town("both-0") as town:
        first = await begun(town, "first")
        town.fork("both-1")
        await town.until(lambda: rows(town).get("both-1") == "ready")
        remove(town, "both-0")
        assert rows(town)["both-0"] == "draining"
        assert town.router.workers()[0]["reason"] == NO_MEMBER
        later = [await begun(town, f"later-{number}") for number in range(4)]
        assert all(workers_of(town, client) == {"both-1"} for client in later)
        for client in (first, *later):
            await town.finish(client)
            client.assert_true_answer()
        assert workers_of(town, first) == {"both-0"}, "it was not moved"
        await town.until(lambda: list(rows(town)) == ["both-1"])
        assert WorkerId("both-0") not in town.router._links._links


async def test_a_worker_without_requests_is_forgotten_at_once() -> None:
    async with Town("both-0", "both-1") as town:
        remove(town, "both-0")
        assert list(rows(town)) == ["both-1"]
        town.kill("both-1")
        remove(town, "both-1")
        assert rows(town) == {}
        remove(town, "both-1")
        remove(town, "who")


async def test_one_that_dies_while_its_requests_go_on_loses_none() -> None:
    async with Town("both-0") as town:
        client = await begun(town, "r")
        town.fork("both-1")
        await town.until(lambda: rows(town).get("both-1") == "ready")
        remove(town, "both-0")
        town.stop("both-0")  # nobody tells of it: who was told of its life is not interested any more
        await town.finish(client)
        client.assert_true_answer()
        assert workers_of(town, client) == {"both-0", "both-1"}
        await town.until(lambda: list(rows(town)) == ["both-1"])


async def test_one_that_comes_back_meanwhile_is_used_again() -> None:
    async with Town("both-0") as town:
        client, worker = await begun(town, "r"), town.worker("both-0")
        remove(town, "both-0")
        up = WorkerUp(
            worker=WorkerId("both-0"), incarnation=1, role=Role.BOTH, pid=1, endpoint=worker.endpoint, labels={"z": "a"}
        )
        town.router.on_supervisor(up)
        await town.until(lambda: rows(town) == {"both-0": "ready"})
        assert town.router.workers()[0]["labels"] == {"z": "a"}
        await town.finish(client)
        client.assert_true_answer()
        await town.wait(1.0, step=0.25)
        assert rows(town) == {"both-0": "ready"}


async def test_a_name_that_another_run_takes_over_is_its_own_and_requests_move() -> None:
    async with Town("both-0") as town:
        client = await begun(town, "r")
        town.fork("both-1")
        await town.until(lambda: rows(town).get("both-1") == "ready")
        remove(town, "both-0")
        other = WorkerUp(
            worker=WorkerId("both-0"), incarnation=(7 << 32) + 1, role=Role.BOTH, pid=9, endpoint="memory://elsewhere"
        )
        town.router.on_supervisor(other)
        assert town.router.fleet.incarnations[town.router.fleet.slot(WorkerId("both-0")) or 0] == (7 << 32) + 1
        await town.finish(client)
        client.assert_true_answer()
        assert rows(town) == {"both-0": "starting", "both-1": "ready"}


async def test_a_worker_at_another_endpoint_is_spoken_to_there() -> None:
    async with Town("both-0") as town:
        client = await begun(town, "r")
        town.fork("both-1")
        await town.until(lambda: rows(town).get("both-1") == "ready")
        moved = WorkerUp(worker=WorkerId("both-0"), incarnation=1, role=Role.BOTH, pid=1, endpoint="memory://elsewhere")
        town.router.on_supervisor(moved)
        assert rows(town)["both-0"] == "starting"
        assert town.router._links._links[WorkerId("both-0")]._link.endpoint == "memory://elsewhere"
        await town.finish(client)
        client.assert_true_answer()


async def test_thousands_that_come_and_go_leave_nothing_behind() -> None:
    """The gateway's own objects over the in-memory transport, which counts its links."""
    count, at_once = 3000, 10
    hub, config = InMemoryHub(), GatewayConfig(name="g", model_name="null")
    town = Town()  # for its clock alone
    router = RouterService(config, connect=hub.connect_async, clock=town.clock, suspect=lambda _suspect: None)
    joined = RemoteWorkers(
        hub.connect_async, router.on_supervisor, Hello(gateway="g", incarnation=1), clock=town.clock, beat_s=0.25
    )
    router.add_report_listener(joined.on_report)
    tasks = len(asyncio.all_tasks())
    for first in range(0, count, at_once):
        names = [f"pod-{number}" for number in range(first, first + at_once)]
        joined.set_members([Member(name=name, endpoint=f"memory://{name}") for name in names])
        joined.tick()
        for number, name in enumerate(names):
            if number % 3 == 2:
                continue  # where nobody ever answers
            report = WorkerReport(
                worker=WorkerId(name), incarnation=1, role=Role.BOTH, state=WorkerState.READY, pid=7,
                identity=ModelIdentity(fingerprint="f", numerics="n"), max_model_len=64,
                counters={"generation_tokens": 1.0})  # fmt: skip
            joined.on_report(f"memory://{name}", report)
            router.on_message(WorkerId(name), 1, report)
        town.clock.advance(0.25)
        router.tick()
    assert len(router.workers()) == joined.count
    joined.set_members([])
    assert (len(joined._mailboxes), len(joined._lost), joined._found) == (0, 0, {})
    assert len(router.fleet) <= 2 * at_once, "slots are used again"
    assert router.fleet._slots == router._links._links == {}
    health = router._health
    assert not any((health._leaving, health._resubmitted, health._foreign, health._unconnected, health.refusals))
    assert not any(router._placement.prefixes._followed)
    assert router.metrics.totals.workers() == []
    assert "pod-" not in router.metrics.exposition().decode()
    for _ in range(8):
        await asyncio.sleep(0)
    assert len(asyncio.all_tasks()) == tasks
    gc.collect()
    assert len(hub._links) == 0
    await joined.close()
    await router.close()
