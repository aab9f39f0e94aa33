"""The processes of a worker whose ranks divide its model: what they share, and what a follower runs.

::

    supervisor         RankGroup: memory of their exchanges and a table of what each says of itself --fork--> all ranks
    leader             run_worker (``worker_process``): the whole of a worker, with a rank's part of the model
    followers          run_follower: the leader's steps, with their parts

All ranks compute in the KV pages of the one ``KvMemoryFile`` of their worker, each its layers and heads.  A group is
new for every incarnation.  When one rank ends, the supervisor ends the others: none looks whether another has ended.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import numpy as np

from penstock.config.cpu_cores import RankCores
from penstock.config.mesh import Mesh
from penstock.engine.models.interface import Model
from penstock.engine.runner.rank_group import Follower, LeaderProgram, StepChannel
from penstock.engine.runner.sharded_model import ShardedModel, stage_program
from penstock.kernels.operands import KvShape
from penstock.kernels.ops import Ops, SharedProgram, StepProgram
from penstock.kv.page_memory import KvLayout, KvMemoryFile
from penstock.launch.rendezvous import Rendezvous, WorkerNodes
from penstock.parallel.collectives.interface import PointToPoint
from penstock.parallel.collectives.nodes import NodeCollectives, RemoteRank
from penstock.parallel.collectives.shm import SPIN_US, ShmCollectives, ShmMesh
from penstock.parallel.shard import ModelShard
from penstock.wire.gateway_messages import RankReport
from penstock.wire.rank_link import listen_for_ranks
from penstock.wire.rendezvous_messages import NodeHello, NodeWelcome, decode_as, decode_report, encode

log = logging.getLogger("penstock.rank")


REPORT_S = 0.5
"""Between two reports of a rank to a leader on another machine."""

ANY_HOST = "0.0.0.0"  # noqa: S104 - who connects proves that it has the deployment's keys
"""Where the ranks of machines other than machine 0 listen: which of its addresses others use is seen by machine 0."""


def _nothing() -> None:
    """What is done while nothing comes."""


class _Word(IntEnum):
    """A column of the table; 8 bytes each."""

    PID = 0
    WEIGHT_BYTES = 1
    KV_BYTES = 2
    STEP_CPU_NS = 3


class RankGroup:
    """What the ranks of one incarnation of a worker share on this machine.  Processes that are forked later have it."""

    def __init__(self, mesh: Mesh, *, crowded: bool, nodes: WorkerNodes | None = None) -> None:
        """``crowded``: there are fewer cores than ranks, so who waits sleeps at once.  ``nodes``: the machines, where
        there are several.  Raises ConfigError if ranks of other machines cannot connect to this one."""
        self.mesh = mesh
        self.leader = mesh.leader
        self.nodes = nodes
        self.ranks = range(mesh.ranks) if nodes is None else nodes.ranks
        self.first = self.leader if self.leader in self.ranks else self.ranks[0]
        """The rank that is the worker's process on this machine."""
        self.collectives = ShmMesh(mesh)
        self.spin_us = 0.0 if crowded else SPIN_US
        self._table = np.frombuffer(mmap.mmap(-1, mesh.ranks * len(_Word) * 8), np.int64).reshape(-1, len(_Word))
        self._listening = {} if nodes is None else _listening(nodes)
        self._everybody: ShmCollectives | None = None
        self._links: dict[int, RemoteRank] = {}
        self._elsewhere: dict[int, RankReport] = {}
        self.fault_elsewhere = ""
        """How the incarnation before this one crashed on another machine, as the leader knows once it has joined."""

    @property
    def followers(self) -> tuple[int, ...]:
        """The ranks of this machine but the first."""
        return tuple(rank for rank in self.ranks if rank != self.first)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """The descriptors of sockets that its processes need."""
        return tuple(sock.fileno() for sock in self._listening.values())

    def close_listening(self) -> None:
        """Only processes of ranks accept connections, and only until they have those that they need."""
        for sock in self._listening.values():
            sock.close()

    @property
    def node(self) -> int:
        """The number of this machine."""
        return 0 if self.nodes is None else self.nodes.place.node

    def join(self, own: RankIdentity, events: RankEvents) -> int:
        """This process is that rank: connect it to those on other machines.  The number of KV pages that all have.

        Raises GroupError; ConfigError if machine 0 refuses this one.
        """
        if self.nodes is None:
            self._begin(own, own.pages)
            return own.pages
        rendezvous = Rendezvous(self.nodes, self._listening, events.beat)
        welcome = self._welcome(own, rendezvous)
        self._begin(own, welcome.pages)
        for other, (link, theirs) in rendezvous.connect(own.rank, welcome, self._own_report(own.rank)).items():
            self._elsewhere[other] = theirs
            remote = RemoteRank(link, f"rank {other}", on_lost=events.on_lost, on_report=self._on_report)
            self._links[other] = remote
            remote.start()
        self.close_listening()
        return welcome.pages

    def _welcome(self, own: RankIdentity, rendezvous: Rendezvous) -> NodeWelcome:
        """What machine 0 says once all are there; the first rank of each tells the others."""
        local = self._local(own.rank)
        if own.rank != self.first:
            return decode_as(local.recv_message(self.first), NodeWelcome)
        ports = {rank: sock.getsockname()[1] for rank, sock in self._listening.items()}
        hello, leads = own.hello(rendezvous.nodes, ports), own.rank == self.leader
        welcome = rendezvous.lead(hello, own.max_model_len) if leads else rendezvous.follow(hello)
        self.fault_elsewhere = rendezvous.fault_elsewhere
        for other in self.followers:
            local.send_message(encode(welcome), other)
        return welcome

    def everybody(self, rank: int, check: Callable[[], None] = _nothing) -> StepChannel:
        """The group of all ranks.  ``check``: called while one of another machine is waited for."""
        local = self._local(rank)
        return NodeCollectives(local, self._links, check) if self._links else local

    def pipeline(self, rank: int, check: Callable[[], None] = _nothing) -> PointToPoint:
        """The group of ranks with the same part of a layer."""
        local, group = self.collectives.pipeline(rank, spin_us=self.spin_us), self.mesh.pipeline_group(rank)
        links = {group.index(other): link for other, link in self._links.items() if other in group}
        return NodeCollectives(local, links, check) if links else local

    def _local(self, rank: int) -> ShmCollectives:
        """The group of all ranks, as far as they are on this machine: one in a process, which counts what has come."""
        if self._everybody is None:
            self._everybody = self.collectives.everybody(rank)
        return self._everybody

    def _begin(self, own: RankIdentity, pages: int) -> None:
        self._table[own.rank] = os.getpid(), own.weight_bytes, own.page_bytes * pages, 0

    def count_step_cpu(self, rank: int) -> None:
        """A step has ended: how long all threads of this process have computed since it began."""
        self._table[rank, _Word.STEP_CPU_NS] = time.process_time_ns()

    def send_report(self, rank: int) -> None:
        """Tell the leader on another machine what this rank says of itself."""
        if self.leader in self._links:
            self._links[self.leader].send_report(encode(self._own_report(rank)))

    def reports(self) -> tuple[RankReport, ...]:
        """What all ranks say of themselves."""
        return tuple(
            self._elsewhere[rank] if rank in self._elsewhere else self._own_report(rank)
            for rank in range(self.mesh.ranks)
        )

    def _own_report(self, rank: int) -> RankReport:
        pid, weights, kv, cpu_ns = self._table[rank].tolist()
        return RankReport(
            rank=rank, node=self.node, pid=pid, weight_bytes=weights, kv_bytes=kv, step_cpu_s=cpu_ns / 1e9
        )

    def _on_report(self, record: bytes) -> None:
        report = decode_report(record)
        if report.rank in self._elsewhere:
            self._elsewhere[report.rank] = report


