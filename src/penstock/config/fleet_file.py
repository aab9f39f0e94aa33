"""Fleet files: the nodes of a deployment with their workers and gateways, and what the simulator must know of them.

One TOML file, strictly read, is what ``penstock node`` runs and ``penstock simulate --fleet`` predicts::

    [[nodes]] -> workers by role, gateways -> penstock node FILE --name NODE        on each host
    [[groups]] > workers over several nodes ------^
         '----> profile of each worker ----> penstock simulate TRACE --fleet FILE   anywhere

A file for the simulator alone has ``[[workers]]`` instead of nodes.  Its figures stand in ``[profile.NAME]`` tables, in
older files at the top.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping, Set
from dataclasses import dataclass, replace
from importlib import resources
from typing import Annotated, Any, Literal

import msgspec

from penstock.config.base import Config, expanded_path
from penstock.config.mesh import Mesh, NodePlace, parse_mesh
from penstock.config.schema import ServeConfig
from penstock.errors import ConfigError
from penstock.types import Role

NAMES = ("default", "h100", "h200")
"""Fleet files of the package, for the simulator."""

MAX_WORKERS = 4096
MAX_NODES = 1024
MAX_FILE_BYTES = 1 << 20
MAX_SHARE_ERROR = 0.01
"""By which the shares of stages may miss 1: they are rounded in files."""

DEFAULT_PROFILE = "default"
"""The profile of workers that name none, where a file has several; and that of older files."""

FIRST_PORT = 9000
"""Of a node's workers, unless its file says another."""

PORTS_A_WORKER = 2
"""One at which gateways reach it, and one at which other workers fetch its KV pages; where the ranks of a worker are on
several nodes, the other nodes reach the first one there."""

SimSeconds = Annotated[float, msgspec.Meta(ge=0, le=3600)]
Bytes = Annotated[int, msgspec.Meta(ge=0, le=1 << 60)]
SimShare = Annotated[float, msgspec.Meta(ge=0, le=100)]
Speed = Annotated[float, msgspec.Meta(gt=0, le=1e15)]
SimStageShare = Annotated[float, msgspec.Meta(gt=0, le=1)]
SimCount = Annotated[int, msgspec.Meta(ge=1, le=1 << 30)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]
Name = Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9-]{0,39}$")]
Address = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9._:-]{1,253}$")]


class WorkerGroup(Config, frozen=True, kw_only=True):
    """Workers of one role."""

    role: Role = Role.BOTH
    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
    group: str = ""  # how the ranks of each of them divide the model, as "tp2,pp2"; empty: one rank
    stages: tuple[SimStageShare, ...] = ()  # each stage's share of a step's time; empty: equal shares
    profile: str = ""  # whose figures they have; empty: the file's only one, or the one named "default"

    @property
    def mesh(self) -> Mesh:
        """Raises ConfigError."""
        return parse_mesh(self.group) if self.group else Mesh()

    @property
    def stage_shares(self) -> tuple[float, ...]:
        """The share of each stage."""
        count = self.mesh.pipeline
        return self.stages or (1 / count,) * count


class MultiNodeGroup(WorkerGroup, frozen=True, kw_only=True):
    """Workers whose stages are on several nodes.  They do both phases: each node has a part of every KV page."""

    count: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 1
    nodes: Annotated[tuple[Name, ...], msgspec.Meta(min_length=2, max_length=MAX_NODES)]
    """The first one has the last stages, and gateways reach the worker there."""


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


class HardwareProfile(Config, frozen=True, kw_only=True):
    """What the simulator must know of one kind of worker."""

    steps: SimStepTimes
    memory: SimMemory
    ranks: SimRankTimes = SimRankTimes()
    links: LinkSpeeds = LinkSpeeds()
    scheduler: SimSchedulerLimits = SimSchedulerLimits()


class PodResources(Config, frozen=True, kw_only=True):
    """What Kubernetes reserves for a pod, as its quantities; None: the default of its kind.  ``memory`` is also the
    limit."""

    cpu: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?m?$")] | None = None
    memory: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,15}([kMGT]|[KMGT]i)?$")] | None = None
    gpus: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0  # nvidia.com/gpu


