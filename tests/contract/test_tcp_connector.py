"""What only the carrier over sockets can meet: strangers, impostors, a wire that breaks, stalls, or is listened to."""

from __future__ import annotations

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, suppress
from dataclasses import replace

import msgspec
import pytest
from transfer_rig import LAYOUT, OWN, THEIRS, R, Rig, arrived, make_rig, offer_all, start

from penstock.config.limits import KvTransferConfig
from penstock.kv.connectors.tcp import protocol as frames
from penstock.kv.connectors.tcp.connector import TcpConnector
from penstock.kv.connectors.tcp.server import PageServer
from penstock.kv.transfer.events import PullFailed
from penstock.types import PageId, RequestId
from penstock.wire.transfer_messages import FetchTicket, PageReady

BOTH = ("tcp", "tcp-sealed")
ONE_LINE = KvTransferConfig(connections=1)
BEFORE_PAGES = frames.HELLO_BYTES + 2 * frames.HEAD_BYTES + frames.PROOF_BYTES  # what the sender says first

Change = Callable[[int, bytes], bytes | None]
"""(place in the sender's stream, what comes there) -> what goes on; None: hang up."""


class Relay:
    """Stands between a receiver and the sender's port, and does to the sender's bytes what a test wants."""

    def __init__(self, port: int, change: Change) -> None:
        self.seen = bytearray()
        self.connections = 0
        self._target = port
        self._change = change
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = self._listening.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        self._listening.close()

    def _accept(self) -> None:
        while True:
            try:
                caller = self._listening.accept()[0]
            except OSError:
                return
            self.connections += 1
            sender = socket.create_connection(("127.0.0.1", self._target))
            for one, other, change in ((caller, sender, None), (sender, caller, self._change)):
                threading.Thread(target=self._pump, args=(one, other, change), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, change: Change | None) -> None:
        place = 0
        try:
            while data := one.recv(512):
                out: bytes | None = data
                if change is not None:
                    self.seen += data
                    out = change(place, data)
                place += len(data)
                if out is None:
                    break
                other.sendall(out)
        except OSError:
            pass
        for end in (one, other):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


@pytest.fixture
def things() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def rig_of(things: ExitStack, kind: str = "tcp", config: KvTransferConfig = ONE_LINE) -> Rig:
    made, closing_ = make_rig(kind, config=config)
    for thing in reversed(closing_):
        things.callback(thing.close)
    return made


def desk_of(rig: Rig) -> PageServer:
    carrier = rig.sender._carrier
    assert isinstance(carrier, TcpConnector)
    return carrier.server


def leads_to(rig: Rig, port: int, **other: object) -> None:
    """The receiver is sent to another port."""

    def change(came: list) -> list:
        return [
            (s, replace(m, message=msgspec.structs.replace(m.message, port=port, **other)))
            if isinstance(m.message, FetchTicket)
            else (s, m)
            for s, m in came
        ]

    rig.order = change


def relay(rig: Rig, things: ExitStack, change: Change) -> Relay:
    made = things.enter_context(closing(Relay(desk_of(rig).port, change)))
    leads_to(rig, made.port)
    return made


def flip_at(offset: int) -> Change:
    def change(place: int, data: bytes) -> bytes:
        body = bytearray(data)
        if place <= offset < place + len(body):
            body[offset - place] ^= 4
        return bytes(body)

    return change


# --- the wire --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", BOTH)
def test_pages_arrive_and_who_listens_reads_only_what_is_not_sealed(things: ExitStack, kind: str) -> None:
    rig = rig_of(things, kind, KvTransferConfig())
    wire = relay(rig, things, lambda place, data: data)
    start(rig)
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert arrived(rig)
    assert rig.firsts
    rig.until(lambda: rig.receiver.background_s > 0)  # the thread that fetched is counted
    pages = [rig.sender_page(page) for page in THEIRS]
    assert all((page[64:96] in wire.seen) == (kind == "tcp") for page in pages)


@pytest.mark.parametrize(("kind", "why"), [("tcp", "corrupt"), ("tcp-sealed", "a page that was changed on its way")])
def test_a_bit_that_flips_on_the_wire_is_found(things: ExitStack, kind: str, why: str) -> None:
    rig = rig_of(things, kind)
    relay(rig, things, flip_at(BEFORE_PAGES + 100))
    start(rig)
    offer_all(rig)
    rig.until(lambda: bool(rig.failed))
    assert why in rig.failed[0].reason
    rig.until(rig.all_free)


