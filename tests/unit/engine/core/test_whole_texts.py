"""Texts that are only read: whole where they must be, as long as the context, never taken for other requests."""

from __future__ import annotations

from typing import Any

import pytest
from glass_model import ROOT, prompt_of

from penstock.config.schema import PoolingConfig, SchedulerConfig
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.types import FinishReason, PoolingParams, RequestId, RequestStage, SamplingParams

WHOLE = PoolingConfig(whole_prompts=True, share_prefixes=False)
PIECES = PoolingConfig(whole_prompts=False, share_prefixes=True)


def scheduler(pooling: PoolingConfig | None, **changes: Any) -> Scheduler:
    usual = {"pages": 64, "page_tokens": 4, "max_model_len": 40, "max_step_tokens": 32, "max_chunk_tokens": 8}
    budgets = {"step_budget_ms": 1e6, "prefill_step_budget_ms": 1e6}
    return Scheduler(SchedulerConfig(**usual | budgets | changes, pooling=pooling))


def arrive(engine: Scheduler, name: str, tokens: int, *, family: int = 0, pooled: bool = True) -> None:
    engine.apply(
        AddRequest(
            id=RequestId(name),
            epoch=0,
            stage=RequestStage.WHOLE,
            prompt=prompt_of(family, tokens),
            sampling=SamplingParams(seed=0, max_tokens=1),
            arrival=0.0,
            root=ROOT,
            pooling=PoolingParams() if pooled else None,
        ),
        0.0,
    )


def step(engine: Scheduler) -> tuple[StepPlan, StepOutcome, list[str]]:
    plan = engine.plan(0.0)
    drawn = [SampledTokens((0,), pooled=b"v") if row.samples else SampledTokens() for row in plan.rows]
    outcome = engine.commit(plan, drawn, 0.0, 0.001 if plan.rows else None)
    return plan, outcome, [f"{row.request.id} {row.start}+{row.count}" for row in plan.rows]


def test_prompts_are_never_cut_and_the_longest_goes_alone() -> None:
    engine = scheduler(WHOLE)
    for index, tokens in enumerate((10, 40, 1, 12, 9, 9)):
        arrive(engine, f"t{index}", tokens, family=index)
    steps = []
    ended: list[str] = []
    while (now := step(engine))[2]:
        steps.append(now[2])
        ended += [item.request.id for item in now[1].new_tokens]
        assert all(item.pooled == b"v" and item.finish is FinishReason.LENGTH for item in now[1].new_tokens)
    assert steps == [["t0 0+10"], ["t1 0+40"], ["t2 0+1", "t3 0+12", "t4 0+9", "t5 0+9"]]
    assert ended == [f"t{index}" for index in range(6)]
    assert engine.load().pages_used == 0
    assert engine.check_leaks().total == 0


def test_equal_texts_are_read_side_by_side_where_nothing_is_shared() -> None:
    engine = scheduler(WHOLE)
    arrive(engine, "a", 16)
    arrive(engine, "b", 16)
    assert step(engine)[2] == ["a 0+16", "b 0+16"]
    arrive(engine, "c", 16)
    assert step(engine)[2] == ["c 0+16"]


def test_where_the_last_token_counts_an_equal_beginning_is_read_once_and_in_pieces() -> None:
    engine = scheduler(PIECES)
    arrive(engine, "a", 16)
    arrive(engine, "b", 16)
    assert [step(engine)[2] for _ in range(3)] == [["a 0+8"], ["a 8+8"], ["b 12+4"]]


@pytest.mark.parametrize("pooling", [WHOLE, PIECES])
def test_what_cannot_be_is_given_back(pooling: PoolingConfig) -> None:
    engine = scheduler(pooling)
    arrive(engine, "long", 41)
    arrive(engine, "chat", 5, pooled=False)
    plan, _, rows = step(engine)
    assert rows == []
    assert [(returned.id, returned.reason) for returned in plan.returned] == [
        ("long", "too_long"),
        ("chat", "wrong_task"),
    ]
    writer = scheduler(None)
    arrive(writer, "text", 5)
    assert [returned.reason for returned in step(writer)[0].returned] == ["wrong_task"]
