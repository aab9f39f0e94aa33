"""The gateway process: the HTTP application in front of the router, on one event loop.

The supervisor sends it which workers there are; it writes heartbeats like a worker.  Draining means that the router
takes no new requests, running ones finish, and the process exits with code 0.  Only this process imports the HTTP
application and the tokenizer.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import resource
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.api.app import make_app
from penstock.api.audit import ProcessAudit, open_audit_log
from penstock.api.audit_log import AuditSink
from penstock.api.auth import ApiKeys, load_api_keys, watch_api_keys
from penstock.api.concurrency import RequestCounts
from penstock.api.endpoints import AppServices
from penstock.api.response_cache import ResponseCache
from penstock.api.response_store import SqliteResponseStore
from penstock.clock import MonotonicClock
from penstock.config.limits import TraceConfig, TurnLimits
from penstock.config.schema import GatewayConfig, InputFeatures
from penstock.interfaces import ModelCard, PoolingProcessor, RequestProcessor, TranscriptionProcessor
from penstock.launch import event_loop
from penstock.launch.http_server import SWITCH_S, App, HttpServer, ProcessIo
from penstock.launch.members.interface import Members, follow_members
from penstock.launch.members.registry import joined_members, open_members, other_nodes_members
from penstock.launch.redis_rates import RedisRates
from penstock.launch.remote_workers import RemoteWorkers
from penstock.launch.shared_metrics import HostMetrics, SharedMetrics
from penstock.launch.shared_rates import SharedTokenBuckets
from penstock.processing.lora import SharedAdapterNames
from penstock.processing.pooling import PoolingModelProcessor, ServedPoolingModel
from penstock.processing.requests.schemas import request_schemas
from penstock.processing.service import GenerationProcessor
from penstock.processing.transcription import AudioModelProcessor
from penstock.router.service import RouterService
from penstock.telemetry.registry import Metrics
from penstock.telemetry.spans import NoTracer, Tracer
from penstock.telemetry.throughput import ThroughputLog
from penstock.types import Task
from penstock.wire.gateway_messages import Hello
from penstock.wire.node_keys import HostKeys, NodeKeys
from penstock.wire.peer_rights import PeerRefusal
from penstock.wire.supervisor_messages import SupervisorMessage, WorkerUp
from penstock.wire.zeromq import ZmqTransport

if TYPE_CHECKING:
    from penstock.launch.otlp import OtlpTracer

MIDDLE_COLLECTIONS = 2
"""Collections of the young generation per collection of the middle one."""
NEVER = 1 << 30

_PAGE_BYTES = resource.getpagesize()


class GarbageCollector:
    """Runs Python's full collections when they do not delay streams.

    A full collection stops the event loop, for 100 ms with 10,000 streams.  A finished request leaves no reference
    cycles, so full collections can wait until few streams are open.  What exists at the start is frozen.
    """

    def __init__(self, limits: TurnLimits, open_streams: Callable[[], int]) -> None:
        self._limits = limits
        self._open_streams = open_streams
        self._resident = 0

    def start(self) -> None:
        """Freeze all existing objects; from now on only ``collect_if_due`` runs full collections."""
        gc.collect()
        gc.freeze()
        gc.set_threshold(self._limits.young_collection_objects, MIDDLE_COLLECTIONS, NEVER)
        self._resident = resident_bytes()

    async def run(self) -> None:
        """Collect periodically, until cancelled."""
        while True:
            await asyncio.sleep(self._limits.full_collection_s)
            self.collect_if_due()

    def collect_if_due(self) -> bool:
        """Run a full collection if few streams are open or the process has grown too much; whether it ran."""
        few = self._open_streams() <= self._limits.full_collection_streams
        if not few and resident_bytes() - self._resident < self._limits.full_collection_bytes:
            return False
        gc.collect()
        self._resident = resident_bytes()
        return True


def resident_bytes() -> int:
    """Resident memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_BYTES


log = logging.getLogger(__name__)

UnjoinedWorkers = Callable[[], Sequence[tuple[str, str]]]
"""Returns the endpoints of members where no worker has joined, and what of the members could not be read or resolved,
each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayServices:
    """What a gateway's HTTP application is built from, with the router."""

    metrics: Metrics
    host_metrics: HostMetrics
    tracer: Tracer
    keys: ApiKeys
    audit: AuditSink | None
    unjoined: UnjoinedWorkers
    exact_rates: RedisRates | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayResources:
    """What a gateway gets from the process that forked it."""

    io: ProcessIo
    keys: HostKeys
    make_app: Callable[[GatewayConfig, RouterService, GatewayServices], App]
    rates: SharedTokenBuckets  # of tenants
    metrics: SharedMetrics  # of all gateways of the host
    slot_name: str  # of this one among them