class ReplicaRange(Config, frozen=True, kw_only=True):
    """How many pods there are of a kind, by the predicted wait."""

    min: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)] = 1
    max: Annotated[int, msgspec.Meta(ge=1, le=MAX_WORKERS)]
    wait_s: Annotated[float, msgspec.Meta(gt=0, le=3600)] = 1.0  # predicted seconds of queueing to aim at; workers only
    cpu_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 70  # of the reserved processors; gateways only


class PickerOptions(Config, frozen=True, kw_only=True):
    """An InferencePool of the gateways, with `penstock picker` as its endpoint picker."""

    replicas: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    failure_mode: Literal["FailOpen", "FailClose"] = "FailOpen"  # what the Gateway does without a picker
    tls: bool = True  # between the Gateway and the picker
    cpu: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,6}(\.[0-9]{1,3})?m?$")] = "1"
    memory: Annotated[str, msgspec.Meta(pattern=r"^[0-9]{1,15}([kMGT]|[KMGT]i)?$")] = "512Mi"


PodKind = Literal["gateway", "prefill", "decode", "both"]


class KubernetesOptions(Config, frozen=True, kw_only=True):
    """``[kubernetes]``: what ``penstock manifests kubernetes`` must know of a cluster."""

    models_claim: Annotated[str, msgspec.Meta(pattern="^[a-z0-9][a-z0-9.-]{0,252}$")] | None = None
    """Claim of the volume with the models; without it they are in a folder of each host."""
    models_path: Annotated[str, msgspec.Meta(pattern="^/.+")] | None = None  # where; None: the parent of the model
    resources: dict[PodKind, PodResources] = msgspec.field(default_factory=dict)
    autoscale: dict[PodKind, ReplicaRange] = msgspec.field(default_factory=dict)
    prometheus: str | None = None  # its URL, for KEDA
    http_gateway: Annotated[str, msgspec.Meta(pattern="^([a-z0-9-]{1,63}/)?[a-z0-9][a-z0-9.-]{0,252}$")] | None = None
    """A Gateway of the Gateway API, as NAME or NAMESPACE/NAME, that gets an HTTPRoute."""
    hostnames: tuple[Address, ...] = ()  # of that route; none: all of the Gateway
    picker: PickerOptions | None = None  # that route leads to an InferencePool instead of the Service


class RayPlacement(Config, frozen=True, kw_only=True):
    """Where ``penstock ray`` runs a node."""

    address: Address | None = None  # at which Ray knows the host; None: the node's own
    resources: dict[str, Annotated[float, msgspec.Meta(ge=0, le=1e9)]] = msgspec.field(default_factory=dict)
    """Reserved there, as {"CPU": 8, "GPU": 1}; custom ones, too."""


class FleetNode(Config, frozen=True, kw_only=True):
    """One host: what ``penstock node`` starts there."""

    name: Name
    address: Address  # at which the other nodes reach it: a host name, or an address without brackets
    workers: tuple[WorkerGroup, ...] = ()
    gateways: Annotated[int, msgspec.Meta(ge=0, le=64)] = 0
    listen: Address | None = None  # where its workers listen, if not at ``address``: as "0.0.0.0"
    port: Port = FIRST_PORT  # of its first worker; each takes PORTS_A_WORKER
    http_host: str | None = None  # where its gateways listen; None: as the settings have it
    http_port: Port | None = None
    settings: dict[str, Any] = msgspec.field(default_factory=dict)  # of this node, over those of the fleet
    ray: RayPlacement = RayPlacement()

    def endpoint(self, port: int, *, listen: bool = False) -> str:
        """Where a worker of this node is reached; ``listen``: where it listens."""
        host = self.listen or self.address if listen else self.address
        return f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetWorker:
    """A worker, or the part of it that is on one of its nodes."""

    name: str
    group: WorkerGroup
    leader: FleetNode  # where gateways reach it
    port: int  # there
    place: NodePlace  # of this part

    @property
    def part_name(self) -> str:
        """What the part is called on its own node; its first one has the name of the worker."""
        return f"{self.name}.{self.place.node}" if self.place.node else self.name

    @property
    def endpoint(self) -> str:
        """Where gateways reach it."""
        return self.leader.endpoint(self.port)

    @property
    def group_nodes(self) -> tuple[str, ...]:
        """The names of the nodes that have parts of it."""
        return self.group.nodes if isinstance(self.group, MultiNodeGroup) else (self.leader.name,)

    def master(self, *, listen: bool = False) -> str:
        """Where its other nodes reach the first one; ``listen``: where that one listens."""
        return self.leader.endpoint(self.port + 1, listen=listen)


