"""Fleet files: how many workers there are, how long their steps take, what they can hold, and how fast links are.

TOML, strictly read.  Three come along (``NAMES``); ``penstock calibrate`` writes one from measurements.
"""

from __future__ import annotations

import tomllib
from importlib import resources
from pathlib import Path
from typing import Annotated

import msgspec

from penstock.config.base import Config
from penstock.config.mesh import Mesh, parse_mesh
from penstock.errors import ConfigError
from penstock.types import Role

NAMES = ("default", "h100", "h200")
"""Fleet files of the package."""

DEFAULT = "default"

MAX_WORKERS = 4096
MAX_FILE_BYTES = 1 << 20
MAX_SHARE_ERROR = 0.01
"""By which the shares of stages may miss 1: they are rounded in files."""

SimSeconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
SimShare = Annotated[float, msgspec.Meta(ge=0, le=100)]
Speed = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
SimStageShare = Annotated[float, msgspec.Meta(gt=0, le=1)]
SimCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class WorkerGroup(Config, frozen=True, kw_only=True):
    """Workers of one role."""

    role: Role = Role.BOTH
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
    group: str = ""  # how the ranks of each of them divide the model, as "tp2,pp2"; empty: one rank
    stages: tuple[SimStageShare, ...] = ()  # each stage's share of a step's time; empty: equal shares

    @property
    def mesh(self) -> Mesh:
        """Raises ConfigError."""
        return parse_mesh(self.group) if self.group else Mesh()

    @property
    def stage_shares(self) -> tuple[float, ...]:
        """The share of each stage."""
        count = self.mesh.pipeline
        return self.stages or (1 / count,) * count


class SimStepTimes(Config, frozen=True, kw_only=True):
    """Seconds of a step: the first three where answers are written in it, the others where prompts are read."""

    step_s: SimSeconds = 0.0  # a step in which answers are written
    row_s: SimSeconds = 0.0  # each answer in it
    context_s: SimSeconds = 0.0  # each token of context of those answers
    read_step_s: SimSeconds = 0.0  # a step that only reads prompts
    token_s: SimSeconds  # each prompt token
    pair_s: SimSeconds = 0.0  # each (query, key) pair of those tokens' attention
    beside: SimShare = 0.0  # the share by which a step is longer for each other worker that computes when it begins


class SimRankTimes(Config, frozen=True, kw_only=True):
    """Seconds that a step takes more where ranks divide the model.  ``SimStepTimes`` are those of one rank alone."""

    layers: Annotated[int, msgspec.Meta(ge=0, le=4096)] = 0
    join_s: SimSeconds = 0.0  # an exchange of the ranks of a stage: there are two in each layer
    join_token_s: SimSeconds = 0.0  # and more for each token of the step
    send_s: SimSeconds = 0.0  # hidden states from a stage to the next
    send_token_s: SimSeconds = 0.0
    undivided_s: SimSeconds = 0.0  # of each step: what every rank of a stage does, such as launching kernels
    beside: SimShare = 0.0  # the share by which a step is longer for each other rank that computes meanwhile


class SimMemory(Config, frozen=True, kw_only=True):
    """Memory of one worker, of all its ranks together."""

    token_bytes: Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
    device_bytes: Bytes
    host_bytes: Bytes = 0
    disk_bytes: Bytes = 0


class LinkSpeeds(Config, frozen=True, kw_only=True):
    """Bytes a second, each way, of one worker."""

    worker_bytes_s: Speed = 25e9  # to other workers
    host_bytes_s: Speed = 25e9  # host memory to device
    disk_bytes_s: Speed = 5e9  # disk to device
    message_s: SimSeconds = 0.0005  # a message's way
    prompt_token_s: SimSeconds = 0.0  # each token of a prompt on its way in: read as JSON, checked, hashed, sent


