"""How the ranks of one worker divide a model: tensor parallelism within a layer, pipeline stages of whole layers.

A rank is a number from 0.  Its place in the mesh says which part of each layer and which stage it computes.  The ranks
of one stage, which exchange most, follow one another::

    tp2,pp3    stage 0: ranks 0 1    stage 1: ranks 2 3    stage 2: ranks 4 5

Pure: knows no models, devices or processes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from penstock.errors import ConfigError

TENSOR_WAYS = (1, 2, 4, 8)
MAX_DEVICES = 1024

_AXIS = re.compile(r"([a-z]+)(\d{1,6})")
_FIELDS: Final = {"tp": "tensor", "pp": "pipeline"}
_UNSUPPORTED: Final = {"ep": "expert", "cp": "context", "dp": "data"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A rank's coordinates in a mesh, each counted from 0."""

    tensor: int
    stage: int


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlace:
    """Which of the machines of a worker this is."""

    nodes: int = 1
    node: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """Ranks per layer (``tensor``: 1, 2, 4 or 8) times stages (``pipeline``).  Raises ConfigError for other sizes."""

    tensor: int = 1
    pipeline: int = 1

    def __post_init__(self) -> None:
        if self.tensor not in TENSOR_WAYS:
            raise ConfigError(
                f"tp{self.tensor}: tensor parallelism takes 1, 2, 4 or 8 ranks, because sums are cut into 8 segments; "
                f"tp{max(ways for ways in TENSOR_WAYS if ways <= max(1, self.tensor))} would work"
            )
        if not 1 <= self.ranks <= MAX_DEVICES:
            raise ConfigError(f"{self.name}: {self.ranks} ranks, 1 to {MAX_DEVICES} are possible")

    @property
    def ranks(self) -> int:
        """The number of all ranks."""
        return self.tensor * self.pipeline

    @property
    def name(self) -> str:
        """The text that ``parse_mesh`` reads, such as "tp2,pp3"; "tp1" for a single rank."""
        sizes = [f"tp{self.tensor}"] if self.tensor != 1 else []
        sizes += [f"pp{self.pipeline}"] if self.pipeline != 1 else []
        return ",".join(sizes) or "tp1"

    def place(self, rank: int) -> Place:
        """The place of a rank.  Raises ValueError for a rank outside the mesh."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} of {self.ranks}")
        return Place(tensor=rank % self.tensor, stage=rank // self.tensor)

    def rank(self, place: Place) -> int:
        """The rank at a place."""
        return place.stage * self.tensor + place.tensor

    def tensor_group(self, rank: int) -> tuple[int, ...]:
        """The ranks of the same stage, in the order of their parts of a layer."""
        first = self.place(rank).stage * self.tensor
        return tuple(range(first, first + self.tensor))

    def pipeline_group(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same part of a layer, in the order of their stages."""
        return tuple(range(self.place(rank).tensor, self.ranks, self.tensor))

    @property
    def leader(self) -> int:
        """The first rank of the last stage, which samples: the one that has a scheduler."""
        return self.ranks - self.tensor

    def node_ranks(self, node: NodePlace) -> range:
        """The ranks on one machine: whole stages, the last ones on machine 0, where the leader is."""
        place = node.nodes - 1 - node.node
        stages = (self.pipeline * each // node.nodes for each in (place, place + 1))
        return range(*(stage * self.tensor for stage in stages))

    def node_of(self, rank: int, nodes: int) -> int:
        """The machine of a rank."""
        return next(node for node in range(nodes) if rank in self.node_ranks(NodePlace(nodes=nodes, node=node)))


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPart:
    """What one machine has of a worker on several."""

    mesh: Mesh
    place: NodePlace


def parse_mesh(text: str) -> Mesh:
    """ "tp2", "pp2", "tp2,pp2": each axis once, in any order.  Raises ConfigError that says what would work."""
    sizes: dict[str, int] = {}
    for part in text.split(","):
        match = _AXIS.fullmatch(part.strip())
        if match is None or match[1] not in (*_FIELDS, *_UNSUPPORTED):
            raise ConfigError(f"plan {text!r} is not understood; expected tp and pp with numbers, such as tp2,pp2")
        axis, size = match[1], int(match[2])
        if axis in _UNSUPPORTED:
            raise ConfigError(f"plan {text!r}: {_UNSUPPORTED[axis]} parallelism is not supported yet; tp and pp are")
        if _FIELDS[axis] in sizes:
            raise ConfigError(f"plan {text!r} has {axis} twice; expected each once, such as tp2,pp2")
        if size < 1:
            raise ConfigError(f"plan {text!r}: {axis} must be at least 1")
        sizes[_FIELDS[axis]] = size
    return Mesh(**sizes)
