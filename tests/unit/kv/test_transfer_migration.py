"""Answers that move while they are written, at both ends, under any interleaving: losses, doubling, deaths, time.

The sender's worker writes tokens into pages meanwhile, as ``engine.service.migration`` lets it; the wire is a bag of
messages.  Whatever happened: a receiver that says that it has the answer has every token's place right, a sender that
is told so may forget everything, and whoever is told nothing of the kind goes on writing.
"""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from migrating_request import LAYOUT, PAGES, SHAPE, SIZE, SLOT, Coming, Going, Writer, place

from penstock.config.limits import KvTransferConfig
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.shm import InMemoryConnector
from penstock.kv.page_memory import KvMemory
from penstock.kv.transfer.events import (
    TAKEN,
    PageOffer,
    PagePull,
    PagesAdvanced,
    PullFailed,
    PullGranted,
    ReceiverOutput,
    SenderOutput,
    SendToReceiver,
    TransferDone,
    TransferReleased,
)
from penstock.kv.transfer.receiver import KvReceiver
from penstock.kv.transfer.sender import KvSender
from penstock.kv_spec import TransferOrder, blocks_for
from penstock.types import ModelIdentity, PageId, RequestId, WorkerId
from penstock.wire.gateway_messages import PageSource, TokenItem
from penstock.wire.transfer_messages import HandOverFailed, PagesReceived, PullPages

SEAL = PageChecksum(ModelIdentity(fingerprint="f", numerics="n"), LAYOUT)
R = RequestId("r")
LEASE = 8.0
CONFIG = KvTransferConfig(lease_s=LEASE, window_bytes=3 * 4096)


