"""How the machines of one worker find each other, anew for each incarnation, and how their ranks connect.

::

    machine 0, its leader                  every other machine, its first rank
    listens at --master-addr <-- NodeHello --- its model, kernels, plan, room for KV pages, ports
    all are there            --- NodeWelcome -> token of this incarnation, where every rank listens
                             or NodeRefused --> why it does not belong here: it ends
    every rank connects to the ranks that it exchanges with on machines with lower numbers, and says the token:
        a rank of an incarnation that has ended gets no further

Where nodes have keys of their own and a fleet file says which node each machine is, each end also checks that the
other one is the node whose place it takes.  Where nothing says it, the first node that joins as a machine has that
place while its link is open.

Each of these connections is a ``RankLink``.  When one ends, both of its processes end, and with them, by their
supervisors, all ranks: the worker begins anew, and no rank ever meets one of another incarnation.
"""

from __future__ import annotations

import logging
import secrets
import select
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from msgspec import structs

from penstock.config.base import host_and_port
from penstock.config.mesh import Mesh, NodePlace
from penstock.errors import ConfigError, GroupError, ProtocolError
from penstock.launch.remote_workers import FIRST_NOTE_S, WAITING_NOTE_S
from penstock.types import PAGE_TOKENS
from penstock.wire.gateway_messages import RankReport
from penstock.wire.node_keys import HostKeys, NodeKeys
from penstock.wire.rank_link import SILENCE_S, RankCaller, RankLink, RankListener, connect_rank
from penstock.wire.rendezvous_messages import (
    TOKEN_BYTES,
    LinkHello,
    NodeHello,
    NodeRefused,
    NodeWelcome,
    decode,
    decode_as,
    encode,
)

log = logging.getLogger("penstock.rank")

BEAT_S = 0.25
"""How often the caller hears that this one waits."""

LINKS_S = 10.0
"""For all ranks to connect, once all machines are there."""

RETRY_S = 0.5
"""Between two attempts to reach machine 0: nothing says when it begins to listen."""


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Where machine 0 of a worker is reached, the host or address at which it listens there, and which nodes meet."""

    host: str
    port: int
    listen: str
    nodes: tuple[str, ...] = ()  # names of the machines' nodes, machine 0's first; empty: nothing says which they are

    @classmethod
    def of(cls, endpoint: str, listen: str = "", nodes: tuple[str, ...] = ()) -> MasterAddress:
        """The address of ``tcp://HOST:PORT``; ``listen``: such an endpoint, if it listens at another one."""
        host, port = host_and_port(endpoint)
        return cls(host, port, host_and_port(listen)[0] if listen else host, nodes)


@dataclass(frozen=True, slots=True)
class WorkerNodes:
    """The machines of one worker."""

    mesh: Mesh
    place: NodePlace
    master: MasterAddress
    keys: HostKeys

    @property
    def ranks(self) -> range:
        """The ranks on this machine."""
        return self.mesh.node_ranks(self.place)

    def peers(self, rank: int) -> Iterator[int]:
        """The ranks on other machines that a rank exchanges with: of the stages before and after it, and the leader
        with all."""
        tensor, leader = self.mesh.tensor, self.mesh.leader
        own = self.node_of(rank)
        for other in range(self.mesh.ranks):
            near = abs(other - rank) == tensor or leader in (rank, other)
            if near and self.node_of(other) != own:
                yield other

    def node_of(self, rank: int) -> int:
        """The machine of a rank."""
        return self.mesh.node_of(rank, self.place.nodes)

    def connects(self, rank: int, other: int) -> bool:
        """Whether the rank connects to the other one, which otherwise connects to it."""
        return self.node_of(rank) > self.node_of(other)

    def listens(self, rank: int) -> bool:
        """Whether any rank connects to this one."""
        return any(not self.connects(rank, other) for other in self.peers(rank))

    def why_not_there(self, link: RankLink, node: int) -> str:
        """Why the other end of a link is not that machine; empty if it is, or where nothing says whose key it has."""
        names = self.master.nodes
        if not names or not isinstance(self.keys, NodeKeys) or link.peer_node == names[node]:
            return ""
        return (
            f"it has the key of the node {link.peer_node!r}; machine {node} of this worker is the node {names[node]!r}"
        )


