"""The workloads of a fleet file where others choose the hosts: gateways, and each kind of worker, with their settings.

Nodes of the file are hosts that somebody chose.  A scheduler needs the sum: how many workers of each kind there are.  A
kind is a role, a group of ranks and settings, so workers of two nodes are of one kind if their settings are equal.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from posixpath import dirname, normpath
from typing import Any

from msgspec import structs

from penstock.config.fleet_file import FleetFile, FleetNode, MultiNodeGroup, WorkerGroup
from penstock.config.load import HERE_ONLY, load_node, parse_setting
from penstock.config.mesh import Mesh
from penstock.config.schema import ServeConfig, WorkerServeConfig
from penstock.deploy.settings_file import settings_text
from penstock.errors import ConfigError

GATEWAY = "gateway"
"""The component that serves HTTP; the others are called like roles."""

MAX_NAME_CHARS = 40
"""A fleet's name in names of resources, to which up to 23 characters are added; a label has up to 63 (RFC 1123)."""

WRITTEN_FOLDERS = ("kv_disk", "response_store")
WRITTEN_FILES = ("audit_log", "trace_file")
"""Settings that name what is written."""

Settings = Mapping[str, Any]

_SERVE = frozenset(item.name for item in structs.fields(ServeConfig))
_WORKER = frozenset(item.name for item in structs.fields(WorkerServeConfig))
_PLACED = frozenset(
    {"model", "keys", "join", "members", "host", "port", "gateways", "parallel", "role", "listen", "pages_port"}
    | {"tensor_parallel_size", "pipeline_parallel_size", "name", "nnodes", "node_rank", "master_addr", "api_key"}
)
"""Settings that a command line or a Secret has instead."""

GATEWAY_SETTINGS = _SERVE - _PLACED - {*HERE_ONLY, "transfer"}
WORKER_SETTINGS = _WORKER - _PLACED
"""Those of a settings file that each has a use for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """Equal processes.  ``settings`` are those of their ``--config`` file."""

    name: str  # of the resource
    component: str  # a role, or GATEWAY
    count: int
    settings: Settings = field(default_factory=dict)
    group: WorkerGroup | None = None  # None: gateways

    @property
    def mesh(self) -> Mesh:
        """How ranks divide the model."""
        return self.group.mesh if self.group is not None else Mesh()

    @property
    def hosts(self) -> int:
        """How many hosts one worker is on: those that its group names, or one for each stage."""
        return len(self.group.nodes) if isinstance(self.group, MultiNodeGroup) else self.mesh.pipeline

    @property
    def config_toml(self) -> str:
        """The ``--config`` file."""
        return settings_text(self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorkloads:
    """A whole fleet."""

    name: str
    model: str | None
    gateways: Workload
    workers: tuple[Workload, ...]
    drain_s: float
    no_path_s: float
    own_keys: bool  # clients' keys are in a file of API keys; otherwise in an environment variable

    @property
    def all(self) -> tuple[Workload, ...]:
        return (self.gateways, *self.workers)


def fleet_workloads(fleet: FleetFile, file: str) -> FleetWorkloads:
    """The workloads of a checked fleet file, which was read from ``file``.

    Raises ConfigError for settings that are none, for nodes whose gateways need different settings, and for files
    without nodes.
    """
    if not fleet.nodes:
        raise ConfigError(f"{file}: it has [[workers]] for the simulator and no [[nodes]] that could run")
    configs = [checked_node(fleet, node, file) for node in fleet.nodes]
    name = resource_name(fleet.name, file)
    fronts = [(node, config) for node, config in zip(fleet.nodes, configs, strict=True) if node.gateways]
    settings = [_of_gateways(_settings(fleet, node)) for node, _ in fronts]
    for (node, _), other in zip(fronts, settings, strict=True):
        if other != settings[0]:
            keys = [key for key in sorted({*other, *settings[0]}) if other.get(key) != settings[0].get(key)]
            raise ConfigError(
                f"{file}: gateways of nodes {fronts[0][0].name} and {node.name} differ in {', '.join(keys)}; where a "
                "scheduler places them all need the same settings: write them into [settings]"
            )
    gateways = Workload(
        name=f"{name}-{GATEWAY}",
        component=GATEWAY,
        count=sum(node.gateways for node, _ in fronts),
        settings=settings[0],
    )
    return FleetWorkloads(
        name=name,
        model=fleet.model,
        gateways=gateways,
        workers=tuple(_workers(fleet, name)),
        drain_s=max(config.supervise.drain_s for config in configs),
        no_path_s=max(config.failover.no_path_s for config in configs),
        own_keys=fronts[0][1].api_keys is not None,
    )


def checked_node(fleet: FleetFile, node: FleetNode, file: str) -> ServeConfig:
    """The settings of a node, checked as ``penstock node`` does, but for keys, which a deployment has elsewhere.

    Raises ConfigError.
    """
    with_keys = structs.replace(fleet, keys=fleet.keys or "keys")
    return load_node(with_keys, node, file, environ={"PENSTOCK_API_KEY": "of a Secret"})


def resource_name(name: str, file: str) -> str:
    """A fleet's name as names of resources have it.  Raises ConfigError if no letter or digit is left."""
    plain = re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")[:MAX_NAME_CHARS].rstrip("-")
    if not plain or not plain[0].isalpha():
        raise ConfigError(f"{file}: name = {name!r}: resources are named after it, so it must begin with a letter")
    return plain


