"""What is kept by idempotency key: only what was begun."""

from __future__ import annotations

from penstock.clock import MonotonicClock
from penstock.config.schema import Limits
from penstock.edge.event_ids import EventMarks
from penstock.edge.kept import KeptAnswers, Met
from penstock.edge.keyed import Keyed

from .streams import NullStreams


def keyed(number: int) -> Keyed:
    return Keyed(key=number.to_bytes(4, "big"), name=str(number), seed=number, mark="m", marks=EventMarks(b"", b""))


def test_nothing_is_kept_of_what_was_refused_before_it_began():
    kept = KeptAnswers(Limits(max_idempotency_keys=2), MonotonicClock())
    for number in range(10):
        answer, met = kept.meet(keyed(number), NullStreams())
        assert met is Met.NEW
        kept.left(keyed(number), answer)
    assert len(kept) == 0


def test_another_answer_by_the_same_key_is_not_given_up_with_it():
    kept = KeptAnswers(Limits(), MonotonicClock())
    first, _ = kept.meet(keyed(1), NullStreams())
    kept.left(keyed(1), first)
    second, _ = kept.meet(keyed(1), NullStreams())
    kept.left(keyed(1), first)
    assert kept.meet(keyed(1), NullStreams()) == (second, Met.JOINED)
