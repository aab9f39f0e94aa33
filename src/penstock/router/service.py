"""The router at work: turns flights' effects into messages, and messages, beats and time into flights' events.

The only part of the router that does I/O; it decides nothing itself (``placement``, ``failover`` and ``watch`` do).
Everything runs on one event loop, and no event handler ever waits: a message from a worker is turned into delivered
tokens before the next one is looked at.  Knows nothing about HTTP, text or processes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.clock import Clock
from penstock.config.schema import GatewayConfig
from penstock.errors import NoWorkers
from penstock.router.decide import Decision, can_serve
from penstock.router.decision_log import as_json, in_a_line
from penstock.router.effects import CancelLeg, Deliver, Effects, Fail, LegEnded, Send, WaitForWorker
from penstock.router.failover import Flight, Patience, Phase
from penstock.router.fleet import Fleet
from penstock.router.links import Connect, Links
from penstock.router.placement import Placement
from penstock.router.stream import Stream
from penstock.router.watch import TICK_S, Watch, WatchedState
from penstock.telemetry.registry import Metrics, PrefixFigures
from penstock.types import (
    ModelIdentity,
    RequestId,
    TokenBatch,
    ValidRequest,
    WorkerId,
)
from penstock.wire.codec import PeerMessage
from penstock.wire.messages import (
    Awaited,
    Cancel,
    Draining,
    KvEvents,
    Report,
    Returned,
    SupervisorMessage,
    Suspect,
    Tokens,
    WorkerDown,
    WorkerUp,
)

log = logging.getLogger("penstock.router")

_NO_STEP_S = 6.0  # requests are open and no worker makes a step for so long: not alive


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What the router is connected to."""

    connect: Connect  # a transport's ``connect_async``
    clock: Clock
    suspect: Callable[[Suspect], None]  # tells the supervisor


