"""Whole simulated fleets: nothing is lost, nobody has more than there is, the same run comes twice."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sim_words import conversations, fleet, seen, simulated, trace

from penstock.config.fleet_file import SimRankTimes
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens
from penstock.engine.core.scheduler import Scheduler
from penstock.errors import ConfigError
from penstock.router.decide import PlacementRules, choose_workers
from penstock.router.placement import Placement
from penstock.router.policy.baselines import NAMES, make_policy
from penstock.router.request import RoutedRequest
from penstock.sim.cluster import run_json
from penstock.sim.fleet import SimulatedFleet
from penstock.sim.trace import PLAIN_TOKEN, STOP_TOKEN, TracePrompts
from penstock.sim.worker import SimWorker, scheduler_config
from penstock.types import BlockHash, RequestStage


def ranked(made: SimulatedFleet, group: str, stages: tuple[float, ...] = (), **times: float) -> SimulatedFleet:
    """The same workers, each with ranks."""
    own = tuple(msgspec.structs.replace(each, group=group, stages=stages) for each in made.workers)
    return msgspec.structs.replace(made, workers=own, ranks=SimRankTimes(layers=16, **times))


@given(
    seed=st.integers(0, 1 << 20),
    workers=st.sampled_from(["1", "3", "2:2", "1:3"]),
    policy=st.sampled_from(NAMES),
    tokens=st.sampled_from([40 * 512, 200 * 512]),
    host=st.sampled_from([0, 100 * 512]),
    group=st.sampled_from(["", "tp2", "pp2", "tp2,pp3"]),
)
@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_no_request_is_lost_and_no_page_is(
    seed: int, workers: str, policy: str, tokens: int, host: int, group: str
) -> None:
    talk = conversations(seed, requests=20)
    longest = max(job.prompt + job.output for job in talk.requests)
    made = ranked(fleet(workers, tokens=max(tokens, longest + 1024), host=host, disk=host), group)
    run = simulated(talk, made, policy=policy)
    for job, each in zip(talk.requests, run.results.requests.values(), strict=True):
        assert each.done, each.failed
        assert each.tokens == job.output
        assert each.cached < each.prompt == job.prompt
        assert each.first_at > each.arrival
    for worker in run.workers:
        assert worker.scheduler.check_leaks().total == 0
        assert worker.scheduler.memory.pool.leased == 0
        assert worker.busy.seconds <= run.end_s + 1e-9
    assert run.hit_tokens <= run.ideal_tokens


@pytest.mark.parametrize("workers", ["2", "1:2"])
def test_the_same_run_comes_twice(workers: str) -> None:
    talk = conversations(3)
    first, second = (run_json(simulated(talk, fleet(workers))) | {"wall_s": 0} for _ in range(2))
    assert first == second


@pytest.mark.parametrize("workers", ["1", "1:1"])
def test_skipped_steps_are_the_steps_that_were_skipped(workers: str, monkeypatch: pytest.MonkeyPatch) -> None:
    unbound = {"step_budget_ms": 1e6, "prefill_step_budget_ms": 1e6, "long_prompt_ms": 0.0}
    talk, free = conversations(5, requests=25), fleet(workers, **unbound)
    skipped = simulated(talk, free)
    monkeypatch.setattr(SimWorker, "_steps_ahead", lambda self: 1)
    stepped = simulated(talk, free)
    for one, other in zip(seen(skipped), seen(stepped), strict=True):
        assert one == pytest.approx(other, abs=1e-7)
    assert sum(worker.steps for worker in skipped.workers) == sum(worker.steps for worker in stepped.workers)
    assert skipped.results.intervals[1].sum() == stepped.results.intervals[1].sum()


def test_a_tiny_run_has_the_schedule_of_the_real_scheduler() -> None:
    """By hand: the scheduler alone, one step after the other, each as long as the fleet says."""
    jobs = ((0.0, 700, 30), (0.05, 1600, 3), (0.06, 40, 12), (0.5, 3000, 5))
    one = fleet("1", max_chunk_tokens=512, step_budget_ms=1e6, prefill_step_budget_ms=1e6)
    run = simulated(trace(*jobs), one, page_tokens=16)
    scheduler, prompts = Scheduler(scheduler_config(one, 16)), TracePrompts(trace(*jobs), 16)
    now, coming, ends = 0.0, list(enumerate(jobs)), dict[str, tuple[float, float]]()
    while coming or scheduler.load().running or scheduler.load().queued:
        while coming and coming[0][1][0] + one.links.message_s <= now + 1e-12:
            number, (at, _, _) = coming.pop(0)
            request = prompts.request(number, at)
            scheduler.apply(
                AddRequest(
                    id=request.id,
                    epoch=1,
                    stage=RequestStage.WHOLE,
                    prompt=request.prompt,
                    sampling=request.sampling,
                    arrival=at,
                    root=BlockHash(bytes(32)),
                    hashes=request.block_hashes,
                ),
                now,
            )
        plan = scheduler.plan(now)
        writing = [row for row in plan.rows if row.start >= len(row.request.prompt)]
        reading = sum(row.count for row in plan.rows) - len(writing)
        context = sum(row.start + 1 for row in writing)
        now += bool(writing) * (0.012 + 5e-5 * len(writing) + 1e-9 * context) + reading * 5e-5
        drawn = [
            SampledTokens(
                (STOP_TOKEN if len(row.request.output) + 1 == jobs[int(row.request.id)][2] else PLAIN_TOKEN,)
                * row.samples
            )
            for row in plan.rows
        ]
        for progress in scheduler.commit(plan, drawn, now).new_tokens:
            ends[progress.request.id] = (ends.get(progress.request.id, (now, now))[0], now)
        if not plan.rows:
            now = coming[0][1][0] + one.links.message_s
    late = one.links.message_s
    assert [(first - late, last - late) for first, last, *_ in seen(run)] == [
        pytest.approx(ends[f"{number}"], abs=1e-9) for number in range(len(jobs))
    ]


def test_tensor_ranks_divide_a_step_and_exchange_twice_a_layer() -> None:
    """One prompt of 1000 tokens, then steps of one row; the context of a row counts nothing here."""
    alone = fleet("1", max_chunk_tokens=2048, step_budget_ms=1e6, prefill_step_budget_ms=1e6, long_prompt_ms=0.0)
    alone = msgspec.structs.replace(alone, steps=msgspec.structs.replace(alone.steps, context_s=0.0))
    steps, jobs = alone.steps, trace((0.0, 1000, 21))
    made = ranked(alone, "tp4", join_s=1e-5, join_token_s=1e-7, undivided_s=1e-3, beside=0.1)
    run = simulated(jobs, made, page_tokens=16)
    found = run.results.requests[0]

    def step(seconds: float, tokens: int) -> float:
        return (1e-3 + (seconds - 1e-3) / 4) * 1.3 + 32 * (1e-5 + 1e-7 * tokens)

    assert found.ttft_s == pytest.approx(step(1000 * steps.token_s, 1000) + 2 * alone.links.message_s, rel=1e-6)
    assert found.itl_s == pytest.approx(step(steps.step_s + steps.row_s, 1), rel=1e-6)
    assert sum(worker.steps for worker in run.workers) == 21


def test_chunks_of_a_prompt_follow_each_other_through_the_stages() -> None:
    """Four chunks through two stages take five turns of half a chunk, and a lone request's step passes both."""
    alone = fleet("1", max_chunk_tokens=512, step_budget_ms=1e6, prefill_step_budget_ms=1e6, long_prompt_ms=0.0)
    alone = msgspec.structs.replace(alone, steps=msgspec.structs.replace(alone.steps, context_s=0.0))
    steps, jobs, send = alone.steps, trace((0.0, 2048, 11)), 1e-4
    chunk, message_s = 512 * steps.token_s, 2 * alone.links.message_s
    even = simulated(jobs, ranked(alone, "pp2", send_s=send), page_tokens=16).results.requests[0]
    assert even.ttft_s == pytest.approx(5 * chunk / 2 + 4 * send + message_s, rel=1e-3)
    assert even.itl_s == pytest.approx(steps.step_s + steps.row_s + send, rel=1e-6)
    uneven = simulated(jobs, ranked(alone, "pp2", (0.25, 0.75)), page_tokens=16).results.requests[0]
    assert uneven.ttft_s == pytest.approx(chunk / 4 + 4 * 0.75 * chunk + message_s, rel=1e-3)


