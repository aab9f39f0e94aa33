"""Nodes with keys of their own, over real sockets: what each key allows, and what a change of keys does to connections.

The listener is the node ``w``'s; ``g`` has gateways, ``o`` gateways of an operator, and ``v`` workers.
"""

from __future__ import annotations

import asyncio
import errno
import os
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import zmq
from transport_place import PATIENCE_S, Place, note

from node_folder import NodeFolder
from penstock.types import Duty, ModelIdentity, RequestId, WorkerId
from penstock.wire import curve_sockets, node_keys, zeromq
from penstock.wire.codec import PeerMessage, encode_message
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import AssignRole, ConfirmRequests, Hello, Tokens
from penstock.wire.node_keys import NodeKeys
from penstock.wire.peer_rights import PeerRefusal
from penstock.wire.transfer_messages import PagesReceived, PullPages
from penstock.wire.transport import Link, Listener
from penstock.wire.zeromq import ZmqTransport

RIGHTS = {"w": "worker", "v": "worker", "g": "gateway", "o": "gateway,operator"}
WORKER = WorkerId("w-0")
MESSAGES: dict[str, PeerMessage] = {
    "hello": Hello(gateway="g-gateway-1", incarnation=1),
    "hello as o": Hello(gateway="o-gateway-1", incarnation=1 << 52),
    "cancel": note(1),
    "drain": AssignRole(duty=Duty.DRAIN),
    "pull": PullPages(
        request=RequestId("r"),
        epoch=1,
        skip_blocks=0,
        identity=ModelIdentity(fingerprint="f", numerics="n"),
        layout="l",
        carrier="tcp",
        incarnation=1,
    ),
    "received": PagesReceived(request=RequestId("r"), epoch=1),
}


@pytest.fixture(autouse=True)
def look_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at in every turn."""
    monkeypatch.setattr(node_keys, "RELOAD_S", 0.0)


@pytest.fixture
def folder(tmp_path: Path) -> NodeFolder:
    return NodeFolder(tmp_path, **RIGHTS)


class Ends:
    """A listener of ``w`` and links to it, each of a transport of its own, as processes have them."""

    def __init__(self, folder: NodeFolder) -> None:
        self.folder = folder
        self.refusals: list[PeerRefusal] = []
        self.keys = folder.keys("w")
        self.transports = [ZmqTransport(self.keys, self.refusals.append)]
        self.listener: Listener = self.transports[0].listen("tcp://127.0.0.1:0")

    def link(self, keys: NodeKeys, worker: str = WORKER) -> Link:
        self.transports.append(ZmqTransport(keys, self.refusals.append))
        return self.transports[-1].connect(self.listener.endpoint, worker=worker)

    def until(self, condition: Callable[[], object], *links: Link) -> None:
        """Turn both ends until the condition holds."""
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert time.monotonic() < deadline, self.refusals
            for transport, source in zip(self.transports, (self.listener, *links), strict=False):
                transport.wait(0.005, [source])

    def hears(self, link: Link, message: PeerMessage) -> bytes:
        """The message arrives, sent as often as need be; the peer that it came from."""
        peers: list[bytes] = []

        def heard() -> bool:
            link.send(message)
            link.recv()
            while (received := self.listener.recv()) is not None:
                if received.message == message:
                    peers.append(received.peer)
            return bool(peers)

        self.until(heard, link)
        return peers[-1]

    def refuses(self, link: Link, message: PeerMessage) -> PeerRefusal:
        """The message is refused, and its sender hears nothing."""
        before = len(self.refusals)
        assert link.send(message)

        def refused() -> bool:
            received = self.listener.recv()
            assert received is None or received.message != message  # others are on their way since ``hears``
            return len(self.refusals) > before

        self.until(refused, link)
        return self.refusals[-1]


@contextmanager
def running(folder: NodeFolder) -> Iterator[Ends]:
    ends = Ends(folder)
    try:
        yield ends
    finally:
        for transport in ends.transports:
            transport.close()


@pytest.mark.parametrize(
    ("sender", "allowed", "refused"),
    [
        ("g", ["hello", "cancel", "received"], {"hello as o": "foreign_name", "drain": "no_right", "pull": "no_right"}),
        ("o", ["hello as o", "drain"], {"hello": "foreign_name", "pull": "no_right"}),
        ("v", ["pull", "received"], dict.fromkeys(("hello", "hello as o", "cancel", "drain"), "no_right")),
    ],
)
def test_a_key_allows_what_its_node_is_for(
    folder: NodeFolder, sender: str, allowed: list[str], refused: dict[str, str]
) -> None:
    with running(folder) as ends:
        link = ends.link(folder.keys(sender))
        for name in allowed:
            ends.hears(link, MESSAGES[name])
        for name, reason in refused.items():
            kind = type(MESSAGES[name]).__name__
            assert ends.refuses(link, MESSAGES[name]) == PeerRefusal(reason, sender, kind)
        assert ends.listener.counters.refused == len(refused)
        assert ends.listener.counters.malformed == 0
        ends.hears(link, MESSAGES[allowed[0]])


def test_a_worker_may_speak_for_itself_only(folder: NodeFolder) -> None:
    with running(folder) as ends:
        link = ends.link(folder.keys("g"))
        peer = ends.hears(link, MESSAGES["hello"])
        for name in ("v-0", "w2-0", "w-0"):
            assert ends.listener.send(peer, Tokens(worker=WorkerId(name), incarnation=1, items=()))
        received = Place(ends.transports[1], "").wait_for(link, ends.listener)
        assert isinstance(received.message, Tokens)
        assert received.message.worker == "w-0"
        assert ends.refusals == [PeerRefusal("foreign_name", "w", "Tokens")] * 2


def test_a_link_to_a_worker_is_a_link_to_its_node(folder: NodeFolder) -> None:
    """A node that listens where another's worker is expected is not spoken to."""
    with running(folder) as ends:
        to_another = ends.link(folder.keys("g"), worker="v-0")
        assert to_another.send(MESSAGES["hello"])
        assert Place(ends.transports[0], "").quiet(ends.listener, 0.3)
        assert not ends.link(folder.keys("g"), worker="stranger-0").send(MESSAGES["hello"])