def _listening(nodes: WorkerNodes) -> dict[int, socket.socket]:
    """The sockets of this machine's ranks that others connect to.  Raises ConfigError."""
    sockets: dict[int, socket.socket] = {}
    for rank in nodes.ranks:
        if nodes.listens(rank):
            host = nodes.master.listen if nodes.place.node == 0 else ANY_HOST
            is_master = nodes.place.node == 0 and rank == nodes.mesh.leader
            sockets[rank] = listen_for_ranks(host, nodes.master.port if is_master else 0)
    return sockets


@dataclass(frozen=True, slots=True, kw_only=True)
class RankIdentity:
    """What a rank has of a worker, and what its machine must have in common with the others."""

    rank: int
    weight_bytes: int
    page_bytes: int  # of a page, those that it writes
    fingerprint: str
    numerics: str
    kv: str  # layout of the whole model's pages
    pages: int
    max_model_len: int
    predecessor_fault: str  # how the worker's incarnation before this one crashed here; empty: it did not

    def hello(self, nodes: WorkerNodes, ports: dict[int, int]) -> NodeHello:
        """To machine 0.  ``ports``: where this one's ranks listen."""
        return NodeHello(
            node=nodes.place.node,
            nodes=nodes.place.nodes,
            plan=nodes.mesh.name,
            fingerprint=self.fingerprint,
            numerics=self.numerics,
            kv=self.kv,
            pages=self.pages,
            ports=ports,
            predecessor_fault=self.predecessor_fault,
        )


