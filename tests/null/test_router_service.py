"""The router's service in front of real workers without a model: answers, losses, leaving, limits."""

from __future__ import annotations

import random

import pytest

from penstock.config.schema import FailoverConfig, GatewayConfig, Limits
from penstock.errors import NoWorkers, QueueFull, RequestError, StalledRequest, WorkerLost
from penstock.types import FinishReason, Leg, RequestId, WorkerState

from .router_town import Town
from .worker_stage import IDENTITY

SPLIT = ("prefill-0", "decode-0")
WIDE = ("prefill-0", "prefill-1", "decode-0", "decode-1")
WHOLE = ("both-0",)


def rows(town: Town) -> dict[str, str]:
    return {row["id"]: row["state"] for row in town.router.workers()}


# --- answers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [SPLIT, WIDE, WHOLE, ("both-0", "both-1")])
async def test_a_prompt_goes_in_and_its_answer_comes_out(names):
    async with Town(*names) as town:
        client = town.ask()
        await town.finish()
        client.assert_true_answer()
        assert client.finish is FinishReason.LENGTH
        await town.assert_idle()


@pytest.mark.parametrize("names", [SPLIT, WHOLE])
async def test_many_at_once_answer_as_each_alone(names):
    async with Town(*names, pages=512) as town:
        clients = [town.ask(f"r{i}", prompt=1 + 7 * i, seed=i, max_tokens=1 + i % 9) for i in range(20)]
        await town.finish()
        for client in clients:
            client.assert_true_answer()
        await town.assert_idle()


async def test_both_legs_take_part_in_a_split_and_one_worker_in_the_last_token():
    async with Town(*SPLIT) as town:
        town.ask("long")
        town.ask("short", max_tokens=1)
        await town.finish()
        (long,), (short,) = town.router.debug(RequestId("long")), town.router.debug(RequestId("short"))
        assert [(chosen.leg, chosen.worker) for chosen in long.legs] == [
            (Leg.DECODE, "decode-0"),
            (Leg.PREFILL, "prefill-0"),
        ]
        assert [(chosen.leg, chosen.worker) for chosen in short.legs] == [(Leg.WHOLE, "prefill-0")]
        assert len(long.reasons()) == 2
        assert town.worker("decode-0").receiver.counters.pages > 0


@pytest.mark.parametrize("names", [SPLIT, WHOLE])
async def test_the_first_batch_tells_the_prompts_facts(names):
    async with Town(*names) as town:
        first = town.ask("a", prompt_logprobs=2, logprobs=1)
        await town.finish()
        assert [batch.prompt_logprobs is not None for batch in first.batches] == [True] + [False] * (
            len(first.batches) - 1
        )
        assert [entry.token for entry in first.batches[0].prompt_logprobs or ()] == list(range(1, 40))
        assert [entry.token for batch in first.batches for entry in batch.logprobs or ()] == first.tokens
        second = town.ask("b")
        await town.finish()
        assert second.batches[0].cached_tokens == 32
        assert all(batch.cached_tokens == 0 for batch in second.batches[1:])


async def test_the_same_prefix_goes_where_it_was_computed():
    async with Town(*WIDE) as town:
        for turn in range(6):
            client = town.ask(f"r{turn}", prompt=(*range(32), 900 + turn))
            await town.finish(client)
            assert client.batches[0].cached_tokens == (32 if turn else 0)


# --- readiness ------------------------------------------------------------------------------------------------------


async def test_ready_only_while_every_leg_has_a_worker():
    async with Town("prefill-0") as town:
        assert not town.router.ready()
        assert town.router.identity() == IDENTITY
        town.fork("decode-0")
        assert rows(town) == {"prefill-0": "ready", "decode-0": "starting"}
        await town.turn()
        assert town.router.ready()
        town.kill("prefill-0")
        assert rows(town) == {"prefill-0": "dead", "decode-0": "ready"}
        assert not town.router.ready()
        assert town.router.identity() == IDENTITY


async def test_without_any_worker_there_is_no_identity():
    async with Town() as town:
        assert town.router.identity() is None
        assert not town.router.ready()
        assert town.router.alive() is None
        assert list(town.router.workers()) == []


async def test_a_request_waits_for_the_first_worker():
    async with Town() as town:
        client = town.ask()
        await town.wait(1.0)
        assert not client.over
        town.fork("both-0")
        await town.finish()
        client.assert_true_answer()


async def test_a_request_does_not_wait_for_ever():
    config = GatewayConfig(name="g", limits=Limits(first_byte_s=5.0))
    async with Town("prefill-0", config=config) as town:
        client = town.ask()
        await town.wait(4.9)
        assert not client.over
        await town.wait(0.5)
        assert isinstance(client.error, NoWorkers)


