"""The fleet's book: fences, tokens in flight, the rows that people see."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from router_words import IDENTITY, OTHER, fleet_of, report, up

from penstock.router.fleet import Fleet
from penstock.types import RequestId, Role, WorkerId, WorkerState
from penstock.wire.supervisor_messages import WorkerDown

A, B = RequestId("a"), RequestId("b")
P0 = WorkerId("prefill-0")


def down(name: str, incarnation: int = 1, state: WorkerState = WorkerState.DEAD) -> WorkerDown:
    return WorkerDown(worker=WorkerId(name), incarnation=incarnation, state=state, reason="killed")


def test_a_worker_is_starting_until_it_reports():
    fleet = Fleet()
    up(fleet, "prefill-0")
    assert fleet.states == [WorkerState.STARTING]
    assert fleet.ready(Role.PREFILL, None) == ()
    fleet.on_report(report("prefill-0"), 0.0)
    assert fleet.ready(Role.PREFILL, None) == (0,)


@pytest.mark.parametrize("incarnation", [0, 2])
def test_a_report_of_another_incarnation_is_ignored(incarnation):
    fleet = fleet_of("prefill-0")
    assert not fleet.on_report(report("prefill-0", incarnation=incarnation, steps=99), 1.0)
    assert fleet.steps() == 0
    assert fleet.last_seen == [0.0]


def test_a_report_of_a_stranger_is_ignored():
    assert not Fleet().on_report(report("prefill-0"), 0.0)


@pytest.mark.parametrize("state", [WorkerState.DEAD, WorkerState.WEDGED])
def test_the_last_words_of_an_ended_worker_are_ignored(state):
    fleet = fleet_of("prefill-0")
    assert fleet.on_worker_down(down("prefill-0", state=state))
    assert not fleet.on_report(report("prefill-0"), 1.0)
    assert fleet.states == [state]


def test_an_older_incarnation_cannot_take_the_place_of_a_newer():
    fleet = Fleet()
    up(fleet, "prefill-0", incarnation=3)
    up(fleet, "prefill-0", incarnation=2)
    assert not fleet.on_worker_down(down("prefill-0", incarnation=2))
    assert fleet.incarnations == [3]
    assert fleet.states == [WorkerState.STARTING]


def test_an_id_keeps_its_row_while_it_is_down_and_after():
    fleet = fleet_of("prefill-0", "decode-0")
    fleet.on_worker_down(down("prefill-0"))
    assert [(row["id"], row["state"]) for row in fleet.status_rows()] == [("decode-0", "ready"), ("prefill-0", "dead")]
    up(fleet, "prefill-0", incarnation=2)
    assert [(row["id"], row["state"], row["incarnation"]) for row in fleet.status_rows()] == [
        ("decode-0", "ready", 1),
        ("prefill-0", "starting", 2),
    ]


def test_a_row_has_what_the_command_line_promises():
    fleet = Fleet()
    up(fleet, "both-0")
    fields = {"id", "role", "pid", "state", "running", "queued", "kv_pages_used", "kv_pages_free", "kv_pages_leaked"}
    assert fields <= set(fleet.status_rows()[0])
    fleet.on_report(report("both-0", running=2, queued=1, kv_pages_used=5, kv_pages_leaked=3), 0.0)
    row = fleet.status_rows()[0]
    assert (row["running"], row["queued"], row["kv_pages_used"], row["kv_pages_free"]) == (2, 1, 5, 100)
    assert row["kv_pages_leaked"] == 3
    assert row["identity"] == IDENTITY.system_fingerprint


def test_a_worker_may_change_its_role():
    fleet = fleet_of("prefill-0")
    assert fleet.ready(Role.PREFILL, None) == (0,)
    fleet.on_report(report("prefill-0", role=Role.DECODE), 1.0)
    assert fleet.ready(Role.PREFILL, None) == ()
    assert fleet.ready(Role.DECODE, None) == (0,)


def test_tokens_in_flight_follow_submit_progress_and_end():
    fleet = fleet_of("prefill-0")
    fleet.add_work(P0, 1, A, 100)
    fleet.add_work(P0, 1, B, 10)
    assert fleet.load == [110]
    fleet.set_work_left(P0, A, 40)
    assert fleet.load == [50]
    fleet.remove_work(P0, 1, A)
    fleet.remove_work(P0, 1, A)
    fleet.set_work_left(P0, A, 7)
    assert fleet.load == [10]
    assert fleet.requests_at(0) == (B,)


def test_what_was_charged_to_an_earlier_incarnation_is_forgotten():
    fleet = fleet_of("prefill-0")
    fleet.add_work(P0, 1, A, 100)
    fleet.on_worker_down(down("prefill-0"))
    assert fleet.load == [0]
    up(fleet, "prefill-0", incarnation=2)
    fleet.add_work(P0, 1, A, 100)
    fleet.remove_work(P0, 1, A)
    assert fleet.load == [0]
    assert not fleet.has_work()


def test_work_of_other_gateways_counts_as_far_as_it_is_reported():
    fleet = fleet_of("prefill-0")
    fleet.add_work(P0, 1, A, 100)
    fleet.on_report(report("prefill-0", tokens_in_flight=130), 0.0)
    assert fleet.load == [130]
    fleet.on_report(report("prefill-0", tokens_in_flight=0), 0.0)  # it has not seen the submission yet
    assert fleet.load == [100]


def test_a_report_that_is_equal_to_the_last_counts_what_this_gateway_has_sent_since():
    fleet, told = fleet_of("prefill-0"), report("prefill-0", steps=3, tokens_in_flight=100)
    fleet.on_report(told, 1.0)
    assert (fleet.load, fleet.progress_at) == ([100], [1.0])
    fleet.add_work(P0, 1, A, 30)
    assert fleet.load == [130]
    fleet.on_report(told, 2.0)
    assert (fleet.load, fleet.last_seen, fleet.progress_at, fleet.steps()) == ([100], [2.0], [1.0], 3)


@pytest.mark.parametrize("exclude", [Fleet.mark_unresponsive, Fleet.drain, Fleet.quarantine])
def test_a_worker_that_was_excluded_is_let_back_by_a_report_equal_to_its_last(exclude):
    fleet = fleet_of("prefill-0")
    fleet.on_report(told := report("prefill-0", steps=3), 1.0)
    exclude(fleet, 0, "silent")
    assert fleet.ready(Role.PREFILL, None) == ()
    fleet.on_report(told, 2.0)
    assert (fleet.ready(Role.PREFILL, None), fleet.reasons) == ((0,), [""])


def test_the_wait_for_pages_is_forgotten_with_reports_that_are_equal_too():
    fleet = fleet_of("decode-0")
    counted = {"bytes_received": 100.0, "transfer_wait_seconds": 1.0}
    fleet.on_report(report("decode-0", page_bytes=100, counters=counted), 1.0)
    told = report("decode-0", page_bytes=100)
    waits = []
    for second in range(4):
        waits.append(float(fleet.loads.at_slots(np.array([0]))[1].wait[0]))
        fleet.on_report(told, 2.0 + second)
    assert waits == pytest.approx([1.0, 0.99, 0.99**2, 0.99**3])


def test_only_a_worker_with_work_is_missed():
    fleet = fleet_of("prefill-0", "prefill-1")
    fleet.add_work(P0, 1, A, 1)
    assert list(fleet.silent_slots(2.0, 2.0, 3.0)) == []
    assert list(fleet.silent_slots(2.1, 2.0, 3.0)) == [0]
    fleet.shift_clocks(1.0)
    assert list(fleet.silent_slots(2.1, 2.0, 3.0)) == []


def test_a_suspect_that_speaks_again_is_only_slow():
    fleet = fleet_of("prefill-0")
    fleet.add_work(P0, 1, A, 1)
    fleet.mark_unresponsive(0, "silent")
    assert fleet.load == [0]
    assert fleet.ready(Role.PREFILL, None) == ()
    fleet.add_work(P0, 1, A, 1)
    assert list(fleet.silent_slots(3.0, 2.0, 3.0)) == []  # once is enough
    assert fleet.on_report(report("prefill-0"), 3.0)
    assert fleet.ready(Role.PREFILL, None) == (0,)
    assert list(fleet.silent_slots(8.9, 2.0, 3.0)) == []
    assert list(fleet.silent_slots(9.1, 2.0, 3.0)) == [0]
    fleet.mark_unresponsive(0, "silent")
    fleet.on_report(report("prefill-0"), 500.0)
    fleet.add_work(P0, 1, A, 1)
    assert list(fleet.silent_slots(500.0 + 16.1, 2.0, 3.0)) == [0]


def test_identities_are_ordered_by_how_many_serve_them():
    fleet = fleet_of("prefill-0", "prefill-1", "prefill-2")
    fleet.on_report(report("prefill-0", identity=OTHER), 0.0)
    assert fleet.identities() == (IDENTITY, OTHER)
    assert fleet.ready(Role.PREFILL, OTHER) == (0,)
    fleet.on_report(report("prefill-1", identity=OTHER), 0.0)
    assert fleet.identities() == (OTHER, IDENTITY)


Op = st.tuples(
    st.sampled_from(["charge", "progress", "discharge", "down", "up", "suspect", "report"]),
    st.integers(0, 1),
    st.sampled_from([A, B]),
    st.integers(0, 50),
)


@given(st.lists(Op, max_size=60))
def test_the_load_is_always_the_sum_of_what_is_out(ops):
    fleet = fleet_of("both-0", "both-1")
    book: dict[tuple[int, RequestId], int] = {}
    for op, slot, who, tokens in ops:
        worker, incarnation = fleet.ids[slot], fleet.incarnations[slot]
        if op == "charge":
            fleet.add_work(worker, incarnation, who, tokens)
            book[slot, who] = tokens
        elif op == "progress":
            fleet.set_work_left(worker, who, tokens)
            if (slot, who) in book:
                book[slot, who] = tokens
        elif op == "discharge":
            fleet.remove_work(worker, incarnation, who)
            book.pop((slot, who), None)
        elif op == "report":
            fleet.on_report(report(worker, incarnation=incarnation), 0.0)
        else:
            if op == "down":
                fleet.on_worker_down(down(worker, incarnation))
            elif op == "up":
                up(fleet, worker, incarnation=incarnation + 1)
            else:
                fleet.mark_unresponsive(slot, "silent")
            book = {key: value for key, value in book.items() if key[0] != slot}
        ready = [s for s in (0, 1) if fleet.states[s] is WorkerState.READY]
        assert list(fleet.ready(Role.BOTH, None)) == list(fleet.ready(Role.BOTH, IDENTITY)) == ready
        assert len(fleet.identities()) == bool(ready)
        for s in (0, 1):
            assert fleet.load[s] == sum(value for key, value in book.items() if key[0] == s)
            assert set(fleet.requests_at(s)) == {key[1] for key in book if key[0] == s}