async def test_who_listens_is_found_among_all_nodes(folder: NodeFolder) -> None:
    """As a gateway that joins an endpoint, and does not know whose it is."""
    for number in range(6):
        folder.run("add", f"n{number}", "--rights", "worker")
    folder.deliver_registry()
    with running(folder) as ends, closing(ZmqTransport(folder.keys("g"))) as transport:
        link = transport.connect_async(ends.listener.endpoint)
        deadline, peer = time.monotonic() + PATIENCE_S, None
        while peer is None:
            assert time.monotonic() < deadline
            link.send(MESSAGES["hello"])
            await asyncio.sleep(0.01)
            received = ends.listener.recv()
            peer = received.peer if received is not None else None
        assert ends.listener.send(peer, Tokens(worker=WORKER, incarnation=1, items=()))
        async with asyncio.timeout(PATIENCE_S):
            assert (await anext(aiter(link))).message == Tokens(worker=WORKER, incarnation=1, items=())
        again = transport.connect_async(ends.listener.endpoint)  # its key is known now
        again.send(MESSAGES["hello"])
        assert Place(ends.transports[0], "").wait_for(ends.listener).message == MESSAGES["hello"]


def test_a_key_that_is_no_nodes_gets_in_once_it_is_one(folder: NodeFolder) -> None:
    folder.run("add", "late", "--rights", "gateway")
    folder.run("revoke", "late")
    folder.deliver_registry()
    folder.run("add", "late", "--rights", "gateway")
    folder.host("late").mkdir()
    folder.deliver_registry("late")
    folder.deliver_secret("late")
    with running(folder) as ends:
        link = ends.link(folder.keys("late"))
        hello = Hello(gateway="late-gateway-1", incarnation=1)
        link.send(hello)
        ends.until(lambda: ends.listener.recv() or ends.refusals, link)
        assert ends.refusals[0] == PeerRefusal("unknown_key", address="127.0.0.1")
        folder.deliver_registry("w")
        ends.hears(link, hello)


