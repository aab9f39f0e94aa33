"""The fleet as the gateway knows it: workers, their states, and how many tokens each has still to compute.

One slot a worker id; an id keeps its slot over restarts until the worker is removed.  Two sources are joined: what
workers report, and what this gateway has sent them since, so that the second of two decisions in one millisecond takes
account of the first.  Messages of an earlier incarnation are ignored (a fence).  The numbers that decisions compare are
in ``worker_load``.  Knows no links and no policies.  Pure: time is a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from penstock.router.worker_load import ExpectedWork, InFlightWork, LoadTable, Slots
from penstock.telemetry.metrics import TIER_FIGURES, TIER_PAGES, TIERS, tier_counter
from penstock.types import ModelIdentity, RequestId, Role, WorkerId, WorkerState, is_older_incarnation
from penstock.wire.gateway_messages import WorkerReport
from penstock.wire.supervisor_messages import WorkerDown, WorkerUp


def tier_rows(counters: Mapping[str, float]) -> list[dict[str, Any]]:
    """One mapping a tier that has pages or has counted anything, nearest first."""
    rows = []
    for tier in TIERS:
        figures = {name: counters.get(tier_counter(tier, name), 0.0) for name in (TIER_PAGES, *TIER_FIGURES)}
        if any(figures.values()):
            whole = {
                name: round(value, 3) if name.endswith("seconds") else int(value) for name, value in figures.items()
            }
            rows.append({"tier": tier, **whole})
    return rows


_MOST_SILENCES = 8

STATES = tuple(WorkerState)
"""States in the order of ``Fleet.state_bytes``'s numbers."""

OTHER_IDENTITY = 128
_READY = STATES.index(WorkerState.READY)
_COMPUTES = (WorkerState.READY, WorkerState.DRAINING, WorkerState.QUARANTINED, WorkerState.FOREIGN)


