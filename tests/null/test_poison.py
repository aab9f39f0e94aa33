"""Requests that workers die of are failed, and nobody else is; what fails again and again is spread out in time."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec import structs

from penstock.config.limits import FailoverConfig
from penstock.config.schema import GatewayConfig
from penstock.errors import PoisonRequest
from penstock.poison_verdicts import VERDICT_S
from penstock.router.request import RequestPhase
from penstock.router.service import RouterService
from penstock.types import RequestId, Role, ValidRequest, WorkerState, pack_token_ids
from penstock.wire.supervisor_messages import WorkerUp

from .router_town import WHOLE, WIDE, Client, Town

POISON_AT = 3
"""The answer's token at which a worker dies of it."""


def up(town: Town, worker: str) -> WorkerUp:
    """A gateway's supervisor says that this worker is there."""
    known = town.worker(worker)
    return WorkerUp(worker=known.name, incarnation=known.incarnation, role=Role.BOTH, pid=1, endpoint=known.endpoint)


class Sick(Town):
    """A town where a worker dies of its own when it has written so much of a poisonous answer."""

    poison: tuple[Client, ...] = ()
    deaths = 0
    elsewhere = False
    """Whether the workers are on another host: only a worker's next incarnation says how it ended."""

    def __init__(self, *names: str, **options: Any) -> None:
        super().__init__(*names, **options)
        self.others: list[RouterService] = []

    def add_gateway(self, name: str, worker: str) -> RouterService:
        """Another gateway, which knows only this worker."""
        router = RouterService(
            GatewayConfig(name=name, model_name="null"),
            connect=self.stage.hub.connect_async,
            clock=self.clock,
            suspect=self.suspects.append,
        )
        router.on_supervisor(up(self, worker))
        self.others.append(router)
        return router

    async def __aexit__(self, *error: object) -> None:
        await super().__aexit__(*error)
        for router in self.others:
            await router.close()

    async def turn(self, seconds: float = 0.001) -> None:
        await super().turn(seconds)
        for router in self.others:
            router.tick()
        for client in self.poison:
            if client.over or len(client.tokens) < POISON_AT:
                continue
            for name in self.alive:
                if any(client.request.id == own for own in self.worker(name).mailbox._requests._requests):
                    self.kill(name, fault=not self.elsewhere)
                    self.fork(name, predecessor_fault="killed by SIGSEGV" if self.elsewhere else "")
                    self.deaths += 1
                    break


async def test_a_request_that_workers_die_of_is_failed_after_two(caplog: pytest.LogCaptureFixture) -> None:
    async with Sick("both-0", "both-1", "both-2") as town:
        town.poison = (town.ask("bad", max_tokens=30),)
        await town.until(lambda: town.poison[0].over)
        error = town.poison[0].error
        assert isinstance(error, PoisonRequest)
        assert town.deaths == 2
        text = str(error)
        assert "Request bad ended 2 workers" in text
        assert "both-" not in text  # which workers there are, and what ails them, is for the log
        assert "killed" not in text
        (line,) = [vars(each)["fields"] for each in caplog.records if each.getMessage() == "request ends workers"]
        assert line["ends"].count("(killed)") == line["deaths"] == 2
        assert f"The {len(town.poison[0].tokens)} tokens sent so far stay valid" in text
        assert town.poison[0].tokens == town.poison[0].truth()[: len(town.poison[0].tokens)]
        assert "poison_requests_total" in town.router.metrics.exposition().decode()
        await town.assert_idle()


async def test_crashes_of_workers_on_other_hosts_count_too(caplog: pytest.LogCaptureFixture) -> None:
    async with Sick("both-0", "both-1", "both-2") as town:
        town.elsewhere = True
        town.poison = (town.ask("bad", max_tokens=30),)
        other = town.ask("good", prompt=(1, 2, 3), max_tokens=30)
        await town.until(lambda: all(client.over for client in town.clients))
        assert isinstance(town.poison[0].error, PoisonRequest)
        assert town.deaths <= 3, "one more may have died before the second told of the first"
        (line,) = [vars(each)["fields"] for each in caplog.records if each.getMessage() == "request ends workers"]
        assert line["ends"].count("SIGSEGV") == line["deaths"] == 2
        other.assert_true_answer()
        await town.assert_idle()


async def test_every_gateway_refuses_it_also_one_that_comes_later() -> None:
    async with Sick("both-0", "both-1", "both-2", "both-3") as town:
        town.poison = (town.ask("bad", max_tokens=30),)
        early, other = town.add_gateway("early", "both-3"), town.add_gateway("other", "both-3")
        await town.until(lambda: town.poison[0].over)
        late = town.add_gateway("late", "both-3")
        for gateway in (early, other, late):
            await town.until(gateway.ready, seconds=0.1)
            again = town.serve_by(gateway, as_new(town.poison[0].request, town, seed=8))
            good = town.serve_by(gateway, as_new(town.poison[0].request, town, prompt=(1, 2, 3)))
            await town.finish(again, good)
            assert isinstance(again.error, PoisonRequest)
            assert not again.tokens
            good.assert_true_answer()
        assert town.deaths == 2
        await town.wait(VERDICT_S, step=1.0)
        forgiven = town.serve_by(early, as_new(town.poison[0].request, town, seed=9))
        await town.finish(forgiven)
        forgiven.assert_true_answer()


async def test_every_gateway_hears_of_it_though_the_only_worker_has_just_ended() -> None:
    async with Sick("both-0") as town:
        town.poison = (town.ask("bad", max_tokens=30),)
        early = town.add_gateway("early", "both-0")
        await town.until(lambda: town.poison[0].over)
        early.on_supervisor(up(town, "both-0"))
        await town.until(early.ready, seconds=0.1)
        await town.wait(3.0)
        again = town.serve_by(early, as_new(town.poison[0].request, town, seed=8))
        await town.finish(again)
        assert isinstance(again.error, PoisonRequest)
        assert town.deaths == 2


