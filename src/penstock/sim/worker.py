"""One simulated worker: the real scheduler, its memory and its log of cache events, driven as ``engine.loop`` drives
them, with a step that takes the time of ``resources.plan_duration``.

Equal steps are granted at once (``SchedulerConfig.stoppable``) and stopped at the end of the one in which something
happens, so a worker costs the simulator one turn an event, not one a token.  Knows no other worker and no router: what
it has to say goes to ``WorkerObserver``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from penstock.config.fleet_file import WorkerGroup
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel
from penstock.engine.core.events import AddRequest, EngineEvent, FirstTokenArrived
from penstock.engine.core.page_pool import PageLease, PageShortfall
from penstock.engine.core.plan import ReturnedRequest, SampledTokens, ScheduledTokens, StepOutcome, StepPlan
from penstock.engine.core.request import Request
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.service.kv_events import KvEventLog
from penstock.sim.fleet import SimulatedFleet
from penstock.sim.resources import (
    BusyTime,
    EventQueue,
    PlanDuration,
    RankedStep,
    SharedMachine,
    SimLink,
    SimTiers,
    plan_duration,
    prior_costs,
)
from penstock.sim.trace import IDENTITY, PLAIN_TOKEN, STOP_TOKEN
from penstock.types import BlockHash, RequestId, RequestStage, Role, WorkerId, WorkerState, read_token_ids
from penstock.wire.gateway_messages import KvEvents, StepRates, Submit, WorkerReport

INCARNATION = 1

TIER_SMOOTHING = 0.1
"""Part of the last reading from a tier in what one is said to take."""

MAX_PINNED = 0.5
"""The largest share of a worker's pages that is pinned for waiting requests."""

_NOTHING = SampledTokens()


class WorkerPlace(NamedTuple):
    """A worker's place in the fleet."""

    name: WorkerId
    role: Role
    ranks: WorkerGroup = WorkerGroup(count=1)  # how its ranks divide the model


class WorkerObserver(Protocol):
    """Receives what a worker reports."""

    def on_outcome(self, worker: SimWorker, outcome: StepOutcome, spacing_s: float) -> None:
        """A plan was committed; its steps ended ``spacing_s`` apart, the last one now."""
        ...

    def on_reserved(self, worker: SimWorker, request: Request) -> None:
        """leg=decode: there is room; pages from ``request.computed`` on are wanted."""
        ...

    def on_returned(self, worker: SimWorker, returned: ReturnedRequest) -> None:
        """A request is given back."""
        ...


class SimContext(NamedTuple):
    """What all workers have in common."""

    agenda: EventQueue
    port: WorkerObserver
    crowd: SharedMachine
    answers: Mapping[RequestId, int]  # tokens that each request's answer will have


@dataclass(slots=True)
class _Running:
    """A plan under way."""

    plan: StepPlan
    begun: float
    takes: PlanDuration
    steps: int  # until it ends
    serial: int  # ends that were entered in the agenda for another number of steps are void


