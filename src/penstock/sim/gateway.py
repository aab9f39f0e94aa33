"""The simulated gateway: what ``router.service`` does with messages, done with calls.

Fleet, placement, prefix index, flights and policies are the router's own objects.  Before each decision the gateway
hears what workers would have reported by then: everything up to their last step, at most every ``REPORT_S``.
Time alone fails nothing here: there are no deadlines, so a fleet that is too small shows as waiting.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.config.limits import RoutingConfig
from penstock.engine.core.events import CancelRequest, CreditGranted, FirstTokenArrived, PagesArrived, PagesReleased
from penstock.engine.core.plan import CompletedPage, NewTokens, ReturnedRequest, StepOutcome
from penstock.engine.core.request import Request
from penstock.router.effects import (
    CancelStage,
    DeliverTokens,
    FailRequest,
    RequestEffects,
    StageEnded,
    SubmitStage,
    WaitForWorker,
)
from penstock.router.fleet import Fleet
from penstock.router.placement import Placement
from penstock.router.request import FailoverLimits, RequestPhase, RoutedRequest
from penstock.sim.fleet import LinkSpeeds
from penstock.sim.resources import EventQueue
from penstock.sim.results import RunResults
from penstock.sim.worker import INCARNATION, SimWorker
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId, RequestStage, TokenBatch, ValidRequest, WorkerId
from penstock.wire.gateway_messages import TokenItem
from penstock.wire.supervisor_messages import WorkerUp

# MERGED: Hand-overs between simulated workers: credit, pages over the wires, the first token, release.
# MERGED:
# MERGED: The order of events is that of ``kv.transfer``; instead of bytes there is the time that they take.
# MERGED: Pages travel while
# MERGED: later chunks are computed, and stop nobody's steps (direct memory access), so what is modelled is
# MERGED: the wire alone.

TransferKey = tuple[RequestId, int]
"""(request, epoch)."""


@dataclass(slots=True)
class _HandOver:
    """One, from the receiver's credit on."""

    source: SimWorker
    receiver: SimWorker
    skip_tokens: int  # that the receiver has already
    through_at: float  # when everything that was sent so far has arrived


class SimTransfers:
    """All of a fleet."""

    def __init__(self, agenda: EventQueue, message_s: float) -> None:
        self._agenda = agenda
        self._message_s = message_s
        self._sources: dict[TransferKey, WorkerId] = {}  # where a decode leg's pages come from
        self._open: dict[TransferKey, _HandOver] = {}
        self.pages = 0  # that have travelled

    def expect_transfer(self, key: TransferKey, source: WorkerId) -> None:
        """A decode leg was placed whose pages come from there."""
        self._sources[key] = source

    def on_reserved(self, receiver: SimWorker, request: Request, workers: Mapping[WorkerId, SimWorker]) -> None:
        """The receiver has room: that is the credit."""
        key = (request.id, request.epoch)
        if key not in self._sources:
            return  # it is cancelled, and the receiver has not heard of that yet
        source = workers[self._sources[key]]
        self._open[key] = _HandOver(source, receiver, request.computed, self._agenda.now)
        self._agenda.call_after(self._message_s, source.add_event, CreditGranted(id=request.id, epoch=request.epoch))

    def on_outcome(self, worker: SimWorker, outcome: StepOutcome) -> None:
        """What a prefill worker's step has brought: pages, and perhaps the first token after the last of them."""
        by_key: dict[TransferKey, list[CompletedPage]] = {}
        for done in outcome.completed_pages:
            by_key.setdefault((done.request.id, done.request.epoch), []).append(done)
        for key, pages in by_key.items():
            self._pages(key, pages)
        for progress in outcome.new_tokens:
            if progress.request.leg is RequestStage.PREFILL:
                self._first(progress)

    def _pages(self, key: TransferKey, pages: list[CompletedPage]) -> None:
        open_ = self._open.get(key)
        if open_ is None:
            return
        size = open_.receiver.config.page_tokens
        wanted = [done for done in pages if done.block * size + done.tokens > open_.skip_tokens]
        if not wanted:
            return
        self.pages += len(wanted)
        nbytes = len(wanted) * open_.receiver.page_bytes
        through = open_.source.out.transfer(nbytes, self._agenda.now, open_.receiver.into)
        open_.through_at = max(open_.through_at, through)
        computed = max(done.block * size + done.tokens for done in wanted)
        arrived = PagesArrived(id=key[0], epoch=key[1], computed=computed)
        self._agenda.call_at(through + self._message_s, open_.receiver.add_event, arrived)

    def _first(self, progress: NewTokens) -> None:
        request = progress.request
        key = (request.id, request.epoch)
        open_ = self._open.get(key)
        if open_ is None:
            return
        first = FirstTokenArrived(id=key[0], epoch=key[1], token=progress.tokens[0], finish=progress.finish)
        when = max(open_.through_at, self._agenda.now) + self._message_s
        self._agenda.call_at(when, open_.receiver.add_event, first)
        self._agenda.call_at(when + self._message_s, open_.source.add_event, PagesReleased(id=key[0], epoch=key[1]))
        self.remove(key)

    def remove(self, key: TransferKey) -> None:
        """It is over, or nobody wants it any more."""
        self._open.pop(key, None)
        self._sources.pop(key, None)


