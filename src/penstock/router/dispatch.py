"""Carries out what requests want done: messages to workers, tokens to consumers, placement of requests that wait.

In order and without waiting.  Decides nothing.  Knows workers by their links only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping

import msgspec

from penstock.clock import Clock
from penstock.errors import PenstockError
from penstock.router.effects import (
    AbortMigration,
    CancelStage,
    RequestEffect,
    RequestEffects,
    StageEnded,
    SubmitStage,
    apply_effects,
)
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLinks
from penstock.router.placement import Placement, RetryBudget
from penstock.router.request import RequestPhase
from penstock.router.stream import RequestStats, RequestStream
from penstock.router.turns import TICK_S, TurnWork
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId, TokenBatch
from penstock.wire.codec import fits_in_frame
from penstock.wire.gateway_messages import Cancel, ReturnReason
from penstock.wire.transfer_messages import PagesReceived

log = logging.getLogger("penstock.router")

PLACEMENT_RETRY_S = 1.0
"""Delay before a request is placed again after an error in placing it.  The error is logged; its deadline ends that."""


class Dispatcher:
    """``EffectPort`` of one gateway."""

    def __init__(
        self,
        streams: Mapping[RequestId, RequestStream],
        *,
        fleet: Fleet,
        links: WorkerLinks,
        placement: Placement,
        stats: RequestStats,
        budget: RetryBudget,
        turns: TurnWork,
        metrics: Metrics,
        clock: Clock,
    ) -> None:
        self._streams = streams
        self._fleet = fleet
        self._links = links
        self._placement = placement
        self._stats = stats
        self._budget = budget
        self._turns = turns
        self._metrics = metrics
        self._clock = clock
        self._to_place: dict[RequestId, None] = {}  # due, in order; each turn places some of them
        self._serial = 0  # of the last Submit

    def apply(self, stream: RequestStream, effects: RequestEffects, now: float) -> None:
        """Carry out what a request wants, in order."""
        if effects:
            apply_effects(self, stream, effects, now)

    # --- EffectPort -------------------------------------------------------------------------------------------------

    def observe(self, target: RequestStream, effect: RequestEffect, now: float) -> None:
        """Record the effect in the request's spans."""
        if target.spans is not None:
            target.spans.on_effect(effect, now)

    def deliver(self, target: RequestStream, batch: TokenBatch, now: float) -> None:
        """Count tokens and put them into the stream."""
        self._stats.on_delivered(target, batch, now)
        target.put(batch)

    def submit(self, target: RequestStream, effect: SubmitStage, now: float) -> bool:
        """Send a stage.  If it cannot be sent, the request is returned, which cancels all its stages."""
        if self._send(effect):
            return True
        worker, incarnation = effect.worker, effect.incarnation
        reason = ReturnReason.QUEUE_FULL if fits_in_frame(effect.submit) else ReturnReason.TOO_LARGE
        again = target.routed.on_returned(effect.submit.epoch, reason, worker, incarnation, now)
        target.on_failure((worker, incarnation), reason, again, now)
        self.apply(target, again, now)
        return False

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

    def cancel_stage(self, effect: CancelStage) -> None:
        """Release the stage's load and send a Cancel."""
        self._fleet.remove_work(effect.worker, effect.incarnation, effect.request)
        link = self._links.link_to(effect.worker, effect.incarnation)
        if link is not None:
            link.cancel(Cancel(request=effect.request, epoch=effect.epoch))

    def end_stage(self, effect: StageEnded) -> None:
        """Release the stage's load."""
        self._fleet.remove_work(effect.worker, effect.incarnation, effect.request)

    def abort_migration(self, effect: AbortMigration) -> None:
        """Notify the decoding worker that its successor is gone."""
        link = self._links.link_to(effect.worker, effect.incarnation)
        if link is not None:
            link.send(PagesReceived(request=effect.request, epoch=effect.epoch))

    def wait(self, target: RequestStream, not_before: float, now: float) -> None:
        """Place the request at ``not_before``, or later if the retry budget asks for it."""
        routed = target.routed
        self._placement.isolation.remove(routed.request.id)
        paid = now
        if target.count_retry():
            if routed.fails_repeatedly:
                paid = self._budget.spend(now, self._stats.open_requests)
            self._metrics.on_retried(delayed=paid > now)
        not_before = max(not_before, paid)
        self._placement.add_waiting(routed.request.id, not_before, firm=paid > now)
        if not_before > now:
            self._to_place.pop(routed.request.id, None)
        elif routed.epoch == 1:
            self._place(target, now)
        else:
            self._place_soon([routed.request.id])

    def fail(self, target: RequestStream, error: PenstockError, now: float) -> None:
        """End the stream with the error."""
        target.fail(error)
        self._stats.on_finished(target, "error", now)

    # --- placing ----------------------------------------------------------------------------------------------------

    def place_waiting(self, now: float, *, ready: bool = False) -> None:
        """Place requests that are due.  ``ready``: a worker has become ready, which ends most waits."""
        self._place_soon(self._placement.due_requests(now, ready=ready))

    def _place_soon(self, requests: Iterable[RequestId]) -> None:
        idle = not self._to_place
        self._to_place.update(dict.fromkeys(requests))
        if idle and self._to_place:
            self._turns.add(self._place_all())

    def _place_all(self) -> Iterator[None]:
        while self._to_place:
            request = next(iter(self._to_place))
            del self._to_place[request]
            stream = self._streams.get(request)
            if stream is not None:
                self._place_or_retry(stream, self._clock.now())
                yield

    def _place_or_retry(self, stream: RequestStream, now: float) -> None:
        """Place one request.  An error is logged and does not affect the requests behind it."""
        try:
            self._place(stream, now)
        except Exception:
            log.exception("%s could not be placed", stream.routed.request.id)
            if stream.routed.phase is RequestPhase.WAITING:
                self._placement.add_waiting(stream.routed.request.id, now + PLACEMENT_RETRY_S, firm=True)

    def _place(self, stream: RequestStream, now: float) -> None:
        routed = stream.routed
        if routed.phase is RequestPhase.WAITING:
            decision, root = self._placement.decide(routed, now)
            if stream.spans is not None:
                stream.spans.on_decision(decision, now, self._clock.now())
            self.apply(stream, routed.on_placed(decision, root, now), now)
            if routed.phase is RequestPhase.WAITING and not decision.stages and len(self._placement.isolation):
                # The request that excludes it from a worker may be cleared at any moment.
                self._placement.add_waiting(routed.request.id, now + TICK_S)
