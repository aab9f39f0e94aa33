"""Placement of requests: which wait for a worker, what was decided for them, which prefixes are cached where.

Repeated retries have a budget: a bucket that new requests and time refill (``RetryBudget``).  The first retry of a
request is free, so a host that dies with thousands of requests delays none of them.  A request that fails again without
a new token pays.  The budget always has room for one retry of each open request, refuses nothing, and delays no request
by more than ``retry_wait_s``.  Pure but for its log and its stop watch.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace
from time import perf_counter

from penstock.config.limits import FailoverConfig, RoutingConfig
from penstock.hashing import chain_root
from penstock.router.decide import Decision, DecisionLog, PlacementRules, choose_migration_target, choose_workers
from penstock.router.fleet import Fleet
from penstock.router.poison import PoisonIsolation
from penstock.router.policy.baselines import make_policy
from penstock.router.prefix_index import PrefixIndex
from penstock.router.request import RoutedRequest
from penstock.telemetry.log import log_event
from penstock.telemetry.registry import Metrics
from penstock.types import PAGE_TOKENS, BlockHash, RequestId, ValidRequest, WorkerId

log = logging.getLogger("penstock.router")

RESPONSES_AVERAGED = 64
"""The expected output length is the mean of the first 64 requests; each later one has a weight of 1/64."""


class Placement:
    """Decides for flights that ask, and remembers those that must ask again."""

    def __init__(
        self,
        config: RoutingConfig,
        fleet: Fleet,
        metrics: Metrics,
        *,
        mixed_numerics: bool,
        page_tokens: int = PAGE_TOKENS,
        apart: PoisonIsolation | None = None,
    ) -> None:
        self.decisions = DecisionLog(config.remembered_requests, config.remembered_decisions)
        self.prefixes = PrefixIndex(config.max_indexed_blocks, config.max_indexed_workers)
        self.isolation = PoisonIsolation(limit=math.inf) if apart is None else apart
        self._fleet = fleet
        self._metrics = metrics
        self._how = PlacementRules(
            policy=make_policy(config.policy),
            always_split=config.split == "always",
            mixed_numerics=mixed_numerics,
            page_tokens=page_tokens,
        )
        self._waiting: dict[RequestId, float] = {}  # -> not before; in order of arrival
        self._firm: set[RequestId] = set()  # of those, the ones whom no new worker helps
        self._answers = 0  # finished requests
        self._length = math.inf  # tokens of an answer, on the average
        self._expected = float(config.expected_answer_tokens)  # of one without a named length, before that is known

    def add_waiting(self, request: RequestId, not_before: float, *, firm: bool = False) -> None:
        """Place this request at ``not_before``, or, unless ``firm``, when a worker becomes ready."""
        self._waiting[request] = not_before
        (self._firm.add if firm else self._firm.discard)(request)

    def remove_waiting(self, request: RequestId) -> None:
        """This request waits no more."""
        self._waiting.pop(request, None)
        self._firm.discard(request)

    def due_requests(self, now: float, *, ready: bool) -> list[RequestId]:
        """Requests that may try again, in order of arrival.  ``ready``: a worker has become ready."""
        return [
            request
            for request, not_before in self._waiting.items()
            if not_before <= now or (ready and request not in self._firm)
        ]

    def decide(
        self, flight: RoutedRequest, now: float, stopwatch: Callable[[], float] = perf_counter
    ) -> tuple[Decision, BlockHash]:
        """A decision for this flight, and the hash chain's root where it will be served."""
        request = flight.request
        began = stopwatch()
        ask = flight.placement_request(now)
        suspect = self.isolation.is_suspect(flight.crashes)
        if suspect:
            ask = replace(ask, avoid=ask.avoid | self.isolation.occupied_workers(request.id))
        decision = choose_workers(ask, self._fleet, self.prefixes, now, self._how, write=self._write(request))
        self._metrics.on_decision(stopwatch() - began, legs=len(decision.stages))
        self.decisions.add(request.id, decision)
        if decision.stages:
            self.remove_waiting(request.id)
            if suspect:
                self.isolation.place(request.id, [(chosen.worker, chosen.incarnation) for chosen in decision.stages])
            self.prefixes.add_pending(request.id, request.block_hashes, [chosen.slot for chosen in decision.stages])
            if flight.epoch > 1:
                self._metrics.on_resubmitted()
                log_event(log, logging.INFO, "request goes on", request_id=request.id, epoch=flight.epoch)
        return decision, _root(decision, request)

    def choose_migration_target(
        self, flight: RoutedRequest, worker: WorkerId, incarnation: int, now: float, *, beyond: int = 0
    ) -> tuple[Decision, BlockHash]:
        """The worker that continues a request which ``worker`` decodes.  Never one that has a stage of it: a
        worker takes a request on once in an epoch.  ``beyond``: ``PlacementRequest.min_context``."""
        ask, fleet = flight.placement_request(now), self._fleet
        taken = {who for who in zip(fleet.ids, fleet.incarnations, strict=True) if flight.runs_on(*who)}
        ask = replace(ask, avoid=ask.avoid | taken | {(worker, incarnation)}, min_context=beyond)
        decision = choose_migration_target(ask, fleet, self.prefixes, now, self._how, write=self._write(flight.request))
        if decision.stages:
            self.decisions.add(flight.request.id, decision)
        return decision, _root(decision, flight.request)

    def _write(self, request: ValidRequest) -> float:
        """How many tokens an answer has on the average; infinite for as long as only its own length tells."""
        return self._expected if request.open_ended and not self._answers else self._length

    def on_first_token(self, request: RequestId) -> None:
        """The first token came: the workers' next reports contain what the request left in caches."""
        self.prefixes.on_prefilled(request)

    def on_finished(self, flight: RoutedRequest) -> None:
        """A flight is over."""
        self.remove_waiting(flight.request.id)
        self.isolation.remove(flight.request.id)
        self.prefixes.on_prefilled(flight.request.id)
        tokens = len(flight.emitted)
        if tokens:
            self._answers += 1
            share = 1 / min(self._answers, RESPONSES_AVERAGED)
            self._length = float(tokens) if self._answers == 1 else (1 - share) * self._length + share * tokens


def _root(decision: Decision, request: ValidRequest) -> BlockHash:
    if decision.identity is None:
        return BlockHash(b"")
    adapter = request.adapter.fingerprint if request.adapter is not None else ""
    return chain_root(decision.identity, adapter=adapter, tenant_salt=request.cache_salt)


class RetryBudget:
    """Full to begin with."""

    def __init__(self, config: FailoverConfig, now: float) -> None:
        self._config = config
        self._spent = 0.0  # what has not been filled up again
        self._at = now

    def on_request(self) -> None:
        """A new request has come."""
        self._spent = max(0.0, self._spent - self._config.retry_share)

    def spend(self, now: float, open_streams: int) -> float:
        """One resubmission: when it may go, ``now`` or later.  There is room for each of the ``open_streams``."""
        config = self._config
        self._spent = max(0.0, self._spent - max(0.0, now - self._at) * config.retry_per_s) + 1
        self._at = max(self._at, now)
        lacking = self._spent - max(config.retry_burst, open_streams)
        return now + min(max(0.0, lacking / config.retry_per_s), config.retry_wait_s)
