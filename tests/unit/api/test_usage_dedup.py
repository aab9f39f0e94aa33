"""What of an answer counts: each token once, and of stored ones only those that count now."""

from __future__ import annotations

from penstock.api.idempotency import UsageDedup, UsageDelta
from penstock.api.sse import ChoicePosition


def test_stored_tokens_count_once() -> None:
    counted = UsageDedup()
    assert counted.new_usage([(6, 6)]) == UsageDelta(first=True, tokens=6, stored=6)
    assert counted.new_usage([(6, 6)]) == UsageDelta(first=False, tokens=0, stored=0)
    assert counted.new_usage([(12, 8)]) == UsageDelta(first=False, tokens=6, stored=2)
    assert counted.new_usage([(15, 8), (3, 0)]) == UsageDelta(first=False, tokens=6, stored=0)


def test_what_was_told_elsewhere_does_not_count_here() -> None:
    counted = UsageDedup.from_positions({0: ChoicePosition(6), 1: ChoicePosition(0, ended=True)})
    assert counted.new_usage([(10, 8), (20, 20)]) == UsageDelta(first=False, tokens=4, stored=2)
