"""The terms of a request's cost, each by hand, at a busy worker and at an idle one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.router.policy import least_cost
from penstock.router.worker_load import WorkerLoad, WorkerRates

BOTH = np.array([0, 1])
ZERO = np.zeros(2)
RATES = WorkerRates(
    step=np.array([10e-3, 10e-3]), token=np.array([1e-3, 1e-3]), pair=np.array([1e-6, 1e-6]),
    sample=np.array([2e-3, 2e-3]), page=np.array([5e-3, 5e-3]), fetch=ZERO, wait=np.array([1e-3, 0.0]),
)  # fmt: skip
LOAD = WorkerLoad(
    tokens=np.array([50.0, 0.0]), pairs=np.array([1000.0, 0.0]), rows=np.array([6.0, 0.0]),
    context=np.array([600.0, 0.0]), pages=np.array([3.0, 99.0]), batch_tokens=np.array([20.0, 0.0]), batch_pairs=ZERO,
)  # fmt: skip
"""A worker that writes six answers and has 50 tokens to read, and one that has nothing to do."""


class Asked:
    """A prompt of 64 tokens and an answer of 10; the busy worker has the first page of it."""

    known_tokens, expected_output, page_tokens, interactive = 64, 10, 16, True
    hits = reachable_hits = np.array([1, 0])
    tier_hits = ()


VIEW: Any = Asked()


def test_reading_a_prompt_disturbs_who_is_written_there_or_soon_will_be() -> None:
    found = least_cost.prefill_costs(VIEW, BOTH, LOAD, RATES)
    work = np.array([48e-3 + 1e-6 * 48 * (16 + 24.5), 64e-3 + 1e-6 * 64 * 32.5])
    assert found.prefill == pytest.approx(10e-3 + work + 2e-3)
    assert found.wait == pytest.approx([30e-3 + 1e-3, 0.0])  # batch work does not go before it
    assert found.interference == pytest.approx([6 * work[0], 3 * work[1]])  # the mean of both: no idle worker stays so


def test_an_answer_more_makes_the_steps_of_all_others_longer() -> None:
    found = least_cost.decode_costs(VIEW, LOAD, RATES)
    more = 3e-3 + 64e-6
    step = np.array([10e-3 + 6 * 3e-3 + 600e-6, 10e-3])
    assert found.step == pytest.approx(step)
    assert found.decode == pytest.approx(10 * (step + more))
    assert found.slowdown == pytest.approx([10 * 6 * more, 0.0])


def test_pages_that_a_writer_lacks_are_waited_for_by_everybody_there() -> None:
    assert least_cost.transfer_costs(VIEW, BOTH, LOAD, RATES) == pytest.approx([3 * (5e-3 * 7 + 1e-3), 4 * 5e-3])
    assert least_cost.missing_pages(VIEW, LOAD) == pytest.approx([1.0, 0.0])