class FleetFile(Config, frozen=True, kw_only=True):
    """One file."""

    name: str
    source: str = "given"  # where its figures come from: measured on what, or given
    model: str | None = None  # as ``penstock serve`` takes it; None: the bundled model
    keys: str | None = None  # folder of the keys that nodes share, the same path on each
    settings: dict[str, Any] = msgspec.field(default_factory=dict)  # of ``penstock serve``, for all nodes
    nodes: Annotated[tuple[FleetNode, ...], msgspec.Meta(max_length=MAX_NODES)] = ()
    groups: Annotated[tuple[MultiNodeGroup, ...], msgspec.Meta(max_length=MAX_WORKERS)] = ()  # over several nodes
    workers: tuple[WorkerGroup, ...] = ()  # instead of nodes, where none runs
    kubernetes: KubernetesOptions = KubernetesOptions()  # of a cluster, for `penstock manifests`
    profile: dict[str, HardwareProfile] = msgspec.field(default_factory=dict)
    steps: SimStepTimes | None = None  # these five: the only profile of older files
    memory: SimMemory | None = None
    ranks: SimRankTimes = SimRankTimes()
    links: LinkSpeeds = LinkSpeeds()
    scheduler: SimSchedulerLimits = SimSchedulerLimits()

    @property
    def all_workers(self) -> tuple[WorkerGroup, ...]:
        """All kinds of workers: of single nodes, of several, or those without a node."""
        return self.workers or (*(group for node in self.nodes for group in node.workers), *self.groups)

    @property
    def profiles(self) -> Mapping[str, HardwareProfile]:
        """All profiles by name, an older file's as ``DEFAULT_PROFILE``."""
        if self.steps is None or self.memory is None:
            return self.profile
        own = HardwareProfile(
            steps=self.steps, memory=self.memory, ranks=self.ranks, links=self.links, scheduler=self.scheduler
        )
        return {DEFAULT_PROFILE: own}

    def node(self, name: str) -> FleetNode:
        """The node of that name.  Raises ConfigError that lists those there are."""
        for node in self.nodes:
            if node.name == name:
                return node
        known = ", ".join(node.name for node in self.nodes) or "none"
        raise ConfigError(f"fleet {self.name}: there is no node {name!r}; its nodes: {known}")

    def members(self, node: FleetNode) -> Iterator[FleetWorker]:
        """The workers that gateways reach at a node: its own, then those of several nodes that it is the first of."""
        port, counts = node.port, dict.fromkeys(Role, 0)
        led = (group for group in self.groups if group.nodes[0] == node.name)
        for group in (*node.workers, *led):
            nodes = len(group.nodes) if isinstance(group, MultiNodeGroup) else 1
            for _ in range(group.count):
                name = f"{node.name}-{group.role.value}-{counts[group.role]}"
                yield FleetWorker(name=name, group=group, leader=node, port=port, place=NodePlace(nodes=nodes))
                counts[group.role] += 1
                port += PORTS_A_WORKER

    def parts(self, node: FleetNode) -> Iterator[FleetWorker]:
        """The node's parts of workers that gateways reach at other nodes."""
        leaders = dict.fromkeys(group.nodes[0] for group in self.groups if node.name in group.nodes[1:])
        for leader in leaders:
            for worker in self.members(self.node(leader)):
                if isinstance(worker.group, MultiNodeGroup) and node.name in worker.group.nodes[1:]:
                    place = NodePlace(nodes=worker.place.nodes, node=worker.group.nodes.index(node.name))
                    yield replace(worker, place=place)

    def joined_nodes(self, node: FleetNode) -> tuple[FleetNode, ...]:
        """The node and all that workers on several nodes join it to, in the file's order."""
        found = joined_names(node.name, [frozenset(group.nodes) for group in self.groups])
        return tuple(other for other in self.nodes if other.name in found)

    def only_follows(self, node: str) -> bool:
        """Whether it has parts of workers on several nodes, and gateways reach all of these at other nodes."""
        groups = [group for group in self.groups if node in group.nodes]
        return bool(groups) and all(group.nodes[0] != node for group in groups)

    def endpoints(self, *, but: str = "") -> tuple[str, ...]:
        """Where gateways reach the workers of all nodes; ``but``: those of this node are left out."""
        return tuple(worker.endpoint for node in self.nodes if node.name != but for worker in self.members(node))