def test_who_takes_a_connections_name_has_not_its_key(folder: NodeFolder) -> None:
    """The routing id of a connection is chosen by its peer."""
    with running(folder) as ends:
        link = ends.link(folder.keys("g"))
        peer = ends.hears(link, MESSAGES["hello"])
        link.close()
        ends.until(lambda: ends.listener.recv() is None and not ends.listener.send(peer, note(1)))
        thief = ends.link(folder.keys("v"))
        ends.refuses(thief, MESSAGES["hello"])
        socket: zmq.Socket[bytes] = thief.socket  # type: ignore[attr-defined]
        socket.disconnect(ends.listener.endpoint)
        socket.setsockopt(zmq.ROUTING_ID, peer)
        socket.connect(ends.listener.endpoint)
        for name in ("hello", "cancel", "drain"):
            assert ends.refuses(thief, MESSAGES[name]) == PeerRefusal("no_right", "v", type(MESSAGES[name]).__name__)


def test_a_listener_that_takes_many_keys_counts_its_connections_anew(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "most_connections", lambda: 8)
    with running(folder) as ends:
        links = [ends.link(folder.keys("g"))]
        links += [ends.transports[1].connect(ends.listener.endpoint, worker=WORKER) for _ in range(2)]
        for _ in range(4):
            before = ends.keys.public
            folder.run("rotate", "w")
            folder.deliver_registry()
            for link in links:
                ends.hears(link, MESSAGES["hello"])
            folder.deliver_secret("w")
            ends.until(lambda before=before: ends.listener.recv() or ends.keys.public != before, *links)
            for link in links:
                ends.hears(link, MESSAGES["hello"])
            folder.run("rotate", "w", "--finish")
            folder.deliver_registry()
        links.append(ends.transports[1].connect(ends.listener.endpoint, worker=WORKER))
        ends.hears(links[-1], MESSAGES["hello"])


def test_a_revoked_nodes_connection_ends_and_there_is_no_other(folder: NodeFolder) -> None:
    """What it says meanwhile is ignored, and it is told nothing."""
    with running(folder) as ends:
        link = ends.link(folder.keys("g"))
        peer = ends.hears(link, MESSAGES["hello"])
        other = ends.link(folder.keys("o"))
        ends.hears(other, MESSAGES["hello as o"])
        folder.run("revoke", "g")
        folder.deliver_registry("w", "o")  # who has stolen a key does not take this one
        ends.until(lambda: ends.listener.recv() is None and not ends.listener.send(peer, note(1)), link)
        refused = PeerRefusal("revoked", "g", address="127.0.0.1")
        ends.until(lambda: ends.listener.recv() is None and refused in ends.refusals, link)
        link.send(MESSAGES["hello"])
        ends.hears(other, MESSAGES["hello as o"])
        ends.refusals.clear()
        assert ends.link(folder.keys("g")).send(MESSAGES["hello"])
        ends.until(lambda: ends.listener.recv() is None and refused in ends.refusals, link)


def test_a_node_that_gets_a_new_key_with_its_revocation_loses_its_connection(folder: NodeFolder) -> None:
    with running(folder) as ends:
        link = ends.link(folder.keys("g"))
        ends.hears(link, MESSAGES["hello"])
        folder.run("revoke", "g")
        folder.run("add", "g", "--rights", "gateway")
        folder.deliver_registry("w")
        # It connects again, and that is refused, though it says nothing.
        refused = PeerRefusal("unknown_key", address="127.0.0.1")
        ends.until(lambda: ends.listener.recv() is None and refused in ends.refusals, link)


def test_a_node_that_has_changed_its_key_in_order_ends_no_connections(folder: NodeFolder) -> None:
    with running(folder) as ends:
        keys = folder.keys("g")
        link, old = ends.link(keys), keys.public
        ends.hears(link, MESSAGES["hello"])
        other = ends.link(folder.keys("o"))
        peer = ends.hears(other, MESSAGES["hello as o"])
        folder.run("rotate", "g")
        folder.deliver_registry()
        folder.deliver_secret("g")
        ends.until(lambda: ends.listener.recv() or link.recv() or keys.public != old, link)
        ends.hears(link, MESSAGES["hello"])
        folder.run("rotate", "g", "--finish")
        folder.deliver_registry()
        ends.until(lambda: ends.listener.recv() is None and ends.keys.registry.holder(old) is None, link)
        assert ends.hears(other, MESSAGES["hello as o"]) == peer
        ends.hears(link, MESSAGES["hello"])
        folder.run("revoke", "g")
        folder.deliver_registry("w")
        refused = PeerRefusal("revoked", "g", address="127.0.0.1")
        ends.until(lambda: ends.listener.recv() is None and refused in ends.refusals, link)
        assert ends.hears(other, MESSAGES["hello as o"]) != peer


