"""One suite for every page carrier, over the transport it is meant for.

What a test calls cancelling, dying or expiring is done at a known point, on a clock that the test turns.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import msgspec
import pytest
from transfer_rig import (
    AT_ONCE,
    CARRIERS,
    IDENTITY,
    LAYOUT,
    OWN,
    THEIRS,
    TOKENS,
    R,
    Rig,
    arrived,
    first_token,
    make_rig,
    offer_all,
    queued,
    start,
)

from penstock.config.limits import KvTransferConfig
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.page_memory import KvLayout
from penstock.kv.transfer import sender
from penstock.kv.transfer.events import (
    PageOffer,
    PagesAdvanced,
    PullFailed,
    PullGranted,
    SenderOutput,
    TransferDone,
    TransferReleased,
)
from penstock.types import FinishReason, PageId, RequestId
from penstock.wire.transfer_messages import PageReady, PagesReady, PrefillDone, PullPages, ReadyPage
from penstock.wire.transport import Received

_READY = PageReady | PagesReady

# --- the plain course ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pull_first", [True, False])
def test_pages_arrive_identical_and_everything_is_released(rig: Rig, pull_first: bool) -> None:
    if pull_first:
        rig.expect(OWN, tokens=TOKENS)
        rig.until(lambda: rig.sender.waiting_pulls == {(R, 1)})
        rig.open()
    else:
        rig.open()
        rig.expect(OWN, tokens=TOKENS)
        rig.until(lambda: bool(rig.granted))
    assert rig.granted == [PullGranted(R, 1)]
    assert not rig.sender.waiting_pulls
    offer_all(rig)
    rig.until(lambda: PagesAdvanced(R, 1, TOKENS) in rig.advanced)
    assert not rig.firsts
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert arrived(rig)
    assert rig.firsts == [TransferDone(R, 1, first_token())]
    assert rig.released == [TransferReleased(R, 1, "received")]
    assert not rig.failed
    assert rig.all_free()
    assert (rig.receiver.counters.pages, rig.receiver.counters.bytes) == (3, 3 * LAYOUT.page_bytes)


def test_pages_that_are_offered_in_one_go_are_announced_together_where_they_are_fetched(rig: Rig) -> None:
    said: list[object] = []

    def note(came: list) -> list:
        said.extend(received.message for _, received in came)
        return came

    rig.order = note
    start(rig)
    for block, page in enumerate(THEIRS):
        rig.offer(block, page, tokens=min(16, TOKENS - 16 * block), more=True)
    rig.settle()
    assert rig.receiver.counters.pages == 0
    rig.offer(0, THEIRS[0])  # it is here already, and no more follow
    rig.until(lambda: rig.receiver.counters.pages == 3)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert arrived(rig)
    announced = [len(each.pages) if isinstance(each, PagesReady) else 1 for each in said if isinstance(each, _READY)]
    assert announced == ([1, 1, 1] if rig.carrier == "curve" else [3])


def test_what_is_offered_in_one_go_is_announced_by_and_by(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as much each time, so that the first pages travel while others are hashed."""
    monkeypatch.setattr(sender, "ANNOUNCED_BYTES", 4 * LAYOUT.page_bytes)
    names = [RequestId("r"), RequestId("s")]
    for request in names:
        rig.open(request=request)
        rig.expect(list(range(16)) if request == "r" else list(range(16, 32)), tokens=256, request=request)
    rig.until(lambda: len(rig.granted) == 2)
    for request in names:
        rig.sender._transfers[request].enough = LAYOUT.page_bytes
        said = []
        for block in range(16):
            offer = PageOffer(request=request, epoch=1, index=block, page=PageId(block), tokens=16, generation=1)
            turn = rig.sender.offer_page(offer, rig.clock.now(), more=block < 15)
            said.append(len(turn.sends) and sum(len(getattr(send.message, "pages", "1")) for send in turn.sends))
            rig.sent(turn)
        assert said == [1, 0, 2, 0, 0, 0, 4, 0, 0, 0, 4, 0, 0, 0, 4, 1]
        rig.done(16, request=request)
    rig.until(lambda: len(rig.released) == 2)
    assert all(rig.receiver_page(page) == rig.sender_page(page % 16) for page in range(32))


