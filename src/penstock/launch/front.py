"""Everything in front of the router, put together in the gateway's process: keys, intake, HTTP.

Imported by that process alone (``jobs``): nothing of it is needed to load weights or to serve from them.
"""

from __future__ import annotations

from pathlib import Path

from penstock.clock import MonotonicClock
from penstock.config.schema import GatewayConfig, Offers
from penstock.edge.app import Behind, make_app
from penstock.edge.auth import KeyRing
from penstock.intake.reading import ReaderFacts, ReadingIntake
from penstock.intake.service import ModelIntake
from penstock.launch.http_process import App
from penstock.router.service import RouterService
from penstock.telemetry.registry import Metrics
from penstock.types import Task
from penstock.wire.ports import Intake, ModelCard, Pools


def make_http_app(config: GatewayConfig, router: RouterService, metrics: Metrics, *, created: int) -> App:
    """The HTTP application of this configuration.  Raises ModelError."""
    intake, pools = _intakes(config, created)
    return make_app(
        Behind(
            streams=router,
            intake=intake,
            pools=pools,
            limits=config.limits,
            clock=MonotonicClock(),
            metrics=metrics.exposition,
            keys=KeyRing.of([config.api_key] if config.api_key else []),
        )
    )


def _intakes(config: GatewayConfig, created: int) -> tuple[Intake, Pools | None]:
    """What checks requests: of a model that writes, or of one that only reads."""
    folder, name, length = Path(config.model_path), config.model_name, config.max_model_len
    if config.task is Task.GENERATE:
        writing = ModelIntake(
            folder,
            name=name,
            max_model_len=length,
            limits=config.limits,
            created=created,
            offers=Offers(remote_images=config.remote_images, lora=config.lora),
        )
        return writing, None
    card = ModelCard(name=name, created=created, max_model_len=length)
    reading = ReadingIntake(folder, ReaderFacts(card=card, task=config.task, width=config.width), config.limits)
    return reading, reading
