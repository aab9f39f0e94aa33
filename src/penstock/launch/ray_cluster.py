"""A Ray cluster as ``penstock ray`` uses it: its nodes, and the named, detached actors that run a fleet's nodes.

Nothing but the fleet file's text and reports goes through Ray.  Of its private functions one is used, which tells an
actor's state; the version of Ray is pinned.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from penstock.config.base import host_and_port
from penstock.config.fleet_file import FleetNode
from penstock.errors import ConfigError, PenstockError
from penstock.launch.ray_node import PIN, FleetNodeActor, NodeOrder, NodeReport

NAMESPACE = "penstock"
CONNECT_S = 5.0
"""For the cluster's port to answer."""
INIT_S = 30.0
"""For Ray to connect."""
REPORT_S = 5.0
"""For an actor to report, and for Ray to answer a question."""
REMOVE_S = 10.0
CALLS_AT_ONCE = 8
"""Of an actor's methods: it reports while it drains."""

_Result = TypeVar("_Result")


@dataclass(frozen=True, slots=True)
class RayNode:
    """A living node of the cluster."""

    id: str
    address: str


@dataclass(frozen=True, slots=True)
class NodeActor:
    """An actor as Ray has it: perhaps not placed yet, or being restarted."""

    node: str
    handle: Any
    state: str  # Ray's: PENDING_CREATION, ALIVE, RESTARTING, DEAD
    restarts: int


def check_ray_installed(what: str) -> None:
    """Raises ConfigError."""
    if find_spec("ray") is None:
        raise ConfigError(f"{what} needs Ray: pip install 'penstock[ray]'")


@contextlib.contextmanager
def connected(address: str | None) -> Iterator[RayCluster]:
    """The cluster at ``address`` (HOST:PORT); None: that of RAY_ADDRESS, or the one that runs on this host.

    Raises ConfigError if Ray is not installed or the cluster is not there.
    """
    check_ray_installed("penstock ray")
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    if where.startswith("ray://"):
        raise ConfigError(f"{where}: give the address of the cluster itself (HOST:6379), on one of its hosts")
    if where != "auto":
        _check_port(where)
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # its warning
    import ray

    def init() -> None:
        ray.init(where, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.CRITICAL)

    try:
        within(INIT_S, init, f"the Ray cluster at {where} does not answer")
    except (ConnectionError, RuntimeError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0].rstrip(".")
        if where == "auto":
            missing = isinstance(error, ConnectionError) and "Could not find" in reason
            reason = "no Ray cluster runs on this host" if missing else f"the Ray cluster of this host: {reason}"
        else:
            reason = f"no Ray cluster at {where}: {reason}"
        raise ConfigError(f"{reason}; start Ray here with `ray start`, or name a cluster with --address") from None
    try:
        yield RayCluster()
    finally:
        ray.shutdown()


def _check_port(where: str) -> None:
    """Ray itself would try for minutes.  Raises ConfigError."""
    try:
        host, port = host_and_port(f"tcp://{where}")
    except (ConfigError, ValueError):
        raise ConfigError(f"--address {where}: expected HOST:PORT, as `ray start --head` prints it") from None
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
        raise ConfigError(f"no Ray cluster at {where}: {reason.lower()}; `ray start --head` starts one") from None


