"""The front process of a catalog: its HTTP application and model manager.  Each model has its own gateway."""

from __future__ import annotations

import logging
import sys

from penstock.api.auth import ring_of
from penstock.api.openapi import Schemas
from penstock.catalog.config import FrontConfig
from penstock.catalog.http_proxy import FrontServices, make_catalog_app
from penstock.catalog.model_manager import ModelManager
from penstock.clock import MonotonicClock
from penstock.launch import event_loop
from penstock.launch.http_server import SWITCH_S, HttpServer, ProcessIo
from penstock.sidecar import drop_secrets, protect_memory

log = logging.getLogger(__name__)


def run_front(config: FrontConfig, rim: ProcessIo) -> int:
    """Serve until drained or told to stop; returns the exit code.  Runs in the forked child."""
    protect_memory()
    drop_secrets()
    sys.setswitchinterval(SWITCH_S)
    log.info("answers HTTP; event loop: %s", event_loop.event_loop_name(config.event_loop))
    return event_loop.run(_run(config, rim), config.event_loop)


def _schemas(config: FrontConfig) -> Schemas:
    from penstock.processing.requests.schemas import request_schemas  # imported on demand

    return request_schemas(config.limits)


async def _run(config: FrontConfig, rim: ProcessIo) -> int:
    clock = MonotonicClock()
    manager = ModelManager(config, rim.channel.send, clock)
    keys = ring_of(config.api_key, config.api_keys, config.scheduling)
    app = make_catalog_app(
        FrontServices(
            models=manager,
            limits=config.limits,
            clock=clock,
            keys=keys,
            created=config.created,
            schemas=lambda: _schemas(config),
            allowed_origins=config.allowed_origins,
            allowed_hosts=config.allowed_hosts if keys.is_open else None,
        )
    )
    manager.start()
    try:
        await HttpServer(rim, config.limits, manager.on_supervisor, config.tls).serve(app)
    finally:
        await manager.close()
    return 0
