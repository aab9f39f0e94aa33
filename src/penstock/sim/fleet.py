"""What the simulator takes from a fleet file: workers by role, and the one profile that all of them have."""

from __future__ import annotations

import msgspec

from penstock.config.base import Config
from penstock.config.fleet_file import (
    DEFAULT_PROFILE,
    MAX_WORKERS,
    FleetFile,
    HardwareProfile,
    LinkSpeeds,
    SimMemory,
    SimRankTimes,
    SimSchedulerLimits,
    SimStepTimes,
    WorkerGroup,
    check_ranks,
    read_fleet_file,
)
from penstock.errors import ConfigError
from penstock.types import Role

DEFAULT = "default"
"""The package's fleet file that is used where none is named."""


class SimulatedFleet(Config, frozen=True, kw_only=True):
    """One fleet of equal workers."""

    name: str
    source: str  # where its figures come from: measured on what, or given
    workers: tuple[WorkerGroup, ...]
    steps: SimStepTimes
    memory: SimMemory
    ranks: SimRankTimes = SimRankTimes()
    links: LinkSpeeds = LinkSpeeds()
    scheduler: SimSchedulerLimits = SimSchedulerLimits()

    @property
    def count(self) -> int:
        """Workers of all roles."""
        return sum(group.count for group in self.workers)

    def with_groups(self, *groups: WorkerGroup) -> SimulatedFleet:
        """The same workers, in other numbers and roles.

        Ranks are those of the workers with that role, or of all where there is only one kind.
        """
        known = {own.role: own for own in self.workers}
        only = self.workers[0] if len(self.workers) == 1 else WorkerGroup(count=1)
        return msgspec.structs.replace(
            self,
            workers=tuple(
                msgspec.structs.replace(known.get(own.role, only), role=own.role, count=own.count) for own in groups
            ),
        )


def load_fleet(name: str) -> SimulatedFleet:
    """A fleet of the package by its name, or a file.  Raises ConfigError that names file and field."""
    return simulated_fleet(read_fleet_file(name))


def simulated_fleet(file: FleetFile) -> SimulatedFleet:
    """The fleet of a file.  Raises ConfigError for one that the simulator cannot compute."""
    profile = _profile(file)
    groups: dict[tuple[Role, str], WorkerGroup] = {}
    for own in file.all_workers:
        same = groups.get((own.role, own.group))
        count = own.count + (same.count if same is not None else 0)
        groups[own.role, own.group] = msgspec.structs.replace(same or own, count=count, profile="")
    return check_fleet(
        SimulatedFleet(
            name=file.name,
            source=file.source,
            workers=tuple(groups.values()),
            steps=profile.steps,
            memory=profile.memory,
            ranks=profile.ranks,
            links=profile.links,
            scheduler=profile.scheduler,
        )
    )


def _profile(file: FleetFile) -> HardwareProfile:
    """The profile that all workers have."""
    known = file.profiles
    if not known:
        raise ConfigError(
            f"fleet {file.name}: it has no [profile.NAME], so there is nothing to simulate with; `penstock calibrate "
            "--profile NAME` measures one, to be appended to the file"
        )
    only = next(iter(known)) if len(known) == 1 else DEFAULT_PROFILE
    names = {group.profile or only for group in file.all_workers}
    if len(names) > 1:
        raise ConfigError(
            f"fleet {file.name}: its workers have the profiles {', '.join(sorted(names))}; the simulator computes "
            "fleets of equal workers"
        )
    (name,) = names
    if name not in known:
        raise ConfigError(f"fleet {file.name}: its workers name none of the profiles {', '.join(known)}")
    return known[name]


def check_fleet(fleet: SimulatedFleet) -> SimulatedFleet:
    """Raises ConfigError for a fleet that cannot serve."""
    roles = {group.role for group in fleet.workers}
    if fleet.count > MAX_WORKERS:
        raise ConfigError(f"fleet {fleet.name}: {fleet.count} workers are more than {MAX_WORKERS}")
    if Role.ENCODE in roles:
        raise ConfigError(f"fleet {fleet.name}: workers: traces have no images, so there is nothing to encode")
    if Role.BOTH not in roles and not {Role.PREFILL, Role.DECODE} <= roles:
        raise ConfigError(
            f"fleet {fleet.name}: workers: no request can be served without 'both', or 'prefill' and 'decode'"
        )
    for group in fleet.workers:
        check_ranks(fleet.name, group)
        if group.mesh.ranks > 1 and fleet.ranks.layers < group.mesh.pipeline:
            raise ConfigError(
                f"fleet {fleet.name}: workers of role {group.role.value}: {group.mesh.name} needs ranks.layers, the "
                f"model's layers, of which there are {fleet.ranks.layers}"
            )
    return fleet


def parse_workers(text: str) -> tuple[WorkerGroup, ...]:
    """``16``: workers of both roles; ``12:4``: of prefill and of decode.  Raises ConfigError."""
    parts = text.split(":")
    if not all(part.isdecimal() and 0 < int(part) <= MAX_WORKERS for part in parts) or len(parts) > 2:
        raise ConfigError(f"--workers {text}: expected a number as 16, or prefill and decode workers as 12:4")
    roles = (Role.BOTH,) if len(parts) == 1 else (Role.PREFILL, Role.DECODE)
    return tuple(WorkerGroup(role=role, count=int(part)) for role, part in zip(roles, parts, strict=True))


def fleet_toml(fleet: SimulatedFleet) -> str:
    """The file that ``load_fleet`` reads."""
    lines = [f"name = {_quoted(fleet.name)}", f"source = {_quoted(fleet.source)}"]
    for group in fleet.workers:
        lines += ["", "[[workers]]", f'role = "{group.role.value}"', f"count = {group.count}"]
        lines += [f'group = "{group.group}"'] if group.group else []
        lines += [f"stages = {list(group.stages)}"] if group.stages else []
    return "\n".join(lines) + "\n" + profile_toml(fleet, DEFAULT_PROFILE)


def profile_toml(fleet: SimulatedFleet, name: str) -> str:
    """Its figures as the tables ``[profile.NAME]``, which may stand at the end of any fleet file without them."""
    lines = []
    for table in ("steps", "ranks", "memory", "links", "scheduler"):
        lines += ["", f"[profile.{name}.{table}]"]
        lines += [f"{key} = {value!r}" for key, value in msgspec.structs.asdict(getattr(fleet, table)).items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a TOML basic string has JSON's escapes
