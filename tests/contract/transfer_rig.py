"""Both ends of a hand-over, joined by a real transport or its double, with a clock that tests turn."""

from __future__ import annotations

import importlib.util
import itertools
import os
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import msgspec
import pytest

from penstock.clock import VirtualClock
from penstock.config.limits import KvTransferConfig
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import KvConnector
from penstock.kv.connectors.inline import InlineConnector
from penstock.kv.connectors.nixl.connector import NixlConnector
from penstock.kv.connectors.shm import InMemoryConnector, ShmConnector
from penstock.kv.connectors.tcp.connector import TcpConnector
from penstock.kv.page_memory import KvLayout, KvMemory, KvMemoryFile
from penstock.kv.transfer.events import (
    PageOffer,
    PagePull,
    PagesAdvanced,
    PullFailed,
    PullGranted,
    ReceiverOutput,
    SenderOutput,
    TransferDone,
    TransferReleased,
)
from penstock.kv.transfer.receiver import KvReceiver, send_pulls
from penstock.kv.transfer.sender import KvSender, send_messages
from penstock.types import ModelIdentity, PageId, RequestId, WorkerId
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import PageSource, TokenItem
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.transfer_messages import PageReady, PagesReceived, PullPages
from penstock.wire.transport import Transport
from penstock.wire.zeromq import ZmqTransport

AT_ONCE = ("memory", "shm", "curve")
"""Carriers that bring a page at once."""

CARRIERS = (*AT_ONCE, "tcp")
NIXL = {"nixl_transports": "tcp", "nixl_devices": "lo"}
"""What stands in for RDMA here."""

LAYOUT = KvLayout.for_shape(KvShape.plain(layers=2, kv_heads=2, head_dim=8), "fp32")
IDENTITY = ModelIdentity(fingerprint="f" * 64, numerics="test-1-fp32")
PAGES = 64
R = RequestId("cmpl-1/0")

TOKENS = 40
OWN = [9, 8, 7]  # the receiver's pages for blocks 0, 1, 2
THEIRS = [30, 31, 32]  # the sender's

_names = itertools.count()


def first_token(request: RequestId = R, epoch: int = 1, token: int = 42) -> TokenItem:
    return TokenItem(request=request, epoch=epoch, index=0, tokens=(token,))


