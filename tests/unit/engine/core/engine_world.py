"""A scheduler over the glass model, clients who know what their answers must be, and the other worker of each split
request: whatever happens in whatever order, everybody gets the whole of the right answer, and all pages come back.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import accumulate

from glass_model import Answer, GlassRunner, answer, context_of, extend

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import (
    AddRequest,
    CancelRequest,
    CreditGranted,
    FirstTokenArrived,
    PagesArrived,
    PagesReleased,
    RecomputeLocally,
)
from penstock.engine.core.plan import DraftProposer, StepOutcome, StepPlan
from penstock.engine.core.request import Request, RequestStatus
from penstock.engine.core.scheduler import Scheduler
from penstock.kv_spec import max_blocks
from penstock.types import FinishReason, RequestId, RequestStage

MOST_GUESSES = 5


@dataclass
class Client:
    """What one caller knows and has received."""

    event: AddRequest
    want: Answer
    tokens: list[int] = field(default_factory=list[int])
    finish: FinishReason | None = None
    blocks: list[int] = field(default_factory=list[int])
    granted: bool = False
    prefilled: bool = False
    prompt_logprobs: int | None = None
    gone: bool = False  # cancelled, released, returned or silently ended
    returned: bool = False  # preempted: to be submitted again


class World:
    """One scheduler, its clients, and the other worker of each split request."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        max_steps: int = 1,
        seconds: float | None = None,
        clock_s: float = 0.0,
        speculator: DraftProposer | None = None,
        micro_batches: int = 1,
        in_order: bool = False,
    ) -> None:
        self.config = config
        self.scheduler = Scheduler(config, speculator=speculator, micro_batches=micro_batches, in_order=in_order)
        self.runner = GlassRunner(config)
        self.max_steps = max_steps
        self.seconds = seconds
        self.clock_s = clock_s
        self.now = 0.0
        self.rested = False  # a step waited for another's prompt
        self.clients: dict[str, Client] = {}
        self.plan = StepPlan()
        self.outcome = StepOutcome()
        self.resubmitted = 0
        self.taken_over = 0
        self.several = False  # a plan granted several steps at once

    # --- what may happen ----------------------------------------------------------------------------------------------

    def arrive(self, event: AddRequest) -> None:
        want = answer(event.prompt, event.sampling, self.config.max_model_len)
        present = self.clients.get(event.id)
        self.scheduler.apply(event, self.now)
        if present is not None and self.find(event.id) is not None and present.event.epoch >= event.epoch:
            return
        self.clients[event.id] = Client(event, want, list(event.emitted))

    def resubmit(self, name: str) -> None:
        """As a gateway does it: a later epoch, with what the client has already."""
        client = self.clients[name]
        client.returned = False
        self.resubmitted += 1
        self.arrive(replace(client.event, epoch=client.event.epoch + 1, emitted=tuple(client.tokens), hashes=()))

    def grant(self, name: str) -> None:
        client = self.clients[name]
        client.granted = True
        self.scheduler.apply(CreditGranted(id=client.event.id, epoch=client.event.epoch), 0.0)

    def pages_arrive(self, name: str, upto: int) -> None:
        """The other worker's pages are copied into ours, then counted."""
        client = self.clients[name]
        request = self.find(name)
        assert request is not None
        tokens = (*client.event.prompt, *client.event.emitted)
        upto = min(upto, len(tokens))
        context = 0
        for position, token in enumerate(tokens[:upto]):
            context = extend(context, token)
            needed = [
                group
                for group, (own, reach) in enumerate(zip(request.page_tables, self.config.reaches, strict=True))
                if position // reach.tokens_per_page(self.runner.size) >= own.first
                and (reach.state_interval is None or upto == len(tokens))  # a state comes last
            ]
            if position >= request.computed:
                self.runner.put(request, position, context, needed)
        self.scheduler.apply(PagesArrived(id=client.event.id, epoch=client.event.epoch, computed=upto), 0.0)

    def first_token(self, name: str) -> None:
        client = self.clients[name]
        index = len(client.event.emitted)
        finish = client.want.finish if index + 1 == len(client.want.tokens) else None
        client.prefilled = True
        client.gone = finish is not None
        event = client.event
        self.scheduler.apply(
            FirstTokenArrived(id=event.id, epoch=event.epoch, token=client.want.tokens[index], finish=finish), 0.0
        )

    def compute_here(self, name: str) -> None:
        """The pages are too slow to come, and the answer goes on behind its first token."""
        client = self.clients[name]
        index = len(client.event.emitted)
        if index + 1 == len(client.want.tokens):
            self.first_token(name)
            return
        client.prefilled = True
        event = client.event
        self.scheduler.apply(RecomputeLocally(id=event.id, epoch=event.epoch, token=client.want.tokens[index]), 0.0)
        request = self.find(name)
        assert request is not None
        assert request.status is RequestStatus.WAITING
        self.taken_over += 1

    def release(self, name: str) -> None:
        client, request = self.clients[name], self.find(name)
        if request is not None and request.status is RequestStatus.HANDOVER:
            tokens = (*client.event.prompt, *client.event.emitted)
            self.runner.read(request, tokens, len(tokens))
            self.runner.check_states(request, context_of(tokens), len(tokens))
        client.gone = True
        self.scheduler.apply(PagesReleased(id=client.event.id, epoch=client.event.epoch), 0.0)

    def cancel(self, name: str) -> None:
        client = self.clients[name]
        client.gone = True
        self.scheduler.apply(CancelRequest(id=client.event.id, epoch=client.event.epoch), 0.0)
        assert self.find(name) is None

    def step(self, *, cancel_in_flight: str | None = None) -> StepPlan:
        waiting = {r for r in self.requests() if r.status is RequestStatus.WAITING}
        self.plan = plan = self.scheduler.plan(self.now, self.max_steps)
        self.now += self.seconds or self.clock_s
        self.several = self.several or plan.steps > 1
        self._check_plan(plan, waiting)
        drawn = self.runner.run(plan)
        if cancel_in_flight is not None:
            self.cancel(cancel_in_flight)
        self.outcome = self.scheduler.commit(plan, drawn, self.now, self.seconds if plan.rows else None)
        if self.scheduler.resting_until is not None:
            assert not plan.rows
            assert self.scheduler.resting_until <= self.now + self.config.step_budget_ms / 1000
            self.rested = True
            self.now = self.scheduler.resting_until
        self._deliver(self.outcome)
        self.check()
        return plan

    # --- what must hold -----------------------------------------------------------------------------------------------

    def check(self) -> None:
        pool = self.scheduler.memory.pool
        assert self.scheduler.check_leaks().total == 0, self.scheduler.check_leaks()
        assert pool.free + pool.cached + pool.leased == self.config.pages
        load = self.scheduler.load()
        assert load.running + load.awaiting <= self.config.max_running
        assert load.pages_used + load.pages_free <= self.config.pages
        for request in self.requests():
            assert 0 <= request.computed <= request.known
            assert bool(request.page_tables) == (request.status not in (RequestStatus.UNGRANTED, RequestStatus.WAITING))
            if request.page_tables:
                size, reaches = self.config.page_tokens, self.config.reaches
                rooms = [
                    len(own.pages) * reach.tokens_per_page(size)
                    for own, reach in zip(request.page_tables, reaches, strict=True)
                ]
                assert request.capacity == min(rooms)
                self._check_windows(request)
            assert request.computed <= max(request.capacity, 0)

    def _check_windows(self, request: Request) -> None:
        """What no later position reads was given back, with the last full page at the latest."""
        config, size = self.config, self.config.page_tokens
        ahead = max(min(config.max_chunk_tokens, config.max_step_tokens), self.max_steps, MOST_GUESSES + 1)
        after = request.known if request.status is RequestStatus.RESERVED else request.computed
        for own, reach in zip(request.page_tables, config.reaches, strict=True):
            assert own.first * reach.tokens_per_page(size) <= reach.first_read_position(after)
            held = len(own.pages) - own.first
            assert held <= max_blocks(reach, config.max_model_len, ahead=ahead, page_tokens=size)

    def _check_plan(self, plan: StepPlan, waiting: set[Request]) -> None:
        assert sum(row.count + len(row.draft) for row in plan.rows) <= self.config.max_step_tokens
        assert all(row.count <= self.config.max_chunk_tokens for row in plan.rows)
        assert len({row.request.id for row in plan.rows}) == len(plan.rows)
        left = [r for r in waiting if r.status is RequestStatus.WAITING]
        admitted = [r for r in waiting if r.page_tables]
        for request in admitted:
            assert all(request.order < other.order for other in left if other.fairness_key == request.fairness_key), (
                "somebody was overtaken in its own line"
            )
        for returned in plan.returned:
            client = self.clients[returned.id]
            if returned.epoch == client.event.epoch:
                client.gone = True
                client.returned = returned.reason in ("preempted", "yielded")

    def _deliver(self, outcome: StepOutcome) -> None:
        for item in outcome.new_tokens:
            client = self.clients[item.request.id]
            assert not client.gone
            assert item.request.epoch == client.event.epoch
            assert item.index == len(client.tokens), "a token twice, or one left out"
            assert item.tokens
            assert len(item.logprobs) in (0, len(item.tokens))
            client.tokens.extend(item.tokens)
            client.finish = item.finish
            if item.index == 0 and client.event.stage is not RequestStage.DECODE:
                client.prompt_logprobs = len(item.prompt_logprobs)
            else:
                assert not item.prompt_logprobs
        for page in outcome.completed_pages:
            client = self.clients[page.request.id]
            assert not client.gone
            reach, request = self.config.reaches[page.group], page.request
            size = reach.tokens_per_page(self.config.page_tokens)
            assert page.piece == len(client.blocks), "pages are announced in order, each once"
            client.blocks.append(page.tokens)
            tokens = request.tokens(0, page.block * size + page.tokens)
            contexts = list(accumulate(tokens, extend, initial=0))[1:]
            if reach.state_interval is None:
                self.runner.check(request, page.group, contexts, page.block * size)
            else:
                assert len(tokens) == len(client.event.prompt) + len(client.event.emitted), "a state goes last"
                self.runner.check_states(request, contexts[-1], len(tokens))

    def finished(self, name: str) -> bool:
        """This worker has nothing more to do for the client."""
        client = self.clients[name]
        if client.gone or client.event.stage is not RequestStage.PREFILL:
            return client.gone or client.finish is not None
        return False

    def run_to_completion(self, limit: int = 3000) -> None:
        """Everybody else does their part at once; then it must end, with the right answers and all pages free."""
        for _ in range(limit):
            busy = self._play_the_others()
            self.step()
            plan = self.plan
            busy = busy or bool(
                plan.rows or plan.reserved or plan.preempted or plan.returned or self.outcome.new_tokens
            )
            busy = busy or self.scheduler.resting_until is not None
            if not self.requests() and not busy:
                break
            assert busy, "nothing moves, but somebody waits"
        assert not self.requests(), "not finished within the limit"
        assert self.scheduler.memory.pool.leased == 0
        for client in self.clients.values():
            self.check_answer(client)

    def check_answer(self, client: Client) -> None:
        assert client.tokens == client.want.tokens[: len(client.tokens)]
        if client.gone:
            return
        assert client.finish is client.want.finish
        assert client.tokens == client.want.tokens
        if client.event.sampling.prompt_logprobs is not None and client.prompt_logprobs is not None:
            assert client.prompt_logprobs == len(client.event.prompt) - 1

    def requests(self) -> list[Request]:
        found = (self.find(name) for name in self.clients)
        return [request for request in found if request is not None]

    def find(self, name: str) -> Request | None:
        return self.scheduler.get_request(RequestId(name))

    def _play_the_others(self) -> bool:
        moved = False
        for name in [name for name, client in self.clients.items() if client.returned]:
            self.resubmit(name)
            moved = True
        for request in self.requests():
            match request.status:
                case RequestStatus.UNGRANTED:
                    self.grant(request.id)
                case RequestStatus.RESERVED:
                    self.pages_arrive(request.id, request.known)
                    if not request.has_first_token:
                        self.first_token(request.id)
                case RequestStatus.HANDOVER:
                    self.check_handed_over(request.id)
                    self.release(request.id)
                case _:
                    continue
            moved = True
        return moved

    def check_handed_over(self, name: str) -> None:
        """The receiver was told of every page and of the first token."""
        client = self.clients[name]
        before = len(client.event.prompt) + len(client.event.emitted)
        size = self.config.page_tokens
        wanted = [
            before - reach.first_needed_block(before, size) * reach.tokens_per_page(size)
            for reach in self.config.reaches
        ]
        assert sum(client.blocks) == sum(wanted)
        assert len(client.tokens) == len(client.event.emitted) + 1
        assert (client.finish is not None) == (len(client.tokens) == len(client.want.tokens))
