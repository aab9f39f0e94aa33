"""``penstock ray up`` on a cluster that is played: who is given what when a host is down.

``tests/cluster/test_ray.py`` has a real one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from penstock.config.fleet_file import FleetFile, FleetNode, WorkerGroup
from penstock.errors import PenstockError
from penstock.launch.ray_cluster import NodeActor, RayNode
from penstock.launch.ray_fleet import FleetRollout
from penstock.launch.ray_node import NodeOrder, NodeReport, node_digest


def node(number: int) -> FleetNode:
    """The first one has a gateway."""
    return FleetNode(
        name=f"n{number}", address=f"10.0.0.{number}", gateways=int(number == 0), workers=(WorkerGroup(count=1),)
    )


class Cluster:
    """Actors that are placed report that their nodes are ready; those in ``unplaced`` never are."""

    def __init__(self, fleet: FleetFile, unplaced: Sequence[str]) -> None:
        self._unplaced = unplaced
        self._digests = {node.name: node_digest(fleet, node) for node in fleet.nodes}
        self.updated: list[str] = []

    def keeps_its_state(self) -> bool:
        return True

    def nodes(self) -> list[RayNode]:
        return []

    def actors(self, _fleet: str) -> dict[str, NodeActor]:
        return {
            name: NodeActor(name, None, "RESTARTING" if name in self._unplaced else "ALIVE", 0)
            for name in self._digests
        }

    def reports(self, actors: Sequence[NodeActor]) -> dict[str, NodeReport | None]:
        return {
            actor.node: None
            if actor.node in self._unplaced
            else NodeReport(node=actor.node, digest=self._digests[actor.node], state="ready", text="the old one's")
            for actor in actors
        }

    def create(self, orders: Sequence[tuple[NodeOrder, FleetNode]]) -> None:
        for order, _ in orders:
            self._digests[order.node] = order.digest

    def remove(self, actors: Sequence[NodeActor], _fleet: str) -> None:
        for actor in actors:
            del self._digests[actor.node]

    def update(self, actors: Sequence[NodeActor], _text: str) -> None:
        self.updated += [actor.node for actor in actors]

    def wait_for_change(self, _seen: object, _timeout_s: float) -> None:
        """Nothing changes."""


def test_nodes_that_go_on_are_given_the_file_also_while_a_host_is_down() -> None:
    before = FleetFile(name="f", keys="/keys", nodes=(node(0), node(1)))
    after = FleetFile(name="f", keys="/keys", nodes=(node(0), node(1), node(2)))
    cluster: Any = Cluster(before, unplaced=["n1"])
    said: list[str] = []
    with pytest.raises(PenstockError, match="not ready in time: n1: restarting"):
        FleetRollout(cluster, after, "the new text", said.append).up(0.0)
    assert "n2: new" in said
    assert cluster.updated == ["n0"], "its gateway follows the file"