def test_nothing_but_the_expected_pages_is_written(rig: Rig) -> None:
    before = bytes(rig.receiver_memory.buffer)
    start(rig)
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    after = bytes(rig.receiver_memory.buffer)
    size = LAYOUT.page_bytes
    for page in range(rig.receiver_memory.pages):
        same = before[page * size : (page + 1) * size] == after[page * size : (page + 1) * size]
        assert same == (page not in OWN)


def test_pages_arrive_while_later_ones_are_computed(rig: Rig) -> None:
    start(rig)
    for block, computed in enumerate([16, 32, 40]):
        rig.offer(block, THEIRS[block], tokens=min(16, TOKENS - 16 * block))
        rig.until(lambda: rig.advanced[-1:] == [PagesAdvanced(R, 1, computed)])  # noqa: B023
    rig.done(3)
    rig.until(lambda: bool(rig.released))


def test_blocks_that_are_there_already_are_not_sent(rig: Rig) -> None:
    kept = rig.receiver_page(OWN[0])
    start(rig, skip=1)
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert rig.receiver_page(OWN[0]) == kept
    assert arrived(rig, range(1, 3))
    assert rig.receiver.counters.pages == 2
    assert rig.firsts


def test_when_all_blocks_are_there_only_the_first_token_comes(rig: Rig) -> None:
    start(rig, skip=3)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert rig.firsts
    assert rig.receiver.counters.pages == 0


def test_a_first_token_that_ends_the_answer_needs_no_pages(rig: Rig) -> None:
    start(rig)
    last = msgspec.structs.replace(first_token(), finish=FinishReason.STOP)
    rig.sent(rig.sender.finish_prefill(last, 3, rig.clock.now()))
    rig.until(lambda: bool(rig.released))
    assert rig.firsts == [TransferDone(R, 1, last)]
    assert rig.all_free()


def test_frames_in_any_order(rig: Rig) -> None:
    start(rig)
    held: list = []

    def hold(came: list) -> list:
        held.extend(came)
        return []

    rig.order = hold
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: len([m for _, m in held if isinstance(m.message, PageReady | PrefillDone)]) == 4)
    rig.order = list
    for source, received in reversed(held):
        assert not rig.advanced  # block 0 comes last
        rig.took(rig.receiver.on_message(source, received.message, received.payload, rig.clock.now()))
        rig.receiver_copies()
    rig.until(lambda: bool(rig.released))
    assert arrived(rig)
    computed = [advance.computed for advance in rig.advanced]  # several where pages are fetched: they land one by one
    assert computed[-1] == TOKENS
    assert computed == sorted(set(computed))


def test_frames_sent_twice_arrive_once(rig: Rig) -> None:
    start(rig)
    rig.order = lambda came: [*came, *came]
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    rig.settle()
    assert arrived(rig)
    assert rig.receiver.counters.pages == 3
    assert rig.firsts == [TransferDone(R, 1, first_token())]
    assert [a.computed for a in rig.advanced] == sorted({a.computed for a in rig.advanced})
    assert rig.all_free()


@pytest.mark.parametrize("rig", AT_ONCE, indirect=True)
def test_copying_keeps_to_its_budget(rig: Rig) -> None:
    start(rig)
    offer_all(rig)
    queued(rig, 3)
    for pages in (1, 2, 3):
        rig.receiver_copies(budget=1)
        assert rig.receiver.counters.pages == pages
    assert not rig.receiver.has_work


def test_many_requests_share_a_window(rig: Rig) -> None:
    narrow = make_rig(rig.carrier, config=KvTransferConfig(window_bytes=2 * LAYOUT.page_bytes))
    made, closing = narrow
    names = [RequestId(f"r{number}") for number in range(4)]
    for number, name in enumerate(names):
        made.open(request=name)
        made.expect(list(range(8 * number, 8 * number + 8)), tokens=8 * 16, request=name)
    made.until(lambda: len(made.granted) == 4)
    for block in range(8):
        for number, name in enumerate(names):
            made.offer(block, 8 * number + block, request=name)
    for name in names:
        made.done(8, request=name)
    made.until(lambda: len(made.released) == 4)
    assert all(made.receiver_page(page) == made.sender_page(page) for page in range(32))
    assert len(made.firsts) == 4
    for thing in closing:
        thing.close()


