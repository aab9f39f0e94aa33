"""``--parallel auto``: whether a worker on processors is one process or several tensor ranks.

By predicted seconds a token, and only where there is room for it: the weights are in the memory of one host either way,
but workers whose ranks differ have each its own copy of what they cut.  Pure arithmetic with defaults for a core, a
NUMA node and an exchange (docs/parallel.md says where they come from)::

    one process     bytes of weights / what its cores read      + operations a layer x barrier of all its threads
    tensor ranks    the same bytes / the same                   + operations a layer x barrier of a rank's threads
                                                                + two exchanges a layer

Weights are interleaved over the nodes that a worker has, so ranks read no faster than threads.  Pipeline stages are
never chosen: on one host they make no token faster, and their memory is the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config.cpu_cores import CoreAssignment, CoreShare, WorkerRoles
from penstock.config.facts import MachineFacts, ModelFacts
from penstock.config.kv_memory import format_size
from penstock.config.mesh import Mesh
from penstock.types import Role, WorkerId

CORE_BYTES_S = 25e9
"""Weights that one core reads and multiplies in a second: 1.2 billion in bf16 take about 0.1 s on a Zen 3 core."""

NODE_BYTES_S = 100e9
"""What the memory of one NUMA node gives to all of its cores: half of eight channels of DDR4-3200."""

CORE_FLOPS = 60e9
"""Operations a second of one core in chunks of prompts, AVX2."""

JOIN_S = 3.2e-6
"""An exchange of 8 KB by two ranks that spin (docs/lab-notes.md); each further rank takes as long."""

JOIN_BYTES_S = 11e9
"""Bytes a second of long exchanges: 128 KB take 11.2 us."""

OPERATIONS = 6
"""Of a layer, after each of which all threads of a process wait for each other."""

BARRIER_S = 1e-7
"""Such a wait, for each thread that takes part."""

CHUNK_TOKENS = 512
"""Of a prompt in a step, where a prefill worker's seconds a token are predicted."""

MIN_GAIN = 0.05
"""By which ranks must be faster than one process to be chosen."""


@dataclass(frozen=True, slots=True)
class WorkerCores:
    """The cores of one worker, over this many NUMA nodes."""

    cores: int
    nodes: int
    threads: int | None = None  # of each process, where ``--threads`` says so

    def threads_of(self, ranks: int) -> int:
        """Threads of each of so many ranks; 0: they would share cores."""
        each = self.threads or self.cores // ranks
        return each if ranks == 1 or each * ranks <= self.cores else 0


@dataclass(frozen=True, slots=True)
class ReadWeights:
    """What a token takes of a model.  ``numbers``: of the weights that it is multiplied with, of so many bytes each."""

    numbers: int
    number_bytes: float
    layers: int
    hidden: int


def token_s(model: ReadWeights, role: Role, own: WorkerCores, mesh: Mesh) -> float:
    """Predicted seconds of a token: from one of a lone request to its next, or of a prompt in a prefill worker.

    The stages of a lone request compute one after the other, each with the cores of its ranks.
    """
    threads = own.threads_of(mesh.ranks)
    cores = threads * mesh.tensor * (mesh.pipeline if role is Role.PREFILL else 1)
    rows = CHUNK_TOKENS if role is Role.PREFILL else 1
    read = model.numbers * model.number_bytes / min(cores * CORE_BYTES_S, own.nodes * NODE_BYTES_S)
    compute = 2 * model.numbers * rows / (cores * CORE_FLOPS)
    waits = model.layers * OPERATIONS * BARRIER_S * threads
    exchange = JOIN_S + (rows - 1) * 4 * model.hidden / JOIN_BYTES_S
    exchanges = 2 * model.layers * (mesh.tensor - 1) + mesh.pipeline - 1
    return (max(read, compute) + waits + exchanges * exchange) / rows


def choose_meshes(
    roles: WorkerRoles,
    assigned: CoreAssignment,
    machine: MachineFacts,
    model: ModelFacts,
    *,
    threads: int | None,
    number_bytes: int,
    room: int,
    why_one: str,
) -> tuple[dict[WorkerId, Mesh], str]:
    """The mesh of each worker of ``roles``, and one line that says why.

    ``assigned``: their cores as single processes.  ``threads``: what ``--threads`` asks for.  ``room``: bytes left for
    a second copy of the weights.  ``why_one``: why this model is not divided in this service; empty: it can be.
    """
    meshes, said = dict.fromkeys((worker for worker, _ in roles), Mesh()), dict[str, list[str]]()
    weights = model.parameters * number_bytes
    for (worker, role), share in zip(roles, assigned.shares, strict=True):
        own = _cores_of(share, machine, len(roles), threads)
        ways = [ways for ways in (1, *model.tensor_ways) if own.threads_of(ways)]
        read = ReadWeights(model.token_numbers, number_bytes, model.layers, model.hidden)
        seconds = {ways: token_s(read, role, own, Mesh(tensor=ways)) for ways in ways}
        best = min(seconds, key=lambda ways: (seconds[ways], ways))
        chosen = best if not why_one and seconds[best] <= (1 - MIN_GAIN) * seconds[1] else 1
        meshes[worker] = Mesh(tensor=chosen)
        said.setdefault(_reason(own, seconds, chosen, why_one or model.why_not_divided), []).append(worker)
    text = "; ".join(f"{', '.join(workers)}: {reason}" for reason, workers in said.items())
    copies = len(set(meshes.values())) - 1
    if copies and weights > room:
        meshes = dict.fromkeys(meshes, Mesh())
        text = (
            f"one process a worker: ranks need a second copy of {format_size(weights)} of weights, and "
            f"{format_size(max(0, room))} are free"
        )
    nodes = _plural(len({core.numa_node for core in machine.physical_cores}), "NUMA node")
    memory = f"{format_size(weights)} of weights in {format_size(machine.memory_bytes)} free on {nodes}"
    return meshes, f"--parallel auto: {text}; {memory}"


def _reason(own: WorkerCores, seconds: Mapping[int, float], chosen: int, why_one: str) -> str:
    name = "one process" if chosen == 1 else f"tp{chosen}"
    times = f"{1e3 * seconds[chosen]:.3g} ms a token predicted"
    cores = f"on {_plural(own.cores, 'core')}"
    if why_one:
        return f"one process, {times} {cores}: {why_one}"
    others = _best(seconds, [ways for ways in seconds if (ways == 1) != (chosen == 1)])
    if others is None:
        return f"{name}, {times} {cores}: no two ranks would have a core each"
    other = "one process" if others == 1 else f"tp{others}"
    return f"{name}, {times} {cores}, {other} {1e3 * seconds[others]:.3g}"


def _best(seconds: Mapping[int, float], ways: Sequence[int]) -> int | None:
    return min(ways, key=lambda one: seconds[one], default=None)


def _cores_of(share: CoreShare, machine: MachineFacts, workers: int, threads: int | None) -> WorkerCores:
    """A worker that is not pinned has an equal part of the machine's usable cores, on all its nodes."""
    cores = [core for core in machine.physical_cores if not share.cpus or not set(share.cpus).isdisjoint(core.cpus)]
    count = len(cores) if share.cpus else max(1, machine.cores // workers)
    return WorkerCores(count, _nodes(core.numa_node for core in cores), threads)


def _nodes(nodes: Iterable[int]) -> int:
    return max(1, len(set(nodes)))


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
