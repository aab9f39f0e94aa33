"""The heartbeat: when a worker says that it will be back, and when it says nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from penstock.engine.core.plan import ScheduledTokens, StepPlan
from penstock.launch.heartbeat import Board
from penstock.launch.pulse import Pulse

ROWS = cast("tuple[ScheduledTokens, ...]", (None,))


class Watch:
    """A pulse over a board, and a clock that is turned."""

    def __init__(self) -> None:
        self.now_ns = 0
        (self.slot,) = Board(1).slots
        self.planned: list[StepPlan] = []
        mailbox: Any = SimpleNamespace(
            planned=self.planned.append, reporter=SimpleNamespace(steps=7), gateways_now=None
        )
        self.pulse = Pulse(self.slot, {"g": self.slot}, mailbox, lambda: self.now_ns)
        assert mailbox.gateways_now() == {"g": 0}

    def plan(self, at_s: float, predicted_s: float = 0.0) -> tuple[float, float]:
        self.now_ns = int(at_s * 1e9)
        plan = StepPlan(rows=ROWS if predicted_s else (), predicted_s=predicted_s)
        self.pulse.on_plan(plan)
        assert self.planned[-1] is plan
        beat = self.slot.read()
        assert beat.steps == 7
        return beat.beat_s, beat.predicted_end_s


def test_a_step_is_told_of_before_it_runs() -> None:
    watch = Watch()
    assert watch.plan(1.0, 0.5) == (1.0, 1.5)
    assert watch.plan(1.6) == (1.6, 1.6)
