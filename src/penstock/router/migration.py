"""Requests that move to other workers: their worker was lost, or asks for them to be migrated.

One turn of the event loop handles only some of them (``turns``).  Blame for a crash is settled before any request is
submitted again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from penstock.clock import Clock
from penstock.router.dispatch import Dispatcher
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLinks
from penstock.router.placement import Placement
from penstock.router.poison import find_culprit
from penstock.router.quarantine import Quarantine
from penstock.router.stream import RequestStream
from penstock.router.turns import TurnWork, log_errors
from penstock.telemetry.log import log_event
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId, Role, ValidRequest, WorkerId, WorkerState
from penstock.wire.gateway_messages import Cancel, ConfirmRequests, MigrateRequests, PageSource

log = logging.getLogger("penstock.router")

_STREAMS_PER_UNIT = 16
"""Streams that one unit of work looks up or blames.  Resubmitting one is a unit of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LostWorker:
    """A worker that has ended or was given up, and the requests it had."""

    worker: WorkerId
    incarnation: int
    requests: Sequence[RequestId]
    reason: str
    fault: bool = False  # it crashed by itself
    moved_requests: Sequence[RequestId] = ()  # resubmitted when it was suspected; blamed if without progress since
    suspected_at: float = 0.0


class LostWorkerHandler:
    """Resubmits the requests of lost workers, and fails one that has crashed ``poison_deaths`` workers."""

    def __init__(
        self,
        streams: Mapping[RequestId, RequestStream],
        dispatcher: Dispatcher,
        *,
        metrics: Metrics,
        poison_deaths: int,
        on_poison: Callable[[ValidRequest, float], None],
        turns: TurnWork,
        clock: Clock,
    ) -> None:
        """``on_poison`` is called with each request that fails so, and the time."""
        self._streams = streams
        self._dispatcher = dispatcher
        self._metrics = metrics
        self._on_poison = on_poison
        self._poison_deaths = poison_deaths
        self._turns = turns
        self._clock = clock

    def on_worker_lost(self, lost: LostWorker) -> None:
        """Resubmit its requests, over several turns."""
        if lost.requests or lost.moved_requests:
            self._turns.add(self._resubmit(lost))

    def _resubmit(self, lost: LostWorker) -> Iterator[None]:
        worker, incarnation = lost.worker, lost.incarnation
        affected: list[RequestStream] = []
        for at in range(0, len(lost.requests), _STREAMS_PER_UNIT):
            found = self._streams_of(lost.requests[at : at + _STREAMS_PER_UNIT])
            affected += [stream for stream in found if stream.routed.runs_on(worker, incarnation)]
            if at:
                yield
        if lost.fault:
            yield from self._blame(lost, affected)
        for stream in affected:
            with log_errors(f"{stream.routed.request.id} could not be taken away from {worker}"):
                now = self._clock.now()
                effects = stream.routed.on_worker_lost(worker, incarnation, lost.reason, now)
                stream.on_failure((worker, incarnation), lost.reason, effects, now)
                self._dispatcher.apply(stream, effects, now)
            yield

    def _blame(self, lost: LostWorker, affected: Sequence[RequestStream]) -> Iterator[None]:
        """Record the crash against its requests, and against those moved from it without progress since."""
        moved = self._streams_of(lost.moved_requests)
        moved = [stream for stream in moved if stream.routed.progress_at <= lost.suspected_at]
        suspects = {stream.routed.request.id: stream for stream in (*moved, *affected)}
        death = f"{lost.worker} ({lost.reason})"
        deaths: dict[RequestId, int] = {}
        for number, (name, stream) in enumerate(suspects.items(), 1):
            stream.routed.crashes.add_death(death, len(stream.routed.emitted))
            deaths[name] = len(stream.routed.crashes.deaths)
            if number % _STREAMS_PER_UNIT == 0:
                yield
        now = self._clock.now()
        culprit = find_culprit(deaths, self._poison_deaths)
        if culprit is not None:
            self._metrics.on_poisoned()
            routed = suspects[culprit].routed
            ends = "; ".join(routed.crashes.deaths)
            log_event(log, logging.ERROR, "request ends workers", request_id=culprit, deaths=deaths[culprit], ends=ends)
            with log_errors(f"{culprit} could not be refused"):
                self._on_poison(routed.request, now)
                self._dispatcher.apply(suspects[culprit], routed.fail_as_poison(), now)

    def _streams_of(self, requests: Sequence[RequestId]) -> list[RequestStream]:
        return [stream for request in requests if (stream := self._streams.get(request)) is not None]


