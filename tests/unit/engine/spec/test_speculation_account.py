"""Guessing that loses is switched off before it has cost much, and one that wins stays on, whatever is measured."""

from __future__ import annotations

from random import Random

from penstock.engine.spec.acceptance import BUDGET_PER_STEP, INITIAL_BUDGET, MAX_BUDGET, SpeculationBudget


def test_what_is_lost_is_bounded() -> None:
    """Half a plain step lost whenever it is open: over any number of steps no more than the bound."""
    account, lost, opened = SpeculationBudget(), 0.0, 0
    for step in range(1, 20_001):
        if account.is_open:
            account.record(-0.5)
            lost += 0.5
        opened += account.on_step()
        assert lost <= INITIAL_BUDGET + 0.5 + (BUDGET_PER_STEP + 1e-9) * step
    assert opened > 5, "it is tried again"


def test_success_is_not_saved_up() -> None:
    account = SpeculationBudget()
    for _ in range(10_000):
        account.record(1.0)
        account.on_step()
    tries = 0
    while account.is_open:
        account.record(-0.5)
        account.on_step()
        tries += 1
    assert tries <= 2 * MAX_BUDGET + 1


def test_noise_does_not_end_what_wins() -> None:
    """Two tokens for 1.6 steps' time on the whole, but one step in ten takes half as long again."""
    random, account, closed = Random(3), SpeculationBudget(), 0
    for _ in range(10_000):
        if account.is_open:
            seconds = 1.6 + (0.8 if random.random() < 0.1 else 0.0)
            account.record(random.choice([1, 1, 2, 4]) - seconds)
        else:
            closed += 1
        account.on_step()
    assert closed < 1_000


def test_a_step_without_a_guess_costs_nothing() -> None:
    account = SpeculationBudget()
    for _ in range(100):
        assert account.on_step() is False
    assert account.is_open
    account.record(-1.0)
    assert account.is_open
