"""Hand-overs between processes: the sender is killed, stopped, or writes where it should not.

The sender is forked and talks over real sockets; the receiver is the test.  Orders to the sender go through a pipe.
"""

from __future__ import annotations

import itertools
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass

import pytest
from transfer_rig import IDENTITY, LAYOUT, R, first_token

from penstock.clock import MonotonicClock, VirtualClock
from penstock.config.limits import KvTransferConfig
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import KvConnector
from penstock.kv.connectors.inline import InlineConnector
from penstock.kv.connectors.shm import ShmConnector
from penstock.kv.connectors.tcp.connector import TcpConnector
from penstock.kv.page_memory import KvMemory, KvMemoryFile
from penstock.kv.transfer.events import (
    PageOffer,
    PagePull,
    PagesAdvanced,
    PullFailed,
    PullGranted,
    ReceiverOutput,
    TransferDone,
    TransferReleased,
)
from penstock.kv.transfer.receiver import KvReceiver, send_pulls
from penstock.kv.transfer.sender import KvSender, send_messages
from penstock.types import PageId, WorkerId
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import PageReady, PagesReady, PagesReceived, PullPages
from penstock.wire.zeromq import ZmqTransport

BLOCKS = 8
PAGES = 16
SEAL = PageChecksum(IDENTITY, LAYOUT)
WORKER = WorkerId("prefill-0")

_names = itertools.count()