@dataclass
class Rig:
    """``prefill-0`` on one side, one decode worker on the other."""

    carrier: str
    transport: Transport
    clock: VirtualClock
    sender: KvSender
    receiver: KvReceiver
    sender_memory: KvMemory
    receiver_memory: KvMemory
    source: PageSource = field(init=False)
    endpoint: str = ""
    incarnation: int = 1
    granted: list[PullGranted] = field(default_factory=list)
    released: list[TransferReleased] = field(default_factory=list)
    advanced: list[PagesAdvanced] = field(default_factory=list)
    firsts: list[TransferDone] = field(default_factory=list)
    failed: list[PullFailed] = field(default_factory=list)
    order: Callable[[list], list] = list  # what the wire does to the messages that the receiver gets
    receiver_ticks: bool = True

    def __post_init__(self) -> None:
        self.listener = self.transport.listen(self.endpoint)
        self.source = PageSource(
            worker=WorkerId("prefill-0"), incarnation=self.incarnation, endpoint=self.listener.endpoint
        )
        self.links = {self.source: self.transport.connect(self.listener.endpoint)}
        noise = random.Random(7)
        self.sender_memory.buffer[:] = noise.randbytes(self.sender_memory.buffer.nbytes)
        self.receiver_memory.buffer[:] = noise.randbytes(self.receiver_memory.buffer.nbytes)

    # --- what a scheduler would do ---

    def expect(self, pages: list[int], *, tokens: int, skip: int = 0, epoch: int = 1, request: RequestId = R) -> None:
        pull = PagePull(
            request=request,
            epoch=epoch,
            source=self.source,
            pages=[PageId(page) for page in pages],
            skip_blocks=skip,
            tokens=tokens,
        )
        self.took(self.receiver.start_pull(pull, self.clock.now()))

    def open(self, epoch: int = 1, request: RequestId = R) -> None:
        self.sent(self.sender.open_transfer(request, epoch, self.clock.now()))

    def offer(
        self,
        block: int,
        page: int,
        *,
        tokens: int = 16,
        generation: int = 1,
        epoch: int = 1,
        request: RequestId = R,
        more: bool = False,
    ) -> None:
        offer = PageOffer(
            request=request, epoch=epoch, index=block, page=PageId(page), tokens=tokens, generation=generation
        )
        self.sent(self.sender.offer_page(offer, self.clock.now(), more=more))

    def done(self, blocks: int, epoch: int = 1, request: RequestId = R) -> None:
        self.sent(self.sender.finish_prefill(first_token(request, epoch), blocks, self.clock.now()))

    # --- what a loop would do ---

    def sent(self, turn: SenderOutput) -> None:
        for effect in send_messages(turn, self.listener, self.sender, self.clock.now()):
            (self.granted if isinstance(effect, PullGranted) else self.released).append(effect)

    def say(self, source: PageSource, message: PullPages | PagesReceived) -> None:
        """Over the link to ``source``; said to nobody when there is none."""
        if source in self.links:
            self.links[source].send(message)

    def took(self, turn: ReceiverOutput) -> None:
        for effect in send_pulls(turn, self.say):
            match effect:
                case PagesAdvanced():
                    self.advanced.append(effect)
                case TransferDone():
                    self.firsts.append(effect)
                case PullFailed():
                    self.failed.append(effect)

    def sender_turn(self) -> bool:
        moved = False
        while (received := self.listener.recv()) is not None:
            moved = True
            match received.message:
                case PullPages() as pull:
                    self.sent(self.sender.on_pull(received.peer, pull, self.clock.now()))
                case PagesReceived() as got:
                    self.sent(self.sender.on_received(got, self.clock.now()))
        self.sent(self.sender.tick(self.clock.now()))
        return moved

    def receiver_listens(self) -> bool:
        """Frames queue up; nothing is copied."""
        came = []
        for source, link in self.links.items():
            while (received := link.recv()) is not None:
                came.append((source, received))
        for source, received in self.order(came):
            self.took(self.receiver.on_message(source, received.message, received.payload, self.clock.now()))
        if self.receiver_ticks:
            self.took(self.receiver.tick(self.clock.now()))
        return bool(came)

    def receiver_copies(self, budget: int | None = None) -> bool:
        had = self.receiver.has_work
        self.took(self.receiver.fetch_pages(self.clock.now(), budget))
        return had

    def until(self, true: Callable[[], bool], *, copying: bool = True) -> None:
        """Let both ends run until something is true.  Fails after a real minute."""
        deadline = time.monotonic() + 60
        while not true():
            assert time.monotonic() < deadline, "it did not come true"
            moved = self.sender_turn() | self.receiver_listens()
            if copying:
                moved |= self.receiver_copies()
            if not moved:
                self.wait(0.02)

    def wait(self, seconds: float) -> None:
        self.transport.wait(seconds, [self.listener, *self.links.values()], self.receiver.descriptors)

    def settle(self) -> None:
        """Let both ends run on, so that what must not come has time to come."""
        quiet = 0
        while quiet < (2 if self.carrier == "memory" else 6):
            moved = self.sender_turn() | self.receiver_listens() | self.receiver_copies()
            quiet = 0 if moved else quiet + 1
            if not moved:
                self.wait(0.01)

    # --- what a test asks ---

    def sender_page(self, page: int) -> bytes:
        return bytes(self.sender_memory.view(PageId(page)))

    def receiver_page(self, page: int) -> bytes:
        return bytes(self.receiver_memory.view(PageId(page)))

    def all_free(self) -> bool:
        return not (self.sender.open_transfers or self.receiver.open_pulls or self.receiver.has_work)


