"""What becomes of the requests of a worker that is gone or given up: they go on elsewhere, but for what it died of.

However many there are, a turn of the event loop takes only some of them away (``slices``): what they have for guilt is
settled first, and all of it before anybody goes on.
Knows no links and no fleet; effects are carried out by whoever is given them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.router.effects import RequestEffects
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLinks
from penstock.router.placement import Placement
from penstock.router.poison import find_culprit
from penstock.router.stream import RequestStream
from penstock.router.turns import TurnWork, log_errors
from penstock.telemetry.log import log_event
from penstock.telemetry.registry import Metrics
from penstock.types import (
    RequestId,
    Role,
    WorkerId,
    WorkerState,
)
from penstock.wire.gateway_messages import Cancel, ConfirmRequests, MigrateRequests, PageSource

log = logging.getLogger("penstock.router")

_LOOKED_AT = 16
"""Streams that one unit of work finds or blames; taking one away and sending it elsewhere is a unit each."""


class LostWorkerHandler:
    """``apply`` carries out a stream's effects; ``poison_deaths`` workers may die of one request."""

    def __init__(
        self,
        streams: Mapping[RequestId, RequestStream],
        apply: Callable[[RequestStream, RequestEffects, float], None],
        metrics: Metrics,
        *,
        poison_deaths: int,
        slices: TurnWork,
        clock: Clock,
    ) -> None:
        self._streams = streams
        self._apply = apply
        self._metrics = metrics
        self._poison_deaths = poison_deaths
        self._slices = slices
        self._clock = clock

    def on_worker_lost(self, loss: LostWorker) -> None:
        """A worker is gone or given up."""
        if loss.requests or loss.moved_requests:
            self._slices.add(self._move(loss))

    def _move(self, loss: LostWorker) -> Iterator[None]:
        worker, incarnation = loss.worker, loss.incarnation
        there: list[RequestStream] = []
        for at in range(0, len(loss.requests), _LOOKED_AT):
            named = self._named(loss.requests[at : at + _LOOKED_AT])
            there += [stream for stream in named if stream.routed.runs_on(worker, incarnation)]
            if at:
                yield
        if loss.fault:
            yield from self._blame(loss, there)
        for stream in there:
            with log_errors(f"{stream.routed.request.id} could not be taken away from {worker}"):
                now = self._clock.now()
                effects = stream.routed.on_worker_lost(worker, incarnation, loss.reason, now)
                stream.on_failure((worker, incarnation), loss.reason, effects, now)
                self._apply(stream, effects, now)
            yield

    def _blame(self, loss: LostWorker, there: Sequence[RequestStream]) -> Iterator[None]:
        """It died by itself: those that it had, or that were taken from it and have not moved since, may be why."""
        moved = [
            stream for stream in self._named(loss.moved_requests) if stream.routed.progress_at <= loss.suspected_at
        ]
        suspects = {stream.routed.request.id: stream for stream in (*moved, *there)}
        death = f"{loss.worker} ({loss.reason})"
        deaths: dict[RequestId, int] = {}
        for number, (name, stream) in enumerate(suspects.items(), 1):
            stream.routed.crashes.add_death(death, len(stream.routed.emitted))
            deaths[name] = len(stream.routed.crashes.deaths)
            if number % _LOOKED_AT == 0:
                yield
        now = self._clock.now()
        culprit = find_culprit(deaths, self._poison_deaths)
        if culprit is not None:
            self._metrics.on_poisoned()
            ends = "; ".join(suspects[culprit].routed.crashes.deaths)
            log_event(log, logging.ERROR, "request ends workers", request_id=culprit, deaths=deaths[culprit], ends=ends)
            with log_errors(f"{culprit} could not be refused"):
                self._apply(suspects[culprit], suspects[culprit].routed.fail_as_poison(), now)

    def _named(self, requests: Sequence[RequestId]) -> list[RequestStream]:
        return [stream for request in requests if (stream := self._streams.get(request)) is not None]


