"""Workers that report and answer every greeting, and yet do not do what they were asked: found out in seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from penstock.config.limits import FailoverConfig
from penstock.config.schema import GatewayConfig
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import StepOutcome, StepPlan
from penstock.engine.service.gateways import CONFIRM_INTERVAL_S
from penstock.errors import NoWorkers
from penstock.types import Task

from .router_town import WIDE, Town, rows
from .worker_stage import StageWorker

STILL_S = FailoverConfig().still_s


def stand_still(worker: StageWorker) -> Callable[[], None]:
    """It goes on turning its loop, hears and reports, and computes nothing until what is returned is called."""
    scheduler = worker.scheduler
    plan, commit = scheduler.plan, scheduler.commit
    scheduler.plan = lambda *_: StepPlan()  # type: ignore[method-assign]
    scheduler.commit = lambda *_: StepOutcome()  # type: ignore[method-assign]

    def go_on() -> None:
        scheduler.plan, scheduler.commit = plan, commit  # type: ignore[method-assign]

    return go_on


def lose_arrivals(worker: StageWorker) -> None:
    """Its scheduler never hears of what arrives."""
    apply = worker.scheduler.apply
    worker.scheduler.apply = lambda event, now: None if isinstance(event, AddRequest) else apply(event, now)  # type: ignore[method-assign]


@pytest.mark.parametrize("victim", ["prefill-1", "decode-1"])
async def test_a_worker_that_makes_no_step_loses_its_requests(victim: str) -> None:
    async with Town(*WIDE) as town:
        stand_still(town.worker(victim))
        clients = [town.ask(f"r{i}", prompt=tuple(range(50 * i, 50 * i + 40)), max_tokens=12) for i in range(4)]
        began = town.clock.now()
        await town.until(lambda: all(client.over for client in clients), turns=1200, seconds=0.01)
        for client in clients:
            client.assert_true_answer()
        assert STILL_S <= town.clock.now() - began < 2 * STILL_S
        assert victim in {suspect.worker for suspect in town.suspects}
        assert all("no step for" in suspect.reason for suspect in town.suspects)


async def test_a_worker_that_stops_in_mid_answer_loses_it() -> None:
    async with Town("both-0", "both-1") as town:
        client = town.ask(max_tokens=30)
        await town.until(lambda: len(client.tokens) > 3)
        (decision,) = town.router.debug(client.request.id)
        stand_still(town.worker(decision.stages[0].worker))
        began = town.clock.now()
        await town.until(lambda: client.over, turns=800, seconds=0.01)
        client.assert_true_answer()
        assert STILL_S <= town.clock.now() - began < STILL_S + 1.0
        assert [suspect.worker for suspect in town.suspects] == [decision.stages[0].worker]


async def test_alone_it_is_probed_and_reported_and_its_requests_fail_in_the_end() -> None:
    """With nobody else to go to the request waits, until its worker has left one probe more unanswered than its
    supervisor needs to end it; long before the limit for stalls."""
    async with Town("both-0") as town:
        stand_still(town.worker("both-0"))
        client = town.ask()
        began = town.clock.now()
        await town.until(lambda: client.over, turns=2000, seconds=0.02)
        assert isinstance(client.error, NoWorkers)
        assert "out of reach" in str(client.error)
        assert town.clock.now() - began < STILL_S + 4 * (FailoverConfig().probe_s + 0.75) + FailoverConfig().no_path_s
        assert len(town.suspects) >= 4  # so often that its supervisor, if it has one, forks it anew
        assert rows(town)["both-0"] == "quarantined"


async def test_one_that_computes_again_answers_its_probe_and_is_let_back() -> None:
    async with Town("both-0") as town:
        go_on = stand_still(town.worker("both-0"))
        client = town.ask()
        await town.until(lambda: rows(town)["both-0"] == "quarantined", turns=600, seconds=0.01)
        go_on()
        await town.until(lambda: client.over, turns=600, seconds=0.01)
        client.assert_true_answer()
        await town.wait(0.5)
        assert rows(town)["both-0"] == "ready"
        metrics = town.router.metrics.exposition().decode()
        assert 'worker_probes_total{model_name="null",outcome="answered",worker="both-0"} 1.0' in metrics
        await town.assert_idle()


async def test_who_hears_is_let_back_on_its_word() -> None:
    """There is no sound to probe it with."""
    async with Town("both-0", config=GatewayConfig(name="g", model_name="null", task=Task.TRANSCRIBE)) as town:
        client = town.ask(max_tokens=30)
        await town.until(lambda: len(client.tokens) > 3)
        town.stop("both-0")
        await town.until(lambda: rows(town)["both-0"] != "ready", turns=1200, seconds=0.01)
        town.wake("both-0")
        await town.until(lambda: rows(town)["both-0"] == "ready", turns=1200, seconds=0.01)
        await town.finish()
        client.assert_true_answer()
        assert "worker_probes_total{" not in town.router.metrics.exposition().decode()


async def test_a_probe_is_wanted_for_as_long_as_it_may_take() -> None:
    """Its worker asks after a while whether it still is."""
    config = GatewayConfig(name="g", model_name="null", failover=FailoverConfig(probe_s=20.0))
    async with Town("both-0", config=config) as town:
        go_on = stand_still(town.worker("both-0"))
        client = town.ask()
        await town.until(lambda: rows(town)["both-0"] == "quarantined", turns=600, seconds=0.01)
        await town.wait(CONFIRM_INTERVAL_S + 3)
        go_on()
        await town.until(lambda: client.over, turns=200, seconds=0.02)
        client.assert_true_answer()
        metrics = town.router.metrics.exposition().decode()
        assert 'worker_probes_total{model_name="null",outcome="sent",worker="both-0"} 1.0' in metrics


async def test_a_slow_model_has_longer() -> None:
    """Twenty predicted steps: a worker whose steps take a second has twenty of them."""
    async with Town("both-0") as town:
        worker = town.worker("both-0")
        client = town.ask(max_tokens=30)
        await town.until(lambda: len(client.tokens) > 3)
        worker.mailbox.reporter._step_s = 1.0
        go_on = stand_still(worker)
        await town.wait(19.0)
        assert town.suspects == []
        go_on()
        await town.finish()
        client.assert_true_answer()
        assert len(town.router.debug(client.request.id)) == 1


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_request_that_only_the_mailbox_knows_is_given_back(victim: str) -> None:
    async with Town("prefill-0", "decode-0", lease_s=10.0) as town:
        worker = town.worker(victim)
        apply = worker.scheduler.apply
        lose_arrivals(worker)
        client = town.ask()
        await town.wait(0.5)
        worker.scheduler.apply = apply  # type: ignore[method-assign]
        await town.until(lambda: client.over, turns=400, seconds=0.01)
        client.assert_true_answer()
        assert town.suspects == []
        assert len(town.router.debug(client.request.id)) == 2
        await town.assert_idle()


async def test_a_worker_that_waits_for_another_is_not_blamed() -> None:
    """The decode worker makes no step while a long prompt is read, one chunk after the other, for longer than that."""
    async with Town("prefill-0", "decode-0", lease_s=10.0, max_chunk_tokens=16, pages=64, max_model_len=512) as town:
        client = town.ask(prompt=400)
        while not client.over:
            await town.turn(0.4)
        client.assert_true_answer()
        assert town.clock.now() > 100.0 + 2 * STILL_S
        assert town.suspects == []
        assert len(town.router.debug(client.request.id)) == 1