def test_a_revocation_counts_while_messages_are_always_waiting(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "LOOK_S", 0.0)
    with running(folder) as ends:
        link = ends.link(folder.keys("g"))
        ends.hears(link, MESSAGES["hello"])
        for _ in range(64):
            assert link.send(MESSAGES["hello"])
        received = ends.listener.recv()
        while received is None:
            received = ends.listener.recv()
        folder.run("revoke", "g")
        folder.deliver_registry("w")
        assert curve_sockets.readable(ends.listener.socket)  # type: ignore[attr-defined]
        assert ends.listener.recv() is None


def test_what_a_node_may_not_say_is_not_decoded(folder: NodeFolder) -> None:
    with running(folder) as ends:
        link = ends.link(folder.keys("v"))
        ends.hears(link, MESSAGES["pull"])
        frame = encode_message(ConfirmRequests(requests=()))[:-1] + b"\xc1"  # MessagePack has no such byte
        assert link.send_frame(frame)  # type: ignore[attr-defined]
        ends.until(lambda: ends.listener.recv() is None and ends.refusals, link)
        assert ends.refusals == [PeerRefusal("no_right", "v", "ConfirmRequests")]
        assert not ends.listener.counters.malformed


def test_a_revoked_workers_link_takes_and_gives_nothing(folder: NodeFolder) -> None:
    with running(folder) as ends:
        link = ends.link(folder.keys("g"))
        ends.hears(link, MESSAGES["hello"])
        folder.run("revoke", "w")
        folder.deliver_registry("g")
        ends.until(lambda: not link.send(MESSAGES["hello"]), link)
        assert link.recv() is None


@pytest.mark.parametrize("node", ["g", "w"])
def test_a_node_takes_another_key_while_it_runs(folder: NodeFolder, tmp_path: Path, node: str) -> None:
    with running(folder) as ends:
        keys = {"g": folder.keys("g"), "w": ends.keys}
        link = ends.link(keys["g"])
        ends.hears(link, MESSAGES["hello"])
        old, first = folder.steal(node, tmp_path / "old"), keys[node].public
        folder.run("rotate", node)
        folder.deliver_registry()
        ends.hears(link, MESSAGES["hello"])
        folder.deliver_secret(node)
        ends.until(lambda: ends.listener.recv() or keys[node].public != first, link)
        ends.hears(link, MESSAGES["hello"])
        folder.run("rotate", node, "--finish")
        folder.deliver_registry()
        for _ in range(3):
            ends.hears(link, MESSAGES["hello"])
        assert not ends.refusals
        if node == "g":  # the old key opens nothing now
            ends.link(NodeKeys.load(old)).send(MESSAGES["hello"])
            ends.until(lambda: ends.listener.recv() is None and ends.refusals, link)
            assert ends.refusals[0] == PeerRefusal("unknown_key", address="127.0.0.1")


def test_a_listener_that_cannot_take_another_key_at_once_takes_it_later(
    folder: NodeFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_descriptor(descriptor: int) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    with running(folder) as ends:
        link, first = ends.link(folder.keys("g")), ends.keys.public
        ends.hears(link, MESSAGES["hello"])
        folder.run("rotate", "w")
        folder.deliver_registry()
        with monkeypatch.context() as patch:
            patch.setattr(curve_sockets.os, "dup", no_descriptor)
            folder.deliver_secret("w")
            ends.until(lambda: [ends.listener.recv()] and ends.keys.public != first, link)
            ends.hears(link, MESSAGES["hello"])
        folder.run("rotate", "w", "--finish")
        folder.deliver_registry()
        ends.hears(ends.link(folder.keys("g")), MESSAGES["hello"])
        assert "Too many open files" in caplog.text


def test_keys_that_all_hosts_share_and_keys_of_nodes_do_not_mix(folder: NodeFolder) -> None:
    with running(folder) as ends, closing(ZmqTransport(CurveKeys.ephemeral())) as shared:
        assert shared.connect(ends.listener.endpoint).send(MESSAGES["hello"])
        assert Place(ends.transports[0], "").quiet(ends.listener, 0.3)