# MERGED: What workers ask of their gateway: who goes on with answers that they want to be relieved of, and
# MERGED: what is still
# MERGED: wanted of what they have.
# MERGED:
# MERGED: Decides nothing itself (``decide.relieve`` and the flight do).

Apply = Callable[[RequestStream, RequestEffects, float], None]


class MigrationHandler:
    """Of one gateway."""

    def __init__(
        self,
        fleet: Fleet,
        links: WorkerLinks,
        placement: Placement,
        streams: Mapping[RequestId, RequestStream],
        apply: Apply,
        *,
        slices: TurnWork,
        clock: Clock,
    ) -> None:
        """``is_probe`` is set by whoever sends probes."""
        self._fleet = fleet
        self._links = links
        self._placement = placement
        self._streams = streams
        self._apply = apply
        self._slices = slices
        self._clock = clock
        self.is_probe: Callable[[RequestId], bool] = lambda request: False

    def on_message(self, message: MigrateRequests | ConfirmRequests, worker: WorkerId, incarnation: int) -> None:
        """A worker asks."""
        if isinstance(message, MigrateRequests):
            self._slices.add(self._relieve(message, worker, incarnation))
        else:
            self._cancel_unwanted(message, worker, incarnation)

    def _cancel_unwanted(self, message: ConfirmRequests, worker: WorkerId, incarnation: int) -> None:
        link = self._links.link_to(worker, incarnation)
        if link is None:
            return
        for request, epoch in message.requests:
            if self.is_probe(request):
                continue
            stream = self._streams.get(request)
            if stream is None or stream.routed.epoch != epoch or not stream.routed.runs_on(worker, incarnation):
                link.cancel(Cancel(request=request, epoch=epoch))

    def _relieve(self, message: MigrateRequests, worker: WorkerId, incarnation: int) -> Iterator[None]:
        """Find others who go on with what this worker writes.  Where there is nobody and it is about to stop, its
        answers are computed anew."""
        fleet, slot = self._fleet, self._fleet.slot(worker)
        if slot is None:
            return
        source = PageSource(worker=worker, incarnation=incarnation, endpoint=fleet.endpoints[slot])
        # Who stays as it is asks for answers that outgrow it.
        stays = fleet.states[slot] is not WorkerState.DRAINING and fleet.roles[slot] is not Role.PREFILL
        beyond = fleet.context(slot) if stays else 0
        for number, (request, epoch) in enumerate(message.requests):
            if number:
                yield
            stream = self._streams.get(request)
            if not fleet.is_current(worker, incarnation):
                return
            if stream is not None and stream.routed.can_migrate(worker, incarnation, epoch):
                with log_errors(f"nobody could be found to go on with {request}"):
                    self._move(stream, source, beyond, ends=fleet.states[slot] is WorkerState.DRAINING)

    def _move(self, stream: RequestStream, source: PageSource, beyond: int, *, ends: bool) -> None:
        """``ends``: whoever writes it is about to stop."""
        now, flight, worker, incarnation = self._clock.now(), stream.routed, source.worker, source.incarnation
        decision, root = self._placement.choose_migration_target(flight, worker, incarnation, now, beyond=beyond)
        if decision.legs:
            joined = flight.begin_migration(decision.legs[0], source, root, now, expected=decision.expected_tokens)
            self._apply(stream, joined, now)
        elif ends:
            why = "it drains, and nobody else is ready to go on with its answers"
            effects = flight.on_worker_lost(worker, incarnation, why, now)
            stream.on_failure((worker, incarnation), why, effects, now)
            self._apply(stream, effects, now)


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that is gone or given up, and what it had."""

    worker: WorkerId
    incarnation: int
    requests: Sequence[RequestId]
    reason: str
    fault: bool = False  # it died of what it did
    moved_requests: Sequence[
        RequestId
    ] = ()  # taken from it when it was given up, and to be blamed if they stand still since
    suspected_at: float = 0.0  # when that was
