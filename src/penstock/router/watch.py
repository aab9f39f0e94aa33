"""The gateway's watch over its workers: who is there, who has fallen silent, and whose requests are lost with them.

Turns the supervisor's words, workers' reports and the passing of time into the fleet's state, and says which requests
lost their worker.  Knows nothing of what becomes of those, and nothing about tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from penstock.config.schema import GatewayConfig
from penstock.router.failover import Flight
from penstock.router.fleet import Fleet
from penstock.router.links import Links
from penstock.router.prefix_index import PrefixIndex
from penstock.telemetry.log import event
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId, WorkerId, WorkerState
from penstock.wire.messages import Awaited, Hello, KvEvents, Report, Suspect, WorkerDown, WorkerUp

log = logging.getLogger("penstock.router")

TICK_S = 0.05
"""Between two looks at time: retries are at most so late."""

_LATE_S = 0.25  # a tick later than this means that we did not listen, not that workers did not speak

STILL_STEPS = 20
"""A worker with work of ours that reports, and has not made a step for so many predicted ones, stands still."""

Lose = Callable[[WorkerId, int, Sequence[RequestId], str], None]
"""Called with a worker, its incarnation, the requests that were lost there, and why."""


@dataclass(frozen=True, slots=True)
class WatchedState:
    """What is kept true."""

    fleet: Fleet
    links: Links
    prefixes: PrefixIndex


class Watch:
    """Keeps ``state`` true.  ``lose`` hears of lost requests, ``suspect`` (the supervisor) of silence."""

    def __init__(
        self,
        config: GatewayConfig,
        state: WatchedState,
        metrics: Metrics,
        *,
        lose: Lose,
        suspect: Callable[[Suspect], None],
    ) -> None:
        self._failover = config.failover
        self._hello = Hello(gateway=config.name, incarnation=config.incarnation)
        self._fleet = state.fleet
        self._links = state.links
        self._prefixes = state.prefixes
        self._metrics = metrics
        self._lose = lose
        self._suspected = suspect
        self._ticked: float | None = None
        self._beaten = float("-inf")

    # --- the supervisor ---------------------------------------------------------------------------------------------

    def up(self, message: WorkerUp, now: float) -> None:
        """A worker process was started; an earlier incarnation of it is over."""
        fleet = self._fleet
        slot = fleet.slot(message.worker)
        earlier = (fleet.incarnations[slot], fleet.work(slot)) if slot is not None else (0, ())
        if not fleet.up(message, now):
            return
        self._prefixes.follow(fleet.ids.index(message.worker) if slot is None else slot, message.incarnation)
        self._links.open(message.worker, message.incarnation, message.endpoint).beat(self._hello, kv_snapshot=True)
        self._lose(message.worker, earlier[0], earlier[1], "replaced")

    def down(self, message: WorkerDown) -> None:
        """A worker process has ended."""
        fleet = self._fleet
        slot = fleet.slot(message.worker)
        work = fleet.work(slot) if slot is not None else ()
        dead_already = slot is not None and fleet.has_ended(slot)
        if not fleet.down(message) or dead_already:
            return
        if slot is not None:
            self._prefixes.drop(slot)
        self._metrics.worker_died(message.worker)
        event(log, logging.WARNING, "worker is down", worker=message.worker, reason=message.reason, requests=len(work))
        self._links.drop(message.worker)
        self._lose(message.worker, message.incarnation, work, message.reason)

    # --- workers ----------------------------------------------------------------------------------------------------

    def report(self, report: Report, now: float) -> bool:
        """A worker tells how it is.  True when it has become ready."""
        slot = self._fleet.slot(report.worker)
        was = self._fleet.states[slot] if slot is not None else None
        if not self._fleet.report(report, now):
            return False
        if slot is not None:
            self._prefixes.told(slot, report.incarnation, report.kv_sequence)
        self._metrics.worker_report(report.worker, report.incarnation, report.counters)
        if was is WorkerState.READY or report.state is not WorkerState.READY:
            return False
        event(log, logging.INFO, "worker is ready", worker=report.worker, role=report.role.value, pid=report.pid)
        return True

    def cached(self, events: KvEvents, worker: WorkerId, incarnation: int) -> None:
        """A worker tells of its prefix cache; nobody tells of another's."""
        slot = self._fleet.slot(worker)
        if slot is not None and (events.worker, events.incarnation) == (worker, incarnation):
            self._prefixes.take(slot, events)

    # --- time -------------------------------------------------------------------------------------------------------

    def listened(self, now: float) -> None:
        """Called every ``TICK_S``.  When it was not, nobody can be blamed for silence in that time."""
        if self._ticked is not None and now - self._ticked - TICK_S > _LATE_S:
            self._fleet.forgive(now - self._ticked - TICK_S)
        self._ticked = now

    def due(self, now: float) -> bool:
        """Is it time for a beat?"""
        return now - self._beaten >= self._failover.beat_s

    def beat(self, awaited: Mapping[WorkerId, Sequence[Awaited]], now: float) -> None:
        """Greet everybody, ask about the legs that are ``awaited``, and look for silent workers."""
        self._beaten = now
        fleet = self._fleet
        lacking = {worker for slot, worker in enumerate(fleet.ids) if self._prefixes.lacking(slot, now)}
        self._links.beat(self._hello, awaited, lacking)
        self._prefixes.sweep()
        for slot in list(fleet.silent(now, self._failover.silence_s)):
            self._suspect(slot, now)

    def still(self, flight: Flight, now: float) -> float | None:
        """Since when nothing that this flight waits for has moved, if that is too long; its workers are suspected.

        A worker that waits for another one's pages or memory is no reason while that other one computes: somebody's
        steps, or pages, must stand still at every end of it.
        """
        fleet = self._fleet
        legs, since = flight.waits_for
        for leg in legs:
            slot = fleet.slot(leg.worker)
            if slot is None or not fleet.is_current(leg.worker, leg.incarnation) or not fleet.is_up(slot):
                return None
            since = max(since, fleet.moved[slot])
            if now - since < max(self._failover.still_s, STILL_STEPS * fleet.step_s(slot)):
                return None
        if not legs:
            return None
        reason = f"no step for {now - since:.1f} s with {flight.request.id}"
        for leg in legs:
            self._tell("worker stands still", Suspect(worker=leg.worker, incarnation=leg.incarnation, reason=reason))
        return since

    def _suspect(self, slot: int, now: float) -> None:
        fleet = self._fleet
        worker, incarnation, work = fleet.ids[slot], fleet.incarnations[slot], fleet.work(slot)
        reason = f"silent for {now - fleet.heard[slot]:.1f} s with {len(work)} requests"
        fleet.suspect(slot, reason)
        self._tell("worker is suspected", Suspect(worker=worker, incarnation=incarnation, reason=reason))
        self._lose(worker, incarnation, work, reason)

    def _tell(self, what: str, suspect: Suspect) -> None:
        event(log, logging.WARNING, what, worker=suspect.worker, reason=suspect.reason)
        self._metrics.worker_suspected(suspect.worker)
        self._suspected(suspect)
