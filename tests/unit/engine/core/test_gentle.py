"""A very long prompt beside answers: they hardly notice, who comes after it is not kept, and it ends in its time."""

from __future__ import annotations

import math
from random import Random

import numpy as np
import pytest

from penstock.config.limits import VERY_LONG_PROMPT_TARGETS
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel, StepWork
from penstock.engine.core.events import AddRequest
from penstock.engine.core.pacing import MAX_STRETCH, LongPromptLimits, StepSoFar, long_prompt_share_s
from penstock.engine.core.plan import SampledTokens
from penstock.engine.core.request import Request
from penstock.engine.core.scheduler import Scheduler
from penstock.types import BlockHash, Qos, RequestId, RequestStage, SamplingParams, ServiceClass

STEP_S, TOKEN_S, TARGET_S = 0.012, 5e-5, 0.1
BOUNDS = LongPromptLimits(TARGET_S, math.inf)
ANYBODY = Qos()


def asked(name: str, prompt: int, answer: int, qos: Qos = ANYBODY) -> AddRequest:
    """A prompt that shares nothing."""
    random = Random(name)
    return AddRequest(
        id=RequestId(name),
        epoch=0,
        stage=RequestStage.WHOLE,
        prompt=tuple(random.randrange(1 << 20) for _ in range(prompt)),
        sampling=SamplingParams(seed=0, max_tokens=answer),
        arrival=0.0,
        root=BlockHash(bytes(32)),
        qos=qos,
    )


class Clocked:
    """A scheduler that knows its machine, and when each token came."""

    def __init__(self, long_prompt_ms: float = TARGET_S * 1e3) -> None:
        cost = StepCostModel()
        for number in range(600):
            work = StepWork()
            for _ in range(number % 16):
                work.add(100, 1, 1)
            work.add(number * 7919 % 20_000, 1 + number * 37 % 900, 1)
            cost.update(work, STEP_S + TOKEN_S * work.tokens)
        limits = SchedulerConfig(pages=4000, max_model_len=40_000, long_prompt_ms=long_prompt_ms)
        self.scheduler = Scheduler(limits, cost)
        self.now = 0.0
        self.tokens: dict[str, list[float]] = {}

    def ask(self, name: str, prompt: int, answer: int, qos: Qos = ANYBODY) -> None:
        self.scheduler.apply(asked(name, prompt, answer, qos), self.now)

    def step(self) -> None:
        plan = self.scheduler.plan(self.now)
        self.now += STEP_S + TOKEN_S * sum(row.count for row in plan.rows)
        drawn = [SampledTokens((7,)) if row.samples else SampledTokens() for row in plan.rows]
        for progress in self.scheduler.commit(plan, drawn, self.now).new_tokens:
            self.tokens.setdefault(progress.request.id, []).append(self.now)

    def until(self, name: str) -> float:
        """When its first token comes."""
        while name not in self.tokens:
            self.step()
        return self.now


def gaps(times: list[float], since: float) -> list[float]:
    return np.diff([each for each in times if each >= since]).tolist()


def test_answers_hardly_notice_a_very_long_prompt() -> None:
    clocked = Clocked()
    for number in range(12):
        clocked.ask(f"a{number}", 100, 5000)
    clocked.until("a11")
    for _ in range(100):
        clocked.step()
    begun, before = clocked.now, gaps(clocked.tokens["a0"], clocked.now - 1.0)
    clocked.ask("long", 20_000, 1)
    took = clocked.until("long") - begun
    beside = gaps(clocked.tokens["a0"], begun)
    assert np.quantile(beside, 0.99) <= 1.2 * np.quantile(before, 0.99)
    assert took <= 1.1 * MAX_STRETCH * 20_000 * TOKEN_S


def test_who_comes_after_it_is_not_kept() -> None:
    clocked = Clocked()
    for number in range(12):
        clocked.ask(f"a{number}", 100, 5000)
    clocked.until("a11")
    clocked.ask("long", 20_000, 1)
    for _ in range(10):
        clocked.step()
    begun = clocked.now
    clocked.ask("short", 500, 1)
    assert clocked.until("short") - begun <= 2 * (STEP_S + 600 * TOKEN_S)
    assert "long" not in clocked.tokens


