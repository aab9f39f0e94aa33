"""Whether a decode worker should also prefill, because its host has no cores that only prefill workers could use.

A prefill worker on other cores spares responses the pause of a chunk of a prompt.  On a host whose workers share its
cores, that has a price: decode has a part of the cores, so each of its steps takes longer, and all weights are read for
the few tokens of such a step, which a step with a chunk reads anyway.  Where a decode step is short beside the longest
step with a chunk (``SchedulerConfig.step_budget_ms``), what it protects from is worth that.  Where one takes a large
part of that budget even so, responses are no more even than with chunks among them, and everything takes longer.

Pure.  The router decides, for each request (``penstock.router.policy.least_cost``).
"""

from __future__ import annotations

from penstock.engine.core.cost_model import WARMUP_STEPS, StepCostModel, StepWork

LOCAL_PREFILL_SHARE = 1 / 3
"""From this share of the budget on: on half of the cores the step would take up to two thirds of it."""

REMOTE_PREFILL_SHARE = 1 / 5
"""Below this share prefill workers are used again: what a step takes changes with who else computes."""

_ONE_RESPONSE = StepWork(tokens=1, draws=1)


class LocalPrefill:
    """Tells it from what decode steps take."""

    def __init__(self, cost: StepCostModel, budget_s: float) -> None:
        self._cost = cost
        self._budget_s = budget_s
        self._is_local = False

    @property
    def step_s(self) -> float:
        """Predicted seconds of a decode step of one response."""
        return self._cost.predict(_ONE_RESPONSE)

    def is_local(self) -> bool:
        """Whether prompts should be computed by the decode worker, by all steps so far: not before some were measured,
        for a session whose prompts move from one worker to another loses what was not reported yet."""
        if self._cost.measured_steps < WARMUP_STEPS:
            return False
        share = REMOTE_PREFILL_SHARE if self._is_local else LOCAL_PREFILL_SHARE
        self._is_local = self.step_s >= share * self._budget_s
        return self._is_local
