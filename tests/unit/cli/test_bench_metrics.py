from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.cli.benchmark.metrics import (
    Objectives,
    RequestRecord,
    error_counts,
    gaps,
    gaps_before,
    gaps_during,
    measure,
    summary,
)

ALL = [50.0, 90.0, 99.0]


def answer(due: float, *events: float, tokens: int | None = None, sent: float | None = None) -> RequestRecord:
    return RequestRecord(
        due=due,
        sent=due if sent is None else sent,
        events=list(events),
        prompt_tokens=10,
        output_tokens=len(events) if tokens is None else tokens,
    )


def test_the_clock_starts_when_a_request_was_due_not_when_it_was_sent():
    late = answer(1.0, 3.5, 4.0, sent=3.0)
    assert late.ttft == 2.5
    assert late.e2e == 3.0
    found = measure([late], duration=4.0, percentiles=ALL)
    assert found["send_lag_s"]["max"] == 2.0


def test_tpot_spreads_the_time_after_the_first_event_over_the_other_tokens():
    assert answer(0.0, 1.0, 2.0, 4.0).tpot == 1.5
    assert answer(0.0, 1.0, 2.0, 4.0, tokens=7).tpot == 0.5
    assert answer(0.0, 1.0).tpot is None


def test_summary_of_known_numbers():
    found = summary([float(n) for n in range(1, 101)], [50, 90, 99, 99.9])
    assert found == pytest.approx(
        {"mean": 50.5, "std": 28.8661, "min": 1, "p50": 50.5, "p90": 90.1, "p99": 99.01, "p99.9": 99.901, "max": 100},
        rel=1e-5,
    )


def test_summary_of_nothing_is_nothing():
    assert summary([], ALL) is None


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_summaries_are_in_order(values: list[float]):
    found = summary(values, ALL)
    assert found is not None
    row = [found[name] for name in ("min", "p50", "p90", "p99", "max")]
    assert row == sorted(row)
    assert found["max"] == max(values)


def test_a_gap_that_touches_the_window_counts_in_full():
    runs = [answer(0, 1.0, 2.0, 5.0), answer(0, 4.0, 4.5)]
    assert gaps(runs) == [1.0, 3.0, 0.5]
    assert gaps_during(runs, since=1.5, until=3.0) == [1.0, 3.0]
    assert gaps_during(runs, since=2.5, until=3.5) == [3.0]
    assert gaps_before(runs, 2.5) == [1.0]


def test_failures_are_counted_and_not_measured():
    bad = [RequestRecord(due=0, sent=0, error="timeout"), RequestRecord(due=0, sent=0, events=[9.0], error="http 503")]
    found = measure([answer(0, 1.0, 2.0), *bad, bad[0]], duration=2.0, percentiles=ALL)
    assert (found["requests"], found["completed"], found["failed"]) == (4, 1, 3)
    assert found["errors"] == {"timeout": 2, "http 503": 1} == error_counts([bad[0], bad[0], bad[1]])
    assert found["e2e_s"]["max"] == 2.0
    assert found["request_throughput"] == 0.5
    assert found["output_throughput"] == 1.0
    assert found["total_token_throughput"] == 6.0


def test_nothing_came_back():
    found = measure([RequestRecord(due=0, sent=0, error="connection refused")], duration=1.0, percentiles=ALL)
    assert found["ttft_s"] is None
    assert found["tokens_per_event"] is None
    assert found["output_throughput"] == 0


@pytest.mark.parametrize(
    ("goodput", "met"),
    [(["ttft:1000"], 1), (["ttft:999"], 0), (["tpot:500"], 1), (["tpot:499"], 0), (["e2el:2000", "ttft:1000"], 1)],
)
def test_goodput_counts_requests_that_met_every_objective(goodput: list[str], met: int):
    found = measure([answer(0, 1.0, 1.5, 2.0)], duration=1.0, percentiles=ALL, objectives=Objectives.parse(goodput))
    assert found["goodput"] == met


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "itl:5", "tpot:0", "e2el:-1", "ttft:nan"])
def test_wrong_objectives_are_refused(text: str):
    with pytest.raises(ValueError, match=r"objective|float"):
        Objectives.parse([text])