def _settings(fleet: FleetFile, node: FleetNode) -> dict[str, Any]:
    """The node's over the fleet's."""
    return {key.replace("-", "_"): value for key, value in (fleet.settings | node.settings).items()}


def _of_gateways(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in GATEWAY_SETTINGS}


def _of_workers(settings: Settings) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key in WORKER_SETTINGS}


def _worker_kinds(fleet: FleetFile) -> Iterator[tuple[WorkerGroup, Settings]]:
    """Each entry of the file, with its settings."""
    settings: dict[str, Settings] = {node.name: _of_workers(_settings(fleet, node)) for node in fleet.nodes}
    for node in fleet.nodes:
        if settings[node.name].get("transfer") == "shm":
            raise ConfigError(f'fleet {fleet.name}: transfer = "shm" moves pages within one host; leave it out')
        yield from ((group, settings[node.name]) for group in node.workers)
    for group in fleet.groups:
        first = settings[group.nodes[0]]
        for name in group.nodes[1:]:
            if settings[name] != first:
                keys = [key for key in sorted({*settings[name], *first}) if settings[name].get(key) != first.get(key)]
                raise ConfigError(
                    f"fleet {fleet.name}: nodes {group.nodes[0]} and {name} have a group together and differ in "
                    f"{', '.join(keys)}; pods of one worker have the same settings: write them into [settings]"
                )
        yield group, first


def _workers(fleet: FleetFile, fleet_name: str) -> Iterator[Workload]:
    kinds: dict[str, list[tuple[WorkerGroup, int, Settings]]] = {}
    for group, settings in _worker_kinds(fleet):
        hosts = len(group.nodes) if isinstance(group, MultiNodeGroup) else 0
        key = f"{group.role.value} {group.mesh.name} {hosts}\n{settings_text(settings)}"
        kinds.setdefault(key, []).append((group, group.count, settings))
    taken: set[str] = set()
    several = [group[0][0].role for group in kinds.values()]
    for same in kinds.values():
        group, _, settings = same[0]
        name = f"{fleet_name}-{group.role.value}"
        if several.count(group.role) > 1 and group.mesh.ranks > 1:
            name += f"-{group.mesh.name.replace(',', '-')}"
        base, number = name, 2
        while name in taken:
            name, number = f"{base}-{number}", number + 1
        taken.add(name)
        count = sum(count for _, count, _ in same)
        yield Workload(name=name, component=group.role.value, count=count, settings=settings, group=group)


def is_path(model: str) -> bool:
    """Whether a model is named by a path, not by its name on the Hub."""
    return model.startswith(("/", ".", "~"))


def absolute_path(key: str, path: str, where: str) -> str:
    """The path, normalized; ``key``: whose value names it, ``where``: "pods" or "containers".

    Raises ConfigError for one that depends on a working or home folder, which are others there.
    """
    if not path.startswith("/"):
        raise ConfigError(f'{key} = "{path}": {where} have no such folder; give an absolute path')
    return normpath(path)


def written_folders(settings: Settings, where: str) -> list[str]:
    """Folders that settings name to be written, without /tmp, which always can be.  Raises ConfigError."""
    found = set()
    for key in (*WRITTEN_FOLDERS, *WRITTEN_FILES):
        if settings.get(key) is not None:
            path = absolute_path(key, settings[key], where)
            found.add(path if key in WRITTEN_FOLDERS else dirname(path))
    return sorted(found - {"/tmp"})  # noqa: S108 - a volume of its own


def read_folders(settings: Settings, where: str) -> list[str]:
    """Folders of adapters, and of the draft model.  Raises ConfigError."""
    lora = parse_setting(ServeConfig, "lora", settings.get("lora", ()), "lora")
    named = [(f"lora {name}", folder) for name, _, folder in (text.partition("=") for text in lora)]
    if settings.get("draft_model") is not None:
        named.append(("draft_model", settings["draft_model"]))
    return [absolute_path(key, path, where) for key, path in named]
