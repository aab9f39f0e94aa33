"""Connections between machines of one worker: who has no keys gets nothing, and nothing can be changed on its way."""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from in_thread import PATIENCE_S, InThread
from node_folder import NodeFolder
from penstock.config.base import host_and_port
from penstock.errors import ProtocolError
from penstock.wire import rank_link
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.node_keys import HostKeys, NodeKeys
from penstock.wire.rank_link import (
    MAX_GREETED,
    RECORD_BYTES,
    RankCaller,
    RankLink,
    RankListener,
    accept_rank,
    connect_rank,
    listen_for_ranks,
)

KEYS = CurveKeys.ephemeral()


@pytest.fixture
def nodes(tmp_path: Path) -> NodeFolder:
    return NodeFolder(tmp_path, a="worker", b="worker", g="gateway", revoked="worker")


class Wire:
    """A machine in the middle: passes on what both say, changed by ``change``, and remembers it."""

    def __init__(self, port: int, change: Callable[[bytes, bool], bytes]) -> None:
        self.heard = {True: bytearray(), False: bytearray()}  # what the connecting end said, and the listening one
        self._door = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._door.getsockname()[1]
        self._target = port
        self._change = change
        self._threads = [threading.Thread(target=self._begin)]
        self._threads[0].start()

    def _begin(self) -> None:
        self._ends = near, far = self._door.accept()[0], socket.create_connection(("127.0.0.1", self._target))
        self._threads += [
            threading.Thread(target=self._pass, args=args) for args in ((near, far, True), (far, near, False))
        ]
        for thread in self._threads[1:]:
            thread.start()

    def _pass(self, source: socket.socket, to: socket.socket, forth: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                self.heard[forth] += data
                to.sendall(self._change(data, forth))
        for end in (source, to):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        for thread in self._threads:
            thread.join(20)
        for end in (self._door, *self._ends):
            end.close()


@contextmanager
def pair(
    change: Callable[[bytes, bool], bytes] = lambda data, forth: data,
) -> Iterator[tuple[RankLink, RankLink, Wire]]:
    """Both ends of a link, and the wire between them."""
    door = listen_for_ranks("127.0.0.1", 0)
    door.setblocking(True)
    wire = Wire(door.getsockname()[1], change)
    accepted = InThread(lambda: accept_rank(door.accept()[0], KEYS))
    connecting = connect_rank("127.0.0.1", wire.port, KEYS)
    listening = accepted.result()
    try:
        yield connecting, listening, wire
    finally:
        for end in (connecting, listening):
            end.close()
        wire.close()
        door.close()


def test_records_come_as_they_were_sent_both_ways() -> None:
    records = [b"", b"a record", bytes(range(256)) * 1024]
    assert len(records[-1]) == RECORD_BYTES
    with pair() as (connecting, listening, wire):
        for source, to in ((connecting, listening), (listening, connecting)):
            sent = InThread(lambda source=source: [source.send(record[:1], record[1:]) for record in records])
            assert [to.recv() for _ in records] == records
            sent.result()
        assert all(b"a record" not in heard for heard in wire.heard.values())  # nobody else can read them
        with pytest.raises(ValueError, match="at most"):
            connecting.send(bytes(RECORD_BYTES), b"1")


def greeted(ours: HostKeys, theirs: HostKeys) -> tuple[RankLink, RankLink]:
    """Both ends of a connection, the listening one first."""
    door = listen_for_ranks("127.0.0.1", 0)
    door.setblocking(True)
    with closing(door):
        accepted = InThread(lambda: accept_rank(door.accept()[0], ours))
        connecting = connect_rank(*door.getsockname(), theirs)
        return accepted.result(), connecting


def test_nodes_know_each_other_by_their_own_keys(nodes: NodeFolder) -> None:
    listening, connecting = greeted(nodes.keys("a"), nodes.keys("b"))
    with closing(listening), closing(connecting):
        connecting.send(b"from b")
        listening.send(b"from a")
        assert (listening.recv(), connecting.recv()) == (b"from b", b"from a")
        assert (listening.peer_node, connecting.peer_node) == ("b", "a")
        assert listening.is_accepted(nodes.keys("a"))
        nodes.run("revoke", "b")
        nodes.deliver_registry("a")
        assert not listening.is_accepted(nodes.keys("a"))


@pytest.mark.parametrize("listens", [True, False])
def test_each_connection_goes_by_the_keys_of_then(listens: bool, nodes: NodeFolder, tmp_path: Path) -> None:
    """This process has loaded its own before another node's are replaced, or revoked."""
    ours, before = [nodes.keys("a"), nodes.keys("a")], NodeKeys.load(nodes.steal("b", tmp_path / "before"))
    for step in ((), ("--finish",)):
        nodes.run("rotate", "b", *step)
        nodes.deliver_registry("a", "b")
        nodes.deliver_secret("b")
    renewed, old = ((keys, theirs) for keys, theirs in zip(ours, (nodes.keys("b"), before), strict=True))
    for end in greeted(*(renewed if listens else renewed[::-1])):
        end.close()
    with pytest.raises((ProtocolError, ConnectionError)):
        greeted(*(old if listens else old[::-1]))


def test_a_machine_without_a_workers_key_is_no_rank(nodes: NodeFolder, tmp_path: Path) -> None:
    stolen = NodeKeys.load(nodes.steal("revoked", tmp_path / "stolen"))
    nodes.run("revoke", "revoked")
    nodes.deliver_registry()
    impostor = nodes.keys("b")
    impostor.secret = nodes.keys("g").secret  # says that it is b, and has not its secret
    for other in (nodes.keys("g"), stolen, impostor, KEYS):
        for ends in ((nodes.keys("a"), other), (other, nodes.keys("a"))):
            with pytest.raises((ProtocolError, ConnectionError, TimeoutError)):
                greeted(*ends)


@pytest.mark.parametrize("listening_has", [True, False])
def test_who_has_other_keys_is_refused(listening_has: bool) -> None:
    other = CurveKeys.ephemeral()
    ours, theirs = (KEYS, other) if listening_has else (other, KEYS)
    door = listen_for_ranks("127.0.0.1", 0)
    door.setblocking(True)
    accepted = InThread(lambda: accept_rank(door.accept()[0], ours))
    with pytest.raises(ProtocolError, match="other keys"):
        connect_rank(*door.getsockname(), theirs)
    with pytest.raises((ConnectionError, ProtocolError)):
        accepted.result()
    door.close()


def test_what_is_no_rank_is_refused() -> None:
    door = listen_for_ranks("127.0.0.1", 0)
    door.setblocking(True)
    accepted = InThread(lambda: accept_rank(door.accept()[0], KEYS))
    with socket.create_connection(door.getsockname()) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: example.org\r\n" + b"x" * 100)
        with pytest.raises(ProtocolError, match="no rank"):
            accepted.result()
    door.close()


@pytest.mark.parametrize("at", ["the length", "the bytes", "the end"])
def test_a_record_that_is_changed_on_its_way_ends_the_link(at: str) -> None:
    changed: list[bool] = []

    def change(data: bytes, forth: bool) -> bytes:
        if not forth or not changed or changed[0]:
            return data
        changed[0] = True
        where = {"the length": 1, "the bytes": 8, "the end": len(data) - 1}[at]
        return data[:where] + bytes([data[where] ^ 1]) + data[where + 1 :]

    with pair(change) as (connecting, listening, _):
        connecting.send(b"as it was")
        assert listening.recv() == b"as it was"
        changed.append(False)
        connecting.send(b"another one")
        connecting.send(bytes(4096))
        with pytest.raises(ProtocolError, match="changed"):
            list(iter(listening.recv, None))  # it may be the end of the second one


def test_a_record_that_is_said_twice_ends_the_link() -> None:
    twice: list[bool] = []
    with pair(lambda data, forth: data * 2 if forth and twice else data) as (connecting, listening, _):
        twice.append(True)
        connecting.send(b"pay 1")
        assert listening.recv() == b"pay 1"
        with pytest.raises(ProtocolError, match="repeated"):
            listening.recv()


def test_the_end_of_the_other_process_is_seen() -> None:
    with pair() as (connecting, listening, _):
        waiting = InThread(listening.recv)
        connecting.close()
        with pytest.raises(ConnectionError):
            waiting.result()


def test_endpoints_have_a_host_and_a_port() -> None:
    assert host_and_port("tcp://10.0.0.1:9100") == ("10.0.0.1", 9100)
    assert host_and_port("tcp://[fe80::1]:9100") == ("fe80::1", 9100)


@dataclass
class Greeted:
    """A door, and what has come of those who connected to it."""

    door: RankListener
    address: tuple[str, int]
    refused: list[str]
    callers: list[RankCaller] = field(default_factory=list[RankCaller])

    def wait_for(self, condition: Callable[[], bool]) -> None:
        """Greet until it is true."""
        until = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < until, "it did not come true"
            select.select(self.door.descriptors, [], [], 0.05)
            self.callers += self.door.callers()

    def stranger(self, host: str = "127.0.0.1") -> socket.socket:
        """One that connects from that address and says nothing, once it is greeted."""
        before = len(self.door._greetings), len(self.refused)
        sock = socket.create_connection(self.address, PATIENCE_S, source_address=(host, 0))
        self.wait_for(lambda: (len(self.door._greetings), len(self.refused)) != before)
        return sock


@pytest.fixture
def greeting() -> Iterator[Greeted]:
    refused: list[str] = []
    with (
        closing(listen_for_ranks("127.0.0.1", 0)) as listening,
        RankListener(listening, KEYS, lambda host, why: refused.append(f"{host}: {why}")) as door,
    ):
        greeted = Greeted(door, listening.getsockname(), refused)
        yield greeted
        for caller in greeted.callers:
            caller.link.close()
    assert not greeting_threads()


def greeting_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("greet ")]