@pytest.mark.parametrize("kind", BOTH)
def test_a_connection_that_breaks_is_made_anew_and_goes_on(things: ExitStack, kind: str) -> None:
    rig = rig_of(things, kind)
    broken: list[int] = []

    def cut(place: int, data: bytes) -> bytes | None:
        if place > BEFORE_PAGES + LAYOUT.page_bytes and not broken:
            broken.append(place)
            return None
        return data

    wire = relay(rig, things, cut)
    start(rig)
    offer_all(rig)
    rig.done(3)
    rig.until(lambda: bool(rig.released))
    assert arrived(rig)
    assert wire.connections == 2
    assert rig.receiver.counters.pages == 3


def test_a_sender_that_says_nothing_is_given_up_in_time(things: ExitStack) -> None:
    rig = rig_of(things, config=KvTransferConfig(connections=1, fetch_stall_s=0.05, fetch_tries=2))
    relay(rig, things, lambda place, data: data if place < BEFORE_PAGES else b"")
    start(rig)
    offer_all(rig)
    rig.until(lambda: bool(rig.failed))
    assert rig.failed == [PullFailed(R, 1, "its pages cannot be fetched: nothing moved for 0.05 s")]
    assert rig.receiver.counters.missed == 3
    rig.until(rig.all_free)


@pytest.mark.parametrize("kind", BOTH)
def test_what_is_cancelled_in_the_middle_of_a_page_is_written_no_further(things: ExitStack, kind: str) -> None:
    rig = rig_of(things, kind)
    held, go_on = threading.Event(), threading.Event()

    def hold(place: int, data: bytes) -> bytes:
        if place > BEFORE_PAGES + 1000:
            held.set()
            go_on.wait(5)
        return data

    wire = relay(rig, things, hold)
    start(rig)
    offer_all(rig)
    rig.until(held.is_set)
    rig.took(rig.receiver.cancel_pull(R, 1))
    before = [rig.receiver_page(page) for page in OWN]
    go_on.set()
    other = RequestId("other")
    rig.open(request=other)
    rig.expect([20], tokens=16, request=other)
    rig.offer(0, 40, request=other)
    rig.done(1, request=other)
    rig.until(lambda: any(first.request == other for first in rig.firsts))
    assert rig.receiver_page(20) == rig.sender_page(40)
    assert [rig.receiver_page(page) for page in OWN] == before
    assert wire.connections == 1
    rig.until(rig.all_free)


def test_pages_that_would_come_in_clear_are_not_fetched(things: ExitStack) -> None:
    rig = rig_of(things, "tcp-sealed")
    leads_to(rig, desk_of(rig).port, sealed=False)
    start(rig)
    offer_all(rig)
    rig.until(lambda: bool(rig.failed))
    assert rig.failed[0].reason == "its pages would not come as agreed"


def test_an_impostor_who_took_the_senders_port_writes_nothing(things: ExitStack) -> None:
    """It cannot prove that it has the token; its pages would not pass the check, either."""
    rig = rig_of(things, config=KvTransferConfig(connections=1, fetch_tries=1))
    listening = things.enter_context(closing(socket.create_server(("127.0.0.1", 0))))

    def answer() -> None:
        with listening.accept()[0] as sock:
            sock.sendall(frames.pack_hello(bytes(32), sealed=False))
            leg = frames.parse_head(sock.recv(512)[: frames.HEAD_BYTES])[3]
            sock.sendall(frames.pack_head(frames.ATTACHED, leg) + bytes(32))
            sock.sendall(frames.pack_head(frames.PAGES, leg, count=3, number=1) + bytes(3 * LAYOUT.page_bytes))
            sock.recv(1)

    threading.Thread(target=answer, daemon=True).start()
    leads_to(rig, listening.getsockname()[1])
    before = bytes(rig.receiver_memory.buffer)
    start(rig)
    offer_all(rig)
    rig.until(lambda: bool(rig.failed))
    assert rig.failed[0].reason == "its pages cannot be fetched: the peer that answers there is not the sender"
    assert bytes(rig.receiver_memory.buffer) == before


