"""What goes wrong between a worker and those it speaks to: connections, silence, replaced processes, strange words."""

from __future__ import annotations

import pytest

from penstock.engine.service.gateways import REMEMBERED_S
from penstock.types import RequestStage, Role, WorkerState
from penstock.wire.gateway_messages import Cancel, Hello, TokenItem
from penstock.wire.transfer_messages import PageReady, PagesReceived, PrefillDone, PullPages

from .worker_stage import expected, merged, reasons, split


@pytest.mark.parametrize("after", range(1, 14))
def test_a_new_connection_of_a_gateway_gives_everything_back(after: int):
    """Nobody can tell which tokens the old connection swallowed, so the gateway asks again with what it has."""
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=30)
    for _ in range(after):
        stage.turn()
    held = {worker.name: worker.mailbox._requests.get("r") is not None for worker in (prefill, decode)}
    for worker in (prefill, decode):
        worker.reconnect()
    stage.run()
    for name, had in held.items():
        assert len(reasons(stage).get(name, [])) == had
    emitted = tuple(merged(stage, "r"))
    if len(emitted) < 30:
        stage.ask_split(list(range(100)), prefill, decode, max_tokens=30, epoch=2, emitted=emitted)
        stage.run()
    assert merged(stage, "r") == expected(100, tokens=30)
    stage.assert_idle()


def test_a_request_over_a_connection_without_a_hello_is_answered():
    stage, _, decode = split()
    decode.reconnect(greet=False)
    stage.ask([1, 2, 3], to=decode)
    stage.run()
    assert reasons(stage) == {"d": ["no Hello"]}
    decode.link.send(Hello(gateway="g", incarnation=1))
    stage.ask([1, 2, 3], to=decode, epoch=2)
    stage.run()
    assert stage.answer(epoch=2) == expected(3)
    stage.assert_idle()


def test_a_gateway_that_was_silent_learns_what_became_of_its_requests():
    stage, prefill, decode = split()
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=150)
    for _ in range(6):
        stage.turn()
    stage.clock.advance(11.0)
    for _ in range(3):
        stage.turn()
    assert not stage.returned  # it does not listen
    stage.wait(0.3)
    assert set(reasons(stage)) <= {"p", "d"}
    assert reasons(stage)["d"] == ["the gateway was silent"]
    stage.assert_idle()


def test_a_gateway_that_never_comes_back_is_forgotten():
    stage, prefill, decode = split()
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=150)
    for _ in range(6):
        stage.turn()
    for seconds in (11.0, REMEMBERED_S):
        stage.clock.advance(seconds)
        stage.turn()
    assert decode.mailbox._requests._gateways == {}
    assert decode.mailbox._requests._by_peer == {}


def test_what_a_dead_gateway_asked_for_is_dropped_before_its_successor_speaks():
    """The board tells of it; what the dead one had still sent is read afterwards, and changes nothing."""
    stage, prefill, decode = split()
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=150)
    for _ in range(6):
        stage.turn()
    for worker in (prefill, decode):
        worker.link.send(Hello(gateway="g", incarnation=1))
        worker.mailbox._gateway_incarnations = lambda: {"g": 2, "unknown": 7}
    stage.ask([1, 2, 3], to=decode, request="s", max_tokens=150)
    for _ in range(4):
        stage.turn(0.06)
    for worker in (prefill, decode):
        assert len(worker.mailbox._requests) == 0
        assert worker.scheduler.load().pages_used == 0
        worker.link.send(Hello(gateway="g", incarnation=2))
    stage.ask_split([1, 2, 3], prefill, decode, request="t")
    stage.run()
    assert stage.answer("t") == expected(3)
    stage.assert_idle()


def test_words_of_a_gateway_process_that_was_replaced_change_nothing():
    stage, _, decode = split()
    old = decode.link
    decode.reconnect(greet=False)
    decode.link.send(Hello(gateway="g", incarnation=2))
    stage.turn()
    stage.ask([1, 2, 3], to=decode, leg=RequestStage.WHOLE)
    stage.turn()
    old.send(Hello(gateway="g", incarnation=1))
    stage.run()
    assert stage.answer() == expected(3)
    assert not stage.returned


