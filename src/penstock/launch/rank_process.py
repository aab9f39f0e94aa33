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
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import cast

import numpy as np

from penstock.config.cpu_cores import RankCores
from penstock.config.mesh import Mesh
from penstock.engine.models.interface import Model
from penstock.engine.runner.rank_group import Follower, LeaderProgram, leader_of
from penstock.engine.runner.sharded_model import ShardedModel, stage_program
from penstock.kernels.operands import KvShape
from penstock.kernels.ops import Ops, SharedProgram, StepProgram
from penstock.kv.page_memory import KvLayout, KvMemoryFile
from penstock.parallel.collectives.shm import SPIN_US, ShmMesh
from penstock.parallel.shard import ModelShard
from penstock.wire.gateway_messages import RankReport

log = logging.getLogger("penstock.rank")


class _Word(IntEnum):
    """A column of the table; 8 bytes each."""

    PID = 0
    WEIGHT_BYTES = 1
    KV_BYTES = 2
    STEP_CPU_NS = 3


class RankGroup:
    """What the ranks of one incarnation of a worker share.  Processes that are forked later have it."""

    def __init__(self, mesh: Mesh, *, crowded: bool) -> None:
        """``crowded``: there are fewer cores than ranks, so who waits sleeps at once."""
        self.mesh = mesh
        self.leader = leader_of(mesh)
        self.collectives = ShmMesh(mesh)
        self.spin_us = 0.0 if crowded else SPIN_US
        self._table = np.frombuffer(mmap.mmap(-1, mesh.ranks * len(_Word) * 8), np.int64).reshape(-1, len(_Word))

    @property
    def followers(self) -> tuple[int, ...]:
        """All ranks but the leader."""
        return tuple(rank for rank in range(self.mesh.ranks) if rank != self.leader)

    def begin(self, rank: int, *, weight_bytes: int, kv_bytes: int) -> None:
        """This process is that rank."""
        self._table[rank] = os.getpid(), weight_bytes, kv_bytes, 0

    def count_step_cpu(self, rank: int) -> None:
        """A step has ended: how long all threads of this process have computed since it began."""
        self._table[rank, _Word.STEP_CPU_NS] = time.process_time_ns()

    def reports(self) -> tuple[RankReport, ...]:
        """What all ranks say of themselves."""
        return tuple(
            RankReport(rank=rank, pid=pid, weight_bytes=weights, kv_bytes=kv, step_cpu_s=cpu_ns / 1e9)
            for rank, (pid, weights, kv, cpu_ns) in enumerate(self._table.tolist())
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RankResources:
    """What the process of one rank has: the group, its part of the model, and its worker's pages."""

    group: RankGroup
    shard: ModelShard
    model: Model
    weight_bytes: int
    kv: KvMemoryFile

    @property
    def rank(self) -> int:
        return self.shard.rank

    @property
    def kv_shape(self) -> KvShape:
        """The rank's part of the pages."""
        return self.shard.spec.kv

    def connected(self) -> Model:
        """The rank's part, connected to the other ranks of its stage; in its process only."""
        return ShardedModel(
            self.model, self.shard, self.group.collectives.tensor(self.rank, spin_us=self.group.spin_us)
        )

    def staged(self, program: SharedProgram, ops: Ops) -> SharedProgram:
        """The program of that model, connected to the other stages; in its process only."""
        stages = self.group.collectives.pipeline(self.rank, spin_us=self.group.spin_us)
        return stage_program(program, ops, stages, self.shard)

    def begin(self) -> None:
        """This process is the rank."""
        kv_bytes = share_bytes(self.kv.layout, self.kv_shape) * self.kv.pages
        self.group.begin(self.rank, weight_bytes=self.weight_bytes, kv_bytes=kv_bytes)

    def lead(self, program: SharedProgram, ops: Ops) -> StepProgram:
        """The program of the leader's process, which all ranks run."""
        self.begin()
        channel, groups = self.group.collectives.everybody(self.rank), self.kv_shape.layer_groups
        own = self.staged(program, ops)
        return LeaderProgram(own, channel, groups, on_step=lambda: self.group.count_step_cpu(self.rank))


def share_bytes(layout: KvLayout, share: KvShape) -> int:
    """Bytes of a page that a rank writes."""
    heads = len(set(share.share.heads)) if share.share is not None else share.kv_heads
    return share.layers * heads * share.head_bytes(layout.dtype) * layout.page_tokens


def run_follower(rank: RankResources, ops: Ops, cores: RankCores, niceness: int, close: Callable[[], None]) -> int:
    """Compute the leader's steps until this process is ended.  ``close``: of what only other processes need."""
    os.nice(niceness)
    if cores.cpus:
        os.sched_setaffinity(0, cores.cpus)
    memory = rank.kv.map_own()
    close()
    kv = ops.new_kv(rank.kv_shape, pages=memory.pages, memory=memory.buffer)
    model = rank.connected()
    program = rank.staged(cast(SharedProgram, ops.record(model, kv)), ops)
    rank.begin()
    channel = rank.group.collectives.everybody(rank.rank)
    follower = Follower(model, ops, program, scores=rank.shard.is_last)
    follower.run(channel, rank.group.leader, lambda: rank.group.count_step_cpu(rank.rank))
    return 0
