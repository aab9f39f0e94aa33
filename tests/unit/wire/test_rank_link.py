"""Connections between machines of one worker: who has no keys gets nothing, and nothing can be changed on its way."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

from in_thread import InThread
from node_folder import NodeFolder
from penstock.config.base import host_and_port
from penstock.errors import ProtocolError
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.node_keys import HostKeys, NodeKeys
from penstock.wire.rank_link import RECORD_BYTES, RankLink, accept_rank, connect_rank, listen_for_ranks

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
