"""How long a plan takes: arithmetic on its rows by a fleet's ``StepTimes``.

Of several equal steps each is longer than the one before by the context that it has more, so the time of ``n`` of them
is a polynomial, and they need not be gone through one by one.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from penstock.engine.core.cost_model import SCALE, Vector
from penstock.engine.core.plan import Plan
from penstock.sim.fleet import StepTimes


class Duration(NamedTuple):
    """Of the steps of a plan."""

    first_s: float  # the first step
    growth_s: float  # each step takes so much longer than the one before

    def of(self, steps: int) -> float:
        """Seconds of so many."""
        return steps * self.first_s + self.growth_s * (steps * (steps - 1) / 2)

    def steps_within(self, seconds: float, most: int) -> int:
        """The step that is under way, or ends, after so long: 1 to ``most``."""
        if seconds <= self.first_s:
            return 1
        half = self.growth_s / 2
        linear = self.first_s - half
        steps = math.ceil(2 * seconds / (linear + math.sqrt(linear * linear + 4 * half * seconds)) - 1e-9)
        return max(1, min(most, steps))


def duration(times: StepTimes, plan: Plan, slower: float = 1.0) -> Duration:
    """A row writes when it computes one token of an answer; whatever else it computes it reads.

    ``slower``: what everything takes, by what it takes alone.
    """
    rows = context = tokens = pairs = 0
    for row in plan.rows:
        start, count = row.start, row.count
        if count == 1 and start >= len(row.request.prompt):
            rows += 1
            context += start + 1
        else:
            tokens += count
            pairs += count * start + count * (count + 1) // 2
    reading = times.token_s * tokens + times.pair_s * pairs
    if not rows:
        return Duration((times.read_step_s + reading) * slower, 0.0)
    writing = times.step_s + times.row_s * rows + times.context_s * context
    return Duration((writing + reading) * slower, times.context_s * rows * slower)


def known_before(times: StepTimes) -> Vector:
    """What a worker that has run for a while expects (``engine.core.cost.StepCost``'s prior)."""
    pair = max(times.pair_s, times.context_s, 1e-15)
    draw = max(times.row_s - times.token_s, times.row_s / 100, 1e-9)
    each = (max(times.step_s, 1e-6), max(times.token_s, 1e-9), pair, draw)
    return (each[0] * SCALE[0], each[1] * SCALE[1], each[2] * SCALE[2], each[3] * SCALE[3])
