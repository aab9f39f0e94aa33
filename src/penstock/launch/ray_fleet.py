"""What ``penstock ray up`` and ``down`` do, so that a cluster runs a fleet file and nothing else of that fleet."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config.fleet_file import FleetFile, FleetNode, joined_names
from penstock.config.limits import SuperviseConfig
from penstock.config.load import load_node
from penstock.errors import ConfigError, PenstockError
from penstock.launch.node_lease import LEASE_S
from penstock.launch.ray_cluster import NodeActor, RayCluster, describe
from penstock.launch.ray_node import NodeOrder, NodeReport, NodeState, node_digest, text_hash

NOT_KEPT = (
    "warning: Ray's GCS keeps its state in memory alone, so if it ends, all hosts have to be started again; with "
    "RAY_REDIS_ADDRESS on the head they go on (docs/fleet.md)"
)

SILENT_S = 20.0
"""For actors that have not answered the first time, before their nodes are restarted: their hosts may be busy."""

ENDED: tuple[NodeState, ...] = ("stopped", "draining")
"""Of a node that its actor does not start again."""

ACTOR_S = 10.0
"""For an actor to say that its node has ended, after the longest that this may take."""

LOOK_S = 1.0
"""Between two looks at nodes that are waited for, if they tell of no change meanwhile."""

LEFT = f"what runs of it drains when it has had no actor for {LEASE_S:g} s"

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


def fleet_status(
    cluster: RayCluster, fleet: FleetFile, actors: Mapping[str, NodeActor] | None = None
) -> list[NodeStatus]:
    """All nodes of the file in its order, then those that only the cluster has.  ``actors``: if they are known."""
    addresses = {node.id: node.address for node in cluster.nodes()}
    actors = cluster.actors(fleet.name) if actors is None else actors
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
        self._listed = {node.name for node in fleet.nodes}

    def up(self, timeout_s: float | None) -> None:
        """Start what is missing, restart what has changed, drain and remove what the file no longer has.

        ``timeout_s``: for all nodes to be ready; None: they are not waited for.  New nodes start together; of changed
        ones the next is restarted when the one before it is ready, so that the others go on.  Raises PenstockError.
        """
        if self._cluster.keeps_its_state() is False:
            self._say(NOT_KEPT)
        actors = self._cluster.actors(self._fleet.name)
        until = None if timeout_s is None else time.monotonic() + timeout_s
        reports = self._reports(actors)
        joined = (self._fleet.joined_nodes(node) for node in self._fleet.nodes)
        together = list({nodes[0].name: nodes for nodes in joined}.values())
        for nodes in together:
            if not any(node.name in actors for node in nodes):
                for node in nodes:
                    self._say(f"{node.name}: new")
                self._create(nodes)
        try:
            self._restart_changed(together, actors, reports, until)
        finally:  # also where a node is not ready in time, such as one whose host is down
            self._update(actors, reports)
        actors = self._cluster.actors(self._fleet.name)  # without those that went with nodes of their placement group
        self._remove([actor for name, actor in sorted(actors.items()) if name not in self._listed], reports)
        if until is not None:
            self._wait_ready(sorted(self._listed), until)

    def _restart_changed(
        self,
        together: Sequence[Sequence[FleetNode]],
        actors: Mapping[str, NodeActor],
        reports: Mapping[str, NodeReport | None],
        until: float | None,
    ) -> None:
        """One after the other; at once nodes that have workers together, or are placed together now, for what they had:
        Ray ends them together.  Raises PenstockError."""
        placed = self._cluster.placed_together(self._fleet.name)
        ties = placed + [frozenset(node.name for node in nodes) for nodes in together]
        seen: set[str] = set()
        for first in together:
            if first[0].name in seen:
                continue
            at_once = joined_names(first[0].name, ties)
            seen |= at_once
            parts = [nodes for nodes in together if nodes[0].name in at_once and any(n.name in actors for n in nodes)]
            listed = [node for nodes in parts for node in nodes]
            if self._as_it_was(listed, reports):
                for node in listed:
                    self._say(f"{node.name}: as it was")
                continue
            self._remove([actors[name] for name in sorted(at_once & actors.keys())], reports)
            for nodes in parts:
                self._create(nodes)
            if until is not None:
                self._wait_ready([node.name for node in listed], until)

    def down(self) -> int:
        """Drain and remove all nodes of this fleet; returns how many there were."""
        actors = sorted(self._cluster.actors(self._fleet.name).values(), key=lambda actor: actor.node)
        for actor in actors:
            self._say(f"{actor.node}: drains")
        self._end(actors, self._reports({actor.node: actor for actor in actors}))
        return len(actors)

    def _reports(self, actors: Mapping[str, NodeActor]) -> dict[str, NodeReport | None]:
        """Ask all of them; one that lives and is silent is asked twice."""
        found = self._cluster.reports(list(actors.values()))
        silent = [actor for name, actor in actors.items() if found[name] is None and actor.state in ("", "ALIVE")]
        return found | (self._cluster.reports(silent, SILENT_S) if silent else {})

    def _as_it_was(self, nodes: Sequence[FleetNode], reports: Mapping[str, NodeReport | None]) -> bool:
        """Whether nothing has changed that these nodes must be restarted for, and none of them has ended for good."""
        return all(self._goes_on(node, reports.get(node.name)) for node in nodes)

    def _goes_on(self, node: FleetNode, report: NodeReport | None) -> bool:
        return report is not None and report.state not in ENDED and report.digest == node_digest(self._fleet, node)

    def _create(self, nodes: Sequence[FleetNode]) -> None:
        """Nodes that have workers together, or a single one."""
        orders = [
            NodeOrder(fleet=self._fleet.name, node=node.name, text=self._text, digest=node_digest(self._fleet, node))
            for node in nodes
        ]
        self._cluster.create(list(zip(orders, nodes, strict=True)))

    def _update(self, actors: Mapping[str, NodeActor], reports: Mapping[str, NodeReport | None]) -> None:
        """Let nodes that go on follow the new file: their gateways use the workers that other nodes have now."""
        stale = [
            node.name
            for node in self._fleet.nodes
            if (report := reports.get(node.name)) is not None
            and self._goes_on(node, report)
            and report.text != text_hash(self._text)
        ]
        self._cluster.update([actors[name] for name in stale], self._text)

    def _remove(self, actors: Sequence[NodeActor], reports: Mapping[str, NodeReport | None]) -> None:
        """Say why they are, and end them."""
        for actor in actors:
            report = reports.get(actor.node)
            if actor.node not in self._listed:
                self._say(f"{actor.node}: no longer in the file, drains")
            elif report is None or report.state in ENDED:
                self._say(f"{actor.node}: {'' if report is None else report.state + ', '}made anew")
            else:
                self._say(f"{actor.node}: changed, drains")
        self._end(actors, reports)

    def _end(self, actors: Sequence[NodeActor], reports: Mapping[str, NodeReport | None]) -> None:
        """Drain them, then end their actors.  Nodes where gateways reach workers over several nodes go first: there
        alone can requests of those end in order."""
        first = [actor for actor in actors if not self._only_follows(actor.node, reports.get(actor.node))]
        for wave in (first, [actor for actor in actors if actor not in first]):
            self._drain(wave, reports)
        if actors:
            self._cluster.remove(actors, self._fleet.name)

    def _only_follows(self, name: str, report: NodeReport | None) -> bool:
        """As it says itself: it may run with another file."""
        known = None if report is None else report.only_follows
        return self._fleet.only_follows(name) if known is None else known

    def _drain(self, actors: Sequence[NodeActor], reports: Mapping[str, NodeReport | None]) -> None:
        """Together."""
        most_s = max([self._stops_within_s(actor.node, reports.get(actor.node)) for actor in actors], default=0.0)
        most_s += ACTOR_S
        draining = [(actor, self._cluster.drain(actor)) for actor in actors if actor.state == "ALIVE"]
        until = time.monotonic() + most_s
        for actor in actors:
            if actor.state == "RESTARTING":
                self._say(f"{actor.node}: Ray is restarting its actor, so it is not drained; {LEFT}")
        for actor, answer in draining:
            report = self._cluster.wait_drained(answer, max(0.0, until - time.monotonic()))
            if report is None:
                self._say(f"{actor.node}: did not end within {most_s:g} s, is killed")
            elif report.pid:
                self._say(f"{actor.node}: its process {report.pid} could not be drained; {LEFT}")
            else:
                self._say(f"{actor.node}: has ended")

    def _stops_within_s(self, name: str, report: NodeReport | None) -> float:
        """As the node says itself; of one that does not, by the file, or the defaults if that no longer has it."""
        if report is not None and report.stops_within_s is not None:
            return report.stops_within_s
        if name not in self._listed:
            return SuperviseConfig().stops_within_s
        return load_node(self._fleet, self._fleet.node(name), self._fleet.name).supervise.stops_within_s

    def _wait_ready(self, names: Sequence[str], until: float) -> None:
        """Raises PenstockError that names those that are not ready."""
        shown: dict[str, str] = {}
        while True:
            actors = self._cluster.actors(self._fleet.name)
            rows = [row for row in fleet_status(self._cluster, self._fleet, actors) if row.node in names]
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
            seen = [(actors[row.node], row.state) for row in waited_for if row.node in actors]
            self._cluster.wait_for_change(seen, LOOK_S)


def _progress_line(row: NodeStatus) -> str:
    if row.state == "ready" and row.report is not None:
        return f"{row.node}: ready after {row.report.ready_after_s or 0.0:.1f} s, process {row.report.pid}"
    return f"{row.node}: {row.state}{', ' + row.reason if row.reason else ''}"
