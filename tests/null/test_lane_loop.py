"""The loop with two lanes over the null device: the tokens of the other loop, and answers that no prompt holds up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from penstock.clock import VirtualClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import Arrive, Cancelled, Event, Lane, Outcome, Plan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.lane_loop import LaneLoop
from penstock.engine.runner.null import NullLanes, null_token
from penstock.types import BlockHash, FinishReason, Leg, RequestId, SamplingParams

VOCAB = 50
CHUNK_S, STEP_S = 0.1, 0.004


@dataclass
class TimedMailbox:
    """Events by the time that they come at; when each token was told of."""

    clock: VirtualClock
    coming: list[tuple[float, Event]] = field(default_factory=list)
    told: dict[RequestId, list[tuple[float, int]]] = field(default_factory=dict)
    finish: dict[RequestId, FinishReason] = field(default_factory=dict)
    plans: list[Plan] = field(default_factory=list)

    def drain(self) -> Iterable[Event]:
        now = self.clock.now()
        due = [event for at, event in self.coming if at <= now]
        self.coming = [(at, event) for at, event in self.coming if at > now]
        return due

    def about_to_run(self, predicted_s: float) -> None:
        assert predicted_s > 0

    def publish(self, outcome: Outcome, plan: Plan) -> None:
        self.plans.append(plan)
        for item in outcome.progress:
            own = self.told.setdefault(item.request.id, [])
            assert item.index == len(own)
            own += [(self.clock.now(), token) for token in item.tokens]
            if item.finish is not None:
                self.finish[item.request.id] = item.finish


class Stage:
    """A loop, and a clock that is turned to whatever happens next."""

    def __init__(self, coming: list[tuple[float, Event]], *, max_steps: int = 1, **config: int) -> None:
        self.clock = VirtualClock()
        self.mailbox = TimedMailbox(self.clock, coming)
        self.runner = NullLanes(
            self.clock, lambda plan: CHUNK_S if plan.lane is Lane.READING else STEP_S * plan.steps, vocab=VOCAB
        )
        fields = {"pages": 128, "max_model_len": 512, "max_chunk_tokens": 64, **config}
        self.loop = LaneLoop(
            self.mailbox, Scheduler(SchedulerConfig(**fields)), self.runner, self.clock, max_steps=max_steps
        )

    def run(self) -> None:
        for _ in range(20_000):
            if self.loop.step():
                continue
            times = [at for at, _ in self.mailbox.coming]
            done = self.runner.next_done()
            if done is not None:
                times.append(done)
            if not times:
                return
            self.clock.advance(min(times) - self.clock.now())
        raise AssertionError("the loop does not come to rest")

    def gaps(self, name: str) -> list[float]:
        times = [at for at, _ in self.mailbox.told[RequestId(name)]]
        return [round(b - a, 6) for a, b in pairwise(times)]


def arrive(name: str, tokens: int, answer: int) -> Arrive:
    return Arrive(
        id=RequestId(name),
        epoch=0,
        leg=Leg.WHOLE,
        prompt=tuple(range(tokens)),
        sampling=SamplingParams(seed=len(name), max_tokens=answer),
        arrival=0.0,
        root=BlockHash(bytes(32)),
    )


def wanted(event: Arrive) -> list[int]:
    begin = len(event.prompt)
    return [null_token(event.sampling, begin + index, vocab=VOCAB) for index in range(event.sampling.max_tokens)]


@pytest.mark.parametrize("max_steps", [1, 2])
def test_one_prompt_one_answer(max_steps: int) -> None:
    events = [arrive("r" * (n + 1), 1 + 37 * n % 200, 1 + 5 * n % 23) for n in range(16)]
    stage = Stage(
        [(0.03 * n, event) for n, event in enumerate(events)], max_steps=max_steps, pages=20, max_model_len=256
    )
    stage.run()
    for event in events:
        assert [token for _, token in stage.mailbox.told[event.id]] == wanted(event)
        assert stage.mailbox.finish[event.id] is FinishReason.LENGTH
    assert stage.loop.scheduler.check().total == 0
    assert stage.loop.scheduler.load().pages_used == 0
    assert any(plan.steps > 1 for plan in stage.mailbox.plans) == (max_steps > 1)


def test_an_answer_does_not_wait_for_a_long_prompt() -> None:
    """Chunks of 0.1 s come and go; every token of the answer comes 4 ms after the one before."""
    stage = Stage([(0.0, arrive("answer", 3, 300)), (0.2, arrive("long", 400, 2))])
    stage.run()
    assert set(stage.gaps("answer")) == {STEP_S}
    chunks = [plan for plan in stage.mailbox.plans if plan.lane is Lane.READING and plan.rows]
    assert len(chunks) >= 8
    assert len(stage.mailbox.told[RequestId("long")]) == 2


def test_what_is_cancelled_under_way_ends_with_its_lane() -> None:
    stage = Stage([(0.0, arrive("gone", 300, 9)), (0.05, Cancelled(id=RequestId("gone"), epoch=0))])
    stage.run()
    assert stage.mailbox.told == {}
    assert stage.clock.now() == pytest.approx(CHUNK_S)
    assert stage.loop.scheduler.check().total == 0
    assert stage.loop.scheduler.load().pages_used == 0


def test_a_lane_is_begun_once() -> None:
    runner = NullLanes(VirtualClock(), lambda plan: 1.0)
    for plan in (Plan(), Plan(lane=Lane.READING)):
        if plan.lane is None:
            with pytest.raises(RuntimeError, match="no lane"):
                runner.begin(plan)
    runner.begin(Plan(lane=Lane.READING))
    assert not runner.done(Lane.READING)
    with pytest.raises(RuntimeError, match="busy"):
        runner.begin(Plan(lane=Lane.READING))


def test_an_idle_loop_says_so() -> None:
    stage = Stage([])
    assert not stage.loop.step()
    assert [plan.lane for plan in stage.mailbox.plans] == [Lane.WRITING, Lane.READING]