def run_gateway(config: GatewayConfig, inherited: GatewayResources) -> int:
    """Serve until drained or stopped; returns the exit code.  Runs in the forked child."""
    sys.setswitchinterval(SWITCH_S)
    log.info("answers HTTP; event loop: %s", event_loop.event_loop_name(config.event_loop))
    return event_loop.run(_run(config, inherited), config.event_loop)


async def _run(config: GatewayConfig, inherited: GatewayResources) -> int:
    suspect = inherited.io.channel.send
    spans = open_tracer(config.trace, model=config.model_name, process=f"{config.name}-{config.incarnation}")
    metrics, host_metrics = _make_metrics(config, inherited, spans)
    audit = open_audit_log(config.audit_log, config.name, config.audit)
    transport = ZmqTransport(inherited.keys, lambda refusal: _on_refused(refusal, metrics, audit))
    tracer, clock, connect = spans or NoTracer(), MonotonicClock(), transport.connect_async
    router = RouterService(
        config, connect=connect, clock=clock, suspect=suspect, tracer=tracer, metrics=metrics, rates=inherited.rates
    )
    joined, members = _join(config, transport, router), _members(config)
    http = HttpServer(inherited.io, config.limits, _of_supervisor(router, joined), config.tls, config.turns)
    if isinstance(inherited.keys, NodeKeys):
        _follow_nodes(inherited.keys, router, joined, audit)
    metrics.audit_events_lost = audit.lost
    metrics.rate_limit_hosts = lambda: inherited.rates.hosts
    keys = _load_keys(config, audit)
    exact = _exact_rates(config, metrics)
    services = GatewayServices(
        metrics=metrics,
        host_metrics=host_metrics,
        tracer=tracer,
        keys=keys,
        audit=audit.log,
        unjoined=lambda: (*joined.unjoined(), *(members.problems() if members else ())),
        exact_rates=exact,
    )
    app = inherited.make_app(config, router, services)
    router.start()
    joined.start()
    side = [asyncio.create_task(ThroughputLog(metrics, MonotonicClock()).run())]
    side.append(asyncio.create_task(watch_api_keys(keys), name="API keys"))
    side.append(asyncio.create_task(host_metrics.publish_periodically(), name="metrics"))
    if members is not None:
        side.append(asyncio.create_task(_announce(config, router, joined)))
        side.append(asyncio.create_task(follow_members(members, joined.set_members), name="members"))
    garbage = GarbageCollector(config.turns, router.open_requests)
    garbage.start()
    side.append(asyncio.create_task(garbage.run(), name="garbage collection"))
    try:
        # A restarted gateway first waits to hear of workers; at a service's start there are none yet.
        await http.serve(app, router.ready if config.incarnation > 1 else lambda: True)
    finally:
        for task in side:
            task.cancel()
        await joined.close()
        await router.close()
        if exact is not None:
            await exact.close()
        transport.close()
        host_metrics.end()
        audit.close()
        if spans is not None:
            spans.close()
    return 0


def _make_metrics(
    config: GatewayConfig, inherited: GatewayResources, spans: OtlpTracer | None
) -> tuple[Metrics, HostMetrics]:
    """What this process counts, and what all gateways of the host do."""
    metrics = Metrics(
        model_name=config.model_name,
        max_tenants=config.scheduling.metric_tenants,
        spans=spans.figures if spans is not None else None,
        gateway=inherited.slot_name,
    )
    clock, limits = MonotonicClock(), config.limits
    return metrics, HostMetrics(metrics, inherited.metrics, inherited.slot_name, clock=clock, limits=limits)


def _load_keys(config: GatewayConfig, audit: ProcessAudit) -> ApiKeys:
    return load_api_keys(
        config.api_key,
        config.api_keys,
        config.scheduling,
        fronted=config.fronted,
        on_change=audit.on_key_changes,
    )


def _on_refused(refusal: PeerRefusal, metrics: Metrics, audit: ProcessAudit) -> None:
    """Something that a worker's node may not say."""
    metrics.on_peer_refused(refusal.reason)
    audit.on_peer_refused(refusal)


def _follow_nodes(nodes: NodeKeys, router: RouterService, joined: RemoteWorkers, audit: ProcessAudit) -> None:
    """Use workers of accepted nodes only, and change those of other nodes only if this one may."""
    nodes.on_change.append(audit.on_node_changes)
    nodes.on_change.append(lambda changes: joined.leave_unaccepted(nodes.accepts_worker))
    router.admin.may_assign = nodes.may_assign


def _exact_rates(config: GatewayConfig, metrics: Metrics) -> RedisRates | None:
    if config.limits_redis is None:
        return None
    key, timeout_s = bytes.fromhex(config.event_key), config.scheduling.limits_redis_s
    rates = RedisRates(config.limits_redis, key, timeout_s=timeout_s)
    metrics.limits_redis_up = lambda: int(rates.is_up)
    return rates


async def _announce(config: GatewayConfig, router: RouterService, joined: RemoteWorkers) -> None:
    """Log once when joined workers can serve."""
    while not router.ready():  # noqa: ASYNC110 - readiness is what many reports add up to
        await asyncio.sleep(config.failover.beat_s)
    log.info("ready: %d of %d workers joined", joined.count, joined.expected)


