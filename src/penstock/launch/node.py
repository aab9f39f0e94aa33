"""``penstock node``: one supervisor with all workers and gateways of a host of a fleet.

Its workers share one copy of the weights, and listen over TCP for the gateways of all nodes; its gateways know them
from the supervisor and join those of the other nodes.  So a death here is noticed here at once, and elsewhere by
heartbeats.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

from msgspec import structs

from penstock.config.fleet_file import FleetFile, FleetNode
from penstock.config.mesh import WorkerPart
from penstock.config.node_registry import NodeRight
from penstock.config.resolve import ServePlan, context_length, resolve_node
from penstock.config.schema import GatewayConfig, ServeConfig
from penstock.launch import compose
from penstock.launch.heartbeat import HeartbeatSlot
from penstock.launch.model_path import locate_model
from penstock.launch.node_lease import LeaseWatch
from penstock.launch.processes import (
    GatewayProcesses,
    HostProcesses,
    ModelSource,
    WorkerEndpoints,
    WorkerProcesses,
    incarnations_of_a_run,
)
from penstock.launch.rendezvous import MasterAddress
from penstock.launch.run_folder import RunFolder
from penstock.launch.service_notify import READY, notify_service_manager
from penstock.launch.shared_rates import SharedRequestCounts
from penstock.launch.startup_log import fleet_lines, join_lines, model_lines
from penstock.launch.supervisor import Supervisor
from penstock.launch.tls import checked_tls
from penstock.types import Role, WorkerId
from penstock.wire.node_keys import HostKeys


@dataclass(frozen=True, slots=True)
class NodePlaces:
    """The workers of a node, and its parts of those that other nodes lead: where each listens, and where others reach
    it."""

    workers: tuple[tuple[WorkerId, Role], ...]
    listens_at: Mapping[WorkerId, str]  # of workers that gateways reach here
    reached_at: Mapping[WorkerId, str]
    pages_ports: Mapping[WorkerId, int]
    parts: Mapping[WorkerId, WorkerPart]  # of workers on several nodes
    masters: Mapping[WorkerId, MasterAddress]

    @classmethod
    def of(cls, fleet: FleetFile, node: FleetNode) -> NodePlaces:
        """The workers of a node of a fleet file."""
        members = {WorkerId(worker.name): worker for worker in fleet.members(node)}
        joined = {WorkerId(worker.part_name): worker for worker in fleet.parts(node)}
        several = {name: one for name, one in (members | joined).items() if one.place.nodes > 1}
        return cls(
            workers=tuple((name, worker.group.role) for name, worker in (members | joined).items()),
            listens_at={name: node.endpoint(worker.port, listen=True) for name, worker in members.items()},
            reached_at={name: worker.endpoint for name, worker in members.items()},
            pages_ports={name: worker.port + 1 for name, worker in members.items() if name not in several},
            parts={name: WorkerPart(mesh=one.group.mesh, place=one.place) for name, one in several.items()},
            masters={
                name: MasterAddress.of(one.master(), one.master(listen=True), one.group_nodes)
                for name, one in several.items()
            },
        )

    def endpoints(self, keys: HostKeys) -> WorkerEndpoints:
        """As the processes of workers take them."""
        return WorkerEndpoints(
            keys,
            lambda worker, incarnation: self.listens_at.get(worker, ""),
            reached_at=self.reached_at,
            pages_ports=self.pages_ports,
            masters=self.masters,
        )

    def check_free(self, node: FleetNode) -> None:
        """Raises ConfigError if another program has a port of this node."""
        led = [self.masters[worker] for worker, part in self.parts.items() if part.place.node == 0]
        masters = (f"tcp://{one.listen}:{one.port}" for one in led)
        pages = (node.endpoint(port, listen=True) for port in self.pages_ports.values())
        for endpoint in (*self.listens_at.values(), *masters, *pages):
            compose.check_free(endpoint, f"port of node {node.name}")


def serve_node(
    fleet: FleetFile, node: FleetNode, config: ServeConfig, file: str, lease: LeaseWatch | None = None
) -> int:
    """Run a node until it ends; returns the exit code.  ``config``: its settings; ``file``: where the fleet was read
    from, whose other nodes' workers the gateways follow; ``lease``: it drains when that is over.

    Raises ConfigError, ModelError or KernelError before any process starts, RestartLimitReached when one cannot be
    kept running.
    """
    phases = compose.begin_service(config)
    located = locate_model(config.model)
    spec = compose.inspect_as_set(located.path, config)
    name = config.served_model_name or located.name
    lora = compose.listed_adapters(config, name, spec)
    model = compose.model_source(config, located, spec, loras=lora.adapters)
    places = NodePlaces.of(fleet, node)
    rights = [*([NodeRight.GATEWAY] if node.gateways else []), *([NodeRight.WORKER] if places.workers else [])]
    keys = compose.host_keys(config, *rights, node=node.name)
    plan = _plan(config, node, places, name, model) if places.workers else None
    places.check_free(node)
    gateways = tuple(f"gateway-{number}" for number in range(node.gateways))
    with ExitStack() as stack:
        slots = compose.heartbeat_slots((*gateways, *(worker for worker, _ in places.workers)))
        run_folder = stack.enter_context(closing(RunFolder()))
        workers = None
        if plan is not None:
            workers = WorkerProcesses(config, plan, model, places.endpoints(keys), slots)
            stack.callback(workers.close)
        front, port = None, 0
        if gateways:
            base = compose.gateway_config(config, located, spec, name=name, lora=lora, plan=plan)
            stored = compose.prepare_response_store(config, run_folder) if spec.task.writes else None
            base = structs.replace(base, response_store=stored, event_key=compose.event_key_of(config, keys))
            own = {gateway: slots[gateway] for gateway in gateways}
            whole = context_length(config, compose.model_facts(name, spec))
            base = _of_the_fleet(base, fleet, node, keys, whole)
            base = structs.replace(base, fleet_file=str(Path(file).absolute()))
            front = _front(stack, config, base, keys, own)
            port = front.config.port
        jobs, run = HostProcesses(front, workers), incarnations_of_a_run()
        others = len(fleet.nodes) > 1
        supervisor = Supervisor(
            config.supervise, jobs, slots, gateways=gateways, run=run, lease=lease, serves_others=others
        )
        stack.enter_context(supervisor)
        if front is not None:
            supervisor.on_stopping(front.listener.close)
        length = front.config.max_model_len if front else plan.scheduler.max_model_len if plan else 0
        compose.log_lines(model_lines(located, name, spec, length, plan.notes if plan else ()))

        def ready() -> None:
            compose.log_lines(fleet_lines(plan, supervisor.pid) if plan else join_lines(config.join, config.members))
            compose.log_lines(_reached_lines(node, places, str(phases)))
            if gateways:
                compose.publish_service(config, port, run_folder, model=name, located=located, task=spec.task)
                compose.log_lines(compose.talk_lines(config, name, spec, port, took=str(phases)))
            notify_service_manager(READY)

        return compose.run_supervised(supervisor, workers, plan, phases, ready)


def _plan(config: ServeConfig, node: FleetNode, places: NodePlaces, name: str, model: ModelSource) -> ServePlan:
    here = compose.spec_here(model.spec, places.parts.values(), len(places.workers))
    facts = compose.model_facts(name, here, compose.weights_beside(config, model))
    machine = compose.this_machine(config)
    return resolve_node(config, places.workers, node.address, machine, facts, parts=places.parts)


def _of_the_fleet(
    config: GatewayConfig, fleet: FleetFile, node: FleetNode, keys: HostKeys, whole_context: int
) -> GatewayConfig:
    """With a name that no other gateway of the fleet has, and split if any node is.

    With workers on other nodes the context is the whole one, not that of the own workers: each gateway of a fleet takes
    the same requests, and workers say what fits them.
    """
    name = compose.gateway_name(keys, node.name)
    split = any(group.role is not Role.BOTH for group in fleet.all_workers)
    length = whole_context if config.join else config.max_model_len
    return structs.replace(config, name=name, node=node.name, split=split and config.task.writes, max_model_len=length)


def _front(
    stack: ExitStack,
    config: ServeConfig,
    base: GatewayConfig,
    keys: HostKeys,
    slots: Mapping[str, HeartbeatSlot],
) -> GatewayProcesses:
    """The node's gateways, on a port that is bound already."""
    listener = stack.enter_context(compose.bind_socket(config.host, config.port))
    return GatewayProcesses(
        config=structs.replace(base, port=listener.getsockname()[1], tls=checked_tls(config)),
        listener=listener,
        keys=keys,
        slots=slots,
        log_json=config.log_json,
        created=int(time.time()),
        buckets=compose.rate_buckets(config, base.event_key),
        open_requests=SharedRequestCounts(config.scheduling.max_tenants, config.gateways),
    )


def _reached_lines(node: FleetNode, places: NodePlaces, took: str) -> Iterator[str]:
    """Where the workers are reached; that the node is ready."""
    for worker, endpoint in places.reached_at.items():
        if worker in places.pages_ports:
            yield f"{worker} at {endpoint}, its pages at port {places.pages_ports[worker]}"
    for worker, part in places.parts.items():
        where = f"at {places.reached_at[worker]}, " if worker in places.reached_at else ""
        master = places.masters[worker]
        yield (
            f"{worker} {where}node {part.place.node} of {part.place.nodes} of its worker, whose ranks meet at "
            f"tcp://{master.host}:{master.port}"
        )
    yield f"node {node.name} is ready after {took}"