async def test_draining_takes_nothing_new_and_lets_run():
    async with Town(*SPLIT) as town:
        running = town.ask("a")
        await town.until(lambda: running.tokens)
        town.drain()
        refused = town.ask("b")
        await town.finish()
        assert isinstance(refused.error, NoWorkers)
        running.assert_true_answer()
        assert not town.router.ready()


async def test_one_request_cannot_be_served_twice_at_once():
    async with Town(*SPLIT) as town:
        client = town.ask("same")
        await town.turn()
        with pytest.raises(ValueError, match="is being served already"):
            await anext(town.router.stream(client.request))
        await town.finish()
        client.assert_true_answer()


# --- losses ---------------------------------------------------------------------------------------------------------


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
            if town.router.fleet.working():
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


# --- leaving --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("names", [SPLIT, WHOLE])
@pytest.mark.parametrize("turns", range(14))
async def test_a_client_that_leaves_at_any_turn_frees_everything(names, turns):
    async with Town(*names, max_chunk_tokens=16) as town:
        client = town.ask(prompt=70, max_tokens=50)
        for _ in range(turns):
            await town.turn()
        await town.leave(client)
        assert client.tokens == client.truth()[: len(client.tokens)]
        assert not town.router.fleet.working()
        await town.assert_idle(within=0.2)


async def test_a_consumer_that_has_enough_is_counted_as_a_success():
    async with Town(*WHOLE) as town:
        enough, gone = town.ask("enough", max_tokens=50), town.ask("gone", max_tokens=50)
        await town.until(lambda: enough.tokens and gone.tokens)
        town.router.stopped(enough.request.id)
        town.router.stopped(RequestId("unknown"))
        await town.leave(enough)
        await town.leave(gone)
        text = town.router.metrics.exposition().decode()
        for reason in ("stop", "abort"):
            assert f'penstock:request_success_total{{finished_reason="{reason}",model_name="null"}} 1.0' in text


# --- limits ---------------------------------------------------------------------------------------------------------


async def test_full_queues_everywhere_are_told_before_the_first_token():
    async with Town(*WHOLE, max_queued=1, max_running=1) as town:
        clients = [town.ask(f"r{i}", max_tokens=40) for i in range(4)]
        await town.finish()
        refused = [client for client in clients if client.error is not None]
        assert refused
        assert all(isinstance(client.error, QueueFull) and not client.tokens for client in refused)
        for client in clients:
            if client not in refused:
                client.assert_true_answer()
        await town.assert_idle()


async def test_what_no_worker_can_hold_is_refused():
    async with Town(*WHOLE, pages=3, max_model_len=48) as town:
        client = town.ask(prompt=100)
        await town.finish()
        assert isinstance(client.error, RequestError)
        await town.assert_idle()


async def test_a_stall_ends_with_an_error_and_nothing_left():
    config = GatewayConfig(name="g", limits=Limits(stall_s=3.0), failover=FailoverConfig(silence_s=1e6))
    async with Town(*SPLIT, config=config) as town:
        client = town.ask(max_tokens=20)
        await town.until(lambda: client.tokens)
        town.stop("decode-0")
        await town.wait(4.0)
        assert isinstance(client.error, StalledRequest)
        town.wake("decode-0")
        await town.assert_idle()


async def test_alive_tells_when_something_runs_and_nothing_moves():
    async with Town(*SPLIT) as town:
        await town.wait(20.0)
        client = town.ask(max_tokens=20)
        await town.until(lambda: client.tokens)
        assert town.router.alive() is None
        for name in SPLIT:
            town.stop(name)
        await town.wait(5.0)
        assert town.router.alive() is None
        await town.wait(2.0)
        assert (town.router.alive() or "").startswith("1 requests are open and no worker has made a step for")
        for name in SPLIT:
            town.wake(name)
        await town.finish()
        assert town.router.alive() is None


async def test_counters_never_go_back_when_a_worker_is_forked_anew():
    async with Town(*WHOLE) as town:
        seen = 0.0
        for turn in range(3):
            client = town.ask(f"r{turn}")
            await town.finish(client)
            await town.wait(0.5)
            steps = town.router.metrics.totals.value("both-0", "steps")
            assert steps > seen
            seen = steps
            town.kill("both-0")
            town.fork("both-0")
        await town.wait(0.5)
        assert town.router.metrics.totals.value("both-0", "steps") == seen


async def test_closing_the_router_ends_every_stream():
    async with Town(*SPLIT) as town:
        client = town.ask(max_tokens=50)
        await town.until(lambda: client.tokens)
        await town.router.close()
        await town.until(lambda: client.over)
        assert isinstance(client.error, NoWorkers)


# --- everything at once ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
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
