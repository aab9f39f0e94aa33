"""The gateway process: HTTP in front, the router behind, one event loop for both.

Told by the supervisor which workers there are; beats on the board like a worker.  Draining means: the router takes
nothing new, what runs is finished, then the process ends by itself with exit code 0.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from penstock.clock import MonotonicClock
from penstock.config.schema import GatewayConfig
from penstock.launch import event_loop
from penstock.launch.garbage import GarbageCollection
from penstock.launch.http_process import SWITCH_S, App, HttpProcess, Rim
from penstock.launch.joined import JoinedWorkers
from penstock.launch.tracing import open_tracer
from penstock.router.service import Outside, RouterService
from penstock.telemetry.registry import Metrics
from penstock.telemetry.spans import NoTracer, Tracer
from penstock.telemetry.throughput import ThroughputLog
from penstock.wire.keys import Keys
from penstock.wire.messages import Hello
from penstock.wire.zeromq import ZmqTransport

log = logging.getLogger(__name__)

Waiting = Callable[[], Sequence[tuple[str, str]]]
"""Addresses of workers that were asked to be joined and are not, each with the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayInheritance:
    """What the gateway has from the process that forked it."""

    rim: Rim
    keys: Keys
    make_app: Callable[[GatewayConfig, RouterService, Metrics, Tracer, Waiting], App]


def run_gateway(config: GatewayConfig, inherited: GatewayInheritance) -> int:
    """Serve until drained or told to stop; returns the exit code.  Runs in the forked child."""
    sys.setswitchinterval(SWITCH_S)
    log.info("answers HTTP; event loop: %s", event_loop.chosen(config.event_loop))
    return event_loop.run(_run(config, inherited), config.event_loop)


async def _run(config: GatewayConfig, inherited: GatewayInheritance) -> int:
    transport = ZmqTransport(inherited.keys)
    metrics = Metrics(model_name=config.model_name, max_tenants=config.scheduling.metric_tenants)
    suspect = inherited.rim.channel.send
    spans = open_tracer(config.trace, model=config.model_name, process=f"{config.name}-{config.incarnation}")
    if spans is not None:
        metrics.spans = spans.figures
    tracer = spans or NoTracer()
    outside = Outside(connect=transport.connect_async, clock=MonotonicClock(), suspect=suspect, tracer=tracer)
    router = RouterService(config, outside, metrics)
    http = HttpProcess(inherited.rim, config.limits, router.on_supervisor, config.tls, config.turns)
    joined = _join(config, transport, router)
    joined.uses_mixed = config.allow_mixed_numerics
    app = inherited.make_app(config, router, metrics, tracer, joined.waiting)
    router.start()
    joined.start()
    side = [asyncio.create_task(ThroughputLog(metrics, MonotonicClock()).run())]
    if config.join:
        side.append(asyncio.create_task(_announce(config, router, joined)))
    garbage = GarbageCollection(config.turns, router.open_requests)
    garbage.begin()
    collecting = asyncio.create_task(garbage.run(), name="garbage collection")
    try:
        # At a service's start there are no workers, and clients are told so; one that is forked anew hears of them.
        await http.serve(app, router.ready if config.incarnation > 1 else lambda: True)
    finally:
        collecting.cancel()
        for task in side:
            task.cancel()
        await joined.close()
        await router.close()
        transport.close()
        if spans is not None:
            spans.close()
    return 0


async def _announce(config: GatewayConfig, router: RouterService, joined: JoinedWorkers) -> None:
    """Say once when joined workers can serve: at the service's start there may be none."""
    while not router.ready():  # noqa: ASYNC110 - readiness is what many reports add up to
        await asyncio.sleep(config.failover.beat_s)
    log.info("ready: %d of %d workers joined", joined.count, len(config.join))


def _join(config: GatewayConfig, transport: ZmqTransport, router: RouterService) -> JoinedWorkers:
    hello = Hello(gateway=config.name, incarnation=config.incarnation, discovery=True)
    joined = JoinedWorkers(
        config.join,
        transport.connect_async,
        router.on_supervisor,
        hello,
        clock=MonotonicClock(),
        beat_s=config.failover.beat_s,
    )
    router.on_report = joined.on_report
    return joined
