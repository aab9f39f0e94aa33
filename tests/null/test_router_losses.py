"""Workers die, stop and wake under the router's service, and clients leave: no answer changes, nothing stays held."""

from __future__ import annotations

import asyncio
import itertools
import random

import msgspec
import pytest

from penstock.config.limits import FailoverConfig, RequestLimits
from penstock.config.schema import GatewayConfig
from penstock.errors import NoWorkers, WorkerLost
from penstock.router.request import RequestPhase, RoutedRequest
from penstock.types import Duty, ModelIdentity, RequestId, WorkerId, WorkerState
from penstock.wire.gateway_messages import TokenItem, Tokens
from tiers import first_of

from .router_town import SPLIT, WHOLE, WIDE, Town, rows
from .worker_stage import IDENTITY


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
@pytest.mark.parametrize("turns", range(14))
async def test_a_worker_killed_at_any_turn_changes_no_answer(victim, turns):
    async with Town(*SPLIT, max_chunk_tokens=16) as town:
        client = town.ask(prompt=70)
        for _ in range(turns):
            await town.turn()
        town.kill(victim)
        await town.turn()
        town.fork(victim)
        await town.finish()
        client.assert_true_answer()
        await town.assert_idle()


async def test_an_answer_goes_on_elsewhere_after_a_kill_in_its_middle():
    async with Town(*WIDE) as town:
        client = town.ask(max_tokens=12)
        await town.until(lambda: len(client.tokens) >= 4)
        (decision,) = town.router.debug(client.request.id)
        assert decision.decode is not None
        town.kill(decision.decode.worker)
        assert len(client.tokens) < 12
        await town.finish()
        client.assert_true_answer()
        assert len(town.router.debug(client.request.id)) == 2
        text = town.router.metrics.exposition().decode()
        assert 'penstock:resubmissions_total{model_name="null"} 1.0' in text
        assert f'penstock:worker_deaths_total{{model_name="null",worker="{decision.decode.worker}"}} 1.0' in text
        await town.assert_idle()


async def test_the_death_of_the_prefill_worker_after_the_hand_over_is_not_noticed():
    async with Town(*SPLIT) as town:
        client = town.ask(max_tokens=12)
        await town.until(lambda: len(client.tokens) >= 4)
        town.kill("prefill-0")
        await town.finish()
        client.assert_true_answer()
        assert len(town.router.debug(client.request.id)) == 1


async def test_everybody_killed_over_and_over():
    async with Town(*SPLIT) as town:
        client = town.ask(max_tokens=30)
        for round_ in range(10):
            await town.until(lambda: len(client.tokens) > 2 * round_)  # noqa: B023
            for name in SPLIT:
                town.kill(name)
                town.fork(name)
        await town.finish()
        client.assert_true_answer()
        await town.assert_idle()


async def test_a_worker_that_always_dies_is_given_up_in_the_end():
    config = GatewayConfig(name="g", failover=FailoverConfig(max_attempts=4))
    async with Town("both-0", config=config, max_chunk_tokens=16) as town:
        client = town.ask(prompt=100)
        kills = 0
        while not client.over:
            if town.router.fleet.has_work():
                town.kill("both-0")
                town.fork("both-0")
                kills += 1
            await town.turn()
        assert isinstance(client.error, WorkerLost)
        assert kills == 4


@pytest.mark.parametrize("victim", ["prefill-0", "decode-0"])
async def test_a_stopped_worker_is_suspected_and_harmless_when_it_wakes(victim):
    async with Town(*WIDE, lease_s=10.0) as town:
        clients = [town.ask(f"r{i}", seed=i, prompt=20 + i, max_tokens=20) for i in range(6)]
        await town.until(lambda: any(client.tokens for client in clients))
        town.stop(victim)
        await town.wait(3.0)
        assert [suspect.worker for suspect in town.suspects] == [victim]
        assert rows(town)[victim] == "wedged"
        await town.finish()
        for client in clients:
            client.assert_true_answer()
        town.wake(victim)
        await town.wait(0.5)
        assert rows(town)[victim] == "ready"
        await town.assert_idle()
        for client in clients:
            client.assert_true_answer()


async def test_an_idle_worker_may_be_silent():
    async with Town(*SPLIT) as town:
        town.stop("decode-0")
        await town.wait(5.0)
        assert town.suspects == []


async def test_a_gateway_that_did_not_listen_suspects_nobody():
    async with Town(*SPLIT) as town:
        client = town.ask(max_tokens=20)
        await town.until(lambda: client.tokens)
        town.clock.advance(9.0)
        town.router.tick()
        assert town.suspects == []
        await town.finish()
        client.assert_true_answer()


async def test_what_a_wedged_worker_says_after_the_supervisors_word_is_void():
    async with Town(*SPLIT) as town:
        client = town.ask(max_tokens=20)
        await town.until(lambda: client.tokens)
        town.kill("decode-0", WorkerState.WEDGED)
        assert rows(town)["decode-0"] == "wedged"
        town.fork("decode-0")
        await town.finish()
        client.assert_true_answer()