def as_new(request: ValidRequest, town: Town, *, prompt: tuple[int, ...] = (), seed: int = 7) -> ValidRequest:
    """The same request sent anew, with another seed or prompt."""
    return structs.replace(
        request,
        id=RequestId(f"{request.id}-{len(town.clients)}"),
        arrival=town.clock.now(),
        prompt=pack_token_ids(prompt) if prompt else request.prompt,
        block_hashes=() if prompt else request.block_hashes,
        sampling=structs.replace(request.sampling, seed=seed),
    )


@pytest.mark.parametrize("guilty", [1, 2])
async def test_those_beside_it_get_their_answers(guilty: int) -> None:
    """All are at the one worker that dies; only the guilty fail, each after few deaths."""
    async with Sick("both-0", "both-1", pages=128, max_model_len=400) as town:
        town.poison = tuple(town.ask(f"bad{i}", prompt=(i, 2, 3), max_tokens=60) for i in range(guilty))
        others = [town.ask(f"r{i}", prompt=(90 + i,), seed=i, max_tokens=60) for i in range(8)]
        await town.until(lambda: all(client.over for client in town.clients), turns=20_000)
        assert all(isinstance(client.error, PoisonRequest) for client in town.poison)
        for client in others:
            client.assert_true_answer()
        assert town.deaths <= 4 * guilty
        await town.assert_idle(within=3.0)


async def test_deaths_from_outside_count_for_nobody() -> None:
    async with Town("both-0", "both-1") as town:
        client = town.ask(max_tokens=30)
        for _ in range(6):
            before = len(client.tokens)
            await town.until(lambda: len(client.tokens) > before)  # noqa: B023
            for name in ("both-0", "both-1"):
                town.kill(name)
                town.fork(name)
        await town.finish()
        client.assert_true_answer()


async def test_workers_that_were_given_up_and_then_found_to_have_hung_count_too() -> None:
    """The gateway moves the request as soon as a worker is silent; that the worker hung is known only later."""
    async with Town("both-0", "both-1") as town:
        client = town.ask("bad", max_tokens=30)
        await town.until(lambda: len(client.tokens) >= POISON_AT)
        for name in ("both-0", "both-1"):
            town.stop(name)
        await town.until(lambda: len(town.suspects) == 2, turns=800, seconds=0.01)
        for name in ("both-0", "both-1"):
            town.kill(name, WorkerState.WEDGED, fault=True)
        await town.settle()
        assert isinstance(client.error, PoisonRequest)
        assert client.tokens == client.truth()[: len(client.tokens)]


async def test_who_has_moved_on_since_is_not_blamed_for_a_worker_that_is_then_found_to_have_hung() -> None:
    async with Town("both-0", "both-1") as town:
        client = town.ask("long", max_tokens=200)
        await town.until(lambda: len(client.tokens) >= POISON_AT)
        (flight,) = [stream.routed for stream in town.router._streams.values()]
        (leg,) = flight.pending_stages[0]
        town.stop(leg.worker)
        await town.until(lambda: len(town.suspects) == 1, turns=800, seconds=0.01)
        before = len(client.tokens)
        await town.until(lambda: len(client.tokens) > before + 2)
        town.kill(leg.worker, WorkerState.WEDGED, fault=True)
        moved = len(client.tokens)
        await town.until(lambda: len(client.tokens) > moved)
        assert flight.crashes.deaths == ()
        await town.finish()
        client.assert_true_answer()


SMALL_BUDGET = GatewayConfig(
    name="g", model_name="null", failover=FailoverConfig(retry_burst=1, retry_share=0.0, retry_per_s=2.0)
)


async def test_a_first_failover_costs_the_budget_nothing() -> None:
    async with Town(*WIDE, config=SMALL_BUDGET) as town:
        clients = [town.ask(f"r{i}", seed=i, max_tokens=20) for i in range(6)]
        await town.until(lambda: all(len(client.tokens) > 2 for client in clients))
        began = town.clock.now()
        for name in WIDE:
            town.kill(name)
        for name in WIDE:
            town.fork(name)
        await town.until(lambda: all(client.over for client in clients), turns=1000, seconds=0.01)
        for client in clients:
            client.assert_true_answer()
        assert town.clock.now() - began < 0.5
        assert _retries(town, "at_once") >= 6.0
        assert _retries(town, "delayed") == 0.0


async def test_an_empty_budget_delays_and_never_refuses() -> None:
    """The worker dies again and again before it has written a token: the third time the budget is empty."""
    async with Town(*WHOLE, config=SMALL_BUDGET) as town:
        clients = [town.ask(f"r{i}", seed=i, max_tokens=20) for i in range(6)]
        await town.settle()
        flights = [town.router._streams[client.request.id].routed for client in clients]
        began = town.clock.now()
        for epoch in range(1, 4):
            await town.until(lambda: all(f.epoch == epoch and f.phase is RequestPhase.FLYING for f in flights))  # noqa: B023
            town.kill(*WHOLE)
            town.fork(*WHOLE)
        await town.until(lambda: all(client.over for client in clients), turns=1000, seconds=0.01)
        for client in clients:
            client.assert_true_answer()
        assert town.clock.now() - began > 1.0
        assert _retries(town, "delayed") == 6.0


def _retries(town: Town, outcome: str) -> float:
    lines = town.router.metrics.exposition().decode().splitlines()
    told = [line for line in lines if line.startswith("penstock:retries_total{") and outcome in line]
    return sum(float(line.split()[-1]) for line in told)