def is_open(sock: socket.socket) -> bool:
    sock.settimeout(0.0)
    try:
        return sock.recv(1) != b""
    except BlockingIOError:
        return True


def test_one_that_says_nothing_keeps_no_other_waiting(greeting: Greeted) -> None:
    with closing(greeting.stranger()) as stranger:
        connecting = InThread(lambda: connect_rank(*greeting.address, KEYS))
        greeting.wait_for(lambda: len(greeting.door._greetings) == 2)
        with closing(connecting.result()) as link:
            link.send(b"hello")
            greeting.wait_for(lambda: bool(greeting.callers))
            assert is_open(stranger)
            (caller,) = greeting.callers
            assert (caller.host, caller.first) == ("127.0.0.1", b"hello")
            link.send(b"more")
            assert caller.link.recv() == b"more"


def test_the_oldest_that_is_silent_makes_room_for_another(greeting: Greeted) -> None:
    connecting = InThread(lambda: connect_rank(*greeting.address, KEYS))
    greeting.wait_for(lambda: any(each.proven for each in greeting.door._greetings))
    with ExitStack() as stack:
        link = stack.enter_context(closing(connecting.result()))
        strangers = [stack.enter_context(closing(greeting.stranger())) for _ in range(MAX_GREETED + 3)]
        assert [is_open(stranger) for stranger in strangers] == [False] * 4 + [True] * (MAX_GREETED - 1)
        assert len(greeting_threads()) == MAX_GREETED
        link.send(b"from one that has proven its keys")
        greeting.wait_for(lambda: bool(greeting.callers))
    assert len(greeting.refused) == 4


def test_many_from_one_address_do_not_displace_one_from_another(greeting: Greeted) -> None:
    with ExitStack() as stack:
        slow = stack.enter_context(closing(greeting.stranger("127.0.0.1")))
        crowd = [stack.enter_context(closing(greeting.stranger("127.0.0.2"))) for _ in range(2 * MAX_GREETED)]
        assert is_open(slow)
        assert sum(is_open(one) for one in crowd) == MAX_GREETED - 1


def test_one_that_proves_its_keys_and_says_nothing_more_is_let_go(
    greeting: Greeted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank_link, "SILENCE_S", 1)
    connecting = InThread(lambda: connect_rank(*greeting.address, KEYS))
    greeting.wait_for(lambda: any(each.proven for each in greeting.door._greetings))
    with closing(connecting.result()) as link:
        greeting.wait_for(lambda: bool(greeting.refused))
        with pytest.raises(ConnectionError):
            link.recv()
