"""How hand-overs end before their time, for every page carrier: cancels at every point, silence, losses.

Everything happens at a known point, on a clock that the test turns.
"""

from __future__ import annotations

import msgspec
import pytest
from transfer_rig import (
    AT_ONCE,
    IDENTITY,
    LAYOUT,
    OWN,
    THEIRS,
    TOKENS,
    R,
    Rig,
    arrived,
    first_token,
    offer_all,
    queued,
    start,
)

from penstock.kv.transfer.events import PagesAdvanced, PullFailed, PullGranted, TransferDone, TransferReleased
from penstock.kv.transfer.sender import MAX_WAITING_PULLS
from penstock.types import RequestId
from penstock.wire.transfer_messages import FetchTicket, HandOverFailed, PageReady, PullPages

# --- cancelling, at every point --------------------------------------------------------------------------------------


def reach(rig: Rig, point: str) -> None:
    """Bring a hand-over to a known point."""
    rig.open()
    rig.expect(OWN, tokens=TOKENS)
    if point == "asked":
        return
    rig.until(lambda: bool(rig.granted))
    if point == "granted":
        return
    offer_all(rig)
    if point == "on the wire":
        return
    queued(rig, 3)
    if point == "queued":
        return
    rig.receiver_copies(budget=1)
    if point == "one copied":
        return
    rig.until(lambda: PagesAdvanced(R, 1, TOKENS) in rig.advanced)
    if point == "all copied":
        return
    rig.done(3)
    assert point == "first token on the wire"


POINTS = ["asked", "granted", "on the wire", "queued", "one copied", "all copied", "first token on the wire"]


@pytest.mark.parametrize("point", POINTS)
def test_a_receiver_that_cancels_gets_nothing_written_any_more_and_frees_both(rig: Rig, point: str) -> None:
    reach(rig, point)
    news = (list(rig.advanced), list(rig.firsts))
    rig.took(rig.receiver.cancel_pull(R, 1))
    before = bytes(rig.receiver_memory.buffer)
    assert not rig.receiver.has_work
    assert not rig.receiver.open_pulls
    rig.until(lambda: bool(rig.released))
    rig.settle()
    assert bytes(rig.receiver_memory.buffer) == before
    assert (rig.advanced, rig.firsts) == news
    assert rig.released == [TransferReleased(R, 1, "received")]
    assert rig.all_free()


@pytest.mark.parametrize("point", POINTS)
def test_a_sender_that_cancels_frees_both(rig: Rig, point: str) -> None:
    reach(rig, point)
    rig.sent(rig.sender.cancel_transfer(R, 1, rig.clock.now()))
    assert rig.released == [TransferReleased(R, 1, "cancelled")]
    rig.until(lambda: bool(rig.failed or rig.firsts))
    if not rig.firsts:
        assert rig.failed == [PullFailed(R, 1, "cancelled")]
    rig.until(rig.all_free)
    before = bytes(rig.receiver_memory.buffer)
    rig.settle()
    assert bytes(rig.receiver_memory.buffer) == before
    assert len(rig.released) == 1


@pytest.mark.parametrize("point", POINTS)
def test_a_later_epoch_replaces_an_earlier_one(rig: Rig, point: str) -> None:
    reach(rig, point)
    rig.open(epoch=2)
    rig.expect([19, 18, 17], tokens=TOKENS, epoch=2)
    before = [rig.receiver_page(page) for page in OWN]
    rig.until(lambda: PullGranted(R, 2) in rig.granted)
    assert [rig.receiver_page(page) for page in OWN] == before
    offer_all(rig, epoch=2)
    rig.done(3, epoch=2)
    rig.until(lambda: any(first.epoch == 2 for first in rig.firsts))
    rig.until(rig.all_free)
    assert [rig.receiver_page(page) for page in (19, 18, 17)] == [rig.sender_page(page) for page in THEIRS]
    assert [rig.receiver_page(page) for page in OWN] == before
    assert sorted(released.epoch for released in rig.released) == [1, 2]


