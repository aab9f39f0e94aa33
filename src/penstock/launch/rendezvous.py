"""How the machines of one worker find each other, anew for each incarnation, and how their ranks connect.

::

    machine 0, its leader                  every other machine, its first rank
    listens at --master-addr <-- NodeHello --- its model, kernels, plan, room for KV pages, ports
    all are there            --- NodeWelcome -> token of this incarnation, where every rank listens
                             or NodeRefused --> why it does not belong here: it ends
    every rank connects to the ranks that it exchanges with on machines with lower numbers, and says the token:
        a rank of an incarnation that has ended gets no further

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

from penstock.config.base import host_and_port
from penstock.config.mesh import Mesh, NodePlace
from penstock.errors import ConfigError, GroupError, ProtocolError
from penstock.launch.remote_workers import FIRST_NOTE_S, WAITING_NOTE_S
from penstock.types import PAGE_TOKENS
from penstock.wire.gateway_messages import RankReport
from penstock.wire.node_keys import HostKeys
from penstock.wire.rank_link import RankLink, accept_rank, connect_rank
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

NOT_ADMITTED = "%s is not admitted to this worker: %s"


@dataclass(frozen=True, slots=True)
class MasterAddress:
    """Where machine 0 of a worker is reached, and the host or address at which it listens there."""

    host: str
    port: int
    listen: str

    @classmethod
    def of(cls, endpoint: str, listen: str = "") -> MasterAddress:
        """The address of ``tcp://HOST:PORT``; ``listen``: such an endpoint, if it listens at another one."""
        host, port = host_and_port(endpoint)
        return cls(host, port, host_and_port(listen)[0] if listen else host)


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
        own = self.mesh.node_of(rank, self.place.nodes)
        for other in range(self.mesh.ranks):
            near = abs(other - rank) == tensor or leader in (rank, other)
            if near and self.mesh.node_of(other, self.place.nodes) != own:
                yield other

    def connects(self, rank: int, other: int) -> bool:
        """Whether the rank connects to the other one, which otherwise connects to it."""
        nodes = self.place.nodes
        return self.mesh.node_of(rank, nodes) > self.mesh.node_of(other, nodes)

    def listens(self, rank: int) -> bool:
        """Whether any rank connects to this one."""
        return any(not self.connects(rank, other) for other in self.peers(rank))