def test_no_more_than_the_window_is_under_way_to_one_receiver(rig: Rig) -> None:
    """However many requests it has: what it did not acknowledge is what the window holds."""
    made, closing = make_rig(rig.carrier, config=KvTransferConfig(window_bytes=2 * max(LAYOUT.page_bytes, 4096)))
    names = [RequestId(f"r{number}") for number in range(4)]
    announced: list[tuple[RequestId, int]] = []

    def note(turn: SenderOutput) -> None:
        for send in turn.sends:
            message = send.message
            pages = message.pages if isinstance(message, PagesReady) else [message]
            announced.extend((message.request, page.index) for page in pages if isinstance(message, _READY))

    def pull(number: int, skip: int) -> SenderOutput:
        asked = PullPages(
            request=names[number], epoch=1, skip_blocks=skip, identity=IDENTITY, layout=LAYOUT.name,
            carrier=made.sender._carrier.name, incarnation=1, tokens=0,
        )  # fmt: skip
        return made.sender.on_pull(b"peer", asked, made.clock.now())

    for number, name in enumerate(names):
        made.open(request=name)
        note(pull(number, 0))
    for block in range(4):
        for number, name in enumerate(names):
            page = PageId(4 * number + block)
            offer = PageOffer(request=name, epoch=1, index=block, page=page, tokens=16, generation=1)
            note(made.sender.offer_page(offer, made.clock.now()))
    assert announced == [(names[0], 0), (names[1], 0)]
    note(pull(0, 1))
    assert len(announced) == 3, "what is acknowledged makes room for as much"
    note(pull(1, 1))
    assert len(announced) == 4
    for thing in closing:
        thing.close()


# --- corruption ------------------------------------------------------------------------------------------------------


