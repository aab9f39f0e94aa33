"""What pages cost that are elsewhere: decisions about links, neighbours' caches and lower tiers."""

from __future__ import annotations

import numpy as np
import pytest
from decision_words import NOW, PROMPT, check, fleet_in_words
from router_words import hashes_of, report, request

from penstock.router.decide import PlacementRequest, choose_workers
from penstock.types import RequestId, RequestStage


def test_a_worker_that_pages_are_long_on_their_way_to_is_avoided():
    words = "prefill-0 token_us=1; decode-0 token_us=1 wait_us=1000; decode-1 token_us=1"
    check(words, picks="decode=decode-1 prefill=prefill-0")
    check(words.replace("decode-1", "both-0"), picks="whole=both-0")


def test_a_link_that_was_slow_is_forgotten_by_and_by():
    fleet, _ = fleet_in_words("prefill-0 token_us=1; decode-0 token_us=1 wait_us=1000")
    told = report("decode-0", page_bytes=100, counters={"bytes_received": 100.0, "transfer_wait_seconds": 1e-3})
    for _ in range(1000):
        assert fleet.on_report(told, NOW)
    assert 0 < fleet.loads.at_slots(np.array([1]))[1].wait[0] < 0.2e-3


def test_a_wait_that_was_given_up_counts_with_the_next_bytes():
    fleet, _ = fleet_in_words("prefill-0 token_us=1; decode-0 token_us=1")
    for nbytes in (100.0, 200.0):
        counters = {"bytes_received": nbytes, "transfer_wait_seconds": 5e-3}
        assert fleet.on_report(report("decode-0", page_bytes=100, counters=counters), NOW)
    assert fleet.loads.at_slots(np.array([1]))[1].wait[0] == pytest.approx(5e-3)


def test_a_link_over_which_nothing_comes_is_known_to_be_no_faster_than_that():
    fleet, _ = fleet_in_words("prefill-0 token_us=1; decode-0 token_us=1")
    waits = []
    for waited, missed in ((0.0, 0.0), (2.0, 20.0), (2.0, 20.0), (3.0, 24.0)):
        counters = {"transfer_wait_seconds": waited, "pages_missed": missed}
        assert fleet.on_report(report("decode-0", page_bytes=100, counters=counters), NOW)
        waits.append(float(fleet.loads.at_slots(np.array([1]))[1].wait[0]))
    assert waits == [0.0, 0.1, pytest.approx(0.1 * 0.99), 0.25]


def test_pages_are_moved_where_that_takes_least():
    words = "prefill-0 token_us=1; decode-0 token_us=1 page_us=1000; decode-1 token_us=1 page_us=1000 cached=64"
    check(words, picks="decode=decode-1 prefill=prefill-0", because="decode-0: cost 8.; decode-1: cost 4.; move 4 ms")
    check(words.replace("cached=64", "page_us=1200"), picks="decode=decode-0 prefill=prefill-0")


SHARING = "prefill-0 token_us=50 domain=a fetch_us=20; prefill-1 token_us=50 domain=a fetch_us=20 cached=96"


def test_pages_of_a_neighbour_are_taken_where_that_is_sooner():
    busy = SHARING.replace("prefill-1", "prefill-1 queued=40")
    check(SHARING + "; decode-0 token_us=50", picks="decode=decode-0 prefill=prefill-1")  # who has them need not fetch
    check(busy + "; decode-0 token_us=50", picks="decode=decode-0 prefill=prefill-0", because="fetch 0.12 ms")
    apart = busy.replace("domain=a", "domain=b", 1)
    check(apart + "; decode-0 token_us=50", picks="decode=decode-0 prefill=prefill-1")
    dear = busy.replace("fetch_us=20", "fetch_us=2000")
    check(dear + "; decode-0 token_us=50", picks="decode=decode-0 prefill=prefill-1")


BESIDE = "; both-1 token_us=50"


def test_a_hit_costs_what_its_tier_takes():
    below = "both-0 token_us=50 host_us=20 disk_us=200 queued=40"
    check(below + " host=96" + BESIDE, picks="whole=both-0", because="fetch 0.12 ms")
    check(below + " disk=96" + BESIDE, picks="whole=both-0", because="fetch 1.2 ms")
    check(below + " host=64 disk=96" + BESIDE, picks="whole=both-0", because="fetch 0.48 ms")
    check(below.replace("200", "2000") + " disk=96" + BESIDE, picks="whole=both-1")  # sooner computed
    check(below + " host=96" + BESIDE + " cached=96", picks="whole=both-1")  # nothing is nearer than the cache
    check(below + " cached=64 host=64" + BESIDE, picks="whole=both-0")


def test_what_a_lower_tier_has_is_not_expected_to_be_read():
    one = check("both-0 token_us=50 host_us=20 host=96", picks="whole=both-0").stages[0]
    assert one.work.tokens == len(PROMPT) - 96
    dear = check("both-0 token_us=50 host_us=2000 host=96", picks="whole=both-0").stages[0]
    assert dear.work.tokens == len(PROMPT)


def test_what_was_only_promised_to_a_neighbour_cannot_be_taken():
    fleet, prefixes = fleet_in_words(SHARING.replace("cached=96", "queued=9") + "; decode-0 token_us=50")
    prefixes.add_pending(RequestId("other"), hashes_of(PROMPT), [1])
    decision = choose_workers(PlacementRequest(request=request(prompt=PROMPT)), fleet, prefixes, NOW)
    numbers = {reason.worker: reason.numbers for reason in decision.reasons() if reason.stage is RequestStage.PREFILL}
    assert numbers["prefill-0"]["fetch_s"] == 0
    assert numbers["prefill-0"]["compute"] == len(PROMPT)
