"""Who is written, who goes first, and when a tier is left alone."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from penstock.kv.store.eviction import FOLLOWED, SAMPLED, BlockOrigin, EvictionQueue, ReuseStats
from penstock.kv.store.tier_worker import FAILURES, FIRST_REST_S, LONGEST_REST_S, CircuitBreaker
from penstock.types import BlockHash


def block(number: int, sampled: bool = True) -> BlockHash:
    raw = random.Random(number).randbytes(31)
    return BlockHash(bytes([0 if sampled else SAMPLED - 1]) + raw)


def test_a_prefix_goes_from_its_end():
    ranking = EvictionQueue()
    for place in range(10):
        ranking.add(place, saves_s=10.0 - place)  # block 0 has everything behind it
    order = []
    for _ in range(10):
        place = ranking.least()
        assert place is not None
        ranking.goes(place)
        order.append(place)
    assert order == list(range(9, -1, -1))
    assert ranking.least() is None


def test_what_was_used_stays_and_what_was_dear_goes_in_the_end():
    ranking = EvictionQueue()
    ranking.add(0, saves_s=5.0)  # dear, never asked for
    ranking.add(1, saves_s=1.0)
    ranking.used(1, 2)
    assert ranking.least() == 1 or ranking.least() == 0
    for place in range(2, 40):  # others come, are used, and go
        ranking.add(place, saves_s=1.0)
        least = ranking.least()
        assert least is not None
        ranking.goes(least)
    assert len(ranking) == 2


@given(st.lists(st.tuples(st.sampled_from(["add", "used", "goes"]), st.integers(0, 20)), max_size=200))
def test_the_ranking_knows_what_is_there(steps: list[tuple[str, int]]):
    ranking, there = EvictionQueue(), set[int]()
    for step, place in steps:
        if step == "add" and place not in there:
            ranking.add(place, saves_s=place / 7)
            there.add(place)
        elif step == "used":
            ranking.used(place)
        elif step == "goes" and there:
            least = ranking.least()
            assert least in there
            ranking.goes(least)
            there.discard(least)
    assert len(ranking) == len(there)


def test_chances_are_learned_by_kind():
    reuse = ReuseStats()
    assert reuse.chance(BlockOrigin.PROMPT) == 0.5
    for number in range(2000):
        reuse.made(block(number), answer=number % 2 == 0)
        if number % 2 == 0:
            reuse.asked([block(number)])
    for number in range(10_000, 10_000 + FOLLOWED + 500):
        reuse.made(block(number), answer=False)
    assert reuse.chance(BlockOrigin.ANSWER) > 0.95
    assert reuse.chance(BlockOrigin.PROMPT) < 0.2
    assert reuse.made(block(0, sampled=False), answer=True) is BlockOrigin.ANSWER


def test_who_comes_up_again_is_another_kind():
    reuse = ReuseStats()
    reuse.made(block(1), answer=False)
    reuse.asked([block(1)])
    assert reuse.made(block(1), answer=False) is BlockOrigin.AGAIN


def test_a_tier_that_fails_is_left_alone_for_longer_and_longer():
    breaker, now = CircuitBreaker(), 0.0
    for _ in range(FAILURES - 1):
        assert not breaker.failed(now)
        assert breaker.allows(now)
    assert breaker.failed(now)
    rest = FIRST_REST_S
    for _ in range(8):
        assert not breaker.allows(now + 0.99 * rest)
        now += rest
        assert breaker.allows(now)
        assert breaker.failed(now)
        rest = min(2 * rest, LONGEST_REST_S)
    now += rest
    breaker.worked()
    assert breaker.allows(now)
    assert not breaker.failed(now), "one failure is none again"