# --- who may ask -----------------------------------------------------------------------------------------------------


class Caller:
    """A connection to a desk, by hand."""

    def __init__(self, desk: PageServer) -> None:
        self.sock = socket.create_connection(("127.0.0.1", desk.port), timeout=60)
        self.nonce = bytes(range(32))
        try:
            nonce = frames.parse_hello(self.read(frames.HELLO_BYTES), sealed=desk.sealed)
        except OSError:
            self.sock.close()
            raise
        self.pair = frames.Handshake(nonce, self.nonce)

    def read(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            more = self.sock.recv(nbytes - len(got))
            if not more:
                raise ConnectionError
            got += more
        return got

    def attach(self, leg: int, token: bytes) -> tuple[int, bytes]:
        self.sock.sendall(frames.pack_head(frames.ATTACH, leg) + self.nonce + self.pair.receiver_proof(token, leg))
        kind = frames.parse_head(self.read(frames.HEAD_BYTES))[0]
        return kind, self.read(frames.PROOF_BYTES) if kind == frames.ATTACHED else b""

    def fetch(self, leg: int, *pages: int) -> bytes | None:
        self.sock.sendall(frames.pack_fetch(leg, 7, list(pages)))
        kind, count, number, back = frames.parse_head(self.read(frames.HEAD_BYTES))
        assert (number, back) == (7, leg)
        assert kind == (frames.PAGES if count else frames.REFUSED)
        return self.read(count * LAYOUT.page_bytes) if count else None

    def close(self) -> None:
        self.sock.close()


def granted(rig: Rig, name: str, *pages: int) -> FetchTicket:
    desk = desk_of(rig)
    at = desk.grant_access(RequestId(name), 1)
    for page in pages:
        desk.publish_page(
            PageReady(
                request=at.request, epoch=1, index=0, tokens=16, page=PageId(page), generation=1, checksum=bytes(16)
            )
        )
    return at


def test_who_has_a_legs_token_gets_its_pages_and_no_others(things: ExitStack) -> None:
    rig = rig_of(things)
    one, other = granted(rig, "one", 3, 4), granted(rig, "other", 5)
    assert one.token != other.token
    caller = things.enter_context(closing(Caller(desk_of(rig))))
    kind, proof = caller.attach(one.grant_id, one.token)
    assert (kind, proof) == (frames.ATTACHED, caller.pair.sender_proof(one.token, one.grant_id))
    assert caller.fetch(one.grant_id, 4, 3) == rig.sender_page(4) + rig.sender_page(3)
    assert caller.fetch(one.grant_id, 3, 5) is None  # not of this leg
    assert caller.fetch(other.grant_id, 5) is None  # not proved
    assert caller.attach(other.grant_id, one.token)[0] == frames.REFUSED
    assert caller.fetch(other.grant_id, 5) is None
    assert caller.attach(other.grant_id, other.token)[0] == frames.ATTACHED
    assert caller.fetch(other.grant_id, 5) == rig.sender_page(5)
    desk_of(rig).revoke_access(other.request, 1)
    assert caller.fetch(other.grant_id, 5) is None
    assert caller.fetch(one.grant_id, 3) == rig.sender_page(3)


@pytest.mark.parametrize("ending", ["received", "cancelled", "cancelled by the sender"])
def test_a_legs_end_takes_its_pages_back(things: ExitStack, ending: str) -> None:
    rig = rig_of(things)
    doors: list[FetchTicket] = []

    def note(came: list) -> list:
        doors.extend(each.message for _, each in came if isinstance(each.message, FetchTicket))
        return came

    rig.order = note
    start(rig)
    offer_all(rig)
    rig.until(lambda: bool(doors))
    at, other = doors[0], granted(rig, "other", 3)
    caller = things.enter_context(closing(Caller(desk_of(rig))))
    assert caller.attach(other.grant_id, other.token)[0] == frames.ATTACHED
    assert caller.attach(at.grant_id, at.token)[0] == frames.ATTACHED
    assert caller.fetch(at.grant_id, THEIRS[0]) == rig.sender_page(THEIRS[0])
    if ending == "received":
        rig.done(3)
    elif ending == "cancelled":
        rig.took(rig.receiver.cancel_pull(R, 1))
    else:
        rig.sent(rig.sender.cancel_transfer(R, 1, rig.clock.now()))
    rig.until(lambda: bool(rig.released))
    assert caller.fetch(at.grant_id, THEIRS[0]) is None
    assert caller.attach(at.grant_id, at.token)[0] == frames.REFUSED
    assert caller.fetch(other.grant_id, 3) == rig.sender_page(3)


@pytest.mark.parametrize("kind", BOTH)
def test_a_stranger_is_hung_up_on(things: ExitStack, kind: str) -> None:
    rig = rig_of(things, kind)
    at = granted(rig, "one", 3)
    for leg, token in ((at.grant_id, bytes(32)), (at.grant_id + 1, at.token)):
        caller = things.enter_context(closing(Caller(desk_of(rig))))
        with pytest.raises(ConnectionError):
            caller.attach(leg, token)
    caller = things.enter_context(closing(Caller(desk_of(rig))))
    with pytest.raises(ConnectionError):
        caller.fetch(at.grant_id, 3)


def test_what_was_overheard_opens_no_other_connection(things: ExitStack) -> None:
    rig = rig_of(things)
    at = granted(rig, "one", 3)
    first, second = (things.enter_context(closing(Caller(desk_of(rig)))) for _ in range(2))
    said = frames.pack_head(frames.ATTACH, at.grant_id) + first.nonce + first.pair.receiver_proof(at.token, at.grant_id)
    second.sock.sendall(said)
    assert second.sock.recv(1) == b""


def test_whatever_bytes_come_the_desk_goes_on(things: ExitStack) -> None:
    rig, dice = rig_of(things), random.Random(5)
    at = granted(rig, "one", 3)
    for number in range(40):
        with closing(Caller(desk_of(rig))) as caller:
            if number % 2:
                caller.attach(at.grant_id, at.token)
            kind, count = dice.randrange(256), dice.choice([0, 1, 255, 65_535])
            caller.sock.sendall(
                struct.pack("<BxHIQ", kind, count, 1, at.grant_id) + dice.randbytes(dice.randrange(3000))
            )
            with suppress(OSError):  # it may have hung up on us
                caller.sock.shutdown(socket.SHUT_WR)
                while caller.sock.recv(1 << 16):
                    pass
    caller = things.enter_context(closing(Caller(desk_of(rig))))
    assert caller.attach(at.grant_id, at.token)[0] == frames.ATTACHED
    assert caller.fetch(at.grant_id, 3) == rig.sender_page(3)


def test_strangers_do_not_take_all_places(things: ExitStack) -> None:
    rig = rig_of(things, config=KvTransferConfig(max_strangers=2, greeting_s=60.0))
    at = granted(rig, "one", 3)
    waiting = [things.enter_context(closing(Caller(desk_of(rig)))) for _ in range(2)]
    with pytest.raises(ConnectionError):
        Caller(desk_of(rig))
    for caller in waiting:
        caller.close()

    def attached() -> bool:
        """Threads of the desk notice on their own that its callers have left."""
        try:
            with closing(Caller(desk_of(rig))) as caller:
                return caller.attach(at.grant_id, at.token)[0] == frames.ATTACHED
        except ConnectionError:
            return False

    rig.until(attached)


def test_strangers_do_not_take_all_time(things: ExitStack) -> None:
    rig = rig_of(things, config=KvTransferConfig(greeting_s=0.2))
    caller = things.enter_context(closing(Caller(desk_of(rig))))
    assert caller.sock.recv(1) == b""


def test_a_prompt_whose_pages_are_handed_out_no_more_hears_why(things: ExitStack) -> None:
    rig = rig_of(things)
    start(rig)
    offer_all(rig)
    rig.receiver_ticks = False
    desk_of(rig).revoke_access(R, 1)  # before the receiver has asked
    rig.sent(rig.sender.fail_transfer(R, 1, "out of luck", rig.clock.now()))
    rig.until(lambda: bool(rig.failed))
    assert rig.failed == [PullFailed(R, 1, "out of luck")]
    assert rig.advanced == []
    rig.until(rig.all_free)
