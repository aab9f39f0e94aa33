"""Plans one step: decode rows first, then prompts, running ones and newly admitted ones.

There are no phases, only counts: ``known - computed`` of a request is what a step may grant it, whether those are
prompt tokens, tokens to recompute after a preemption, or the one token that was sampled last.

The first class of service with anything to do is planned as if it were alone; lower classes fill what it leaves of the
step's time, and give up their pages and places to it with the next step that is planned.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Set

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import WARMUP_STEPS, StepCostModel, StepWork
from penstock.engine.core.kv_cache_manager import AdmissionRefusal
from penstock.engine.core.micro_batches import MicroBatches
from penstock.engine.core.pacing import LongPromptLimits, StarvationGuard, StepSoFar, long_prompt_share_s
from penstock.engine.core.plan import DraftProposer, ScheduledTokens
from penstock.engine.core.request import FairnessKey, OrderKey, Request, RequestStatus
from penstock.engine.core.request_table import RequestTable
from penstock.types import RequestId, RequestStage, ServiceClass

MIN_CHUNK_STEPS = 2.0
"""A chunk that is kept brief for other tenants takes at least this many times an empty step."""

LAST_CHUNK_STRETCH = 2.0
"""The last chunk of a prompt may take this many times as long as a brief one."""


class StepBuilder:
    """Filled by the scheduler in the order of service: first rows that draw with every step, then chunks."""

    __slots__ = (
        *("_beside", "_brief_s", "_budget_s", "_config", "_cost", "_line", "_now", "admitted", "chunks", "filling"),
        *(
            "excluded",
            "skipped",
            "preempted",
            "pageless",
            "preemption_targets",
            "rows",
            "without_masks",
            "steps",
            "work",
            "yielded",
        ),
    )

    def __init__(self, config: SchedulerConfig, cost: StepCostModel, now: float = 0.0) -> None:
        self._config = config
        self._cost = cost
        self._budget_s = 0.0
        self._brief_s = math.inf  # with a piece of a prompt, for the sake of others who may come
        self._line: FairnessKey | None = None  # whose prompt is first in the step
        self._now = now
        self._beside: StepSoFar | None = None  # not looked at yet
        self.without_masks: Set[RequestId] = frozenset()  # whose next token's mask is not there
        self.excluded: Set[Request] = frozenset()  # another micro-batch waits for their pages
        self.preemption_targets: set[Request] = set()  # must give way, and one of them is in flight elsewhere
        self.pageless: set[Request] = set()  # need a page, and none can be taken for them
        self.rows: list[ScheduledTokens] = []
        self.work = StepWork()
        self.steps = 1
        self.chunks = 0
        self.preempted = 0
        self.yielded = 0  # of a lower class, for a request that was admitted
        self.skipped = 0  # rows of a lower class that had no place in this step
        self.filling = False  # what is granted from now on fills what is left: nothing of it must be granted
        self.admitted: list[Request] = []

    def close_decodes(self, *, batch: bool = False, contended: bool = False) -> None:
        """All decode rows are in; the rest of the budget is for chunks.

        ``batch``: only batch requests are in; ``contended``: another tenant's request may come any moment and should
        not wait for long.
        """
        work, count = self.work, len(self.rows)
        for row in self.rows:
            if row.draft:
                work.add(row.start, 1 + len(row.draft), 1 + len(row.draft))
            else:
                work.add(row.start, 1, 1)
        config = self._config
        with_rows_ms = config.batch_step_budget_ms if batch else config.step_budget_ms
        self._budget_s = (with_rows_ms if count else config.prefill_step_budget_ms) / 1000
        if contended:
            rows_s = self._cost.predict(work)
            brief_s = max(config.contended_step_ms / 1000, MIN_CHUNK_STEPS * self._cost.rates[0])
            self._budget_s = min(self._budget_s, rows_s + LAST_CHUNK_STRETCH * brief_s)
            self._brief_s = min(self._budget_s, rows_s + brief_s)

    @property
    def has_drafts(self) -> bool:
        """Whether a row has draft tokens."""
        return any(row.draft for row in self.rows)

    @property
    def decode_only(self) -> bool:
        """Whether every row decodes one token without drafts, and none was preempted."""
        return bool(self.rows) and not (self.chunks or self.preempted or self.has_drafts)

    def affordable_steps(self, limit: int) -> int:
        """How often the rows can be repeated within the time budget, at least once."""
        if self._config.stoppable:
            return limit
        one = self._cost.predict(self.work)
        return max(1, min(limit, int(self._budget_s / one) if one > 0 else limit))

    def has_room_for_chunk(self, request: Request) -> bool:
        """Whether the budgets leave room for a useful first chunk.  The first of a step always fits."""
        whole = self._config.whole_prompts
        piece = request.known if whole else min(request.known, self._config.page_tokens, self._config.max_chunk_tokens)
        left = self._config.max_step_tokens - self.work.tokens
        if self.chunks == 0 and not self.filling:
            return True
        if self._brief_s == math.inf:
            return min(left, self._affordable(0)) >= piece
        if min(left, self._affordable(0)) >= request.known:
            return True
        return not self._joins(request) and min(left, self._affordable(0, self._brief_s)) >= piece

    def has_room_for_decode(self, request: Request) -> bool:
        """Whether the budgets leave room for one more decode row."""
        tokens = self.work.tokens
        return tokens < self._config.max_step_tokens and self._affordable(request.computed, draws_each=True) >= 1

    def add_decode(self, request: Request) -> None:
        """Grant ``request`` its one uncomputed token."""
        self.rows.append(ScheduledTokens(request, request.computed, 1, True))
        self.work.add(request.computed, 1, 1)

    def _affordable(self, start: int, within_s: float | None = None, *, draws_each: bool = False) -> int:
        budget_s = self._budget_s if within_s is None else min(within_s, self._budget_s)
        return self._cost.affordable_tokens(self.work, budget_s, start, draws_each=draws_each)

    def _joins(self, request: Request) -> bool:
        """Whether a chunk of it would slow another tenant's prompt that is first in this step."""
        return self._brief_s < math.inf and self._line is not None and self._line != request.fairness_key

    def _piece_s(self, request: Request) -> float:
        """Seconds that the step may take with a chunk of this prompt."""
        bounds = LongPromptLimits(self._config.long_prompt_ms / 1000, self._config.gentle_read_s)
        if not bounds.target_s or not self.rows or self._cost.measured_steps < WARMUP_STEPS:
            return math.inf
        if self._beside is None:
            answers = sum(row.count == 1 and row.request.stage is not RequestStage.PREFILL for row in self.rows)
            self._beside = StepSoFar(answers, self._cost.predict(self.work), self._now)
        rest = StepWork()
        rest.add(request.launched, request.known - request.launched, 1)
        return self._cost.predict(self.work) + long_prompt_share_s(
            request, self._cost.predict(rest), self._beside, bounds
        )

    def add_chunk(self, request: Request) -> bool:
        """Grant ``request`` as many of its uncomputed tokens as fit.  False when it must wait for another step."""
        count = self._chunk_tokens(request)
        if count == 0:
            return False
        start = request.launched
        samples = start + count == request.known
        self.rows.append(ScheduledTokens(request, start, count, samples))
        self.work.add(start, count, count if request.wants_prompt_logprobs else int(samples))
        self.chunks += 1
        self._line = self._line or request.fairness_key
        return True

    def _chunk_tokens(self, request: Request) -> int:
        """Tokens of the request's next chunk in this step; 0: it waits for another step.

        - All uncomputed tokens, when they fit the step's tokens and seconds.
        - A whole prompt is never cut: one that does not fit waits, unless it is alone in the step.
        - A partial chunk of another tenant than the step's first prompt is postponed: it would slow that prompt and
          complete nothing.
        - A partial chunk ends with a page when it can.
        - The first chunk of a step gets the rest of a page, as far as tokens allow: no prompt starves behind a budget.
        """
        config, size, start = self._config, self._config.page_tokens, request.launched
        missing = request.known - start
        fitting = self._fitting_tokens(request)
        if fitting >= missing:
            return missing
        if config.whole_prompts:
            return 0 if self.rows else missing
        if self._joins(request):
            return 0
        to_page_end = min(missing, config.max_chunk_tokens, size - start % size)
        if fitting < to_page_end:
            is_first = not (self.chunks or self.filling)
            return min(to_page_end, max(0, config.max_step_tokens - self.work.tokens)) if is_first else 0
        whole_pages = (start + fitting) // size * size - start
        return whole_pages if whole_pages > 0 else fitting

    def _fitting_tokens(self, request: Request) -> int:
        """Uncomputed tokens that fit the step's tokens and seconds; fewer seconds where they are not all."""
        config, start = self._config, request.launched
        missing = request.known - start
        each = request.wants_prompt_logprobs
        most = missing if config.whole_prompts else min(missing, config.max_chunk_tokens)
        most = min(most, config.max_step_tokens - self.work.tokens)
        count = min(most, self._affordable(start, self._piece_s(request), draws_each=each))
        return count if count >= missing else min(count, self._affordable(start, self._brief_s, draws_each=each))


