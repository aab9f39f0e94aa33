"""What becomes of the requests of a worker that is gone or given up: they go on elsewhere, but for what it died of.

Knows no links and no fleet; effects are carried out by whoever is given them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

from penstock.router.effects import Effects
from penstock.router.poison import guilty
from penstock.router.stream import Stream
from penstock.router.watch import Loss
from penstock.telemetry.log import event
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId

log = logging.getLogger("penstock.router")


class Losses:
    """``apply`` carries out a stream's effects; ``poison_deaths`` workers may die of one request."""

    def __init__(
        self,
        streams: Mapping[RequestId, Stream],
        apply: Callable[[Stream, Effects, float], None],
        metrics: Metrics,
        poison_deaths: int,
    ) -> None:
        self._streams = streams
        self._apply = apply
        self._metrics = metrics
        self._poison_deaths = poison_deaths

    def take(self, loss: Loss, now: float) -> None:
        """A worker is gone or given up."""
        worker, incarnation = loss.worker, loss.incarnation
        there = [stream for stream in self._named(loss.requests) if stream.flight.runs_at(worker, incarnation)]
        if loss.fault:
            self._blame(loss, there, now)
        for stream in there:
            effects = stream.flight.lost(worker, incarnation, loss.reason, now)
            stream.failed((worker, incarnation), loss.reason, effects, now)
            self._apply(stream, effects, now)

    def _blame(self, loss: Loss, there: Sequence[Stream], now: float) -> None:
        """It died by itself: those that it had, or that were taken from it and have not moved since, may be why."""
        moved = [stream for stream in self._named(loss.moved) if stream.flight.moved <= loss.given_up]
        suspects = {stream.flight.request.id: stream for stream in (*moved, *there)}
        for stream in suspects.values():
            stream.flight.guilt.blame(f"{loss.worker} ({loss.reason})", len(stream.flight.emitted))
        deaths = {name: len(stream.flight.guilt.deaths) for name, stream in suspects.items()}
        culprit = guilty(deaths, self._poison_deaths)
        if culprit is not None:
            self._metrics.poisoned()
            event(log, logging.ERROR, "request ends workers", request_id=culprit, deaths=deaths[culprit])
            self._apply(suspects[culprit], suspects[culprit].flight.poison(), now)

    def _named(self, requests: Sequence[RequestId]) -> list[Stream]:
        return [stream for request in requests if (stream := self._streams.get(request)) is not None]
