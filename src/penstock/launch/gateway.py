"""The gateway process: HTTP in front, the router behind, one event loop for both.

Told by the supervisor which workers there are; beats on the board like a worker.  Draining means: the router takes
nothing new, what runs is finished, then the process ends by itself with exit code 0.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass

import uvloop

from penstock.clock import MonotonicClock
from penstock.config.schema import GatewayConfig
from penstock.launch.http_process import SWITCH_S, App, HttpProcess, Rim
from penstock.launch.joined import JoinedWorkers
from penstock.router.service import Outside, RouterService
from penstock.telemetry.registry import Metrics
from penstock.wire.keys import Keys
from penstock.wire.messages import Hello
from penstock.wire.zeromq import ZmqTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayInheritance:
    """What the gateway has from the process that forked it."""

    rim: Rim
    keys: Keys
    make_app: Callable[[GatewayConfig, RouterService, Metrics], App]


def run_gateway(config: GatewayConfig, inherited: GatewayInheritance) -> int:
    """Serve until drained or told to stop; returns the exit code.  Runs in the forked child."""
    sys.setswitchinterval(SWITCH_S)
    return uvloop.run(_run(config, inherited))


async def _run(config: GatewayConfig, inherited: GatewayInheritance) -> int:
    transport = ZmqTransport(inherited.keys)
    metrics = Metrics(model_name=config.model_name)
    suspect = inherited.rim.channel.send
    router = RouterService(
        config, Outside(connect=transport.connect_async, clock=MonotonicClock(), suspect=suspect), metrics
    )
    http = HttpProcess(inherited.rim, config.limits, router.on_supervisor)
    app = inherited.make_app(config, router, metrics)
    router.start()
    joined = _join(config, transport, router)
    joined.start()
    try:
        await http.serve(app)
    finally:
        await joined.close()
        await router.close()
        transport.close()
    return 0


def _join(config: GatewayConfig, transport: ZmqTransport, router: RouterService) -> JoinedWorkers:
    hello = Hello(gateway=f"{config.name}-join", incarnation=config.incarnation)
    return JoinedWorkers(
        config.join,
        transport.connect_async,
        router.on_supervisor,
        hello,
        clock=MonotonicClock(),
        beat_s=config.failover.beat_s,
    )
