"""Ranks of one process that read each other's memory (``kernels.triton.peers``), stepped in turn."""

from __future__ import annotations

from typing import Any

import torch

from penstock.kernels.triton.peers import PeerMemory, PeerTable
from penstock.parallel.collectives.interface import Collectives

PROGRAMS = 2


class PeerMemories:
    """The memory of all ranks of some stages of equal size."""

    def __init__(self, ops: Any, ranks: int, *, half: int, stages: int = 1) -> None:
        self._ranks = ranks
        self.memories = [
            PeerMemory.allocate(ops.form, ranks, half=half, programs=PROGRAMS) for _ in range(ranks * stages)
        ]

    def connect(self, group: Collectives, rank: int) -> WithPeers:
        """A rank's connection to its stage, over the memory of the stage's ranks."""
        first = rank - group.rank
        addresses = [memory.address for memory in self.memories[first : first + self._ranks]]

        def meet() -> None:
            group.all_gather(torch.zeros((1, 1)))

        return WithPeers(group, self.memories[rank].table(group.rank, addresses, between=meet))


class WithPeers:
    """A rank's collectives, and where its peers' memory is."""

    def __init__(self, group: Collectives, peers: PeerTable) -> None:
        self._group = group
        self.peers = peers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    rank: int
    size: int
