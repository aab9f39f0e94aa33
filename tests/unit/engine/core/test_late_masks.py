"""Answers whose next token's mask is late: they keep their place, take part in no step, and hold nobody up."""

from __future__ import annotations

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens, ScheduledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.types import BlockHash, Grammar, GrammarKind, RequestId, RequestStage, SamplingParams

GRAMMAR = Grammar(kind=GrammarKind.REGEX, text="a*")


def arrive(name: str, prompt: int, grammar: Grammar | None = None) -> AddRequest:
    return AddRequest(
        id=RequestId(name),
        epoch=1,
        stage=RequestStage.WHOLE,
        prompt=tuple(range(100, 100 + prompt)),
        sampling=SamplingParams(seed=1, max_tokens=8, grammar=grammar),
        arrival=0.0,
        root=BlockHash(name.encode() * 32),
    )


def shown(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(str(row.request.id), row.start, row.count) for row in plan.rows]


def test_a_late_row_is_computed_again_when_its_mask_is_there_and_not_before() -> None:
    late: set[RequestId] = set()
    scheduler = Scheduler(SchedulerConfig(pages=32, max_model_len=64), without_masks=lambda: late)
    scheduler.apply(arrive("a", 20, GRAMMAR), 0.0)
    scheduler.apply(arrive("b", 3), 0.0)

    def step(*late_rows: str) -> tuple[list[tuple[str, int, int]], list[str], int]:
        def drawn(row: ScheduledTokens) -> SampledTokens:
            return SampledTokens(mask_late=True) if row.request.id in late_rows else SampledTokens((7,))

        plan = scheduler.plan(0.0, max_steps=4)
        assert plan.steps == 1 or not any(row.request.id == "a" for row in plan.rows)
        outcome = scheduler.commit(plan, [drawn(row) for row in plan.rows], 0.0)
        return shown(plan), [str(progress.request.id) for progress in outcome.new_tokens], outcome.late_masks

    assert step("a") == ([("a", 0, 20), ("b", 0, 3)], ["b"], 1)
    late.add(RequestId("a"))
    assert step()[:2] == ([("b", 3, 1)], ["b"])
    assert scheduler.waits_for_masks
    late.clear()
    assert step() == ([("a", 19, 1), ("b", 4, 1)], ["a", "b"], 0), "the last token again, with the draw"
    assert step("a") == ([("a", 20, 1), ("b", 5, 1)], ["b"], 1)
    assert step() == ([("a", 20, 1), ("b", 6, 1)], ["a", "b"], 0)
    assert not scheduler.waits_for_masks
    assert scheduler.check_leaks().total == 0
