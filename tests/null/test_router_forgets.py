"""What came and went leaves nothing behind in a gateway that lives long: workers with new names, and requests."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc

import msgspec
import pytest

from penstock.config.limits import FailoverConfig, RoutingConfig
from penstock.config.schema import GatewayConfig
from penstock.types import RequestId, WorkerId, WorkerState

from .router_town import Town, rows

FORGET_S = 4.0
CONFIG = GatewayConfig(name="g", model_name="null", failover=FailoverConfig(forget_s=FORGET_S))


async def come_and_go(town: Town, name: str) -> None:
    town.fork(name)
    await town.turn()
    town.kill(name)


async def test_what_was_known_of_a_worker_that_does_not_come_back_is_given_up() -> None:
    async with Town("both-home", config=CONFIG) as town:
        for pod in range(40):
            await come_and_go(town, f"both-pod{pod}")
            await town.wait(FORGET_S / 4, step=0.25)  # so a few of them are remembered at any time
            client = town.ask(f"r{pod}", max_tokens=2)
            await town.finish(client)
            client.assert_true_answer()
        fleet, router = town.router.fleet, town.router
        assert len(fleet) <= 12
        assert len(router.workers()) <= 12
        assert len(router.metrics.totals.workers()) <= 12
        page = router.metrics.exposition().decode()
        assert "both-pod0" not in page
        assert "both-pod39" in page
        assert len(router._placement.prefixes._followed) <= 12
        assert rows(town)["both-home"] == "ready"


async def test_a_place_that_was_somebody_elses_is_as_good_as_new() -> None:
    async with Town("both-home", config=CONFIG) as town:
        await come_and_go(town, "both-old")
        slot = town.router.fleet.slot(WorkerId("both-old"))
        await town.wait(2 * FORGET_S, step=0.25)
        assert [row["id"] for row in town.router.workers()] == ["both-home"]
        town.fork("both-new")
        await town.turn()
        assert town.router.fleet.slot(WorkerId("both-new")) == slot
        assert town.router.fleet.states[slot or 0] is WorkerState.READY
        town.kill("both-home")
        client = town.ask("r")
        await town.finish(client)
        client.assert_true_answer()
        (decision,) = town.router.debug(client.request.id)
        assert [chosen.worker for chosen in decision.stages] == ["both-new"]
        assert {reason.worker for reason in decision.reasons()} == {"both-home", "both-new"}


async def test_who_is_only_restarted_is_remembered() -> None:
    async with Town("both-home", config=CONFIG) as town:
        town.kill("both-home")
        await town.wait(FORGET_S / 2, step=0.25)
        town.fork("both-home")
        await town.wait(2 * FORGET_S, step=0.25)
        assert rows(town) == {"both-home": "ready"}
        assert town.router.fleet.incarnations == [2]


@pytest.mark.parametrize(("remembered", "most"), [(0, 100), (1024, 4096)])
async def test_of_a_request_whose_client_left_only_its_decisions_are_remembered(remembered: int, most: int) -> None:
    """In bytes each; those of decisions are bounded by ``remembered_requests``."""
    count = 300
    async with Town("both-0", config=config_of(remembered)) as town:
        router, first = town.router, town.ask("first")
        await town.finish(first)

        async def leave_early(number: int) -> None:
            stream = router.stream(msgspec.structs.replace(first.request, id=RequestId(f"r{number}")))
            reading = asyncio.ensure_future(anext(stream))
            await town.settle()
            reading.cancel()
            await asyncio.gather(reading, return_exceptions=True)
            await stream.aclose()
            await town.turn()

        for number in range(50):  # what is made once
            await leave_early(number)
        gc.collect()
        tracemalloc.start()
        try:
            for number in range(50, 50 + count):
                await leave_early(number)
            await town.wait(1.0)
            gc.collect()
            kept = tracemalloc.get_traced_memory()[0]
        finally:
            tracemalloc.stop()
        assert kept / count < most
        assert len(router.debug(RequestId("r349"))) == (1 if remembered else 0)


def config_of(remembered: int) -> GatewayConfig:
    return GatewayConfig(name="g", model_name="null", routing=RoutingConfig(remembered_requests=remembered))
