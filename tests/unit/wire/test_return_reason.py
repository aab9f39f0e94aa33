"""What follows from each reason for which a request comes back."""

from __future__ import annotations

import pytest

from penstock.wire.gateway_messages import ReturnReason

R = ReturnReason
LOST_MESSAGES = {R.UNKNOWN, R.UNSENT, R.CONNECTION_LOST, R.GATEWAY_SILENT, R.TOO_LARGE, R.PAGES_LOST}
WORKER_IS_WELL = {R.QUEUE_FULL, R.PREEMPTED, R.DEADLINE, R.TOO_LONG, R.NO_HELLO, R.OTHER_PROCESS}
OPERATOR = {R.ROLE_CHANGED, R.HANDED_OVER}
BOTH = {R.DRAINING, R.YIELDED}


def test_a_reason_is_harmless_when_it_says_nothing_against_the_worker() -> None:
    harmless = {reason for reason in R if reason.harmless}
    assert harmless == LOST_MESSAGES | WORKER_IS_WELL | OPERATOR | BOTH


def test_what_an_operator_causes_and_what_makes_room_is_no_failed_attempt() -> None:
    assert {reason for reason in R if not reason.is_attempt} == OPERATOR | BOTH


def test_a_worker_that_is_well_causes_no_retry() -> None:
    assert {reason for reason in R if not reason.is_failure} == WORKER_IS_WELL | BOTH


def test_a_request_that_a_worker_cannot_serve_says_nothing_of_other_requests() -> None:
    assert {reason for reason in R if reason.concerns_request} == {R.GRAMMAR, R.IMAGE, R.ADAPTER}


@pytest.mark.parametrize("reason", R)
def test_a_text_is_its_reason_with_or_without_details(reason: ReturnReason) -> None:
    assert R.from_text(reason) is reason
    assert R.from_text(reason.with_details("whatever: it is")) is reason
    assert reason.label.replace("_", "").isalpha()
    assert reason.label == reason.label.lower()


@pytest.mark.parametrize("text", ["", "no such reason", "pages_lost_and_found", "QUEUE_FULL"])
def test_an_unknown_text_is_some_other_reason(text: str) -> None:
    assert R.from_text(text) is R.OTHER
    assert not R.from_text(text).harmless