async def test_a_preempted_answer_goes_on():
    async with Town(*SPLIT) as town:
        town.kill("decode-0")
        town.fork("decode-0", pages=10, max_model_len=160)
        clients = [town.ask(f"r{i}", prompt=40, seed=i, max_tokens=60) for i in range(3)]
        await town.finish()
        for client in clients:
            client.assert_true_answer()
        assert max(len(town.router.debug(client.request.id)) for client in clients) > 1
        await town.assert_idle()


@pytest.mark.parametrize("names", [SPLIT, WHOLE])
@pytest.mark.parametrize("turns", range(14))
async def test_a_client_that_leaves_at_any_turn_frees_everything(names, turns):
    async with Town(*names, max_chunk_tokens=16) as town:
        client = town.ask(prompt=70, max_tokens=50)
        for _ in range(turns):
            await town.turn()
        await town.leave(client)
        assert client.tokens == client.truth()[: len(client.tokens)]
        assert not town.router.fleet.has_work()
        await town.assert_idle(within=0.2)


async def test_a_consumer_that_has_enough_is_counted_as_a_success():
    async with Town(*WHOLE) as town:
        enough, gone = town.ask("enough", max_tokens=50), town.ask("gone", max_tokens=50)
        await town.until(lambda: enough.tokens and gone.tokens)
        town.router.mark_stopped(enough.request.id)
        town.router.mark_stopped(RequestId("unknown"))
        await town.leave(enough)
        await town.leave(gone)
        text = town.router.metrics.exposition().decode()
        for reason in ("stop", "abort"):
            assert f'penstock:request_success_total{{finished_reason="{reason}",model_name="null"}} 1.0' in text


@pytest.mark.parametrize("seed", first_of(range(12), 4))
@pytest.mark.parametrize("names", [WIDE, ("both-0", "both-1")])
async def test_chaos_changes_no_answer_and_leaves_nothing(names, seed):
    dice = random.Random(seed)
    async with Town(*names, lease_s=0.3, max_chunk_tokens=16, pages=40) as town:
        clients, left, stopped = [], [], []
        for turn in range(400):
            if dice.random() < 0.08 and len(clients) < 24:
                prompt = tuple(dice.randrange(50) for _ in range(dice.randrange(1, 120)))
                client = town.ask(f"r{turn}", prompt=prompt, seed=turn, max_tokens=dice.randrange(1, 40))
                clients.append(client)
            if dice.random() < 0.02:
                name = dice.choice(town.alive)
                town.kill(name)
                stopped = [other for other in stopped if other != name]
                if dice.random() < 0.7:
                    await town.turn()
                town.fork(name)
            if dice.random() < 0.01 and len(stopped) < len(names) - 1:
                name = dice.choice([name for name in town.alive if name not in stopped])
                town.stop(name)
                stopped.append(name)
            if stopped and dice.random() < 0.02:
                town.wake(stopped.pop(0))
            if dice.random() < 0.02 and clients:
                client = dice.choice(clients)
                if not client.over:
                    await town.leave(client)
                    left.append(client)
            await town.turn(dice.choice([0.001, 0.001, 0.05]))
        for name in stopped:
            town.wake(name)
        await town.finish(turns=4000)
        assert len(clients) > 10
        for client in clients:
            if client in left:
                assert client.tokens == client.truth()[: len(client.tokens)]
            else:
                client.assert_true_answer()
        await town.assert_idle()


async def test_all_streams_of_a_lost_host_go_on_and_a_turn_of_the_loop_moves_only_some_of_them():
    """2,000 streams, more than the retry budget holds; the other worker is idle."""
    failover = FailoverConfig(retry_burst=8, streams_per_turn=20)
    config = GatewayConfig(name="g", model_name="null", failover=failover)
    async with Town("both-0", config=config, max_queued=4096, max_model_len=128) as town:
        clients = [town.ask(f"r{i}", seed=i, prompt=4) for i in range(2000)]
        await town.settle()
        flights = [stream.routed for stream in town.router._streams.values()]
        assert all(flight.phase is RequestPhase.FLYING for flight in flights)
        town.fork("both-1")
        await town.turn()
        town.kill("both-0")
        moved, turns = [0], 0
        while moved[-1] < len(flights):
            assert turns < 1000
            moved.append(sum(flight.epoch > 1 and flight.phase is RequestPhase.FLYING for flight in flights))
            turns += 1
            await asyncio.sleep(0)
        lost = [later - earlier for earlier, later in itertools.pairwise(moved)]
        assert max(lost) <= failover.streams_per_turn
        assert not any(client.error for client in clients)


async def test_streams_of_a_lost_worker_outwait_the_full_queue_of_the_one_that_is_left():
    """It has room for one after the other, and for two that wait: some are turned away more often than that."""
    async with Town(max_model_len=160) as town:
        town.fork("both-0", pages=200)
        await town.wait(0.3)
        clients = [town.ask(f"r{i}", seed=i, prompt=30, max_tokens=100) for i in range(8)]
        await town.until(lambda: all(client.tokens for client in clients))
        town.fork("both-1", pages=10, max_queued=2)
        await town.wait(0.3, step=0.01)
        town.kill("both-0")
        await town.until(lambda: all(client.over for client in clients), seconds=0.05)
        for client in clients:
            client.assert_true_answer()
        await town.assert_idle()