def make_rig(carrier: str, *, config: KvTransferConfig | None = None, incarnation: int = 1) -> tuple[Rig, list]:
    """A rig, and what must be closed after it.  ``carrier``: one of CARRIERS, "tcp-sealed" or "nixl"."""
    config = config or KvTransferConfig()
    seal = PageChecksum(IDENTITY, LAYOUT)
    closing: list = []
    mine: KvMemory
    theirs: KvMemory
    send: KvConnector
    take: KvConnector
    transport: Transport
    name = f"test-{os.getpid()}-{next(_names)}"
    if carrier == "shm":
        files = [KvMemoryFile.create(LAYOUT, PAGES), KvMemoryFile.create(LAYOUT, PAGES)]
        mine, theirs, seen = files[0].map_own(), files[1].map_own(), files[0].map_readonly()
        send, take = ShmConnector(mine, {}, seal), ShmConnector(theirs, {WorkerId("prefill-0"): seen}, seal)
        transport, endpoint = ZmqTransport(CurveKeys.ephemeral()), f"ipc://@penstock-{name}"
        closing += [*files, seen]
    elif carrier == "nixl":
        config = msgspec.structs.replace(config, **NIXL)
        (mine, send), (theirs, take) = nixl_end(config, seal, gives=True), nixl_end(config, seal, gives=False)
        closing += [send, take]
        transport, endpoint = ZmqTransport(CurveKeys.ephemeral()), "tcp://127.0.0.1:0"
    else:
        mine, theirs = KvMemory.anonymous(LAYOUT, PAGES), KvMemory.anonymous(LAYOUT, PAGES)
        if carrier != "memory":
            if carrier == "curve":
                send, take = InlineConnector(mine, seal), InlineConnector(theirs, seal)
            else:
                at, sealed = ("tcp://127.0.0.1:0", 0), carrier == "tcp-sealed"
                send = TcpConnector(mine, seal, config, endpoint=at[0], port=at[1], sealed=sealed)
                take = TcpConnector(theirs, seal, config, endpoint=at[0], port=at[1], sealed=sealed)
                closing += [send, take]
            transport, endpoint = ZmqTransport(CurveKeys.ephemeral()), "tcp://127.0.0.1:0"
        else:
            send, take = (
                InMemoryConnector(mine, {}, seal),
                InMemoryConnector(theirs, {WorkerId("prefill-0"): mine}, seal),
            )
            transport, endpoint = InMemoryHub(), f"memory://{name}"
    rig = Rig(
        carrier=carrier,
        transport=transport,
        clock=VirtualClock(100.0),
        sender=KvSender(config, send, incarnation),
        receiver=KvReceiver(config, take),
        sender_memory=mine,
        receiver_memory=theirs,
        endpoint=endpoint,
        incarnation=incarnation,
    )
    return rig, [*closing, transport, mine, theirs]


def nixl_carrier(config: KvTransferConfig, seal: PageChecksum) -> tuple[KvMemory, NixlConnector]:
    """One worker's; nothing of it is started."""
    file = KvMemoryFile.create(LAYOUT, PAGES)
    memory = file.map_own(lend=os.O_RDONLY)
    file.close()
    return memory, NixlConnector(
        TcpConnector(memory, seal, config, endpoint="tcp://127.0.0.1:0", port=0), memory, seal, config
    )


def nixl_end(config: KvTransferConfig, seal: PageChecksum, *, gives: bool) -> tuple[KvMemory, NixlConnector]:
    """One worker's, ready to give or to take.  Skips the test where NIXL is not installed."""
    if importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("NOT RUN: no NIXL here: pip install --no-deps nixl-cu12")
    memory, carrier = nixl_carrier(config, seal)
    end = carrier.exporter if gives else carrier.reader
    end.start()
    end.settled.wait(60)
    if not (carrier.exporter.ready if gives else carrier.reader.usable):
        carrier.close()
        memory.close()
        pytest.fail(f"NIXL is installed and did not come up: {carrier.reader.last_error or 'the log says why'}")
    return memory, carrier


# --- one request of three pages, step by step -------------------------------------------------------------------------


def start(rig: Rig, *, skip: int = 0, epoch: int = 1) -> None:
    rig.open(epoch)
    rig.expect(OWN, tokens=TOKENS, skip=skip, epoch=epoch)
    rig.until(lambda: PullGranted(R, epoch) in rig.granted)


def offer_all(rig: Rig, *, epoch: int = 1, generation: int = 1) -> None:
    for block, page in enumerate(THEIRS):
        rig.offer(block, page, tokens=min(16, TOKENS - 16 * block), epoch=epoch, generation=generation)


def queued(rig: Rig, frames: int) -> None:
    """Let frames reach the receiver's queue, and copy none."""
    seen = rig.receiver.counters
    assert rig.order is list
    got = 0

    def count(came: list) -> list:
        nonlocal got
        got += sum(isinstance(received.message, PageReady) for _, received in came)
        return came

    rig.order = count
    rig.until(lambda: got >= frames, copying=False)
    rig.order = list
    assert seen.pages == 0


def arrived(rig: Rig, blocks: range = range(3)) -> bool:
    return all(rig.receiver_page(OWN[block]) == rig.sender_page(THEIRS[block]) for block in blocks)
