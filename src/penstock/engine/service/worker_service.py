"""The worker's service (``engine.loop``): the one place where messages and the scheduler's events meet.

::

    gateway --Submit, Cancel, Hello--> drain_events --AddRequest, CancelRequest-----> scheduler
    peer    --pages, PullPages-------> drain_events --CreditGranted, PagesArrived --> scheduler
    scheduler --StepPlan-------------> on_plan --PullPages, RequestReturned---------> peers, gateways
    scheduler --StepOutcome----------> publish --Tokens, pages----------------------> gateways, peers

Messages to other workers are ``kv_transfer``'s, messages to gateways are sent here.  Nothing here waits, and nothing
that a peer sends raises.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from penstock.clock import Clock
from penstock.config.schema import WorkerConfig
from penstock.engine.core.events import (
    AddRequest,
    CancelRequest,
    CreditGranted,
    EngineEvent,
    FirstTokenArrived,
    Migrate,
    MigrationDone,
    PagesArrived,
    PagesReleased,
    RecomputeLocally,
)
from penstock.engine.core.plan import StepOutcome, StepPlan
from penstock.engine.core.request import RequestStatus
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.service.gateway_exchange import GatewayExchange
from penstock.engine.service.gateways import (
    UNFIT,
    ConnectedGateway,
    GatewayRequest,
    GatewayRequests,
    TokenBatches,
    add_request_of,
    invalid_submit,
    split_prompt_logprobs,
    token_item,
)
from penstock.engine.service.kv_events import KvEventPublisher, LowerTiers
from penstock.engine.service.kv_transfer import (
    EXPORT_POLL_S,
    KvTransfer,
    PageExporter,
    TransferEnds,
    TransferEvent,
)
from penstock.engine.service.lifecycle import Lifecycle
from penstock.engine.service.load_report import LoadReporter, ReportSources
from penstock.engine.service.migration import Migrations, migrated_item
from penstock.engine.service.peer_links import PeerLinks
from penstock.engine.service.readiness import PageWait, ReadinessGate, ReadinessSources
from penstock.engine.service.remote_encoder import EncodeRequests
from penstock.kv.transfer.events import HedgeWon, PagesAdvanced, PullFailed, PullGranted, TransferDone, TransferReleased
from penstock.types import Duty, RequestId, RequestStage, Role, WorkerState
from penstock.wire.codec import fits_in_frame
from penstock.wire.gateway_messages import (
    MAX_REASON_CHARS,
    AdapterNames,
    AssignRole,
    AwaitedStage,
    Cancel,
    ChangeAdapter,
    ClaimIdempotencyKey,
    FindTokens,
    Hello,
    OpenRequestCounts,
    PoisonRequests,
    RateDemands,
    Recipient,
    RequestReturned,
    ReturnReason,
    SaveTokens,
    Submit,
    TokenItem,
    Tokens,
    WorkerReport,
)
from penstock.wire.transfer_messages import EncodeImage, PagesReceived, PullPages
from penstock.wire.transport import Listener, Received, Source, Transport


@dataclass(frozen=True, slots=True)
class TransferEventOutputs:
    """Where it goes that a transfer has caused."""

    event: Callable[[EngineEvent], None]  # to the scheduler
    return_request: Callable[[RequestId, int, str], None]  # a request to its gateway, with the reason
    tokens: Callable[[ConnectedGateway, tuple[TokenItem, ...]], object]


class TransferEventHandler:
    """Turns events of transfers into events and messages of one worker."""

    def __init__(
        self,
        scheduler: Scheduler,
        requests: GatewayRequests,
        moves: Migrations,
        reporter: LoadReporter,
        out: TransferEventOutputs,
    ) -> None:
        self._scheduler = scheduler
        self._requests = requests
        self._moves = moves
        self._reporter = reporter
        self._out = out

    def handle(self, event: TransferEvent, now: float) -> None:
        """Handle one event of a transfer's receiver or sender."""
        match event:
            case PagesAdvanced():
                self._out.event(PagesArrived(id=event.request, epoch=event.epoch, computed=event.computed))
            case TransferDone():
                self._complete(event, now)
            case HedgeWon():
                self._hedge_won(event, now)
            case PullFailed():
                self._reporter.count("hand_overs_failed")
                self._out.return_request(event.request, event.epoch, ReturnReason.PAGES_LOST.with_details(event.reason))
            case PullGranted():
                if not self._moves.on_credit(event, now):
                    self._out.event(CreditGranted(id=event.request, epoch=event.epoch))
            case TransferReleased():
                self._released(event, now)

    def _complete(self, event: TransferDone, now: float) -> None:
        """All pages are here: the scheduler gets the tokens; the rest of the item is kept for ``publish``."""
        first = event.first
        ask = self._requests.get(event.request)
        if ask is not None and ask.epoch != event.epoch:
            ask = None
        if ask is not None:
            began, tokens = ask.pulled
            ask.end_phase("transfer", began, now, tokens=tokens)
        if ask is not None and ask.migrates:
            self._migrated(event, ask)
            return
        self._reporter.count("hand_overs")
        if ask is not None:
            ask.first_item = first
            if first.finish is not None:
                # The whole answer is this token.  The prefill worker sends it, too; if it died first, we do.
                self._out.tokens(ask.gateway, (first,))
        self._out.event(
            FirstTokenArrived(id=event.request, epoch=event.epoch, token=first.tokens[0], finish=first.finish)
        )

    def _hedge_won(self, event: HedgeWon, now: float) -> None:
        """The pages of a computed prompt are too slow to come: this worker recomputes them."""
        ask = self._requests.get(event.request)
        if ask is not None and ask.epoch == event.epoch:
            began, tokens = ask.pulled
            ask.end_phase("transfer", began, now, tokens=tokens)
            ask.first_item = event.first
        self._out.event(RecomputeLocally(id=event.request, epoch=event.epoch, token=event.first.tokens[0]))

    def _migrated(self, event: TransferDone, ask: GatewayRequest) -> None:
        """A migrated response continues here."""
        first, here = event.first, self._scheduler.get_request(event.request)
        self._reporter.count("answers_joined")
        if here is not None and 0 <= here.emitted - first.index <= len(first.tokens):
            ask.first_item = migrated_item(first, here.emitted)
        self._out.event(MigrationDone(id=event.request, epoch=event.epoch, index=first.index, tokens=first.tokens))

    def _released(self, event: TransferReleased, now: float) -> None:
        if event.reason == "lease ended":
            self._reporter.count("leases_expired")
        moved = self._moves.on_released(event)
        if isinstance(moved, Migrate):
            self._out.event(moved)
            return
        if moved:
            self._reporter.count("answers_moved")
            self._out.return_request(event.request, event.epoch, ReturnReason.HANDED_OVER)
            return
        request = self._scheduler.get_request(event.request)
        if request is not None and request.epoch == event.epoch and request.status is not RequestStatus.HANDOVER:
            # The receiver went away before the prompt was processed: no worker will finish this answer.
            self._reporter.count("hand_overs_failed")
            self._out.return_request(event.request, event.epoch, ReturnReason.PAGES_LOST.with_details(event.reason))
        self._out.event(PagesReleased(id=event.request, epoch=event.epoch))