def test_stages_compute_as_many_micro_batches() -> None:
    """Eight answers over two stages: four in a micro-batch, each step half as long, twice as many a second."""
    limits = {"step_budget_ms": 1e6, "prefill_step_budget_ms": 1e6, "long_prompt_ms": 0.0}
    alone = fleet("1", **limits)
    quick = msgspec.structs.replace(alone.steps, row_s=0.0, context_s=0.0, token_s=1e-9)
    alone = msgspec.structs.replace(alone, steps=quick)
    jobs = trace(*((n * 1e-5, 40, 400) for n in range(8)))
    one, two = (simulated(jobs, made) for made in (alone, ranked(alone, "pp2")))
    assert two.end_s == pytest.approx(one.end_s, rel=0.02)  # a step of four rows takes as long as one of eight
    by_row = msgspec.structs.replace(alone, steps=msgspec.structs.replace(quick, step_s=0.0, row_s=1e-3))
    one, two = (simulated(jobs, made) for made in (by_row, ranked(by_row, "pp2")))
    assert two.end_s == pytest.approx(one.end_s / 2, rel=0.02)


@pytest.mark.parametrize("policy", NAMES)
def test_decisions_are_those_of_the_real_router(policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is made anew by ``router.decide`` from the simulated gateway's fleet and index."""
    real, compared = Placement.decide, []

    def both(self: Any, flight: RoutedRequest, now: float) -> Any:
        how = PlacementRules(policy=make_policy(policy), page_tokens=512)
        again = choose_workers(flight.placement_request(now), self._fleet, self.prefixes, now, how, write=self._length)
        made = real(self, flight, now)
        compared.append(made[0].stages == again.stages)
        return made

    monkeypatch.setattr(Placement, "decide", both)
    run = simulated(conversations(9), fleet("2:2"), policy=policy)
    assert compared == [True] * run.decisions
    assert run.decisions >= len(run.results.requests)


def test_lower_tiers_give_back_what_the_device_had_to_forget() -> None:
    blocks = [tuple(range(100 * n, 100 * n + 20)) for n in range(4)]
    jobs = [(10.0 * turn, 20 * 512, 4, blocks[turn % 4]) for turn in range(12)]
    without = simulated(trace(*jobs, blocks=512), fleet("1", tokens=50 * 512))
    kept = simulated(trace(*jobs, blocks=512), fleet("1", tokens=50 * 512, host=100 * 512))
    slow = simulated(trace(*jobs, blocks=512), fleet("1", tokens=50 * 512, disk=100 * 512))
    assert without.hit_tokens == 0 < kept.hit_tokens == slow.hit_tokens == kept.ideal_tokens
    first = [[each.ttft_s for each in run.results.requests.values()][-1] for run in (kept, slow, without)]
    assert first == sorted(first)
    assert kept.workers[0].tier_reads() == (19 * 8, 0)


def test_workers_of_one_machine_slow_each_other_down() -> None:
    talk, apart = trace((0.0, 2000, 40), (0.001, 2000, 40)), fleet("2")
    together = msgspec.structs.replace(apart, steps=msgspec.structs.replace(apart.steps, beside=0.5))
    alone, crowded = (simulated(talk, workers).results for workers in (apart, together))
    assert crowded.ttfts()[0] == pytest.approx(alone.ttfts()[0])  # nobody else computed when it began
    assert crowded.ttfts()[1] == pytest.approx(1.5 * alone.ttfts()[1], rel=0.02)
    last = [crowded.requests[number].itl_s / alone.requests[number].itl_s for number in (0, 1)]
    assert all(1.2 < ratio <= 1.51 for ratio in last)


def test_what_lies_in_lower_tiers_is_known_to_the_router() -> None:
    """Two workers, one of which has had the prompt: it is asked again though its cache has forgotten it."""
    first, other = tuple(range(20)), tuple(range(100, 139))
    jobs = [(0.0, 20 * 512, 1, first), (5.0, 39 * 512, 1, other), (6.0, 39 * 512, 1, other), (20.0, 20 * 512, 1, first)]
    run = simulated(trace(*jobs, blocks=512), fleet("2", tokens=40 * 512, host=400 * 512))
    assert sum(worker.tier_reads()[0] for worker in run.workers) > 0
    assert run.results.requests[3].cached == 19 * 512


def test_at_most_half_of_the_pages_are_kept_for_requests_that_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight prompts that lie in host memory come at once to a worker that has room for five of them."""
    prompts = [tuple(range(100 * n, 100 * n + 20)) for n in range(8)]
    first = [(10.0 * n, 20 * 512, 1, blocks) for n, blocks in enumerate(prompts)]
    again = [(100.0 + n / 1000, 20 * 512, 200, blocks) for n, blocks in enumerate(prompts)]
    kept, fetched = [], SimWorker._fetched

    def noted(self: SimWorker, *arguments: Any) -> None:
        fetched(self, *arguments)
        leases = [lease for leases in self._kept.values() for lease in leases]
        kept.append(sum(map(len, leases)) / self.scheduler.memory.pool.pages)

    monkeypatch.setattr(SimWorker, "_fetched", noted)
    run = simulated(trace(*first, *again, blocks=512), fleet("1", tokens=100 * 512, host=400 * 512, max_running=1))
    assert run.workers[0].tier_reads()[0] > 0
    assert 0.25 < max(kept) <= 0.5


def test_a_request_that_fits_no_worker_is_refused_before_anything_runs() -> None:
    with pytest.raises(ConfigError, match="but the trace has one of 9010"):
        simulated(trace((0.0, 9000, 10)), fleet("1", tokens=8192))


def test_pages_must_fit_the_trace() -> None:
    with pytest.raises(ConfigError, match="divide the trace's blocks of 512"):
        simulated(conversations(1), fleet(), page_tokens=48)
    smaller = simulated(conversations(1, requests=8), fleet(), page_tokens=256)
    assert smaller.hit_tokens > 0