def test_cancelling_an_earlier_epoch_changes_nothing(rig: Rig) -> None:
    start(rig, epoch=2)
    rig.took(rig.receiver.cancel_pull(R, 1))
    rig.sent(rig.sender.cancel_transfer(R, 1, rig.clock.now()))
    offer_all(rig, epoch=2)
    rig.done(3, epoch=2)
    rig.until(lambda: bool(rig.released))
    assert rig.firsts == [TransferDone(R, 2, first_token(epoch=2))]


def test_a_pull_that_comes_after_the_cancel_is_refused_at_once(rig: Rig) -> None:
    rig.sent(rig.sender.cancel_transfer(R, 1, rig.clock.now()))
    rig.expect(OWN, tokens=TOKENS)
    rig.until(lambda: bool(rig.failed))
    assert rig.failed == [PullFailed(R, 1, "cancelled")]


# --- silence ---------------------------------------------------------------------------------------------------------


def test_a_silent_sender_is_given_up_and_its_late_frames_are_not_written(rig: Rig) -> None:
    reach(rig, "granted")
    offer_all(rig)
    rig.clock.advance(9.9)
    rig.took(rig.receiver.tick(rig.clock.now()))
    assert not rig.failed
    rig.clock.advance(0.2)
    rig.took(rig.receiver.tick(rig.clock.now()))
    assert rig.failed == [PullFailed(R, 1, "silent")]
    assert rig.receiver.counters.expired == 1
    before = bytes(rig.receiver_memory.buffer)
    rig.until(lambda: rig.receiver.counters.strays >= 3)  # it wakes, and its frames come
    assert bytes(rig.receiver_memory.buffer) == before
    assert rig.all_free()


def test_a_silent_receiver_loses_its_lease_and_what_it_copies_later_does_not_pass(rig: Rig) -> None:
    reach(rig, "queued")
    rig.receiver_ticks = False  # else it might find the sender silent before the sender's word is here
    rig.clock.advance(10.1)
    rig.sent(rig.sender.tick(rig.clock.now()))
    assert rig.released == [TransferReleased(R, 1, "lease ended")]
    assert not rig.sender.open_transfers
    for page in THEIRS:  # given to somebody else
        rig.sender_memory.view(page)[:] = bytes(LAYOUT.page_bytes)  # type: ignore[arg-type]
    rig.receiver_copies()
    if rig.carrier in ("curve", "tcp"):  # what it has is right, or it gets nothing; the end tells it
        rig.until(lambda: bool(rig.failed))
        assert rig.failed == [PullFailed(R, 1, "lease ended")]
    elif rig.carrier == "nixl":  # nobody can keep it from reading: what it reads now is found out
        rig.until(lambda: bool(rig.failed))
        assert rig.failed in ([PullFailed(R, 1, "lease ended")], [PullFailed(R, 1, "corrupt")])
    else:
        assert rig.failed == [PullFailed(R, 1, "corrupt")]
    assert not rig.firsts
    rig.until(rig.all_free)


@pytest.mark.parametrize("rig", AT_ONCE, indirect=True)
def test_a_receiver_that_falls_silent_after_an_acknowledgement_loses_its_lease(rig: Rig) -> None:
    reach(rig, "queued")
    heard = rig.listener.counters.received
    rig.receiver_copies(budget=1)
    rig.until(lambda: rig.listener.counters.received > heard, copying=False)
    assert rig.advanced == [PagesAdvanced(R, 1, 16)]
    rig.clock.advance(9.9)
    rig.sent(rig.sender.tick(rig.clock.now()))
    assert not rig.released
    rig.clock.advance(0.2)
    rig.sent(rig.sender.tick(rig.clock.now()))
    assert rig.released == [TransferReleased(R, 1, "lease ended")]


def test_what_the_scheduler_says_of_an_earlier_epoch_is_ignored(rig: Rig) -> None:
    start(rig, epoch=2)
    rig.offer(0, THEIRS[2], epoch=1)
    rig.done(3, epoch=1)
    rig.sent(rig.sender.fail_transfer(R, 1, "late", rig.clock.now()))
    offer_all(rig, epoch=2)
    rig.done(3, epoch=2)
    rig.until(lambda: bool(rig.released))
    assert arrived(rig)
    assert rig.released == [TransferReleased(R, 2, "received")]


