"""What becomes of the requests of a worker that is gone or given up: they go on elsewhere, but for what it died of.

However many there are, a turn of the event loop takes only some of them away (``slices``): what they have for guilt is
settled first, and all of it before anybody goes on.
Knows no links and no fleet; effects are carried out by whoever is given them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

from penstock.clock import Clock
from penstock.router.effects import Effects
from penstock.router.poison import guilty
from penstock.router.slices import Slices, logged_errors
from penstock.router.stream import Stream
from penstock.router.watch import Loss
from penstock.telemetry.log import event
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId

log = logging.getLogger("penstock.router")

_LOOKED_AT = 16
"""Streams that one unit of work finds or blames; taking one away and sending it elsewhere is a unit each."""


class Losses:
    """``apply`` carries out a stream's effects; ``poison_deaths`` workers may die of one request."""

    def __init__(
        self,
        streams: Mapping[RequestId, Stream],
        apply: Callable[[Stream, Effects, float], None],
        metrics: Metrics,
        *,
        poison_deaths: int,
        slices: Slices,
        clock: Clock,
    ) -> None:
        self._streams = streams
        self._apply = apply
        self._metrics = metrics
        self._poison_deaths = poison_deaths
        self._slices = slices
        self._clock = clock

    def take(self, loss: Loss) -> None:
        """A worker is gone or given up."""
        if loss.requests or loss.moved:
            self._slices.add(self._move(loss))

    def _move(self, loss: Loss) -> Iterator[None]:
        worker, incarnation = loss.worker, loss.incarnation
        there: list[Stream] = []
        for at in range(0, len(loss.requests), _LOOKED_AT):
            named = self._named(loss.requests[at : at + _LOOKED_AT])
            there += [stream for stream in named if stream.flight.runs_at(worker, incarnation)]
            if at:
                yield
        if loss.fault:
            yield from self._blame(loss, there)
        for stream in there:
            with logged_errors(f"{stream.flight.request.id} could not be taken away from {worker}"):
                now = self._clock.now()
                effects = stream.flight.lost(worker, incarnation, loss.reason, now)
                stream.failed((worker, incarnation), loss.reason, effects, now)
                self._apply(stream, effects, now)
            yield

    def _blame(self, loss: Loss, there: Sequence[Stream]) -> Iterator[None]:
        """It died by itself: those that it had, or that were taken from it and have not moved since, may be why."""
        moved = [stream for stream in self._named(loss.moved) if stream.flight.moved <= loss.given_up]
        suspects = {stream.flight.request.id: stream for stream in (*moved, *there)}
        death = f"{loss.worker} ({loss.reason})"
        deaths: dict[RequestId, int] = {}
        for number, (name, stream) in enumerate(suspects.items(), 1):
            stream.flight.guilt.blame(death, len(stream.flight.emitted))
            deaths[name] = len(stream.flight.guilt.deaths)
            if number % _LOOKED_AT == 0:
                yield
        now = self._clock.now()
        culprit = guilty(deaths, self._poison_deaths)
        if culprit is not None:
            self._metrics.poisoned()
            ends = "; ".join(suspects[culprit].flight.guilt.deaths)
            event(log, logging.ERROR, "request ends workers", request_id=culprit, deaths=deaths[culprit], ends=ends)
            with logged_errors(f"{culprit} could not be refused"):
                self._apply(suspects[culprit], suspects[culprit].flight.poison(), now)

    def _named(self, requests: Sequence[RequestId]) -> list[Stream]:
        return [stream for request in requests if (stream := self._streams.get(request)) is not None]
