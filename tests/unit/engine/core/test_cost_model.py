"""The cost model learns a machine from its steps, keeps budgets, and is not upset by one bad measurement."""

from __future__ import annotations

from random import Random

import pytest

from penstock.engine.core.cost_model import SLOW_FLOPS, StepCostModel, StepWork, cost_prior

FAST = (0.0004, 4e-6, 2e-11, 1e-5)  # seconds: a step, a token, a pair, a draw
SLOW = (0.3, 0.02, 1e-7, 0.01)


def seconds(machine: tuple[float, float, float, float], work: StepWork) -> float:
    a, b, c, d = machine
    return a + b * work.tokens + c * work.pairs + d * work.draws


def some_work(random: Random) -> StepWork:
    work = StepWork()
    for _ in range(random.randrange(0, 32)):
        work.add(random.randrange(4000), 1, 1)
    if random.random() < 0.5 or work.tokens == 0:
        work.add(random.randrange(0, 4000), random.choice([1, 16, 64, 250, 1000]), 0)
    return work


@pytest.mark.parametrize("machine", [FAST, SLOW])
def test_it_learns_a_machine(machine: tuple[float, float, float, float]) -> None:
    random, cost = Random(1), StepCostModel()
    for step in range(400):
        work = some_work(random)
        if step > 300:
            assert cost.predict(work) == pytest.approx(seconds(machine, work), rel=0.35)
        cost.update(work, seconds(machine, work) * random.uniform(0.95, 1.05))


@pytest.mark.parametrize(("machine", "budget_s"), [(FAST, 0.006), (SLOW, 1.0)])
def test_a_dozen_chunks_teach_enough_to_keep_the_budget(
    machine: tuple[float, float, float, float], budget_s: float
) -> None:
    cost = StepCostModel()
    taken = 0.0
    for _ in range(12):
        work = StepWork()
        work.add(0, max(16, min(2048, cost.affordable_tokens(work, budget_s, 0))), 0)
        taken = seconds(machine, work)
        cost.update(work, taken)
    assert taken == pytest.approx(budget_s, rel=0.5)


def test_what_is_affordable_is_what_the_budget_buys() -> None:
    cost = StepCostModel()
    random = Random(2)
    for _ in range(50):
        work = some_work(random)
        cost.update(work, seconds(SLOW, work))
    for start in (0, 1000, 30_000):
        work = StepWork()
        count = cost.affordable_tokens(work, 5.0, start)
        work.add(start, count, 1)
        assert cost.predict(work) <= 5.0
        work.add(start + count, 2, 0)
        assert cost.predict(work) > 5.0
    assert cost.affordable_tokens(StepWork(), 0.0, 0) == 0


def test_a_process_that_was_stopped_teaches_little() -> None:
    random, cost = Random(3), StepCostModel()
    for _ in range(200):
        work = some_work(random)
        cost.update(work, seconds(FAST, work))
    work = StepWork()
    work.add(0, 512, 1)
    before = cost.predict(work)
    cost.update(work, 60.0)
    assert cost.predict(work) < 4.1 * before
    for _ in range(20):
        cost.update(work, seconds(FAST, work))
    assert cost.predict(work) == pytest.approx(seconds(FAST, work), rel=0.3)


def test_only_decoding_for_long_leaves_a_sane_idea_of_chunks() -> None:
    cost = StepCostModel()
    random = Random(4)
    for _ in range(5000):
        work = StepWork()
        for _ in range(8):
            work.add(500, 1, 1)
        cost.update(work, 0.02 * random.uniform(0.9, 1.1))
    chunk = StepWork()
    chunk.add(0, 256, 1)
    assert 0.001 < cost.predict(chunk) < 1.0
    assert 16 <= cost.affordable_tokens(StepWork(), 0.25, 0) <= 10_000