class RouterService:
    """``wire.ports.TokenStreams`` over workers that come and go.

    Use: ``start()`` on the running loop, ``on_supervisor`` for each message of the supervisor, ``await close()``.
    """

    def __init__(self, config: GatewayConfig, outside: Outside, metrics: Metrics | None = None) -> None:
        self._outside = outside
        self._patience = Patience(
            max_attempts=config.failover.max_attempts,
            first_byte_s=config.limits.first_byte_s,
            stall_s=config.limits.stall_s,
        )
        self.fleet = Fleet()
        self.metrics = metrics if metrics is not None else Metrics(model_name=config.model_name)
        self._links = Links(outside.connect, self.on_message)
        self._streams: dict[RequestId, Stream] = {}
        self._placement = Placement(
            config.routing, self.fleet, self.metrics, mixed_numerics=config.allow_mixed_numerics
        )
        self._prefixes = self._placement.prefixes
        self._watch = Watch(
            config,
            WatchedState(self.fleet, self._links, self._prefixes),
            self.metrics,
            lose=self._lose,
            suspect=outside.suspect,
        )
        self._serial = 0  # of the last Submit
        self._unsettled = 0  # streams whose flights are not over
        self._moved = outside.clock.now()  # when a step was last seen, or the first request of a busy time came
        self._ticker: asyncio.Task[None] | None = None
        self._draining = False
        self._identity: ModelIdentity | None = None  # the last that was served
        self.metrics.rows = self.fleet.status_rows
        self.metrics.open_requests = lambda: self._unsettled
        self.metrics.dropped_frames = lambda: self._links.dropped
        self.metrics.prefix_index = lambda: PrefixFigures(
            len(self._prefixes), self._prefixes.memory_bytes, self._prefixes.gaps, self._prefixes.refused
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
            self._apply(stream, stream.flight.client_gone(), now)
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

    async def stream(self, request: ValidRequest) -> AsyncGenerator[TokenBatch, None]:
        """As ``TokenStreams.stream``.  Raises NoWorkers at once while draining, RequestError for what can never fit."""
        if self._draining:
            raise NoWorkers("The service is about to stop and takes no new requests.")
        if request.id in self._streams:
            raise ValueError(f"request {request.id} is being served already")
        now = self._outside.clock.now()
        if not self._unsettled:
            self._moved = now
        self._unsettled += 1
        flight = Flight(request, self._patience, now)
        stream = self._streams[request.id] = Stream(flight)
        try:
            self._apply(stream, flight.begin(now), now)
            while True:
                batch = await stream.take()
                yield batch
                if batch.finish is not None:
                    return
        finally:
            self._apply(stream, flight.client_gone(), self._outside.clock.now())
            self._settle(stream, "stop" if stream.stopped else "abort")
            del self._streams[request.id]

    def stopped(self, request: RequestId) -> None:
        """The consumer has all it wants, such as a stop string: closing the stream is then a success."""
        stream = self._streams.get(request)
        if stream is not None:
            stream.stopped = True

    def identity(self) -> ModelIdentity | None:
        """That of most ready workers; while none is ready, the one that was served last."""
        identities = self.fleet.identities()
        if identities:
            self._identity = identities[0]
        return self._identity

    def ready(self) -> bool:
        """Is there a ready worker for each leg, and may new requests come?"""
        return not self._draining and can_serve(self.fleet)

    def alive(self) -> str | None:
        """None, or for how long no worker has made a step though requests are open."""
        quiet = self._outside.clock.now() - self._moved
        if not self._unsettled or quiet <= _NO_STEP_S:
            return None
        return f"{self._unsettled} requests are open and no worker has made a step for {quiet:.1f} s"

    def workers(self) -> Sequence[dict[str, Any]]:
        """``Fleet.status_rows``."""
        return self.fleet.status_rows()

    def debug(self, request: RequestId) -> tuple[Decision, ...]:
        """The decisions made for one of the latest requests, oldest first; ``reasons()`` of each tells why."""
        return self._placement.decisions.of(request)

    def explain(self, request: RequestId) -> Sequence[dict[str, Any]]:
        """The same as JSON."""
        decisions = self.debug(request)
        return [as_json(decision, decisions[0].at) for decision in decisions]

    def explain_in_a_line(self, request: RequestId) -> str | None:
        """The latest decision about a request, as a header tells it."""
        decisions = self.debug(request)
        return in_a_line(decisions[-1]) if decisions else None

    # --- events: the supervisor -------------------------------------------------------------------------------------

    def on_supervisor(self, message: SupervisorMessage) -> None:
        """Take a message of the supervisor."""
        now = self._outside.clock.now()
        if isinstance(message, WorkerUp):
            self._watch.up(message, now)
        elif isinstance(message, WorkerDown):
            self._watch.down(message)
        elif isinstance(message, Draining):
            self._draining = True

    def _lose(self, worker: WorkerId, incarnation: int, requests: Sequence[RequestId], reason: str) -> None:
        now = self._outside.clock.now()
        for request in requests:
            stream = self._streams.get(request)
            if stream is not None:
                self._apply(stream, stream.flight.lost(worker, incarnation, reason, now), now)

    # --- events: workers --------------------------------------------------------------------------------------------

    def on_message(self, worker: WorkerId, incarnation: int, message: PeerMessage) -> None:
        """Take a message that came over the link to ``worker`` of ``incarnation``."""
        now = self._outside.clock.now()
        if isinstance(message, Report):
            if message.worker == worker and message.incarnation == incarnation:
                self._on_report(message, now)
        elif not self.fleet.hear(worker, incarnation, now):
            return
        elif isinstance(message, Tokens):
            self._on_tokens(message, worker, incarnation, now)
        elif isinstance(message, KvEvents):
            self._watch.cached(message, worker, incarnation)
        elif isinstance(message, Returned):
            stream = self._streams.get(message.request)
            if stream is not None:
                effects = stream.flight.returned(message.epoch, message.reason, worker, incarnation, now)
                self._apply(stream, effects, now)

    def _on_tokens(self, message: Tokens, worker: WorkerId, incarnation: int, now: float) -> None:
        self._moved = now
        for item in message.items:
            stream = self._streams.get(item.request)
            if stream is None:
                continue
            flight = stream.flight
            if item.epoch == flight.epoch:
                self.fleet.progress(worker, item.request, flight.left_after(item, worker))
            if item.queued_s and stream.first_at is None:
                stream.queued_s = item.queued_s
            self._apply(stream, flight.tokens(item, worker, incarnation, now), now)

    def _on_report(self, report: Report, now: float) -> None:
        steps = self.fleet.steps()
        became_ready = self._watch.report(report, now)
        if self.fleet.steps() != steps:
            self._moved = now
        if became_ready:
            self._place_waiting(math.inf, now)

    # --- events: time -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at the time: beats, silent workers, retries and deadlines."""
        now = self._outside.clock.now()
        self._watch.listened(now)
        self._place_waiting(now, now)
        if not self._watch.due(now):
            return
        streams = list(self._streams.values())
        self._watch.beat(self._unheard(streams, now), now)
        for stream in streams:
            self._apply(stream, stream.flight.tick(now), now)
            since = self._watch.still(stream.flight, now)
            if since is not None:
                self._apply(stream, stream.flight.still(now, since), now)

    def _unheard(self, streams: Sequence[Stream], now: float) -> dict[WorkerId, list[Awaited]]:
        """What workers are to be asked about."""
        awaited: dict[WorkerId, list[Awaited]] = {}
        for stream in streams:
            flight = stream.flight
            for leg in flight.unheard(now):
                awaited.setdefault(leg.worker, []).append(Awaited(flight.request.id, flight.epoch))
        return awaited

    # --- effects ----------------------------------------------------------------------------------------------------

    def _apply(self, stream: Stream, effects: Effects, now: float) -> None:
        """Do what a flight asks for, in order."""
        for effect in effects:
            if isinstance(effect, Deliver):
                self._deliver(stream, effect.batch, now)
            elif isinstance(effect, LegEnded):
                self.fleet.discharge(effect.worker, effect.incarnation, effect.request)
            elif isinstance(effect, CancelLeg):
                self._cancel(effect)
            elif isinstance(effect, Send):
                if not self._send(effect):
                    # The legs after it were not sent; the flight cancels them all and asks again.
                    again = stream.flight.returned(
                        effect.submit.epoch, "queue_full", effect.worker, effect.incarnation, now
                    )
                    self._apply(stream, again, now)
                    return
            elif isinstance(effect, WaitForWorker):
                self._placement.wait(stream.flight.request.id, effect.not_before)
                if effect.not_before <= now:
                    self._place(stream, now)
            elif isinstance(effect, Fail):
                stream.fail(effect.error)
                self._settle(stream, "error")

    def _send(self, effect: Send) -> bool:
        link = self._links.to(effect.worker, effect.incarnation)
        serial = self._serial + 1
        if link is None or not link.send(msgspec.structs.replace(effect.submit, serial=serial)):
            return False
        self._serial = serial
        self.fleet.charge(
            effect.worker,
            effect.incarnation,
            effect.submit.request,
            effect.tokens,
            due=effect.due,
            serial=serial,
        )
        return True

    def _cancel(self, effect: CancelLeg) -> None:
        self.fleet.discharge(effect.worker, effect.incarnation, effect.request)
        link = self._links.to(effect.worker, effect.incarnation)
        if link is not None:
            link.cancel(Cancel(request=effect.request, epoch=effect.epoch))

    def _deliver(self, stream: Stream, batch: TokenBatch, now: float) -> None:
        request = stream.flight.request
        self._placement.answered(request.id)
        if stream.first_at is None:
            stream.first_at = now
            self.metrics.first_token(now - request.arrival, stream.queued_s, len(request.prompt))
            self.metrics.more_tokens(len(batch.tokens) if batch.pooled is None else 0, None)
        else:
            self.metrics.more_tokens(len(batch.tokens), now - stream.last_at)
        stream.last_at = now
        stream.put(batch)
        if batch.finish is not None:
            self._settle(stream, batch.finish.value)

    def _settle(self, stream: Stream, reason: str) -> None:
        """A flight is over: count it, once."""
        if stream.settled:
            return
        stream.settled = True
        self._unsettled -= 1
        request = stream.flight.request
        self._placement.ended(stream.flight)
        now = self._outside.clock.now()
        first = stream.first_at
        self.metrics.finished(reason, now - request.arrival, None if first is None else now - first)

    # --- placing ----------------------------------------------------------------------------------------------------

    def _place_waiting(self, until: float, now: float) -> None:
        for request in self._placement.due(until):
            stream = self._streams.get(request)
            if stream is not None:
                self._place(stream, now)

    def _place(self, stream: Stream, now: float) -> None:
        if stream.flight.phase is Phase.WAITING:
            decision, root = self._placement.decide(stream.flight, now)
            self._apply(stream, stream.flight.placed(decision, root, now), now)
