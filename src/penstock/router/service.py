"""The router at work: turns messages, beats and time into flights' events; ``deeds`` does what flights make of them.

Both decide nothing themselves (``placement``, ``failover`` and ``watch`` do).
Everything runs on one event loop, and no event handler ever waits: a message from a worker is turned into delivered
tokens before the next one is looked at.  Knows nothing about HTTP, text or processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from penstock.clock import Clock
from penstock.config.schema import GatewayConfig
from penstock.errors import NoWorkers
from penstock.interfaces import TtftForecast
from penstock.router.admin import RouterAdmin
from penstock.router.decide import Decision, has_ready_workers
from penstock.router.dispatch import Dispatcher, Means
from penstock.router.fleet import Fleet
from penstock.router.health import WatchedState, WorkerHealth
from penstock.router.links import Connect, WorkerLinks
from penstock.router.migration import LostWorkerHandler, MigrationHandler
from penstock.router.placement import Placement, RetryBudget
from penstock.router.poison import PoisonIsolation
from penstock.router.policy.least_cost import queue_wait
from penstock.router.request import FailoverLimits, RoutedRequest
from penstock.router.stream import RequestStats, RequestStream, RoutedTokens
from penstock.router.submission import has_valid_tokens, matches_request
from penstock.router.tracing import WorkerKey, begin_spans
from penstock.router.turns import TICK_S, StreamChecks, TurnWork, log_errors
from penstock.telemetry.registry import Metrics, PrefixIndexStats
from penstock.telemetry.spans import NoTracer, Tracer
from penstock.types import ModelIdentity, RequestId, Role, ServiceClass, ValidRequest, WorkerId
from penstock.wire.codec import PeerMessage
from penstock.wire.gateway_messages import (
    HANDED_OVER,
    AwaitedStage,
    ConfirmRequests,
    KvEvents,
    MigrateRequests,
    RequestReturned,
    TokenItem,
    Tokens,
    WorkerReport,
)
from penstock.wire.supervisor_messages import ServiceDraining, SupervisorMessage, SuspectWorker, WorkerDown, WorkerUp

# MERGED: How long a request that came now would take to its first token, by what workers report.  Pure.
# MERGED:
# MERGED: The worker is taken that would be first; which one the router will choose is another question, but
# MERGED: no worse one.

PREFILL_ROLES = (Role.PREFILL, Role.BOTH)


def predict_ttft(fleet: Fleet, tokens: int, service: ServiceClass) -> TtftForecast | None:
    """For a prompt of so many tokens, nothing of it cached; None while no worker has measured a step."""
    found: TtftForecast | None = None
    for role in PREFILL_ROLES:
        slots = fleet.ready_slots(role, None)
        if not len(slots) or not fleet.loads.measured(slots).any():
            continue
        load, rates = fleet.loads.at_slots(slots)
        wait = queue_wait(load, rates, urgent=service is ServiceClass.INTERACTIVE)
        read = rates.step + rates.token * tokens + rates.pair * (tokens * (tokens + 1) / 2) + rates.sample
        best = int((wait + read).argmin())
        here = TtftForecast(wait_s=float(wait[best]), read_s=float(read[best]))
        if found is None or here.wait_s + here.read_s < found.wait_s + found.read_s:
            found = here
    return found


log = logging.getLogger("penstock.router")

_NO_STEP_S = 6.0  # requests are open and no worker makes a step for so long: not alive


ReportListener: TypeAlias = Callable[[str, WorkerReport], None]
"""Told of each report, and over the link to which endpoint it came, whatever worker it speaks of."""


def _ignored(endpoint: str, report: WorkerReport) -> None:
    """Nobody has joined workers here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterPorts:
    """What the router is connected to."""

    connect: Connect  # a transport's ``connect_async``
    clock: Clock
    suspect: Callable[[SuspectWorker], None]  # tells the supervisor
    tracer: Tracer = field(default_factory=NoTracer)