class MigrationHandler:
    """Answers workers that want requests migrated, or ask which of their requests are still wanted."""

    def __init__(
        self,
        streams: Mapping[RequestId, RequestStream],
        dispatcher: Dispatcher,
        *,
        fleet: Fleet,
        links: WorkerLinks,
        placement: Placement,
        quarantine: Quarantine,
        turns: TurnWork,
        clock: Clock,
    ) -> None:
        self._streams = streams
        self._dispatcher = dispatcher
        self._fleet = fleet
        self._links = links
        self._placement = placement
        self._quarantine = quarantine
        self._turns = turns
        self._clock = clock

    def on_message(self, message: MigrateRequests | ConfirmRequests, worker: WorkerId, incarnation: int) -> None:
        """Handle a worker's message."""
        if isinstance(message, MigrateRequests):
            self._turns.add(self._migrate_all(message, worker, incarnation))
        else:
            self._cancel_unwanted(message, worker, incarnation)

    def _cancel_unwanted(self, message: ConfirmRequests, worker: WorkerId, incarnation: int) -> None:
        link = self._links.link_to(worker, incarnation)
        if link is None:
            return
        for request, epoch in message.requests:
            if self._quarantine.is_probe(request):
                continue
            stream = self._streams.get(request)
            if stream is None or stream.routed.epoch != epoch or not stream.routed.runs_on(worker, incarnation):
                link.send(Cancel(request=request, epoch=epoch))  # not kept if it cannot leave: the worker asks again

    def _migrate_all(self, message: MigrateRequests, worker: WorkerId, incarnation: int) -> Iterator[None]:
        """Find other workers for requests that this one decodes.

        Without one, the requests of a worker that drains are resubmitted.
        """
        fleet, slot = self._fleet, self._fleet.slot(worker)
        if slot is None:
            return
        source = PageSource(worker=worker, incarnation=incarnation, endpoint=fleet.endpoints[slot])
        # A worker that keeps its role asks because the requests outgrow its context.
        stays = fleet.states[slot] is not WorkerState.DRAINING and fleet.roles[slot] is not Role.PREFILL
        min_context = fleet.context(slot) if stays else 0
        for number, (request, epoch) in enumerate(message.requests):
            if number:
                yield
            stream = self._streams.get(request)
            if not fleet.is_current(worker, incarnation):
                return
            if stream is not None and stream.routed.can_migrate(worker, incarnation, epoch):
                with log_errors(f"{request} could not be migrated"):
                    self._migrate(stream, source, min_context, drains=fleet.states[slot] is WorkerState.DRAINING)

    def _migrate(self, stream: RequestStream, source: PageSource, min_context: int, *, drains: bool) -> None:
        now, routed, worker, incarnation = self._clock.now(), stream.routed, source.worker, source.incarnation
        decision, root = self._placement.choose_migration_target(routed, worker, incarnation, now, beyond=min_context)
        if decision.stages:
            target = decision.stages[0]
            effects = routed.begin_migration(target, source, root, now, expected=decision.expected_tokens)
            self._dispatcher.apply(stream, effects, now)
        elif drains:
            why = "it drains, and no other worker is ready to continue its requests"
            effects = routed.on_worker_lost(worker, incarnation, why, now)
            stream.on_failure((worker, incarnation), why, effects, now)
            self._dispatcher.apply(stream, effects, now)
