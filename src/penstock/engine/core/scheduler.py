"""The scheduler: events in, plans out, sampled tokens committed.  A pure object; the simulator runs this very class.

The caller alternates ``plan`` and ``commit``.  Events are meant for the time between a ``commit`` and the next
``plan``.  An event that comes while a step runs does no harm: pages freed then are not allocated again before the next
``plan``, and ``commit`` drops the rows of requests that have left in the meantime.

With several micro-batches (``core.micro_batches``) the caller alternates the two in each of them.

An answer that moves to another worker while it is decoded::

    here      RUNNING --KEEP--> RUNNING, frees no page --STOP--> HANDOVER --removed: it continues there
                 ^                                                  |
                 +------------------------- GO_ON ------------------+        it continues here after all

    there     RESERVED, with room for what is sampled meanwhile --MigrationDone--> RUNNING

The scheduler knows no roles, no peers and no messages: those belong to the worker's service.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass
from typing import assert_never

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel
from penstock.engine.core.events import (
    AddRequest,
    CancelRequest,
    CreditGranted,
    EngineEvent,
    FirstTokenArrived,
    Migrate,
    MigrationDone,
    MigrationStep,
    PagesArrived,
    PagesReleased,
    RecomputeLocally,
)
from penstock.engine.core.kv_cache_manager import KvCacheManager, PageVerifier
from penstock.engine.core.micro_batches import MicroBatches
from penstock.engine.core.pacing import EvenPacing
from penstock.engine.core.page_pool import LeakCheck
from penstock.engine.core.plan import (
    CompletedPage,
    DraftProposer,
    NewTokens,
    SampledTokens,
    ScheduledTokens,
    StepOutcome,
    StepPlan,
)
from penstock.engine.core.request import Request, RequestStatus
from penstock.engine.core.request_table import RequestTable
from penstock.engine.core.step_planner import StepBuilder, StepPlanner
from penstock.engine.core.waiting_queue import FairClock
from penstock.errors import ConfigError
from penstock.kv_spec import blocks_for
from penstock.types import FinishReason, RequestId, RequestStage, TokenLogprob
from penstock.wire.gateway_messages import ReturnReason


def apply_migration(table: RequestTable, request: Request, how: MigrationStep) -> None:
    """Do as an event ``Migrate`` says.  What does not fit the request's state is late, and no error."""
    if request.stage is RequestStage.PREFILL:
        return
    match how:
        case MigrationStep.KEEP:
            request.retains_pages = True
        case MigrationStep.STOP if request.status is RequestStatus.RUNNING:
            table.pause(request)
        case MigrationStep.GO_ON:
            request.retains_pages = False
            if request.status is RequestStatus.HANDOVER:
                table.resume(request)
        case _:
            pass


