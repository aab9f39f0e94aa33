"""The gateway's watch over its workers: who is there, who has fallen silent, and whose requests are lost with them.

Turns the supervisor's words, workers' reports and the passing of time into the fleet's state, and says which requests
lost their worker.  Knows nothing of what becomes of those, and nothing about tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from penstock.config.schema import GatewayConfig
from penstock.router.fleet import Fleet
from penstock.router.forgotten import Forgotten
from penstock.router.links import Links
from penstock.telemetry.log import event
from penstock.telemetry.registry import Metrics
from penstock.types import RequestId, WorkerId, WorkerState
from penstock.wire.messages import Hello, Report, Suspect, WorkerDown, WorkerUp

log = logging.getLogger("penstock.router")

TICK_S = 0.05
"""Between two looks at time: retries are at most so late."""

_LATE_S = 0.25  # a tick later than this means that we did not listen, not that workers did not speak

Lose = Callable[[WorkerId, int, Sequence[RequestId], str], None]
"""Called with a worker, its incarnation, the requests that were lost there, and why."""


class Watch:
    """Keeps ``fleet`` and ``links`` true.  ``lose`` hears of lost requests, ``suspect`` (the supervisor) of silence."""

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        links: Links,
        metrics: Metrics,
        *,
        lose: Lose,
        suspect: Callable[[Suspect], None],
    ) -> None:
        self._failover = config.failover
        self._hello = Hello(gateway=config.name, incarnation=config.incarnation)
        self._fleet = fleet
        self._links = links
        self._metrics = metrics
        self._lose = lose
        self._suspected = suspect
        self._forgotten = Forgotten()
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
        self._links.open(message.worker, message.incarnation, message.endpoint).beat(self._hello)
        self._lose(message.worker, earlier[0], earlier[1], "replaced")

    def down(self, message: WorkerDown) -> None:
        """A worker process has ended."""
        fleet = self._fleet
        slot = fleet.slot(message.worker)
        work = fleet.work(slot) if slot is not None else ()
        dead_already = slot is not None and fleet.has_ended(slot)
        if not fleet.down(message) or dead_already:
            return
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
        self._metrics.worker_report(report.worker, report.incarnation, report.counters)
        if was is WorkerState.READY or report.state is not WorkerState.READY:
            return False
        event(log, logging.INFO, "worker is ready", worker=report.worker, role=report.role.value, pid=report.pid)
        return True

    # --- time -------------------------------------------------------------------------------------------------------

    def listened(self, now: float) -> None:
        """Called every ``TICK_S``.  When it was not, nobody can be blamed for silence in that time."""
        if self._ticked is not None and now - self._ticked - TICK_S > _LATE_S:
            self._fleet.forgive(now - self._ticked - TICK_S)
        self._ticked = now

    def beat(self, now: float) -> bool:
        """Greet everybody and look for the silent, when it is time.  False: it is not."""
        if now - self._beaten < self._failover.beat_s:
            return False
        self._beaten = now
        fleet = self._fleet
        self._links.beat(self._hello)
        for slot in list(fleet.silent(now, self._failover.silence_s)):
            self._suspect(slot, now)
        for slot, work in self._forgotten.look(fleet, now):
            self._lose(fleet.ids[slot], fleet.incarnations[slot], work, "idle, and knows nothing of it")
        return True

    def _suspect(self, slot: int, now: float) -> None:
        fleet = self._fleet
        worker, incarnation, work = fleet.ids[slot], fleet.incarnations[slot], fleet.work(slot)
        reason = f"silent for {now - fleet.heard[slot]:.1f} s with {len(work)} requests"
        fleet.suspect(slot, reason)
        event(log, logging.WARNING, "worker is suspected", worker=worker, reason=reason)
        self._metrics.worker_suspected(worker)
        self._suspected(Suspect(worker=worker, incarnation=incarnation, reason=reason))
        self._lose(worker, incarnation, work, reason)