@dataclass(slots=True)
class Rendezvous:
    """One process' part of it.  ``listening``: this machine's sockets by rank; the leader's is at ``master``.

    ``beat`` is called at least every ``BEAT_S``, however long others take.
    """

    nodes: WorkerNodes
    listening: Mapping[int, socket.socket]
    beat: Callable[[], None]
    _joined: dict[int, tuple[RankLink, NodeHello]] = field(default_factory=dict[int, tuple[RankLink, NodeHello]])
    _noted: float = 0.0

    def lead(self, own: NodeHello, max_model_len: int) -> NodeWelcome:
        """Wait until all machines are there.  ``own``: what machine 0 has."""
        missing = self._missing()
        begun = time.monotonic()
        while missing:
            self._note("waiting for machine %s of this worker", ", ".join(map(str, missing)), begun)
            door = self.listening[self.nodes.mesh.leader]
            links = {link.fileno(): node for node, (link, _) in self._joined.items()}
            ready, _, _ = select.select([door.fileno(), *links], [], [], BEAT_S)
            self.beat()
            for descriptor in links.keys() & ready:
                self._joined.pop(links[descriptor])[0].close()  # it says nothing before it is welcome, so it is gone
            if door.fileno() in ready:
                self._admit(door, own, max_model_len)
            missing = self._missing()
        addresses = {
            rank: (link.peer_host, port) for link, hello in self._joined.values() for rank, port in hello.ports.items()
        }
        addresses |= {rank: (self.nodes.master.host, port) for rank, port in own.ports.items()}
        pages = min(own.pages, *(hello.pages for _, hello in self._joined.values()))
        welcome = NodeWelcome(token=secrets.token_bytes(TOKEN_BYTES), pages=pages, addresses=addresses)
        for node, (link, _) in self._joined.items():
            try:
                link.send(encode(welcome))
            except OSError as error:
                raise GroupError(f"machine {node} of this worker has gone: {error}") from error
            link.close()
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
        deadline = time.monotonic() + LINKS_S
        for other in sorted(peer for peer in peers if self.nodes.connects(rank, peer)):
            links[other] = self._connected(rank, other, welcome, report)
            self.beat()
        while missing := peers - links.keys():
            self.beat()
            if time.monotonic() > deadline:
                raise GroupError(f"rank {min(missing)} did not connect within {LINKS_S:g} s")
            ready, _, _ = select.select([self.listening[rank]], [], [], BEAT_S)
            accepted = self._accepted(rank, welcome, report, missing) if ready else None
            if accepted is not None:
                links[accepted[0]] = accepted[1:]
        return links

    def _missing(self) -> list[int]:
        return [node for node in range(1, self.nodes.place.nodes) if node not in self._joined]

    def _note(self, text: str, what: str, begun: float) -> None:
        """Log who is waited for, not at once and not often."""
        now = time.monotonic()
        if now - max(begun, self._noted) >= (WAITING_NOTE_S if self._noted else FIRST_NOTE_S):
            self._noted = now
            log.warning(text, what)

    def _admit(self, door: socket.socket, own: NodeHello, max_model_len: int) -> None:
        caller = self._caller(door)
        if caller is None:
            return
        link, host = caller
        try:
            hello = decode_as(link.recv(), NodeHello)
            reason = self._why_not(own, hello, max_model_len)
            if reason:
                link.send(encode(NodeRefused(reason=reason)))
                raise ProtocolError(reason)
        except (OSError, ProtocolError) as error:  # a rank of an earlier incarnation says something else
            _turn_away(link, host, error)
            return
        before = self._joined.pop(hello.node, None)
        if before is not None:
            before[0].close()
        self._joined[hello.node] = link, hello
        log.info("machine %d of this worker has joined from %s", hello.node, host)

    def _why_not(self, own: NodeHello, hello: NodeHello, max_model_len: int) -> str:
        """Why a machine does not belong to this worker; empty if it does."""
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
            link.send(encode(own))
            while not select.select([link], [], [], BEAT_S)[0]:
                self.beat()
            answer = decode(link.recv())
        finally:
            link.close()
        if not isinstance(answer, NodeWelcome | NodeRefused):
            raise ProtocolError(f"a {type(answer).__name__} instead of a welcome")
        return answer

    def _connected(
        self, rank: int, other: int, welcome: NodeWelcome, report: RankReport
    ) -> tuple[RankLink, RankReport]:
        try:
            link = connect_rank(*welcome.addresses[other], self.nodes.keys)
            link.send(encode(LinkHello(token=welcome.token, rank=rank, to=other, report=report)))
            hello = decode_as(link.recv(), LinkHello)
        except (OSError, ProtocolError, KeyError) as error:
            raise GroupError(f"rank {rank} cannot connect to rank {other}: {error}") from error
        if (hello.token, hello.rank, hello.to) != (welcome.token, other, rank):
            raise GroupError(f"rank {rank} connected to rank {other}, and rank {hello.rank} answered")
        return link, hello.report

    def _accepted(
        self, rank: int, welcome: NodeWelcome, report: RankReport, missing: set[int]
    ) -> tuple[int, RankLink, RankReport] | None:
        caller = self._caller(self.listening[rank])
        if caller is None:
            return None
        link, host = caller
        try:
            hello = decode_as(link.recv(), LinkHello)
            if (hello.token, hello.to) != (welcome.token, rank) or hello.rank not in missing:
                raise ProtocolError("it is of another incarnation")
            link.send(encode(LinkHello(token=welcome.token, rank=rank, to=hello.rank, report=report)))
        except (OSError, ProtocolError) as error:
            _turn_away(link, host, error)
            return None
        return hello.rank, link, hello.report

    def _caller(self, listening: socket.socket) -> tuple[RankLink, str] | None:
        """The next connection of a caller that has the keys, and its host; None for any other caller."""
        host = "who has gone already"
        try:
            sock, (host, *_) = listening.accept()
            return accept_rank(sock, self.nodes.keys), host
        except (OSError, ProtocolError) as error:
            log.warning(NOT_ADMITTED, host, error)
            return None


def _turn_away(link: RankLink, host: str, why: Exception) -> None:
    log.warning(NOT_ADMITTED, host, why)
    link.close()