ALL_RANKS = range(len(ServiceClass))


def service_order(request: Request) -> OrderKey:
    """The order of service."""
    return request.order


def needs_more_pages(request: Request) -> bool:
    """Whether it will need more pages than it has."""
    return request.capacity < request.local_end and request.stage is not RequestStage.PREFILL


class StepPlanner:
    """Drafts steps from the table, and moves requests in it by admission and preemption."""

    def __init__(
        self,
        config: SchedulerConfig,
        table: RequestTable,
        micro_batches: MicroBatches,
        speculator: DraftProposer | None = None,
    ) -> None:
        self._config = config
        self._table = table
        self._micro_batches = micro_batches
        self._memory = table.memory
        self._speculator = speculator
        self._yielding = StarvationGuard(table, config.batch_patience_s)
        # Each running request gets at least one token of a step, so a long prompt never starves behind many answers.
        self._max_active = min(config.max_running, config.max_step_tokens)

    def may_rest(self) -> bool:
        """Whether there is nothing to compute but running answers."""
        head = self._table.queue.head()
        return (head is None or head.stage is RequestStage.DECODE) and all(
            r.uncomputed == 1 for r in self._table.running.values()
        )

    def build(self, draft: StepBuilder, max_steps: int, now: float, *, resting: bool = False) -> None:
        """The next step, or up to ``max_steps`` equal ones when there are only decode rows and no request waits.

        A step that preempted a request for the growth of others admits none.  ``resting``: nothing is computed, but
        requests whose pages are received from elsewhere are admitted.
        """
        first = self._yielding.promote_overdue(now)
        if resting or first is None:
            self._admit_remote(draft)
            return
        self._add_rows(draft, first, max_steps, now)
        tried = 0
        while self._micro_batches.several and not draft.rows and len(draft.pageless) > tried:
            tried = len(draft.pageless)
            self._add_rows(draft, first, max_steps, now)
        self._charge(draft, now)

    def _add_rows(self, draft: StepBuilder, first: int, max_steps: int, now: float) -> None:
        """Add rows of the class ``first`` and, with what it leaves, of the classes after it."""
        table = self._table
        mine = [request for request in self._eligible(draft) if request.rank == first]
        chunked = self._add_decodes(draft, mine)
        has_lower = len(mine) < len(table.running)
        alone = bool(draft.rows) and not chunked and not table.queue and not has_lower  # decode rows, and none waits
        if self._speculator is not None and alone and not draft.preempted:
            self._add_drafts(draft, self._speculator)
        draft.close_decodes(batch=first > ServiceClass.INTERACTIVE, contended=table.fair.is_contended(first, now))
        if max_steps > 1 and alone and not table.reserved and not draft.has_drafts:
            self._repeat_rows(draft, max_steps)
        self._add_prompts(draft, chunked, range(first, first + 1))
        if has_lower or table.queue.ranks() - {first}:
            self._add_lower_classes(draft, first)
        if self._config.stoppable and max_steps > 1 and draft.decode_only and draft.steps == 1 and not has_lower:
            self._repeat_rows(draft, max_steps)  # waiting requests are admitted after an event, not after a step

    def _eligible(self, draft: StepBuilder) -> Collection[Request]:
        """Running requests that this step may compute: not those whose next token's mask is not there yet."""
        running: Collection[Request] = self._table.running.values()
        if draft.without_masks:
            running = [request for request in running if request.id not in draft.without_masks]
        return self._micro_batches.eligible(running, draft.excluded, draft.pageless)

    def _charge(self, draft: StepBuilder, now: float) -> None:
        self._yielding.on_served({row.request.rank for row in draft.rows}, now)
        if self._table.queue:
            for row in draft.rows:
                if row.count == 1 and row.samples:
                    self._table.fair.charge_output(row.request.fairness_key, draft.steps, row.request.qos.weight)

    # --- answers -----------------------------------------------------------------------------------------------------

    def _add_decodes(self, draft: StepBuilder, requests: Iterable[Request]) -> list[Request]:
        """Add a row, and a page if needed, for each request with one uncomputed token; returns the others."""
        rows, others, needy = draft.rows, list[Request](), list[Request]()
        for request in requests:
            computed = request.computed
            if request.known - computed != 1:
                others.append(request)
                continue
            if computed >= request.capacity:
                needy.append(request)
            rows.append(ScheduledTokens(request, computed, 1, True))
        if needy and self._make_room(needy, draft):
            rows[:] = [row for row in rows if row.start < row.request.capacity]  # the preempted have no room at all
            others = [request for request in others if request.status is RequestStatus.RUNNING]
        return others

    def _make_room(self, needy: list[Request], draft: StepBuilder) -> bool:
        """Allocate a block for each of ``needy``, oldest first; if none is left, preempt from the last class.

        True when a request lost its row by it.  Prefill stages are never preempted: a receiver may be copying from
        them, they need no further page, and end by themselves.  A request that could only preempt itself, or one that
        is in flight, misses a step.
        """
        disturbed = False
        table = self._table
        for request in sorted(needy, key=service_order):
            while request.status is RequestStatus.RUNNING and not self._memory.extend(request, request.computed + 1):
                disturbed = True
                victims = self._victims()
                victim = max(victims, key=service_order)
                if victim.in_flight:
                    draft.preemption_targets.add(victim)
                if len(victims) == 1 or victim.in_flight:
                    draft.pageless.add(request)
                    break
                table.preempt(victim, yielding=victim.rank > request.rank)
                draft.preempted += 1
        return disturbed

    def _victims(self, above: int = -1) -> list[Request]:
        """Requests that may be preempted, of classes after ``above``."""
        table = self._table
        active = (*table.running.values(), *table.reserved.values())
        return [request for request in active if request.stage is not RequestStage.PREFILL and request.rank > above]

    def _add_drafts(self, draft: StepBuilder, speculator: DraftProposer) -> None:
        """Add draft tokens to the rows, within the step's tokens and without preempting a request."""
        rows = draft.rows
        if any(row.request.stage is RequestStage.PREFILL for row in rows):
            return  # the first token is all that is drawn there
        left = self._config.max_step_tokens - len(rows)
        for index, tokens in enumerate(speculator.propose(rows)):
            row = rows[index]
            most = min(len(tokens), left)
            if most and row.start + 1 + most > row.request.capacity:
                self._memory.extend(row.request, row.start + 1 + most)
                most = min(most, row.request.capacity - row.start - 1)
            if most > 0:
                rows[index] = ScheduledTokens(row.request, row.start, 1, True, tokens[:most])
                left -= most

    def _repeat_rows(self, draft: StepBuilder, limit: int) -> None:
        """Repeat the rows: until the first could end by its length, as time allows, while pages last."""
        if any(
            row.request.stage is RequestStage.PREFILL or row.request.sampling.grammar is not None for row in draft.rows
        ):
            return  # the first token is all that is drawn there, and a mask follows from the token before
        limit = min(limit, *(row.request.local_end - row.request.known for row in draft.rows))
        steps = draft.affordable_steps(limit)
        fresh = sum(self._memory.missing_pages(row.request, row.start + steps) for row in draft.rows)
        if steps > 1 and fresh <= self._memory.pool.available:
            draft.steps = steps
            for row in draft.rows:
                self._memory.extend(row.request, row.start + steps)

    # --- prompts -----------------------------------------------------------------------------------------------------

    def _add_prompts(self, draft: StepBuilder, chunked: list[Request], ranks: range) -> None:
        """Add chunks of prompts, and admit requests of these classes, in the order of the fair clock.

        At equal times running requests go first.  None is admitted after a chunk that did not fit.  An admission may
        preempt requests of later classes, so their rows are granted later.
        """
        queue = self._table.queue
        pending = sorted(chunked, key=queue.position, reverse=True)
        admitting = not draft.preempted
        growing = -1  # not counted yet
        waiting = [head for head in queue.heads() if head.rank in ranks] if queue and admitting else []
        while pending or waiting:
            head = waiting[0] if waiting and admitting else None
            if head is not None and (not pending or queue.position(head)[:2] < queue.position(pending[-1])[:2]):
                growing = self._growing() if growing < 0 else growing
                refusal = self._admit(draft, head, growing)
                if refusal in (AdmissionRefusal.BEING_COMPUTED, AdmissionRefusal.BEING_CHECKED):
                    del waiting[0]  # its line waits for blocks that others do not need
                    continue
                admitting = refusal is None
                if admitting:
                    growing += needs_more_pages(head)
                    waiting = [head for head in queue.heads() if head.rank in ranks]
                    admitting = head.stage is RequestStage.DECODE or draft.add_chunk(head)
            elif pending:
                admitting = draft.add_chunk(pending.pop()) and admitting
            else:
                return

    def _admit_remote(self, draft: StepBuilder) -> None:
        """In a step that computes nothing, admit requests whose pages are received, up to the first other request."""
        queue, growing = self._table.queue, self._growing()
        waiting = queue.heads() if queue else []
        while waiting and waiting[0].stage is RequestStage.DECODE:
            head = waiting[0]
            refusal = self._admit(draft, head, growing)
            if refusal in (AdmissionRefusal.BEING_COMPUTED, AdmissionRefusal.BEING_CHECKED):
                del waiting[0]
                continue
            if refusal is not None:
                return
            growing += needs_more_pages(head)
            waiting = queue.heads()

    def _growing(self) -> int:
        table = self._table
        return sum(map(needs_more_pages, table.running.values())) + sum(map(needs_more_pages, table.reserved.values()))

    def _admit(self, draft: StepBuilder, request: Request, growing: int) -> AdmissionRefusal | None:
        """Admit ``request`` if there is room, and budget left in this step; else why not.

        A block for each request that still grows stays free: a request admitted into the last one would be preempted at
        once.
        """
        table, groups = self._table, self._memory.groups
        if request.stage is not RequestStage.DECODE and not draft.has_room_for_chunk(request):
            return AdmissionRefusal.NO_ROOM
        spare = growing * groups
        refusal: AdmissionRefusal | None = AdmissionRefusal.NO_ROOM
        if table.active_count < self._max_active:
            refusal = self._memory.admit(request, spare=spare)
        victims = self._victims(request.rank) if refusal is AdmissionRefusal.NO_ROOM else []
        while refusal is AdmissionRefusal.NO_ROOM and victims and self._can_be_had(request, spare, victims):
            victim = max(victims, key=service_order)
            if victim.in_flight:
                draft.preemption_targets.update(victims)  # all: with one page too few they would come back at once
                break
            victims.remove(victim)
            spare -= groups * needs_more_pages(victim)
            table.preempt(victim, yielding=True)
            draft.yielded += 1
            if table.active_count < self._max_active:
                refusal = self._memory.admit(request, spare=spare)
        if refusal is None:
            table.admit(request)
            draft.admitted.append(request)
        return refusal

    def _can_be_had(self, request: Request, spare: int, victims: list[Request]) -> bool:
        """Whether there would be room if all ``victims`` were preempted."""
        theirs = sum(len(own.pages) - own.first for victim in victims for own in victim.page_tables)
        spare -= self._memory.groups * sum(map(needs_more_pages, victims))
        known = self._memory.prefix.longest_prefix(request.hashes, len(request.hashes)) * self._memory.groups
        needed = self._memory.most_pages(request.known) - known
        return needed + max(spare, 0) <= self._memory.pool.available + theirs

    # --- lower classes -----------------------------------------------------------------------------------------------

    def _add_lower_classes(self, draft: StepBuilder, first: int) -> None:
        """Give what the first class leaves of the step's time to the classes after it, one by one."""
        for rank in sorted({r.rank for r in self._eligible(draft)} | self._table.queue.ranks()):
            if rank <= first:
                continue
            mine = sorted((r for r in self._eligible(draft) if r.rank == rank), key=service_order)
            if not draft.rows:  # nothing of the first class can be computed now, so they are alone
                chunked = self._add_decodes(draft, mine)
                draft.close_decodes(batch=True, contended=True)
                self._add_prompts(draft, chunked, range(rank, rank + 1))
                continue
            draft.filling = True
            chunked = []
            for request in mine:
                if request.uncomputed != 1:
                    chunked.append(request)
                elif draft.has_room_for_decode(request) and self._memory.extend(request, request.computed + 1):
                    draft.add_decode(request)
                else:
                    draft.skipped += 1
            self._add_prompts(draft, chunked, range(rank, rank + 1))
        draft.rows.sort(key=lambda row: row.count > 1)  # as the runner has them in any step: answers first
