"""Quarantine, retry budget and guilt: pure rules."""

from __future__ import annotations

import pytest

from penstock.config.limits import FailoverConfig
from penstock.router.placement import RetryBudget
from penstock.router.poison import CrashRecord, PoisonIsolation, find_culprit
from penstock.router.quarantine import MAX_UNANSWERED_PROBES, Quarantine
from penstock.types import RequestId, WorkerId

W = WorkerId("decode-0")
OTHER = WorkerId("decode-1")
CONFIG = FailoverConfig(quarantine_s=1.0, quarantine_max_s=4.0, probe_s=2.0)


def test_it_is_probed_after_its_time_and_let_back_by_its_own_answer_only():
    quarantine = Quarantine(CONFIG, "g")
    quarantine.add(W, 1, 0.0)
    assert quarantine.contains(W, 1)
    assert not quarantine.contains(W, 2)
    assert quarantine.due_for_probe(0.9, urgent=False) == []
    assert quarantine.due_for_probe(0.9, urgent=True) == quarantine.due_for_probe(1.0, urgent=False) == [(W, 1)]
    probe = quarantine.begin_probe(W, 1.0)
    assert quarantine.due_for_probe(2.0, urgent=True) == []
    assert not quarantine.on_probe_answered(RequestId("cmpl-1/0"), W, 1)
    assert not quarantine.on_probe_answered(probe, OTHER, 1)
    assert not quarantine.on_probe_answered(probe, W, 2)
    assert quarantine.on_probe_answered(probe, W, 1)
    assert not quarantine.contains(W, 1)
    assert not quarantine.on_probe_answered(probe, W, 1)


def test_each_time_is_twice_as_long_and_a_new_process_begins_anew():
    quarantine = Quarantine(CONFIG, "g")
    now, held = 0.0, []
    for _ in range(4):
        quarantine.add(W, 1, now)
        quarantine.add(W, 1, now)  # said twice it counts once
        due = next(t for t in range(1000) if quarantine.due_for_probe(now + t / 10, urgent=False))
        held.append(due / 10)
        now += due / 10
        assert quarantine.on_probe_answered(quarantine.begin_probe(W, now), W, 1)
    assert held == [1.0, 2.0, 4.0, 4.0]
    quarantine.add(W, 2, now)
    assert quarantine.due_for_probe(now + 1.0, urgent=False) == [(W, 2)]


def test_one_that_never_answers_is_hopeless_in_the_end():
    quarantine = Quarantine(CONFIG, "g")
    quarantine.add(W, 1, 0.0)
    now = 0.0
    for _ in range(MAX_UNANSWERED_PROBES + 1):
        assert quarantine.hopeless == frozenset()
        quarantine.begin_probe(W, now)
        assert quarantine.expire_probes(now + 1.9) == []
        now += 2.0
        assert quarantine.expire_probes(now) == [(W, 1)]
    assert quarantine.hopeless == {W}
    quarantine.remove(W)
    assert quarantine.hopeless == frozenset()
    assert len(quarantine) == 0


def test_the_budget_pays_at_once_until_it_is_empty():
    budget = RetryBudget(FailoverConfig(retry_burst=2, retry_share=0.5, retry_per_s=4.0), 0.0)
    assert [budget.spend(0.0, 1) for _ in range(4)] == [0.0, 0.0, 0.25, 0.5]
    budget.on_request()
    budget.on_request()
    assert budget.spend(0.0, 1) == 0.5
    assert budget.spend(100.0, 1) == 100.0
    assert [budget.spend(100.0, 1) for _ in range(2)] == [100.0, 100.25], "one was left"


def test_the_budget_has_room_for_every_open_stream_and_lets_nobody_wait_for_longer_than_its_limit():
    budget = RetryBudget(FailoverConfig(retry_burst=2, retry_per_s=4.0, retry_wait_s=3.0), 0.0)
    assert [budget.spend(0.0, 100) for _ in range(100)] == [0.0] * 100
    assert max(budget.spend(0.0, 100) for _ in range(100)) == 3.0


@pytest.mark.parametrize(
    ("deaths", "who"),
    [({}, None), ({"a": 1}, None), ({"a": 2}, "a"), ({"a": 2, "b": 2}, None), ({"a": 2, "b": 3, "c": 2}, "b")],
)
def test_guilty_is_who_was_there_most_often_and_alone(deaths, who):
    assert find_culprit(deaths, 2) == who


def test_new_tokens_clear():
    guilt = CrashRecord(8)
    guilt.add_death("one", 10)
    guilt.on_progress(17)
    assert guilt.deaths == ("one",)
    guilt.on_progress(18)
    assert not guilt.deaths


def test_suspects_are_kept_from_each_other_and_from_nobody_else():
    apart = PoisonIsolation(2)
    guilt = CrashRecord(8)
    guilt.add_death("one", 0)
    assert not apart.is_suspect(guilt)
    guilt.add_death("two", 0)
    assert apart.is_suspect(guilt)
    apart.place(RequestId("a"), [(W, 1)])
    assert apart.occupied_workers(RequestId("b")) == {(W, 1)}
    assert apart.occupied_workers(RequestId("a")) == frozenset()
    apart.remove(RequestId("a"))
    assert apart.occupied_workers(RequestId("b")) == frozenset()
