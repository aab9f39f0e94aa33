"""Everything in front of the router, put together in the gateway's process: keys, intake, HTTP.

Imported by that process alone (``jobs``): nothing of it is needed to load weights or to serve from them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from penstock.clock import MonotonicClock
from penstock.config.schema import GatewayConfig, Offers
from penstock.edge.app import Behind, make_app
from penstock.edge.stored import ResponseStore
from penstock.intake.listening import ListeningIntake
from penstock.intake.reading import ReaderFacts, ReadingIntake
from penstock.intake.request_schemas import request_schemas
from penstock.intake.service import ModelIntake
from penstock.launch.http_process import App
from penstock.launch.rings import ring_of
from penstock.launch.shared_rates import SharedBuckets
from penstock.router.service import RouterService
from penstock.telemetry.registry import Metrics
from penstock.telemetry.spans import Tracer
from penstock.types import Task
from penstock.wire.ports import Hears, Intake, ModelCard, Pools


def make_http_app(
    config: GatewayConfig,
    router: RouterService,
    metrics: Metrics,
    tracer: Tracer,
    waiting: Callable[[], Sequence[tuple[str, str]]],
    *,
    created: int,
    buckets: SharedBuckets,
) -> App:
    """The HTTP application of this configuration; ``waiting``: as ``joined.JoinedWorkers``.  Raises ModelError."""
    intake, pools, hears = _intakes(config, created)
    stored = ResponseStore(config.response_cache) if config.response_cache else None
    if stored is not None:
        metrics.responses = stored.figures
    ring = ring_of(config.api_key, config.api_keys, config.scheduling, fronted=config.fronted)
    return make_app(
        Behind(
            streams=router,
            posts=router.orders,
            intake=intake,
            pools=pools,
            hears=hears,
            limits=config.limits,
            clock=MonotonicClock(),
            metrics=metrics.snapshot,
            met=metrics.met,
            unauthorized=metrics.unauthorized,
            keys=ring,
            buckets=buckets,
            event_key=bytes.fromhex(config.event_key),
            scheduling=config.scheduling,
            turns=config.turns,
            levels=metrics.levels,
            stored=stored,
            tracer=tracer,
            log_requests=config.log_requests,
            schemas=lambda: request_schemas(config.limits, unknown_fields=config.requests.unknown_fields),
            allowed_origins=config.allowed_origins,
            allowed_hosts=config.allowed_hosts if ring.open else None,
            waiting=waiting,
        )
    )


def _intakes(config: GatewayConfig, created: int) -> tuple[Intake, Pools | None, Hears | None]:
    """What checks requests: of a model that writes, of one that only reads, or of one that hears."""
    folder, name, length = Path(config.model_path), config.model_name, config.max_model_len
    if config.task is Task.GENERATE:
        writing = ModelIntake(
            folder,
            name=name,
            max_model_len=length,
            limits=config.limits,
            created=created,
            offers=Offers(
                remote_images=config.remote_images, remote_image_hosts=config.remote_image_hosts, lora=config.lora
            ),
            requests=config.requests,
        )
        return writing, None, None
    card = ModelCard(name=name, created=created, max_model_len=length)
    if config.task is Task.TRANSCRIBE:
        listening = ListeningIntake(folder, card, config.limits, config.requests)
        return listening, None, listening
    reading = ReadingIntake(
        folder, ReaderFacts(card=card, task=config.task, width=config.width, requests=config.requests), config.limits
    )
    return reading, reading, None
