"""The queue at the door: never over its limits, never losing count."""

from __future__ import annotations

from contextlib import ExitStack, suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.admission import PROMPT_TOKEN_BYTES, Admission, Permit, QueueKey
from penstock.clock import VirtualClock
from penstock.config.limits import RequestLimits
from penstock.errors import QueueFull

LIMITS = RequestLimits(max_queued_requests=5, max_queued_tokens=100, max_pending_body_bytes=1000)


@given(st.lists(st.tuples(st.sampled_from(["admit", "start", "leave"]), st.lists(st.integers(0, 60), max_size=3))))
def test_the_count_is_exact_after_anything(steps: list[tuple[str, list[int]]]):
    admission = Admission(LIMITS, VirtualClock())
    scopes: list[tuple[ExitStack, Permit, dict[int, int]]] = []
    for step, costs in steps:
        if step == "admit":
            stack = ExitStack()
            alone = admission.requests == 0
            try:
                permit = stack.enter_context(admission.admit(costs))
            except QueueFull:
                assert not alone, "an empty queue takes anything"
            else:
                scopes.append((stack, permit, dict(enumerate(costs))))
                assert alone or not costs or (admission.requests <= 5 and admission.tokens <= 100)
        elif step == "start" and scopes:
            _, permit, waiting = scopes[0]
            choice = costs[0] if costs else 0
            permit.on_first_token(choice)
            permit.on_first_token(choice)
            waiting.pop(choice, None)
        elif scopes:
            stack, _, waiting = scopes.pop()
            stack.close()
            waiting.clear()
        assert admission.requests == sum(len(waiting) for _, _, waiting in scopes)
        assert admission.tokens == sum(sum(waiting.values()) for _, _, waiting in scopes)


def test_prompts_are_bounded_together_for_as_long_as_their_requests_are_open():
    admission = Admission(RequestLimits(max_prompt_bytes=100 * PROMPT_TOKEN_BYTES), VirtualClock())
    with admission.admit([90]) as permit:
        permit.on_first_token(0)
        assert admission.tokens == 0
        with pytest.raises(QueueFull, match="max_prompt_bytes") as refused, admission.admit([11]):
            pass
        assert refused.value.retry_after >= 1
        with admission.admit([10, 0, 0]):
            assert admission.prompt_bytes == 100 * PROMPT_TOKEN_BYTES
    assert admission.prompt_bytes == 0
    with admission.admit([1000]):
        assert admission.prompt_bytes == 1000 * PROMPT_TOKEN_BYTES, "a single one may try"


def test_bodies_are_bounded_together():
    admission = Admission(LIMITS, VirtualClock())
    with admission.reserve_body() as first, admission.reserve_body() as second:
        first.grow(800)
        with pytest.raises(QueueFull, match="the limit is 1000"):
            second.grow(300)
        second.grow(200)
        first.release()
        first.release()
        second.grow(700)
        assert admission.body_bytes == 900
    assert admission.body_bytes == 0


def test_one_large_body_is_let_in_alone():
    admission = Admission(LIMITS, VirtualClock())
    with admission.reserve_body() as hold:
        hold.grow(5000)
    assert admission.body_bytes == 0


def test_when_to_come_back_follows_how_long_others_waited():
    clock = VirtualClock()
    admission = Admission(LIMITS, clock)
    for _ in range(100):
        with admission.admit([1]) as permit:
            clock.advance(20)
            permit.on_first_token(0)
    with admission.admit([1] * 5), pytest.raises(QueueFull) as refused:
        admission.check()
    assert 18 <= refused.value.retry_after <= 20
    for _ in range(100):
        with admission.admit([1]) as permit:
            clock.advance(1000)
            permit.on_first_token(0)
    with admission.admit([1] * 5), pytest.raises(QueueFull) as refused:
        admission.check()
    assert 900 <= refused.value.retry_after <= 1000


ROOMY = RequestLimits(max_queued_requests=8, max_queued_tokens=1000)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 1), st.integers(1, 200)), max_size=40))
def test_there_is_always_room_for_a_party_that_comes_new(arrivals: list[tuple[str, int, int]]):
    admission = Admission(ROOMY, VirtualClock())
    with ExitStack() as stack:
        for tenant, service, tokens in arrivals:
            with suppress(QueueFull):
                stack.enter_context(admission.admit([tokens], QueueKey(service, tenant), bounded=True))
        held = {(service, tenant) for tenant, service, _ in arrivals}
        if len(held) <= 3 and admission.requests:
            assert admission.requests < ROOMY.max_queued_requests
            stack.enter_context(admission.admit([0], QueueKey(0, "new"), bounded=True))


def test_a_refusal_for_others_sake_says_so():
    admission = Admission(ROOMY, VirtualClock())
    with ExitStack() as stack:
        for _ in range(4):
            stack.enter_context(admission.admit([1], QueueKey(tenant="greedy"), bounded=True))
        with pytest.raises(QueueFull, match=r"4 requests of yours are waiting and this one adds 1; of the 4 places"):
            stack.enter_context(admission.admit([1], QueueKey(tenant="greedy"), bounded=True))
        stack.enter_context(admission.admit([300], QueueKey(tenant="other"), bounded=True))
        with pytest.raises(QueueFull, match=r"300 prompt tokens of yours .* adds 500; of the 696 that may still come"):
            stack.enter_context(admission.admit([500], QueueKey(tenant="other"), bounded=True))


def test_what_goes_before_a_request_is_its_fair_part_of_what_waits():
    admission = Admission(ROOMY, VirtualClock())
    noisy, quiet, heavy = QueueKey(tenant="noisy"), QueueKey(tenant="quiet"), QueueKey(tenant="heavy", weight=3.0)
    batch = QueueKey(service=1, tenant="night")
    assert admission.share_before(quiet, 10) == 1.0
    with admission.admit([90, 90], noisy), admission.admit([120], batch):
        assert admission.share_before(quiet, 18) == pytest.approx(18 / 180)
        assert admission.share_before(heavy, 18) == pytest.approx(6 / 180)
        assert admission.share_before(noisy, 18) == pytest.approx(1.0)
        assert admission.share_before(QueueKey(service=1, tenant="day"), 60) == pytest.approx((180 + 60) / 300)