def content(page: int) -> bytes:
    return (b"%08d" % page) * (LAYOUT.page_bytes // 8)


@dataclass
class Orders:
    """One letter at a time to the sender, and its word back that it was done."""

    to_child: tuple[int, int]
    from_child: tuple[int, int]

    @classmethod
    def make(cls) -> Orders:
        return cls(os.pipe(), os.pipe())

    def give(self, letter: bytes) -> None:
        os.write(self.to_child[1], letter)

    def was_done(self) -> bytes:
        return os.read(self.from_child[0], 1)

    def leave_to_child(self) -> None:
        """Close its ends here, after the fork: when it ends, whoever waits for its word sees that."""
        os.close(self.to_child[0])
        os.close(self.from_child[1])

    def close(self) -> None:
        """The ends that are the test's."""
        os.close(self.to_child[1])
        os.close(self.from_child[0])


def carrier_of(kind: str, memory: KvMemory, peers: dict[WorkerId, KvMemory]) -> KvConnector:
    match kind:
        case "shm":
            return ShmConnector(memory, peers, SEAL)
        case "curve":
            return InlineConnector(memory, SEAL)
        case _:
            return TcpConnector(memory, SEAL, KvTransferConfig(), endpoint="tcp://127.0.0.1:0", port=0)


def sender_process(carrier: str, file: KvMemoryFile, keys: CurveKeys, endpoint: str, orders: Orders) -> None:
    """Orders: p, offer the next page; d, done; s, scribble over all pages; q, end once released.  Never returns."""
    code = 1
    try:
        memory = file.map_own()
        for page in range(PAGES):
            memory.view(PageId(page))[:] = content(page)
        sender = KvSender(KvTransferConfig(), carrier_of(carrier, memory, {}), incarnation=1)
        clock = MonotonicClock()
        transport = ZmqTransport(keys)
        listener = transport.listen(endpoint)
        os.write(orders.from_child[1], listener.endpoint.encode() + b"\n")
        effects: list[PullGranted | TransferReleased] = []
        effects += send_messages(sender.open_transfer(R, 1, clock.now()), listener, sender, clock.now())
        offered = 0
        may_end = False
        while not (may_end and any(isinstance(effect, TransferReleased) for effect in effects)):
            transport.wait(0.05, [listener], [orders.to_child[0]])
            while (received := listener.recv()) is not None:
                now = clock.now()
                match received.message:
                    case PullPages() as pull:
                        effects += send_messages(sender.on_pull(received.peer, pull, now), listener, sender, now)
                    case PagesReceived() as got:
                        effects += send_messages(sender.on_received(got, now), listener, sender, now)
            effects += send_messages(sender.tick(clock.now()), listener, sender, clock.now())
            if not transport.wait(0, [], [orders.to_child[0]]):
                continue
            match order := os.read(orders.to_child[0], 1):
                case b"p":
                    offer = PageOffer(
                        request=R, epoch=1, index=offered, page=PageId(offered + 3), tokens=16, generation=5
                    )
                    offered += 1
                    effects += send_messages(sender.offer_page(offer, clock.now()), listener, sender, clock.now())
                case b"d":
                    turn = sender.finish_prefill(first_token(), BLOCKS, clock.now())
                    effects += send_messages(turn, listener, sender, clock.now())
                case b"s":
                    memory.buffer[:] = b"\xa5" * memory.buffer.nbytes
                case b"q":
                    may_end = True
            os.write(orders.from_child[1], order)
        assert not sender.open_transfers
        transport.close()
        code = 0
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        os._exit(code)


class Receiving:
    """The test's end: a receiver, its memory, and the sender's process."""

    def __init__(self, carrier: str, file: KvMemoryFile, keys: CurveKeys, stack: ExitStack) -> None:
        endpoint = f"ipc://@penstock-test-{os.getpid()}-{next(_names)}" if carrier == "shm" else "tcp://127.0.0.1:0"
        self.orders = Orders.make()
        stack.callback(self.orders.close)
        self.pid = os.fork()
        if self.pid == 0:
            sender_process(carrier, file, keys, endpoint, self.orders)
        stack.callback(self.end)
        self.orders.leave_to_child()
        bound = b""
        while not bound.endswith(b"\n"):
            letter = self.orders.was_done()
            assert letter, "the sender has ended"
            bound += letter
        self.memory = stack.enter_context(closing(KvMemory.anonymous(LAYOUT, PAGES)))
        seen = stack.enter_context(closing(file.map_readonly()))
        made = carrier_of(carrier, self.memory, {WORKER: seen})
        if isinstance(made, TcpConnector):
            stack.callback(made.close)
        self.receiver = KvReceiver(KvTransferConfig(), made)
        self.clock = VirtualClock(50)
        self.transport = stack.enter_context(closing(ZmqTransport(keys)))
        self.source = PageSource(worker=WORKER, incarnation=1, endpoint=bound.decode().strip())
        self.link = self.transport.connect(self.source.endpoint)
        self.news: list[PagesAdvanced | TransferDone | PullFailed] = []
        self.frames = 0
        pull = PagePull(
            request=R,
            epoch=1,
            source=self.source,
            pages=[PageId(page) for page in range(BLOCKS)],
            skip_blocks=0,
            tokens=16 * BLOCKS,
        )
        self.took(self.receiver.start_pull(pull, self.clock.now()))

    def took(self, turn: ReceiverOutput) -> None:
        self.news += send_pulls(turn, lambda _, message: self.link.send(message))

    def until(self, true: Callable[[], bool], *, copying: bool = True) -> None:
        deadline = MonotonicClock().now() + 60
        while not true():
            assert MonotonicClock().now() < deadline, f"it did not come true; {self.news}"
            self.transport.wait(0.05, [self.link], self.receiver.descriptors)
            while (received := self.link.recv()) is not None:
                message = received.message
                self.frames += len(message.pages) if isinstance(message, PagesReady) else isinstance(message, PageReady)
                self.took(self.receiver.on_message(self.source, received.message, received.payload, self.clock.now()))
            if copying:
                self.took(self.receiver.fetch_pages(self.clock.now()))

    def order(self, letters: bytes) -> None:
        """Give orders and wait until they are done."""
        self.orders.give(letters)
        for letter in letters:
            assert self.orders.was_done() == bytes((letter,))

    def leave(self) -> None:
        """The sender ends by itself, and only once it was released."""
        self.order(b"q")
        assert self.ended() == 0

    def right(self, blocks: int) -> bool:
        return all(bytes(self.memory.view(PageId(block))) == content(block + 3) for block in range(blocks))

    def end(self) -> None:
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            self.ended()

    def ended(self) -> int:
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.pid = 0
        return code


@pytest.fixture
def slot() -> Iterator[KvMemoryFile]:
    with closing(KvMemoryFile.create(LAYOUT, PAGES, label="test")) as file:
        yield file


@pytest.fixture(params=["shm", "curve", "tcp"])
def end(request: pytest.FixtureRequest, slot: KvMemoryFile) -> Iterator[Receiving]:
    with ExitStack() as stack:
        yield Receiving(request.param, slot, CurveKeys.ephemeral(), stack)


def test_pages_cross_from_another_process(end: Receiving) -> None:
    end.order(b"p" * BLOCKS)
    end.order(b"d")
    end.until(lambda: TransferDone(R, 1, first_token()) in end.news)
    assert end.right(BLOCKS)
    end.leave()


def test_a_sender_killed_in_the_middle(end: Receiving) -> None:
    end.order(b"p" * 3)
    end.until(lambda: PagesAdvanced(R, 1, 48) in end.news)
    os.kill(end.pid, signal.SIGKILL)
    assert end.ended() == -signal.SIGKILL
    assert end.orders.was_done() == b"", "nobody waits for a sender that is gone"
    before = bytes(end.memory.buffer)
    end.clock.advance(10)
    end.took(end.receiver.tick(end.clock.now()))
    assert end.news[-1] == PullFailed(R, 1, "silent")
    assert not end.receiver.open_pulls
    assert end.right(3)
    assert bytes(end.memory.buffer) == before


@pytest.mark.parametrize("end", ["tcp"], indirect=True)
def test_what_a_killed_sender_had_announced_and_can_only_be_fetched_is_given_up(end: Receiving) -> None:
    end.order(b"p" * 3)
    end.until(lambda: end.frames == 3, copying=False)
    os.kill(end.pid, signal.SIGKILL)
    end.ended()
    end.until(lambda: bool(end.news))
    assert isinstance(end.news[0], PullFailed)
    assert end.news[0].reason.startswith("its pages cannot be fetched")
    assert not end.receiver.open_pulls


@pytest.mark.parametrize("end", ["shm", "curve"], indirect=True)
def test_what_a_killed_sender_had_announced_can_still_be_copied_and_is_right(end: Receiving) -> None:
    end.order(b"p" * 3)
    end.until(lambda: end.frames == 3, copying=False)
    os.kill(end.pid, signal.SIGKILL)
    end.ended()
    end.took(end.receiver.fetch_pages(end.clock.now()))
    assert end.news == [PagesAdvanced(R, 1, 48)]
    assert end.right(3)


def test_a_stopped_sender_can_do_no_harm_when_it_wakes(end: Receiving) -> None:
    end.order(b"p" * 3)
    end.until(lambda: PagesAdvanced(R, 1, 48) in end.news)
    os.kill(end.pid, signal.SIGSTOP)
    end.clock.advance(10)
    told_later = end.receiver.tick(end.clock.now())
    assert told_later.events == [PullFailed(R, 1, "silent")]
    before = bytes(end.memory.buffer)
    os.kill(end.pid, signal.SIGCONT)
    end.order(b"ppps")  # it goes on as if nothing had happened, and worse
    end.until(lambda: end.receiver.counters.strays >= 3)
    assert bytes(end.memory.buffer) == before
    assert end.right(3)
    assert end.receiver.counters.pages == 3
    end.leave()  # by then it was told that nobody wants its pages


def test_a_sender_that_writes_into_announced_pages_is_found_out(slot: KvMemoryFile) -> None:
    with ExitStack() as stack:
        end = Receiving("shm", slot, CurveKeys.ephemeral(), stack)
        end.order(b"p" * 3)
        end.until(lambda: end.frames == 3, copying=False)
        end.order(b"s")
        end.took(end.receiver.fetch_pages(end.clock.now()))
        assert end.news == [PullFailed(R, 1, "corrupt")]
        end.leave()


def test_a_new_incarnation_wipes_what_the_old_one_had_announced(slot: KvMemoryFile) -> None:
    with ExitStack() as stack:
        end = Receiving("shm", slot, CurveKeys.ephemeral(), stack)
        end.order(b"p" * 3)
        end.until(lambda: end.frames == 3, copying=False)
        os.kill(end.pid, signal.SIGKILL)
        end.ended()
        fresh = stack.enter_context(closing(slot.map_own()))
        fresh.wipe()
        assert bytes(fresh.buffer) == bytes(fresh.buffer.nbytes)
        end.took(end.receiver.fetch_pages(end.clock.now()))
        assert end.news == [PullFailed(R, 1, "corrupt")]