def joined_names(name: str, sets: Collection[Set[str]]) -> set[str]:
    """The name, and all that sets join it to, directly or by other names."""
    found, grown = {name}, True
    while grown:
        reached = {other for one in sets if found & one for other in one}
        grown = not reached <= found
        found |= reached
    return found


def read_fleet_file(name: str) -> FleetFile:
    """A file, or one of the package by its name.  Raises ConfigError that names file and field."""
    path = expanded_path(name, "fleet")
    try:
        if name in NAMES:
            raw = resources.files("penstock.sim").joinpath("fleets", f"{name}.toml").read_bytes()
        elif path.stat().st_size > MAX_FILE_BYTES:
            raise ConfigError(f"{name}: {path.stat().st_size} bytes are too many for a fleet file")
        else:
            raw = path.read_bytes()
    except OSError as error:
        known = ", ".join(NAMES)
        raise ConfigError(f"fleet {name}: {error.strerror} (the simulator also has fleets {known})") from None
    return parse_fleet(raw, f"fleet {name}:")


def parse_fleet(raw: bytes, where: str) -> FleetFile:
    """A checked file by its content.  Raises ConfigError, which begins with ``where``."""
    try:
        content = tomllib.loads(raw.decode())
    except (ValueError, RecursionError) as error:  # of no UTF-8, no TOML, or a number of thousands of digits
        raise ConfigError(f"{where} not TOML: {error}") from None
    try:
        fleet = msgspec.convert(content, FleetFile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{where} {_field_problem(content, str(error))}; docs/fleet.md has all fields") from None
    return check_fleet_file(fleet)


_TABLES: Mapping[str, type[Config]] = {
    "nodes": FleetNode,
    "workers": WorkerGroup,
    "groups": MultiNodeGroup,
    "ray": RayPlacement,
    "kubernetes": KubernetesOptions,
    "picker": PickerOptions,
}
"""What a table of a file is by its key; no other has fields that people write by hand."""


def _field_problem(content: Mapping[str, Any], problem: str) -> str:
    """What msgspec found wrong with a field, with the name of the node that it is of, and with what would work."""
    what, _, path = problem.partition(" - at ")
    where = path.strip("`").removeprefix("$").removeprefix(".")
    tables = [name for name in re.findall(r"[a-z_]+", where) if name in _TABLES]
    unknown = re.fullmatch(r"Object contains unknown field `(.*)`", what)
    if unknown is not None:
        table = _TABLES[tables[-1]] if tables else FleetFile
        near = difflib.get_close_matches(unknown[1], [item.name for item in msgspec.structs.fields(table)], n=1)
        what = f"no such field: {unknown[1]}"
        if unknown[1].replace("-", "_") in {item.name for item in msgspec.structs.fields(ServeConfig)}:
            what += f"; it is a setting, so write it into [settings], or settings = {{ {unknown[1]} = ... }} of a node"
        elif near:
            what += f"; did you mean {near[0]}?"
    elif where.endswith("role"):
        what += "; roles are prefill, decode and both"
    elif "regex" in what and where.endswith("].name"):
        what = "expected lower-case letters, digits and hyphens, at most 40"
    if node := re.match(r"nodes\[(\d+)\]\.?", where):
        entry = content["nodes"][int(node[1])]
        name = entry.get("name", f"number {int(node[1]) + 1}") if isinstance(entry, dict) else "?"
        where = ": ".join(filter(None, (f"node {name}", where[node.end() :])))
    return f"{where}: {what}" if where else what


def check_fleet_file(fleet: FleetFile) -> FleetFile:
    """Raises ConfigError for a file that contradicts itself."""
    where = f"fleet {fleet.name}"
    if bool(fleet.nodes) == bool(fleet.workers):
        have = "both" if fleet.nodes else "neither"
        raise ConfigError(f"{where}: it needs [[nodes]], or [[workers]] for the simulator alone; it has {have}")
    if (fleet.steps is None) != (fleet.memory is None):
        missing = "steps" if fleet.steps is None else "memory"
        raise ConfigError(f"{where}: [{missing}] is missing; newer files have [profile.NAME.{missing}]")
    if fleet.profile and fleet.steps is not None:
        raise ConfigError(f"{where}: figures stand in [profile.NAME] tables or at the top, not in both")
    if sum(group.count for group in fleet.all_workers) > MAX_WORKERS:
        raise ConfigError(f"{where}: more than {MAX_WORKERS} workers")
    for group in fleet.all_workers:
        check_ranks(fleet.name, group)
        _check_profile(fleet, group)
    _check_groups(fleet)
    _check_nodes(fleet)
    return fleet


def check_ranks(fleet: str, group: WorkerGroup) -> None:
    """Raises ConfigError for ranks that cannot be, or other stages than they have.  ``fleet``: its name."""
    where = f"fleet {fleet}: workers of role {group.role.value}"
    try:
        mesh = group.mesh
    except ConfigError as error:
        raise ConfigError(f"{where}: group: {error}") from None
    if group.stages and len(group.stages) != mesh.pipeline:
        raise ConfigError(f"{where}: stages has {len(group.stages)} shares, but {mesh.name} has {mesh.pipeline} stages")
    if abs(sum(group.stage_shares) - 1) > MAX_SHARE_ERROR:
        raise ConfigError(f"{where}: stages: the shares add up to {sum(group.stage_shares):g}, not to 1")


def _check_profile(fleet: FleetFile, group: WorkerGroup) -> None:
    if group.profile and group.profile not in fleet.profiles:
        known = ", ".join(fleet.profiles) or "none"
        raise ConfigError(
            f"fleet {fleet.name}: workers of role {group.role.value}: there is no [profile.{group.profile}]; "
            f"profiles: {known}"
        )


def _check_groups(fleet: FleetFile) -> None:
    """Workers on several nodes."""
    known = [node.name for node in fleet.nodes]
    for group in fleet.groups:
        where = f"fleet {fleet.name}: the group on nodes {', '.join(group.nodes)}"
        for name in group.nodes:
            if name not in known:
                raise ConfigError(f"{where}: there is no node {name!r}; nodes: {', '.join(known) or 'none'}")
            if group.nodes.count(name) > 1:
                raise ConfigError(f"{where}: {name} is listed twice; a node has all of its stages together")
        if group.role is not Role.BOTH:
            raise ConfigError(
                f"{where}: role {group.role.value}: a worker on several nodes transfers no KV pages, so it does both "
                'phases: role = "both", which is the default'
            )
        mesh = group.mesh
        if mesh.pipeline < len(group.nodes):
            works = Mesh(tensor=mesh.tensor, pipeline=len(group.nodes))
            raise ConfigError(
                f'{where}: group = "{group.group}": each node has a stage at least, as ranks that divide a layer '
                f'exchange too much for a network, and {mesh.name} has {mesh.pipeline}; "{works.name}" would work'
            )


def _check_nodes(fleet: FleetFile) -> None:
    names, places = set(), set()
    in_groups = {name for group in fleet.groups for name in group.nodes}
    for node in fleet.nodes:
        where = f"fleet {fleet.name}: node {node.name}"
        if node.name in names:
            raise ConfigError(f"{where}: there are two of this name")
        if not node.workers and not node.gateways and node.name not in in_groups:
            raise ConfigError(f"{where}: it has neither workers nor gateways")
        names.add(node.name)
        for worker in fleet.members(node):
            port = worker.port
            if port + PORTS_A_WORKER - 1 > 65535:
                raise ConfigError(f"{where}: no port is left for {worker.name}; choose a smaller port")
            for own in range(port, port + PORTS_A_WORKER):
                if (node.address, own) in places:
                    raise ConfigError(
                        f"{where}: {node.endpoint(own)} belongs to another node, too; choose another port (each worker "
                        f"takes {PORTS_A_WORKER})"
                    )
                places.add((node.address, own))
    if fleet.nodes and not any(node.gateways for node in fleet.nodes):
        raise ConfigError(f"fleet {fleet.name}: no node has gateways; add gateways = 1 to one")
    if fleet.nodes and not fleet.all_workers:
        raise ConfigError(f"fleet {fleet.name}: no node has workers")