def test_a_pull_for_an_unknown_request_is_kept_for_one_lease(rig: Rig) -> None:
    rig.receiver_ticks = False
    rig.expect(OWN, tokens=TOKENS)
    rig.until(lambda: bool(rig.sender.waiting_pulls))
    rig.clock.advance(9.9)
    rig.sent(rig.sender.tick(rig.clock.now()))
    assert rig.sender.waiting_pulls
    rig.clock.advance(0.2)
    rig.sent(rig.sender.tick(rig.clock.now()))
    assert not rig.sender.waiting_pulls
    rig.until(lambda: bool(rig.failed))
    assert rig.failed == [PullFailed(R, 1, "unknown request")]


def test_a_prompt_that_waits_long_keeps_both_leases(rig: Rig) -> None:
    reach(rig, "granted")
    ends = (rig.listener.counters, rig.links[rig.source].counters)
    for _ in range(8):
        before = [end.received for end in ends]
        rig.clock.advance(5)
        rig.until(lambda: all(end.received > was for end, was in zip(ends, before, strict=True)))  # noqa: B023
    assert not rig.failed
    assert not rig.released
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert rig.firsts


@pytest.mark.parametrize("rig", AT_ONCE, indirect=True)
def test_a_receiver_that_copies_slowly_keeps_its_lease(rig: Rig) -> None:
    reach(rig, "queued")

    def heard() -> list[int]:
        return [end.counters.received for end in (rig.listener, *rig.links.values())]

    for pages in (1, 2, 3):
        before = heard()
        rig.clock.advance(6)
        rig.receiver_listens()
        rig.until(lambda: all(now > then for now, then in zip(heard(), before, strict=True)), copying=False)  # noqa: B023
        rig.receiver_copies(budget=1)
        assert rig.receiver.counters.pages == pages
    assert not rig.released
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert rig.released == [TransferReleased(R, 1, "received")]


# --- losses ----------------------------------------------------------------------------------------------------------


def test_lost_frames_are_sent_again(rig: Rig) -> None:
    start(rig)
    dropped: list = []

    def lose_second(came: list) -> list:
        kept = []
        for source, received in came:
            lost = isinstance(received.message, PageReady) and received.message.index == 1 and not dropped
            (dropped if lost else kept).append((source, received))
        return kept

    rig.order = lose_second
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(dropped) and rig.receiver.counters.pages == 2)
    assert rig.advanced == [PagesAdvanced(R, 1, 16)]
    rig.clock.advance(2.6)
    rig.until(lambda: bool(rig.released))
    assert arrived(rig)
    assert rig.firsts


def test_a_new_connection_goes_on_where_the_old_one_broke(rig: Rig) -> None:
    start(rig)
    rig.offer(0, THEIRS[0])
    rig.until(lambda: bool(rig.advanced))
    rig.links[rig.source].close()
    rig.links[rig.source] = rig.transport.connect(rig.source.endpoint)
    rig.offer(1, THEIRS[1])
    rig.offer(2, THEIRS[2], tokens=8)
    rig.done(3)
    rig.clock.advance(2.6)
    rig.until(lambda: bool(rig.released))
    assert rig.released == [TransferReleased(R, 1, "received")]
    assert arrived(rig)
    assert rig.firsts


@pytest.mark.parametrize("rig", ["tcp"], indirect=True)
def test_over_a_new_connection_it_is_said_again_where_the_pages_are(rig: Rig) -> None:
    lost: list = []

    def lose(came: list) -> list:
        lost.extend(each for each in came if isinstance(each[1].message, FetchTicket))
        return [each for each in came if not isinstance(each[1].message, FetchTicket)]

    rig.order = lose
    start(rig)
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(lost))
    rig.settle()
    assert not rig.advanced, "nobody knows where to fetch them"
    rig.order = list
    rig.links[rig.source].close()
    rig.links[rig.source] = rig.transport.connect(rig.source.endpoint)
    rig.clock.advance(2.6)
    rig.until(lambda: bool(rig.released))
    assert rig.released == [TransferReleased(R, 1, "received")]
    assert arrived(rig)