class SimWorker:
    """See above."""

    def __init__(self, place: WorkerPlace, fleet: SimulatedFleet, page_tokens: int, stage: SimContext) -> None:
        self.name, self.role = place.name, place.role
        self.config = scheduler_config(fleet, page_tokens)
        self._ranked = RankedStep(fleet.ranks, place.ranks)
        cost = StepCostModel(prior_costs(fleet.steps, self._ranked))
        self.scheduler = Scheduler(self.config, cost, micro_batches=self._ranked.stages, in_order=True)
        self.page_bytes = fleet.memory.token_bytes * page_tokens
        self.into, self.out = SimLink(fleet.links.worker_bytes_s), SimLink(fleet.links.worker_bytes_s)
        self.busy = BusyTime()
        self.steps = 0
        self.reported_at = float("-inf")
        self.changed = True  # something that a report would tell
        self._times = fleet.steps
        self._agenda, self._port, self._crowd, self._answers = stage
        self._tiers = SimTiers(fleet.memory.host_bytes // self.page_bytes, fleet.memory.disk_bytes // self.page_bytes)
        speeds = (fleet.links.host_bytes_s, fleet.links.disk_bytes_s)
        self.wires = tuple(map(SimLink, speeds))  # from the tiers
        self._tier_s = [self.page_bytes / speed for speed in speeds]  # that a page takes from there, of late
        self._prefix = self.scheduler.memory.prefix
        self._log = KvEventLog(self.name, INCARNATION, self._prefix.known_blocks, self._only_lower, len(speeds))
        self._prefix.on_change = self._cache_changed
        self._inbox: list[tuple[EngineEvent, int | None]] = []  # with the serial number of a Submit
        self._unheard: set[int] = set()  # Submits that the scheduler has not heard of
        self._last_serial = 0
        self._left: dict[RequestId, int] = {}  # tokens that answers written here still have
        self._fetching: dict[RequestId, list[EngineEvent]] = {}  # and what must be heard after its arrival
        self._kept: dict[RequestId, list[PageLease]] = {}  # pages, for requests that have none yet
        self._running: _Running | None = None
        self._serial = 0

    # --- what comes in ----------------------------------------------------------------------------------------------

    def submit(self, submit: Submit) -> None:
        """A leg is placed here.  What a lower tier has of its prompt is read first."""
        self._last_serial = submit.serial
        self._unheard.add(submit.serial)
        arrive = AddRequest(
            id=submit.request,
            epoch=submit.epoch,
            stage=submit.stage,
            prompt=read_token_ids(submit.prompt),
            sampling=submit.sampling,
            arrival=self._agenda.now - submit.age_s,
            root=submit.root,
            hashes=submit.block_hashes,
            emitted=submit.emitted,
            qos=submit.qos,
            open_ended=submit.open_ended,
            expected_tokens=submit.expected_tokens,
        )
        ready_at = self._agenda.now if submit.stage is RequestStage.DECODE else self._fetch(arrive)
        if ready_at > self._agenda.now:
            self._fetching[arrive.id] = []
            self._agenda.call_at(ready_at, self._fetched, arrive, submit.serial)
        else:
            self.add_event(arrive, submit.serial)

    def add_event(self, event: EngineEvent, serial: int | None = None) -> None:
        """Something that the scheduler must know; it hears of it between two steps, and of a request first."""
        if event.id in self._fetching:
            self._fetching[event.id].append(event)
            return
        self._inbox.append((event, serial))
        self._look()

    def _look(self) -> None:
        """Something came: it is seen now, or after the step that is under way."""
        if self._running is None:
            self._turn()
        else:
            self._stop(self._running)

    # --- steps ------------------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        """As ``engine.loop.EngineLoop.step``, until there is a plan that takes time, or nothing to do."""
        now, scheduler = self._agenda.now, self.scheduler
        self._apply_inbox(now)
        plan = scheduler.plan(now, self._steps_ahead())
        self.changed = True
        self._planned(plan)
        if not plan.rows:
            self._port.on_outcome(self, scheduler.commit(plan, (), now), 0.0)
            if self._inbox or self._let_all_go():
                self._turn()
            elif self._running is None:
                self._crowd.set_computing(self.name, None)
            return
        takes = plan_duration(self._times, plan, self._crowd.slowdown(self.name))
        if self._ranked.divides:
            takes = self._ranked.duration(takes, plan_tokens(plan))
        running = self._running = _Running(plan, now, takes, plan.steps, self._serial)
        self._ends(running, plan.steps)
        self._crowd.set_computing(self.name, self._stop_soon)

    def _apply_inbox(self, now: float) -> None:
        """Tell the scheduler what came."""
        inbox, self._inbox = self._inbox, []
        for event, serial in inbox:
            self.scheduler.apply(event, now)
            if serial is not None:
                self._unheard.discard(serial)
            if isinstance(event, FirstTokenArrived) and (request := self.scheduler.get_request(event.id)) is not None:
                self._left[event.id] = self._answers[event.id] - len(request.output)

    def _steps_ahead(self) -> int:
        """Until the first answer is complete."""
        return min(self._left.values(), default=1)

    def _planned(self, plan: StepPlan) -> None:
        for gone in plan.removed:
            self._left.pop(gone, None)
        for returned in plan.returned:
            self._port.on_returned(self, returned)
        for request in plan.reserved:
            self._port.on_reserved(self, request)
        if self._kept:
            self._release_kept()

    def _ends(self, running: _Running, steps: int) -> None:
        self._serial += 1
        running.steps, running.serial = steps, self._serial
        self._agenda.call_at(running.begun + running.takes.total(steps), self._end, running.serial)

    def _stop_soon(self) -> None:
        if self._running is not None:
            self._stop(self._running)

    def _stop(self, running: _Running) -> None:
        """At the end of the step that is under way."""
        if running.steps > 1:
            steps = running.takes.steps_within(self._agenda.now - running.begun, running.steps)
            if steps < running.steps:
                self._ends(running, steps)

    def _end(self, serial: int) -> None:
        running = self._running
        if running is None or running.serial != serial:
            return
        self._running = None
        plan, steps = running.plan, running.steps
        seconds = running.takes.total(steps)
        drawn = [self._draw(row, steps) for row in plan.rows]
        # ``commit`` divides by the steps that were planned
        outcome = self.scheduler.commit(plan, drawn, self._agenda.now, seconds * plan.steps / steps)
        self.busy.add(running.begun, self._agenda.now)
        self.steps += steps
        self._count_left(outcome)
        self._port.on_outcome(self, outcome, seconds / steps)
        if self._running is None:
            self._turn()

    def _draw(self, row: ScheduledTokens, steps: int) -> SampledTokens:
        if not row.samples:
            return _NOTHING
        request = row.request
        left = self._answers[request.id] - len(request.output)
        assert steps <= left, "no plan goes beyond the first end"
        if steps < left:
            return SampledTokens((PLAIN_TOKEN,) * steps)
        return SampledTokens((*((PLAIN_TOKEN,) * (left - 1)), STOP_TOKEN))

    def _count_left(self, outcome: StepOutcome) -> None:
        for progress in outcome.new_tokens:
            request = progress.request
            if progress.finish is not None:
                self._left.pop(request.id, None)
            elif request.stage is not RequestStage.PREFILL:
                self._left[request.id] = self._answers[request.id] - len(request.output)

    # --- the cache --------------------------------------------------------------------------------------------------

    def _cache_changed(self, block: BlockHash, known: bool) -> None:
        """Log the nearest tier that has a block, until none has it."""
        if known:
            self._log.set_cached(block, True)
            return
        for moved, tier in self._tiers.insert(block):
            if moved in self._prefix:
                continue
            if tier:
                self._log.set_tier(moved, tier)
            else:
                self._log.set_cached(moved, False)

    def _only_lower(self) -> Iterator[tuple[BlockHash, int]]:
        return ((block, tier) for block, tier in self._tiers.nearest() if block not in self._prefix)

    def _fetch(self, arrive: AddRequest) -> float:
        """Keep what is here of this prompt; when what lower tiers have of it will be here, too."""
        hashes, limit = arrive.hashes, self._shareable(arrive)
        match = self._prefix.match(hashes, limit)
        with match.lease as known:
            if len(known) <= self._may_keep():
                self._kept[arrive.id] = [PageLease(self.scheduler.memory.pool, known.detach())]
        ready_at = self._agenda.now
        for tier, blocks in enumerate(self._tiers.count_blocks(hashes, match.blocks, limit)):
            if blocks:
                self._tiers.read[tier] += blocks
                through = self.wires[tier].transfer(blocks * self.page_bytes, self._agenda.now)
                self._tier_s[tier] += TIER_SMOOTHING * ((through - self._agenda.now) / blocks - self._tier_s[tier])
                ready_at = max(ready_at, through)
        return ready_at

    def _fetched(self, arrive: AddRequest, serial: int) -> None:
        """Put what was read into pages, as far as there is room."""
        hashes, limit = arrive.hashes, self._shareable(arrive)
        here = self._prefix.longest_prefix(hashes, limit)
        blocks = min(sum(self._tiers.count_blocks(hashes, here, limit)), self._may_keep())
        fresh = self.scheduler.memory.pool.allocate(blocks)
        if blocks and not isinstance(fresh, PageShortfall):
            names = hashes[here : here + blocks]
            for name, page in zip(names, fresh.pages, strict=True):
                self._prefix.insert(name, page)
            self._kept.setdefault(arrive.id, []).append(fresh)
        later = self._fetching.pop(arrive.id, [])
        self.add_event(arrive, serial)
        for event in later:
            self.add_event(event)

    def _shareable(self, arrive: AddRequest) -> int:
        known = len(arrive.prompt) + len(arrive.emitted)
        return min(len(arrive.hashes), (known - 1) // self.config.page_tokens)

    def _may_keep(self) -> int:
        """Pages that may still be kept for requests that wait."""
        kept = sum(len(lease) for leases in self._kept.values() for lease in leases)
        pool = self.scheduler.memory.pool
        return max(0, min(pool.available, int(pool.pages * MAX_PINNED) - kept))

    def _release_kept(self) -> None:
        """Release what was kept for requests that now hold their pages or are gone; some are not in the queue."""
        coming = {event.id for event, _ in self._inbox} | self._fetching.keys()
        for request_id in [each for each in self._kept if each not in coming]:
            request = self.scheduler.get_request(request_id)
            if request is None or request.page_tables:
                self._let_go(request_id)

    def _let_go(self, request_id: RequestId) -> None:
        for lease in self._kept.pop(request_id):
            self.scheduler.memory.pool.release(lease.detach())

    def _let_all_go(self) -> bool:
        """Nothing can be computed: what is kept for some may be the room that others wait for."""
        kept = bool(self._kept)
        for request_id in list(self._kept):
            self._let_go(request_id)
        return kept

    # --- what is reported -------------------------------------------------------------------------------------------

    def cache_events(self) -> Sequence[KvEvents]:
        """What has changed in the cache since the last call."""
        return self._log.drain()

    def whole_cache(self) -> Sequence[KvEvents]:
        """Everything that it holds."""
        return tuple(self._log.snapshot())

    def tier_reads(self) -> tuple[int, int]:
        """Blocks that were read from host memory, and from disk."""
        return self._tiers.read[0], self._tiers.read[1]

    def report(self, now: float) -> WorkerReport:
        """The worker as it is now."""
        self.reported_at, self.changed = now, False
        scheduler = self.scheduler
        load = scheduler.load()
        return WorkerReport(
            worker=self.name,
            incarnation=INCARNATION,
            role=self.role,
            state=WorkerState.READY,
            pid=1,
            identity=IDENTITY,
            max_model_len=self.config.max_model_len,
            steps=self.steps,
            running=load.running + load.awaiting + load.handing_over,
            queued=load.queued,
            tokens_in_flight=load.tokens_in_flight,
            kv_pages_used=load.pages_used,
            kv_pages_free=load.pages_free,
            prompt_tokens=load.prompt_tokens,
            prompt_pairs=load.prompt_pairs,
            decodes=load.decode_requests,
            context_tokens=load.context_tokens,
            page_bytes=self.page_bytes,
            tier_s=tuple(self._tier_s),
            rates=StepRates(*scheduler.cost.rates),
            measured=scheduler.cost.measured_steps,
            kv_sequence=self._log.sequence,
            acked=min(self._unheard) - 1 if self._unheard else self._last_serial,
        )


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A plan in the stages of a pipeline."""

    plan: StepPlan
    launched: float
    ends: float


class PipelinedSimWorker(SimWorker):
    """A worker whose model has stages, driven as ``engine.loop.PipelinedLoop`` drives one.

    As many plans are in flight as there are stages; each passes them in turn, and a stage computes one at a time.
    """

    def __init__(self, place: WorkerPlace, fleet: SimulatedFleet, page_tokens: int, stage: SimContext) -> None:
        super().__init__(place, fleet, page_tokens, stage)
        self._in_flight: deque[_InFlight] = deque()
        self._free_at = [0.0] * self._ranked.stages  # of each stage
        self._ended = 0.0  # the step before
        self._turning = False

    def _look(self) -> None:
        if not self._in_flight and not self._turning:
            self._turn()

    def _turn(self) -> None:
        """Plan every micro-batch that is free."""
        self._turning = True
        again = True
        while again:
            now = self._agenda.now
            self._apply_inbox(now)
            for micro_batch in self.scheduler.micro_batches.free:
                plan = self.scheduler.plan(now, 1, micro_batch)
                self.changed = True
                self._planned(plan)
                if plan.rows:
                    self._launch(plan, now)
                else:
                    self._port.on_outcome(self, self.scheduler.commit(plan, (), now), 0.0)
            again = not self._in_flight and (bool(self._inbox) or self._let_all_go())
        self._turning = False
        self._crowd.set_computing(self.name, self._stop_soon if self._in_flight else None)

    def _launch(self, plan: StepPlan, now: float) -> None:
        alone = plan_duration(self._times, plan, self._crowd.slowdown(self.name)).first_s
        tokens, at = plan_tokens(plan), now
        busy = min(len(self._in_flight) + 1, self._ranked.stages)
        for stage, free_at in enumerate(self._free_at):
            at = max(at, free_at) + self._ranked.stage_s(stage, alone, tokens, busy=busy)
            self._free_at[stage] = at
        self._in_flight.append(_InFlight(plan, now, at))
        self._agenda.call_at(at, self._end_oldest)

    def _end_oldest(self) -> None:
        flight = self._in_flight.popleft()
        begun, self._ended = max(flight.launched, self._ended), self._agenda.now
        drawn = [self._draw(row, 1) for row in flight.plan.rows]
        outcome = self.scheduler.commit(flight.plan, drawn, self._ended, self._ended - begun)
        self.busy.add(begun, self._ended)
        self.steps += 1
        self._count_left(outcome)
        self._turning = True  # what comes of it is seen below
        self._port.on_outcome(self, outcome, self._ended - flight.launched)
        self._turn()


def make_worker(place: WorkerPlace, fleet: SimulatedFleet, page_tokens: int, context: SimContext) -> SimWorker:
    """A worker of a fleet."""
    staged = place.ranks.mesh.pipeline > 1
    return (PipelinedSimWorker if staged else SimWorker)(place, fleet, page_tokens, context)


def plan_tokens(plan: StepPlan) -> int:
    """Tokens that a step computes."""
    return sum(row.count for row in plan.rows)


def scheduler_config(fleet: SimulatedFleet, page_tokens: int) -> SchedulerConfig:
    """The configuration of the workers' schedulers."""
    limits = fleet.scheduler
    pages = fleet.memory.device_bytes // (fleet.memory.token_bytes * page_tokens)
    return SchedulerConfig(
        pages=pages,
        page_tokens=page_tokens,
        max_model_len=min(limits.max_model_len, pages * page_tokens),
        max_running=limits.max_running,
        max_step_tokens=limits.max_step_tokens,
        max_chunk_tokens=limits.max_chunk_tokens,
        step_budget_ms=limits.step_budget_ms,
        prefill_step_budget_ms=limits.prefill_step_budget_ms,
        long_prompt_ms=limits.long_prompt_ms,
        stoppable=True,
    )
