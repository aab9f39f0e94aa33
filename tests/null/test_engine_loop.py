"""The hot loop over the null device: whatever the pages, chunks, room, batch and order, the tokens are the same."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import pytest

from penstock.clock import VirtualClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest, CancelRequest, EngineEvent
from penstock.engine.core.plan import SampledTokens, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop, PipelinedLoop
from penstock.engine.runner.null_runner import NullRunner, null_token
from penstock.types import BlockHash, FinishReason, RequestId, RequestStage, SamplingParams

VOCAB = 50
ROOT = BlockHash(bytes(32))


class ListMailbox:
    """Events from a list; tokens into a dictionary, each index once."""

    def __init__(self) -> None:
        self.events: list[EngineEvent] = []
        self.tokens: dict[RequestId, list[int]] = {}
        self.finish: dict[RequestId, FinishReason] = {}
        self.predicted: list[float] = []
        self.plans: list[StepPlan] = []

    def drain_events(self) -> Iterable[EngineEvent]:
        events, self.events = self.events, []
        return events

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_step_begin(self, predicted_s: float) -> None:
        self.predicted.append(predicted_s)

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        self.plans.append(plan)
        for item in outcome.new_tokens:
            received = self.tokens.setdefault(item.request.id, list(item.request.output[: item.request.emitted]))
            assert item.index == len(received)
            received.extend(item.tokens)
            if item.finish is not None:
                self.finish[item.request.id] = item.finish


class TimedRunner(NullRunner):
    """Takes a millisecond and a tenth of one for each token, on a clock that the test turns."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(vocab=VOCAB)
        self.clock = clock
        self.forgotten: list[RequestId] = []

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        self.clock.advance(1e-3 + 1e-4 * plan.steps * sum(row.count for row in plan.rows))
        return super().run(plan)

    def remove_request(self, request: RequestId) -> None:
        self.forgotten.append(request)


class StagedRunner(TimedRunner):
    """Of a model with stages: plans are launched before they are run."""

    def __init__(self, clock: VirtualClock) -> None:
        super().__init__(clock)
        self.launched: list[StepPlan] = []
        self.most = 0  # at once

    def launch(self, plan: StepPlan) -> None:
        assert plan.rows
        self.launched.append(plan)
        self.most = max(self.most, len(self.launched))

    def run(self, plan: StepPlan) -> Sequence[SampledTokens]:
        assert self.launched.pop(0) is plan
        return super().run(plan)


def engine(config: SchedulerConfig, *, max_steps: int = 1) -> tuple[EngineLoop, ListMailbox, TimedRunner]:
    clock, mailbox = VirtualClock(), ListMailbox()
    runner = TimedRunner(clock)
    return EngineLoop(mailbox, Scheduler(config), runner, clock, max_steps=max_steps), mailbox, runner


def staged_engine(config: SchedulerConfig, stages: int) -> tuple[PipelinedLoop, ListMailbox, StagedRunner]:
    clock, mailbox = VirtualClock(), ListMailbox()
    runner = StagedRunner(clock)
    return PipelinedLoop(mailbox, Scheduler(config, micro_batches=stages), runner, clock), mailbox, runner


def run(loop: EngineLoop) -> None:
    for _ in range(20_000):
        if not loop.step():
            return
    raise AssertionError("the loop does not come to rest")


def requests(count: int) -> list[AddRequest]:
    random = Random(7)
    found = []
    for number in range(count):
        length = random.choice([1, 3, 16, 17, 60, 90])
        found.append(
            AddRequest(
                id=RequestId(f"r{number}"),
                epoch=0,
                stage=RequestStage.WHOLE,
                prompt=tuple(range(length)) if number % 2 else tuple(range(number, number + length)),
                sampling=SamplingParams(
                    seed=number % 5,
                    choice=number % 2,
                    max_tokens=random.choice([1, 5, 30]),
                    min_tokens=random.choice([0, 4]),
                    stop_token_ids=(3, 4),
                ),
                arrival=float(number),
                root=ROOT,
            )
        )
    return found


def alone(event: AddRequest, max_model_len: int) -> tuple[list[int], FinishReason]:
    """The answer by the definition of the null device, without an engine."""
    tokens: list[int] = []
    sampling = event.sampling
    while True:
        position = len(event.prompt) + len(tokens)
        tokens.append(null_token(sampling, position, vocab=VOCAB, drawn=len(tokens)))
        if tokens[-1] in sampling.stop_token_ids:
            return tokens, FinishReason.STOP
        if len(tokens) == sampling.max_tokens or position + 1 == max_model_len:
            return tokens, FinishReason.LENGTH