@dataclass(frozen=True, slots=True)
class RankEvents:
    """What the process of a rank calls while it waits for other machines, and when one has gone, with the reason; a
    follower also when it can begin."""

    beat: Callable[[], None]
    on_lost: Callable[[str], None]
    on_ready: Callable[[], None] = _nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """What the process of one rank has: the group, its part of the model, and its worker's pages."""

    group: RankGroup
    shard: ModelShard
    model: Model
    kv: KvMemoryFile
    identity: RankIdentity

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def kv_shape(self) -> KvShape:
        """The rank's part of the pages."""
        return self.shard.spec.kv

    def join(self, events: RankEvents) -> int:
        """This process is the rank: connect it to other machines.  Returns the number of KV pages that all have."""
        return self.group.join(self.identity, events)

    def connected(self) -> Model:
        """The rank's part, connected to the other ranks of its stage; in its process only."""
        return ShardedModel(
            self.model, self.shard, self.group.collectives.tensor(self.rank, spin_us=self.group.spin_us)
        )

    def staged(self, program: SharedProgram, ops: Ops, check: Callable[[], None] = _nothing) -> SharedProgram:
        """The program of that model, connected to the other stages; in its process only, which has joined.  ``check``:
        called while it waits for a stage on another machine."""
        return stage_program(program, ops, self.group.pipeline(self.rank, check), self.shard)

    def lead(self, program: SharedProgram, ops: Ops, check: Callable[[], None]) -> StepProgram:
        """The program of the leader's process, which all ranks run."""
        channel, groups = self.group.everybody(self.rank), self.kv_shape.layer_groups
        own = self.staged(program, ops, check)
        return LeaderProgram(own, channel, groups, on_step=lambda: self.group.count_step_cpu(self.rank))


def share_bytes(layout: KvLayout, share: KvShape) -> int:
    """Bytes of a page that a rank writes."""
    heads = len(set(share.share.heads)) if share.share is not None else share.kv_heads
    return share.layers * heads * share.head_bytes(layout.dtype) * layout.page_tokens


def run_follower(
    rank: RankResources,
    ops: Ops,
    cores: RankCores,
    *,
    niceness: int,
    events: RankEvents,
    close: Callable[[], None],
) -> int:
    """Compute the leader's steps until this process is ended.  ``close``: of what only other processes need.

    Raises GroupError.
    """
    os.nice(niceness)
    if cores.cpus:
        os.sched_setaffinity(0, cores.cpus)
    memory = rank.kv.map_own()
    close()
    kv = ops.new_kv(rank.kv_shape, pages=memory.pages, memory=memory.buffer)
    rank.join(events)
    model, group = rank.connected(), rank.group
    program = rank.staged(cast(SharedProgram, ops.record(model, kv)), ops, events.beat)
    follower = Follower(model, ops, program, scores=rank.shard.is_last)
    events.on_ready()
    follower.run(group.everybody(rank.rank, events.beat), group.leader, _StepCount(group, rank.rank, events.beat))
    return 0


class _StepCount:
    """After each step of a follower: beats, counts what it cost, and tells a leader on another machine now and then."""

    def __init__(self, group: RankGroup, rank: int, beat: Callable[[], None]) -> None:
        self._group = group
        self._rank = rank
        self._beat = beat
        self._due = 0.0

    def __call__(self) -> None:
        self._beat()
        self._group.count_step_cpu(self._rank)
        now = time.monotonic()
        if now >= self._due:
            self._due = now + REPORT_S
            self._group.send_report(self._rank)