def test_a_late_pull_takes_back_no_acknowledgement(rig: Rig) -> None:
    start(rig)
    offer_all(rig)
    rig.until(lambda: rig.sender.acknowledged_pages(R, 1) == 3)
    rig.sent(rig.sender.on_pull(b"\x00late", pull_of(rig, skip_blocks=1), rig.clock.now()))
    assert rig.sender.acknowledged_pages(R, 1) == 3


def test_pulls_for_requests_that_nobody_has_submitted_are_bounded(rig: Rig) -> None:
    for number in range(MAX_WAITING_PULLS + 1):
        pull = msgspec.structs.replace(pull_of(rig), request=RequestId(f"r{number}"))
        turn = rig.sender.on_pull(b"peer", pull, rig.clock.now())
        reasons = [send.message.reason for send in turn.sends if isinstance(send.message, HandOverFailed)]
        assert reasons == (["too many pulls wait"] if number == MAX_WAITING_PULLS else [])
    assert len(rig.sender.waiting_pulls) == MAX_WAITING_PULLS


def pull_of(rig: Rig, skip_blocks: int = 0) -> PullPages:
    """As the receiver's of ``start``."""
    return PullPages(
        request=R, epoch=1, skip_blocks=skip_blocks, identity=IDENTITY, layout=LAYOUT.name,
        carrier=rig.sender._carrier.name, incarnation=1,
    )  # fmt: skip


def test_a_receiver_that_vanished_is_given_up_even_while_the_prompt_is_computed(rig: Rig) -> None:
    start(rig)
    for link in rig.links.values():
        link.close()
    rig.links.clear()

    def passed() -> bool:
        rig.clock.advance(2.6)
        return bool(rig.released)

    rig.until(passed)
    assert rig.released == [TransferReleased(R, 1, "lease ended")]


def test_a_dead_sender_is_given_up_as_soon_as_it_is_known(rig: Rig) -> None:
    reach(rig, "one copied")
    rig.took(rig.receiver.on_sender_gone(rig.source.worker, rig.source.incarnation + 1))
    before = bytes(rig.receiver_memory.buffer)
    assert rig.failed == [PullFailed(R, 1, "sender gone")]
    rig.settle()
    assert bytes(rig.receiver_memory.buffer) == before


def test_a_scheduler_that_forgot_a_page_fails_the_leg(rig: Rig) -> None:
    start(rig)
    rig.offer(0, THEIRS[0])
    rig.done(3)
    assert rig.released == [TransferReleased(R, 1, "pages missing")]
    rig.until(lambda: bool(rig.failed))
    assert rig.failed == [PullFailed(R, 1, "pages missing")]


def test_a_forgetful_receiver_ends_the_senders_lease(rig: Rig) -> None:
    """Its PagesReceived was lost: the next sign of the sender brings another."""
    start(rig)
    link = rig.links.pop(rig.source)
    rig.took(rig.receiver.cancel_pull(R, 1))
    rig.links[rig.source] = link
    rig.clock.advance(3)
    rig.until(lambda: bool(rig.released))
    assert rig.released == [TransferReleased(R, 1, "received")]


def test_a_pull_with_any_numbers_ends_by_its_lease(rig: Rig) -> None:
    start(rig)
    good = PullPages(
        request=R, epoch=1, skip_blocks=0, identity=IDENTITY, layout=LAYOUT.name, carrier=rig.carrier, incarnation=1
    )
    for skip in (-(1 << 63), (1 << 63) - 1):
        rig.sent(rig.sender.on_pull(b"\x00evil", msgspec.structs.replace(good, skip_blocks=skip), rig.clock.now()))
    offer_all(rig)
    rig.done(3)
    rig.clock.advance(10.1)
    rig.sent(rig.sender.tick(rig.clock.now()))
    assert not rig.sender.open_transfers