@pytest.mark.parametrize("order", ["in order", "reversed"])
@pytest.mark.parametrize("max_steps", [1, 5])
@pytest.mark.parametrize("chunk", [16, 64, 2048])
@pytest.mark.parametrize(("page_tokens", "room"), [(16, 128), (16, 9), (4, 33), (1, 129)])
def test_one_prompt_one_answer(page_tokens: int, room: int, chunk: int, max_steps: int, order: str) -> None:
    config = SchedulerConfig(
        pages=room, page_tokens=page_tokens, max_model_len=128, max_chunk_tokens=chunk, step_budget_ms=20.0
    )
    loop, mailbox, runner = engine(config, max_steps=max_steps)
    events = requests(20)
    mailbox.events = list(events) if order == "in order" else list(reversed(events))
    run(loop)
    for event in events:
        assert (mailbox.tokens[event.id], mailbox.finish[event.id]) == alone(event, 128)
    # What the test claims took place:
    assert any(len(plan.rows) > 1 for plan in mailbox.plans)
    assert chunk > 90 or any(not row.samples for plan in mailbox.plans for row in plan.rows)
    assert any(plan.steps > 1 for plan in mailbox.plans) == (max_steps > 1)
    assert loop.scheduler.memory.hit_tokens > 0
    assert loop.scheduler.check_leaks().total == 0
    assert loop.scheduler.load().pages_used == 0
    assert sorted(runner.forgotten) == sorted(event.id for event in events)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize(("room", "chunk"), [(128, 2048), (128, 16), (9, 16)])
def test_a_pipeline_gives_the_same_answers(stages: int, room: int, chunk: int) -> None:
    config = SchedulerConfig(pages=room, max_model_len=128, max_chunk_tokens=chunk, step_budget_ms=20.0)
    loop, mailbox, runner = staged_engine(config, stages)
    events = requests(20)
    mailbox.events = list(events)
    run(loop)
    for event in events:
        assert (mailbox.tokens[event.id], mailbox.finish[event.id]) == alone(event, 128)
    assert not runner.launched
    assert runner.most == stages  # every stage had something to compute
    assert loop.scheduler.check_leaks().total == 0


def test_what_leaves_while_a_stage_computes_it_does_no_harm() -> None:
    config = SchedulerConfig(pages=128, max_model_len=128)
    loop, mailbox, runner = staged_engine(config, 2)
    left, kept = requests(9)[6:8]
    events = [replace(event, sampling=SamplingParams(seed=n, max_tokens=30)) for n, event in enumerate((left, kept))]
    mailbox.events = list(events)
    loop.step()
    while len(runner.launched) != 1 or not any(row.request.id == left.id for row in runner.launched[0].rows):
        loop.step()
    mailbox.events = [CancelRequest(id=left.id, epoch=left.epoch)]
    run(loop)
    assert left.id not in mailbox.finish
    assert (mailbox.tokens[kept.id], mailbox.finish[kept.id]) == alone(events[1], 128)
    assert runner.forgotten.count(left.id) == 1
    assert loop.scheduler.check_leaks().total == 0


def test_resubmitted_answers_go_on_with_the_same_tokens() -> None:
    event = requests(6)[4]
    event = replace(event, sampling=SamplingParams(seed=1, max_tokens=12))
    whole, finish = alone(event, 128)
    for have in range(12):
        loop, mailbox, _ = engine(SchedulerConfig(pages=16, max_model_len=128))
        mailbox.events = [replace(event, epoch=3, emitted=tuple(whole[:have]))]
        run(loop)
        assert mailbox.tokens[event.id] == whole
        assert mailbox.finish[event.id] is finish


def test_the_heartbeat_is_told_before_each_step_and_learns() -> None:
    loop, mailbox, _ = engine(SchedulerConfig(pages=64, max_model_len=512))
    mailbox.events = [replace(event, prompt=event.prompt * 4) for event in requests(10)]
    run(loop)
    with_rows = [plan for plan in mailbox.plans if plan.rows]
    assert mailbox.predicted == [plan.predicted_s for plan in with_rows]
    true = [1e-3 + 1e-4 * sum(row.count for row in plan.rows) for plan in with_rows]
    assert mailbox.predicted[-1] == pytest.approx(true[-1], rel=0.2)


def test_credits_are_seen_before_the_step_runs() -> None:
    loop, mailbox, runner = engine(SchedulerConfig(pages=64, max_model_len=128))
    seen: list[tuple[float, tuple[RequestId, ...]]] = []
    mailbox.on_plan = lambda plan: seen.append((runner.clock.now(), tuple(r.id for r in plan.reserved)))
    first, second = requests(2)
    mailbox.events = [first, replace(second, stage=RequestStage.DECODE)]
    loop.step()
    assert seen == [(0.0, (second.id,))]
    assert runner.clock.now() > 0.0


def test_a_cancelled_request_leaves_nothing() -> None:
    loop, mailbox, runner = engine(SchedulerConfig(pages=64, max_model_len=128))
    event = replace(requests(1)[0], sampling=SamplingParams(seed=1, max_tokens=30))
    mailbox.events = [event]
    for _ in range(5):
        loop.step()
    received = list(mailbox.tokens[event.id])
    mailbox.events = [CancelRequest(id=event.id, epoch=0)]
    run(loop)
    assert mailbox.tokens[event.id] == received
    assert runner.forgotten == [event.id]
    assert loop.scheduler.load().pages_used == 0


def test_an_idle_loop_says_so() -> None:
    loop, mailbox, _ = engine(SchedulerConfig(pages=64, max_model_len=128))
    assert not loop.step()
    assert mailbox.predicted == []
    assert len(mailbox.plans) == 1
