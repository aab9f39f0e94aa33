"""The scheduler: events in, plans out, drawn tokens taken up.  A pure object; the simulator runs this very class.

The caller alternates ``plan`` and ``commit``.  Events are meant for the time between a ``commit`` and the next
``plan``.  One that comes while a step runs does no harm: pages given up then are not given out again before the next
``plan``, and ``commit`` drops the rows of requests that have gone in the meantime.

It knows no roles, no peers and no messages: those are the worker's service.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.blocks import Leaks
from penstock.engine.core.cost import StepCost, Work
from penstock.engine.core.memory import PageMemory
from penstock.engine.core.pace import Pace
from penstock.engine.core.plan import (
    Arrive,
    Cancelled,
    Drawn,
    Event,
    FirstToken,
    Granted,
    Outcome,
    PageDone,
    PagesArrived,
    Plan,
    Progress,
    Released,
    Row,
)
from penstock.engine.core.planner import Planner
from penstock.engine.core.request import Request, Status
from penstock.engine.core.speculation import Speculator
from penstock.engine.core.table import RequestTable
from penstock.errors import ConfigError
from penstock.types import FinishReason, Leg, RequestId, TokenLogprob


@dataclass(frozen=True, slots=True)
class Load:
    """How busy this engine is."""

    running: int  # take part in steps
    awaiting: int  # leg=decode: have pages, wait for what the prefill worker computes
    handing_over: int  # leg=prefill: computed, wait for the receiver
    queued: int  # have no pages yet
    tokens_in_flight: int  # known tokens still to compute, and output tokens still allowed
    prompt_tokens: int  # known tokens still to compute before an answer begins or goes on; none of hand-overs to here
    prompt_pairs: int  # (query, key) pairs of their attention
    answers: int  # requests whose answers are written here, or will be
    context_tokens: int  # known tokens of those
    pages_used: int
    pages_free: int  # cached ones included


class Scheduler:
    """Decides, step by step, which tokens of which requests are computed, and in which pages they stand."""

    def __init__(
        self, config: SchedulerConfig, cost: StepCost | None = None, speculator: Speculator | None = None
    ) -> None:
        """Raises ConfigError for a limit below 1, or memory that cannot hold one request of the greatest length."""
        for name in ("pages", "page_tokens", "max_model_len", "max_running", "max_step_tokens", "max_chunk_tokens"):
            if getattr(config, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(config, name)}")
        self.config = config
        self.cost = StepCost() if cost is None else cost
        self.memory = PageMemory(
            pages=config.pages,
            page_tokens=config.page_tokens,
            reaches=config.reaches,
            ahead=min(config.max_chunk_tokens, config.max_step_tokens),
            shares_prefixes=config.pooling is None or config.pooling.share_prefixes,
        )
        needed = self.memory.most_pages(config.max_model_len)
        if needed > config.pages:
            raise ConfigError(
                f"max_model_len {config.max_model_len} needs {needed} KV pages of {config.page_tokens} tokens, "
                f"but there is memory for {config.pages}: give more KV memory or a smaller max_model_len"
            )
        self._table = RequestTable(self.memory)
        self._planner = Planner(config, self.cost, self._table, speculator)
        self._speculator = speculator
        self._pace = Pace(self.cost, config.step_budget_ms / 1000)
        self.resting_until: float | None = None  # the last plan had no rows because the next step begins only then
        self._serial = 0
        self._in_flight: tuple[Plan, Work] | None = None
        self._pending = Outcome()  # for the next commit to hand out

    # --- events ------------------------------------------------------------------------------------------------------

    def apply(self, event: Event, now: float) -> None:
        """Take note of what happened.  Events of unknown requests or of other epochs are no errors: they are late."""
        if isinstance(event, Arrive):
            self._arrive(event)
            return
        request = self._table.all.get(event.id)
        if request is None or request.epoch != event.epoch:
            if request is not None and isinstance(event, Cancelled) and request.epoch < event.epoch:
                self._table.forget(request)
            return
        match event:
            case Cancelled():
                self._table.forget(request)
            case Granted():
                self._table.grant(request)
            case Released():
                if request.leg is Leg.PREFILL:
                    self._table.forget(request)
            case PagesArrived():
                self._pages_arrived(request, event.computed)
            case FirstToken():
                self._first_token(request, event)
            case _:
                assert_never(event)

    def _arrive(self, event: Arrive) -> None:
        present = self._table.all.get(event.id)
        if present is not None:
            if present.epoch >= event.epoch:
                return
            self._table.forget(present)
        self._serial += 1
        request = Request(event, serial=self._serial, max_model_len=self.config.max_model_len)
        refusal = self._refusal(request)
        if refusal is None:
            self._table.add(request)
        else:
            self._table.give_back(request, refusal)

    def _refusal(self, request: Request) -> str | None:
        config = self.config
        only_read = request.pooling is not None
        if only_read != (config.pooling is not None):
            return "wrong_task"
        most = len(request.prompt) + request.sampling.max_tokens
        if only_read or request.leg is Leg.PREFILL:
            most = request.known
        if request.known >= config.max_model_len + only_read or self.memory.most_pages(most) > config.pages:
            return "too_long"
        if request.known == 0:
            return "empty"
        return "queue_full" if self._table.queued >= config.max_queued else None

    def _pages_arrived(self, request: Request, computed: int) -> None:
        """Tokens that another worker computed count like our own, and their pages are named like our own."""
        if request.status is Status.RESERVED and computed > request.computed:
            request.computed = min(computed, len(request.prompt) + request.emitted)
            self.memory.settle(request)
            self._start_if_complete(request)

    def _first_token(self, request: Request, event: FirstToken) -> None:
        if request.status is not Status.RESERVED or request.first_token:
            return
        if event.finish is not None:
            self._table.forget(request)
            return
        request.first_token = True
        self._pending.progress.append(Progress(request, len(request.output), (event.token,), (), None))
        request.append(event.token)
        self._start_if_complete(request)

    def _start_if_complete(self, request: Request) -> None:
        if request.first_token and request.missing == 1:
            self._table.start(request)

    # --- steps -------------------------------------------------------------------------------------------------------

    def plan(self, now: float, max_steps: int = 1) -> Plan:
        """What to compute now; up to ``max_steps`` equal steps when only answers are written and nobody waits.

        Every plan, also one without rows, is followed by its ``commit``; otherwise RuntimeError.
        """
        if self._in_flight is not None:
            raise RuntimeError("the last plan has not been committed")
        resting = self._pace.until > now and self._planner.may_rest()
        self.resting_until = self._pace.until if resting else None
        draft = self._planner.draft(max_steps, resting=resting)
        for request in draft.admitted:
            if request.leg is Leg.PREFILL:
                self._announce(request, self._pending)
        table = self._table
        plan = Plan(
            rows=tuple(draft.rows),
            steps=draft.steps,
            predicted_s=self.cost.predict(draft.work) * draft.steps if draft.rows else 0.0,
            reserved=tuple(request for request in draft.admitted if request.leg is Leg.DECODE),
            returned=tuple(table.returned),
            preempted=draft.preempted,
            gone=tuple(table.gone),
        )
        if self._speculator is not None:
            for gone in table.gone:
                self._speculator.forget(gone)
        table.returned.clear()
        table.gone.clear()
        self._in_flight = (plan, draft.work)
        return plan

    def commit(self, plan: Plan, drawn: Sequence[Drawn], now: float, seconds: float | None = None) -> Outcome:
        """Take up what was drawn, one entry a row of ``plan``; ``seconds`` is how long computing all of it took.

        Raises RuntimeError when ``plan`` is not the last one, ValueError when ``drawn`` does not fit its rows.
        """
        if self._in_flight is None or self._in_flight[0] is not plan:
            raise RuntimeError("this is not the plan in flight")
        if len(drawn) != len(plan.rows):
            raise ValueError(f"{len(plan.rows)} rows were planned, {len(drawn)} were drawn")
        work = self._in_flight[1]
        self._in_flight = None
        if seconds is not None:
            self.cost.learn(work, seconds / plan.steps)
            if self.config.even_pace and all(row.count == 1 for row in plan.rows):
                self._pace.took(work, len(self._table.reserved), seconds, now)
            if self._speculator is not None and plan.rows and plan.steps == 1 and work.tokens == work.draws:
                self._speculator.learn(plan.rows, drawn, seconds)
        outcome = self._take_pending()
        for row, new in zip(plan.rows, drawn, strict=True):
            if row.request.status is Status.RUNNING:
                if row.samples:
                    self._draw(row, new, outcome)
                else:
                    self._advance(row, new, outcome)
        return outcome

    def _advance(self, row: Row, new: Drawn, outcome: Outcome) -> None:
        """A chunk that is not the last of its prompt."""
        request = row.request
        request.computed = row.start + row.count
        request.prompt_logprobs.extend(new.prompt_logprobs)
        self.memory.settle(request)
        self.memory.read_on(request)
        if request.leg is Leg.PREFILL:
            self._announce(request, outcome)

    def _draw(self, row: Row, new: Drawn, outcome: Outcome) -> None:
        """The row's last token was the last known one: there are new tokens, and perhaps the end of the answer."""
        request = row.request
        index = len(request.output)
        tokens, logprobs = new.tokens, new.logprobs
        finish: FinishReason | None = None
        taken = 0
        for token in tokens:
            taken += 1
            finish = request.append(token)
            if finish is not None:
                break
        if new.cut:
            finish = FinishReason.LENGTH
        if taken == 0:
            raise ValueError(f"no token was drawn for {request.id}")
        if taken < len(tokens):
            tokens, logprobs = tokens[:taken], logprobs[:taken]
        request.computed = computed = row.start + row.count + taken - 1
        if computed >= (request.settled + 1) * self.config.page_tokens:
            self.memory.settle(request)
        told: tuple[TokenLogprob, ...] = ()
        if index == 0 and request.sampling.prompt_logprobs is not None:
            told = (*request.prompt_logprobs, *new.prompt_logprobs)
        outcome.progress.append(Progress(request, index, tokens, logprobs, finish, told, new.pooled))
        if request.leg is Leg.PREFILL:
            self._table.hand_over(request)
            self._announce(request, outcome)
        elif finish is not None:
            self._table.forget(request)

    def _announce(self, request: Request, outcome: Outcome) -> None:
        """Tell of pages that are final: full ones, and the partial ones when nothing more comes into them."""
        size = self.config.page_tokens
        pieces = self.memory.pieces(request)
        partial = request.computed % size if request.status is Status.HANDOVER else 0
        final = pieces.before(request.settled + (partial > 0))
        for piece in range(request.announced, final):
            block, group = pieces.place(piece)
            tokens = size if block < request.settled else partial
            outcome.pages_done.append(PageDone(request, piece, block, group, tokens))
        request.announced = final

    def _take_pending(self) -> Outcome:
        """What became known outside a step, without those who have gone since."""
        pending, self._pending = self._pending, Outcome()
        pending.progress = [item for item in pending.progress if item.request.status is not Status.GONE]
        pending.pages_done = [item for item in pending.pages_done if item.request.status is not Status.GONE]
        return pending

    # --- figures -----------------------------------------------------------------------------------------------------

    def adapters(self) -> set[str]:
        """Fingerprints of the adapters that requests here have."""
        return {request.adapter for request in self._table.all.values() if request.adapter}

    def find(self, request_id: RequestId) -> Request | None:
        """The request of this id that is here now."""
        return self._table.all.get(request_id)

    @property
    def preemptions(self) -> int:
        """Since the start."""
        return self._table.preemptions

    def check(self) -> Leaks:
        """Count the owners of every page.  All figures are zero whenever no step is being planned or committed."""
        return self.memory.check(self._table.all.values())

    def load(self) -> Load:
        """As of now.  O(requests)."""
        table, pool = self._table, self.memory.pool
        in_flight = prompt_tokens = prompt_pairs = answers = context_tokens = 0
        for request in table.all.values():
            missing = request.missing
            in_flight += missing
            if request.leg is not Leg.PREFILL:
                in_flight += max(request.last - request.known, 0)
                answers += 1
                context_tokens += request.known
            if missing > 1 and request.leg is not Leg.DECODE:
                prompt_tokens += missing
                prompt_pairs += missing * request.computed + missing * (missing + 1) // 2
        return Load(
            running=len(table.running),
            awaiting=len(table.reserved),
            handing_over=len(table.all) - table.queued - table.active,
            queued=table.queued,
            tokens_in_flight=in_flight,
            prompt_tokens=prompt_tokens,
            prompt_pairs=prompt_pairs,
            answers=answers,
            context_tokens=context_tokens,
            pages_used=pool.leased,
            pages_free=pool.available,
        )
