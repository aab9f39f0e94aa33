"""Health of workers: who is present, who is silent or stalled, and which requests are lost with a worker.

Turns messages of the supervisor, reports and the passing of time into the fleet's state.  ``migration`` resubmits the
requests of lost workers.  A gateway serves one model, that of most workers at its start (``PinnedModel``): requests are
tokenized for it, and a worker of another model would misread their tokens.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import ceil

import msgspec

from penstock.config.schema import GatewayConfig
from penstock.errors import ConfigError
from penstock.hashing import chain_root
from penstock.router.decide import has_live_workers, has_ready_workers
from penstock.router.fleet import Fleet
from penstock.router.links import WorkerLinks
from penstock.router.migration import LostWorker, LostWorkerHandler
from penstock.router.prefix_index import PrefixIndex
from penstock.router.quarantine import Quarantine
from penstock.router.request import RoutedRequest
from penstock.router.turns import TICK_S
from penstock.telemetry.log import log_event
from penstock.telemetry.registry import Metrics
from penstock.types import (
    GREEDY,
    ModelIdentity,
    PoolingParams,
    RequestId,
    RequestStage,
    Role,
    SamplingParams,
    Task,
    WorkerId,
    WorkerState,
    is_older_incarnation,
    pack_token_ids,
)
from penstock.wire.gateway_messages import (
    AwaitedStage,
    Hello,
    KvEvents,
    Recipient,
    ReturnReason,
    Submit,
    WorkerReport,
)
from penstock.wire.supervisor_messages import SuspectWorker, WorkerDown, WorkerUp


class PinnedModel:
    """The model of one gateway.  Numerics classes of one model are one model."""

    def __init__(self, pin_s: float, *, follows_upgrades: bool) -> None:
        """Decided ``pin_s`` after the first worker was ready; never, if it ``follows_upgrades``."""
        self._pin_s = pin_s
        self._follows = follows_upgrades
        self._since: float | None = None  # when a worker was ready first
        self.fingerprint: str | None = None  # of the model; None: not decided yet

    def observe(self, present: Iterable[ModelIdentity], now: float, *, ready: bool) -> None:
        """Workers of these identities are there, whatever their state; ``ready``: one of them is."""
        if self._follows or self.fingerprint is not None or not (ready or self._since is not None):
            return
        if self._since is None:
            self._since = now
        if now - self._since < self._pin_s:
            return
        counts = Counter(identity.fingerprint for identity in present)
        if counts:
            self.fingerprint = counts.most_common(1)[0][0]

    def is_foreign(self, identity: ModelIdentity) -> bool:
        """Whether this is a model other than the pinned one."""
        return self.fingerprint is not None and identity.fingerprint != self.fingerprint


log = logging.getLogger("penstock.router")

EXITED_CLEANLY = "exit code 0"
"""The reason of a worker that exited on request (``launch.restart_policy.ProcessExit``)."""


_LATE_S = 0.25  # a tick later than this means that we did not listen, not that workers did not speak

REMOVAL_INTERVAL_S = 10.0
"""Between two searches for lost workers to remove."""

NO_MEMBER = "no longer a member"
"""The reason of a worker that gets no new requests because it is to be forgotten."""

MAX_REFUSALS = 16
"""Requests that a worker may return in a row, for reasons of its own, before it is removed from routing."""

STALLED_STEPS = 20
"""A worker that reports and has made no step for the time of 20 predicted ones is stalled."""


class WorkerHealth:
    """Keeps ``fleet``, ``links`` and ``prefixes`` up to date.  ``suspect`` notifies the supervisor."""

    def __init__(
        self,
        config: GatewayConfig,
        *,
        fleet: Fleet,
        links: WorkerLinks,
        prefixes: PrefixIndex,
        metrics: Metrics,
        quarantine: Quarantine,
        lost_workers: LostWorkerHandler,
        suspect: Callable[[SuspectWorker], None],
    ) -> None:
        self._failover = config.failover
        self._hello = Hello(gateway=config.name, incarnation=config.incarnation, host=config.rate_host)
        self._fleet = fleet
        self._links = links
        self._prefixes = prefixes
        self._metrics = metrics
        self._lost_workers = lost_workers
        self._notify_supervisor = suspect
        self._quarantine = quarantine
        self._pinned = PinnedModel(config.failover.pin_model_s, follows_upgrades=config.allow_model_upgrade)
        self._foreign: dict[WorkerId, int] = {}  # incarnations of which it was logged that they are
        self._leaving: set[WorkerId] = set()  # no members any more, with requests that have not ended yet
        self._task = config.task
        self._resubmitted: dict[tuple[WorkerId, int], tuple[Sequence[RequestId], float]] = {}
        self._unexplained: dict[WorkerId, LostWorker] = {}  # ended, and its successor may say that it crashed
        self.refusals: dict[WorkerId, int] = {}  # given back in a row, by workers that wrote no token meanwhile
        self._unconnected: dict[WorkerId, WorkerUp] = {}  # to whom no link could be made yet
        self._served_at = float("inf")  # when there was last somebody; at the beginning they are waited for
        self._ticked: float | None = None
        self._heartbeat_at = float("-inf")
        self._next_removal = float("-inf")
        self._sent_heartbeats = 0

    # --- the supervisor ---------------------------------------------------------------------------------------------

    def on_worker_up(self, message: WorkerUp, now: float) -> None:
        """A worker process was started; an earlier incarnation of it is over."""
        fleet = self._fleet
        slot = fleet.slot(message.worker)
        if message.worker in self._leaving:
            self._leaving.discard(message.worker)  # it is a member again, or the name is another's now
            if slot is not None and fleet.incarnations[slot] != message.incarnation:
                known = fleet.incarnations[slot]
                self.on_worker_down(
                    WorkerDown(worker=message.worker, incarnation=known, state=WorkerState.DEAD, reason="replaced"), now
                )
        earlier = (fleet.incarnations[slot], fleet.requests_at(slot)) if slot is not None else (0, ())
        if not fleet.on_worker_up(message, now):
            return
        followed = fleet.slot(message.worker)
        assert followed is not None, "it was taken in"
        self._prefixes.add_worker(followed, message.incarnation)
        self._connect(message)
        if message.incarnation != earlier[0]:
            self._quarantine.remove(message.worker)
        moved, given_up = self._resubmitted.pop((message.worker, earlier[0]), ((), now))
        lost = LostWorker(
            worker=message.worker,
            incarnation=earlier[0],
            requests=earlier[1],
            reason="replaced",
            moved_requests=moved,
            suspected_at=given_up,
        )
        self._await_explanation(lost, now)
        self._lost_workers.on_worker_lost(lost)

    def _await_explanation(self, lost: LostWorker, now: float) -> None:
        """Remember what was at a worker that ended for a reason not known here, such as one of another host."""
        requests = (*lost.moved_requests, *lost.requests)
        if requests:
            since = lost.suspected_at if lost.moved_requests else now
            self._unexplained[lost.worker] = replace(lost, requests=(), moved_requests=requests, suspected_at=since)

    def _explain(self, report: WorkerReport) -> None:
        """Blame the requests of the worker's predecessor, if the report says that it crashed."""
        lost = self._unexplained.get(report.worker)
        if lost is None or report.incarnation == lost.incarnation:
            return
        del self._unexplained[report.worker]
        if report.predecessor_fault and report.incarnation == lost.incarnation + 1:
            self._lost_workers.on_worker_lost(replace(lost, reason=report.predecessor_fault, fault=True))

    def _connect(self, message: WorkerUp) -> None:
        """Open a link, now or with a later heartbeat: a process may be out of sockets or descriptors for a while."""
        try:
            link = self._links.open(message.worker, message.incarnation, message.endpoint)
        except ConfigError as error:
            if message.worker not in self._unconnected:
                log_event(log, logging.ERROR, "no link to a worker", worker=message.worker, reason=str(error))
            self._unconnected[message.worker] = message
            return
        self._unconnected.pop(message.worker, None)
        link.send_heartbeat(self._hello, kv_snapshot=True)

    def on_worker_down(self, message: WorkerDown, now: float) -> None:
        """A worker process has ended."""
        fleet = self._fleet
        slot = fleet.slot(message.worker)
        work = fleet.requests_at(slot) if slot is not None else ()
        dead_already = slot is not None and fleet.has_ended(slot)
        if not fleet.on_worker_down(message) or dead_already:
            return
        if slot is not None:
            self._prefixes.remove_worker(slot)
        self._metrics.on_worker_died(message.worker)
        grave = message.fault or bool(work) or message.reason != EXITED_CLEANLY
        log_event(
            log,
            logging.WARNING if grave else logging.INFO,
            "worker is down",
            worker=message.worker,
            reason=message.reason,
            requests=len(work),
        )
        self._links.close_link(message.worker)
        self._unconnected.pop(message.worker, None)
        self.refusals.pop(message.worker, None)
        self._foreign.pop(message.worker, None)
        moved, given_up = self._resubmitted.pop((message.worker, message.incarnation), ((), 0.0))
        lost = LostWorker(
            worker=message.worker,
            incarnation=message.incarnation,
            requests=work,
            reason=message.reason,
            fault=message.fault,
            moved_requests=moved,
            suspected_at=given_up,
        )
        if not message.fault:
            self._await_explanation(lost, now)
        self._lost_workers.on_worker_lost(lost)

    def on_worker_removed(self, worker: WorkerId) -> None:
        """A worker is no longer a member: it gets no new requests, and is forgotten when those that it has have ended.

        Should it die before, it is found silent with requests, which then continue elsewhere.
        """
        slot = self._fleet.slot(worker)
        if slot is None:
            return
        self._leaving.add(worker)
        if self._fleet.states[slot] is WorkerState.READY:
            self._fleet.drain(slot, NO_MEMBER)
        self._forget_idle_leavers()

    def _forget_idle_leavers(self) -> None:
        fleet = self._fleet
        for worker in tuple(self._leaving):
            slot = fleet.slot(worker)
            if slot is None or fleet.requests_at(slot):
                continue
            known = fleet.incarnations[slot]
            down = WorkerDown(worker=worker, incarnation=known, state=WorkerState.DEAD, reason=NO_MEMBER)
            fleet.on_worker_down(down)
            self._links.close_link(worker)
            self._forget(worker)
            log_event(log, logging.INFO, "worker is forgotten", worker=worker, reason=NO_MEMBER)

    # --- workers ----------------------------------------------------------------------------------------------------

    def on_report(self, report: WorkerReport, now: float) -> bool:
        """Apply a worker's report.  True when it has become ready."""
        slot = self._fleet.slot(report.worker)
        was = self._fleet.states[slot] if slot is not None else None
        if report.state is WorkerState.READY and self._quarantine.contains(report.worker, report.incarnation):
            report = msgspec.structs.replace(report, state=WorkerState.QUARANTINED)
        foreign = self._pinned.is_foreign(report.identity)
        if foreign and report.state in (WorkerState.READY, WorkerState.QUARANTINED):
            report = msgspec.structs.replace(report, state=WorkerState.FOREIGN)
        leaves = report.worker in self._leaving
        if leaves and report.state is WorkerState.READY:
            report = msgspec.structs.replace(report, state=WorkerState.DRAINING)
        if not self._fleet.on_report(report, now):
            return False
        if leaves and slot is not None:
            self._fleet.set_reason(slot, NO_MEMBER)
        if foreign:
            self._mark_foreign(report)
        if slot is not None:
            self._prefixes.on_report(slot, report.incarnation, report.kv_sequence)
        self._metrics.on_worker_report(report.worker, report.incarnation, report.counters)
        self._explain(report)
        if was is WorkerState.READY or report.state is not WorkerState.READY:
            return False
        log_event(log, logging.INFO, "worker is ready", worker=report.worker, role=report.role.value, pid=report.pid)
        return True

    def _mark_foreign(self, report: WorkerReport) -> None:
        slot, pinned = self._fleet.slot(report.worker), self._pinned.fingerprint or ""
        reason = f"it serves another model ({report.identity.fingerprint[:12]}) than this gateway ({pinned[:12]})"
        if slot is not None:
            self._fleet.set_reason(slot, reason)
        if self._foreign.get(report.worker) != report.incarnation:
            self._foreign[report.worker] = report.incarnation
            log_event(log, logging.WARNING, "worker is foreign", worker=report.worker, reason=reason)

    def on_replaced(self, worker: WorkerId, incarnation: int, report: WorkerReport, now: float) -> None:
        """A later incarnation of the worker reports over this link, before the supervisor's message about it: close the
        link, and resubmit the earlier one's requests."""
        slot, link = self._fleet.slot(worker), self._links.link_to(worker, incarnation)
        if (
            slot is None
            or link is None
            or report.worker != worker
            or not is_older_incarnation(incarnation, report.incarnation)
        ):
            return
        reason = "another process answers at its address"
        work = self._fleet.requests_at(slot)
        self._fleet.mark_unresponsive(slot, reason)
        self._links.close_link(worker)
        log_event(log, logging.WARNING, "worker was replaced", worker=worker, requests=len(work))
        self._resubmitted[worker, incarnation] = work, now
        self._lost_workers.on_worker_lost(
            LostWorker(worker=worker, incarnation=incarnation, requests=work, reason=reason)
        )

    def on_kv_events(self, events: KvEvents, worker: WorkerId, incarnation: int) -> None:
        """Apply a worker's changes of its own prefix cache."""
        slot = self._fleet.slot(worker)
        if slot is not None and (events.worker, events.incarnation) == (worker, incarnation):
            self._prefixes.on_kv_events(slot, events)

    # --- time -------------------------------------------------------------------------------------------------------

    def on_tick(self, now: float) -> None:
        """Called every ``TICK_S``.  After a longer pause of this process, silence in that time does not count."""
        if self._ticked is not None and now - self._ticked - TICK_S > _LATE_S:
            self._fleet.shift_clocks(now - self._ticked - TICK_S)
        self._ticked = now

    def heartbeat_due(self, now: float) -> bool:
        """Whether the next heartbeat is due, at the tick that is nearest to its time."""
        return now - self._heartbeat_at >= self._failover.beat_s - TICK_S / 2

    def send_heartbeats(self, awaited: Mapping[WorkerId, Sequence[AwaitedStage]], now: float) -> None:
        """Send a Hello to each worker, with the stages that are ``awaited`` there, and suspect silent workers.

        Ready workers without requests of this gateway get fewer (``_idle_pause``), a part of them with each heartbeat.
        """
        self._heartbeat_at = now
        self._sent_heartbeats += 1
        self._pinned.observe(self._fleet.reported_identities(), now, ready=bool(self._fleet.identities()))
        for message in tuple(self._unconnected.values()):
            self._connect(message)
        fleet = self._fleet
        lacking = {worker for slot, worker in enumerate(fleet.ids) if self._prefixes.needs_snapshot(slot, now)}
        pause = self._idle_pause(len(fleet.ids))
        resting = {
            worker
            for slot, worker in enumerate(fleet.ids)
            if (slot + self._sent_heartbeats) % pause and fleet.is_idle(slot)
        }
        self._links.send_heartbeats(self._hello, awaited, lacking, resting)
        self._prefixes.sweep()
        self._forget_idle_leavers()
        self._remove_gone_workers(now)
        for slot in list(fleet.silent_slots(now, self._failover.silence_s, self._failover.overrun)):
            quiet, work = now - fleet.last_seen[slot], fleet.requests_at(slot)
            self._suspect(slot, f"silent for {quiet:.1f} s with {len(work)} requests", now)
        for worker, incarnation, frames in self._links.take_malformed():
            self.distrust(worker, incarnation, f"{frames} messages that are none of ours", now)
        self._probe(now)

    def _idle_pause(self, workers: int) -> int:
        """Heartbeats from one Hello to the next for a ready worker without requests: two, and more in a large fleet.

        Such a worker responds to each Hello, and they are most of what a large idle fleet costs a gateway.
        """
        limits = self._failover
        longest = max(2, int(limits.idle_beat_max_s / limits.beat_s))
        return min(longest, max(2, ceil(workers / (limits.idle_hellos_per_s * limits.beat_s))))

    def _remove_gone_workers(self, now: float) -> None:
        """Remove workers that were lost long ago: names that never come back (of pods, say) must not pile up."""
        if now < self._next_removal:
            return
        self._next_removal = now + min(REMOVAL_INTERVAL_S, self._failover.forget_s)
        for worker in self._fleet.gone_workers(now, self._failover.forget_s):
            self._forget(worker)
            log.info("%s has been gone for %g s and is forgotten", worker, self._failover.forget_s)

    def _forget(self, worker: WorkerId) -> None:
        """Remove a worker that has ended, and all that is known of it."""
        slot = self._fleet.remove_worker(worker)
        if slot is not None:
            self._prefixes.remove_worker(slot)
        self._leaving.discard(worker)
        self._unconnected.pop(worker, None)
        self.refusals.pop(worker, None)
        self._foreign.pop(worker, None)
        self._unexplained.pop(worker, None)
        self._quarantine.remove(worker)
        self._resubmitted = {place: what for place, what in self._resubmitted.items() if place[0] != worker}
        self._metrics.remove_worker(worker)

    def no_workers_reason(self, now: float) -> str | None:
        """Why waiting is useless: all workers that could serve have been gone for ``no_path_s``.  None: it is not."""
        if has_live_workers(self._fleet, self._quarantine.hopeless):
            self._served_at = now
        gone = now - self._served_at
        if gone <= self._failover.no_path_s:
            return None
        return f"Every worker that could serve this has been out of reach for {gone:.1f} s."

    def stalled_since(self, flight: RoutedRequest, now: float) -> float | None:
        """When the workers of a request last made progress, if that is too long ago; they are suspected then.

        A request is stalled only if none of its workers has made a step or moved a page: a worker may wait for another
        one's pages or memory.
        """
        fleet, still_s = self._fleet, self._failover.still_s
        if now - flight.idle_since < still_s:
            return None
        legs, since = flight.pending_stages
        for leg in legs:
            slot = fleet.slot(leg.worker)
            if slot is None or not fleet.is_current(leg.worker, leg.incarnation) or not fleet.is_up(slot):
                return None
            since = max(since, fleet.progress_at[slot])
            if now - since < still_s or now - since < STALLED_STEPS * fleet.step_s(slot):
                return None
        if not legs:
            return None
        reason = f"no step for {now - since:.1f} s with {flight.request.id}"
        for leg in legs:
            suspect = SuspectWorker(worker=leg.worker, incarnation=leg.incarnation, reason=reason)
            self._warn("worker stands still", suspect, now)
            if (slot := fleet.slot(leg.worker)) is not None and fleet.states[slot] is WorkerState.READY:
                fleet.quarantine(slot, reason)
        return since

    def on_unknown_tokens(self, request: RequestId, worker: WorkerId, incarnation: int) -> None:
        """A token came that no stream waits for; it may be a probe's."""
        if self._quarantine.on_probe_answered(request, worker, incarnation):
            self._metrics.on_worker_probed(worker, "answered")
            log_event(log, logging.INFO, "worker is let back", worker=worker)

    def is_probe(self, request: RequestId) -> bool:
        """Whether ``request`` is a pending probe; no stream belongs to it."""
        return self._quarantine.is_probe(request)

    def distrust(self, worker: WorkerId, incarnation: int, reason: str, now: float) -> None:
        """Treat a worker whose messages cannot be right like a silent one: the next ones may be as wrong."""
        slot = self._fleet.slot(worker)
        if (
            slot is None
            or not self._fleet.is_current(worker, incarnation)
            or self._quarantine.contains(worker, incarnation)
        ):
            return
        if self._fleet.is_up(slot):
            self._suspect(slot, reason, now)

    def on_returned(self, worker: WorkerId, incarnation: int, reason: ReturnReason, now: float) -> None:
        """Count a returned request.  A worker that returns everything, and not because it is busy, is suspected."""
        if reason.harmless or reason.concerns_request:  # one client's requests must not exclude a worker
            return
        self.refusals[worker] = self.refusals.get(worker, 0) + 1
        if self.refusals[worker] >= MAX_REFUSALS:
            del self.refusals[worker]
            self.distrust(worker, incarnation, f"gave back {MAX_REFUSALS} requests and wrote no token", now)

    def _probe(self, now: float) -> None:
        """Probe each worker that was given up and sends messages again with a request for one token."""
        if not len(self._quarantine):
            return
        fleet = self._fleet
        for worker, incarnation in self._quarantine.expire_probes(now):
            self._metrics.on_worker_probed(worker, "unanswered")
            reason = f"no answer to a probe within {self._failover.probe_s:g} s"
            self._notify_supervisor(SuspectWorker(worker=worker, incarnation=incarnation, reason=reason))
        for worker, incarnation in self._quarantine.due_for_probe(now, urgent=not has_ready_workers(fleet)):
            slot, link = fleet.slot(worker), self._links.link_to(worker, incarnation)
            if slot is None or link is None or fleet.states[slot] is not WorkerState.QUARANTINED:
                continue
            report = fleet.reports[slot]
            if report is None or report.role is Role.ENCODE or self._task is Task.TRANSCRIBE:
                self._quarantine.remove(worker)  # no prompts, or none without a sound: its word must do
                continue
            self._metrics.on_worker_probed(worker, "sent")
            link.send(_probe_submit(self._quarantine.begin_probe(worker, now), report, self._task))

    def _suspect(self, slot: int, reason: str, now: float) -> None:
        fleet = self._fleet
        worker, incarnation, work = fleet.ids[slot], fleet.incarnations[slot], fleet.requests_at(slot)
        fleet.mark_unresponsive(slot, reason)
        self._resubmitted[worker, incarnation] = work, now
        self._warn("worker is suspected", SuspectWorker(worker=worker, incarnation=incarnation, reason=reason), now)
        self._lost_workers.on_worker_lost(
            LostWorker(worker=worker, incarnation=incarnation, requests=work, reason=reason)
        )

    def _warn(self, what: str, suspect: SuspectWorker, now: float) -> None:
        self._quarantine.add(suspect.worker, suspect.incarnation, now)
        log_event(log, logging.WARNING, what, worker=suspect.worker, reason=suspect.reason)
        self._metrics.on_worker_suspected(suspect.worker)
        self._notify_supervisor(suspect)


def _probe_submit(name: RequestId, report: WorkerReport, task: Task) -> Submit:
    """The smallest possible request, as a probe."""
    return Submit(
        recipient=Recipient(worker=report.worker, incarnation=report.incarnation, identity=report.identity),
        request=name,
        epoch=1,
        stage=RequestStage.WHOLE,
        prompt=bytes(pack_token_ids((0,))),
        sampling=SamplingParams(seed=0, max_tokens=1, temperature=GREEDY),
        root=chain_root(report.identity),
        pooling=None if task.writes else PoolingParams(),
    )