def complete_migration(table: RequestTable, request: Request, event: MigrationDone) -> NewTokens | None:
    """All pages are here, and the tokens that were sampled meanwhile: the request continues behind them.

    Returns the tokens that were not sent to the gateway from here.  A request whose tokens do not fit what this worker
    knows and has room for is returned.
    """
    known = len(request.output) - event.index
    fresh = event.tokens[known:]
    if not 0 <= known <= len(event.tokens) or request.known + len(fresh) - 1 > request.capacity:
        table.return_request(request, ReturnReason.PAGES_LOST.with_details("tokens that do not fit"))
        table.remove(request)
        return None
    index, finish = len(request.output), None
    request.has_first_token = True
    for token in fresh:
        finish = request.append(token)
    request.computed = request.known - 1
    if finish is None:
        table.memory.cache_full_pages(request)
        table.start_running(request)
    else:
        table.remove(request)
    return NewTokens(request, index, fresh, (), finish) if fresh else None


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy this engine is."""

    running: int  # take part in steps
    awaiting: int  # stage=decode: have pages, wait for what the prefill worker computes
    handing_over: int  # computed, or stopped to go on elsewhere: wait for the receiver
    queued: int  # have no pages yet
    tokens_in_flight: int  # known tokens still to compute, and output tokens asked for or expected
    prompt_tokens: int  # known tokens still to compute before an answer begins or goes on; none of hand-overs to here
    prompt_pairs: int  # (query, key) pairs of their attention
    batch_tokens: int  # of prompt_tokens, those of batch work
    batch_pairs: int  # the same of prompt_pairs
    decode_requests: int  # requests whose answers are written here, or will be
    context_tokens: int  # known tokens of those
    pages_used: int
    pages_free: int  # cached ones included


def engine_load(table: RequestTable) -> EngineLoad:
    """As of now.  O(requests)."""
    pool = table.memory.pool
    in_flight = answers = context_tokens = 0
    tokens, pairs = [0, 0], [0, 0]  # of prompts: of the first class, of those after it
    for request in table.requests.values():
        missing = request.uncomputed
        in_flight += missing
        if request.stage is not RequestStage.PREFILL:
            in_flight += request.remaining
            answers += 1
            context_tokens += request.known
        if missing > 1 and request.stage is not RequestStage.DECODE:
            tokens[request.rank > 0] += missing
            pairs[request.rank > 0] += missing * request.computed + missing * (missing + 1) // 2
    return EngineLoad(
        running=len(table.running),
        awaiting=len(table.reserved),
        handing_over=len(table.requests) - table.queued - len(table.running) - len(table.reserved),
        queued=table.queued,
        tokens_in_flight=in_flight,
        prompt_tokens=sum(tokens),
        prompt_pairs=sum(pairs),
        batch_tokens=tokens[1],
        batch_pairs=pairs[1],
        decode_requests=answers,
        context_tokens=context_tokens,
        pages_used=pool.leased,
        pages_free=pool.available,
    )


class Scheduler:
    """Decides, step by step, which tokens of which requests are computed, and in which pages they stand."""

    def __init__(
        self,
        config: SchedulerConfig,
        cost: StepCostModel | None = None,
        speculator: DraftProposer | None = None,
        *,
        verifier: PageVerifier | None = None,
        without_masks: Callable[[], Set[RequestId]] = frozenset,
        micro_batches: int = 1,
        in_order: bool = False,
    ) -> None:
        """``verifier``: of cached pages; None: they are not verified.  ``without_masks``: requests whose next token's
        grammar mask is still computed.  ``in_order``: micro-batches are committed in the order of their plans.

        Raises ConfigError for a limit below 1, or memory that cannot hold one request of the greatest length."""
        for name in ("pages", "page_tokens", "max_model_len", "max_running", "max_step_tokens", "max_chunk_tokens"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(config, name)}")
        self.config = config
        self.cost = StepCostModel() if cost is None else cost
        self.memory = KvCacheManager(
            pages=config.pages,
            page_tokens=config.page_tokens,
            reaches=config.reaches,
            ahead=min(config.max_chunk_tokens, config.max_step_tokens),
            shares_prefixes=config.pooling is None or config.pooling.share_prefixes,
            verifier=verifier,
        )
        needed = self.memory.most_pages(config.max_model_len)
        if needed > config.pages:
            raise ConfigError(
                f"max_model_len {config.max_model_len} needs {needed} KV pages of {config.page_tokens} tokens, "
                f"but there is memory for {config.pages}: give more KV memory or a smaller max_model_len"
            )
        self._table = RequestTable(
            self.memory, FairClock(output_weight=config.output_token_weight, memory_s=config.tenant_memory_s)
        )
        self.micro_batches = MicroBatches(micro_batches, self.memory, in_order=in_order)
        self._planner = StepPlanner(config, self._table, self.micro_batches, speculator)
        self._speculator = speculator
        self._pace = EvenPacing(self.cost, config.step_budget_ms / 1000)
        self.resting_until: float | None = None  # the last plan had no rows because the next step begins only then
        self._without_masks = without_masks
        self.waits_for_masks = False  # did anybody sit out the last plan?
        self.rows_skipped = 0  # of batch work, in steps that had no time for them; since the start
        self._serial = 0
        self._pending = StepOutcome()  # for the next commit to hand out

    # --- events ------------------------------------------------------------------------------------------------------

    def apply(self, event: EngineEvent, now: float) -> None:
        """Take note of what happened.  Events of unknown requests or of other epochs are no errors: they are late."""
        if isinstance(event, AddRequest):
            self._arrive(event, now)
            return
        request = self._table.requests.get(event.id)
        if request is None or request.epoch != event.epoch:
            if request is not None and isinstance(event, CancelRequest) and request.epoch < event.epoch:
                self._table.remove(request)
            return
        match event:
            case CancelRequest():
                self._table.remove(request)
            case CreditGranted():
                self._table.enqueue_granted(request)
            case PagesReleased():
                if request.stage is RequestStage.PREFILL:
                    self._table.remove(request)
            case PagesArrived():
                self._pages_arrived(request, event.computed)
            case FirstTokenArrived():
                self._first_token(request, event)
            case RecomputeLocally():
                self._compute_here(request, event.token)
            case Migrate():
                apply_migration(self._table, request, event.step)
            case MigrationDone():
                self._joined(request, event)
            case _:
                assert_never(event)

    def _arrive(self, event: AddRequest, now: float) -> None:
        present = self._table.requests.get(event.id)
        if present is not None:
            if present.epoch >= event.epoch:
                return
            self._table.remove(present)
        self._serial += 1
        request = Request(event, serial=self._serial, max_model_len=self.config.max_model_len, now=now)
        refusal = self._refusal(request)
        if refusal is None:
            self._table.fair.on_arrival(request.fairness_key, now)
            self._table.add(request)
        else:
            self._table.return_request(request, refusal)

    def _refusal(self, request: Request) -> str | None:
        config = self.config
        only_read = request.pooling is not None
        if only_read != (config.pooling is not None):
            return "wrong_task"
        most = request.local_end if request.open_ended else request.end
        if only_read or request.stage is RequestStage.PREFILL:
            most = request.known
        elif request.stage is RequestStage.DECODE and request.may_outgrow:
            most = max(most, request.known + 2)  # the first token comes from elsewhere, and the next is computed here
        if max(most, request.known + (not only_read)) > config.max_model_len:
            return ReturnReason.TOO_LONG
        if self.memory.most_pages(most) > config.pages:
            return ReturnReason.TOO_LONG
        ahead = blocks_for(request.known + request.extra_tokens, config.page_tokens) if request.extra_tokens else 0
        if self.memory.groups * ahead > config.pages:
            return ReturnReason.TOO_LONG
        if request.known == 0:
            return "empty"
        return ReturnReason.QUEUE_FULL if self._table.queued >= config.max_queued else None

    def _pages_arrived(self, request: Request, computed: int) -> None:
        """Tokens that another worker computed count like our own, and their pages are named like our own."""
        if request.status is RequestStatus.RESERVED and computed > request.computed:
            request.computed = min(computed, request.remote_tokens)
            self.memory.cache_full_pages(request)
            self._start_if_complete(request)

    def _first_token(self, request: Request, event: FirstTokenArrived) -> None:
        if request.status is not RequestStatus.RESERVED or request.has_first_token:
            return
        if event.finish is not None:
            self._table.remove(request)
            return
        if request.remote_tokens < request.known:
            request.has_first_token = True  # it is known already, and what follows it is computed here
        else:
            self._know_first(request, event.token)
        self._start_if_complete(request)

    def _compute_here(self, request: Request, token: int) -> None:
        if request.status is RequestStatus.RESERVED and not request.has_first_token and not request.extra_tokens:
            self._know_first(request, token)
            self._table.recompute_locally(request)

    def _know_first(self, request: Request, token: int) -> None:
        request.has_first_token = True
        self._pending.new_tokens.append(NewTokens(request, len(request.output), (token,), (), None))
        request.append(token)

    def _joined(self, request: Request, event: MigrationDone) -> None:
        if request.status is not RequestStatus.RESERVED or request.has_first_token:
            return
        new = complete_migration(self._table, request, event)
        if new is not None:
            self._pending.new_tokens.append(new)
        if request.id in self._table.running and request.exceeds_context:
            self._return_full(request)

    def _start_if_complete(self, request: Request) -> None:
        if request.has_first_token and request.computed == request.remote_tokens:
            self._table.start_running(request)
            if request.exceeds_context:
                self._return_full(request)

    def _return_full(self, request: Request) -> None:
        """An open-ended answer is never cut short: a worker with a longer context continues it."""
        self._table.return_request(request, ReturnReason.TOO_LONG)
        self._table.remove(request)

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan(self, now: float, max_steps: int = 1, micro_batch: int = 0) -> StepPlan:
        """What to compute now; up to ``max_steps`` equal steps when there are only decode rows and no request waits.

        Every plan, also one without rows, is followed by its ``commit``; otherwise RuntimeError.
        """
        if not self.micro_batches.is_free(micro_batch):
            raise RuntimeError("the last plan has not been committed")
        self._table.expire(now)
        self.memory.begin_step()
        resting = self._pace.until > now and self._planner.may_rest()
        self.resting_until = self._pace.until if resting else None
        draft = StepBuilder(self.config, self.cost, now)
        draft.without_masks = self._without_masks()
        self.waits_for_masks = bool(draft.without_masks)
        draft.excluded = self.micro_batches.excluded(micro_batch)
        self._planner.build(draft, max_steps, now, resting=resting)
        self.rows_skipped += draft.skipped
        for request in draft.admitted:
            if request.stage is RequestStage.PREFILL:
                self._announce(request, self._pending)
        table = self._table
        plan = StepPlan(
            rows=tuple(draft.rows),
            steps=draft.steps,
            predicted_s=self.cost.predict(draft.work) * draft.steps + self._checking_s if draft.rows else 0.0,
            verified_pages=self.memory.verified_now,
            reserved=tuple(request for request in draft.admitted if request.stage is RequestStage.DECODE),
            returned=tuple(table.returned),
            preempted=draft.preempted + draft.yielded,
            removed=tuple(table.removed),
            micro_batch=micro_batch,
        )
        if self._speculator is not None:
            for gone in table.removed:
                self._speculator.remove_request(gone)
        table.returned.clear()
        table.removed.clear()
        self.micro_batches.begin(plan, draft.work, draft.preemption_targets)
        return plan

    @property
    def _checking_s(self) -> float:
        """About how long cached pages were checked for this plan."""
        return self.memory.verified_now * self.memory.verifier.page_s

    def commit(
        self, plan: StepPlan, drawn: Sequence[SampledTokens], now: float, seconds: float | None = None
    ) -> StepOutcome:
        """Take up what was drawn, one entry a row of ``plan``; ``seconds`` is how long computing all of it took.

        Raises RuntimeError when ``plan`` is not in flight, ValueError when ``drawn`` does not fit its rows.
        """
        if len(drawn) != len(plan.rows):
            raise ValueError(f"{len(plan.rows)} rows were planned, {len(drawn)} were drawn")
        work = self.micro_batches.finish(plan)
        if seconds is not None:
            self.cost.update(work, seconds / plan.steps)
            if self.config.even_pace and all(row.count == 1 for row in plan.rows):
                self._pace.on_step(work, len(self._table.reserved), seconds, now)
            if self._speculator is not None and plan.rows and plan.steps == 1 and work.tokens == work.draws:
                self._learn_drafts(self._speculator, plan, drawn, seconds)
        outcome = self._take_pending()
        for row, new in zip(plan.rows, drawn, strict=True):
            if row.request.status is RequestStatus.RUNNING:
                if new.mask_late:
                    outcome.late_masks += 1
                    if row.count > 1:
                        self._advance(row, new, outcome, without=1)
                elif row.samples:
                    self._draw(row, new, outcome)
                else:
                    self._advance(row, new, outcome)
        return outcome

    @staticmethod
    def _learn_drafts(
        speculator: DraftProposer, plan: StepPlan, drawn: Sequence[SampledTokens], seconds: float
    ) -> None:
        """From a step in which no row had to wait for its mask."""
        if not any(one.mask_late for one in drawn):
            speculator.on_step(plan.rows, drawn, seconds)

    def _advance(self, row: ScheduledTokens, new: SampledTokens, outcome: StepOutcome, *, without: int = 0) -> None:
        """A chunk that is not the last of its prompt, or one of which the last tokens are to be computed again."""
        request = row.request
        request.computed = row.start + row.count - without
        request.prompt_logprobs.extend(new.prompt_logprobs)
        self.memory.cache_full_pages(request)
        self.memory.extend_windows(request)
        if request.stage is RequestStage.PREFILL:
            self._announce(request, outcome)

    def _draw(self, row: ScheduledTokens, new: SampledTokens, outcome: StepOutcome) -> None:
        """The row's last token was the last known one: there are new tokens, and perhaps the end of the answer."""
        request = row.request
        index = len(request.output)
        tokens, logprobs = new.tokens, new.logprobs
        taken, finish = request.extend(tokens)
        if new.ends:
            finish = FinishReason.LENGTH
        if taken == 0:
            raise ValueError(f"no token was drawn for {request.id}")
        if taken < len(tokens):
            tokens, logprobs = tokens[:taken], logprobs[:taken]
        request.computed = computed = row.start + row.count + taken - 1
        if computed >= (request.settled + 1) * self.config.page_tokens:
            self.memory.cache_full_pages(request)
        prompt_logprobs: tuple[TokenLogprob, ...] = ()
        if index == 0 and request.sampling.prompt_logprobs is not None:
            prompt_logprobs = (*request.prompt_logprobs, *new.prompt_logprobs)
        outcome.new_tokens.append(NewTokens(request, index, tokens, logprobs, finish, prompt_logprobs, new.pooled))
        if request.stage is RequestStage.PREFILL:
            self._table.hand_over(request)
            self._announce(request, outcome)
        elif finish is not None:
            self._table.remove(request)
        elif request.exceeds_context:
            self._return_full(request)

    def _announce(self, request: Request, outcome: StepOutcome) -> None:
        """Tell of pages that are final: full ones, and the partial ones when nothing more comes into them."""
        pieces = self.memory.pieces(request)
        final = pieces.total if request.status is RequestStatus.HANDOVER else pieces.pages_before(request.settled)
        for piece in range(request.announced_pieces, final):
            block, group = pieces.page_at(piece)
            outcome.completed_pages.append(CompletedPage(request, piece, block, group, pieces.tokens_of(piece)))
        request.announced_pieces = final

    def _take_pending(self) -> StepOutcome:
        """What became known outside a step, without those who have gone since."""
        pending, self._pending = self._pending, StepOutcome()
        pending.new_tokens = [item for item in pending.new_tokens if item.request.status is not RequestStatus.GONE]
        pending.completed_pages = [
            item for item in pending.completed_pages if item.request.status is not RequestStatus.GONE
        ]
        return pending

    # --- figures -----------------------------------------------------------------------------------------------------

    def adapters(self) -> set[str]:
        """Fingerprints of the adapters that requests here have."""
        return {request.adapter for request in self._table.requests.values() if request.adapter}

    def not_started(self) -> list[Request]:
        """Requests that have not started: without pages, or only with pages that another worker still computes."""
        waits = (RequestStatus.UNGRANTED, RequestStatus.WAITING, RequestStatus.RESERVED)
        return [r for r in self._table.requests.values() if r.status in waits and not r.has_first_token]

    def get_request(self, request_id: RequestId) -> Request | None:
        """The request of this id that is here now."""
        return self._table.requests.get(request_id)

    @property
    def queued(self) -> int:
        """Requests that have no pages yet."""
        return self._table.queued

    @property
    def preemptions(self) -> int:
        """Since the start."""
        return self._table.preemptions

    @property
    def yields(self) -> int:
        """Preemptions for a request of a class that goes first, since the start."""
        return self._table.yield_count

    @property
    def expired(self) -> int:
        """Requests given back because their time was up, since the start."""
        return self._table.expired

    def check_leaks(self) -> LeakCheck:
        """Count the owners of every page.  All figures are zero whenever no step is being planned or committed."""
        return self.memory.check_leaks(self._table.requests.values())

    def load(self) -> EngineLoad:
        """As of now.  O(requests)."""
        return engine_load(self._table)
