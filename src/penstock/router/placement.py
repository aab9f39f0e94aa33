"""Placing requests: who waits for a worker, what was decided and on what grounds, which prefixes lie where.

Pure but for its log; a flight hears of a decision from whoever asked for it.
"""

from __future__ import annotations

import logging

from penstock.hashing import chain_root
from penstock.router.decide import Decision, decide
from penstock.router.decision_log import DecisionLog
from penstock.router.failover import Flight
from penstock.router.fleet import Fleet
from penstock.router.prefix_index import PrefixIndex
from penstock.telemetry.log import event
from penstock.telemetry.registry import Metrics
from penstock.types import BlockHash, RequestId, ValidRequest

log = logging.getLogger("penstock.router")


class Placement:
    """Decides for flights that ask, and remembers those that must ask again."""

    def __init__(self, fleet: Fleet, metrics: Metrics, *, mixed_numerics: bool) -> None:
        self.decisions = DecisionLog()
        self._fleet = fleet
        self._metrics = metrics
        self._mixed_numerics = mixed_numerics
        self._prefixes = PrefixIndex()
        self._waiting: dict[RequestId, float] = {}  # -> not before; in order of arrival

    def wait(self, request: RequestId, not_before: float) -> None:
        """Nobody serves this request; it is to ask again then."""
        self._waiting[request] = not_before

    def forget(self, request: RequestId) -> None:
        """This request waits no more."""
        self._waiting.pop(request, None)

    def due(self, until: float) -> list[RequestId]:
        """Who may ask again by then, in order of arrival."""
        return [request for request, not_before in self._waiting.items() if not_before <= until]

    def decide(self, flight: Flight, now: float) -> tuple[Decision, BlockHash]:
        """A decision for this flight, and the hash chain's root where it will be served."""
        request = flight.request
        decision = decide(flight.ask(now), self._fleet, self._prefixes, now, mixed_numerics=self._mixed_numerics)
        self.decisions.add(request.id, decision)
        if decision.legs:
            self.forget(request.id)
            if flight.epoch > 1:
                self._metrics.resubmitted()
                event(log, logging.INFO, "request goes on", request_id=request.id, epoch=flight.epoch)
        if decision.prefill is not None:
            self._prefixes.record(request.block_hashes, decision.prefill.slot, decision.prefill.incarnation)
        return decision, _root(decision, request)


def _root(decision: Decision, request: ValidRequest) -> BlockHash:
    if decision.identity is None:
        return BlockHash(b"")
    return chain_root(decision.identity, tenant_salt=request.cache_salt)