@dataclass(slots=True)
class Rendezvous:
    """One process' part of it.  ``listening``: this machine's sockets by rank; the leader's is at ``master``.

    ``beat`` is called at least every ``BEAT_S``, however long others take.
    """

    nodes: WorkerNodes
    listening: Mapping[int, socket.socket]
    beat: Callable[[], None]
    fault_elsewhere: str = ""
    """How the worker's incarnation before this one crashed on another machine, known after ``lead``."""
    _joined: dict[int, tuple[RankLink, NodeHello]] = field(default_factory=dict[int, tuple[RankLink, NodeHello]])
    _noted: float = 0.0

    def lead(self, own: NodeHello, max_model_len: int) -> NodeWelcome:
        """Wait until all machines are there.  ``own``: what machine 0 has.  Raises GroupError if one goes then."""
        try:
            with RankListener(self.listening[self.nodes.mesh.leader], self.nodes.keys, _not_admitted) as listener:
                self._gather(listener, own, max_model_len)
            return self._welcome(own)
        finally:
            for link, _ in self._joined.values():
                link.close()
            self._joined.clear()

    def _gather(self, listener: RankListener, own: NodeHello, max_model_len: int) -> None:
        begun = time.monotonic()
        while missing := self._missing():
            self._note("waiting for machine %s of this worker", ", ".join(map(str, missing)), begun)
            links = {link.fileno(): node for node, (link, _) in self._joined.items()}
            ready, _, _ = select.select([*listener.descriptors, *links], [], [], BEAT_S)
            self.beat()
            for descriptor in links.keys() & ready:
                self._joined.pop(links[descriptor])[0].close()  # it says nothing before it is welcome, so it is gone
            for caller in listener.callers():
                self._admit(caller, own, max_model_len)

    def _welcome(self, own: NodeHello) -> NodeWelcome:
        addresses = {
            rank: (link.peer_host, port) for link, hello in self._joined.values() for rank, port in hello.ports.items()
        }
        addresses |= {rank: (self.nodes.master.host, port) for rank, port in own.ports.items()}
        pages = min(own.pages, *(hello.pages for _, hello in self._joined.values()))
        faults = ((node, hello.predecessor_fault) for node, (_, hello) in self._joined.items())
        self.fault_elsewhere = next((f"machine {node}: {fault}" for node, fault in faults if fault), "")
        welcome = NodeWelcome(token=secrets.token_bytes(TOKEN_BYTES), pages=pages, addresses=addresses)
        for node, (link, _) in self._joined.items():
            try:
                link.send(encode(welcome))
            except OSError as error:
                raise GroupError(f"machine {node} of this worker has gone: {error}") from error
        return welcome

    def follow(self, own: NodeHello) -> NodeWelcome:
        """Wait until machine 0 says that all are there.  Raises ConfigError if it refuses this machine."""
        begun = time.monotonic()
        why = "no answer yet"
        while True:
            self.beat()
            master = self.nodes.master
            self._note(f"waiting for machine 0 of this worker at tcp://{master.host}:{master.port}: %s", why, begun)
            try:
                answer = self._ask(own)
            except (OSError, ProtocolError) as error:
                why = str(error) or type(error).__name__
                time.sleep(RETRY_S)
                continue
            if isinstance(answer, NodeRefused):
                raise ConfigError(f"machine 0 of this worker refuses this one: {answer.reason}")
            return answer

    def connect(self, rank: int, welcome: NodeWelcome, report: RankReport) -> dict[int, tuple[RankLink, RankReport]]:
        """Links to all ranks on other machines that a rank exchanges with, and what they say of themselves.

        Raises GroupError if one cannot be made.
        """
        peers = set(self.nodes.peers(rank))
        links: dict[int, tuple[RankLink, RankReport]] = {}
        own = LinkHello(token=welcome.token, rank=rank, to=rank, report=report)
        deadline = time.monotonic() + LINKS_S
        try:
            for other in sorted(peer for peer in peers if self.nodes.connects(rank, peer)):
                links[other] = self._connected(structs.replace(own, to=other), welcome)
                self.beat()
            if peers - links.keys():
                with RankListener(self.listening[rank], self.nodes.keys, _not_admitted) as listener:
                    self._accept(listener, own, links, deadline)
        except BaseException:
            for link, _ in links.values():
                link.close()
            raise
        return links

    def _accept(
        self, listener: RankListener, own: LinkHello, links: dict[int, tuple[RankLink, RankReport]], deadline: float
    ) -> None:
        """Add to ``links`` until none is missing.  Raises GroupError after ``deadline``."""
        peers = set(self.nodes.peers(own.rank))
        while missing := peers - links.keys():
            self.beat()
            if time.monotonic() > deadline:
                raise GroupError(f"rank {min(missing)} did not connect within {LINKS_S:g} s")
            select.select(listener.descriptors, [], [], BEAT_S)
            for caller in listener.callers():
                theirs = self._accepted(caller, own, peers - links.keys())
                if theirs is not None:
                    links[theirs.rank] = caller.link, theirs.report

    def _missing(self) -> list[int]:
        """The machines that are not there, or whose nodes may not have workers any more."""
        for node, (link, _) in [*self._joined.items()]:
            if not link.is_accepted(self.nodes.keys):
                _turn_away(link, f"machine {node}", ProtocolError("the key of its node is no longer accepted"))
                del self._joined[node]
        return [node for node in range(1, self.nodes.place.nodes) if node not in self._joined]

    def _note(self, text: str, what: str, begun: float) -> None:
        """Log who is waited for, not at once and not often."""
        now = time.monotonic()
        if now - max(begun, self._noted) >= (WAITING_NOTE_S if self._noted else FIRST_NOTE_S):
            self._noted = now
            log.warning(text, what)

    def _admit(self, caller: RankCaller, own: NodeHello, max_model_len: int) -> None:
        link, host = caller.link, caller.host
        try:
            hello = decode_as(caller.first, NodeHello)
            reason = self._why_not(own, hello, max_model_len) or self.nodes.why_not_there(link, hello.node)
            if reason:
                link.send(encode(NodeRefused(reason=reason)))
                raise ProtocolError(reason)
            before, _ = self._joined.get(hello.node, (link, hello))
            if before.peer_node != link.peer_node:  # not refused for good: it may be the right one
                raise ProtocolError(
                    f"it has the key of the node {link.peer_node!r}, and the node {before.peer_node!r} has joined as "
                    f"machine {hello.node} already"
                )
        except (OSError, ProtocolError) as error:  # a rank of an earlier incarnation says something else
            _turn_away(link, host, error)
            return
        if before is not link:
            before.close()
        self._joined[hello.node] = link, hello
        log.info("machine %d of this worker has joined from %s", hello.node, host)

    def _why_not(self, own: NodeHello, hello: NodeHello, max_model_len: int) -> str:
        """Why what a machine has does not fit this worker; empty if it does."""
        for what, flag in (
            ("nodes", "--nnodes"),
            ("plan", "--parallel"),
            ("fingerprint", "another model:"),
            ("numerics", "other kernels or another --dtype:"),
            ("kv", "other KV pages:"),
        ):
            mine, theirs = getattr(own, what), getattr(hello, what)
            if mine != theirs:
                return f"{flag} {theirs}; machine 0 has {mine}"
        if not 0 < hello.node < own.nodes:
            return f"--node-rank {hello.node}: 1 to {own.nodes - 1} are expected"
        place = NodePlace(nodes=own.nodes, node=hello.node)
        listening = {rank for rank in self.nodes.mesh.node_ranks(place) if self.nodes.listens(rank)}
        if hello.ports.keys() != listening:
            return f"ranks {sorted(hello.ports)} listen there, {sorted(listening)} were expected"
        if hello.pages * PAGE_TOKENS < max_model_len:
            return (
                f"it has room for {hello.pages * PAGE_TOKENS} tokens of KV, and one context may have {max_model_len}: "
                "give it more --kv-memory, or machine 0 a --max-model-len"
            )
        return ""

    def _ask(self, own: NodeHello) -> NodeWelcome | NodeRefused:
        link = connect_rank(self.nodes.master.host, self.nodes.master.port, self.nodes.keys)
        try:
            self._check_place(link, 0)
            link.send(encode(own))
            while not select.select([link], [], [], BEAT_S)[0]:
                self.beat()
            answer = decode(link.recv(time.monotonic() + SILENCE_S))
            if not link.is_accepted(self.nodes.keys):  # it may have taken hours until all were there
                raise ProtocolError("the key of machine 0's node is no longer accepted")
        finally:
            link.close()
        if not isinstance(answer, NodeWelcome | NodeRefused):
            raise ProtocolError(f"a {type(answer).__name__} instead of a welcome")
        return answer

    def _connected(self, own: LinkHello, welcome: NodeWelcome) -> tuple[RankLink, RankReport]:
        link = None
        try:
            link = connect_rank(*welcome.addresses[own.to], self.nodes.keys)
            self._check_place(link, self.nodes.node_of(own.to))
            link.send(encode(own))
            hello = decode_as(link.recv(time.monotonic() + SILENCE_S), LinkHello)
            if (hello.token, hello.rank, hello.to) != (own.token, own.to, own.rank):
                raise ProtocolError(f"rank {hello.rank} answered")
        except (OSError, ProtocolError, KeyError) as error:
            if link is not None:
                link.close()
            raise GroupError(f"rank {own.rank} cannot connect to rank {own.to}: {error}") from error
        return link, hello.report

    def _accepted(self, caller: RankCaller, own: LinkHello, missing: set[int]) -> LinkHello | None:
        """What a caller says, if it is one of the missing ranks; else it is turned away."""
        try:
            hello = decode_as(caller.first, LinkHello)
            if (hello.token, hello.to) != (own.token, own.rank) or hello.rank not in missing:
                raise ProtocolError("it is of another incarnation")
            self._check_place(caller.link, self.nodes.node_of(hello.rank))
            caller.link.send(encode(structs.replace(own, to=hello.rank)))
        except (OSError, ProtocolError) as error:
            _turn_away(caller.link, caller.host, error)
            return None
        return hello

    def _check_place(self, link: RankLink, node: int) -> None:
        """Raises ProtocolError if the other end is not that machine."""
        reason = self.nodes.why_not_there(link, node)
        if reason:
            raise ProtocolError(reason)


def _turn_away(link: RankLink, host: str, why: Exception) -> None:
    _not_admitted(host, why)
    link.close()


def _not_admitted(host: str, why: Exception) -> None:
    log.warning("%s is not admitted to this worker: %s", host, why)
