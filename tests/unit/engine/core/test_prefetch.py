"""Pages that come from outside: whatever groups there are, whatever comes and in which order, nothing leaks."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.kv_cache_manager import KvCacheManager
from penstock.engine.core.page_pool import PageLease
from penstock.engine.core.prefetch import Prefetches
from penstock.kv_spec import FULL_ATTENTION, KvSpec
from penstock.types import BlockHash

BLOCKS = 24
CHAIN = [BlockHash(bytes([number]) * 32) for number in range(BLOCKS)]
GROUPS = {
    "plain": (FULL_ATTENTION,),
    "windows": (FULL_ATTENTION, KvSpec(window=20), KvSpec(chunk=24)),
    "states": (FULL_ATTENTION, KvSpec(window=1, state_interval=16), KvSpec(window=1, state_interval=16)),
}


def memory_of(kind: str, pages: int = 400) -> KvCacheManager:
    return KvCacheManager(pages=pages, page_tokens=4, reaches=GROUPS[kind])


def put(memory: KvCacheManager, blocks: int) -> None:
    """All pages of so many blocks are in the prefix cache."""
    for group in range(memory.groups):
        for last in memory.prefix.page_ends(group, blocks, 0):
            lease = memory.pool.allocate(1)
            assert isinstance(lease, PageLease)
            with lease:
                memory.prefix.insert(CHAIN[last], lease.pages[0], group)


@pytest.mark.parametrize("kind", GROUPS)
@given(
    here=st.integers(0, BLOCKS),
    there=st.integers(0, BLOCKS),
    limit=st.integers(0, BLOCKS),
    lost=st.sets(st.integers(0, BLOCKS - 1), max_size=3),
    bad=st.sets(st.integers(0, 40), max_size=4),
    leave=st.booleans(),
    seed=st.integers(0, 99),
)
def test_what_comes_is_found_and_what_does_not_is_free(
    kind: str, here: int, there: int, limit: int, lost: set[int], bad: set[int], leave: bool, seed: int
) -> None:
    memory, elsewhere = memory_of(kind), memory_of(kind)
    put(memory, here)
    put(elsewhere, there)
    imports = Prefetches(memory)
    had = memory.prefix.longest_prefix(CHAIN, limit)

    def is_there(block: BlockHash, group: int) -> bool:
        return elsewhere.prefix.has(group, block) and CHAIN.index(block) not in lost

    reach = imports.reachable_blocks(CHAIN, limit, is_there)
    assert reach >= had
    if not lost:
        assert reach >= elsewhere.prefix.longest_prefix(CHAIN, limit)
    wanted = [(CHAIN[last], group) for last, group in imports.missing_pages(CHAIN, reach)]
    assert all(is_there(block, group) for block, group in wanted)
    brought = imports.begin(CHAIN, limit, wanted)
    assert brought is not None
    assert memory.check_leaks(()).total == 0
    places = list(range(len(wanted)))
    random.Random(seed).shuffle(places)
    if leave:
        imports.release(brought)
    for place in places:
        assert (imports.on_filled(brought, place, place not in bad) is not None) == (place not in bad)
        assert memory.check_leaks(()).total == 0
    if not bad.intersection(places):
        assert memory.prefix.longest_prefix(CHAIN, limit) == reach
    imports.release(brought)
    assert memory.check_leaks(()).total == 0
    assert not memory.has_foreign_pages
    assert memory.pool.leased == 0


def test_others_keep_some_room() -> None:
    memory = memory_of("plain", pages=16)
    imports = Prefetches(memory)
    wanted = [(block, 0) for block in CHAIN]
    assert imports.begin(CHAIN, BLOCKS, wanted) is None
    assert imports.begin(CHAIN, BLOCKS, wanted[:15]) is None
    assert imports.begin(CHAIN, BLOCKS, wanted[:14]) is not None
    assert memory.pool.available == 2


def test_a_page_that_was_computed_meanwhile_is_free_again() -> None:
    memory = memory_of("plain")
    imports = Prefetches(memory)
    brought = imports.begin(CHAIN, BLOCKS, [(CHAIN[0], 0), (CHAIN[1], 0)])
    assert brought is not None
    put(memory, 1)
    assert imports.on_filled(brought, 0, True) is None
    assert imports.on_filled(brought, 1, True) is not None
    imports.release(brought)
    assert memory.pool.cached == 2
    assert memory.pool.free == 398