@pytest.mark.parametrize("answers", [0, 1])
def test_nothing_is_kept_back_where_few_or_none_would_notice(answers: int) -> None:
    gentle, greedy = Clocked(), Clocked(long_prompt_ms=0.0)
    took = []
    for clocked in (gentle, greedy):
        if answers:
            clocked.ask("a", 100, 9000)
            clocked.until("a")
        begun = clocked.now
        clocked.ask("long", 20_000, 1)
        took.append(clocked.until("long") - begun)
    assert took[0] <= took[1] * (1.01 if not answers else 2.2)


def of(qos: Qos = ANYBODY) -> Request:
    return Request(asked("r", 4, 1, qos), serial=1, max_model_len=64)


def test_how_long_a_piece_may_be() -> None:
    beside = StepSoFar(decode_rows=32, decode_s=0.012, now=5.0)
    assert long_prompt_share_s(of(), VERY_LONG_PROMPT_TARGETS * TARGET_S, beside, BOUNDS) == math.inf  # not that long
    batch = of(Qos(service=ServiceClass.BATCH))
    assert long_prompt_share_s(batch, 100 * TARGET_S, beside, BOUNDS) == math.inf  # fills what is left
    assert long_prompt_share_s(of(), 100 * TARGET_S, StepSoFar(0, 0.0, 5.0), BOUNDS) == math.inf  # nobody notices
    assert long_prompt_share_s(of(), 100 * TARGET_S, beside, BOUNDS) == pytest.approx(0.012 / (MAX_STRETCH - 1))
    twice = long_prompt_share_s(of(), math.cbrt(2) * VERY_LONG_PROMPT_TARGETS * TARGET_S, beside, BOUNDS)
    assert twice == pytest.approx(0.012)  # half of the step
    alone = long_prompt_share_s(of(), 100 * TARGET_S, StepSoFar(1, 0.012, 5.0), BOUNDS)
    assert alone == pytest.approx(0.012)  # as much for it as for the one answer


def test_one_that_falls_behind_may_have_more_and_in_the_end_everything() -> None:
    request = of()
    first = long_prompt_share_s(request, 1.0, StepSoFar(32, 0.012, 0.0), BOUNDS)
    late = long_prompt_share_s(request, 0.9, StepSoFar(32, 0.012, 5.0), BOUNDS)
    assert late > first
    assert long_prompt_share_s(request, 0.8, StepSoFar(32, 0.012, 9.5), BOUNDS) == math.inf


def test_nobody_is_read_so_gently_that_it_is_too_late() -> None:
    beside, bounds = StepSoFar(32, 0.012, 0.0), LongPromptLimits(TARGET_S, 60.0)
    late = of()
    long_prompt_share_s(late, 15.0, beside, bounds)
    assert late.paced_until == 60.0  # not 8 * 15
    assert long_prompt_share_s(of(), 61.0, beside, bounds) == math.inf
    pressed = of(Qos(max_wait_s=20.0))
    long_prompt_share_s(pressed, 5.0, beside, bounds)
    assert pressed.paced_until == 10.0
    assert long_prompt_share_s(of(Qos(max_wait_s=8.0)), 5.0, beside, bounds) == math.inf


def test_who_has_begun_its_answer_is_read_again_at_full_speed() -> None:
    request = of()
    beside = StepSoFar(32, 0.012, 0.0)
    assert long_prompt_share_s(request, 5.0, beside, BOUNDS) < math.inf
    request.append(7)
    assert long_prompt_share_s(request, 5.0, beside, BOUNDS) == math.inf


def test_a_deadline_is_met_amid_answers() -> None:
    clocked = Clocked()
    for number in range(12):
        clocked.ask(f"a{number}", 100, 5000)
    clocked.until("a11")
    begun = clocked.now
    clocked.ask("long", 20_000, 1, Qos(max_wait_s=4.0))
    assert clocked.until("long") - begun < 4.0