@pytest.mark.parametrize(("event", "epoch"), [("on_worker_lost", 1), ("placement_request", 2)])
async def test_an_error_with_one_stream_keeps_no_other_from_going_on(monkeypatch, caplog, event, epoch):
    """When it is taken away from a lost worker, or placed with another."""
    async with Town("both-0", "both-1") as town:
        clients = [town.ask(f"r{i}", seed=i, prompt=4, max_tokens=30) for i in range(20)]
        await town.turn()
        method, failed = getattr(RoutedRequest, event), list[RoutedRequest]()

        def fails_once(flight, *args):
            if not failed and flight.epoch == epoch:
                failed.append(flight)
                raise RuntimeError(event)
            return method(flight, *args)

        monkeypatch.setattr(RoutedRequest, event, fails_once)
        town.kill("both-0")
        await town.until(lambda: bool(failed))
        others = [client for client in clients if event != "on_worker_lost" or client.request is not failed[0].request]
        await town.finish(*others)
        for client in others:
            client.assert_true_answer()
    assert failed[0].request.id in caplog.text


async def test_an_error_in_a_look_at_one_stream_keeps_none_from_its_deadline(monkeypatch):
    config = GatewayConfig(name="g", model_name="null", limits=RequestLimits(first_byte_s=1.0))
    async with Town(config=config) as town:  # nobody serves them
        clients = [town.ask(f"r{i}") for i in range(4)]
        await town.turn()
        tick, failed = RoutedRequest.on_tick, list[str]()

        def fails_once_each(flight, *args):
            if flight.request.id not in failed:
                failed.append(flight.request.id)
                raise RuntimeError("tick")
            return tick(flight, *args)

        monkeypatch.setattr(RoutedRequest, "on_tick", fails_once_each)
        await town.wait(2.0)
        assert len(failed) == len(clients)
        assert all(isinstance(client.error, NoWorkers) for client in clients)


async def test_what_another_process_says_over_a_link_is_not_believed():
    """A link over TCP connects anew by itself: to whoever listens at the address now."""
    async with Town(*WHOLE) as town:
        client = town.ask(max_tokens=40)
        await town.until(lambda: len(client.tokens) >= 2)
        worker, incarnation = WorkerId(WHOLE[0]), town.worker(WHOLE[0]).incarnation
        item = TokenItem(request=client.request.id, epoch=1, index=len(client.tokens), tokens=(0,))
        for said_by in ((worker, incarnation + 1), (WorkerId("both-9"), incarnation)):
            town.router.on_message(
                worker, incarnation, Tokens(worker=said_by[0], incarnation=said_by[1], items=(item,))
            )
        await town.finish()
        client.assert_true_answer()


async def test_a_report_of_a_later_process_closes_the_link_to_the_earlier_one():
    async with Town("both-0", "both-1") as town:
        client = town.ask(max_tokens=40)
        await town.until(lambda: len(client.tokens) >= 2)
        name = town.router.debug(client.request.id)[0].stages[0].worker
        other = next(each for each in town.alive if each != name)
        report = town.router.fleet.reports[town.router.fleet.slot(name)]
        later = msgspec.structs.replace(report, incarnation=report.incarnation + 1)
        town.router.on_message(name, report.incarnation, later)
        assert town.router._links.link_to(name, report.incarnation) is None
        await town.finish()
        client.assert_true_answer()
        assert town.router.debug(client.request.id)[-1].stages[0].worker == other


async def _two_models(config: GatewayConfig) -> tuple[Town, ModelIdentity]:
    town = Town("both-0", "both-1", config=config)
    await town.__aenter__()
    await town.wait(6.0, step=0.25)
    stranger = ModelIdentity(fingerprint="another", numerics=IDENTITY.numerics)
    town.fork("both-2", stranger)
    await town.wait(0.5)
    for name in ("both-0", "both-1"):
        await town.tell(name, duty=Duty.DRAIN, force=True)
    return town, stranger


async def test_a_worker_of_another_model_is_given_nothing_while_all_others_are_away():
    town, _ = await _two_models(GatewayConfig(name="g", model_name="null"))
    assert rows(town) == {"both-0": "draining", "both-1": "draining", "both-2": "foreign"}
    (row,) = [row for row in town.router.workers() if row["id"] == "both-2"]
    assert row["reason"].startswith("it serves another model (another) than this gateway (")
    client = town.ask()
    await town.wait(1.0)
    assert not town.router.debug(client.request.id)[-1].stages
    await town.tell("both-0", duty=Duty.SERVE)
    await town.finish()
    client.assert_true_answer()
    await town.__aexit__()


async def test_it_serves_in_a_rolling_upgrade():
    town, stranger = await _two_models(GatewayConfig(name="g", model_name="null", allow_model_upgrade=True))
    assert rows(town)["both-2"] == "ready"
    client = town.ask()
    await town.finish()
    assert town.router.debug(client.request.id)[-1].identity == stranger
    await town.__aexit__()