def test_a_greeting_that_waited_on_an_earlier_connection_changes_nothing():
    """A gateway's old line reconnects to a restarted worker by itself and brings what had queued up on it."""
    stage, _, decode = split()
    old = decode.link
    decode.reconnect(greet=False)
    decode.link.send(Hello(gateway="g", incarnation=1, connection=2))
    stage.turn()
    stage.ask([1, 2, 3], to=decode, leg=RequestStage.WHOLE)
    stage.turn()
    old.send(Hello(gateway="g", incarnation=1, connection=1))
    stage.run()
    assert stage.answer() == expected(3)
    assert not stage.returned


@pytest.mark.parametrize("after", range(1, 9))
@pytest.mark.parametrize("leg", list(RequestStage))
def test_a_later_epoch_ends_the_earlier_one_whatever_legs_they_are(after: int, leg: RequestStage):
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=4)
    for _ in range(after):
        stage.turn()
    seen = len(stage.tokens)
    both = stage.worker("b", Role.BOTH)
    source = both if leg is RequestStage.DECODE else None
    for worker in (prefill, decode):  # without a Cancel before it
        stage.ask(list(range(100)), to=worker, leg=leg, epoch=2, max_tokens=4, pages_from=source)
    for _ in range(20):
        stage.turn()
    for worker in (prefill, decode):
        assert (("r", 1) in worker.sender.open_transfers) is False
        assert (("r", 1) in worker.receiver.open_pulls) is False
    assert all(item.epoch == 2 or item.index == 0 for _, item in stage.tokens[seen:])
    for worker in (prefill, decode):
        worker.link.send(Cancel(request="r", epoch=2))
    stage.wait(1.5)
    stage.assert_idle()


def test_tokens_that_cannot_leave_give_the_request_back_and_free_both_legs():
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode, max_tokens=30)
    while not prefill.scheduler.load().running:
        stage.turn()
    prefill.link.close()  # the connection breaks: what the worker says now is lost
    for _ in range(30):
        stage.turn()
    assert not prefill.sender.open_transfers
    assert prefill.scheduler.load().pages_used == 0
    prefill.reconnect()
    stage.run()
    assert reasons(stage) == {"p": ["unsent"], "d": ["pages_lost: unsent"]}
    stage.assert_idle()


def test_no_page_is_reported_lost_because_its_owner_left_in_the_same_turn():
    """A Cancel and a Hello in one turn: the report must not count pages that are about to be given back."""
    stage, prefill, decode = split()
    stage.ask_split(list(range(100)), prefill, decode)
    while prefill.scheduler.load().handing_over == 0:
        stage.turn()
        assert stage.clock.now() < 200
    for worker in (prefill, decode):
        worker.link.send(Cancel(request="r", epoch=1))
        worker.link.send(Hello(gateway="g", incarnation=1))
    stage.clock.advance(0.2)  # reports are due
    stage.reports.clear()
    stage.turn()
    assert {report.kv_pages_leaked for report in stage.reports.values()} == {0}
    stage.run()
    stage.assert_idle()


def test_a_source_is_connected_to_while_the_request_still_waits_for_room():
    stage, prefill, decode = split(pages=16)
    stage.ask([1] * 200, to=decode, request="big", max_tokens=50)
    stage.turn()
    stage.ask([2] * 100, to=decode, leg=RequestStage.DECODE, request="later", pages_from=prefill)
    stage.turn()
    assert not decode.receiver.open_pulls
    assert [link.endpoint for link in decode.mailbox._transfer.links()] == [prefill.endpoint]


def test_only_the_latest_incarnation_of_a_source_is_asked():
    stage, prefill, decode = split()
    stage.ask_split(list(range(100)), prefill, decode, request="old")
    stage.workers.remove(prefill)
    while not decode.receiver.open_pulls:
        stage.turn()
    again = stage.worker("p", Role.PREFILL, incarnation=2)
    stage.ask_split(list(range(100)), again, decode, request="new")
    stage.run()
    assert reasons(stage) == {"d": ["pages_lost: sender gone"]}
    assert [link.endpoint for link in decode.mailbox._transfer.links()] == [again.endpoint]
    assert stage.answer("new") == expected(100)
    stage.ask([5] * 20, to=decode, leg=RequestStage.DECODE, request="late", pages_from=prefill)
    stage.run()
    assert reasons(stage)["d"][1:] == ["pages_lost: no way to the source"]
    assert [link.endpoint for link in decode.mailbox._transfer.links()] == [again.endpoint]
    stage.assert_idle()