log = logging.getLogger("penstock.worker")

MESSAGES_PER_TURN = 512
"""Messages handled between two steps; the rest waits for the next turn."""

GRAMMAR_POLL_S = 0.001
"""Between two checks whether a grammar is compiled."""

MIN_REPORT_WAIT_S = 0.005
"""The shortest sleep while a report is due."""

TICK_S = 0.1
"""Between two checks of leases and silent gateways."""


class WorkerService:
    """See ``engine.loop.EngineService``."""

    def __init__(
        self,
        config: WorkerConfig,
        scheduler: Scheduler,
        hand_over: TransferEnds,
        transport: Transport,
        clock: Clock,
        *,
        ready: ReadinessSources | None = None,
        figures: ReportSources | None = None,
        lower_tiers: LowerTiers | None = None,
        gateway_incarnations: Callable[[], Mapping[str, int]] = dict,
        on_role: Callable[[Role], None] = lambda role: None,
        on_settled: Callable[[Role], None] = lambda role: None,
    ) -> None:
        """``figures``: for reports.  ``lower_tiers``: below this worker's prefix cache.  ``gateway_incarnations``: of
        the gateways of this host, as far as they are known.  ``on_role``, ``on_settled``: see ``Lifecycle``."""
        self._config = config
        self._self = Recipient(worker=config.worker, incarnation=config.incarnation, identity=hand_over.identity)
        self._scheduler = scheduler
        self._clock = clock
        self._listener: Listener = transport.listen(config.endpoint)
        links, pool = PeerLinks(transport, config.hand_over.peer_idle_s), scheduler.memory.pool
        ends = self._transfer = KvTransfer(hand_over, links, self._listener, clock, self._on_transfer_event)
        self._page_exporter = PageExporter(pool, ends.offer_page, ends.finish_prefill, hand_over.writer)
        requests = self._requests = GatewayRequests(config.gateway_silence_s)
        self._events: list[EngineEvent] = []
        ready = ready or ReadinessSources()
        self._images = ready.images
        self._held = ReadinessGate(ready, self._refuse, self._queue_room, adapters_in_use=scheduler.adapters)
        ready.pages.watch(self._waited)
        self._mixed = hand_over.identity.mixed
        self._served = EncodeRequests(hand_over.identity, self._listener.send)
        self.exchange = GatewayExchange(requests, self._listener.send)
        self._awaited: list[tuple[ConnectedGateway, AwaitedStage]] = []  # what gateways asked about in this turn
        self.publisher = KvEventPublisher(
            config, scheduler.memory.prefix, self._listener, self._report_now, lower=lower_tiers
        )
        self._next_tick = 0.0
        self._step_began = 0.0
        self._gateway_incarnations = gateway_incarnations
        self.reporter = LoadReporter(
            config,
            hand_over.identity,
            scheduler,
            hand_over.receiver,
            figures or ReportSources(),
            turned_away=lambda: hand_over.sender.rejected_connections,
        )
        budget, ahead = config.hand_over.copy_budget_bytes, config.hand_over.ahead_tokens
        self._moves = Migrations(scheduler, ends, requests, budget, ahead_tokens=ahead)
        self.lifecycle = Lifecycle(config, self.reporter, scheduler, requests, on_role=on_role, on_settled=on_settled)
        outputs = TransferEventOutputs(self._post_event, self._return, self._send_tokens)
        self._transfer_events = TransferEventHandler(scheduler, requests, self._moves, self.reporter, outputs)

    def _queue_room(self) -> int:
        """Requests that the scheduler's queue still takes."""
        return self._config.scheduler.max_queued - self._scheduler.queued

    # --- for the loop ------------------------------------------------------------------------------------------------

    def drain_events(self) -> Iterable[EngineEvent]:
        """Handle received messages, copy pages within the budget, and return the events for the scheduler."""
        now = self._clock.now()
        for _ in range(MESSAGES_PER_TURN):
            received = self._listener.recv()
            if received is None:
                break
            self._on_message(received, now)
        for content, rows_ND in self._images.encoded_for_peers(self._served.contents):
            self._served.send_rows(content, rows_ND)
        self._page_exporter.send_written(now)
        self.reporter.count("transfer_seconds", self._transfer.drain(now))
        if now >= self._next_tick:
            self._tick(now)
        self._events += self._moves.next_events(now)
        events, self._events = self._events, []
        if events:
            self.publisher.mark_changed()
        return self._held.release_ready(events)

    def on_plan(self, plan: StepPlan) -> None:
        """Send credits and returns of a plan, before its step is computed."""
        now = self._clock.now()
        for returned in plan.returned:
            self._return(returned.id, returned.epoch, returned.reason)
        for request in plan.reserved:
            ask = self._requests.get(request.id)
            if ask is not None and ask.pages_from is not None:
                ask.end_phase("worker_queue", ask.arrived_at, now)
                ask.pulled = (now, len(request.prompt) + request.emitted - request.computed)
                self._transfer.request_pages(request, ask.pages_from, now)
        self._moves.on_plan(now)
        for row in plan.rows:
            if row.count > 1 or len(row.request.output) == row.request.emitted:
                ask = self._requests.get(row.request.id)
                if ask is not None and ask.started_at is None:
                    ask.started_at = now
                    ask.end_phase("worker_queue", ask.arrived_at, now)
        for request_id in plan.removed:
            ask = self._requests.get(request_id)
            if ask is not None and self._scheduler.get_request(request_id) is None:
                self._requests.remove(request_id, ask.epoch)

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        """Send what came of a plan: pages to decode workers, tokens to gateways, and a report when it is due.

        The order is part of the protocol.  Pages are offered before the first token that ends their hand-over, tokens
        are sent before a gateway is answered what became of a request, and a report counts what was sent before it.
        """
        now = self._clock.now()
        self._count_step(plan, outcome, now)
        self._page_exporter.on_pages_completed(outcome.completed_pages, now)
        self._moves.on_step(outcome, now)
        batches = self._token_batches(plan, outcome, now)
        self._page_exporter.send_written(now)
        for gateway, items in batches.all():
            self._send_tokens(gateway, items)
        self._answer_awaited()
        if plan.rows or plan.reserved or plan.preempted or outcome.new_tokens or outcome.completed_pages:
            self.publisher.mark_changed()
        self.publisher.send_due(self._requests.gateways(), now, waiting=len(self._requests) > 0)
        if self._moves.is_urgent:
            self._relieve(now)

    def _count_step(self, plan: StepPlan, outcome: StepOutcome, now: float) -> None:
        if plan.rows:
            self.reporter.count_step(plan, now - self._step_began)
        if outcome.late_masks:
            self.reporter.count("generation_tokens", -outcome.late_masks)
            self.reporter.count("rows_waited_for_masks", outcome.late_masks)
        self.reporter.count("pages_sent", len(outcome.completed_pages))

    def _token_batches(self, plan: StepPlan, outcome: StepOutcome, now: float) -> TokenBatches:
        """Send one batch of items to each gateway; the end of each prefill goes to the page exporter as well."""
        batches = TokenBatches()
        for new in outcome.new_tokens:
            ask = self._requests.get(new.request.id)
            if ask is None or ask.epoch != new.request.epoch:
                continue
            item = token_item(new, ask, now)
            if plan.steps == 1 and len(new.tokens) > 1 and item is not ask.first_item:
                self.reporter.count_progress(len(new.tokens))
            if item.prompt_logprobs is not None:
                *before, item = split_prompt_logprobs(item)
                if not all(self._send_tokens(ask.gateway, (part,)) for part in before):
                    continue
            batches.add(ask.gateway, item)
            if ask.stage is RequestStage.PREFILL:
                self._page_exporter.on_prefill_end(item, len(new.request.prompt) + new.index, now)
        return batches

    def on_step_begin(self, predicted_s: float) -> None:
        """Reports a step that will be long before it begins, so that gateways know why this worker is silent."""
        self._step_began = self._clock.now()
        if self.reporter.is_long_step(predicted_s) and not self.publisher.has_announced(predicted_s, self._step_began):
            self.report(self._step_began)

    # --- for the process that drives the loop ------------------------------------------------------------------------

    @property
    def sources(self) -> list[Source]:
        """The sources to wait for when there is nothing to do."""
        return [self._listener, *self._transfer.links()]

    @property
    def descriptors(self) -> Sequence[int]:
        """More of them: readable when pages may have come that no message announces."""
        return self._transfer.descriptors

    @property
    def idle_timeout_s(self) -> float:
        """The longest sleep when there is nothing to do: a grammar or an image may be ready, or a report be due."""
        due_s = self.publisher.due_in(self._requests.gateways(), self._clock.now(), waiting=len(self._requests) > 0)
        due_s = max(due_s, MIN_REPORT_WAIT_S)
        return min(due_s, GRAMMAR_POLL_S if self._held else EXPORT_POLL_S if self._page_exporter else inf)

    @property
    def has_work(self) -> bool:
        """Whether there are pages to copy, events for the scheduler, or more of the cache's snapshot to send; then the
        loop must not sleep."""
        return self._transfer.has_work or bool(self._events) or self.publisher.is_sending_snapshot

    def report(self, now: float) -> None:
        """Send every gateway a report."""
        self.publisher.report(self._requests.gateways(), now)

    def _report_now(self) -> WorkerReport:
        counters = self._listener.counters
        return self.reporter.report(
            asked=len(self._requests),
            settled=not self._events,
            dropped_frames=counters.malformed + counters.unsent,
            peer_refusals=counters.refused,
            gateway_hosts=self._requests.hosts(self._clock.now()),
        )

    def begin_shutdown(self) -> None:
        """Begin to stop: take nothing new, and migrate the responses that are decoded here (``migration``)."""
        now = self._clock.now()
        self.lifecycle.begin_shutdown(now)
        self._assign(AssignRole(duty=Duty.DRAIN), now)

    def return_all(self) -> None:
        """This worker stops now: return all requests to their gateways."""
        self.reporter.state = WorkerState.DRAINING
        for ask in self._requests.all():
            self._return(ask.request, ask.epoch, ReturnReason.DRAINING)
        self.report(self._clock.now())

    # --- messages in -------------------------------------------------------------------------------------------------

    def _on_message(self, received: Received, now: float) -> None:
        """Handle a message; an exception must not end this process, and with it other requests."""
        try:
            self._from_mailbox(received, now)
        except Exception:
            message = received.message
            log.exception("a %s could not be handled", type(message).__name__)
            self._listener.counters.malformed += 1
            if isinstance(message, Submit):
                self._return(message.request, message.epoch, f"{UNFIT}: it could not be handled")

    def _from_mailbox(self, received: Received, now: float) -> None:
        message, peer = received.message, received.peer
        match message:
            case Submit():
                self._submit(peer, message, now)
            case Cancel():
                if self._requests.may_cancel(peer, message.request):
                    self._cancel(message.request, message.epoch, now)
            case PullPages():
                self._transfer.on_pull(peer, message, now)
            case PagesReceived():
                self._transfer.on_pages_received(message, now)
            case Hello():
                self._hello(peer, message, now)
            case EncodeImage():
                self._served.encode(peer, message, self._images)
            case AssignRole():
                if self._requests.is_connected(peer):
                    self._assign(message, now)
            case PoisonRequests() | RateDemands() | ClaimIdempotencyKey() | OpenRequestCounts():
                self.exchange.on_message(peer, message, now)
            case ChangeAdapter() | AdapterNames() | SaveTokens() | FindTokens():
                self.exchange.on_message(peer, message, now)
            case _:
                pass  # well-formed, but not for a worker; the transport has counted it

    def _hello(self, peer: bytes, message: Hello, now: float) -> None:
        if message.discovery:
            self.publisher.on_discovery(peer)
            return
        greeted = self._requests.on_hello(peer, message, now, self.exchange.is_connected)
        for ask in greeted.orphans:
            self._cancel(ask.request, ask.epoch, now)
        for ask in greeted.cut_off:
            self._return(ask.request, ask.epoch, ReturnReason.CONNECTION_LOST)
        gateway = greeted.gateway
        if gateway is None:
            return
        while gateway.unsent and self._listener.send(peer, gateway.unsent[0]):
            del gateway.unsent[0]
        self._awaited += [(gateway, awaited) for awaited in message.awaited]
        if message.kv_snapshot:
            self.exchange.send_all(peer, now)
        self.publisher.on_hello(gateway, message)

    def _answer_awaited(self) -> None:
        """Return UNKNOWN for each stage that a gateway asked about and that is not, or no longer, here.

        Runs after the scheduler has all events that came before the question, and after all tokens were sent.
        """
        for gateway, awaited in self._awaited:
            ask, here = self._requests.get(awaited.request), self._scheduler.get_request(awaited.request)
            if ask is None or ask.epoch < awaited.epoch:
                # Not kept if it cannot leave: the gateway asks again, and may name any number.
                unknown = _given_back(awaited.request, awaited.epoch, ReturnReason.UNKNOWN)
                self._listener.send(gateway.peer, unknown)
            elif (
                ask.epoch == awaited.epoch
                and (here is None or here.epoch != ask.epoch)
                and not self._events
                and not self._held.holds(awaited.request)
            ):
                self._return(awaited.request, awaited.epoch, ReturnReason.UNKNOWN)
        self._awaited.clear()

    def _submit(self, peer: bytes, message: Submit, now: float) -> None:
        if message.recipient != self._self:
            self._listener.send(
                peer, RequestReturned(request=message.request, epoch=message.epoch, reason=ReturnReason.OTHER_PROCESS)
            )
            return
        if not self._requests.is_connected(peer):
            # Its connection was made anew and its Hello is still to come; it must not wait for an answer in vain.
            self._listener.send(peer, _given_back(message.request, message.epoch, ReturnReason.NO_HELLO))
            return
        if self.lifecycle.draining:
            self._listener.send(peer, _given_back(message.request, message.epoch, ReturnReason.DRAINING))
            return
        reason = invalid_submit(message, self._config.vocabulary, mixed=self._mixed)
        if reason is not None:
            self._listener.send(peer, _given_back(message.request, message.epoch, f"{UNFIT}: {reason}"))
            return
        earlier = self._requests.get(message.request)
        ask = self._requests.submit(peer, message, now)
        if ask is None:
            return
        if earlier is not None:
            self._transfer.cancel(message.request, earlier.epoch, now)
        if message.stage is RequestStage.DECODE and message.pages_from is None:
            self._return(message.request, message.epoch, "no source of pages was named")
            return
        if message.pages_from is not None and not self._transfer.connect(message.pages_from, now):
            self._return(message.request, message.epoch, ReturnReason.PAGES_LOST.with_details("no way to the source"))
            return
        self._events.append(add_request_of(message, now, ahead=self._config.hand_over.ahead_tokens))
        if message.stage is RequestStage.PREFILL:
            self._transfer.open_send(message.request, message.epoch, now)

    def _assign(self, message: AssignRole, now: float) -> None:
        """Change role or duty.  Gateways get the report first, so that returned requests do not come back."""
        reason = self.lifecycle.assign(message, now)
        self.report(now)
        if reason is not None:
            for ask in self.lifecycle.misplaced_requests():
                self._return(ask.request, ask.epoch, reason)
        self._relieve(now)

    def _relieve(self, now: float) -> None:
        """Start or stop migrating the responses decoded here; those that outgrow the context always migrate."""
        if self.lifecycle.moves_answers_away:
            self._moves.start_all()
        else:
            self._moves.stop_all(now)
        for gateway, relieve in self._moves.relief_requests(now) if self._config.transfers_pages else ():
            self._listener.send(gateway.peer, relieve)

    def _cancel(self, request: RequestId, epoch: int, now: float) -> None:
        """Cancel a request for its gateway: stop at once and notify only the other end of its transfer."""
        if self._requests.remove(request, epoch) is not None:
            self.reporter.count("requests_cancelled")
        self._transfer.cancel(request, epoch, now)
        self._events.append(CancelRequest(id=request, epoch=epoch))

    def _tick(self, now: float) -> None:
        self._next_tick = now + TICK_S
        self._served.send_alive()
        for ask in self._requests.orphans_of_silent(now, self.exchange.is_connected):
            self._return(ask.request, ask.epoch, ReturnReason.GATEWAY_SILENT)
        for ask in self._requests.orphans_of_replaced(self._gateway_incarnations()):
            self._cancel(ask.request, ask.epoch, now)
        for gateway, question in self._requests.confirmations_due(now):
            self._listener.send(gateway.peer, question)
        self._relieve(now)
        self.lifecycle.check_settled()
        closed = self._transfer.tick(now)
        if closed:
            self.reporter.count("peer_links_closed", closed)

    def _on_transfer_event(self, event: TransferEvent) -> None:
        """Handle one event of a transfer."""
        self._transfer_events.handle(event, self._clock.now())

    # --- messages out ------------------------------------------------------------------------------------------------

    def _post_event(self, event: EngineEvent) -> None:
        """Queue an event for the scheduler's next turn."""
        self._events.append(event)

    def _send_tokens(self, gateway: ConnectedGateway, items: tuple[TokenItem, ...]) -> bool:
        """Send tokens.  False: some of them were not sent, and their requests were returned."""
        message = Tokens(worker=self._self.worker, incarnation=self._self.incarnation, items=items)
        if self._listener.send(gateway.peer, message):
            return True
        if fits_in_frame(message):
            # The connection broke or its queue is full.  Tokens are never skipped: the requests go back as a whole.
            for item in items:
                self._return(item.request, item.epoch, ReturnReason.UNSENT)
        elif len(items) > 1:
            for item in items:
                self._send_tokens(gateway, (item,))
        else:
            self._return(items[0].request, items[0].epoch, ReturnReason.TOO_LARGE)
        return False

    def _return(self, request: RequestId, epoch: int, reason: str) -> None:
        """Return a request to its gateway and remove it here, with both ends of its transfer.

        Those end before anything else happens: its pages may be, or may soon be, another request's.
        """
        ask = self._requests.remove(request, epoch)
        self._transfer.fail(request, epoch, reason, self._clock.now())
        self._events.append(CancelRequest(id=request, epoch=epoch))
        if ask is None:
            return
        if reason != ReturnReason.HANDED_OVER:
            self.reporter.count("requests_returned")
        self._send_return(ask.gateway, _given_back(request, epoch, reason))

    def _waited(self, request: RequestId, wait: PageWait) -> None:
        """Note how long a request waited for pages of tiers."""
        ask = self._requests.get(request)
        if ask is not None:
            ask.end_phase("tiers", wait.began, wait.ended, **wait.facts)

    def _refuse(self, event: AddRequest, reason: str) -> None:
        """Return a request that this worker cannot serve; another worker may."""
        self._return(event.id, event.epoch, reason)

    def _send_return(self, gateway: ConnectedGateway, message: RequestReturned) -> None:
        if gateway.away or not self._listener.send(gateway.peer, message):
            gateway.unsent.append(message)


def _given_back(request: RequestId, epoch: int, reason: str) -> RequestReturned:
    return RequestReturned(request=request, epoch=epoch, reason=reason[:MAX_REASON_CHARS])
