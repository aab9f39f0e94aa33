"""Which CPU cores each worker of a host owns, and which it may borrow.  Pure.

A worker stays within one NUMA node if it fits.  It lends the cores that it alone owns.  Cores owned by several workers
are not lent; prefill workers that share them with decode workers run at a lower priority.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.config.facts import PhysicalCore
from penstock.config.schema import CoreLoan
from penstock.errors import ConfigError
from penstock.types import Role, WorkerId

PIN_FROM_THREADS = 4
"""Workers with at least this many kernel threads are pinned to cores; with fewer, Linux's scheduler does better."""

SHARED_PREFILL_NICENESS = 10
"""Niceness of a prefill worker that shares cores with a decode worker: it gets a tenth of them under contention."""

WorkerRoles = tuple[tuple[WorkerId, Role], ...]


CoreSet = tuple[PhysicalCore, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreSettings:
    """The settings of ``serve`` that concern cores."""

    threads: int | None = None  # of each worker
    prefill_cpus: str | None = None  # list of processors, as "0-3,8"
    decode_cpus: str | None = None
    lend: bool = True
    ranks: Mapping[WorkerId, int] = field(default_factory=dict[WorkerId, int])  # of workers that have ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class RankCores:
    """The threads and cores of one rank of a worker."""

    threads: int
    cpus: tuple[int, ...]  # empty: all


@dataclass(frozen=True, slots=True, kw_only=True)
class CoreShare:
    """The threads and cores of one worker."""

    threads: int
    cpus: tuple[int, ...]  # empty: all
    niceness: int = 0
    prefill_niceness: int = 0  # its niceness in the prefill role
    lent_cores: int = 0
    loans: tuple[CoreLoan, ...] = ()
    ranks: tuple[RankCores, ...] = ()  # of a worker with more than one


@dataclass(frozen=True, slots=True)
class CoreAssignment:
    """The cores of all workers of a host."""

    shares: tuple[CoreShare, ...]  # one per worker, in their order
    numa_nodes: tuple[int, ...]  # that weights are interleaved over; empty: all workers are on one node
    notes: tuple[str, ...]
    warnings: tuple[str, ...] = ()


def assign_cores(
    places: WorkerRoles, cores: Sequence[PhysicalCore], usable: int, wishes: CoreSettings
) -> CoreAssignment:
    """Assign ``cores`` to workers.  ``usable``: how many of them a container's quota leaves.  Raises ConfigError."""
    cores = sorted(cores, key=lambda core: (core.numa_node, core.cpus))
    listed = wishes.prefill_cpus is not None or wishes.decode_cpus is not None
    owned = _as_listed(places, cores, wishes) if listed else _carved(cores[:usable], len(places))
    threads = [wishes.threads or max(1, len(own) // _sharers(own, owned)) for own in owned]
    roomy = all(PIN_FROM_THREADS <= count <= len(own) for count, own in zip(threads, owned, strict=True))
    pinned = listed or (roomy and usable >= len(cores))
    alone = [_alone(i, owned) for i in range(len(places))]
    lends = [min(count, len(own)) if wishes.lend else 0 for count, own in zip(threads, alone, strict=True)]
    shares = tuple(
        CoreShare(
            threads=threads[i],
            cpus=_cpus(owned[i]) if pinned else (),
            niceness=SHARED_PREFILL_NICENESS if _gives_way(i, places, owned) else 0,
            prefill_niceness=SHARED_PREFILL_NICENESS if len(alone[i]) < len(owned[i]) else 0,
            lent_cores=lends[i],
            loans=tuple(
                CoreLoan(lender=places[j][0], cores=lends[j], cpus=_cpus(alone[j]) if pinned else ())
                for j in range(len(places))
                if j != i and lends[j]
            ),
            ranks=_rank_cores(owned[i], wishes.ranks.get(places[i][0], 0), threads[i], wishes.threads, pinned=pinned),
        )
        for i in range(len(places))
    )
    nodes = _nodes([core for own in owned for core in own] if pinned else cores)
    return CoreAssignment(
        shares,
        nodes if len(nodes) > 1 else (),
        tuple(_notes(places, owned, shares, nodes)),
        tuple(_crowded_ranks(places, threads, wishes.ranks)),
    )


def parse_cpus(text: str, flag: str) -> frozenset[int]:
    """The processors of "0-3,8", as taskset(1) writes them.  Raises ConfigError."""
    found: set[int] = set()
    for part in text.split(","):
        first, dash, last = (piece.strip() for piece in part.partition("-"))
        numbers = (first, last) if dash else (first, first)
        if not all(n.isascii() and n.isdigit() and len(n) <= 6 for n in numbers) or int(numbers[0]) > int(numbers[1]):
            raise ConfigError(f"{flag} {text}: expected a list of processors such as 0-3,8, got {part.strip()!r}")
        found.update(range(int(numbers[0]), int(numbers[1]) + 1))
    return frozenset(found)


def format_cpus(cpus: Iterable[int]) -> str:
    """ "0-3,8" for 0, 1, 2, 3, 8."""
    runs: list[list[int]] = []
    for cpu in sorted(cpus):
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


# --- who owns what ---------------------------------------------------------------------------------------------------


def _carved(cores: Sequence[PhysicalCore], count: int) -> list[CoreSet]:
    """Equal parts, node by node; with fewer cores than workers, each worker has all."""
    each = len(cores) // count
    if each == 0:
        return [tuple(cores)] * count
    left = {node: [core for core in cores if core.numa_node == node] for node in _nodes(cores)}
    parts = []
    for _ in range(count):
        whole = next((free for free in left.values() if len(free) >= each), None)
        part: list[PhysicalCore] = []
        for free in [whole] if whole is not None else left.values():
            taken = free[: each - len(part)]
            del free[: len(taken)]
            part += taken
        parts.append(tuple(part))
    return parts


def _rank_cores(own: CoreSet, ranks: int, threads: int, asked: int | None, *, pinned: bool) -> tuple[RankCores, ...]:
    """Equal parts of a worker's cores; with fewer cores than ranks, each rank has all.  ``threads``: of the worker."""
    if ranks == 0:
        return ()
    each = asked or max(1, threads // ranks)
    return tuple(RankCores(threads=each, cpus=_cpus(part) if pinned else ()) for part in _carved(own, ranks))


def _crowded_ranks(places: WorkerRoles, threads: Sequence[int], ranks: Mapping[WorkerId, int]) -> Iterator[str]:
    for (worker, _), cores in zip(places, threads, strict=True):
        count = ranks.get(worker, 0)
        if count > cores:
            yield (
                f"{worker} has {count} ranks on {cores} {'core' if cores == 1 else 'cores'}: each exchange "
                "waits until the system has given every rank a turn, so one process is faster"
            )


def _as_listed(places: WorkerRoles, cores: Sequence[PhysicalCore], wishes: CoreSettings) -> list[CoreSet]:
    known = {cpu for core in cores for cpu in core.cpus}
    asked = {
        role: _known(text, f"--{role.value}-cores", known)
        for role, text in ((Role.PREFILL, wishes.prefill_cpus), (Role.DECODE, wishes.decode_cpus))
        if text is not None
    }
    rest = frozenset(known.difference(*asked.values())) or frozenset(known)
    parts: dict[Role, Iterator[CoreSet]] = {}
    for role in (Role.PREFILL, Role.DECODE, Role.ENCODE):
        within = [_within(core, asked.get(role, rest)) for core in cores]
        count = sum(of is role for _, of in places)
        parts[role] = iter(_carved([core for core in within if core.cpus], max(1, count)))
    return [next(parts[role]) for _, role in places]


def _known(text: str, flag: str, known: set[int]) -> frozenset[int]:
    cpus = parse_cpus(text, flag)
    if cpus - known:
        raise ConfigError(
            f"{flag} {text}: this process may use processors {format_cpus(known)}, not {format_cpus(cpus - known)}"
        )
    return cpus


def _within(core: PhysicalCore, cpus: frozenset[int]) -> PhysicalCore:
    return PhysicalCore(cpus=tuple(cpu for cpu in core.cpus if cpu in cpus), numa_node=core.numa_node)


def _sharers(own: CoreSet, owned: Sequence[CoreSet]) -> int:
    """The number of workers that own exactly these cores, and so divide them."""
    return sum(_cpus(other) == _cpus(own) for other in owned)


def _alone(place: int, owned: Sequence[CoreSet]) -> CoreSet:
    """The cores that no other worker owns."""
    others = {cpu for i, other in enumerate(owned) if i != place for cpu in _cpus(other)}
    return tuple(core for core in owned[place] if others.isdisjoint(core.cpus))


def _gives_way(place: int, places: WorkerRoles, owned: Sequence[CoreSet]) -> bool:
    """Whether it is a prefill worker that shares a processor with a decode worker."""
    if places[place][1] is not Role.PREFILL:
        return False
    decode = {cpu for (_, role), own in zip(places, owned, strict=True) if role is Role.DECODE for cpu in _cpus(own)}
    return not decode.isdisjoint(_cpus(owned[place]))


def _cpus(cores: Iterable[PhysicalCore]) -> tuple[int, ...]:
    return tuple(sorted(cpu for core in cores for cpu in core.cpus))


def _nodes(cores: Iterable[PhysicalCore]) -> tuple[int, ...]:
    return tuple(sorted({core.numa_node for core in cores}))


def _notes(
    places: WorkerRoles, owned: Sequence[CoreSet], shares: Sequence[CoreShare], nodes: tuple[int, ...]
) -> Iterator[str]:
    if any(share.niceness for share in shares):
        yield "prefill and decode share cores: decode has priority"
    if len(nodes) > 1:
        where = "; ".join(
            f"{worker} on {format_cpus(_nodes(own))}" for (worker, _), own in zip(places, owned, strict=True)
        )
        yield f"NUMA nodes: {where if shares[0].cpus else format_cpus(nodes)}; weights are interleaved over all"