def test_a_link_to_a_source_that_never_returns_is_closed_and_made_again_when_it_is_named_again():
    stage, prefill, decode = split(pages=16)
    stage.ask_split(list(range(100)), prefill, decode)
    stage.run()
    stage.wait(50.0)
    assert [link.endpoint for link in decode.mailbox._transfer.links()] == [prefill.endpoint]
    stage.wait(15.0)
    assert decode.mailbox._transfer.links() == []
    assert stage.reports["d"].counters["peer_links_closed"] == 1
    stage.ask_split(list(range(90)), prefill, decode, request="later")
    stage.run()
    assert stage.answer("later") == expected(90)
    assert reasons(stage) == {}
    stage.assert_idle()


def test_a_request_that_waits_for_room_longer_than_its_link_lives_finds_its_source():
    stage, prefill, decode = split(pages=16)
    stage.ask([1] * 200, to=decode, request="big", max_tokens=50)
    stage.turn()
    stage.ask_split([2] * 100, prefill, decode, request="later")
    stage.turn()
    decode.mailbox._transfer.tick(stage.clock.now() + 61.0)
    assert decode.mailbox._transfer.links() == []
    stage.run()
    assert stage.answer("later") == expected(100)
    assert reasons(stage) == {}
    stage.assert_idle()


def test_a_source_at_no_endpoint_is_answered_not_raised():
    stage, prefill, decode = split()
    prefill.endpoint = "carrier-pigeon://p"
    stage.ask([1] * 20, to=decode, leg=RequestStage.DECODE, pages_from=prefill)
    stage.run()
    assert reasons(stage) == {"d": ["pages_lost: no way to the source"]}
    prefill.endpoint = "memory://p"
    stage.assert_idle()


def test_a_hand_over_that_ends_without_its_one_token_is_refused_not_raised():
    stage, prefill, decode = split()
    stage.ask([1] * 20, to=decode, leg=RequestStage.DECODE, pages_from=prefill)
    prefill.stopped = True
    while not decode.receiver.open_pulls:
        stage.turn()
    (peer,) = (pull.peer for pull in iter(prefill.mailbox._listener.recv, None) if isinstance(pull.message, PullPages))
    first = TokenItem(request="r", epoch=1, index=0, tokens=())
    prefill.mailbox._listener.send(peer, PrefillDone(request="r", epoch=1, blocks=2, first=first))
    stage.run()
    assert reasons(stage) == {"d": ["pages_lost: protocol: 0 first tokens"]}
    stage.assert_idle()


def test_a_worker_that_stops_gives_everything_back_and_says_so():
    stage, prefill, decode = split(max_chunk_tokens=16)
    stage.ask_split(list(range(100)), prefill, decode, request="a", max_tokens=30)
    stage.ask_split(list(range(50)), prefill, decode, request="b", max_tokens=30)
    for _ in range(4):
        stage.turn()
    decode.mailbox.return_all()
    decode.stopped = True
    stage.run()
    assert {(r.request, r.reason) for name, r in stage.returned if name == "d"} == {
        ("a", "draining"),
        ("b", "draining"),
    }
    assert stage.reports["d"].state is WorkerState.DRAINING
    stage.wait(2.0)  # the prefill worker's leases end
    stage.assert_idle()


def test_a_prefill_leg_that_waits_for_credit_ends_with_its_epoch():
    stage, prefill, _ = split()
    stage.ask(list(range(40)), to=prefill, leg=RequestStage.PREFILL)
    stage.run()
    assert prefill.sender.open_transfers == {("r", 1)}
    stage.ask(list(range(40)), to=prefill, leg=RequestStage.WHOLE, epoch=2)
    stage.run()
    assert stage.answer(epoch=2) == expected(40)
    stage.assert_idle()


def test_strange_frames_are_counted_and_change_nothing():
    stage, prefill, decode = split()
    page = PageReady(request="r", epoch=1, index=0, tokens=16, page=0, generation=1, checksum=bytes(16))
    for worker in (prefill, decode):
        worker.link.send_raw(b"")
        worker.link.send_raw(b"\xff not ours")
        worker.link.send(page)  # well-formed, but nothing that a mailbox is told
        worker.link.send(PagesReceived(request="r", epoch=1))
        worker.link.send(Cancel(request="nobody", epoch=1))
    stage.ask_split(list(range(40)), prefill, decode)
    stage.run()
    assert stage.answer() == expected(40)
    stage.assert_idle()
    assert {report.counters["dropped_frames"] for report in stage.reports.values()} == {2}
