"""What of an answer counts: each token once, and of stored ones only those that count now."""

from __future__ import annotations

from penstock.edge.counted import Counted, Part
from penstock.edge.event_ids import Place


def test_stored_tokens_count_once() -> None:
    counted = Counted()
    assert counted.take([(6, 6)]) == Part(first=True, tokens=6, stored=6)
    assert counted.take([(6, 6)]) == Part(first=False, tokens=0, stored=0)
    assert counted.take([(12, 8)]) == Part(first=False, tokens=6, stored=2)
    assert counted.take([(15, 8), (3, 0)]) == Part(first=False, tokens=6, stored=0)


def test_what_was_told_elsewhere_does_not_count_here() -> None:
    counted = Counted.elsewhere({0: Place(6), 1: Place(0, ended=True)})
    assert counted.take([(10, 8), (20, 20)]) == Part(first=False, tokens=4, stored=2)
