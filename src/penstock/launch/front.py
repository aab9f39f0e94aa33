"""Everything in front of the router, put together in the gateway's process: keys, intake, HTTP.

Imported by that process alone (``jobs``): nothing of it is needed to load weights or to serve from them.
"""

from __future__ import annotations

from pathlib import Path

from penstock.clock import MonotonicClock
from penstock.config.schema import GatewayConfig
from penstock.edge.app import Behind, make_app
from penstock.edge.auth import KeyRing
from penstock.intake.service import ModelIntake
from penstock.launch.gateway import App
from penstock.router.service import RouterService
from penstock.telemetry.registry import Metrics


def make_http_app(config: GatewayConfig, router: RouterService, metrics: Metrics, *, created: int) -> App:
    """The HTTP application of this configuration.  Raises ModelError."""
    intake = ModelIntake(
        Path(config.model_path),
        name=config.model_name,
        max_model_len=config.max_model_len,
        limits=config.limits,
        created=created,
        remote_images=config.remote_images,
    )
    return make_app(
        Behind(
            streams=router,
            intake=intake,
            limits=config.limits,
            clock=MonotonicClock(),
            metrics=metrics.exposition,
            keys=KeyRing.of([config.api_key] if config.api_key else []),
        )
    )
