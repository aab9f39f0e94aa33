"""The pool and the prefix cache alone: counted, leased, evicted, and checked."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.core.page_pool import LeakCheck, PageLease, PagePool, PageShortfall
from penstock.engine.core.prefix_cache import PrefixCache
from penstock.kv_spec import FULL_ATTENTION, KvSpec, TransferOrder
from penstock.types import BlockHash, PageId


def name(number: int) -> BlockHash:
    return BlockHash(bytes([number]) * 32)


def leased(pool: PagePool, count: int) -> list[PageId]:
    lease = pool.allocate(count)
    assert isinstance(lease, PageLease)
    return lease.detach()


def test_a_lease_gives_back_unless_taken() -> None:
    pool = PagePool(4)
    with pytest.raises(KeyError), leased_scope(pool, 3):
        raise KeyError
    assert pool.free == 4
    with leased_scope(pool, 3) as lease:
        pages = lease.detach()
    assert pool.leased == 3
    assert len(lease) == 0
    pool.release(pages)
    assert pool.free == 4


def leased_scope(pool: PagePool, count: int) -> PageLease:
    lease = pool.allocate(count)
    assert isinstance(lease, PageLease)
    return lease


def test_a_shortfall_tells_how_much_and_takes_nothing() -> None:
    pool = PagePool(4)
    leased(pool, 1)
    assert pool.allocate(5) == PageShortfall(2)
    assert pool.allocate(3, spare=1) == PageShortfall(1)
    assert pool.available == 3


def test_each_time_a_page_is_given_out_is_a_generation() -> None:
    pool = PagePool(1)
    for times in range(1, 4):
        (page,) = leased(pool, 1)
        assert pool.generation(page) == times
        pool.release([page])


def test_the_leaf_of_the_oldest_chain_is_evicted_first() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool)
    for chain in (0, 2):
        pages = leased(pool, 2)
        for offset, page in enumerate(pages):
            assert cache.insert(name(chain + offset), page)
        pool.release(pages)
    assert (pool.free, pool.cached, len(cache)) == (0, 4, 4)
    leased(pool, 1)
    assert [name(n) in cache for n in range(4)] == [True, False, True, True]
    with cache.match([name(0), name(1)], limit=9).lease as found:  # used again: now the other chain is the oldest
        assert len(found) == 1
    leased(pool, 1)
    assert [name(n) in cache for n in range(4)] == [True, False, True, False]


def test_what_is_held_is_not_evicted() -> None:
    pool = PagePool(2)
    cache = PrefixCache(pool)
    (page,) = leased(pool, 1)
    cache.insert(name(0), page)
    pool.release([page])
    with cache.match([name(0)], limit=1).lease:
        assert pool.allocate(2) == PageShortfall(1)
    leased(pool, 2)
    assert len(cache) == 0


def test_a_second_page_of_one_content_stays_private() -> None:
    pool = PagePool(2)
    cache = PrefixCache(pool)
    first, second = leased(pool, 2)
    assert cache.insert(name(0), first)
    assert not cache.insert(name(0), second)
    pool.release([first, second])
    assert (pool.free, pool.cached) == (1, 1)


def test_a_damaged_page_leaves_the_cache_once() -> None:
    """Its block may be known by another page when the pool gives out the damaged one again."""
    pool = PagePool(2)
    cache = PrefixCache(pool)
    gone: list[BlockHash] = []
    cache.on_evict = lambda label: gone.append(label.block)
    damaged, sound = leased(pool, 2)
    cache.insert(name(0), damaged)
    cache.remove_page(damaged)
    assert gone == [name(0)]
    assert cache.insert(name(0), sound)
    pool.release([damaged])
    assert leased(pool, 1) == [damaged]
    assert gone == [name(0)]
    with cache.match([name(0)], limit=1).lease as found:
        assert found.pages == [sound]


def test_a_match_ends_at_the_first_gap_and_at_the_limit() -> None:
    pool = PagePool(4)
    cache = PrefixCache(pool)
    pages = leased(pool, 4)
    for number in (0, 1, 3):
        cache.insert(name(number), pages[number])
    chain = [name(number) for number in range(4)]
    for limit, length in ((9, 2), (1, 1), (0, 0)):
        with cache.match(chain, limit).lease as found:
            assert found.pages == pages[:length]


def test_the_check_sees_what_is_wrong() -> None:
    pool = PagePool(4)
    one, two = leased(pool, 2)
    assert pool.check_leaks([[one], [two]]) == LeakCheck()
    assert pool.check_leaks([[one]]) == LeakCheck(leaked=1)
    assert pool.check_leaks([[one, two], [two]]) == LeakCheck(double=1)
    pool.release([two])
    assert pool.check_leaks([[one, two]]) == LeakCheck(double=1)
    pool._free.remove(two)
    assert pool.check_leaks([[one]]) == LeakCheck(lost=1)
    assert pool.check_leaks([[one]]).total == 1


@given(st.lists(st.tuples(st.sampled_from(["take", "share", "name", "drop"]), st.integers(0, 99)), max_size=200))
def test_no_page_is_lost(moves: list[tuple[str, int]]) -> None:
    pool = PagePool(6)
    cache = PrefixCache(pool)
    owners: list[list[PageId]] = []
    given_out: Counter[PageId] = Counter()
    for kind, number in moves:
        match kind:
            case "take":
                taken = pool.allocate(number % 5)
                if isinstance(taken, PageLease):
                    owners.append(taken.detach())
                    given_out.update(owners[-1])
            case "share":
                owners.append(cache.match([name(number % 4)], limit=1).lease.detach())
            case "name" if owners and owners[number % len(owners)]:
                page = owners[number % len(owners)][0]
                if pool.label(page) is None:
                    cache.insert(name(number % 4), page)
            case "drop" if owners:
                pool.release(owners.pop(number % len(owners)))
        assert pool.free + pool.cached + pool.leased == 6
        assert pool.check_leaks(owners) == LeakCheck()
        assert len({page for pages in owners for page in pages}) == pool.leased
    assert all(pool.generation(PageId(page)) == given_out[PageId(page)] for page in range(6))


WINDOWED = (FULL_ATTENTION, KvSpec(window=6))


def two_groups(blocks: int, pages: int = 20) -> tuple[PagePool, PrefixCache, list[list[PageId]]]:
    """A chain of known blocks of 4 tokens, in a group that reads everything and one with a window of 6."""
    pool = PagePool(pages)
    cache = PrefixCache(pool, WINDOWED, page_tokens=4)
    held = [leased(pool, blocks) for _ in WINDOWED]
    for group, own in enumerate(held):
        for block, page in enumerate(own):
            assert cache.insert(name(block), page, group)
    return pool, cache, held


@pytest.mark.parametrize(
    ("lost", "known", "needed"),
    [
        ([], 6, (6, 2)),  # position 24 reads 19 to 24: blocks 4 and 5
        ([0, 1, 2, 3], 6, (6, 2)),
        ([4], 4, (4, 2)),
        ([5], 5, (5, 2)),
        ([1, 3, 5], 1, (1, 1)),  # of 2 to 5 blocks one is missing
        ([0, 2, 4], 0, (0, 0)),
    ],
)
def test_a_prefix_is_known_where_its_last_window_is(lost: list[int], known: int, needed: tuple[int, int]) -> None:
    pool, cache, held = two_groups(6)
    for block in lost:
        del cache._page_of[1][name(block)]
    match = cache.match([name(block) for block in range(6)], limit=6)
    assert match.blocks == known
    whole, window = needed
    assert match.lease.pages == held[0][:whole] + held[1][known - window : known]
    pool.release(match.lease.detach())


def test_who_goes_on_elsewhere_needs_what_the_next_position_reads() -> None:
    """Position 23 reads 18 to 23: of three known blocks nothing is needed where there is a window."""
    _, cache, held = two_groups(6)
    for block in (0, 1, 2, 3):
        del cache._page_of[1][name(block)]
    assert cache.match([name(block) for block in range(3)], limit=3, position=23).lease.pages == held[0][:3]
    five = cache.match([name(block) for block in range(5)], limit=5, position=23)
    assert five.lease.pages == [*held[0][:5], held[1][4]]


STATEFUL = (FULL_ATTENTION, KvSpec(window=1, state_interval=8))


@pytest.mark.parametrize(
    ("blocks", "lost", "position", "known", "cell"),
    [
        (7, (), 0, 6, 2),  # what is computed here begins with a cell
        (6, (), 0, 6, 2),
        (6, (2,), 0, 4, 1),
        (7, (1, 2), 0, 2, 0),
        (7, (0, 1, 2), 0, 0, None),
        (7, (0, 1, 2), 29, 7, None),  # the state behind position 28 comes from elsewhere
        (7, (), 28, 6, None),  # it comes with the last block, so that one must not be known
        (6, (), 24, 6, 2),  # all there is, state and all
        (6, (2,), 24, 5, None),
    ],
)
def test_a_prefix_with_states_ends_where_a_state_is(
    blocks: int, lost: tuple[int, ...], position: int, known: int, cell: int | None
) -> None:
    """Blocks of 4 tokens, states every 8: ``cell`` is whose page is needed."""
    cache = PrefixCache(PagePool(20), STATEFUL, page_tokens=4)
    keys, states = leased(cache._pool, 7), leased(cache._pool, 3)
    for block, page in enumerate(keys):
        assert cache.insert(name(block), page)
    for index, page in enumerate(states):
        if index not in lost:
            assert cache.insert(name(2 * index + 1), page, 1)
    match = cache.match([name(block) for block in range(blocks)], blocks, position)
    assert match.blocks == known
    assert match.lease.pages == keys[:known] + ([] if cell is None else [states[cell]])


def test_a_state_travels_last_and_all_of_it() -> None:
    pieces = TransferOrder([FULL_ATTENTION, KvSpec(window=7), *[KvSpec(window=1, state_interval=32)] * 3], 77, 16)
    keyed = [(0, 0), (1, 0), (2, 0), (3, 0), (4, 0), (4, 1)]
    assert list(pieces) == [*keyed, (2, 2), (2, 3), (2, 4)]
    assert [pieces.page_at(piece) for piece in range(pieces.total)] == list(pieces)
    assert [pieces.tokens_of(piece) for piece in range(pieces.total)] == [16, 16, 16, 16, 13, 13, 13, 13, 13]
    assert (pieces.pages_before(4), pieces.pages_before(5)) == (4, 9)
    assert [pieces.tokens_in(count) for count in (3, 5, 6, 8, 9)] == [48, 64, 64, 64, 80]
    with pytest.raises(IndexError):
        pieces.page_at(9)


def test_sharing_what_moves_promises_a_page() -> None:
    """So whoever gives a shared page back can have another in its place."""
    pool, cache, held = two_groups(4, pages=12)
    assert pool.available == 4
    with cache.match([name(block) for block in range(4)], limit=4).lease as shared:
        assert len(shared) == 4 + 2
        assert pool.available == 2, "the window's two pages count twice"
        assert pool.allocate(3) == PageShortfall(1)
        pool.release(held[1][2:])
        assert pool.available == 4
        leased(pool, 2)
    assert pool.available == 4, "given back, but cached ones may be evicted"
