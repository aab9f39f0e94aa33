"""When a decode worker should prefill, too: the share that its steps have of the budget of a step with chunks."""

from __future__ import annotations

from penstock.engine.core.cost_model import StepCostModel, StepWork, cost_prior
from penstock.engine.core.local_prefill import LOCAL_PREFILL_SHARE, REMOTE_PREFILL_SHARE, LocalPrefill

BUDGET_S = 0.1
STEPS = 60
"""As many steps teach the cost model a new speed."""


def measured(cost: StepCostModel, seconds: float) -> None:
    for _ in range(STEPS):
        cost.update(StepWork(tokens=1, draws=1), seconds)


def test_nothing_is_decided_before_steps_were_measured():
    cost = StepCostModel(cost_prior(1_236_000_000))
    assert cost.predict(StepWork(tokens=1, draws=1)) > BUDGET_S
    assert not LocalPrefill(cost, BUDGET_S).is_local()


def test_a_long_step_makes_it_local_until_steps_are_clearly_shorter():
    cost = StepCostModel()
    prefill = LocalPrefill(cost, BUDGET_S)
    between = (LOCAL_PREFILL_SHARE + REMOTE_PREFILL_SHARE) / 2
    found = []
    for share in (REMOTE_PREFILL_SHARE / 2, between, 1.2 * LOCAL_PREFILL_SHARE, between, REMOTE_PREFILL_SHARE / 2):
        measured(cost, share * BUDGET_S)
        found.append(prefill.is_local())
    assert found == [False, False, True, True, False]
