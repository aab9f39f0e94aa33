"""The router's service in front of real workers without a model: answers, readiness, limits."""

from __future__ import annotations

import pytest

from penstock.config.limits import FailoverConfig, RequestLimits
from penstock.config.schema import GatewayConfig
from penstock.errors import NoWorkers, QueueFull, RequestError, StalledRequest
from penstock.types import FinishReason, RequestId, RequestStage, WorkerId

from .router_town import SPLIT, WHOLE, WIDE, Town, rows
from .worker_stage import IDENTITY

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
        assert [(chosen.stage, chosen.worker) for chosen in long.stages] == [
            (RequestStage.DECODE, "decode-0"),
            (RequestStage.PREFILL, "prefill-0"),
        ]
        assert [(chosen.stage, chosen.worker) for chosen in short.stages] == [(RequestStage.WHOLE, "prefill-0")]
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
        assert town.router.stall_reason() is None
        assert list(town.router.workers()) == []


async def test_a_request_waits_for_the_first_worker():
    async with Town() as town:
        client = town.ask()
        await town.wait(1.0)
        assert not client.over
        town.fork("both-0")
        await town.finish()
        client.assert_true_answer()


async def test_a_worker_that_is_gone_before_the_first_request_has_said_which_model_is_served():
    """What comes then waits for the next worker instead of being refused at once."""
    async with Town(*WHOLE) as town:
        await town.until(town.router.ready)
        for name in WHOLE:
            town.kill(name)
        assert await town.router.wait_identity() == IDENTITY


async def test_a_request_does_not_wait_for_ever():
    config = GatewayConfig(name="g", limits=RequestLimits(first_byte_s=5.0))
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


async def test_who_was_refused_waits_no_more_though_somebody_is_kept_apart():
    async with Town(*WHOLE, pages=3, max_model_len=48) as town:
        placement = town.router._placement
        placement.isolation.place(RequestId("suspect"), [(WorkerId("elsewhere-0"), 1)])
        client = town.ask(prompt=100)
        await town.finish()
        assert isinstance(client.error, RequestError)
        assert placement.due_requests(town.clock.now() + 60, ready=True) == []


async def test_what_no_worker_can_hold_is_refused():
    async with Town(*WHOLE, pages=3, max_model_len=48) as town:
        client = town.ask(prompt=100)
        await town.finish()
        assert isinstance(client.error, RequestError)
        await town.assert_idle()


async def test_a_stall_ends_with_an_error_and_nothing_left():
    config = GatewayConfig(name="g", limits=RequestLimits(stall_s=3.0), failover=FailoverConfig(silence_s=1e6))
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
        assert town.router.stall_reason() is None
        for name in SPLIT:
            town.stop(name)
        await town.wait(5.0)
        assert town.router.stall_reason() is None
        await town.wait(2.0)
        assert (town.router.stall_reason() or "").startswith("1 requests are open and no worker has made a step for")
        for name in SPLIT:
            town.wake(name)
        await town.finish()
        assert town.router.stall_reason() is None


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


async def test_workers_that_can_read_prompts_are_counted():
    async with Town("prefill-0", "decode-0", "both-0", "both-1") as town:
        assert town.router.prefill_workers() == 3
        town.kill("both-1")
        await town.turn()
        assert town.router.prefill_workers() == 2