class RouterService:
    """``wire.ports.TokenStreams`` over workers that come and go.

    Use: ``start()`` on the running loop, ``on_supervisor`` for each message of the supervisor, ``await close()``.
    """

    def __init__(self, config: GatewayConfig, outside: RouterPorts, metrics: Metrics | None = None) -> None:
        self._outside = outside
        self._patience = FailoverLimits.from_config(config.failover, config.limits)
        self.fleet = Fleet()
        self.metrics = metrics if metrics is not None else Metrics(model_name=config.model_name)
        self._links = WorkerLinks(outside.connect, self.on_message, config.turns.message_units_per_turn)
        self.admin = RouterAdmin(self.fleet, self._links)
        self._streams: dict[RequestId, RequestStream] = {}
        self._placement = Placement(
            config.routing,
            self.fleet,
            self.metrics,
            mixed_numerics=config.allow_mixed_numerics,
            apart=PoisonIsolation(config.failover.poison_deaths),
        )
        self._tally = RequestStats(self.metrics, self._placement)
        self._budget = RetryBudget(config.failover, outside.clock.now())
        self._slices = TurnWork(config.failover.streams_per_turn, _in_the_next_turn)
        means = Means(
            fleet=self.fleet,
            links=self._links,
            placement=self._placement,
            tally=self._tally,
            budget=self._budget,
            slices=self._slices,
            metrics=self.metrics,
            clock=outside.clock,
        )
        self._deeds = Dispatcher(self._streams, means)
        self._apply = self._deeds.apply
        deaths = config.failover.poison_deaths
        losses = LostWorkerHandler(
            self._streams, self._apply, self.metrics, poison_deaths=deaths, slices=self._slices, clock=outside.clock
        )
        self._relief = MigrationHandler(
            self.fleet,
            self._links,
            self._placement,
            self._streams,
            self._apply,
            slices=self._slices,
            clock=outside.clock,
        )
        watched = WatchedState(self.fleet, self._links, self._placement.prefixes)
        self._watch = WorkerHealth(config, watched, self.metrics, lose=losses.on_worker_lost, suspect=outside.suspect)
        self._relief.is_probe = self._watch.is_probe
        self._rounds = StreamChecks(config.turns.flights_per_turn)
        self._looking = False  # more of them are looked at in the next turn
        self._deserting = False
        self._awaited: dict[WorkerId, list[AwaitedStage]] = {}  # legs that workers are asked about with the next beat
        self._moved = outside.clock.now()  # when a step was last seen, or the first request of a busy time came
        self._ticker: asyncio.Task[None] | None = None
        self._vocabulary = config.vocabulary or 1 << 32
        self._draining = False
        self._identity: ModelIdentity | None = None  # the last that was served
        self.on_report: ReportListener = _ignored
        self._offer_figures()

    def _offer_figures(self) -> None:
        """To whoever asks for metrics."""
        prefixes = self._placement.prefixes
        self.metrics.worker_rows = self.fleet.status_rows
        self.metrics.open_requests = lambda: self._tally.open_requests
        self.metrics.dropped_frames = lambda: self._links.dropped
        self.metrics.prefix_index = lambda: PrefixIndexStats(
            len(prefixes), prefixes.memory_bytes, prefixes.gaps, prefixes.refused
        )

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
        now = self._outside.clock.now()
        self._draining = True
        for stream in list(self._streams.values()):
            self._apply(stream, stream.routed.on_client_gone(), now)
            stream.fail(NoWorkers("The service has stopped."))
        await self._links.close()

    async def _tick_forever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("a look at the time failed")

    # --- wire.ports.TokenStreams ------------------------------------------------------------------------------------

    def stream(self, request: ValidRequest) -> RoutedTokens:
        """As ``TokenStreams.stream``.  Raises NoWorkers at once while draining, RequestError for what can never fit."""
        return RoutedTokens(request, self._begin, self._end)

    def _begin(self, request: ValidRequest) -> RequestStream:
        if self._draining:
            raise NoWorkers("The service is about to stop and takes no new requests.")
        if request.id in self._streams:
            raise ValueError(f"request {request.id} is being served already")
        now = self._outside.clock.now()
        if not self._tally.open_requests:
            self._moved = now
        self._tally.open_requests += 1
        self._budget.on_request()
        flight = RoutedRequest(request, self._patience, now)
        stream = self._streams[request.id] = RequestStream(flight, begin_spans(self._outside.tracer, request, now))
        try:
            self._apply(stream, flight.begin(now), now)
        except BaseException:
            self._end(stream)
            raise
        self._rounds.add(stream, now)
        return stream

    def _end(self, stream: RequestStream) -> None:
        """Nobody takes of it any more."""
        now = self._outside.clock.now()
        self._apply(stream, stream.routed.on_client_gone(), now)
        self._tally.on_finished(stream, "stop" if stream.stopped else "abort", now)
        del self._streams[stream.routed.request.id]
        self._rounds.discard(stream)

    def stopped(self, request: RequestId) -> None:
        """The consumer has all it wants, such as a stop string: closing the stream is then a success."""
        stream = self._streams.get(request)
        if stream is not None:
            stream.stopped = True

    def served_by(self, request: RequestId) -> ModelIdentity | None:
        """See ``wire.ports.TokenStreams``."""
        stream = self._streams.get(request)
        return None if stream is None else stream.routed.identity

    def identity(self) -> ModelIdentity | None:
        """That of most ready workers; while none is ready, the one that was served last."""
        identities = self.fleet.identities()
        if identities:
            self._identity = identities[0]
        return self._identity

    def open_requests(self) -> int:
        """Requests that are not over."""
        return self._tally.open_requests

    def ready(self) -> bool:
        """Is there a ready worker for each leg, and may new requests come?"""
        return not self._draining and has_ready_workers(self.fleet)

    def alive(self) -> str | None:
        """None, or for how long no worker has made a step though requests are open."""
        quiet = self._outside.clock.now() - self._moved
        if not self._tally.open_requests or quiet <= _NO_STEP_S:
            return None
        return f"{self._tally.open_requests} requests are open and no worker has made a step for {quiet:.1f} s"

    def readers(self) -> int:
        """See ``wire.ports.TokenStreams``."""
        return sum(len(self.fleet.ready(role, None)) for role in PREFILL_ROLES)

    def forecast(self, tokens: int, service: ServiceClass) -> TtftForecast | None:
        """See ``wire.ports.TokenStreams``."""
        return predict_ttft(self.fleet, tokens, service)

    def workers(self) -> Sequence[dict[str, Any]]:
        """``Fleet.status_rows``."""
        return self.fleet.status_rows()

    def debug(self, request: RequestId) -> tuple[Decision, ...]:
        """The decisions made for one of the latest requests, oldest first; ``reasons()`` of each tells why."""
        return self._placement.decisions.decisions(request)

    def explain(self, request: RequestId) -> Sequence[dict[str, Any]]:
        """The same as JSON."""
        return self._placement.decisions.explain(request)

    def explain_in_a_line(self, request: RequestId) -> str | None:
        """The latest decision about a request, as a header tells it."""
        return self._placement.decisions.explain_in_a_line(request)

    # --- events: the supervisor -------------------------------------------------------------------------------------

    def on_supervisor(self, message: SupervisorMessage) -> None:
        """Take a message of the supervisor."""
        now = self._outside.clock.now()
        if isinstance(message, WorkerUp):
            self._watch.on_worker_up(message, now)
        elif isinstance(message, WorkerDown):
            self._watch.on_worker_down(message)
        elif isinstance(message, ServiceDraining):
            self._draining = True

    # --- events: workers --------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerId, incarnation: int, message: PeerMessage) -> None:
        """Take a message that came over the link to ``worker`` of ``incarnation``."""
        now = self._outside.clock.now()
        if isinstance(message, WorkerReport):
            slot = self.fleet.slot(worker)
            if slot is not None and self.fleet.incarnations[slot] == incarnation:
                self.on_report(self.fleet.endpoints[slot], message)
            if message.worker == worker and message.incarnation == incarnation:
                self._on_report(message, now)
            else:
                self._watch.on_replaced(worker, incarnation, message, now)
        elif not _of_sender(message, worker, incarnation) or not self.fleet.mark_seen(worker, incarnation, now):
            self.metrics.on_fenced("incarnation")
        elif isinstance(message, Tokens):
            self._on_tokens(message, worker, incarnation, now)
        elif isinstance(message, KvEvents):
            self._watch.on_kv_events(message, worker, incarnation)
        elif isinstance(message, MigrateRequests | ConfirmRequests):
            self._relief.on_message(message, worker, incarnation)
        elif isinstance(message, RequestReturned):
            self._watch.on_returned(worker, incarnation, message.reason, now)
            stream = self._streams.get(message.request)
            if stream is not None:
                effects = stream.routed.on_returned(message.epoch, message.reason, worker, incarnation, now)
                if message.reason != HANDED_OVER:
                    stream.on_failure((worker, incarnation), message.reason, effects, now)
                self._apply(stream, effects, now)

    def _on_tokens(self, message: Tokens, worker: WorkerId, incarnation: int, now: float) -> None:
        self._moved = now
        streams = self._streams
        went_on: list[tuple[RequestStream, TokenItem]] = []
        unknown: TokenItem | None = None
        vocabulary, refusals = self._vocabulary, self._watch.refusals
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
        self._tally.on_continued(delivered, now)

    def _on_item(self, item: TokenItem, place: WorkerKey, now: float) -> None:
        """Tokens that do not merely go on with an answer."""
        worker, incarnation = place
        stream = self._streams.get(item.request)
        if stream is None:
            self._watch.on_unknown_tokens(item.request, worker, incarnation)
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
        self._watch.distrust(worker, incarnation, reason, now)

    def _on_report(self, report: WorkerReport, now: float) -> None:
        steps = self.fleet.steps()
        for events in report.cached:
            self._watch.on_kv_events(events, report.worker, report.incarnation)
        became_ready = self._watch.on_report(report, now)
        if self.fleet.steps() != steps:
            self._moved = now
        self.admin.on_report()
        if became_ready:
            self._deeds.place_waiting(now, ready=True)

    # --- events: time -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at the time: beats, silent workers, retries and deadlines."""
        now = self._outside.clock.now()
        self._watch.on_tick(now)
        self._deeds.place_waiting(now)
        if not self._looking:
            self._look()
        if not self._watch.heartbeat_due(now):
            return
        awaited, self._awaited = self._awaited, {}
        self._watch.send_heartbeats(awaited, now)
        deserted = self._watch.no_workers_reason(now)
        if deserted is not None and not self._deserting:
            self._deserting = True
            self._slices.add(self._desert(list(self._streams.values()), deserted))

    def _look(self) -> None:
        """At requests whose turn it is: is anything of them late?  The rest of them follows in the next turns."""
        now = self._outside.clock.now()
        for stream in self._rounds.pop_due(now):
            if stream.finished:
                continue
            with log_errors(f"{stream.routed.request.id} could not be looked at"):
                self._look_at(stream, now)
            self._rounds.add(stream, stream.routed.next_check(now))
        self._looking = self._rounds.has_due(now)
        if self._looking:
            _in_the_next_turn(self._look)

    def _look_at(self, stream: RequestStream, now: float) -> None:
        flight = stream.routed
        for leg in flight.silent_stages(now):
            self._awaited.setdefault(leg.worker, []).append(AwaitedStage(flight.request.id, flight.epoch))
        self._apply(stream, flight.on_tick(now), now)
        since = self._watch.stalled_since(flight, now)
        if since is not None:
            self._slices.add(self._move_still([(stream, since)]))

    def _desert(self, streams: Sequence[RequestStream], why: str) -> Iterator[None]:
        """Nobody need wait for a worker any more."""
        try:
            for stream in streams:
                with log_errors(f"{stream.routed.request.id} could not be ended"):
                    now = self._outside.clock.now()
                    self._apply(stream, stream.routed.on_tick(now, why), now)
                yield
        finally:
            self._deserting = False

    def _move_still(self, still: Sequence[tuple[RequestStream, float]]) -> Iterator[None]:
        """Give them to others, unless a worker has said something meanwhile."""
        for stream, since in still:
            now, flight = self._outside.clock.now(), stream.routed
            waited_for, said = flight.pending_stages
            if waited_for and said <= since:
                again = flight.on_stalled(now, since)
                for leg in waited_for:
                    stream.on_failure((leg.worker, leg.incarnation), "still", again, now)
                self._apply(stream, again, now)
            yield


def _of_sender(message: PeerMessage, worker: WorkerId, incarnation: int) -> bool:
    """Is this not what another process says, which has taken the place of this one at its address?"""
    return not isinstance(message, Tokens) or (message.worker == worker and message.incarnation == incarnation)


def _in_the_next_turn(call: Callable[[], None]) -> None:
    asyncio.get_running_loop().call_soon(call)
