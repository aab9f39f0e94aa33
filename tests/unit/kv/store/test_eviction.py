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
        place = ranking.least_valuable()
        assert place is not None
        ranking.evict(place)
        order.append(place)
    assert order == list(range(9, -1, -1))
    assert ranking.least_valuable() is None


def test_what_was_used_stays_and_what_was_dear_goes_in_the_end():
    ranking = EvictionQueue()
    ranking.add(0, saves_s=5.0)  # dear, never asked for
    ranking.add(1, saves_s=1.0)
    ranking.on_used(1, 2)
    assert ranking.least_valuable() == 1 or ranking.least_valuable() == 0
    for place in range(2, 40):  # others come, are used, and go
        ranking.add(place, saves_s=1.0)
        least = ranking.least_valuable()
        assert least is not None
        ranking.evict(least)
    assert len(ranking) == 2


@given(st.lists(st.tuples(st.sampled_from(["add", "used", "goes"]), st.integers(0, 20)), max_size=200))
def test_the_ranking_knows_what_is_there(steps: list[tuple[str, int]]):
    ranking, there = EvictionQueue(), set[int]()
    for step, place in steps:
        if step == "add" and place not in there:
            ranking.add(place, saves_s=place / 7)
            there.add(place)
        elif step == "used":
            ranking.on_used(place)
        elif step == "goes" and there:
            least = ranking.least_valuable()
            assert least in there
            ranking.evict(least)
            there.discard(least)
    assert len(ranking) == len(there)


def test_chances_are_learned_by_kind():
    reuse = ReuseStats()
    assert reuse.reuse_probability(BlockOrigin.PROMPT) == 0.5
    for number in range(2000):
        reuse.on_block_computed(block(number), answer=number % 2 == 0)
        if number % 2 == 0:
            reuse.on_blocks_requested([block(number)])
    for number in range(10_000, 10_000 + FOLLOWED + 500):
        reuse.on_block_computed(block(number), answer=False)
    assert reuse.reuse_probability(BlockOrigin.ANSWER) > 0.95
    assert reuse.reuse_probability(BlockOrigin.PROMPT) < 0.2
    assert reuse.on_block_computed(block(0, sampled=False), answer=True) is BlockOrigin.ANSWER


def test_who_comes_up_again_is_another_kind():
    reuse = ReuseStats()
    reuse.on_block_computed(block(1), answer=False)
    reuse.on_blocks_requested([block(1)])
    assert reuse.on_block_computed(block(1), answer=False) is BlockOrigin.AGAIN


def test_a_tier_that_fails_is_left_alone_for_longer_and_longer():
    breaker, now = CircuitBreaker(), 0.0
    for _ in range(FAILURES - 1):
        assert not breaker.record_failure(now)
        assert breaker.allows(now)
    assert breaker.record_failure(now)
    rest = FIRST_REST_S
    for _ in range(8):
        assert not breaker.allows(now + 0.99 * rest)
        now += rest
        assert breaker.allows(now)
        assert breaker.record_failure(now)
        rest = min(2 * rest, LONGEST_REST_S)
    now += rest
    breaker.record_success()
    assert breaker.allows(now)
    assert not breaker.record_failure(now), "one failure is none again"
