"""Token buckets of tenants: those of keys that are gone are gone, too."""

from __future__ import annotations

import pytest

from penstock.api.auth import Tenant
from penstock.api.load_shedding import MINUTE_S, TenantRateLimiter
from penstock.clock import VirtualClock
from penstock.errors import RateLimited


def tenant(number: int) -> Tenant:
    return Tenant(id=f"t{number}", requests_per_minute=2, tokens_per_minute=100)


def test_a_bucket_that_is_full_again_is_not_kept() -> None:
    clock = VirtualClock(1.0)
    rates = TenantRateLimiter(clock)
    for number in range(1000):
        rates.charge(tenant(number), 1, 10)
        clock.advance(MINUTE_S / 10)
    assert len(rates._buckets._levels) < 60


def test_one_that_is_not_is() -> None:
    clock = VirtualClock(1.0)
    rates = TenantRateLimiter(clock)
    rates.charge(tenant(0), 1, 10)
    rates.charge_completion(tenant(0), 500)  # an answer of five minutes' worth
    for number in range(1, 4):
        clock.advance(MINUTE_S)
        rates.charge(tenant(number), 1, 1)
    with pytest.raises(RateLimited):
        rates.charge(tenant(0), 1, 1)


def test_a_bucket_holds_a_minutes_worth_however_long_it_was_left_alone() -> None:
    clock = VirtualClock(1.0)
    rates = TenantRateLimiter(clock)
    rates.charge(tenant(0), 1, 50)
    clock.advance(60 * MINUTE_S)
    rates.charge(tenant(0), 1, 100)
    with pytest.raises(RateLimited, match=r"100 tokens a minute. 0 are left"):
        rates.charge(tenant(0), 1, 1)


def test_a_request_larger_than_a_bucket_is_let_in_when_it_is_full_and_leaves_a_debt() -> None:
    clock = VirtualClock(1.0)
    rates, one = TenantRateLimiter(clock), Tenant(id="t", tokens_per_minute=100)
    rates.charge(one, 1, 10)
    with pytest.raises(RateLimited) as refused:
        rates.charge(one, 1, 250)
    assert refused.value.retry_after == 6  # the ten that the full bucket lacks
    clock.advance(6)
    rates.charge(one, 1, 250)
    with pytest.raises(RateLimited, match="0 are left") as refused:
        rates.charge(one, 1, 1)
    assert refused.value.retry_after == 91  # 150 of debt and one