class SimSchedulerLimits(Config, frozen=True, kw_only=True):
    """Limits of the workers' schedulers, as in ``SchedulerConfig``."""

    max_model_len: SimCount = 1 << 18
    max_running: SimCount = 1024
    max_step_tokens: SimCount = 4096
    max_chunk_tokens: SimCount = 2048
    step_budget_ms: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 100.0
    prefill_step_budget_ms: Annotated[float, msgspec.Meta(gt=0, le=1e6)] = 250.0
    long_prompt_ms: Annotated[float, msgspec.Meta(ge=0, le=1e6)] = 1000.0


class FleetFile(Config, frozen=True, kw_only=True):
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

    def with_groups(self, *groups: WorkerGroup) -> FleetFile:
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


def load_fleet(name: str) -> FleetFile:
    """A fleet of the package by its name, or a file.  Raises ConfigError that names file and field."""
    path = Path(name).expanduser()
    try:
        if name in NAMES:
            raw = resources.files("penstock.sim").joinpath("fleets", f"{name}.toml").read_bytes()
        elif path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{name}: {path.stat().st_size} bytes are too many for a fleet file")
        else:
            raw = path.read_bytes()
        fleet = msgspec.convert(tomllib.loads(raw.decode()), FleetFile)
    except OSError as error:
        known = ", ".join(NAMES)
        raise ConfigError(f"fleet {name}: {error.strerror}; give a file, or one of {known}") from None
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"fleet {name}: not TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise ConfigError(f"fleet {name}: {error}; docs/simulator.md has all fields") from None
    return check_fleet(fleet)


def check_fleet(fleet: FleetFile) -> FleetFile:
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
        _check_ranks(fleet, group)
    return fleet


def _check_ranks(fleet: FleetFile, group: WorkerGroup) -> None:
    where = f"fleet {fleet.name}: workers of role {group.role.value}"
    try:
        mesh = group.mesh
    except ConfigError as error:
        raise ConfigError(f"{where}: group: {error}") from None
    if group.stages and len(group.stages) != mesh.pipeline:
        raise ConfigError(f"{where}: stages has {len(group.stages)} shares, but {mesh.name} has {mesh.pipeline} stages")
    if abs(sum(group.stage_shares) - 1) > MAX_SHARE_ERROR:
        raise ConfigError(f"{where}: stages: the shares add up to {sum(group.stage_shares):g}, not to 1")
    if mesh.ranks > 1 and fleet.ranks.layers < mesh.pipeline:
        raise ConfigError(
            f"{where}: {mesh.name} needs ranks.layers, the model's layers, of which there are {fleet.ranks.layers}"
        )


def parse_workers(text: str) -> tuple[WorkerGroup, ...]:
    """``16``: workers of both roles; ``12:4``: of prefill and of decode.  Raises ConfigError."""
    parts = text.split(":")
    if not all(part.isdecimal() and 0 < int(part) <= MAX_WORKERS for part in parts) or len(parts) > 2:
        raise ConfigError(f"--workers {text}: expected a number as 16, or prefill and decode workers as 12:4")
    roles = (Role.BOTH,) if len(parts) == 1 else (Role.PREFILL, Role.DECODE)
    return tuple(WorkerGroup(role=role, count=int(part)) for role, part in zip(roles, parts, strict=True))


def fleet_toml(fleet: FleetFile) -> str:
    """The file that ``load_fleet`` reads."""
    lines = [f"name = {_quoted(fleet.name)}", f"source = {_quoted(fleet.source)}"]
    for group in fleet.workers:
        lines += ["", "[[workers]]", f'role = "{group.role.value}"', f"count = {group.count}"]
        lines += [f'group = "{group.group}"'] if group.group else []
        lines += [f"stages = {list(group.stages)}"] if group.stages else []
    for table in ("steps", "ranks", "memory", "links", "scheduler"):
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {value!r}" for key, value in msgspec.structs.asdict(getattr(fleet, table)).items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a TOML basic string has JSON's escapes