def within(limit_s: float, call: Callable[[], _Result], problem: str) -> _Result:
    """What ``call`` returns or raises.  Raises PenstockError with ``problem`` if it takes longer than ``limit_s``.

    Calls of Ray wait for a GCS that is away.
    """
    found: list[_Result] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            raised.append(error)

    thread = threading.Thread(target=run, name="ray call", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised[0]
    if not found:
        raise PenstockError(f"{problem} within {limit_s:g} s")
    return found[0]


class RayCluster:
    """The cluster that this process is connected to."""

    def keeps_its_state(self) -> bool | None:
        """Whether a GCS that is started anew knows this cluster; None: that cannot be seen from this host."""
        import ray

        return keeps_its_state(ray.get_runtime_context().gcs_address, command_lines())

    def nodes(self) -> list[RayNode]:
        """Return those that live."""
        import ray

        rows = within(REPORT_S, ray.nodes, "Ray does not list its nodes")
        return [RayNode(row["NodeID"], row["NodeManagerAddress"]) for row in rows if row["Alive"]]

    def actors(self, fleet: str) -> dict[str, NodeActor]:
        """The actors of a fleet, by the names of their nodes."""
        import ray
        from ray._private.state import actors as actor_table

        def look() -> dict[str, NodeActor]:
            found: dict[str, NodeActor] = {}
            for row in ray.util.list_named_actors(all_namespaces=True):
                node = node_of_actor(fleet, row["name"]) if row["namespace"] == NAMESPACE else None
                if node is None:
                    continue
                try:
                    handle = ray.get_actor(row["name"], NAMESPACE)
                except ValueError:  # it has just gone
                    continue
                told = actor_table(handle._actor_id.hex()) or {}
                found[node] = NodeActor(node, handle, str(told.get("State", "")), int(told.get("NumRestarts", 0)))
            return found

        return within(REPORT_S, look, "Ray does not list its actors")

    def report(self, actor: NodeActor, timeout_s: float = REPORT_S) -> NodeReport | None:
        """None: it does not answer."""
        return self.reports([actor], timeout_s)[actor.node]

    def reports(self, actors: Sequence[NodeActor], timeout_s: float = REPORT_S) -> dict[str, NodeReport | None]:
        """Ask all of them at once."""
        import ray

        asked = {actor.node: actor.handle.report.remote() for actor in actors if actor.state in ("", "ALIVE")}
        within(
            timeout_s + REPORT_S,
            lambda: ray.wait(list(asked.values()), num_returns=len(asked), timeout=timeout_s) if asked else None,
            "Ray does not answer",
        )
        return {actor.node: _answer(asked.get(actor.node)) for actor in actors}

    def wait_for_change(self, seen: Sequence[tuple[NodeActor, str]], timeout_s: float) -> None:
        """Until a node has another state than was seen of it, at most so long.  Actors that Ray has not placed yet tell
        when it has."""
        import ray

        if not seen:
            time.sleep(timeout_s)
            return
        asked = [actor.handle.watch.remote(state, timeout_s) for actor, state in seen]
        within(
            timeout_s + REPORT_S,
            lambda: ray.wait(asked, num_returns=1, timeout=timeout_s, fetch_local=False),
            "Ray does not answer",
        )

    def create(self, orders: Sequence[tuple[NodeOrder, FleetNode]]) -> None:
        """Make the actors of nodes; returns before they are placed.  Several, which have workers together, are placed
        in one placement group: all of them, once there is room for all.

        Raises PenstockError if one of them is there already.
        """
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        reserved = [{f"node:{self.address_of(node)}": PIN, **node.ray.resources} for _, node in orders]
        group = self._placement_group([order for order, _ in orders], reserved) if len(orders) > 1 else None
        for number, ((order, node), resources) in enumerate(zip(orders, reserved, strict=True)):
            place = None if group is None else PlacementGroupSchedulingStrategy(group, number)
            made = ray.remote(FleetNodeActor).options(
                name=actor_name(order.fleet, order.node),
                namespace=NAMESPACE,
                lifetime="detached",
                max_restarts=-1,
                max_concurrency=CALLS_AT_ONCE,
                num_cpus=resources.pop("CPU", 0),
                num_gpus=resources.pop("GPU", 0),
                resources=resources,
                scheduling_strategy=place,
            )
            raw = msgspec.json.encode(order)
            try:
                within(INIT_S, partial(made.remote, raw), f"Ray does not take the actor of node {node.name}")
            except ValueError as error:
                raise PenstockError(f"node {node.name}: {str(error).partition(chr(10))[0]}") from None

    @staticmethod
    def _placement_group(orders: Sequence[NodeOrder], reserved: Sequence[Mapping[str, float]]) -> Any:
        """A bundle for each node.  Ray does not divide a bundle, so the ranks of a stage are on one host (STRICT_PACK);
        the nodes' addresses say which.  Several nodes may share a host, so it is not STRICT_SPREAD."""
        from ray.util.placement_group import placement_group

        name = f"{actor_name(orders[0].fleet, '+'.join(order.node for order in orders))}/{secrets.token_hex(4)}"
        bundles = [dict(resources) for resources in reserved]
        return within(
            INIT_S,
            lambda: placement_group(bundles, strategy="SPREAD", name=name, lifetime="detached"),
            f"Ray does not take the placement group {name}",
        )

    def placed_together(self, fleet: str) -> list[frozenset[str]]:
        """The nodes of each placement group of a fleet: when actors of some are removed, Ray ends those of all."""
        return within(
            REPORT_S, lambda: list(_placement_groups(fleet).values()), "Ray does not list its placement groups"
        )

    def update(self, actors: Sequence[NodeActor], text: str) -> None:
        """Give actors another text of the fleet file."""
        import ray

        asked = [actor.handle.update.remote(text) for actor in actors]
        within(
            2 * REPORT_S,
            lambda: ray.wait(asked, num_returns=len(asked), timeout=REPORT_S) if asked else None,
            "Ray does not answer",
        )

    def drain(self, actor: NodeActor) -> Any:
        """Begin to drain a node; ``wait_drained`` takes what this returns."""
        return actor.handle.drain.remote()

    def wait_drained(self, draining: Any, timeout_s: float) -> NodeReport | None:
        """How the node is then.  None: it did not end, or its actor died meanwhile."""
        import ray

        done, _ = ray.wait([draining], timeout=timeout_s)
        return _answer(draining) if done else None

    def remove(self, actors: Sequence[NodeActor], fleet: str) -> None:
        """End the actors, and with them their nodes; they are gone on return.  Raises PenstockError."""
        import ray

        def kill() -> bool:
            for actor in actors:
                ray.kill(actor.handle, no_restart=True)
            return True

        within(REPORT_S, kill, "Ray does not end actors")
        self._remove_placement_groups(fleet, {actor.node for actor in actors})
        until = time.monotonic() + REMOVE_S
        while left := sorted(self.actors(fleet).keys() & {actor.node for actor in actors}):
            if time.monotonic() > until:
                raise PenstockError(f"Ray still has the actors of {', '.join(left)} after {REMOVE_S:g} s")
            time.sleep(0.05)

    @staticmethod
    def _remove_placement_groups(fleet: str, nodes: Set[str]) -> None:
        """Remove those that these nodes were in."""
        from ray.util.placement_group import get_placement_group, remove_placement_group

        def remove() -> None:
            for name, together in _placement_groups(fleet).items():
                if nodes & together:
                    with contextlib.suppress(ValueError):  # it has just gone
                        remove_placement_group(get_placement_group(name))

        within(REPORT_S, remove, "Ray does not remove placement groups")

    def address_of(self, node: FleetNode) -> str:
        """The address of the Ray node that a node of the fleet belongs to; the first of its host's if none is there."""
        wanted = node.ray.address or node.address
        try:
            found = dict.fromkeys(str(row[4][0]) for row in socket.getaddrinfo(wanted, None, type=socket.SOCK_STREAM))
        except OSError:
            return wanted
        there = {ray_node.address for ray_node in self.nodes()}
        return next((address for address in found if address in there), next(iter(found), wanted))


def keeps_its_state(gcs_address: str, commands: Iterable[Sequence[str]]) -> bool | None:
    """Whether Ray's GCS at this address keeps its state in Redis; None: it is not among the ``commands``, which are the
    command lines of this host's processes."""
    host, _, port = gcs_address.rpartition(":")
    its = {f"--node-ip-address={host.strip('[]')}", f"--gcs_server_port={port}"}
    for words in commands:
        if words and words[0].endswith("gcs_server") and its <= set(words):
            return any(word.startswith("--redis_address=") for word in words)
    return None


def command_lines() -> Iterator[Sequence[str]]:
    """The words of each process of this host that may be read."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                yield (entry / "cmdline").read_bytes().decode(errors="replace").split("\0")


def actor_name(fleet: str, node: str) -> str:
    """What an actor is called in the namespace ``penstock``."""
    return f"penstock/{fleet}/{node}"


def node_of_actor(fleet: str, name: str) -> str | None:
    """The node that an actor of this name runs; None: it is not of this fleet.  Names of nodes have no slashes."""
    front, _, node = name.rpartition("/")
    return node if front == f"penstock/{fleet}" and node else None


def _placement_groups(fleet: str) -> dict[str, frozenset[str]]:
    """The nodes in each of a fleet, by its name, which lists them."""
    from ray.util.placement_group import placement_group_table

    found: dict[str, frozenset[str]] = {}
    for row in placement_group_table().values():
        together = node_of_actor(fleet, row["name"].rpartition("/")[0])
        if together is not None and row["state"] != "REMOVED":
            found[row["name"]] = frozenset(together.split("+"))
    return found


def _answer(asked: Any) -> NodeReport | None:
    """A report that has arrived."""
    import ray

    if asked is None:
        return None
    try:
        return msgspec.json.decode(ray.get(asked, timeout=0), type=NodeReport)
    except (ray.exceptions.RayError, msgspec.DecodeError, TypeError):  # not there yet, or never
        return None


def describe(actor: NodeActor | None, report: NodeReport | None, addresses: Mapping[str, str]) -> tuple[str, str]:
    """The state of a node and the reason, for people.  ``addresses``: ids of living Ray nodes to their addresses."""
    if actor is None:
        return "not started", ""
    if report is not None:
        return report.state, report.reason if report.state != "ready" else ""
    if actor.state in ("PENDING_CREATION", "DEPENDENCIES_UNREADY", "RESTARTING"):
        what = "pending" if actor.state != "RESTARTING" else "restarting"
        there = ", ".join(sorted(set(addresses.values()))) or "none"
        return what, f"waits for Ray to place its actor; Ray nodes: {there}"
    return "silent", "its actor does not answer"
