"""Arithmetic of steps, wires, tiers, quantiles and fits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.fleet_file import SimStepTimes
from penstock.engine.core.events import FirstTokenArrived, PagesArrived
from penstock.sim.calibration import DecodeSample, PrefillSample, fit_step_times
from penstock.sim.gateway import SimTransfers
from penstock.sim.resources import EventQueue, PlanDuration, SimLink, SimTiers, plan_duration
from penstock.sim.results import LatencyTargets, RunResults, quantiles
from penstock.types import BlockHash, RequestId, RequestStage, WorkerId

A, B, C = (BlockHash(bytes([n]) * 32) for n in range(3))


@given(first=st.floats(1e-4, 1.0), growth=st.floats(0, 1e-3), most=st.integers(1, 3000), part=st.floats(0, 1))
def test_a_moment_lies_in_the_step_that_is_under_way(first: float, growth: float, most: int, part: float) -> None:
    takes = PlanDuration(first, growth)
    moment = part * takes.total(most)
    step = takes.steps_within(moment, most)
    assert takes.total(step) >= moment * (1 - 1e-6)
    assert step == 1 or takes.total(step - 1) <= moment * (1 + 1e-6)


def test_steps_add_up() -> None:
    takes = PlanDuration(0.5, 0.25)
    assert takes.total(4) == pytest.approx(0.5 + 0.75 + 1.0 + 1.25)


def _rows(*rows: tuple[int, int, int]) -> Any:
    """A plan of (tokens of the prompt, first token computed, tokens computed)."""
    return SimpleNamespace(
        rows=[
            SimpleNamespace(request=SimpleNamespace(prompt=range(prompt)), start=start, count=count)
            for prompt, start, count in rows
        ]
    )


def test_a_chunk_attends_to_the_chunks_before_it() -> None:
    times = SimStepTimes(step_s=1.0, row_s=0.25, context_s=1e-3, read_step_s=2.0, token_s=0.125, pair_s=1e-4)
    reading = 8 * 0.125 + (8 * 1000 + (1 + 2 + 3 + 4 + 5 + 6 + 7 + 8)) * 1e-4
    assert plan_duration(times, _rows((2000, 1000, 8))).total(1) == pytest.approx(2.0 + reading)
    both = plan_duration(times, _rows((2000, 1000, 8), (10, 499, 1)), slower=2.0)
    assert both.total(1) == pytest.approx(2 * (1.0 + 0.25 + 500 * 1e-3 + reading))
    assert both.growth_s == pytest.approx(2 * 1e-3)


def test_calls_come_in_order_of_time_and_entry() -> None:
    agenda, heard = EventQueue(), []
    for name, when in (("c", 2.0), ("a", 1.0), ("b", 1.0)):
        agenda.call_at(when, heard.append, name)
    agenda.call_at(1.5, lambda: agenda.call_at(0.0, heard.append, "late"))
    while agenda.run_next():
        pass
    assert heard == ["a", "b", "late", "c"]
    assert agenda.now == 2.0


def test_a_wire_carries_one_thing_after_the_other_as_fast_as_the_slower_end() -> None:
    fast, slow = SimLink(100.0), SimLink(50.0)
    assert fast.transfer(100, now=0.0) == 1.0
    assert fast.transfer(100, now=0.5, other=slow) == 3.0
    assert slow.transfer(50, now=1.0) == 4.0
    assert (fast.busy_s, slow.busy_s) == (3.0, 3.0)


def test_a_receiver_that_has_not_heard_of_the_cancel_begins_no_hand_over() -> None:
    agenda = EventQueue()
    hand_overs = SimTransfers(agenda, 0.001)
    hand_overs.expect_transfer((RequestId("1"), 1), WorkerId("p"))
    hand_overs.remove((RequestId("1"), 1))
    anybody: Any = SimpleNamespace(id=RequestId("1"), epoch=1, computed=0)
    hand_overs.on_reserved(anybody, anybody, {})
    assert not hand_overs._open


def _handed_over(skip_tokens: int, page_bytes: int = 64) -> tuple[SimTransfers, list[tuple[float, type, int]]]:
    """Eight pages, a second each, then the first token; what the receiver hears, and when."""
    agenda, heard = EventQueue(), list[tuple[float, type, int]]()
    hand_overs = SimTransfers(agenda, 0.5)

    def tell(event: Any) -> None:
        heard.append((agenda.now, type(event), getattr(event, "computed", 0)))

    config = SimpleNamespace(page_tokens=16)
    source: Any = SimpleNamespace(name=WorkerId("p"), out=SimLink(64.0), add_event=lambda _: None)
    receiver: Any = SimpleNamespace(into=SimLink(64.0), page_bytes=page_bytes, config=config, add_event=tell)
    wanted: Any = SimpleNamespace(id=RequestId("1"), epoch=1, computed=skip_tokens)
    sent: Any = SimpleNamespace(id=RequestId("1"), epoch=1, stage=RequestStage.PREFILL)
    hand_overs.expect_transfer((RequestId("1"), 1), source.name)
    hand_overs.on_reserved(receiver, wanted, {source.name: source})
    outcome: Any = SimpleNamespace(
        completed_pages=[SimpleNamespace(request=sent, block=block, tokens=16) for block in range(8)],
        new_tokens=[SimpleNamespace(request=sent, tokens=(7,), finish=None)],
    )
    hand_overs.on_outcome(source, outcome)
    while agenda.run_next():
        pass
    return hand_overs, heard


def test_the_first_token_comes_when_the_last_page_has_come() -> None:
    _, heard = _handed_over(skip_tokens=0)
    assert heard == [(8.5, PagesArrived, 128), (8.5, FirstTokenArrived, 0)]


def test_pages_that_the_receiver_has_do_not_travel() -> None:
    hand_overs, heard = _handed_over(skip_tokens=80)
    assert hand_overs.pages == 3
    assert heard == [(3.5, PagesArrived, 128), (3.5, FirstTokenArrived, 0)]


def test_blocks_sink_through_the_tiers_and_leave_the_last() -> None:
    tiers = SimTiers(host=1, disk=1)
    assert tiers.insert(A) == [(A, 1)]
    assert tiers.insert(B) == [(B, 1), (A, 2)]
    assert tiers.count_blocks([A, B, C], 0, 3) == (1, 1)
    assert tiers.count_blocks([A, C, B], 0, 3) == (0, 1)
    assert tiers.insert(C) == [(C, 1), (B, 2), (A, 0)]
    assert tiers.insert(C) == [(C, 1)]
    assert list(tiers.nearest()) == [(C, 1), (B, 2)]
    assert tiers.count_blocks([B, C], 0, 1) == (0, 1)
    assert SimTiers(host=0, disk=0).insert(A) == [(A, 0)]
    assert SimTiers(host=0, disk=1).insert(A) == [(A, 2)]


def test_quantiles_weigh_what_stands_for_many() -> None:
    found = quantiles(np.array([3.0, 1.0, 2.0]), np.array([1.0, 8.0, 1.0]))
    assert (found["p50"], found["p90"], found["p99"]) == (1.0, 2.0, 3.0)
    assert found["mean"] == pytest.approx(1.3)
    assert quantiles(np.zeros(0))["p99"] == 0.0


def test_good_answers_are_soon_and_steady() -> None:
    measures = RunResults(LatencyTargets(ttft_s=1.0, itl_s=0.05))
    for number, (first, spacing) in enumerate(((0.5, 0.04), (1.5, 0.04), (0.5, 0.06))):
        measures.add_request(number, 10.0, 100)
        measures.add_tokens(number, 1, 10.0 + first, 0.0)
        measures.add_tokens(number, 10, 10.0 + first + 10 * spacing, spacing)
        measures.requests[number].done = True
    assert [each.first_at for each in measures.within_targets()] == [10.5]
    intervals, counts = measures.intervals
    assert counts.sum() == 30
    assert intervals.max() == pytest.approx(0.06)
    stuttered = measures.requests[0]
    stuttered.late = 1
    assert measures.within_targets() == [stuttered]
    assert measures.smooth() == []


def test_each_late_interval_of_a_delivery_counts() -> None:
    """Of 200 intervals two may be late; three that come in one delivery are three."""
    for late, smooth in ((2, 1), (3, 0)):
        measures = RunResults(LatencyTargets(ttft_s=1.0, itl_s=0.05))
        measures.add_request(0, 0.0, 100)
        measures.add_tokens(0, 201 - late, 0.5 + 0.01 * (200 - late), 0.01)
        measures.add_tokens(0, late, 0.5 + 0.01 * (200 - late) + 0.06 * late, 0.06)
        measures.requests[0].done = True
        assert measures.requests[0].late == late
        assert len(measures.within_targets()) == 1
        assert len(measures.smooth()) == smooth


def test_a_fit_finds_what_steps_are_made_of() -> None:
    readings = [
        PrefillSample(start, count, 0.002 + 1e-5 * count + 2e-10 * (count * start + count * (count + 1) / 2))
        for count in (32, 128, 512)
        for start in (0, 1024, 4096)
    ]
    writings = [DecodeSample(rows, rows * n, 0.01 + 2e-4 * rows) for rows in (1, 4, 16) for n in (10, 1000)]
    found = fit_step_times(readings, writings)
    assert found.times.token_s == pytest.approx(1e-5)
    assert found.times.pair_s == pytest.approx(2e-10)
    assert found.times.row_s == pytest.approx(2e-4)
    assert found.times.context_s == pytest.approx(0, abs=1e-12)
    assert max(found.prefill_error, found.decode_error) < 1e-6
