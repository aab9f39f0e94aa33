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
from penstock.errors import ConfigError
from penstock.types import Role

NAMES = ("default", "h100", "h200")
"""Fleet files of the package."""

DEFAULT = "default"

MAX_WORKERS = 4096
MAX_FILE_BYTES = 1 << 20

SimSeconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
SimShare = Annotated[float, msgspec.Meta(ge=0, le=100)]
Speed = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
SimCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]


class WorkerGroup(Config, frozen=True, kw_only=True):
    """Workers of one role."""

    role: Role = Role.BOTH
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]


class SimStepTimes(Config, frozen=True, kw_only=True):
    """Seconds of a step: the first three where answers are written in it, the others where prompts are read."""

    step_s: SimSeconds = 0.0  # a step in which answers are written
    row_s: SimSeconds = 0.0  # each answer in it
    context_s: SimSeconds = 0.0  # each token of context of those answers
    read_step_s: SimSeconds = 0.0  # a step that only reads prompts
    token_s: SimSeconds  # each prompt token
    pair_s: SimSeconds = 0.0  # each (query, key) pair of those tokens' attention
    beside: SimShare = 0.0  # the share by which a step is longer for each other worker that computes when it begins


class SimMemory(Config, frozen=True, kw_only=True):
    """Memory of one worker."""

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
    links: LinkSpeeds = LinkSpeeds()
    scheduler: SimSchedulerLimits = SimSchedulerLimits()

    @property
    def count(self) -> int:
        """Workers of all roles."""
        return sum(group.count for group in self.workers)

    def with_groups(self, *groups: WorkerGroup) -> FleetFile:
        """The same workers, in other numbers and roles."""
        return msgspec.structs.replace(self, workers=groups)


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
    return fleet


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
    for table in ("steps", "memory", "links", "scheduler"):
        lines += ["", f"[{table}]"]
        lines += [f"{key} = {value!r}" for key, value in msgspec.structs.asdict(getattr(fleet, table)).items()]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()  # a TOML basic string has JSON's escapes