class Moves(RuleBasedStateMachine):
    """One answer and its two workers, the wire, the gateway's part, and the clock."""

    @initialize(length=st.integers(1, 120))
    def build(self, length: int) -> None:
        self.now = 0.0
        self.writer = Writer(KvMemory.anonymous(LAYOUT, PAGES), [7])
        self.writer.write(length)
        self.own = KvMemory.anonymous(LAYOUT, PAGES)
        self.incarnation = 0
        self.peer = 0
        self.to_sender: deque[tuple[bytes, PullPages | PagesReceived]] = deque()
        self.to_receiver: deque[tuple[PageSource, SendToReceiver]] = deque()  # with who sent it
        self.going: Going | None = None
        self.coming: Coming | None = None
        self.here = False  # the receiver has taken it
        self.gone = False  # the sender has forgotten it
        self.fork_sender()
        self.fork_receiver()

    def fork_sender(self) -> None:
        self.incarnation += 1
        take = InMemoryConnector(self.writer.memory, {}, SEAL)
        self.sender = KvSender(CONFIG, take, incarnation=self.incarnation)
        self.source = PageSource(worker=WorkerId("d"), incarnation=self.incarnation, endpoint="memory://d")
        self.going, self.writer.stopped = None, False
        self.to_sender.clear()

    def fork_receiver(self) -> None:
        self.receiver = KvReceiver(CONFIG, InMemoryConnector(self.own, {self.source.worker: self.writer.memory}, SEAL))
        self.free = list(range(PAGES))
        self.coming = None
        self.peer += 1
        self.to_receiver.clear()

    # --- carrying out turns ---

    def sent(self, turn: SenderOutput) -> None:
        self.to_receiver.extend((self.source, send) for send in turn.sends)
        for effect in turn.events:
            assert self.going is not None
            match effect:
                case PullGranted(pull=pull):
                    assert pull is not None
                    self.granted(pull)
                case TransferReleased(reason=reason):
                    told, self.going = self.going.told, None
                    self.writer.stopped = False
                    if reason == TAKEN:
                        assert told
                        assert self.here
                        self.gone = True

    def granted(self, pull: PullPages) -> None:
        assert self.going is not None
        if not self.going.index <= pull.tokens + 1 <= len(self.writer.tokens):  # of somebody who came earlier
            self.sent(self.sender.fail_transfer(R, 1, "protocol", self.now))
            return
        self.going.pieces = TransferOrder(SHAPE.reaches, pull.tokens, SIZE, ahead=pull.ahead)
        self.going.most = pull.tokens + pull.ahead
        self.going.offered = pull.skip_blocks

    def took(self, turn: ReceiverOutput) -> None:
        self.to_sender.extend((b"peer%d" % self.peer, send.message) for send in turn.sends)
        for effect in turn.events:
            coming = self.coming
            assert coming is not None
            match effect:
                case PagesAdvanced(computed=computed):
                    assert computed <= coming.known - 1
                case TransferDone(first=first):
                    self.check(coming, first)
                    self.here = True
                    self.coming_over()
                case PullFailed():
                    self.coming_over()

    def coming_over(self) -> None:
        assert self.coming is not None
        self.free += self.coming.pages
        self.coming = None

    def check(self, coming: Coming, first: TokenItem) -> None:
        """Every place that a later position reads is right, and so are the tokens."""
        known = first.index + len(first.tokens)
        assert first.index <= coming.known <= known
        assert list(first.tokens) == self.writer.tokens[first.index : known]
        computed = known - 1
        for piece, (block, group) in enumerate(coming.pieces):
            begin = SHAPE.reaches[group].first_read_position(computed)
            page = bytes(self.own.view(PageId(coming.pages[piece])))
            for position in range(max(begin, block * SIZE), min(computed, (block + 1) * SIZE)):
                slot = position % SIZE
                assert page[slot * SLOT : (slot + 1) * SLOT] == place(self.writer.tokens[position], group)

    # --- the gateway's part ---

    @precondition(lambda self: not self.here)
    @rule(behind=st.integers(0, 3), ahead=st.integers(1, 50))
    def somebody_comes(self, behind: int, ahead: int) -> None:
        """The worker asks to be relieved, and a receiver has room."""
        if self.going is None and not self.writer.stopped:
            self.going = Going(len(self.writer.tokens))
            self.sent(self.sender.open_transfer(R, 1, self.now))
        if self.coming is not None or self.going is None or self.going.pieces is not None:
            return
        known = max(self.going.index, len(self.writer.tokens) - behind)
        pieces = LAYOUT.transfer_order(known - 1, ahead=ahead + 1)
        if len(self.free) < pieces.total:
            return
        pages = [self.free.pop() for _ in range(pieces.total)]
        self.coming = Coming(known, ahead, pages, pieces)
        pull = PagePull(
            request=R,
            epoch=1,
            source=self.source,
            pages=[PageId(page) for page in pages],
            skip_blocks=0,
            tokens=known - 1,
            ahead=ahead + 1,
        )
        self.took(self.receiver.start_pull(pull, self.now))

    @rule()
    def the_receiver_gives_up(self) -> None:
        self.took(self.receiver.cancel_pull(R, 1))
        if self.coming is not None:
            self.coming_over()

    @rule()
    def the_receiver_dies(self) -> None:
        """The gateway notices, and tells the worker that still writes."""
        if not self.here:
            self.fork_receiver()
            self.sent(self.sender.on_received(PagesReceived(request=R, epoch=1), self.now))

    @rule()
    def the_sender_dies(self) -> None:
        """The gateway notices, and whoever was to go on forgets it: it is computed anew."""
        if not self.gone:
            self.the_receiver_gives_up()
            self.fork_sender()

    # --- the worker that writes ---

    @rule(count=st.integers(1, 30))
    def write(self, count: int) -> None:
        if self.writer.stopped or self.gone:
            return
        room = 200 - len(self.writer.tokens)
        if self.going is not None and self.going.pieces is not None:
            room = min(room, self.going.most - len(self.writer.tokens))
        self.writer.write(max(0, min(count, room)))

    @rule(pieces=st.integers(1, 9))
    def offer_what_is_full(self, pieces: int) -> None:
        going = self.going
        if going is None or going.pieces is None or self.writer.stopped:
            return
        full = going.pieces.pages_before(self.writer.computed // SIZE)
        for piece in range(going.offered, min(full, going.offered + pieces)):
            self.offer(going, going.pieces, piece)

    def offer(self, going: Going, pieces: TransferOrder, piece: int) -> None:
        block, group = pieces.page_at(piece)
        going.offered = piece + 1
        offer = PageOffer(
            request=R,
            epoch=1,
            index=piece,
            page=PageId(self.writer.tables[group][block]),
            tokens=min(SIZE, self.writer.computed - block * SIZE),
            generation=1,
        )
        self.sent(self.sender.offer_page(offer, self.now))

    @rule(patient=st.booleans())
    def stop_for_the_last_piece(self, patient: bool) -> None:
        going = self.going
        if going is None or going.pieces is None or going.told:
            return
        full = going.pieces.pages_before(max(0, self.writer.computed // SIZE - 1))
        if patient and self.sender.acknowledged_pages(R, 1) < full:
            return
        self.writer.stopped = going.told = True
        blocks = going.pieces.pages_before(blocks_for(self.writer.computed, SIZE))
        for piece in range(going.offered, blocks):
            self.offer(going, going.pieces, piece)
        last = TokenItem(request=R, epoch=1, index=going.index, tokens=tuple(self.writer.tokens[going.index :]))
        self.sent(self.sender.finish_prefill(last, blocks, self.now))

    # --- the wire and time ---

    @rule(count=st.integers(1, 20))
    def deliver(self, count: int) -> None:
        for _ in range(min(count, len(self.to_sender))):
            peer, message = self.to_sender.popleft()
            if isinstance(message, PullPages):
                self.sent(self.sender.on_pull(peer, message, self.now))
            else:
                self.sent(self.sender.on_received(message, self.now))
        for _ in range(min(count, len(self.to_receiver))):
            source, send = self.to_receiver.popleft()
            if send.peer == b"peer%d" % self.peer:
                self.took(self.receiver.on_message(source, send.message, send.payload, self.now))
            elif not isinstance(send.message, HandOverFailed):
                self.sender.on_send_failed(send.peer, self.now)

    @rule(budget=st.integers(1, 9))
    def copy(self, budget: int) -> None:
        self.took(self.receiver.fetch_pages(self.now, budget * LAYOUT.page_bytes))

    @rule(
        what=st.sampled_from(["reorder", "lose", "double", "connect again"]),
        which=st.sampled_from(["to_sender", "to_receiver"]),
    )
    def trouble(self, what: str, which: str) -> None:
        queue = getattr(self, which)
        if what == "connect again":
            self.peer += 1
        elif what == "reorder":
            queue.rotate(2)
        elif queue and what == "lose":
            queue.popleft()
        elif queue:
            queue.append(queue[0])

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.sent(self.sender.tick(self.now))
        self.took(self.receiver.tick(self.now))

    @rule()
    def all_is_well_for_a_moment(self) -> None:
        for _ in range(4):
            self.deliver(100)
            self.write(3)
            self.offer_what_is_full(9)
            self.stop_for_the_last_piece(patient=True)
            self.copy(9)

    # --- what must hold ---

    @invariant()
    def both_agree_with_the_test_about_who_is_open(self) -> None:
        assert (self.going is not None) == bool(self.sender.open_transfers)
        assert (self.coming is not None) == bool(self.receiver.open_pulls)

    @invariant()
    def somebody_has_the_answer(self) -> None:
        """It is written on, or it has stopped for a receiver that may still take it, or it was taken."""
        assert self.here or not self.gone
        assert not self.writer.stopped or self.going is not None

    def teardown(self) -> None:
        """The wire is cut: nobody waits for longer than a lease."""
        if not hasattr(self, "sender"):
            return
        self.to_sender.clear()
        self.to_receiver.clear()
        for peer in range(self.peer + 1):
            self.sender.on_send_failed(b"peer%d" % peer, self.now)
        for _ in range(2):
            self.now += LEASE
            self.sent(self.sender.tick(self.now))
            self.took(self.receiver.tick(self.now))
        if self.going is not None:  # nobody has come for it; its worker ends it with the answer
            assert self.going.pieces is None
            self.sent(self.sender.cancel_transfer(R, 1, self.now))
        assert not self.writer.stopped
        assert not self.sender.open_transfers
        assert not self.receiver.open_pulls
        assert not self.sender._window
        assert sorted(self.free) == list(range(PAGES))


Moves.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestMoves = Moves.TestCase


@pytest.mark.long
class TestMovesForLong(Moves.TestCase):
    """The same, for longer."""

    settings = settings(
        max_examples=3000, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )


def test_a_move_goes_through_where_nothing_goes_wrong():
    moves = Moves()
    moves.build(length=100)
    moves.somebody_comes(behind=2, ahead=40)
    for _ in range(4):
        moves.all_is_well_for_a_moment()
    assert moves.here
    assert moves.gone
    moves.teardown()
