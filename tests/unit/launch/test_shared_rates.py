"""One suite for rates of one process and for those that all gateways of a host share; and those with real processes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable

import pytest

from penstock.api.auth import Tenant
from penstock.api.concurrency import LocalRequestCounts, RequestCounts
from penstock.api.load_shedding import LocalRateBuckets, RateBuckets, TenantRateLimiter
from penstock.clock import VirtualClock
from penstock.errors import RateLimited
from penstock.launch import shared_rates
from penstock.launch.shared_rates import GatewayRequestCounts, SharedRequestCounts, SharedTokenBuckets

ANN = Tenant(id="ann", requests_per_minute=6, tokens_per_minute=600)
BOB = Tenant(id="bob", requests_per_minute=6)

KINDS: dict[str, Callable[[], RateBuckets]] = {"own": LocalRateBuckets, "shared": lambda: SharedTokenBuckets(16)}


@pytest.fixture(params=KINDS.values(), ids=KINDS.keys())
def buckets(request: pytest.FixtureRequest) -> RateBuckets:
    made: RateBuckets = request.param()
    return made


def let_in(rates: TenantRateLimiter, tenant: Tenant, tries: int, tokens: int = 0) -> int:
    """How many of so many requests."""
    count = 0
    for _ in range(tries):
        try:
            rates.charge(tenant, 1, tokens)
        except RateLimited:
            continue
        count += 1
    return count


def test_a_minutes_worth_and_then_an_even_pace(buckets: RateBuckets) -> None:
    clock = VirtualClock(100.0)
    rates = TenantRateLimiter(clock, buckets)
    assert let_in(rates, ANN, 20) == 6
    clock.advance(10.0)
    assert let_in(rates, ANN, 20) == 1
    clock.advance(1000.0)
    assert let_in(rates, ANN, 20) == 6
    assert let_in(rates, BOB, 20) == 6


def test_tokens_of_prompts_and_answers(buckets: RateBuckets) -> None:
    clock = VirtualClock(100.0)
    rates = TenantRateLimiter(clock, buckets)
    assert let_in(rates, ANN, 3, tokens=250) == 2
    rates.charge_completion(ANN, 400)  # 300 more than there were
    clock.advance(30.0)
    with pytest.raises(RateLimited, match="0 are left") as refused:
        rates.charge(ANN, 1, 1)
    assert refused.value.retry_after == 1
    clock.advance(1.0)
    rates.charge(ANN, 1, 10)


def test_what_is_refused_takes_nothing(buckets: RateBuckets) -> None:
    rates = TenantRateLimiter(VirtualClock(100.0), buckets)
    rates.charge(ANN, 1, 500)
    assert let_in(rates, ANN, 20, tokens=101) == 0
    assert let_in(rates, ANN, 20, tokens=1) == 5


def test_a_size_that_has_changed(buckets: RateBuckets) -> None:
    rates = TenantRateLimiter(VirtualClock(100.0), buckets)
    rates.charge(ANN, 1, 0)
    assert let_in(rates, Tenant(id="ann", requests_per_minute=3), 20) == 3


def test_more_tenants_than_there_is_room_for_are_served_all_the_same() -> None:
    clock = VirtualClock(100.0)
    rates = TenantRateLimiter(clock, SharedTokenBuckets(4))
    for i in range(1000):
        clock.advance(1.0)
        assert let_in(rates, Tenant(id=str(i), requests_per_minute=1), 2) == 1


def in_child(work: Callable[[], int]) -> int:
    """The number that ``work`` returns in a process of its own."""
    child = os.fork()
    if not child:
        os._exit(work())
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_gateways_share_them_and_one_that_is_forked_anew_begins_with_what_is_left() -> None:
    buckets = SharedTokenBuckets(16)
    tenant = Tenant(id="t", requests_per_minute=50)

    def gateway() -> int:
        return let_in(TenantRateLimiter(VirtualClock(100.0), buckets), tenant, 20)

    assert [in_child(gateway) for _ in range(4)] == [20, 20, 10, 0]


def test_several_at_once_let_in_no_more_than_one_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_rates, "LOCK_WAIT_S", 30.0)  # on a busy machine one may lose its core for long
    buckets = SharedTokenBuckets(16)
    tenant = Tenant(id="t", requests_per_minute=100)
    begin, go = os.pipe()
    children: list[int] = []
    for _ in range(4):
        child = os.fork()
        if not child:
            os.close(go)
            os.read(begin, 1)  # until all are there
            os._exit(let_in(TenantRateLimiter(VirtualClock(100.0), buckets), tenant, 1000))
        children.append(child)
    os.close(begin)
    os.close(go)
    assert sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children) == 100


def test_nobody_waits_for_one_that_is_stopped_in_the_middle() -> None:
    buckets = SharedTokenBuckets(16)
    there, gone = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        with buckets.locked():
            os.write(there[1], b"x")
            os.close(gone[1])
            os.read(gone[0], 1)
        os._exit(0)
    try:
        os.read(there[0], 1)
        assert let_in(TenantRateLimiter(VirtualClock(100.0), buckets), BOB, 20) == 6
    finally:
        os.close(gone[1])
        os.waitpid(child, 0)
        for end in (*there, gone[0]):
            os.close(end)


# --- open requests of keys -------------------------------------------------------------------------------------------


@pytest.fixture(params=["own", "shared"])
def counts(request: pytest.FixtureRequest) -> RequestCounts:
    return LocalRequestCounts() if request.param == "own" else SharedRequestCounts(16, 2).of_gateway(0)


def test_one_more_than_the_limit_has_no_ticket(counts: RequestCounts) -> None:
    tickets = [counts.acquire("k-1", 3) for _ in range(4)]
    assert [ticket is None for ticket in tickets] == [False, False, False, True]
    assert counts.acquire("k-2", 1) is not None, "another key"
    first = tickets[0]
    assert first is not None
    counts.release("k-1", first)
    assert counts.acquire("k-1", 3) is not None
    assert counts.acquire("k-1", 3) is None
    assert counts.acquire("k-1", 4) is not None, "the limit has been raised in the file"


def test_gateways_count_together_and_one_that_is_forked_anew_begins_at_nothing() -> None:
    shared = SharedRequestCounts(16, 3)
    first, second = shared.of_gateway(0), shared.of_gateway(1)
    assert [acquired(first, 2), acquired(second, 2)] == [2, 2]
    assert acquired(shared.of_gateway(2), 1, limit=4) == 0
    again = shared.of_gateway(1)  # the other's connections have gone
    assert acquired(again, 9, limit=4) == 2
    assert acquired(first, 1, limit=4) == 0


def acquired(counts: GatewayRequestCounts, tries: int, limit: int = 9) -> int:
    return sum(counts.acquire("k-1", limit) is not None for _ in range(tries))


def test_processes_at_once_have_no_more_open_than_one_may() -> None:
    """Each opens and closes at random; none ever sees more than the limit, and in the end nothing is left."""
    shared = SharedRequestCounts(16, 4)
    limit = 5
    children: list[int] = []
    for number in range(4):
        child = os.fork()
        if not child:
            os._exit(opening_and_closing(shared.of_gateway(number), random.Random(number), limit))
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert acquired(shared.of_gateway(0), 2 * limit, limit) == limit


def opening_and_closing(counts: GatewayRequestCounts, rng: random.Random, limit: int) -> int:
    open_now: list[int] = []
    for _ in range(3000):
        if open_now and rng.random() < 0.5:
            counts.release("k-1", open_now.pop())
            continue
        ticket = counts.acquire("k-1", limit)
        if ticket is not None:
            open_now.append(ticket)
        if len(open_now) > limit:
            return 1
    while open_now:
        counts.release("k-1", open_now.pop())
    return 0


def test_places_of_keys_that_have_nothing_open_are_used_again() -> None:
    counts = SharedRequestCounts(4, 1).of_gateway(0)
    for i in range(2000):
        ticket = counts.acquire(f"k-{i}", 1)
        assert ticket is not None, i
        assert counts.acquire(f"k-{i}", 1) is None
        counts.release(f"k-{i}", ticket)
