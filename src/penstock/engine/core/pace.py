"""Even pace: answers are written no faster than they will be when all who wait for their prompts are answered too.

While prompts are being read by a worker that borrows this one's cores, few answers written at full speed take a core
to read the weights that many could share, from prompts that many wait for.  So after a step of answers this worker
rests for as long as the same step would have taken longer with those who wait in it, and lends its cores meanwhile.
Nobody's answer gets slower by it than it is about to be anyway, nor than half its speed, nor than the step's budget.

Pure: it is told what took how long.  Knows no cores, and no prompts but their number.
"""

from __future__ import annotations

from penstock.engine.core.cost import StepCost, Work

MOST_RATIO = 2.0
"""A step and its rest together, by the step."""

LEAST_REST_S = 0.002
"""A shorter rest is not worth waking others for."""


class Pace:
    """When the next step of answers may begin."""

    def __init__(self, cost: StepCost, budget_s: float) -> None:
        self._cost = cost
        self._budget_s = budget_s
        self.until = 0.0

    def took(self, work: Work, awaiting: int, seconds: float, now: float) -> None:
        """A step of answers alone, ``work``, ended now, and ``awaiting`` more answers could not be in it yet."""
        self.until = 0.0
        if awaiting == 0 or work.tokens == 0:
            return
        rows = work.tokens + awaiting
        together = Work(tokens=rows, pairs=work.pairs * rows // work.tokens, draws=work.draws + awaiting)
        pace = min(self._cost.predict(together), MOST_RATIO * self._cost.predict(work), self._budget_s)
        rest = pace - seconds  # none after a step that somebody else has held up
        if rest >= LEAST_REST_S:
            self.until = now + rest
