"""The machines of one worker find each other over real sockets, each of them a thread here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from in_thread import PATIENCE_S, InThread
from node_folder import NodeFolder
from penstock.config.mesh import NodePlace, parse_mesh
from penstock.errors import ConfigError, GroupError, ProtocolError
from penstock.launch import rendezvous as module
from penstock.launch.rendezvous import MasterAddress, Rendezvous, WorkerNodes
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import RankReport
from penstock.wire.node_keys import HostKeys, NodeKeys
from penstock.wire.rank_link import RankLink, accept_rank, connect_rank, listen_for_ranks
from penstock.wire.rendezvous_messages import LinkHello, NodeHello, NodeWelcome, decode, encode

KEYS = CurveKeys.ephemeral()
CONTEXT = 64


OPEN: list[socket.socket | RankLink] = []
MACHINES: list[Machine] = []


def opened(end: Any) -> Any:
    """Closed behind the test."""
    OPEN.append(end)
    return end


@pytest.fixture(autouse=True)
def close_all() -> Iterator[None]:
    yield
    while MACHINES:
        MACHINES.pop().ended.set()
    while OPEN:
        OPEN.pop().close()


class Gone(Exception):  # noqa: N818 - how a test ends a machine
    """The machine was ended."""


@dataclass
class Machine:
    """One machine of a worker.  ``ended``: set to end what it does."""

    nodes: WorkerNodes
    listening: dict[int, socket.socket]
    ended: threading.Event
    pages: int = 8

    @classmethod
    def of(cls, nodes: WorkerNodes, door: socket.socket | None = None) -> Machine:
        listening = {
            rank: door if door is not None and rank == nodes.mesh.leader else opened(listen_for_ranks("127.0.0.1", 0))
            for rank in nodes.ranks
            if nodes.listens(rank)
        }
        return cls(nodes, listening, threading.Event())

    @property
    def hello(self) -> NodeHello:
        return NodeHello(
            node=self.nodes.place.node,
            nodes=self.nodes.place.nodes,
            plan=self.nodes.mesh.name,
            fingerprint="model",
            numerics="kernels",
            kv="pages",
            pages=self.pages,
            ports={rank: sock.getsockname()[1] for rank, sock in self.listening.items()},
        )

    def rendezvous(self) -> Rendezvous:
        def beat() -> None:
            if self.ended.is_set():
                raise Gone

        return Rendezvous(self.nodes, self.listening, beat)

    def meet(self) -> dict[int, dict[int, tuple[RankLink, RankReport]]]:
        """All that its ranks do; the links of each."""
        first = self.rendezvous()
        leads = self.nodes.place.node == 0
        welcome = first.lead(self.hello, CONTEXT) if leads else first.follow(self.hello)
        assert welcome.pages == 8
        links = [
            InThread(lambda rank=rank: self.rendezvous().connect(rank, welcome, report(rank)))
            for rank in self.nodes.ranks
        ]
        return {rank: begun.result() for rank, begun in zip(self.nodes.ranks, links, strict=True)}


def report(rank: int) -> RankReport:
    return RankReport(rank=rank, pid=100 + rank, weight_bytes=1, kv_bytes=1, step_cpu_s=0.0)


def machines(plan: str, nodes: int, keys: Sequence[HostKeys] = (), names: tuple[str, ...] = ()) -> list[Machine]:
    """All machines of a worker.  ``keys``: of each; ``names``: of their nodes, where a fleet file has them."""
    door = opened(listen_for_ranks("127.0.0.1", 0))
    host, port = door.getsockname()[:2]
    master = MasterAddress(host, port, host, names)
    places = [
        WorkerNodes(parse_mesh(plan), NodePlace(nodes=nodes, node=node), master, keys[node] if keys else KEYS)
        for node in range(nodes)
    ]
    found = [Machine.of(place, door if place.place.node == 0 else None) for place in places]
    MACHINES.extend(found)
    return found


def wait_for(condition: Callable[[], bool]) -> None:
    """For what other threads do."""
    waiting = threading.Event()
    for _ in range(PATIENCE_S * 100):
        if condition():
            return
        waiting.wait(0.01)
    raise AssertionError("it did not come true")


@pytest.mark.parametrize(
    ("plan", "nodes", "pairs"),
    [
        ("pp2", 2, {(0, 1)}),
        ("tp2,pp2", 2, {(0, 2), (1, 2), (1, 3)}),  # 1 and 2: the leader tells it what to compute
        ("pp3", 3, {(0, 1), (0, 2), (1, 2)}),
        ("pp4", 2, {(0, 3), (1, 2), (1, 3)}),
    ],
)
def test_all_ranks_that_exchange_over_machines_are_connected(
    plan: str, nodes: int, pairs: set[tuple[int, int]]
) -> None:
    begun = [InThread(machine.meet) for machine in reversed(machines(plan, nodes))]
    links = {rank: own for each in begun for rank, own in each.result().items()}
    assert {(rank, other) for rank, own in links.items() for other in own} == {*pairs, *(pair[::-1] for pair in pairs)}
    for rank, own in links.items():
        for other, (link, theirs) in own.items():
            assert theirs == report(other)
            opened(link).send(f"from {rank} to {other}".encode())
    for rank, own in links.items():
        for other, (link, _) in own.items():
            assert link.recv() == f"from {other} to {rank}".encode()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"plan": "tp2,pp2"}, "--parallel tp2,pp2; machine 0 has pp2"),
        ({"nodes": 3}, "--nnodes 3; machine 0 has 2"),
        ({"fingerprint": "another"}, "another model: another; machine 0 has model"),
        ({"numerics": "portable"}, "other kernels or another --dtype: portable; machine 0 has kernels"),
        ({"kv": "fp8"}, "other KV pages: fp8; machine 0 has pages"),
        ({"node": 2}, "--node-rank 2: 1 to 1 are expected"),
        ({"node": 0}, "--node-rank 0: 1 to 1 are expected"),
        ({"ports": {0: 1, 5: 2}}, r"ranks \[0, 5\] listen there, \[\] were expected"),
        ({"pages": 3}, "room for 48 tokens of KV, and one context may have 64"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_machine_that_does_not_belong_here_is_told_why(changes: dict[str, Any], reason: str) -> None:
    first, other = machines("pp2", 2)
    leading = InThread(lambda: first.rendezvous().lead(first.hello, CONTEXT))
    with pytest.raises(ConfigError, match=reason):
        other.rendezvous().follow(structs.replace(other.hello, **changes))
    first.ended.set()
    with pytest.raises(Gone):
        leading.result()


def test_the_room_of_the_poorest_machine_counts() -> None:
    first, other = machines("pp2", 2)
    first.pages, other.pages = 10, 6
    leading = InThread(lambda: first.rendezvous().lead(first.hello, CONTEXT))
    assert other.rendezvous().follow(other.hello).pages == 6
    assert leading.result().pages == 6


def test_machine_0_learns_how_another_ones_ranks_crashed() -> None:
    first, second, third = machines("pp3", 3)
    waiting = first.rendezvous()
    leading = InThread(lambda: waiting.lead(first.hello, CONTEXT))
    crashed = structs.replace(third.hello, predecessor_fault="rank 2: killed by SIGSEGV")
    others = [InThread(lambda: second.rendezvous().follow(second.hello))]
    others.append(InThread(lambda: third.rendezvous().follow(crashed)))
    for each in (leading, *others):
        each.result()
    assert waiting.fault_elsewhere == "machine 2: rank 2: killed by SIGSEGV"


def test_a_machine_that_goes_while_others_are_waited_for_may_come_back() -> None:
    first, second, third = machines("pp3", 3)
    waiting = first.rendezvous()
    leading = InThread(lambda: waiting.lead(first.hello, CONTEXT))
    gone = InThread(lambda: second.rendezvous().follow(second.hello))
    wait_for(lambda: 1 in waiting._joined)
    second.ended.set()
    with pytest.raises(Gone):
        gone.result()
    wait_for(lambda: 1 not in waiting._joined)
    again = replace(second, ended=threading.Event())
    begun = [InThread(lambda each=each: each.rendezvous().follow(each.hello)) for each in (again, third)]
    assert leading.result() == begun[0].result() == begun[1].result()


def test_a_rank_of_an_earlier_incarnation_gets_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINKS_S", 1.0)
    first, other = machines("pp2", 2)
    leading = InThread(lambda: first.rendezvous().lead(first.hello, CONTEXT))
    welcome = other.rendezvous().follow(other.hello)
    assert leading.result() == welcome
    connecting = InThread(lambda: first.rendezvous().connect(1, welcome, report(1)))
    late = opened(connect_rank(first.nodes.master.host, first.nodes.master.port, KEYS))
    late.send(encode(LinkHello(token=bytes(32), rank=0, to=1, report=report(0))))
    with pytest.raises(ConnectionError):
        late.recv()
    with pytest.raises(GroupError, match="rank 0 did not connect"):
        connecting.result()


@pytest.mark.parametrize("said", [b"", b"\xc1", encode(NodeWelcome(token=bytes(32), pages=1, addresses={}))])
def test_what_is_no_hello_keeps_nobody_waiting(said: bytes) -> None:
    first, other = machines("pp2", 2)
    leading = InThread(lambda: first.rendezvous().lead(first.hello, CONTEXT))
    stranger = opened(connect_rank(first.nodes.master.host, first.nodes.master.port, KEYS))
    stranger.send(said)
    with pytest.raises(ConnectionError):
        stranger.recv()
    assert other.rendezvous().follow(other.hello) == leading.result()


def test_another_answer_than_a_welcome_is_not_taken() -> None:
    _, other = machines("pp2", 2)
    door = opened(listen_for_ranks("127.0.0.1", 0))
    door.setblocking(True)
    host, port = door.getsockname()[:2]
    other.nodes = replace(other.nodes, master=MasterAddress(host, port, listen=host))
    answers = (b"\xff", encode(other.hello), encode(NodeWelcome(token=bytes(32), pages=8, addresses={})))

    def answer() -> list[Any]:
        asked = []
        for said in answers:
            link = accept_rank(door.accept()[0], KEYS)
            asked.append(decode(link.recv()))
            link.send(said)
            link.close()
        return asked

    answering = InThread(answer)
    assert other.rendezvous().follow(other.hello).pages == 8
    assert answering.result() == [other.hello] * 3


STRANGERS = 8
"""If each were waited for in turn, for 3 s, it would be longer than a test waits."""


def silent_strangers(door: socket.socket) -> list[socket.socket]:
    """They connect, and say nothing."""
    return [opened(socket.create_connection(door.getsockname()[:2])) for _ in range(STRANGERS)]


def assert_left_alone(strangers: Sequence[socket.socket]) -> None:
    """No thread and no connection is left of them."""
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("greet ")]
    for stranger in strangers:
        stranger.settimeout(PATIENCE_S)
        assert stranger.recv(1) == b""


def test_strangers_who_say_nothing_keep_no_machine_waiting() -> None:
    first, other = machines("pp2", 2)
    strangers = silent_strangers(first.listening[1])
    leading = InThread(lambda: first.rendezvous().lead(first.hello, CONTEXT))
    welcome = InThread(lambda: other.rendezvous().follow(other.hello)).result()
    assert leading.result() == welcome
    strangers += silent_strangers(first.listening[1])
    both = [
        InThread(lambda rank=rank, machine=machine: machine.rendezvous().connect(rank, welcome, report(rank)))
        for rank, machine in enumerate((other, first))
    ]
    for links in (each.result() for each in both):
        for link, _ in links.values():
            opened(link)
    assert_left_alone(strangers)


def test_a_group_that_does_not_form_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINKS_S", 1.0)
    first, second, third = machines("pp3", 3)
    begun = [InThread(lambda each=each: each.rendezvous().follow(each.hello)) for each in (second, third)]
    welcome = first.rendezvous().lead(first.hello, CONTEXT)
    assert [each.result() for each in begun] == [welcome] * 2
    strangers = silent_strangers(first.listening[2])
    connecting = InThread(lambda: first.rendezvous().connect(2, welcome, report(2)))
    link = opened(connect_rank(*welcome.addresses[2], KEYS))
    link.send(encode(LinkHello(token=welcome.token, rank=1, to=2, report=report(1))))
    assert decode(link.recv()) == LinkHello(token=welcome.token, rank=2, to=1, report=report(2))
    with pytest.raises(GroupError, match="rank 0 did not connect"):
        connecting.result()
    with pytest.raises(ConnectionError):
        link.recv()
    assert_left_alone(strangers)


@pytest.fixture
def fleet(tmp_path: Path) -> NodeFolder:
    """Of which ``thief`` has the key of a node that may have workers, and is in no group."""
    return NodeFolder(tmp_path, a="worker", b="worker", c="worker", thief="worker")


def of_nodes(fleet: NodeFolder, *nodes: str, names: tuple[str, ...] = ()) -> list[Machine]:
    """A worker with a stage on each node."""
    return machines(f"pp{len(nodes)}", len(nodes), [fleet.keys(node) for node in nodes], names)


def as_node(machine: Machine, keys: NodeKeys) -> Machine:
    """The same with the keys of another node."""
    return replace(machine, nodes=replace(machine.nodes, keys=keys))


def leading(machine: Machine, rendezvous: Rendezvous | None = None) -> InThread:
    """Machine 0 waits for the others."""
    return InThread(lambda: (rendezvous or machine.rendezvous()).lead(machine.hello, CONTEXT))


def following(machine: Machine) -> InThread:
    """Another one comes."""
    return InThread(lambda: machine.rendezvous().follow(machine.hello))


def test_only_its_own_node_takes_a_machines_place(fleet: NodeFolder) -> None:
    first, other = of_nodes(fleet, "a", "b", names=("a", "b"))
    waiting = leading(first)
    with pytest.raises(ConfigError, match="the key of the node 'thief'; machine 1 of this worker is the node 'b'"):
        following(as_node(other, fleet.keys("thief"))).result()
    welcome = following(other).result()
    assert waiting.result() == welcome
    connecting = InThread(lambda: first.rendezvous().connect(1, welcome, report(1)))
    thief = opened(connect_rank(*welcome.addresses[1], fleet.keys("thief")))
    thief.send(encode(LinkHello(token=welcome.token, rank=0, to=1, report=report(0))))
    with pytest.raises(ConnectionError):
        thief.recv()
    own = other.rendezvous().connect(0, welcome, report(0))
    assert {opened(link).peer_node for links in (own, connecting.result()) for link, _ in links.values()} == {"a", "b"}


def test_no_machine_follows_or_connects_to_another_node(fleet: NodeFolder) -> None:
    first, other = of_nodes(fleet, "a", "b", names=("a", "b"))
    impostor = as_node(first, fleet.keys("thief"))
    waiting = leading(impostor)
    with pytest.raises(ProtocolError, match="the key of the node 'thief'; machine 0 of this worker is the node 'a'"):
        other.rendezvous()._ask(other.hello)
    impostor.ended.set()
    with pytest.raises(Gone):
        waiting.result()
    door = opened(listen_for_ranks("127.0.0.1", 0))
    door.setblocking(True)
    elsewhere = NodeWelcome(token=bytes(32), pages=8, addresses={1: door.getsockname()[:2]})
    accepting = InThread(lambda: opened(accept_rank(door.accept()[0], fleet.keys("thief"))))
    with pytest.raises(GroupError, match="rank 0 cannot connect to rank 1: it has the key of the node 'thief'"):
        other.rendezvous().connect(0, elsewhere, report(0))
    accepting.result()


def test_without_names_no_other_node_displaces_a_machine_that_has_joined(fleet: NodeFolder) -> None:
    first, second, third = of_nodes(fleet, "a", "b", "c")
    rendezvous = first.rendezvous()
    waiting, joined = leading(first, rendezvous), following(second)
    wait_for(lambda: 1 in rendezvous._joined)
    before, _ = rendezvous._joined[1]
    thief = opened(connect_rank(first.nodes.master.host, first.nodes.master.port, fleet.keys("thief")))
    thief.send(encode(second.hello))
    with pytest.raises(ConnectionError):
        thief.recv()
    assert rendezvous._joined[1][0] is before
    again = opened(connect_rank(first.nodes.master.host, first.nodes.master.port, fleet.keys("b")))
    again.send(encode(second.hello))  # the same node may: it has begun anew
    wait_for(lambda: 1 in rendezvous._joined and rendezvous._joined[1][0] is not before)
    again.close()
    assert following(third).result() == waiting.result() == joined.result()


def test_a_node_that_is_revoked_while_others_are_waited_for_is_not_welcomed(fleet: NodeFolder) -> None:
    first, second, third = of_nodes(fleet, "a", "b", "c")
    rendezvous = first.rendezvous()
    waiting, joined = leading(first, rendezvous), following(second)
    wait_for(lambda: 1 in rendezvous._joined)
    fleet.run("revoke", "b")
    fleet.deliver_registry("a")
    wait_for(lambda: not rendezvous._joined)
    last = following(third)
    wait_for(lambda: 2 in rendezvous._joined)
    assert 1 not in rendezvous._joined
    for machine in (first, second, third):
        machine.ended.set()
    for begun in (waiting, joined, last):
        with pytest.raises(Gone):
            begun.result()


def test_a_group_forms_anew_with_the_keys_of_then(fleet: NodeFolder, tmp_path: Path) -> None:
    """Machine 0 has loaded its keys before another node's were replaced, and a third node's were revoked."""
    first, other = of_nodes(fleet, "a", "b")
    stolen = NodeKeys.load(fleet.steal("c", tmp_path / "stolen"))
    for step in ((), ("--finish",)):
        fleet.run("rotate", "b", *step)
        fleet.deliver_registry("a", "b")
        fleet.deliver_secret("b")
    fleet.run("revoke", "c")
    fleet.deliver_registry("a", "b")
    waiting = leading(first)
    with pytest.raises((ProtocolError, ConnectionError)):
        as_node(other, stolen).rendezvous()._ask(other.hello)
    assert following(as_node(other, fleet.keys("b"))).result() == waiting.result()
