"""The router: turns messages, reports and time into events of requests, and applies what follows (``dispatch``).

Decisions are made in ``placement``, ``request`` and ``health``.  All runs on one event loop, and no handler waits: the
tokens of a message are delivered before the next message is handled.  Knows nothing of HTTP, text or processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

from penstock.clock import Clock
from penstock.config.schema import GatewayConfig
from penstock.errors import NoWorkers, PoisonRequest
from penstock.interfaces import TtftForecast
from penstock.poison_verdicts import PoisonVerdicts, request_digest
from penstock.router.admin import RouterAdmin
from penstock.router.decide import Decision, has_ready_workers
from penstock.router.dispatch import Dispatcher
from penstock.router.fleet import Fleet
from penstock.router.health import WorkerHealth
from penstock.router.home_calls import WorkerHomes
from penstock.router.idempotency_homes import IdempotencyHomes
from penstock.router.links import Connect, WorkerLinks
from penstock.router.migration import LostWorkerHandler, MigrationHandler
from penstock.router.open_requests import OpenRequestHomes
from penstock.router.placement import Placement, RetryBudget
from penstock.router.poison import PoisonIsolation
from penstock.router.policy.least_cost import decode_step, queue_wait
from penstock.router.quarantine import Quarantine
from penstock.router.rate_shares import RateShares, RateTable
from penstock.router.request import FailoverLimits, RoutedRequest
from penstock.router.saved_tokens import SavedTokenHomes
from penstock.router.shared_adapters import SharedAdapters
from penstock.router.stream import RequestStats, RequestStream, RoutedTokens
from penstock.router.submission import has_valid_tokens, matches_request
from penstock.router.tracing import WorkerKey, begin_spans
from penstock.router.turns import TICK_S, StreamChecks, TurnWork, log_errors, sleep_to_multiple
from penstock.telemetry.registry import Metrics, PrefixIndexStats, RoleForecast
from penstock.telemetry.spans import NoTracer, Tracer
from penstock.types import ModelIdentity, RequestId, Role, ServiceClass, ValidRequest, WorkerId
from penstock.wire.codec import PeerMessage
from penstock.wire.gateway_messages import (
    AdapterChanged,
    AdapterNames,
    AwaitedStage,
    ConfirmRequests,
    FoundTokens,
    IdempotencyKeyState,
    KvEvents,
    MigrateRequests,
    OpenRequestAnswer,
    PoisonRequests,
    RateTotals,
    RequestReturned,
    ReturnReason,
    TokenItem,
    Tokens,
    WorkerReport,
)
from penstock.wire.supervisor_messages import (
    ServiceDraining,
    SupervisorMessage,
    SuspectWorker,
    WorkerDown,
    WorkerRemoved,
    WorkerUp,
)

PREFILL_ROLES = (Role.PREFILL, Role.BOTH)


def predict_ttft(fleet: Fleet, tokens: int, service: ServiceClass) -> TtftForecast | None:
    """For an uncached prompt, at the fastest worker; None while no worker has measured a step."""
    found: TtftForecast | None = None
    for role in PREFILL_ROLES:
        slots = fleet.ready_slots(role, None)
        if not len(slots) or not fleet.loads.measured(slots).any():
            continue
        load, rates = fleet.loads.at_slots(slots)
        wait = queue_wait(load, rates, urgent=service is ServiceClass.INTERACTIVE)
        read = rates.step + rates.token * tokens + rates.pair * (tokens * (tokens + 1) / 2) + rates.sample
        best = int((wait + read).argmin())
        here = TtftForecast(wait_s=float(wait[best]), prefill_s=float(read[best]))
        if found is None or here.wait_s + here.prefill_s < found.wait_s + found.prefill_s:
            found = here
    return found


def predict_by_role(fleet: Fleet) -> dict[str, RoleForecast]:
    """The waits of a request that came now, by role: at the worker where it would wait least.

    Only roles with a ready worker, once one has measured a step.  Prompts also wait for room at decode workers, which
    more prefill workers would not shorten, so what requests wait for there is no part of the wait for prefill.
    """
    found: dict[str, RoleForecast] = {}
    for role in (Role.DECODE, Role.PREFILL, Role.BOTH):
        slots = fleet.ready_slots(role, None)
        if not len(slots) or not fleet.loads.measured(slots).any():
            continue
        load, rates = fleet.loads.at_slots(slots)
        steps = decode_step(load, rates)
        if role is Role.DECODE:
            wait = min(_room_wait(fleet.reports[slot], step) for slot, step in zip(slots, steps.tolist(), strict=True))
        else:
            wait = float(queue_wait(load, rates, urgent=False).min())
        if role is Role.PREFILL and Role.DECODE.value in found:
            wait = max(0.0, wait - found[Role.DECODE.value].queue_s)
        found[role.value] = RoleForecast(queue_s=wait, step_s=float(steps.mean()))
    return found


def _room_wait(report: WorkerReport | None, step_s: float) -> float:
    """Seconds until the requests that are queued at a decode worker will have been decoded, at a token a step each."""
    if report is None or not report.queued:
        return 0.0
    running = max(1, report.running)
    ahead = max(0, report.tokens_in_flight - report.prompt_tokens) * report.queued / (report.queued + running)
    return ahead / running * step_s


log = logging.getLogger("penstock.router")

_NO_STEP_S = 6.0  # requests are open and no worker makes a step for so long: not alive


ReportListener: TypeAlias = Callable[[str, WorkerReport], None]
"""Called with the endpoint of a link and each report that comes over it, whichever worker the report names."""


class RouterService:
    """``interfaces.TokenStreams`` over workers that come and go.

    Use: ``start()`` on the running loop, ``on_supervisor`` for each message of the supervisor, ``await close()``.
    """

    def __init__(
        self,
        config: GatewayConfig,
        *,
        connect: Connect,
        clock: Clock,
        suspect: Callable[[SuspectWorker], None],
        tracer: Tracer | None = None,
        metrics: Metrics | None = None,
        rates: RateTable | None = None,
    ) -> None:
        """``connect`` is a transport's ``connect_async``; ``suspect`` notifies the supervisor.  ``rates``: buckets of
        this host's gateways, which it divides with other hosts."""
        self._clock = clock
        self._tracer = tracer if tracer is not None else NoTracer()
        self._limits = FailoverLimits.from_config(config.failover, config.limits)
        self.fleet = Fleet()
        self.metrics = metrics if metrics is not None else Metrics(model_name=config.model_name)
        self._links = WorkerLinks(connect, self.on_message, config.turns.message_units_per_turn)
        self.admin = RouterAdmin(self.fleet, self._links)
        self._streams: dict[RequestId, RequestStream] = {}
        self._placement = Placement(
            config.routing,
            self.fleet,
            self.metrics,
            mixed_numerics=config.allow_mixed_numerics,
            apart=PoisonIsolation(config.failover.poison_deaths),
        )
        self._stats = RequestStats(self.metrics, self._placement)
        self._budget = RetryBudget(config.failover, clock.now())
        self._turns = TurnWork(config.failover.streams_per_turn, _in_the_next_turn)
        self._dispatcher = Dispatcher(
            self._streams,
            fleet=self.fleet,
            links=self._links,
            placement=self._placement,
            stats=self._stats,
            budget=self._budget,
            turns=self._turns,
            metrics=self.metrics,
            clock=clock,
        )
        self._apply = self._dispatcher.apply
        self._verdicts, self._found_verdicts = PoisonVerdicts(), PoisonVerdicts()  # all, and those of this gateway
        self._migration, self._health = self._make_handlers(config, suspect)
        self._shares = None if rates is None else RateShares(rates, self.fleet, self._links)
        self._vocabulary = config.vocabulary or 1 << 32
        self._homes, self._saved, self.idempotency, self.fleet_counts, self.adapters = self._make_shared(config)
        self._checks = StreamChecks(config.turns.flights_per_turn)
        self._checking = False  # the next turn continues the checks
        self._failing_all = False
        self._awaited: dict[WorkerId, list[AwaitedStage]] = {}  # silent stages, by worker, for the next heartbeat
        self._progress_at = clock.now()  # the last step of any worker, or the first request after an idle time
        self._ticker: asyncio.Task[None] | None = None
        self._draining = False
        self._identity: ModelIdentity | None = None  # the last one served
        self._met_workers = asyncio.Event()  # once a worker was ready
        self._failover = config.failover
        self._report_listeners: list[ReportListener] = []
        self._register_metrics()

    def _make_handlers(
        self, config: GatewayConfig, suspect: Callable[[SuspectWorker], None]
    ) -> tuple[MigrationHandler, WorkerHealth]:
        quarantine = Quarantine(config.failover, config.name)
        lost_workers = LostWorkerHandler(
            self._streams,
            self._dispatcher,
            metrics=self.metrics,
            poison_deaths=config.failover.poison_deaths,
            on_poison=self._share_verdict,
            turns=self._turns,
            clock=self._clock,
        )
        migration = MigrationHandler(
            self._streams,
            self._dispatcher,
            fleet=self.fleet,
            links=self._links,
            placement=self._placement,
            quarantine=quarantine,
            turns=self._turns,
            clock=self._clock,
        )
        health = WorkerHealth(
            config,
            fleet=self.fleet,
            links=self._links,
            prefixes=self._placement.prefixes,
            metrics=self.metrics,
            quarantine=quarantine,
            lost_workers=lost_workers,
            suspect=suspect,
        )
        return migration, health

    def _make_shared(
        self, config: GatewayConfig
    ) -> tuple[WorkerHomes, SavedTokenHomes, IdempotencyHomes, OpenRequestHomes, SharedAdapters]:
        """What this gateway shares with others through the workers, besides verdicts and rates."""
        secret, clock = bytes.fromhex(config.event_key), self._clock
        homes = WorkerHomes(self.fleet, self._links, clock)
        turns = TurnWork(config.failover.streams_per_turn, _in_the_next_turn)
        every_s = config.failover.save_tokens_s
        saved = SavedTokenHomes(homes, turns, clock, every_s=every_s, vocabulary=self._vocabulary)
        return (
            homes,
            saved,
            IdempotencyHomes(homes, saved, self.metrics, clock, secret),
            OpenRequestHomes(homes, clock, self._number_of_hosts, secret),
            SharedAdapters(self.fleet, self._links, homes, clock),
        )

    def _number_of_hosts(self) -> int:
        """Hosts with gateways, as far as known."""
        return 1 if self._shares is None else self._shares.hosts

    def _share_verdict(self, request: ValidRequest, now: float) -> None:
        digests = (request_digest(request),)
        self._found_verdicts.add(digests, now)
        self._links.send_to_all(PoisonRequests(digests=self._verdicts.add(digests, now)))

    def _repeat_verdicts(self, report: WorkerReport, now: float) -> None:
        """To a worker that has become ready: it may be the one that a request has ended, and no other was there.

        Those that were found here only: a verdict that all repeat would never end.
        """
        link = self._links.link_to(report.worker, report.incarnation) if self._found_verdicts.since else None
        if link is not None:
            link.send(PoisonRequests(digests=self._found_verdicts.all(now)))

    def _register_metrics(self) -> None:
        prefixes = self._placement.prefixes
        self.metrics.register_router(
            worker_rows=self.fleet.status_rows,
            forecasts=lambda: predict_by_role(self.fleet),
            open_requests=lambda: self._stats.open_requests,
            dropped_frames=lambda: self._links.dropped,
            prefix_index=lambda: PrefixIndexStats(
                len(prefixes), prefixes.memory_bytes, prefixes.gaps, prefixes.refused
            ),
        )

    def add_report_listener(self, listener: ReportListener) -> None:
        """Call ``listener`` with each report and the endpoint of the link that it came over."""
        self._report_listeners.append(listener)

    def set_disconnect_listener(self, listener: Callable[[str], None]) -> None:
        """Call ``listener`` with the endpoint of a worker when the connection to it ends."""
        self._links.on_disconnected = listener

    # --- life -------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begin to look at time.  Needs a running event loop."""
        if self._ticker is None:
            self._ticker = asyncio.get_running_loop().create_task(self._tick_forever(), name="router tick")

    async def close(self) -> None:
        """Cancel what is left everywhere, close all links."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None
        now = self._clock.now()
        self._draining = True
        for stream in list(self._streams.values()):
            self._apply(stream, stream.routed.on_client_gone(), now)
            stream.fail(NoWorkers("The service has stopped."))
        self.idempotency.close()
        self._saved.close()
        self.fleet_counts.close()
        self.adapters.close()
        await self._links.close()

    async def _tick_forever(self) -> None:
        while True:
            await sleep_to_multiple(TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("a look at the time failed")

    # --- interfaces.TokenStreams ------------------------------------------------------------------------------------

    def stream(self, request: ValidRequest) -> RoutedTokens:
        """As ``TokenStreams.stream``.  Raises NoWorkers at once while draining, RequestError for what can never fit."""
        return RoutedTokens(request, self._begin, self._end)

    def _begin(self, request: ValidRequest) -> RequestStream:
        if self._draining:
            raise NoWorkers("The service is about to stop and takes no new requests.")
        if request.id in self._streams:
            raise ValueError(f"request {request.id} is being served already")
        now = self._clock.now()
        if self._verdicts.since and self._verdicts.contains(request, now):
            self.metrics.on_poisoned()
            raise PoisonRequest(
                f"Request {request.id} is the same as one that ended workers lately, and is not tried. "
                "The log of the gateway that had it says which and how."
            )
        if not self._stats.open_requests:
            self._progress_at = now
        self._stats.open_requests += 1
        self._budget.on_request()
        flight = RoutedRequest(request, self._limits, now)
        stream = self._streams[request.id] = RequestStream(flight, begin_spans(self._tracer, request, now))
        try:
            self._apply(stream, flight.begin(now), now)
        except BaseException:
            self._end(stream)
            raise
        self._checks.add(stream, now)
        if request.resume is not None:
            self._saved.add(flight, request.resume)
        return stream

    def _end(self, stream: RequestStream) -> None:
        """The consumer has closed the stream."""
        now = self._clock.now()
        self._apply(stream, stream.routed.on_client_gone(), now)
        self._stats.on_finished(stream, "stop" if stream.stopped else "abort", now)
        del self._streams[stream.routed.request.id]
        self._checks.discard(stream)
        if stream.routed.request.resume is not None:
            self._saved.discard(stream.routed)

    def mark_stopped(self, request: RequestId) -> None:
        """The consumer has all it wants, such as a stop string: closing the stream is then a success."""
        stream = self._streams.get(request)
        if stream is not None:
            stream.stopped = True

    def serving_identity(self, request: RequestId) -> ModelIdentity | None:
        """The identity of the workers of this request, once its stream has given a batch."""
        stream = self._streams.get(request)
        return None if stream is None else stream.routed.identity

    def identity(self) -> ModelIdentity | None:
        """That of most ready workers; while none is ready, the one that was served last."""
        identities = self.fleet.identities()
        if identities:
            self._identity = identities[0]
        return self._identity

    async def wait_identity(self) -> ModelIdentity | None:
        """As ``identity``; waits up to ``no_path_s`` for the first worker, which a new gateway has yet to meet."""
        if not self._met_workers.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._met_workers.wait(), self._failover.no_path_s)
        return self.identity()

    def open_requests(self) -> int:
        """Requests that are not over."""
        return self._stats.open_requests

    def ready(self) -> bool:
        """Whether new requests are accepted and each stage has a ready worker."""
        return not self._draining and has_ready_workers(self.fleet)

    def quiet_endpoints(self) -> Sequence[str]:
        """Endpoints of workers that have requests and have been silent for ``failover.quiet_s`` and a step."""
        quiet = self.fleet.silent_slots(self._clock.now(), self._failover.quiet_s, 1.0)
        return [self.fleet.endpoints[slot] for slot in quiet]

    def stall_reason(self) -> str | None:
        """None, or for how long no worker has made a step though requests are open."""
        quiet = self._clock.now() - self._progress_at
        if not self._stats.open_requests or quiet <= _NO_STEP_S:
            return None
        return f"{self._stats.open_requests} requests are open and no worker has made a step for {quiet:.1f} s"

    def prefill_workers(self) -> int:
        """The number of ready workers that prefill."""
        return sum(len(self.fleet.ready(role, None)) for role in PREFILL_ROLES)

    def predict_ttft(self, tokens: int, service: ServiceClass) -> TtftForecast | None:
        """The expected time to first token of a prompt of ``tokens`` tokens."""
        return predict_ttft(self.fleet, tokens, service)

    def workers(self) -> Sequence[dict[str, Any]]:
        """``Fleet.status_rows``."""
        return self.fleet.status_rows()

    def debug(self, request: RequestId) -> tuple[Decision, ...]:
        """The decisions made for one of the latest requests, oldest first; ``reasons()`` of each tells why."""
        return self._placement.decisions.decisions(request)

    def routing_decisions(self, request: RequestId) -> Sequence[dict[str, Any]]:
        """The same as JSON."""
        return self._placement.decisions.explain(request)

    def routing_decision_line(self, request: RequestId) -> str | None:
        """The latest decision about a request, as a header tells it."""
        return self._placement.decisions.explain_in_a_line(request)

    # --- events: the supervisor -------------------------------------------------------------------------------------

    def on_supervisor(self, message: SupervisorMessage) -> None:
        """Take a message of the supervisor."""
        now = self._clock.now()
        if isinstance(message, WorkerUp):
            self._health.on_worker_up(message, now)
        elif isinstance(message, WorkerDown):
            self._health.on_worker_down(message, now)
        elif isinstance(message, WorkerRemoved):
            self._health.on_worker_removed(message.worker)
        elif isinstance(message, ServiceDraining):
            self._draining = True

    def add_local_worker(self, worker: WorkerId) -> None:
        """A worker of this gateway's host."""
        self._homes.add_local(worker)

    # --- events: workers --------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerId, incarnation: int, message: PeerMessage) -> None:
        """Take a message that came over the link to ``worker`` of ``incarnation``."""
        now = self._clock.now()
        if isinstance(message, WorkerReport):
            slot = self.fleet.slot(worker)
            if slot is not None and self.fleet.incarnations[slot] == incarnation:
                for listener in self._report_listeners:
                    listener(self.fleet.endpoints[slot], message)
            if message.worker == worker and message.incarnation == incarnation:
                self._on_report(message, now)
            else:
                self._health.on_replaced(worker, incarnation, message, now)
        elif not _of_sender(message, worker, incarnation) or not self.fleet.mark_seen(worker, incarnation, now):
            self.metrics.on_fenced("incarnation")
        elif isinstance(message, Tokens):
            self._on_tokens(message, worker, incarnation, now)
        elif isinstance(message, KvEvents):
            self._health.on_kv_events(message, worker, incarnation)
        elif isinstance(message, PoisonRequests):
            self._verdicts.add(message.digests, now)
        elif isinstance(message, RateTotals):
            if self._shares is not None:
                self._shares.on_totals(worker, message, now)
        elif isinstance(message, IdempotencyKeyState):
            self.idempotency.on_state(worker, incarnation, message)
        elif isinstance(message, FoundTokens):
            self._saved.on_answer(worker, incarnation, message)
        elif isinstance(message, OpenRequestAnswer):
            self.fleet_counts.on_answer(worker, incarnation, message)
        elif isinstance(message, AdapterChanged):
            self.adapters.on_changed(worker, incarnation, message)
        elif isinstance(message, AdapterNames):
            self.adapters.on_names(message)
        elif isinstance(message, MigrateRequests | ConfirmRequests):
            self._migration.on_message(message, worker, incarnation)
        elif isinstance(message, RequestReturned):
            self._on_returned(message, worker, incarnation, now)

    def _on_returned(self, message: RequestReturned, worker: WorkerId, incarnation: int, now: float) -> None:
        reason = ReturnReason.from_text(message.reason)
        self.metrics.on_returned(reason.label)
        self._health.on_returned(worker, incarnation, reason, now)
        stream = self._streams.get(message.request)
        if stream is not None:
            effects = stream.routed.on_returned(message.epoch, message.reason, worker, incarnation, now)
            if reason is not ReturnReason.HANDED_OVER:
                stream.on_failure((worker, incarnation), message.reason, effects, now)
            self._apply(stream, effects, now)

    def _on_tokens(self, message: Tokens, worker: WorkerId, incarnation: int, now: float) -> None:
        self._progress_at = now
        streams = self._streams
        went_on: list[tuple[RequestStream, TokenItem]] = []
        unknown: TokenItem | None = None
        vocabulary, refusals = self._vocabulary, self._health.refusals
        if refusals:
            refusals.pop(worker, None)
        for item in message.items:
            plain = item.logprobs is None and item.prompt_logprobs is None
            if not (plain and max(item.tokens, default=0) < vocabulary) and not has_valid_tokens(item, vocabulary):
                unknown = item
                break
            stream = streams.get(item.request)
            if stream is not None and stream.routed.accept_continuation(item, worker, incarnation, now):
                stream.put(item)
                went_on.append((stream, item))
            else:
                self._on_item(item, (worker, incarnation), now)
        if went_on:
            self._went_on(went_on, worker, now)
        if unknown is not None:
            reason = f"{unknown.request} has a token that is none of the model's {vocabulary}"
            self._distrust(worker, incarnation, reason, now)

    def _went_on(self, delivered: Sequence[tuple[RequestStream, TokenItem]], worker: WorkerId, now: float) -> None:
        """Count tokens that merely went on with answers."""
        fleet, fewer = self.fleet, dict[RequestId, int]()
        for stream, item in delivered:
            if stream.routed.request.open_ended:  # what is left of it is an expectation
                fleet.set_work_left(worker, item.request, stream.routed.decode_tokens_left(item))
            else:
                fewer[item.request] = fewer.get(item.request, 0) + len(item.tokens)
        fleet.reduce_work(worker, fewer)
        self._stats.on_continued(delivered, now)

    def _on_item(self, item: TokenItem, place: WorkerKey, now: float) -> None:
        """Tokens that do not merely go on with an answer."""
        worker, incarnation = place
        stream = self._streams.get(item.request)
        if stream is None:
            self._health.on_unknown_tokens(item.request, worker, incarnation)
            return
        flight = stream.routed
        if not matches_request(item, flight.request):
            self._distrust(worker, incarnation, f"tokens that are no part of an answer to {item.request}", now)
            return
        if item.epoch == flight.epoch:
            self.fleet.set_work_left(worker, item.request, flight.tokens_left(item, worker))
        else:
            self.metrics.on_fenced("epoch")
            if stream.spans is not None:
                stream.spans.on_fenced(place, "epoch", now)
        if stream.spans is not None and item.phases:
            stream.spans.on_phases(item, place)
        if item.queued_s and stream.first_at is None:
            stream.queued_s = item.queued_s
        self._apply(stream, flight.on_tokens(item, worker, incarnation, now), now)
        if len(self._placement.isolation) and not flight.crashes.deaths:
            self._placement.isolation.remove(item.request)

    def _distrust(self, worker: WorkerId, incarnation: int, reason: str, now: float) -> None:
        """What this worker says cannot be: what it has goes on elsewhere, and it is probed before it is given more."""
        self._health.distrust(worker, incarnation, reason, now)

    def _on_report(self, report: WorkerReport, now: float) -> None:
        steps = self.fleet.steps()
        for events in report.cached:
            self._health.on_kv_events(events, report.worker, report.incarnation)
        became_ready = self._health.on_report(report, now)
        if self.fleet.steps() != steps:
            self._progress_at = now
        self.admin.on_report()
        if became_ready:
            if self._shares is not None and not self._met_workers.is_set():
                self._shares.tick(now)  # before the first request: a host that joins others brings no full buckets
            self._met_workers.set()
            self.identity()  # requests that come when this worker is gone again wait for another one of its model
            self.adapters.on_ready(report.worker)
            self._repeat_verdicts(report, now)
            self._dispatcher.place_waiting(now, ready=True)

    # --- events: time -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at the time: beats, silent workers, retries and deadlines."""
        now = self._clock.now()
        self._health.on_tick(now)
        self._dispatcher.place_waiting(now)
        self.idempotency.tick(now)
        self._saved.tick(now)
        self.fleet_counts.tick(now)
        self.adapters.tick(now)
        if not self._checking:
            self._look()
        if not self._health.heartbeat_due(now):
            return
        awaited, self._awaited = self._awaited, {}
        self._health.send_heartbeats(awaited, now)
        if self._shares is not None:
            self._shares.tick(now)
        deserted = self._health.no_workers_reason(now)
        if deserted is not None and not self._failing_all:
            self._failing_all = True
            self._turns.add(self._desert(list(self._streams.values()), deserted))

    def _look(self) -> None:
        """Check requests that are due for anything late.  The rest of them follows in the next turns."""
        now = self._clock.now()
        for stream in self._checks.pop_due(now):
            if stream.finished:
                continue
            try:  # not log_errors: this is done for each open stream, time and again
                self._look_at(stream, now)
            except Exception:
                log.exception("%s could not be looked at", stream.routed.request.id)
            self._checks.add(stream, stream.routed.next_check(now))
        self._checking = self._checks.has_due(now)
        if self._checking:
            _in_the_next_turn(self._look)

    def _look_at(self, stream: RequestStream, now: float) -> None:
        flight = stream.routed
        for leg in flight.silent_stages(now):
            self._awaited.setdefault(leg.worker, []).append(AwaitedStage(flight.request.id, flight.epoch))
        effects = flight.on_tick(now)
        if effects:
            self._apply(stream, effects, now)
        since = self._health.stalled_since(flight, now)
        if since is not None:
            self._turns.add(self._move_still([(stream, since)]))

    def _desert(self, streams: Sequence[RequestStream], why: str) -> Iterator[None]:
        """Fail the requests that wait for a worker."""
        try:
            for stream in streams:
                with log_errors(f"{stream.routed.request.id} could not be ended"):
                    now = self._clock.now()
                    self._apply(stream, stream.routed.on_tick(now, why), now)
                yield
        finally:
            self._failing_all = False

    def _move_still(self, still: Sequence[tuple[RequestStream, float]]) -> Iterator[None]:
        """Give them to others, unless a worker has said something meanwhile."""
        for stream, since in still:
            now, flight = self._clock.now(), stream.routed
            waited_for, said = flight.pending_stages
            if waited_for and said <= since:
                again = flight.on_stalled(now, since)
                for leg in waited_for:
                    stream.on_failure((leg.worker, leg.incarnation), "still", again, now)
                self._apply(stream, again, now)
            yield


def _of_sender(message: PeerMessage, worker: WorkerId, incarnation: int) -> bool:
    """Whether the message is of this incarnation, not of a process that has replaced it at its address."""
    return not isinstance(message, Tokens) or (message.worker == worker and message.incarnation == incarnation)


def _in_the_next_turn(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)