def flip(rig: Rig, page: int, bit: int) -> None:
    view = rig.sender_memory.view(page)  # type: ignore[arg-type]
    view[bit // 8] ^= 1 << bit % 8


def spoilt(received: Received, bit: int) -> Received:
    assert received.payload is not None
    body = bytearray(received.payload)
    body[bit // 8] ^= 1 << bit % 8
    return replace(received, payload=memoryview(body))


def test_every_flipped_bit_of_a_page_is_found(rig: Rig) -> None:
    """At rest where the receiver reads the sender's memory, on the wire where bytes travel."""
    dice = random.Random(3)
    bits = [0, 8 * LAYOUT.page_bytes - 1, *(dice.randrange(8 * LAYOUT.page_bytes) for _ in range(30))]
    for epoch, bit in enumerate(bits, start=1):
        start(rig, epoch=epoch)
        rig.offer(0, THEIRS[0], epoch=epoch)
        if rig.carrier == "curve":

            def damage(came: list, bit: int = bit) -> list:
                return [(s, spoilt(m, bit) if m.payload is not None else m) for s, m in came]

            rig.order = damage
        else:
            flip(rig, THEIRS[0], bit)
        rig.until(lambda: len(rig.failed) == epoch)  # noqa: B023
        rig.order = list
        assert rig.failed[-1] == PullFailed(R, epoch, "corrupt")
        rig.until(lambda: len(rig.released) == epoch)  # noqa: B023
    assert rig.receiver.counters.corrupt == len(bits)
    assert not rig.advanced
    assert rig.all_free()


@pytest.mark.parametrize(
    ("rig", "change"),
    [*itertools.product(CARRIERS, ["generation", "checksum"]), ("shm", "page"), ("memory", "page")],
    indirect=["rig"],
)
def test_an_announcement_that_was_changed_is_found(rig: Rig, change: str) -> None:
    def damage(came: list) -> list:
        out = []
        for source, received in came:
            message = received.message
            if isinstance(message, PageReady):
                value = {
                    "generation": message.generation + 1,
                    "checksum": bytes([message.checksum[0] ^ 1]) + message.checksum[1:],
                    "page": 1 << 40,
                }[change]
                message = msgspec.structs.replace(message, **{change: value})
            out.append((source, replace(received, message=message)))
        return out

    start(rig)
    rig.order = damage
    rig.offer(0, THEIRS[0])
    rig.until(lambda: bool(rig.failed))
    assert rig.failed == [PullFailed(R, 1, "corrupt")]


@pytest.mark.parametrize("rig", ["memory", "shm"], indirect=True)
def test_a_page_that_was_given_out_again_meanwhile_is_found(rig: Rig) -> None:
    start(rig)
    offer_all(rig)
    queued(rig, 3)
    rig.sender_memory.view(THEIRS[1])[:] = bytes(LAYOUT.page_bytes)  # type: ignore[arg-type]
    rig.receiver_copies()
    assert rig.failed == [PullFailed(R, 1, "corrupt")]
    assert all(advance.computed <= 16 for advance in rig.advanced)


@pytest.mark.parametrize("rig", ["curve"], indirect=True)
def test_a_wrong_size_is_found(rig: Rig) -> None:
    for body in (None, memoryview(b""), memoryview(bytes(LAYOUT.page_bytes + 1))):
        epoch = len(rig.failed) + 1
        rig.order = lambda came, body=body: [(s, replace(m, payload=body)) for s, m in came]
        start(rig, epoch=epoch)
        rig.offer(0, THEIRS[0], epoch=epoch)
        rig.until(lambda: len(rig.failed) == epoch)  # noqa: B023
        assert rig.failed[-1].reason == "corrupt"


@pytest.mark.parametrize(("block", "tokens"), [(3, 16), (-1, 16), (0, 15), (2, 16), (1 << 40, 1)])
def test_a_page_that_cannot_be_of_this_request_ends_it_unwritten(rig: Rig, block: int, tokens: int) -> None:
    def change(came: list) -> list:
        return [
            (s, replace(m, message=msgspec.structs.replace(m.message, index=block, tokens=tokens)))
            if isinstance(m.message, PageReady)
            else (s, m)
            for s, m in came
        ]

    start(rig)
    before = bytes(rig.receiver_memory.buffer)
    rig.order = change
    rig.offer(0, THEIRS[0])
    rig.until(lambda: bool(rig.failed))
    assert rig.failed[0].reason.startswith("protocol")
    assert bytes(rig.receiver_memory.buffer) == before
    rig.until(rig.all_free)


@pytest.mark.parametrize("wrong", [(3, 16), (1, 15)])
def test_one_page_among_many_that_cannot_be_of_this_request_ends_it(rig: Rig, wrong: tuple[int, int]) -> None:
    start(rig)
    before = bytes(rig.receiver_memory.buffer)
    rows = [(0, 16), wrong, (2, 8)]
    pages = tuple(ReadyPage(block, tokens, PageId(30), 1, bytes(16)) for block, tokens in rows)
    message = PagesReady(request=R, epoch=1, pages=pages)
    rig.took(rig.receiver.on_message(rig.source, message, None, rig.clock.now()))
    assert [failed.reason[:8] for failed in rig.failed] == ["protocol"]
    rig.receiver_copies()
    assert bytes(rig.receiver_memory.buffer) == before
    assert rig.receiver.counters.strays == 0
    rig.until(rig.all_free)


def test_a_wrong_number_of_blocks_ends_it(rig: Rig) -> None:
    start(rig, skip=2)
    rig.done(2)
    rig.until(lambda: bool(rig.failed))
    assert rig.failed[0].reason.startswith("protocol")


# --- refusals --------------------------------------------------------------------------------------------------------


def other_seal(what: str) -> PageChecksum:
    match what:
        case "model":
            return PageChecksum(msgspec.structs.replace(IDENTITY, fingerprint="e" * 64), LAYOUT)
        case "numerics class":
            return PageChecksum(msgspec.structs.replace(IDENTITY, numerics="test-2-fp32"), LAYOUT)
        case _:
            return PageChecksum(IDENTITY, KvLayout.for_shape(KvShape.plain(layers=2, kv_heads=2, head_dim=16), "bf16"))


@pytest.mark.parametrize("what", ["model", "numerics class", "page layout", "carrier", "incarnation"])
@pytest.mark.parametrize("pull_first", [True, False])
def test_what_does_not_fit_is_refused_with_the_reason(rig: Rig, what: str, pull_first: bool) -> None:
    carrier = rig.receiver._carrier
    if what == "carrier":
        carrier.name = "pigeon"
    elif what == "incarnation":
        link = rig.links.pop(rig.source)
        rig.source = msgspec.structs.replace(rig.source, incarnation=2)
        rig.links[rig.source] = link
    else:
        carrier.seal = other_seal(what)
    if not pull_first:
        rig.open()
    rig.expect(OWN, tokens=TOKENS)
    rig.until(lambda: bool(rig.failed))
    assert rig.failed[0].reason.startswith(f"refused: {what}")
    assert not rig.granted
    assert rig.all_free()
    assert rig.released == ([] if pull_first else [TransferReleased(R, 1, rig.failed[0].reason)])
