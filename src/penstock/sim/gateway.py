"""The simulated gateway: the router's own fleet, placement, requests and policies, called directly.

Before each decision the gateway receives the reports that workers would have sent by then: one at most every
``REPORT_S``.  Time alone fails nothing: without deadlines, a fleet that is too small shows as waiting.
``SimTransfers`` moves KV pages between simulated workers in the order of events of ``kv.transfer``.  Pages travel while
later chunks are computed and stop no steps (direct memory access), so only the links take time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.config.fleet_file import LinkSpeeds
from penstock.config.limits import RoutingConfig
from penstock.engine.core.events import CancelRequest, CreditGranted, FirstTokenArrived, PagesArrived, PagesReleased
from penstock.engine.core.plan import CompletedPage, NewTokens, ReturnedRequest, StepOutcome
from penstock.engine.core.request import Request
from penstock.errors import PenstockError
from penstock.router.effects import AbortMigration, CancelStage, RequestEffect, StageEnded, SubmitStage, apply_effects
from penstock.router.fleet import Fleet
from penstock.router.placement import Placement
from penstock.router.request import FailoverLimits, RequestPhase, RoutedRequest
from penstock.sim.resources import EventQueue
from penstock.sim.results import RunResults
from penstock.sim.worker import INCARNATION, SimWorker
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId, RequestStage, TokenBatch, ValidRequest, WorkerId
from penstock.wire.gateway_messages import TokenItem
from penstock.wire.supervisor_messages import WorkerUp

SimTransferKey = tuple[RequestId, int]
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
        self._sources: dict[SimTransferKey, WorkerId] = {}  # where a decode leg's pages come from
        self._open: dict[SimTransferKey, _HandOver] = {}
        self.pages = 0  # that have travelled

    def expect_transfer(self, key: SimTransferKey, source: WorkerId) -> None:
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
        by_key: dict[SimTransferKey, list[CompletedPage]] = {}
        for done in outcome.completed_pages:
            by_key.setdefault((done.request.id, done.request.epoch), []).append(done)
        for key, pages in by_key.items():
            self._pages(key, pages)
        for progress in outcome.new_tokens:
            if progress.request.stage is RequestStage.PREFILL:
                self._first(progress)

    def _pages(self, key: SimTransferKey, pages: list[CompletedPage]) -> None:
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

    def remove(self, key: SimTransferKey) -> None:
        """The transfer has ended or was cancelled."""
        self._open.pop(key, None)
        self._sources.pop(key, None)


REPORT_S = 0.1
"""Between two reports of a worker at least (``WorkerConfig.report_min_s``)."""

_NO_LIMITS = FailoverLimits(max_attempts=1 << 30, first_byte_s=math.inf, stall_s=math.inf)


@dataclass(slots=True)
class _SimRequest:
    """A request, and the time between the steps of its latest tokens."""

    routed: RoutedRequest
    spacing_s: float = 0.0


class SimGateway:
    """See above.  Implements ``sim.worker.WorkerObserver``."""

    def __init__(self, routing: RoutingConfig, agenda: EventQueue, links: LinkSpeeds, page_tokens: int) -> None:
        self._agenda = agenda
        self._message_s, self._prompt_token_s = links.message_s, links.prompt_token_s
        self.fleet = Fleet()
        self.placement = Placement(
            routing, self.fleet, Metrics(model_name="simulated"), mixed_numerics=False, page_tokens=page_tokens
        )
        self.transfers = SimTransfers(agenda, links.message_s)
        self.results: RunResults | None = None
        self.splits = 0  # requests that were placed at two workers
        self.decisions = 0
        self._workers: dict[WorkerId, SimWorker] = {}
        self._requests: dict[RequestId, _SimRequest] = {}
        self._serial = 0

    def add_workers(self, workers: Sequence[SimWorker], results: RunResults) -> None:
        """These are the fleet, and this is where deliveries are noted."""
        self.results = results
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
        assert self.results is not None, "join comes first"
        self.results.add_request(int(request.id), now, len(request.prompt))
        self._requests[request.id] = _SimRequest(RoutedRequest(request, _NO_LIMITS, now))
        if self._prompt_token_s:
            self._agenda.call_after(self._prompt_token_s * len(request.prompt), self._begin, request.id)
        else:
            self._begin(request.id)

    def _begin(self, request: RequestId) -> None:
        """The prompt has been read; place the request."""
        target, now = self._requests[request], self._agenda.now
        apply_effects(self, target, target.routed.begin(now), now)

    @property
    def open(self) -> int:
        """The number of unfinished requests."""
        return len(self._requests)

    # --- worker.Port ------------------------------------------------------------------------------------------------

    def on_outcome(self, worker: SimWorker, outcome: StepOutcome, spacing_s: float) -> None:
        """Pages to receivers, tokens to clients."""
        if outcome.completed_pages or outcome.new_tokens:
            self.transfers.on_outcome(worker, outcome)
        now = self._agenda.now
        for progress in outcome.new_tokens:
            request = progress.request
            target = self._requests.get(request.id)
            if target is None or target.routed.epoch != request.epoch:
                continue
            item = TokenItem(
                request=request.id,
                epoch=request.epoch,
                index=progress.index,
                tokens=progress.tokens,
                finish=progress.finish,
                cached_tokens=request.cached_tokens if progress.index == request.emitted else 0,
            )
            routed, target.spacing_s = target.routed, spacing_s
            self.fleet.set_work_left(worker.name, item.request, routed.tokens_left(item, worker.name))
            apply_effects(self, target, routed.on_tokens(item, worker.name, INCARNATION, now), now)

    def on_reserved(self, worker: SimWorker, request: Request) -> None:
        """A receiver has room."""
        self.transfers.on_reserved(worker, request, self._workers)

    def on_returned(self, worker: SimWorker, returned: ReturnedRequest) -> None:
        """A worker gives a request back."""
        self._agenda.call_after(self._message_s, self._hear_return, worker.name, returned)

    def _hear_return(self, worker: WorkerId, returned: ReturnedRequest) -> None:
        target = self._requests.get(returned.id)
        if target is not None:
            now = self._agenda.now
            effects = target.routed.on_returned(returned.epoch, returned.reason, worker, INCARNATION, now)
            apply_effects(self, target, effects, now)

    # --- router.effects.EffectPort ----------------------------------------------------------------------------------

    def observe(self, target: _SimRequest, effect: RequestEffect, now: float) -> None:
        """Nothing is recorded."""

    def deliver(self, target: _SimRequest, batch: TokenBatch, now: float) -> None:
        """Note tokens as the client receives them."""
        assert self.results is not None
        request = target.routed.request.id
        answered = self.results.requests[int(request)]
        if not answered.tokens:
            self.placement.on_first_token(request)
            answered.cached = batch.cached_tokens
        if batch.tokens:
            self.results.add_tokens(int(request), len(batch.tokens), now + self._message_s, target.spacing_s)
        if batch.finish is not None:
            answered.done = True
            self._finish(target)

    def submit(self, target: _SimRequest, effect: SubmitStage, now: float) -> bool:
        """Send a stage to its worker; this never fails."""
        self._serial += 1
        submit = msgspec.structs.replace(effect.submit, serial=self._serial)
        if submit.pages_from is not None:
            self.transfers.expect_transfer((submit.request, submit.epoch), submit.pages_from.worker)
            self.splits += 1
        self.fleet.add_work(
            effect.worker, effect.incarnation, submit.request, effect.tokens, due=effect.work, serial=self._serial
        )
        self._agenda.call_after(self._message_s, self._workers[effect.worker].submit, submit)
        return True

    def cancel_stage(self, effect: CancelStage) -> None:
        """Release the stage's load and send a Cancel."""
        self.fleet.remove_work(effect.worker, effect.incarnation, effect.request)
        self.transfers.remove((effect.request, effect.epoch))
        worker = self._workers[effect.worker]
        self._agenda.call_after(self._message_s, worker.add_event, CancelRequest(id=effect.request, epoch=effect.epoch))

    def end_stage(self, effect: StageEnded) -> None:
        """Release the stage's load."""
        self.fleet.remove_work(effect.worker, effect.incarnation, effect.request)

    def abort_migration(self, effect: AbortMigration) -> None:
        """Simulated requests do not migrate."""

    def wait(self, target: _SimRequest, not_before: float, now: float) -> None:
        """Choose workers at ``not_before``, or now if that has passed."""
        self.placement.add_waiting(target.routed.request.id, not_before)
        if not_before <= now:
            self._place(target)
        elif not_before < math.inf:
            self._agenda.call_at(not_before, self._place, target)
        else:  # no worker will ever be able to
            self._finish(target, failed="no worker can serve it")

    def fail(self, target: _SimRequest, error: PenstockError, now: float) -> None:
        """Note the error."""
        self._finish(target, failed=str(error))

    def _finish(self, target: _SimRequest, failed: str = "") -> None:
        assert self.results is not None
        self.results.requests[int(target.routed.request.id)].failed = failed
        self.placement.on_finished(target.routed)
        self._requests.pop(target.routed.request.id, None)

    # --- placing ----------------------------------------------------------------------------------------------------

    def _place(self, target: _SimRequest) -> None:
        routed = target.routed
        if routed.phase is RequestPhase.WAITING:
            self._hear()
            now = self._agenda.now
            self.decisions += 1
            decision, root = self.placement.decide(routed, now)
            apply_effects(self, target, routed.on_placed(decision, root, now), now)

    def _hear(self) -> None:
        """Receive the reports that workers have sent by now."""
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
