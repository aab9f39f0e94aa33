"""What the router knows of workers' caches: told, missed, told anew, and sent a moment ago."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_words import chain, holds

from penstock.engine.service.kv_events import KvEventLog
from penstock.kernels.host_ops import keys_of
from penstock.router.prefix_index import SNAPSHOT_RETRY_S, PendingPrefixes, PrefixIndex
from penstock.types import BlockHash, RequestId, WorkerId
from penstock.wire.gateway_messages import KV_EVENT_BLOCKS, KvEvents

A, B = RequestId("a"), RequestId("b")


def told(sequence: int, stored: Sequence[BlockHash] = (), removed: Sequence[BlockHash] = (), **fields: int) -> KvEvents:
    stored_keys, removed_keys = keys_of(stored), keys_of(removed)
    values = {"incarnation": 1} | fields
    return KvEvents(worker=WorkerId("w"), sequence=sequence, stored=stored_keys, removed=removed_keys, **values)


def hits(index: PrefixIndex, hashes: Sequence[BlockHash], slots: int = 1) -> list[int]:
    return index.hits(hashes, slots).tolist()


def followed(*, snapshot: Sequence[BlockHash] = ()) -> PrefixIndex:
    index = PrefixIndex()
    holds(index, 0, snapshot)
    return index


def test_nothing_told_is_nothing_known():
    assert hits(PrefixIndex(), chain(5), 3) == [0, 0, 0]
    assert hits(followed(), [], 2) == [0, 0]
    assert hits(followed(snapshot=chain(37)), chain(50)) == [37]


def test_changes_are_taken_in_order_and_once():
    index = followed()
    index.on_kv_events(0, told(1, chain(10)))
    index.on_kv_events(0, told(1, removed=chain(10)))
    assert hits(index, chain(10)) == [10]
    index.on_kv_events(0, told(2, chain(12)[10:], chain(12)[8:10]))
    assert hits(index, chain(12)) == [8]
    assert not index.needs_snapshot(0, 0.0)


def test_blocks_sink_through_tiers_and_come_back():
    index, blocks, lower = PrefixIndex(), chain(9), dict[BlockHash, int]()
    index.add_worker(0, 1)
    log = KvEventLog(WorkerId("w"), 1, list, lower.items, 2)

    def known() -> list[int]:
        for message in log.drain():
            index.on_kv_events(0, message)
        return [hits(index, blocks)[0], *(int(depths[0]) for depths in index.tier_blocks(blocks, 1))]

    for message in log.snapshot():
        index.on_kv_events(0, message)
    for block in blocks:
        log.set_cached(block, known=True)
    assert known() == [9, 9, 9]
    for block, tier in zip(blocks[5:], (1, 1, 2, 2), strict=True):
        log.set_tier(block, tier)
    assert known() == [5, 7, 9]
    log.set_cached(blocks[8], known=False)
    assert known() == [5, 7, 8]
    log.set_tier(blocks[6], 2)
    assert known() == [5, 6, 8]
    log.set_cached(blocks[5], known=True)
    assert known() == [6, 6, 8]
    assert not index.needs_snapshot(0, 0.0)
    index.remove_worker(0)
    assert known() == [0, 0, 0]


def test_a_snapshot_tells_of_all_tiers():
    blocks = chain(2 * KV_EVENT_BLOCKS)
    lower = dict.fromkeys(blocks[100:], 1) | dict.fromkeys(blocks[-50:], 2)
    index = PrefixIndex()
    index.add_worker(0, 1)
    for message in KvEventLog(WorkerId("w"), 1, lambda: blocks[:100], lower.items, 2).snapshot():
        index.on_kv_events(0, message)
    assert [hits(index, blocks)[0], *(int(depths[0]) for depths in index.tier_blocks(blocks, 1))] == [
        100,
        len(blocks) - 50,
        len(blocks),
    ]


def test_tiers_that_come_as_a_surprise_are_told_anew():
    index = followed(snapshot=chain(4))
    index.on_kv_events(0, msgspec.structs.replace(told(1, chain(6)[4:]), sunk=(keys_of(chain(8)[6:]),)))
    assert hits(index, chain(8)) == [6]
    assert index.needs_snapshot(0, 0.0)


def test_tiers_that_there_is_no_room_for_are_not_asked_for_again_and_again():
    index, blocks = PrefixIndex(4096, max_workers=2), chain(12)
    index.add_worker(0, 1)
    log = KvEventLog(WorkerId("w"), 1, list, tuple, 2)
    for message in log.snapshot():
        index.on_kv_events(0, message)
    for block in blocks[:10]:
        log.set_cached(block, known=True)
        for message in log.drain():
            index.on_kv_events(0, message)
        assert not index.needs_snapshot(0, 0.0)
    assert (hits(index, blocks), index.gaps) == ([10], 0)


def test_a_gap_is_told_anew():
    index = followed(snapshot=chain(4))
    index.on_kv_events(0, told(2, chain(9)))
    assert index.gaps == 1
    assert hits(index, chain(9)) == [4]  # what is known stays the best guess
    index.on_kv_events(0, told(3, chain(9)))
    assert index.gaps == 1
    assert index.needs_snapshot(0, 10.0)
    assert not index.needs_snapshot(0, 10.0)  # asked already
    assert index.needs_snapshot(0, 10.0 + SNAPSHOT_RETRY_S)
    index.on_kv_events(0, told(5, chain(7, "b"), part=0, parts=1))
    assert (hits(index, chain(9)), hits(index, chain(9, "b"))) == ([0], [7])
    assert not index.needs_snapshot(0, 99.0)


def test_a_loss_at_the_end_is_seen_by_the_next_report():
    index = followed()
    index.on_kv_events(0, told(1, chain(3)))
    index.on_report(0, 1, 1)
    assert not index.needs_snapshot(0, 0.0)
    index.on_report(0, 1, 2)
    assert index.needs_snapshot(0, 0.0)


def test_a_snapshot_counts_when_all_its_parts_came_in_order():
    index = followed()
    index.on_report(0, 1, 1)
    index.on_kv_events(0, told(4, chain(5), part=0, parts=3))
    index.on_kv_events(0, told(4, chain(9)[5:], part=2, parts=3))
    assert index.needs_snapshot(0, 0.0)
    index.on_kv_events(0, told(6, chain(5), part=0, parts=2))
    index.on_kv_events(0, told(6, chain(9)[5:], part=1, parts=2))
    index.on_kv_events(0, told(7, chain(11)[9:]))
    assert hits(index, chain(20)) == [11]
    assert not index.needs_snapshot(0, 99.0)


def test_a_new_incarnation_begins_empty_and_the_old_one_is_not_heard():
    index = followed(snapshot=chain(8))
    index.add_worker(0, 2)
    assert hits(index, chain(8)) == [0]
    assert index.needs_snapshot(0, 0.0)
    index.on_kv_events(0, told(0, chain(8), part=0, parts=1))
    assert hits(index, chain(8)) == [0]
    index.on_kv_events(0, told(0, chain(6), part=0, parts=1, incarnation=2))
    assert hits(index, chain(8)) == [6]
    index.remove_worker(0)
    assert hits(index, chain(8)) == [0]
    index.sweep()
    assert len(index) == 0


def test_more_workers_than_there_is_room_for_are_served_all_the_same():
    index = PrefixIndex(max_workers=1)
    holds(index, 0, chain(3))
    index.add_worker(1, 1)
    index.on_kv_events(1, told(0, chain(3), part=0, parts=1))
    assert hits(index, chain(3), 2) == [3, 0]
    assert not index.needs_snapshot(1, 0.0)


def test_blocks_over_the_limit_are_counted():
    index = PrefixIndex(capacity=10)
    holds(index, 0, chain(12))
    assert (len(index), index.refused) == (10, 2)
    with pytest.raises(ValueError, match="remembers nothing"):
        PrefixIndex(capacity=0)


@given(st.lists(st.tuples(st.sampled_from("+-.?!"), st.integers(0, 3), st.integers(0, 30)), max_size=60))
def test_whatever_is_lost_on_the_way_is_known_in_the_end(events):
    """``+`` and ``-`` change the cache, ``.`` tells, ``?`` tells and is lost, ``!`` is a beat with its report."""
    cache: dict[BlockHash, None] = {}
    log = KvEventLog(WorkerId("w"), 1, lambda: cache)
    index = PrefixIndex()
    index.add_worker(0, 1)
    now = 0.0
    for verb, branch, length in [*events, ("!", 0, 0), ("!", 0, 0)]:
        now += SNAPSHOT_RETRY_S
        blocks = chain(30, str(branch))
        if verb == "+":
            for block in blocks[:length]:
                cache[block] = None
                log.set_cached(block, True)
        elif verb == "-":
            for block in reversed(blocks[length:]):
                if block in cache:
                    del cache[block]
                    log.set_cached(block, False)
        else:
            for message in log.drain():
                if verb != "?":
                    index.on_kv_events(0, message)
        if verb == "!":
            if index.needs_snapshot(0, now):
                for message in log.snapshot():
                    index.on_kv_events(0, message)
            index.on_report(0, 1, log.sequence)
    for branch in range(4):
        prompt = chain(30, str(branch))
        assert hits(index, prompt) == [next((i for i, block in enumerate(prompt) if block not in cache), 30)]


def test_messages_of_a_log_are_of_limited_size():
    blocks = chain(2 * KV_EVENT_BLOCKS + 5)
    log = KvEventLog(WorkerId("w"), 1, lambda: blocks)
    for block in blocks:
        log.set_cached(block, True)
    assert len(log) == len(blocks)
    changes, parts = log.drain(), list(log.snapshot())
    assert [message.sequence for message in changes] == [1, 2, 3]
    assert [(message.sequence, message.part, message.parts) for message in parts] == [(3, 0, 3), (3, 1, 3), (3, 2, 3)]
    assert b"".join(message.stored for message in parts) == keys_of(blocks)
    assert max(len(message.stored) for message in changes + parts) == 8 * KV_EVENT_BLOCKS
    assert log.drain() == []


def test_what_was_sent_a_moment_ago_counts_until_the_report_after_the_first_token():
    index = followed(snapshot=chain(3))
    index.add_worker(1, 1)
    index.add_pending(A, chain(20), [1])
    index.add_pending(B, chain(9), [0])
    assert hits(index, chain(30), 2) == [9, 20]
    assert index.pending.sharers(chain(30), 9) == 1
    index.on_prefilled(A)
    index.on_report(0, 1, 0)
    assert hits(index, chain(30), 2) == [9, 20], "only its own worker's report tells what became of it"
    index.on_report(1, 1, 0)
    assert hits(index, chain(30), 2) == [9, 0]
    index.add_worker(0, 2)
    assert hits(index, chain(30), 2) == [0, 0]
    index.on_prefilled(B)
    assert len(index.pending) == 0


Prompt = st.tuples(st.integers(0, 300), st.sampled_from("ab"), st.sampled_from([0, 1, 20, 100, 300]))


@given(
    st.lists(st.tuples(Prompt, st.sets(st.integers(0, 2), max_size=2)), max_size=8), st.sets(st.integers(0, 7)), Prompt
)
def test_a_promise_is_real_and_nearly_the_longest(sent, settled, asked):
    promises = PendingPrefixes()
    full: dict[int, set[BlockHash]] = {0: set(), 1: set(), 2: set()}
    for number, (prompt, slots) in enumerate(sent):
        promises.add(RequestId(str(number)), chain(*prompt), sorted(slots))
    for number, (prompt, slots) in enumerate(sent):
        if number in settled:
            promises.on_prefilled(RequestId(str(number)))
            for slot in slots:
                promises.on_report(slot)
            continue
        for slot in slots:
            full[slot].update(chain(*prompt))
    prompt = chain(*asked)
    depths = dict(promises.depths(prompt))
    for slot, known in full.items():
        longest = next((i for i, block in enumerate(prompt) if block not in known), len(prompt))
        assert longest * 31 / 32 - 1 <= depths.get(slot, 0) <= longest


def test_a_worker_for_which_there_was_no_room_is_followed_when_there_is():
    index = PrefixIndex(capacity=1 << 10, max_workers=2)
    for slot in range(3):
        index.add_worker(slot, 1)
    assert [index.needs_snapshot(slot, 10.0) for slot in range(3)] == [True, True, False]
    index.remove_worker(0)
    assert index.needs_snapshot(2, 12.0)


def test_a_worker_that_told_of_its_cache_when_there_was_no_room_is_asked_again_when_there_is():
    """Every new link asks for the whole cache at once; what came then was told to nobody."""
    index = PrefixIndex(max_workers=1)
    for slot in range(2):
        index.add_worker(slot, 1)
    index.on_kv_events(1, told(1, chain(5), part=0, parts=1))
    assert hits(index, chain(5), 2) == [0, 0]
    assert not index.needs_snapshot(1, 10.0)
    index.remove_worker(0)
    assert index.needs_snapshot(1, 12.0)
    index.on_kv_events(1, told(1, chain(5), part=0, parts=1))
    assert hits(index, chain(5), 2) == [0, 5]
    assert not index.needs_snapshot(1, 20.0)
