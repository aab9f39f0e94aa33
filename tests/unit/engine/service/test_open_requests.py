"""Open requests of API keys, as gateways tell one worker: never more than the limit, and no count stays behind."""

from __future__ import annotations

import random

import pytest

from penstock.engine.service import open_requests
from penstock.engine.service.open_requests import COUNT_VALID_S, SWEEP_S, OpenRequestTotals
from penstock.wire.gateway_messages import OpenRequestCounts

KEY, OTHER = bytes(16), bytes(15) + b"x"


def wants(totals: OpenRequestTotals, gateway: str, has: int, limit: int, now: float = 0.0, key: bytes = KEY) -> bool:
    return totals.on_counts(gateway, OpenRequestCounts(counts={key: has}, wanted=key, limit=limit), now)


def has(totals: OpenRequestTotals, gateway: str, count: int, now: float = 0.0, key: bytes = KEY) -> None:
    assert totals.on_counts(gateway, OpenRequestCounts(counts={key: count}), now)


def test_gateways_together_have_no_more_than_the_limit() -> None:
    rng, totals = random.Random(1), OpenRequestTotals()
    names, limit = ["a", "b", "c"], 4
    opened = dict.fromkeys(names, 0)
    refused = 0
    for _ in range(2000):
        name = rng.choice(names)
        if rng.random() < 0.6:
            if wants(totals, name, opened[name], limit):
                opened[name] += 1
            else:
                refused += 1
                assert sum(opened.values()) == limit
        elif opened[name]:
            opened[name] -= 1
            has(totals, name, opened[name])
        assert sum(opened.values()) <= limit
    assert refused > 100
    for name in names:
        has(totals, name, 0)
    assert len(totals) == 0


def test_what_a_gateway_says_again_replaces_what_was_lost() -> None:
    totals = OpenRequestTotals()
    assert [wants(totals, "a", number, 3) for number in range(4)] == [True, True, True, False]
    assert not wants(totals, "b", 0, 3)
    has(totals, "a", 1)  # the messages about two of them were lost
    assert [wants(totals, "b", number, 3) for number in range(3)] == [True, True, False]
    assert wants(totals, "b", 0, 3, key=OTHER), "another key"


def test_a_gateway_that_is_silent_has_none() -> None:
    totals = OpenRequestTotals()
    assert wants(totals, "a", 0, 1)
    assert not wants(totals, "b", 0, 1, now=COUNT_VALID_S - 0.1)
    has(totals, "a", 1, now=COUNT_VALID_S - 0.1)
    assert not wants(totals, "b", 0, 1, now=COUNT_VALID_S + 0.1)
    assert wants(totals, "b", 0, 1, now=2 * COUNT_VALID_S)
    has(totals, "b", 0, now=2 * COUNT_VALID_S + SWEEP_S)
    assert len(totals) == 0


def test_keys_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(open_requests, "MAX_COUNTED_KEYS", 2)
    totals = OpenRequestTotals()
    for number in range(5):
        assert wants(totals, "a", 0, 1, key=number.to_bytes(16, "big"))
    assert len(totals) == 2
    assert not wants(totals, "b", 0, 1, key=(1).to_bytes(16, "big"))
    assert wants(totals, "b", 0, 1, key=(4).to_bytes(16, "big"))
