"""``penstock ray up`` on a cluster that is played: who is given what when a host is down.

``tests/cluster/test_ray.py`` has a real one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import pytest

from penstock.config.fleet_file import FleetFile, FleetNode, MultiNodeGroup, WorkerGroup
from penstock.errors import PenstockError
from penstock.launch.ray_cluster import NodeActor, RayNode
from penstock.launch.ray_fleet import FleetRollout
from penstock.launch.ray_node import NodeOrder, NodeReport, NodeState, node_digest


def node(number: int) -> FleetNode:
    """The first one has a gateway."""
    return FleetNode(
        name=f"n{number}", address=f"10.0.0.{number}", gateways=int(number == 0), workers=(WorkerGroup(count=1),)
    )


class Cluster:
    """Actors that are placed report that their nodes are ready; those in ``unplaced`` never are.

    ``states``: of nodes that are not ready until they are restarted; ``silent``: how often actors do not answer;
    ``left``: processes of nodes that could not be drained; -1: it does not end; ``placed``: the placement groups;
    ``stops_within_s``: of those that say it.
    """

    def __init__(
        self,
        fleet: FleetFile,
        unplaced: Sequence[str] = (),
        states: Mapping[str, NodeState] = MappingProxyType({}),
        silent: Mapping[str, int] = MappingProxyType({}),
        left: Mapping[str, int] = MappingProxyType({}),
        placed: Sequence[frozenset[str]] = (),
        stops_within_s: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        self._unplaced = unplaced
        self._digests = {node.name: node_digest(fleet, node) for node in fleet.nodes}
        self._states = dict(states)
        self._silent = dict(silent)
        self._left = left
        self._placed = list(placed)
        self._stops_within_s = stops_within_s
        self._follows = {node.name: fleet.only_follows(node.name) for node in fleet.nodes}
        self.created: list[str] = []
        self.drained: list[str] = []
        self.waited_s: dict[str, float] = {}
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

    def reports(self, actors: Sequence[NodeActor], _timeout_s: float = 5.0) -> dict[str, NodeReport | None]:
        return {actor.node: self._report(actor.node) for actor in actors}

    def _report(self, name: str) -> NodeReport | None:
        left = self._silent.get(name, 0)
        self._silent[name] = max(0, left - 1)
        if name in self._unplaced or left:
            return None
        state = self._states.get(name, "ready")
        return NodeReport(
            node=name,
            digest=self._digests[name],
            state=state,
            text="the old one's",
            only_follows=self._follows.get(name),
            stops_within_s=self._stops_within_s.get(name),
        )

    def create(self, orders: Sequence[tuple[NodeOrder, FleetNode]]) -> None:
        for order, _ in orders:
            self._digests[order.node] = order.digest
            self._states.pop(order.node, None)
            self.created.append(order.node)

    def placed_together(self, _fleet: str) -> list[frozenset[str]]:
        return self._placed

    def drain(self, actor: NodeActor) -> str:
        self.drained.append(actor.node)
        return actor.node

    def wait_drained(self, node: str, timeout_s: float) -> NodeReport | None:
        self.waited_s[node] = timeout_s
        pid = self._left.get(node, 0)
        return None if pid < 0 else NodeReport(node=node, digest=self._digests[node], state="stopped", pid=pid)

    def remove(self, actors: Sequence[NodeActor], _fleet: str) -> None:
        """With their placement groups, and so with all that are in these."""
        ended = {actor.node for actor in actors}
        ended = ended.union(*(group for group in self._placed if group & ended))
        assert ended - set(self._unplaced) <= set(self.drained), "streams break"
        self._placed = [group for group in self._placed if not group & ended]
        self._digests = {name: digest for name, digest in self._digests.items() if name not in ended}

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


@pytest.mark.parametrize("state", ["stopped", "draining"])
def test_a_node_that_has_ended_is_restarted_though_the_file_is_the_same(state: NodeState) -> None:
    """As one whose host had no keys, which have been copied since."""
    fleet = FleetFile(name="f", keys="/keys", nodes=(node(0), node(1)))
    cluster: Any = Cluster(fleet, states={"n1": state})
    said: list[str] = []
    FleetRollout(cluster, fleet, "the text", said.append).up(0.0)
    assert said[:2] == ["n0: as it was", f"n1: {state}, made anew"]
    assert cluster.created == ["n1"]
    assert cluster.updated == ["n0"]


@pytest.mark.parametrize(("times", "created"), [(1, []), (2, ["n1"])])
def test_an_actor_that_is_slow_to_answer_is_asked_again(times: int, created: list[str]) -> None:
    fleet = FleetFile(name="f", keys="/keys", nodes=(node(0), node(1)))
    cluster: Any = Cluster(fleet, silent={"n1": times})
    said: list[str] = []
    FleetRollout(cluster, fleet, "the text", said.append).up(0.0)
    assert said[:2] == ["n0: as it was", "n1: made anew" if created else "n1: as it was"]
    assert cluster.created == created


PAIR = MultiNodeGroup(nodes=("n1", "n0"), group="pp2")
ALL_THREE = MultiNodeGroup(nodes=("n1", "n0", "n2"), group="pp3")


@pytest.mark.parametrize(
    ("groups", "listed", "created"),
    [([], "012", "012"), ([PAIR], "012", "012"), ([PAIR], "01", "01"), ([], "0", "0"), ([], "3", "3")],
)
def test_nodes_of_one_placement_group_drain_before_it_is_removed(
    groups: list[MultiNodeGroup], listed: str, created: str
) -> None:
    """Also those that the new file has by themselves, or no longer has; the one that gateways reach goes first."""
    before = FleetFile(name="f", keys="/keys", nodes=(node(0), node(1), node(2)), groups=(ALL_THREE,))
    after = FleetFile(name="f", keys="/keys", nodes=tuple(node(int(number)) for number in listed), groups=(*groups,))
    cluster: Any = Cluster(before, placed=[frozenset({"n0", "n1", "n2"})])
    said: list[str] = []
    FleetRollout(cluster, after, "the text", said.append).up(0.0)
    assert cluster.drained == ["n1", "n0", "n2"]
    assert cluster.created == [f"n{number}" for number in created]
    for number in range(3):
        assert f"n{number}: {'changed' if str(number) in listed else 'no longer in the file'}, drains" in said
    assert not [line for line in said if "killed" in line]


@pytest.mark.parametrize("action", ["up", "down"])
def test_a_node_that_the_file_no_longer_has_drains_by_its_own_limits(action: str) -> None:
    before = FleetFile(name="f", keys="/keys", nodes=(node(0), node(1)))
    after = FleetFile(name="f", keys="/keys", nodes=(node(0),))
    cluster: Any = Cluster(before, stops_within_s={"n1": 122.0})
    rollout = FleetRollout(cluster, after, "the text", lambda _: None)
    rollout.up(0.0) if action == "up" else rollout.down()
    assert cluster.waited_s["n1"] > 122.0


def test_how_each_node_ended_is_said() -> None:
    fleet = FleetFile(name="f", keys="/keys", nodes=(node(0), node(1), node(2), node(3)))
    cluster: Any = Cluster(fleet, unplaced=["n1"], left={"n2": 77, "n3": -1})
    said: list[str] = []
    assert FleetRollout(cluster, fleet, "the text", said.append).down() == 4
    by_its_lease = "what runs of it drains when it has had no actor for 30 s"
    assert said[4:] == [
        f"n1: Ray is restarting its actor, so it is not drained; {by_its_lease}",
        "n0: has ended",
        f"n2: its process 77 could not be drained; {by_its_lease}",
        "n3: did not end within 42 s, is killed",
    ]
