"""Does what flights ask for: words to workers, tokens to consumers, and a place for who waits.

In order, and without ever waiting: what an effect leads to is done before the next one.  Decides nothing; knows nothing
of who asks for answers, and of workers no more than their links.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import msgspec

from penstock.clock import Clock
from penstock.router.effects import (
    AbortMigration,
    CancelStage,
    DeliverTokens,
    FailRequest,
    RequestEffects,
    StageEnded,
    SubmitStage,
    WaitForWorker,
)
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLinks
from penstock.router.placement import Placement, RetryBudget
from penstock.router.request import RequestPhase
from penstock.router.stream import RequestStats, RequestStream
from penstock.router.turns import TICK_S, TurnWork
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId
from penstock.wire.codec import fits_in_frame
from penstock.wire.gateway_messages import TOO_LARGE, Cancel
from penstock.wire.transfer_messages import PagesReceived

log = logging.getLogger("penstock.router")

PLACEMENT_RETRY_S = 1.0
"""Until a request is placed again after an error in placing it, which is logged.  Its own patience ends that."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Means:
    """What it is done with."""

    fleet: Fleet
    links: WorkerLinks
    placement: Placement
    tally: RequestStats
    budget: RetryBudget
    slices: TurnWork
    metrics: Metrics
    clock: Clock


class Dispatcher:
    """For the flights of one gateway."""

    def __init__(self, streams: Mapping[RequestId, RequestStream], means: Means) -> None:
        self._streams = streams
        self._fleet, self._links, self._placement = means.fleet, means.links, means.placement
        self._tally, self._budget = means.tally, means.budget
        self._metrics, self._clock = means.metrics, means.clock
        self._slices = means.slices
        self._to_place: dict[RequestId, None] = {}  # whose time has come, in order; a slice of them is placed in a turn
        self._serial = 0  # of the last Submit

    def apply(self, stream: RequestStream, effects: RequestEffects, now: float) -> None:
        """Do what a flight asks for, in order."""
        for effect in effects:
            if stream.spans is not None:
                stream.spans.on_effect(effect, now)
            if isinstance(effect, DeliverTokens):
                self._tally.on_delivered(stream, effect.batch, now)
                stream.put(effect.batch)
            elif isinstance(effect, StageEnded):
                self._fleet.remove_work(effect.worker, effect.incarnation, effect.request)
            elif isinstance(effect, CancelStage):
                self._cancel(effect)
            elif isinstance(effect, AbortMigration):
                link = self._links.link_to(effect.worker, effect.incarnation)
                if link is not None:
                    link.send(PagesReceived(request=effect.request, epoch=effect.epoch))
            elif isinstance(effect, SubmitStage):
                if not self._send(effect):
                    # The legs after it were not sent; the flight cancels them all and asks again, if that can help.
                    worker, incarnation = effect.worker, effect.incarnation
                    reason = "queue_full" if fits_in_frame(effect.submit) else TOO_LARGE
                    again = stream.routed.on_returned(effect.submit.epoch, reason, worker, incarnation, now)
                    stream.on_failure((worker, incarnation), reason, again, now)
                    self.apply(stream, again, now)
                    return
            elif isinstance(effect, WaitForWorker):
                self._wait(stream, effect.not_before, now)
            elif isinstance(effect, FailRequest):
                stream.fail(effect.error)
                self._tally.on_finished(stream, "error", now)

    def _send(self, effect: SubmitStage) -> bool:
        link = self._links.link_to(effect.worker, effect.incarnation)
        serial = self._serial + 1
        if link is None or not link.send(msgspec.structs.replace(effect.submit, serial=serial)):
            return False
        self._serial = serial
        self._fleet.add_work(
            effect.worker,
            effect.incarnation,
            effect.submit.request,
            effect.tokens,
            due=effect.work,
            serial=serial,
            now=self._clock.now(),
        )
        return True

    def _cancel(self, effect: CancelStage) -> None:
        self._fleet.remove_work(effect.worker, effect.incarnation, effect.request)
        link = self._links.link_to(effect.worker, effect.incarnation)
        if link is not None:
            link.cancel(Cancel(request=effect.request, epoch=effect.epoch))

    # --- placing ----------------------------------------------------------------------------------------------------

    def place_waiting(self, now: float, *, ready: bool = False) -> None:
        """Those whose time has come; ``ready``: a worker has just become so, which ends most waits."""
        self._place_soon(self._placement.due_requests(now, ready=ready))

    def _place_soon(self, requests: Iterable[RequestId]) -> None:
        idle = not self._to_place
        self._to_place.update(dict.fromkeys(requests))
        if idle and self._to_place:
            self._slices.add(self._place_all())

    def _place_all(self) -> Iterator[None]:
        while self._to_place:
            request = next(iter(self._to_place))
            del self._to_place[request]
            stream = self._streams.get(request)
            if stream is not None:
                self._place_or_retry(stream, self._clock.now())
                yield

    def _place_or_retry(self, stream: RequestStream, now: float) -> None:
        """An error is this request's own affair: those behind it are placed all the same."""
        try:
            self._place(stream, now)
        except Exception:
            log.exception("%s could not be placed", stream.routed.request.id)
            if stream.routed.phase is RequestPhase.WAITING:
                self._placement.add_waiting(stream.routed.request.id, now + PLACEMENT_RETRY_S, firm=True)

    def _wait(self, stream: RequestStream, not_before: float, now: float) -> None:
        """Until then, and until the retry budget has room for it."""
        flight = stream.routed
        self._placement.isolation.remove(flight.request.id)
        paid = now
        if stream.count_retry():
            if flight.fails_repeatedly:
                paid = self._budget.spend(now, self._tally.open_requests)
            self._metrics.on_retried(delayed=paid > now)
        not_before = max(not_before, paid)
        self._placement.add_waiting(flight.request.id, not_before, firm=paid > now)
        if not_before > now:
            self._to_place.pop(flight.request.id, None)
        elif flight.epoch == 1:
            self._place(stream, now)
        else:
            self._place_soon([flight.request.id])

    def _place(self, stream: RequestStream, now: float) -> None:
        if stream.routed.phase is RequestPhase.WAITING:
            decision, root = self._placement.decide(stream.routed, now)
            if stream.spans is not None:
                stream.spans.on_decision(decision, now, self._clock.now())
            self.apply(stream, stream.routed.on_placed(decision, root, now), now)
            if stream.routed.phase is RequestPhase.WAITING and not decision.legs and len(self._placement.isolation):
                # Whoever keeps it off may be cleared any moment.
                self._placement.add_waiting(stream.routed.request.id, now + TICK_S)