@pytest.mark.parametrize("noise", [0.0, 0.05])
def test_steps_of_nearly_one_length_tell_weights_apart_in_time(noise: float) -> None:
    """A worker that reads brief pieces only took a step's own cost for nothing, and so cut them ever shorter."""
    random, cost = Random(6), StepCostModel(cost_prior(70_000_000_000))
    for _ in range(900):
        work = StepWork()
        work.add(random.randrange(8000), random.choice([256, 256, 256, 272, 328, 600]), 0)
        cost.update(work, (0.012 + 5e-5 * work.tokens) * random.uniform(1 - noise, 1 + noise))
    assert cost.rates[0] == pytest.approx(0.012, rel=0.25)
    assert cost.rates[1] == pytest.approx(5e-5, rel=0.15)


def test_a_step_of_nothing_teaches_nothing() -> None:
    cost = StepCostModel()
    before = cost.predict(StepWork())
    cost.update(StepWork(), 1.0)
    assert cost.predict(StepWork()) == before
    assert cost.measured_steps == 0


@pytest.mark.parametrize("parameters", [10_000_000, 1_200_000_000, 70_000_000_000])
@pytest.mark.parametrize("flops", [20e9, 100e9, 1e12])
def test_the_first_chunk_of_an_unknown_machine_is_short(parameters: int, flops: float) -> None:
    """A machine up to half as slow as the guess overruns nothing, whatever the model's size."""
    cost = StepCostModel(cost_prior(parameters))
    count = max(16, cost.affordable_tokens(StepWork(), 0.25, 0))  # a page at least, as the planner grants
    assert count * 2 * parameters / flops <= max(0.25, 16 * 2 * parameters / SLOW_FLOPS)


@pytest.mark.parametrize("parameters", [10_000_000, 1_200_000_000, 8_000_000_000])
@pytest.mark.parametrize("weights_tokens", [1, 4, 16, 64])
@pytest.mark.parametrize("token_s", [2e-5, 2e-3, 2e-2])
def test_one_short_prompt_does_not_promise_that_long_ones_are_for_nothing(
    parameters: int, weights_tokens: int, token_s: float
) -> None:
    """A 1 B model once read 16 tokens in 60 ms, foresaw 0.24 s for 2,048 of them, and was deaf for 10 s."""
    cost = StepCostModel(cost_prior(parameters))
    machine = (weights_tokens * token_s, token_s, 0.0, 0.0)
    short = StepWork()
    short.add(0, 16, 1)
    cost.update(short, seconds(machine, short))
    long = StepWork()
    long.add(0, max(16, cost.affordable_tokens(StepWork(), 0.25, 0)), 1)
    assert seconds(machine, long) <= max(3 * 0.25, seconds(machine, short))


def test_answers_that_join_are_foreseen() -> None:
    """From one row to eight, on a machine that has to read the weights anyway."""
    cost = StepCostModel(cost_prior(1_200_000_000))
    for rows in range(1, 9):
        for _ in range(4):
            work = StepWork()
            for _ in range(rows):
                work.add(300, 1, 1)
            taken = 0.035 + 0.003 * rows
            if cost.measured_steps > 2:
                assert cost.predict(work) == pytest.approx(taken, rel=0.6)
            cost.update(work, taken)


def test_a_machine_that_others_use_too_is_followed_within_a_dozen_steps() -> None:
    random, cost = Random(5), StepCostModel(cost_prior(1_200_000_000))
    chunk = StepWork()
    chunk.add(0, 48, 0)
    rows = StepWork()
    for _ in range(8):
        rows.add(300, 1, 1)
    for slower in (1.0, 3.0, 1.0):
        for _ in range(12):
            cost.update(rows, slower * 0.06 * random.uniform(0.9, 1.1))
        assert cost.predict(rows) == pytest.approx(slower * 0.06, rel=0.2)
        cost.update(chunk, slower * 0.2)  # one chunk, to have seen what it costs against rows
    assert cost.predict(chunk) == pytest.approx(0.2, rel=0.5)