def _members(config: GatewayConfig) -> Members | None:
    """Where workers of other hosts are; None: all are started here."""
    if config.fleet_file is not None:
        return other_nodes_members(config.fleet_file, config.node, config.join, config.membership, MonotonicClock())
    if config.members is not None:
        return open_members(config.members, config.membership, MonotonicClock())
    return joined_members(config.join, config.membership, MonotonicClock()) if config.join else None


def _join(config: GatewayConfig, transport: ZmqTransport, router: RouterService) -> RemoteWorkers:
    hello = Hello(gateway=config.name, incarnation=config.incarnation, discovery=True)
    joined = RemoteWorkers(
        transport.connect_async,
        router.on_supervisor,
        hello,
        clock=MonotonicClock(),
        beat_s=config.failover.beat_s,
        uses_mixed=config.allow_mixed_numerics,
        quiet=router.quiet_endpoints,
    )
    router.add_report_listener(joined.on_report)
    router.set_disconnect_listener(joined.on_disconnected)
    return joined


def _of_supervisor(router: RouterService, joined: RemoteWorkers) -> Callable[[SupervisorMessage], None]:
    """Takes the supervisor's messages, which are about workers of this host."""

    def handle(message: SupervisorMessage) -> None:
        if isinstance(message, WorkerUp):
            joined.add_local(message.worker)
            router.add_local_worker(message.worker)
        router.on_supervisor(message)

    return handle


def make_http_app(
    config: GatewayConfig,
    router: RouterService,
    services: GatewayServices,
    *,
    created: int,
    buckets: SharedTokenBuckets,
    request_counts: RequestCounts,
) -> App:
    """The HTTP application of this configuration.  Raises ModelError."""
    metrics, keys = services.metrics, services.keys
    intake, pools, hears = _intakes(config, created, router.adapters)
    stored = ResponseCache(config.response_cache) if config.response_cache else None
    if stored is not None:
        metrics.register_response_cache(stored.stats)
    kept = None if config.response_store is None else SqliteResponseStore(Path(config.response_store), config.limits)
    return make_app(
        AppServices(
            streams=router,
            admin=router.admin,
            processor=intake,
            pooling=pools,
            transcription=hears,
            limits=config.limits,
            clock=MonotonicClock(),
            metrics=services.host_metrics.snapshot,
            gateway_metrics=services.host_metrics.gateway_page,
            key_homes=router.idempotency,
            count_key_outcome=metrics.on_idempotency_key,
            count_auth_failure=metrics.on_unauthorized,
            count_forbidden=metrics.on_forbidden,
            count_prefix_break=metrics.on_prefix_break,
            keys=keys,
            buckets=buckets,
            exact_rates=services.exact_rates,
            request_counts=request_counts,
            fleet_counts=router.fleet_counts,
            audit=services.audit,
            event_key=bytes.fromhex(config.event_key),
            scheduling=config.scheduling,
            turns=config.turns,
            levels=metrics.levels,
            response_store=kept,
            response_cache=stored,
            tracer=services.tracer,
            log_requests=config.log_requests,
            schemas=lambda: request_schemas(config.limits, unknown_fields=config.requests.unknown_fields),
            allowed_origins=config.allowed_origins,
            allowed_hosts=config.allowed_hosts if keys.is_open else None,
            unjoined_workers=services.unjoined,
        )
    )


def _intakes(
    config: GatewayConfig, created: int, adapters: SharedAdapterNames
) -> tuple[RequestProcessor, PoolingProcessor | None, TranscriptionProcessor | None]:
    """The request processors of a generative, a pooling or a transcription model."""
    folder, name, length = Path(config.model_path), config.model_name, config.max_model_len
    if config.task is Task.GENERATE:
        writing = GenerationProcessor(
            folder,
            name=name,
            max_model_len=length,
            limits=config.limits,
            created=created,
            offers=InputFeatures(
                remote_images=config.remote_images, remote_image_hosts=config.remote_image_hosts, lora=config.lora
            ),
            requests=config.requests,
            adapters=adapters,
        )
        return writing, None, None
    card = ModelCard(name=name, created=created, max_model_len=length)
    if config.task is Task.TRANSCRIBE:
        listening = AudioModelProcessor(folder, card, config.limits, config.requests)
        return listening, None, listening
    reading = PoolingModelProcessor(
        folder,
        ServedPoolingModel(card=card, task=config.task, width=config.width, requests=config.requests),
        config.limits,
    )
    return reading, reading, None


def open_tracer(config: TraceConfig, *, model: str, process: str) -> OtlpTracer | None:
    """The tracer of this process, to be closed at its end; None: spans are not recorded."""
    if not config.enabled:
        return None
    from penstock.launch.otlp import OtlpTracer

    return OtlpTracer(config, {"penstock.model": model, "service.instance.id": process})
