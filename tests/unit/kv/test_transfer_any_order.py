"""Both ends of hand-overs under any interleaving: losses, doubling, reordering, cancels, deaths, time.

The wire is a bag of messages that the test empties as it likes.  Whatever happened: every leg that was opened is
released once, every pull ends, nothing is written outside the pages of a pull that is open at that moment, and a
first token means that all pages are there and right.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from tests.late_pages import LateCarrier

from penstock.config.limits import KvTransferConfig
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import KvConnector
from penstock.kv.connectors.inline import InlineConnector
from penstock.kv.connectors.shm import InMemoryConnector
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.transfer.events import (
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
from penstock.types import ModelIdentity, PageId, RequestId, WorkerId
from penstock.wire.gateway_messages import PageSource, TokenItem
from penstock.wire.transfer_messages import HandOverFailed, PagesReceived, PullPages

LAYOUT = KvLayout.for_shape(KvShape.plain(layers=1, kv_heads=1, head_dim=4), "bf16")
SEAL = PageChecksum(ModelIdentity(fingerprint="f", numerics="n"), LAYOUT)
SOURCE = PageSource(worker=WorkerId("p"), incarnation=1, endpoint="memory://p")
REQUESTS = [RequestId(f"r{number}") for number in range(3)]
PAGES = 24
LEASE = 8.0
CONFIG = KvTransferConfig(lease_s=LEASE, window_bytes=3 * 4096)

requests = st.sampled_from(REQUESTS)


@dataclass
class Expected:
    """What the test knows of one pull."""

    pages: list[int]
    skip: int
    tokens: int


@dataclass
class Opened:
    """What the test knows of one leg: which of the sender's pages it holds, and what the request's content is."""

    granted: bool = False
    offered: int = 0
    held: list[int] | None = None
    done: bool = False


def content(request: RequestId, epoch: int, block: int) -> bytes:
    return f"{request}/{epoch}/{block};".encode().ljust(16, b".") * (LAYOUT.page_bytes // 16)


class HandOvers(RuleBasedStateMachine):
    """The scheduler on both sides, the wire, and the clock."""

    @initialize(carrier=st.sampled_from(["memory", "curve", "late"]))
    def build(self, carrier: str) -> None:
        self.now = 0.0
        self.theirs = KvMemory.anonymous(LAYOUT, PAGES)
        self.own = KvMemory.anonymous(LAYOUT, PAGES)
        send: KvConnector = InMemoryConnector(self.theirs, {}, SEAL)
        take: KvConnector = InMemoryConnector(self.own, {SOURCE.worker: self.theirs}, SEAL)
        self.late = LateCarrier(self.own, {SOURCE.worker: self.theirs}, SEAL)
        if carrier == "curve":
            send, take = InlineConnector(self.theirs, SEAL), InlineConnector(self.own, SEAL)
        elif carrier == "late":
            take = self.late
        self.sender = KvSender(CONFIG, send, incarnation=1)
        self.receiver = KvReceiver(CONFIG, take)
        self.to_sender: deque[tuple[bytes, PullPages | PagesReceived]] = deque()
        self.to_receiver: deque[SendToReceiver] = deque()
        self.peer = 1
        self.epochs = dict.fromkeys(REQUESTS, 0)
        self.expected: dict[tuple[RequestId, int], Expected] = {}
        self.opened: dict[tuple[RequestId, int], Opened] = {}
        self.computed: dict[tuple[RequestId, int], int] = {}
        self.free = list(range(PAGES))
        self.free_theirs = list(range(PAGES))
        self.generation = 0
        self.shadow = bytes(self.own.buffer)

    # --- carrying out turns ---

    def sent(self, turn: SenderOutput) -> None:
        for send in turn.sends:
            payload = None if send.payload is None else memoryview(bytes(send.payload))
            self.to_receiver.append(SendToReceiver(send.peer, send.message, payload))
        for effect in turn.events:
            leg = self.opened[effect.request, effect.epoch]
            match effect:
                case PullGranted():
                    assert not leg.granted
                    leg.granted = True
                case TransferReleased():
                    del self.opened[effect.request, effect.epoch]  # fails when it comes twice
                    for page in leg.held or []:  # somebody else writes there from now on
                        self.theirs.view(PageId(page))[:] = b"\xee" * LAYOUT.page_bytes
                    self.free_theirs += leg.held or []

    def took(self, turn: ReceiverOutput) -> None:
        self.to_sender.extend((b"peer%d" % self.peer, send.message) for send in turn.sends)
        for effect in turn.events:
            key = effect.request, effect.epoch
            expected = self.expected[key]
            match effect:
                case PagesAdvanced():
                    assert self.computed.get(key, -1) < effect.computed <= expected.tokens
                    self.computed[key] = effect.computed
                case TransferDone():
                    for block in range(expected.skip, len(expected.pages)):
                        page = PageId(expected.pages[block])
                        assert bytes(self.own.view(page)) == content(*key, block)
                    self.gone(key)
                case PullFailed():
                    self.gone(key)

    def gone(self, key: tuple[RequestId, int]) -> None:
        self.free += self.expected.pop(key).pages
        self.computed.pop(key, None)

    # --- the receiving scheduler ---

    @rule(
        request=requests,
        tokens=st.integers(1, 100),
        skip=st.sampled_from([0, 0, 0, 1, 2, 7]),
        open_first=st.booleans(),
        rare=st.sampled_from(["", "", "", "decode leg only", "replace"]),
    )
    def start(self, request: RequestId, tokens: int, skip: int, open_first: bool, rare: str) -> None:
        """A new epoch of a request: both legs, in either order, or the decode leg alone for now."""
        open_too = rare != "decode leg only"
        if rare != "replace" and any(name == request for name, _ in (*self.opened, *self.expected)):
            return
        self.epochs[request] += 1
        if open_first and open_too:
            self.open(request)
        self.expect(request, tokens, skip)
        if open_too:
            self.open(request)

    def expect(self, request: RequestId, tokens: int, skip: int) -> None:
        epoch = self.epochs[request]
        blocks = -(-tokens // 16)
        if len(self.free) < blocks:
            return
        pages = [self.free.pop() for _ in range(blocks)]
        key = request, epoch
        earlier = [other for other in self.expected if other[0] == request]
        self.expected[key] = Expected(pages, min(skip, blocks), tokens)
        pull = PagePull(
            request=request,
            epoch=epoch,
            source=SOURCE,
            pages=[PageId(page) for page in pages],
            skip_blocks=min(skip, blocks),
            tokens=tokens,
        )
        self.took(self.receiver.start_pull(pull, self.now))
        for other in earlier:
            self.gone(other)

    def receiver_cancels(self, request: RequestId) -> None:
        self.took(self.receiver.cancel_pull(request, self.epochs[request]))
        for key in [key for key in self.expected if key[0] == request]:
            self.gone(key)

    @rule(budget=st.integers(0, 5))
    def copy(self, budget: int) -> None:
        allowed = {page for expected in self.expected.values() for page in expected.pages[expected.skip :]}
        before = bytes(self.own.buffer)
        self.late.land(budget)
        turn = self.receiver.fetch_pages(self.now, budget * LAYOUT.page_bytes)
        after, size = bytes(self.own.buffer), LAYOUT.page_bytes
        for page in range(PAGES):
            if page not in allowed:
                assert before[page * size : (page + 1) * size] == after[page * size : (page + 1) * size]
        self.shadow = after
        self.took(turn)

    # --- the sending scheduler ---

    @rule(request=requests)
    def open(self, request: RequestId) -> None:
        epoch = self.epochs[request]
        if epoch and not any(name == request and at >= epoch for name, at in self.opened):
            self.opened[request, epoch] = Opened(held=[])
            self.sent(self.sender.open_transfer(request, epoch, self.now))

    @rule(request=requests, count=st.integers(1, 7))
    def compute(self, request: RequestId, count: int) -> None:
        key = request, self.epochs[request]
        leg, expected = self.opened.get(key), self.expected.get(key)
        if leg is None or expected is None or not leg.granted or leg.done:
            return
        blocks = len(expected.pages)
        for _ in range(min(count, blocks - leg.offered, len(self.free_theirs))):
            page = self.free_theirs.pop()  # the one freed last: a stale frame may still name it
            self.generation += 1
            assert leg.held is not None
            leg.held.append(page)
            self.theirs.view(PageId(page))[:] = content(*key, leg.offered)
            offer = PageOffer(
                request=request,
                epoch=key[1],
                index=leg.offered,
                page=PageId(page),
                tokens=min(16, expected.tokens - 16 * leg.offered),
                generation=self.generation,
            )
            leg.offered += 1
            self.sent(self.sender.offer_page(offer, self.now))
        if leg.offered == blocks and key in self.opened:
            leg.done = True
            first = TokenItem(request=request, epoch=key[1], index=0, tokens=(1,))
            self.sent(self.sender.finish_prefill(first, blocks, self.now))

    @rule(request=requests, who=st.sampled_from(["receiver", "sender", "both", "prefill fails"]))
    def cancel(self, request: RequestId, who: str) -> None:
        if who in ("receiver", "both"):
            self.receiver_cancels(request)
        if who in ("sender", "both"):
            self.sent(self.sender.cancel_transfer(request, self.epochs[request], self.now))
        if who == "prefill fails":
            self.sent(self.sender.fail_transfer(request, self.epochs[request], "out of luck", self.now))

    # --- the wire ---

    @rule(count=st.integers(1, 6))
    def deliver_to_sender(self, count: int) -> None:
        for _ in range(min(count, len(self.to_sender))):
            peer, message = self.to_sender.popleft()
            match message:
                case PullPages():
                    self.sent(self.sender.on_pull(peer, message, self.now))
                case PagesReceived():
                    self.sent(self.sender.on_received(message, self.now))

    @rule(count=st.integers(1, 12))
    def deliver_to_receiver(self, count: int) -> None:
        for _ in range(min(count, len(self.to_receiver))):
            send = self.to_receiver.popleft()
            if send.peer == b"peer%d" % self.peer:
                self.took(self.receiver.on_message(SOURCE, send.message, send.payload, self.now))
            elif not isinstance(send.message, HandOverFailed):
                self.sender.on_send_failed(send.peer, self.now)

    @rule(
        what=st.sampled_from(["reorder", "lose", "double", "connect again"]),
        which=st.sampled_from(["to_sender", "to_receiver"]),
        turns=st.integers(1, 5),
    )
    def trouble(self, what: str, which: str, turns: int) -> None:
        queue = getattr(self, which)
        if what == "connect again":
            self.peer += 1
        elif what == "reorder":
            queue.rotate(turns)
        elif queue and what == "lose":
            queue.popleft()
        elif queue:
            queue.append(queue[0])

    @rule(copying=st.booleans())
    def all_is_well_for_a_moment(self, copying: bool) -> None:
        for _ in range(3):
            self.deliver_to_sender(len(self.to_sender))
            for request in REQUESTS:
                self.compute(request, 2)
            self.deliver_to_receiver(len(self.to_receiver))
            if copying:
                self.copy(100)

    # --- time ---

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.5, 5.0]))
    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        self.sent(self.sender.tick(self.now))
        self.took(self.receiver.tick(self.now))

    # --- what must hold ---

    @invariant()
    def both_agree_with_the_test_about_who_is_open(self) -> None:
        assert self.sender.open_transfers == set(self.opened)
        assert self.receiver.open_pulls == set(self.expected)

    @invariant()
    def only_copying_writes(self) -> None:
        assert bytes(self.own.buffer) == self.shadow

    def teardown(self) -> None:
        """The wire is cut: whatever owes a sign is freed within two leases, and the sender's window is empty."""
        if not hasattr(self, "sender"):
            return
        self.to_sender.clear()
        self.to_receiver.clear()
        for key, leg in list(self.opened.items()):
            if not leg.granted:  # holds nothing; only its gateway can end it
                self.sent(self.sender.cancel_transfer(*key, self.now))
        self.sender.on_send_failed(b"peer%d" % self.peer, self.now)
        for peer in range(self.peer):
            self.sender.on_send_failed(b"peer%d" % peer, self.now)
        for _ in range(2):
            self.now += LEASE
            self.sent(self.sender.tick(self.now))
            self.took(self.receiver.tick(self.now))
        assert not self.sender.open_transfers
        assert not self.sender.waiting_pulls
        assert not self.receiver.open_pulls
        assert not self.receiver.has_work
        assert not self.sender._window
        assert sorted(self.free) == sorted(self.free_theirs) == list(range(PAGES))


HandOvers.TestCase.settings = settings(
    max_examples=60, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestHandOvers = HandOvers.TestCase


@pytest.mark.long
class TestHandOversForLong(HandOvers.TestCase):
    """The same, for longer."""

    settings = settings(
        max_examples=1000, stateful_step_count=80, deadline=None, suppress_health_check=[HealthCheck.too_slow]
    )
