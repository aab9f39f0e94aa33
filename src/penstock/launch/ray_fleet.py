"""What ``penstock ray up`` and ``down`` do, so that a cluster runs a fleet file and nothing else of that fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.config.fleet_file import FleetFile, FleetNode
from penstock.config.limits import SuperviseConfig
from penstock.config.load import load_node
from penstock.errors import ConfigError, PenstockError
from penstock.launch.ray_cluster import NodeActor, RayCluster, describe
from penstock.launch.ray_node import NodeOrder, NodeReport, node_digest

LOOK_S = 0.1
"""Between two looks at nodes that are waited for."""

Say = Callable[[str], None]
"""Called with each line of progress."""


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """A node of the file, of the cluster, or both."""

    node: str
    state: str
    reason: str
    restarts: int
    report: NodeReport | None
    in_file: bool


def check_for_ray(fleet: FleetFile, file: str) -> None:
    """Raises ConfigError for what cannot run on a cluster."""
    if not fleet.nodes:
        raise ConfigError(f"{file}: it has [[workers]] for the simulator alone; `penstock ray` needs [[nodes]]")
    for name, path in (("keys", fleet.keys), ("model", fleet.model)):
        if path is not None and (path.startswith(".") or (name == "keys" and path[:1] not in ("/", "~"))):
            raise ConfigError(
                f"{file}: {name} = {path!r}: Ray's actors have another current folder; give the whole path"
            )
    for node in fleet.nodes:
        load_node(fleet, node, file)


def fleet_status(cluster: RayCluster, fleet: FleetFile) -> list[NodeStatus]:
    """All nodes of the file in its order, then those that only the cluster has."""
    addresses = {node.id: node.address for node in cluster.nodes()}
    actors = cluster.actors(fleet.name)
    reports = cluster.reports(list(actors.values()))
    listed = [node.name for node in fleet.nodes]
    rows = []
    for name in (*listed, *sorted(actors.keys() - set(listed))):
        actor, report = actors.get(name), reports.get(name)
        state, reason = describe(actor, report, addresses)
        restarts = (actor.restarts if actor else 0) + (report.restarts if report else 0)
        rows.append(NodeStatus(name, state, reason, restarts, report, name in listed))
    return rows


class FleetRollout:
    """Makes a cluster run a fleet file."""

    def __init__(self, cluster: RayCluster, fleet: FleetFile, text: str, say: Say) -> None:
        self._cluster = cluster
        self._fleet = fleet
        self._text = text
        self._say = say

    def up(self, timeout_s: float | None) -> None:
        """Start what is missing, restart what has changed, drain and remove what the file no longer has.

        ``timeout_s``: for all nodes to be ready; None: they are not waited for.  New nodes start together; of changed
        ones the next is restarted when the one before it is ready, so that the others go on.  Raises PenstockError.
        """
        actors = self._cluster.actors(self._fleet.name)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        reports = self._cluster.reports(list(actors.values()))
        digests = {node.name: node_digest(self._fleet, node) for node in self._fleet.nodes}
        for node in self._fleet.nodes:
            if node.name not in actors:
                self._say(f"{node.name}: new")
                self._create(node, digests[node.name])
        for node in self._fleet.nodes:
            actor, digest = actors.get(node.name), digests[node.name]
            if actor is None:
                continue
            report = reports[node.name]
            if report is not None and report.digest == digest:
                self._say(f"{node.name}: as it was")
                continue
            self._say(f"{node.name}: changed, drains" if report is not None else f"{node.name}: made anew")
            self._remove([actor])
            self._create(node, digest)
            if until is not None:
                self._wait_ready([node.name], until)
        listed = {node.name for node in self._fleet.nodes}
        gone = [actor for name, actor in sorted(actors.items()) if name not in listed]
        for actor in gone:
            self._say(f"{actor.node}: no longer in the file, drains")
        self._remove(gone)
        if until is not None:
            self._wait_ready(sorted(listed), until)

    def down(self) -> int:
        """Drain and remove all nodes of this fleet; returns how many there were."""
        actors = sorted(self._cluster.actors(self._fleet.name).values(), key=lambda actor: actor.node)
        for actor in actors:
            self._say(f"{actor.node}: drains")
        self._remove(actors)
        return len(actors)

    def _create(self, node: FleetNode, digest: str) -> None:
        order = NodeOrder(fleet=self._fleet.name, node=node.name, text=self._text, digest=digest)
        self._cluster.create(order, node)

    def _remove(self, actors: Sequence[NodeActor]) -> None:
        """Drain them together, then end their actors."""
        if not actors:
            return
        limits = SuperviseConfig()
        most_s = max([self._drain_s(actor.node, limits) for actor in actors])
        draining = [(actor, self._cluster.drain(actor)) for actor in actors if actor.state == "ALIVE"]
        until = time.monotonic() + most_s
        for actor, answer in draining:
            well = self._cluster.wait_drained(answer, max(0.0, until - time.monotonic()))
            self._say(f"{actor.node}: {'has ended' if well else f'did not end within {most_s:g} s, is killed'}")
        self._cluster.remove(actors, self._fleet.name)

    def _drain_s(self, name: str, limits: SuperviseConfig) -> float:
        """How long its actor may take at most; of a node that the file no longer has, by the defaults."""
        if any(node.name == name for node in self._fleet.nodes):
            limits = load_node(self._fleet, self._fleet.node(name), self._fleet.name).supervise
        return limits.drain_s + limits.grace_s + 10.0

    def _wait_ready(self, names: Sequence[str], until: float) -> None:
        """Raises PenstockError that names those that are not ready."""
        shown: dict[str, str] = {}
        while True:
            rows = [row for row in fleet_status(self._cluster, self._fleet) if row.node in names]
            for row in rows:
                line = _progress_line(row)
                if shown.get(row.node) != line:
                    shown[row.node] = line
                    self._say(line)
            waited_for = [row for row in rows if row.state != "ready"]
            if not waited_for:
                return
            if time.monotonic() > until:
                late = "; ".join(_progress_line(row) for row in waited_for)
                raise PenstockError(f"not ready in time: {late}")
            time.sleep(LOOK_S)


def _progress_line(row: NodeStatus) -> str:
    if row.state == "ready" and row.report is not None:
        return f"{row.node}: ready after {row.report.ready_after_s or 0.0:.1f} s, process {row.report.pid}"
    return f"{row.node}: {row.state}{', ' + row.reason if row.reason else ''}"