class Fleet:
    """All workers that are there or were lately.  Read the columns, never write them; policies compare ``load``.

    A *slot* is the index of a worker in every column.
    """

    def __init__(self) -> None:
        self.ids: list[WorkerId] = []
        self.incarnations: list[int] = []
        self.roles: list[Role] = []
        self.states: list[WorkerState] = []
        self.reasons: list[str] = []  # why a slot is in its state, where that is known
        self.endpoints: list[str] = []
        self.labels: list[Mapping[str, str]] = []  # as its members file has them
        self.pids: list[int] = []
        self.last_seen: list[float] = []  # when the worker last said anything
        self.progress_at: list[float] = []  # the last step or page of the worker, or its start
        self.reports: list[WorkerReport | None] = []  # the last of this incarnation, without its counters and events
        self.counters: list[dict[str, float]] = []  # of this incarnation
        self.load: list[int] = []  # tokens still to compute: own book, and others' as far as reported
        self._ended: list[bool] = []  # the supervisor's last word on this incarnation: whatever it still says is void
        self._contexts: list[tuple[ModelIdentity, int] | None] = []  # the last that any incarnation has reported
        self._gaps: list[float] = []  # the longest silence of this incarnation that was not its end
        self._begun: list[float] = []  # when it was given work of ours and had none
        self._steps: list[int] = []  # of this incarnation
        self._all_steps = 0
        self._own: list[int] = []
        self._others: list[int] = []
        self._work: list[dict[RequestId, int]] = []
        self.loads = LoadTable()
        self._book = InFlightWork(self.loads)
        self._slots: dict[WorkerId, int] = {}
        self._vacant: list[int] = []  # of workers that were forgotten
        self._arrays: dict[tuple[Role, ModelIdentity | None], Slots] = {}  # until somebody changes
        self._all_ready: Slots | None = None  # the same
        self._shortest: dict[tuple[Role, ModelIdentity | None], float] = {}  # the same
        self._standing: dict[ModelIdentity | None, bytes] = {}  # the same
        self._names: tuple[WorkerId, ...] = ()
        self._ready: dict[tuple[Role, ModelIdentity | None], tuple[int, ...]] = {}  # until somebody changes
        self._identities: tuple[ModelIdentity, ...] | None = None  # the same

    def __len__(self) -> int:
        return len(self.ids)

    def slot(self, worker: WorkerId) -> int | None:
        """The slot of a worker, or None when it was never seen."""
        return self._slots.get(worker)

    # --- what the supervisor says -----------------------------------------------------------------------------------

    def on_worker_up(self, message: WorkerUp, now: float) -> bool:
        """A process was started, was found at another endpoint, or had been given up and has spoken again.

        False: nothing new, but perhaps other labels.

        Callers take the work of an earlier incarnation away first (``work``), since it is forgotten here.
        """
        slot = self._slots.get(message.worker)
        if slot is None:
            slot = self._add(message.worker)
        else:
            known = self.incarnations[slot]
            if is_older_incarnation(message.incarnation, known):
                return False
            moved = known == message.incarnation and self.endpoints[slot] != message.endpoint
            if (
                not is_older_incarnation(known, message.incarnation) and not self._ended[slot] and not moved
            ):  # the same, or of another run
                self.labels[slot] = message.labels if known == message.incarnation else self.labels[slot]
                return False
        self._clear(slot)
        self.incarnations[slot] = message.incarnation
        self.roles[slot] = message.role
        self.states[slot] = WorkerState.STARTING
        self.reasons[slot] = ""
        self.endpoints[slot] = message.endpoint
        self.labels[slot] = message.labels
        self.pids[slot] = message.pid
        self.last_seen[slot] = now
        self.loads.mark_seen(slot, now)
        self._ended[slot] = False
        self._gaps[slot] = 0.0
        self.progress_at[slot] = now
        return True

    def on_worker_down(self, message: WorkerDown) -> bool:
        """A process has ended or is being ended.  False: that is not the one which is known as current."""
        if not self.is_current(message.worker, message.incarnation):
            return False
        slot = self._slots[message.worker]
        self._clear(slot)
        self._ended[slot] = True
        self.states[slot] = message.state
        self.reasons[slot] = message.reason
        return True

    def gone_workers(self, now: float, after_s: float) -> list[WorkerId]:
        """Workers that have been gone for so long."""
        gone = (slot for slot in self._slots.values() if self._ended[slot] and now - self.last_seen[slot] >= after_s)
        return [self.ids[slot] for slot in gone]

    def remove_worker(self, worker: WorkerId) -> int | None:
        """A worker that is gone will not be back under this name: its slot is for another.  Returns the slot."""
        slot = self._slots.get(worker)
        if slot is None or not self._ended[slot]:
            return None
        self._clear(slot)
        del self._slots[worker]
        self._vacant.append(slot)
        self._names = ()
        self.ids[slot], self.incarnations[slot], self.endpoints[slot] = WorkerId(""), 0, ""
        self.labels[slot] = {}
        self.states[slot], self.reasons[slot], self._contexts[slot] = WorkerState.DEAD, "", None
        self.loads.rename_slot(slot, 0)
        return slot

    # --- what the worker says ---------------------------------------------------------------------------------------

    def on_report(self, report: WorkerReport, now: float) -> bool:
        """Take a worker's own word.  False: it is fenced off, or known to be dead."""
        if not self.mark_seen(report.worker, report.incarnation, now):
            return False
        slot = self._slots[report.worker]
        self._book.on_report(slot, report.acked)
        self._others[slot] = max(0, report.tokens_in_flight - self._own[slot])
        self.load[slot] = self._own[slot] + self._others[slot]
        if report == self.reports[slot] and report.state is self.states[slot]:
            self.loads.on_repeated_report(slot)  # of an idle worker, as most reports of a large fleet are
        else:
            self._apply_report(slot, report, now)
        return True

    def _apply_report(self, slot: int, report: WorkerReport, now: float) -> None:
        before, counters = self.reports[slot], self.counters[slot]
        known = (self.states[slot], self.roles[slot], before and before.identity, before and before.max_model_len)
        if known != (report.state, report.role, report.identity, report.max_model_len):
            self._changed()
        done = before and _work_done(before, counters)
        counters.update(report.counters)
        if done != _work_done(report, counters):
            self.progress_at[slot] = now
        self._count_steps(slot, report.steps + int(counters.get("image_slices", 0)))
        self.reports[slot] = msgspec.structs.replace(report, counters={}, cached=())
        self._contexts[slot] = (report.identity, report.max_model_len)
        self.roles[slot] = report.role
        self.states[slot] = report.state
        self.reasons[slot] = ""
        self.pids[slot] = report.pid
        self.loads.on_report(slot, report, counters)

    def mark_seen(self, worker: WorkerId, incarnation: int, now: float) -> bool:
        """Note a sign of life.  False: what was said must be ignored."""
        if not self.is_current(worker, incarnation):
            return False
        slot = self._slots[worker]
        if self._ended[slot]:
            return False
        if self.states[slot] is WorkerState.WEDGED:
            self._gaps[slot] = max(self._gaps[slot], now - self.last_seen[slot])
        self.last_seen[slot] = now
        self.loads.mark_seen(slot, now)
        return True

    def is_current(self, worker: WorkerId, incarnation: int) -> bool:
        """Whether this is the current incarnation of the worker."""
        slot = self._slots.get(worker)
        return slot is not None and self.incarnations[slot] == incarnation

    # --- what the gateway finds -------------------------------------------------------------------------------------

    def mark_unresponsive(self, slot: int, reason: str) -> None:
        """Nothing more goes there until it reports again.  Its work is forgotten: the caller has moved it."""
        self._clear_work(slot)
        self._changed()
        self.states[slot] = WorkerState.WEDGED
        self.reasons[slot] = reason

    def drain(self, slot: int, reason: str) -> None:
        """Nothing more goes there until its reports say ``READY``; what it has stays."""
        self._changed()
        self.states[slot] = WorkerState.DRAINING
        self.reasons[slot] = reason

    def quarantine(self, slot: int, reason: str) -> None:
        """Nothing more goes there until its reports say ``READY`` again; what it has stays."""
        self._changed()
        self.states[slot] = WorkerState.QUARANTINED
        self.reasons[slot] = reason

    def set_reason(self, slot: int, reason: str) -> None:
        """Why a worker is in its state, until it reports again."""
        self.reasons[slot] = reason

    def reported_identities(self) -> list[ModelIdentity]:
        """Identities of all workers that have reported and are not known to be dead."""
        return [report.identity for report in self.reports if report is not None]

    def silent_slots(self, now: float, silence_s: float, overrun: float) -> Iterator[int]:
        """Slots with requests of this gateway that were silent for ``silence_s`` plus ``overrun`` predicted steps.

        A worker announces the length of a long step before it.  Silence counts from when it was given requests.  A
        worker that was suspected before and came back is only slow: it gets twice the silence that it came back from,
        up to ``_MOST_SILENCES`` times the usual.
        """
        for slot, work in enumerate(self._work):
            if not work or not self.is_up(slot):
                continue
            quiet = now - max(self.last_seen[slot], self._begun[slot])
            if quiet <= silence_s:
                continue
            usual = silence_s + overrun * self.step_s(slot)
            if quiet > max(usual, min(2 * self._gaps[slot], _MOST_SILENCES * usual)):
                yield slot

    def shift_clocks(self, seconds: float) -> None:
        """Shift all clocks by a time in which this process did not run."""
        self.last_seen = [heard + seconds for heard in self.last_seen]
        self.progress_at = [moved + seconds for moved in self.progress_at]
        self.loads.shift_clocks(seconds)

    # --- the gateway's own book -------------------------------------------------------------------------------------

    def add_work(
        self,
        worker: WorkerId,
        incarnation: int,
        request: RequestId,
        tokens: int,
        *,
        due: ExpectedWork | None = None,
        serial: int = 0,
        now: float = float("-inf"),
    ) -> None:
        """``worker`` was sent ``request`` with ``tokens`` to compute, or has ``tokens`` left of it.

        ``due`` counts on top of its reports until one of them has heard of ``serial``.
        """
        slot = self._slots.get(worker)
        if slot is None or self.incarnations[slot] != incarnation:
            return
        work = self._work[slot]
        if not work:
            self._begun[slot] = now
        self._add_own(slot, tokens - work.get(request, 0))
        work[request] = tokens
        if due is not None:
            self._book.on_sent(slot, request, due, serial)

    def set_work_left(self, worker: WorkerId, request: RequestId, left: int) -> None:
        """Set the tokens left of a request; unknown requests are ignored."""
        slot = self._slots[worker]
        before = self._work[slot].get(request)
        if before is not None:
            self._work[slot][request] = left
            self._add_own(slot, left - before)
            self._book.on_prefilled(slot, request)

    def reduce_work(self, worker: WorkerId, tokens: Mapping[RequestId, int]) -> None:
        """Subtract decoded tokens of requests whose prompts are computed."""
        slot = self._slots[worker]
        work, done = self._work[slot], 0
        for request, count in tokens.items():
            left = work.get(request)
            if left is not None:
                fewer = left - count if left > count else 0
                work[request] = fewer
                done += left - fewer
        self._add_own(slot, -done)

    def remove_work(self, worker: WorkerId, incarnation: int, request: RequestId) -> None:
        """Nothing of ``request`` is left at ``worker``."""
        slot = self._slots.get(worker)
        if slot is None or self.incarnations[slot] != incarnation:
            return
        self._add_own(slot, -self._work[slot].pop(request, 0))
        self._book.on_ended(slot, request)

    def requests_at(self, slot: int) -> Sequence[RequestId]:
        """What the gateway has at this worker now."""
        return tuple(self._work[slot])

    def is_idle(self, slot: int) -> bool:
        """Whether the worker is ready and has no request of this gateway."""
        return self.states[slot] is WorkerState.READY and not self._work[slot]

    def has_work(self) -> bool:
        """Whether any worker has a request of this gateway."""
        return any(self._work)

    # --- views ------------------------------------------------------------------------------------------------------

    def is_up(self, slot: int) -> bool:
        """Whether the worker is in a state in which it computes."""
        return self.states[slot] in _COMPUTES

    def has_ended(self, slot: int) -> bool:
        """Whether the supervisor has reported the end of this incarnation."""
        return self._ended[slot]

    def ready(self, role: Role, identity: ModelIdentity | None) -> Sequence[int]:
        """Slots that may be given work: of this role and, unless None, of this very identity."""
        key = (role, identity)
        slots = self._ready.get(key)
        if slots is None:
            slots = self._ready[key] = tuple(
                slot
                for slot, state in enumerate(self.states)
                if state is WorkerState.READY
                and self.roles[slot] is role
                and (report := self.reports[slot]) is not None
                and (identity is None or report.identity == identity)
            )
        return slots

    def can_transfer_kv(self, slot: int) -> bool:
        """Whether KV pages can be transferred from and to it."""
        report = self.reports[slot]
        return report is not None and report.hands_over

    def ready_slots(self, role: Role, identity: ModelIdentity | None) -> Slots:
        """``ready`` as an array."""
        key = (role, identity)
        slots = self._arrays.get(key)
        if slots is None:
            slots = self._arrays[key] = np.array(self.ready(role, identity), dtype=np.intp)
        return slots

    def all_ready_slots(self) -> Slots:
        """Ready workers of all roles and identities.  The same array until a state, a role or an address changes."""
        if self._all_ready is None:
            ready = [slot for slot, state in enumerate(self.states) if state is WorkerState.READY]
            self._all_ready = np.array(ready, dtype=np.intp)
        return self._all_ready

    def shortest_context(self, role: Role, identity: ModelIdentity | None) -> float:
        """The shortest context of the ready workers, in tokens; infinite if none is ready."""
        key = (role, identity)
        shortest = self._shortest.get(key)
        if shortest is None:
            contexts = self.loads.contexts(self.ready_slots(role, identity))
            shortest = self._shortest[key] = float(contexts.min(initial=math.inf))
        return shortest

    def worker_names(self) -> tuple[WorkerId, ...]:
        """``ids`` as they are now, whatever becomes of them; "" for a slot that is vacant."""
        if not self._names:
            self._names = tuple(self.ids)
        return self._names

    def state_bytes(self, identity: ModelIdentity | None) -> bytes:
        """A byte a slot: the number of its state in ``STATES``, and ``OTHER_IDENTITY`` more for one of another."""
        standing = self._standing.get(identity)
        if standing is None:
            numbers = bytearray(STATES.index(state) for state in self.states)
            for slot, report in enumerate(self.reports):
                if numbers[slot] == _READY and identity is not None and report and report.identity != identity:
                    numbers[slot] |= OTHER_IDENTITY
            standing = self._standing[identity] = bytes(numbers)
        return standing

    def identities(self) -> Sequence[ModelIdentity]:
        """Identities of ready workers, that of most workers first, ties in order of slots."""
        if self._identities is None:
            counts: dict[ModelIdentity, int] = {}
            for slot, state in enumerate(self.states):
                report = self.reports[slot]
                if state is WorkerState.READY and report is not None:
                    counts[report.identity] = counts.get(report.identity, 0) + 1
            self._identities = tuple(sorted(counts, key=lambda identity: -counts[identity]))
        return self._identities

    def steps(self) -> int:
        """Steps reported by the incarnations that are there now, turns that worked at images among them."""
        return self._all_steps

    def step_s(self, slot: int) -> float:
        """The predicted seconds of this worker's latest step."""
        report = self.reports[slot]
        return 0.0 if report is None else report.step_s

    def max_model_len(self) -> int | None:
        """The longest context that a worker has reported, or None before any did."""
        return max((report.max_model_len for report in self.reports if report is not None), default=None)

    def context(self, slot: int) -> int:
        """The worker's context in tokens of prompt and output; 0 before its first report."""
        report = self.reports[slot]
        return 0 if report is None else report.max_model_len

    def longest_context(self, identity: ModelIdentity | None, roles: Collection[Role]) -> float:
        """The longest context of workers of these roles (and this identity), absent ones included: they may return.

        Infinite while one of them has not reported yet.
        """
        longest = 0.0
        for slot, known in enumerate(self._contexts):
            if self.roles[slot] not in roles or self.states[slot] is WorkerState.FOREIGN:
                continue
            if known is None:
                if self.states[slot] is not WorkerState.DEAD:
                    return math.inf
            elif identity is None or known[0] == identity:
                longest = max(longest, known[1])
        return longest or math.inf

    def status_rows(self) -> list[dict[str, Any]]:
        """One mapping a worker, in order of ids, as ``penstock status --json`` prints it."""
        return [self._row(slot) for _, slot in sorted(self._slots.items())]

    def _row(self, slot: int) -> dict[str, Any]:
        report, counters = self.reports[slot], self.counters[slot]
        row: dict[str, Any] = {
            "id": self.ids[slot],
            "role": self.roles[slot].value,
            "pid": self.pids[slot],
            "state": self.states[slot].value,
            "running": report.running if report else 0,
            "queued": report.queued if report else 0,
            "kv_pages_used": report.kv_pages_used if report else 0,
            "kv_pages_free": report.kv_pages_free if report else 0,
            "kv_pages_leaked": report.kv_pages_leaked if report else 0,
            "kv_pages_loading": report.kv_pages_loading if report else 0,
            "cores": report.cores if report else 0,
            "borrowed_core_seconds": round(counters.get("borrowed_core_seconds", 0.0), 1),
            "incarnation": self.incarnations[slot],
            "steps": report.steps if report else 0,
            "tokens_in_flight": self.load[slot],
            "prompt_tokens_computed": counters.get("prompt_tokens_computed", 0),
            "generation_tokens": counters.get("generation_tokens", 0),
        }
        if report is not None:
            row["identity"] = report.identity.system_fingerprint
            row["kv_tiers"] = tier_rows(counters)
            row["local_prefill"] = report.local_prefill
            row["ranks"] = [msgspec.structs.asdict(rank) for rank in report.ranks]
        if self.labels[slot]:
            row["labels"] = dict(self.labels[slot])
        if self.reasons[slot]:
            row["reason"] = self.reasons[slot]
        return row

    # --- columns ----------------------------------------------------------------------------------------------------

    def _add(self, worker: WorkerId) -> int:
        hashed = int.from_bytes(blake2b(worker.encode(), digest_size=8).digest(), "little")
        if self._vacant:
            slot = self._vacant.pop()
            self.ids[slot] = worker
            self.loads.rename_slot(slot, hashed)
        else:
            slot = self._new_slot(worker, hashed)
        self._slots[worker] = slot
        self._names = ()
        return slot

    def _new_slot(self, worker: WorkerId, hashed: int) -> int:
        self.ids.append(worker)
        self.incarnations.append(0)
        self.roles.append(Role.BOTH)
        self.states.append(WorkerState.STARTING)
        self.reasons.append("")
        self.endpoints.append("")
        self.labels.append({})
        self.pids.append(0)
        self.last_seen.append(0.0)
        self.reports.append(None)
        self.counters.append({})
        self.load.append(0)
        self._ended.append(False)
        self._contexts.append(None)
        self._gaps.append(0.0)
        self._begun.append(float("-inf"))
        self._steps.append(0)
        self.progress_at.append(0.0)
        self._own.append(0)
        self._others.append(0)
        self._work.append({})
        self._book.add_slot()
        self.loads.add_slot(hashed)
        return len(self.ids) - 1

    def _clear(self, slot: int) -> None:
        """What an ended incarnation had is gone with it."""
        self.reports[slot] = None
        self.counters[slot].clear()
        self._count_steps(slot, 0)
        self.loads.clear_slot(slot)
        self._clear_work(slot)
        self._changed()

    def _count_steps(self, slot: int, steps: int) -> None:
        self._all_steps += steps - self._steps[slot]
        self._steps[slot] = steps

    def _changed(self) -> None:
        self._ready.clear()
        self._arrays.clear()
        self._all_ready = None
        self._shortest.clear()
        self._identities = None
        self._standing.clear()

    def _clear_work(self, slot: int) -> None:
        self._work[slot].clear()
        self._book.clear_slot(slot)
        self.load[slot] = self._own[slot] = self._others[slot] = 0

    def _add_own(self, slot: int, tokens: int) -> None:
        self._own[slot] += tokens
        self.load[slot] += tokens


def _work_done(report: WorkerReport, counters: Mapping[str, float]) -> tuple[float, ...]:
    """Numbers that grow with everything that a worker computes or carries."""
    kinds = ("pages_received", "pages_sent", "image_slices", "images_received")
    return report.steps, *(counters.get(kind, 0) for kind in kinds)
