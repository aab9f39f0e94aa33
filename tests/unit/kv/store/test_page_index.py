"""The table of who has which page, as several processes see it."""

from __future__ import annotations

import mmap
import random
import threading

from hypothesis import given
from hypothesis import strategies as st
from tests.store_rig import key_of

from penstock.kv.store.page_index import ENTRY_BYTES, RING, IndexEntry, PageIndex, index_bytes

PLACES = 64


def views(count: int, places: int = PLACES) -> tuple[mmap.mmap, list[PageIndex]]:
    area = mmap.mmap(-1, index_bytes(places))
    made = [PageIndex(memoryview(area), places, writer) for writer in range(count)]
    for each in made:
        each.scan()
    return area, made


def entry(number: int) -> IndexEntry:
    return IndexEntry(key_of(number), float(number), random.Random(number).randbytes(40))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 31), st.integers(0, 9)), max_size=60), st.booleans())
def test_all_see_what_one_writes(steps: list[tuple[int, int, int]], at_once: bool):
    _, (one, two) = views(2)
    model: dict[int, IndexEntry] = {}
    for who, at, number in steps:
        place = at + who * 32  # of one's own
        if number == 0:
            (one, two)[who].clear_entry(place)
            model.pop(place, None)
        else:
            (one, two)[who].write_entry(place, entry(number))
            model[place] = entry(number)
        if at_once:
            one.refresh()
            two.refresh()
    for view in (one, two):
        view.refresh()
        assert dict(view.known_places()) == {place: each.key for place, each in model.items()}
        for number in range(1, 10):
            assert set(view.find(key_of(number))) == {p for p, each in model.items() if each.key == key_of(number)}
        assert all(view.entry_at(place) == model.get(place) for place in range(PLACES))


def test_who_falls_behind_reads_everything():
    _, (one, two) = views(2)
    for number in range(RING + 10):
        one.write_entry(number % PLACES, entry(number))
    two.refresh()
    assert dict(two.known_places()) == dict(one.known_places())


def test_what_is_put_during_a_scan_is_known_after_it():
    _, (one,) = views(1)
    one.write_entry(0, entry(1))
    putting = threading.Thread(target=one.write_entry, args=(1, entry(2)))
    plain = one.entry_at

    def at(place: int) -> IndexEntry | None:
        if putting.ident is None:
            putting.start()
            putting.join(0.05)  # it waits for the end of the scan; where it would not, it is through
        return plain(place)

    one.entry_at = at  # type: ignore[method-assign]
    one.scan()
    putting.join()
    assert dict(one.known_places()) == {0: key_of(1), 1: key_of(2)}


def test_a_torn_entry_counts_as_empty():
    area, (one, two) = views(2)
    one.write_entry(3, entry(3))
    start = one._entries_at + 3 * ENTRY_BYTES
    raw = area[start : start + ENTRY_BYTES]
    for byte in range(ENTRY_BYTES):
        area[start + byte] = raw[byte] ^ 0x10
        assert two.entry_at(3) is None, byte
        area[start + byte] = raw[byte]
    assert two.entry_at(3) == entry(3)
    area[start : start + ENTRY_BYTES] = area[start - ENTRY_BYTES : start]
    assert two.entry_at(3) is None
    other = one._entries_at + 5 * ENTRY_BYTES
    area[other : other + ENTRY_BYTES] = raw  # the right entry in the wrong place
    assert two.entry_at(5) is None


def test_touches_are_seen_by_all():
    _, (one, two) = views(2)
    two.count_use(7)
    two.count_use(7)
    assert one.use_count(7) == 2


def test_a_page_in_two_places_is_found_in_both():
    _, (one, two) = views(2)
    one.write_entry(1, entry(5))
    two.write_entry(40, entry(5))
    one.refresh()
    assert set(one.find(key_of(5))) == {1, 40}
    one.clear_entry(1)
    assert one.find(key_of(5)) == (40,)
    two.refresh()
    assert two.find(key_of(5)) == (40,)