REPORT_S = 0.1
"""Between two reports of a worker at least (``WorkerConfig.report_min_s``)."""

_PATIENCE = FailoverLimits(max_attempts=1 << 30, first_byte_s=math.inf, stall_s=math.inf)


class SimGateway:
    """See above.  Implements ``worker.Port``."""

    def __init__(self, routing: RoutingConfig, agenda: EventQueue, links: LinkSpeeds, page_tokens: int) -> None:
        self._agenda = agenda
        self._message_s, self._prompt_token_s = links.message_s, links.prompt_token_s
        self.fleet = Fleet()
        self.placement = Placement(
            routing, self.fleet, Metrics(model_name="simulated"), mixed_numerics=False, page_tokens=page_tokens
        )
        self.hand_overs = SimTransfers(agenda, links.message_s)
        self.measures: RunResults | None = None
        self.splits = 0  # requests that were placed at two workers
        self.decisions = 0
        self._workers: dict[WorkerId, SimWorker] = {}
        self._flights: dict[RequestId, RoutedRequest] = {}
        self._serial = 0

    def add_workers(self, workers: Sequence[SimWorker], measures: RunResults) -> None:
        """These are the fleet, and this is where deliveries are noted."""
        self.measures = measures
        for slot, worker in enumerate(workers):
            name = worker.name
            up = WorkerUp(worker=name, incarnation=INCARNATION, role=worker.role, pid=1, endpoint=f"memory://{name}")
            self.fleet.on_worker_up(up, 0.0)
            self.placement.prefixes.add_worker(slot, INCARNATION)
            for events in worker.whole_cache():
                self.placement.prefixes.on_kv_events(slot, events)
            self.fleet.on_report(worker.report(0.0), 0.0)
            self._workers[name] = worker

    # --- requests ---------------------------------------------------------------------------------------------------

    def serve(self, request: ValidRequest) -> None:
        """A request has come."""
        now = self._agenda.now
        assert self.measures is not None, "join comes first"
        self.measures.add_request(int(request.id), now, len(request.prompt))
        self._flights[request.id] = RoutedRequest(request, _PATIENCE, now)
        if self._prompt_token_s:
            self._agenda.call_after(self._prompt_token_s * len(request.prompt), self._begin, request.id)
        else:
            self._begin(request.id)

    def _begin(self, request: RequestId) -> None:
        """It has been read, and is placed."""
        flight = self._flights[request]
        self._apply(flight, flight.begin(self._agenda.now))

    @property
    def open(self) -> int:
        """Requests without an end."""
        return len(self._flights)

    # --- worker.Port ------------------------------------------------------------------------------------------------

    def on_outcome(self, worker: SimWorker, outcome: StepOutcome, spacing_s: float) -> None:
        """Pages to receivers, tokens to clients."""
        if outcome.completed_pages or outcome.new_tokens:
            self.hand_overs.on_outcome(worker, outcome)
        now = self._agenda.now
        for progress in outcome.new_tokens:
            request = progress.request
            flight = self._flights.get(request.id)
            if flight is None or flight.epoch != request.epoch:
                continue
            item = TokenItem(
                request=request.id,
                epoch=request.epoch,
                index=progress.index,
                tokens=progress.tokens,
                finish=progress.finish,
                cached_tokens=request.cached_tokens if progress.index == request.emitted else 0,
            )
            self.fleet.set_work_left(worker.name, item.request, flight.tokens_left(item, worker.name))
            self._apply(flight, flight.on_tokens(item, worker.name, INCARNATION, now), spacing_s)

    def on_reserved(self, worker: SimWorker, request: Request) -> None:
        """A receiver has room."""
        self.hand_overs.on_reserved(worker, request, self._workers)

    def on_returned(self, worker: SimWorker, returned: ReturnedRequest) -> None:
        """A worker gives a request back."""
        self._agenda.call_after(self._message_s, self._hear_return, worker.name, returned)

    def _hear_return(self, worker: WorkerId, returned: ReturnedRequest) -> None:
        flight = self._flights.get(returned.id)
        if flight is not None:
            now = self._agenda.now
            self._apply(flight, flight.on_returned(returned.epoch, returned.reason, worker, INCARNATION, now))

    # --- effects ----------------------------------------------------------------------------------------------------

    def _apply(self, flight: RoutedRequest, effects: RequestEffects, spacing_s: float = 0.0) -> None:
        """As ``router.service`` does."""
        for effect in effects:
            if isinstance(effect, DeliverTokens):
                self._deliver(flight, effect.batch, spacing_s)
            elif isinstance(effect, StageEnded):
                self.fleet.remove_work(effect.worker, effect.incarnation, effect.request)
            elif isinstance(effect, CancelStage):
                self._cancel(effect)
            elif isinstance(effect, SubmitStage):
                self._send(effect)
            elif isinstance(effect, WaitForWorker):
                self._wait(flight, effect.not_before)
            elif isinstance(effect, FailRequest):
                self._settle(flight, failed=str(effect.error))

    def _deliver(self, flight: RoutedRequest, batch: TokenBatch, spacing_s: float) -> None:
        assert self.measures is not None
        number = int(flight.request.id)
        answered = self.measures.requests[number]
        if not answered.tokens:
            self.placement.on_first_token(flight.request.id)
            answered.cached = batch.cached_tokens
        if batch.tokens:
            self.measures.add_tokens(number, len(batch.tokens), self._agenda.now + self._message_s, spacing_s)
        if batch.finish is not None:
            answered.done = True
            self._settle(flight)

    def _settle(self, flight: RoutedRequest, failed: str = "") -> None:
        assert self.measures is not None
        self.measures.requests[int(flight.request.id)].failed = failed
        self.placement.on_finished(flight)
        self._flights.pop(flight.request.id, None)

    def _cancel(self, effect: CancelStage) -> None:
        self.fleet.remove_work(effect.worker, effect.incarnation, effect.request)
        self.hand_overs.remove((effect.request, effect.epoch))
        worker = self._workers[effect.worker]
        self._agenda.call_after(self._message_s, worker.add_event, CancelRequest(id=effect.request, epoch=effect.epoch))

    def _send(self, effect: SubmitStage) -> None:
        self._serial += 1
        submit = msgspec.structs.replace(effect.submit, serial=self._serial)
        if submit.pages_from is not None:
            self.hand_overs.expect_transfer((submit.request, submit.epoch), submit.pages_from.worker)
            self.splits += 1
        self.fleet.add_work(
            effect.worker, effect.incarnation, submit.request, effect.tokens, due=effect.work, serial=self._serial
        )
        self._agenda.call_after(self._message_s, self._workers[effect.worker].submit, submit)

    # --- placing ----------------------------------------------------------------------------------------------------

    def _wait(self, flight: RoutedRequest, not_before: float) -> None:
        now = self._agenda.now
        self.placement.add_waiting(flight.request.id, not_before)
        if not_before <= now:
            self._place(flight)
        elif not_before < math.inf:
            self._agenda.call_at(not_before, self._place, flight)
        else:  # no worker will ever be able to
            self._settle(flight, failed="no worker can serve it")

    def _place(self, flight: RoutedRequest) -> None:
        if flight.phase is RequestPhase.WAITING:
            self._hear()
            now = self._agenda.now
            self.decisions += 1
            decision, root = self.placement.decide(flight, now)
            self._apply(flight, flight.on_placed(decision, root, now))

    def _hear(self) -> None:
        """What workers have told by now."""
        now = self._agenda.now
        for slot, (name, worker) in enumerate(self._workers.items()):
            if worker.changed and now - worker.reported_at >= REPORT_S:
                for events in worker.cache_events():
                    self.placement.prefixes.on_kv_events(slot, events)
                report = worker.report(now)
                self.placement.prefixes.on_report(slot, INCARNATION, report.kv_sequence)
                self.fleet.on_report(report, now)
            else:
                self.fleet.mark_seen(name, INCARNATION, now)
