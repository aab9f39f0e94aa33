"""Whatever happens in whatever order, the client gets the true answer, each token once, and no leg is left running.

A world of fake workers around one real flight: legs compute in pieces, messages are delivered in any order, doubled,
or die with their sender; workers are killed, forked, give requests back; time passes; the client may leave.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from router_words import IDENTITY, ROOT, request

from penstock.errors import WorkerLost
from penstock.router.decide import ChosenWorker, Decision
from penstock.router.effects import (
    CancelStage,
    DeliverTokens,
    FailRequest,
    RequestEffects,
    StageEnded,
    SubmitStage,
    WaitForWorker,
)
from penstock.router.request import FailoverLimits, RequestPhase, RoutedRequest
from penstock.router.worker_load import ExpectedWork
from penstock.types import FinishReason, RequestStage, TokenLogprob, WorkerId
from penstock.wire.gateway_messages import Submit, TokenItem

FINAL = FinishReason.STOP
WORKERS = tuple(WorkerId(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1"))
ATTEMPTS = 4


def token(index: int) -> int:
    return 1000 + index


@dataclass
class FakeLeg:
    """A leg as its worker has it.  ``at`` counts the answer's tokens that it knows."""

    submit: Submit
    worker: WorkerId
    incarnation: int
    at: int
    handed: bool = False  # decode: the prefill leg has handed its pages and token over
    over: bool = False

    @property
    def key(self) -> tuple[WorkerId, int, int]:
        return (self.worker, self.incarnation, self.submit.epoch)


class AnyOrder(RuleBasedStateMachine):
    """One request's life."""

    @initialize(
        length=st.integers(1, 7),
        split=st.booleans(),
        wants_prompt_logprobs=st.booleans(),
        forwards=st.booleans(),
    )
    def begin(self, length: int, split: bool, wants_prompt_logprobs: bool, forwards: bool) -> None:
        self.length, self.split, self.forwards = length, split, forwards
        self.request = request(max_tokens=length + 3, prompt_logprobs=0 if wants_prompt_logprobs else None)
        self.now = 0.0
        self.flight = RoutedRequest(
            self.request, FailoverLimits(max_attempts=ATTEMPTS, first_byte_s=1e9, stall_s=1e9), 0.0
        )
        self.alive = dict.fromkeys(WORKERS, 1)
        self.dead: set[WorkerId] = set()
        self.legs: list[FakeLeg] = []
        self.open: set[tuple[WorkerId, int, int]] = set()
        self.channel: list[tuple[TokenItem, WorkerId, int]] = []
        self.delivered: list[int] = []
        self.batches = 0
        self.finished = self.left = self.without_prefill = False
        self.failed: Exception | None = None
        self.submissions = 0  # since the last token
        self.retry_at = 0.0
        self.apply(self.flight.begin(0.0))

    # --- effects ----------------------------------------------------------------------------------------------------

    def apply(self, effects: RequestEffects) -> None:
        sends = [effect for effect in effects if isinstance(effect, SubmitStage)]
        self.submissions += bool(sends)
        for effect in effects:
            match effect:
                case SubmitStage():
                    self.sent(effect)
                case CancelStage() | StageEnded():
                    self.ended(effect)
                case DeliverTokens(batch):
                    assert self.failed is None
                    assert not self.finished
                    self.taken(batch)
                case FailRequest(error):
                    assert isinstance(error, WorkerLost)
                    assert self.submissions >= ATTEMPTS
                    self.failed = error
                case WaitForWorker(not_before):
                    self.retry_at = not_before

    def sent(self, effect: SubmitStage) -> None:
        submit = effect.submit
        assert submit.epoch == self.flight.epoch
        assert list(submit.emitted) == self.delivered
        assert len(self.delivered) < self.length, "the answer was complete already"
        assert submit.prompt == bytes(self.request.prompt)
        if self.batches:
            assert submit.sampling.prompt_logprobs is None
        leg = FakeLeg(submit, effect.worker, effect.incarnation, len(submit.emitted))
        assert leg.key not in self.open
        self.open.add(leg.key)
        self.legs.append(leg)

    def ended(self, effect: CancelStage | StageEnded) -> None:
        key = (effect.worker, effect.incarnation, effect.epoch)
        self.open.remove(key)  # KeyError: ended twice, or never sent
        leg = next(leg for leg in self.legs if leg.key == key)
        if isinstance(effect, StageEnded):
            assert leg.over or self.pages_taken(leg) or leg.worker in self.dead
        leg.over = True

    def pages_taken(self, leg: FakeLeg) -> bool:
        """A decode leg of the same epoch went on from what this one handed over."""
        return any(
            other.submit.stage is RequestStage.DECODE and other.submit.epoch == leg.submit.epoch and other.at > leg.at
            for other in self.legs
        )

    def taken(self, batch) -> None:
        self.submissions = 0 if batch.tokens else self.submissions
        self.delivered += batch.tokens
        assert self.delivered == [token(i) for i in range(len(self.delivered))]
        assert [entry.token for entry in batch.logprobs or ()] == list(batch.tokens)
        asked = self.request.sampling.prompt_logprobs is not None
        assert (batch.prompt_logprobs is not None) is (asked and self.batches == 0)
        if self.batches == 0 and not self.without_prefill:
            assert batch.cached_tokens == 16 * self.flight.epoch
        self.batches += 1
        if batch.finish is not None:
            assert batch.finish is FINAL
            assert len(self.delivered) == self.length
            self.finished = True

    # --- what may happen --------------------------------------------------------------------------------------------

    def waiting(self) -> bool:
        return self.flight.phase is RequestPhase.WAITING

    @precondition(waiting)
    @rule(data=st.data())
    def place(self, data) -> None:
        if math.isfinite(self.retry_at):
            self.now = max(self.now, self.retry_at)
        free = [worker for worker in WORKERS if worker not in self.dead]
        readers = [worker for worker in free if worker.startswith("prefill")]
        writers = [worker for worker in free if worker.startswith("decode")]
        if self.split and readers and writers:
            legs = (
                self.chosen(RequestStage.DECODE, data.draw(st.sampled_from(writers))),
                self.chosen(RequestStage.PREFILL, data.draw(st.sampled_from(readers))),
            )
        elif not self.split and free:
            legs = (self.chosen(RequestStage.WHOLE, data.draw(st.sampled_from(free))),)
        else:
            legs = ()
        decision = Decision(at=self.now, policy="none", identity=IDENTITY, stages=legs)
        self.apply(self.flight.on_placed(decision, ROOT, self.now))

    def chosen(self, leg: RequestStage, worker: WorkerId) -> ChosenWorker:
        return ChosenWorker(leg, 0, worker, self.alive[worker], f"memory://{worker}", 1, ExpectedWork(tokens=1))

    def running(self) -> list[FakeLeg]:
        """Legs that their workers compute: whether or not the flight still wants them (a cancel takes its time)."""
        return [leg for leg in self.legs if leg.worker not in self.dead and self.alive[leg.worker] == leg.incarnation]

    @precondition(lambda self: any(not leg.over for leg in self.running()))
    @rule(data=st.data(), pieces=st.integers(1, 4))
    def compute(self, data, pieces: int) -> None:
        leg = data.draw(st.sampled_from([leg for leg in self.running() if not leg.over]))
        self.step(leg, pieces)

    def step(self, leg: FakeLeg, pieces: int) -> None:
        start = leg.at
        if leg.submit.stage is RequestStage.PREFILL:
            if start > len(leg.submit.emitted):
                return  # it only holds its pages now
            pieces = 1
            for other in self.running():
                if other.submit.stage is RequestStage.DECODE and other.submit.epoch == leg.submit.epoch:
                    other.handed = True
        if leg.submit.stage is RequestStage.DECODE:
            if not leg.handed:
                return
            if start == len(leg.submit.emitted) == self.length - 1:
                leg.over = True  # the prefill leg's token was the last: it ends without a word
                return
        leg.at = min(self.length, start + pieces)
        if leg.submit.stage is not RequestStage.PREFILL:
            leg.over = leg.at == self.length
        if leg.at > start:
            self.channel.append((self.item(leg, start), leg.worker, leg.incarnation))
        leg.over = leg.over or leg.at == self.length

    def item(self, leg: FakeLeg, start: int) -> TokenItem:
        tokens = tuple(token(i) for i in range(start, leg.at))
        first = start == len(leg.submit.emitted)
        knows = first and (leg.submit.stage is not RequestStage.DECODE or self.forwards)
        asked = leg.submit.sampling.prompt_logprobs is not None
        return TokenItem(
            request=self.request.id,
            epoch=leg.submit.epoch,
            index=start,
            tokens=tokens,
            logprobs=tuple(TokenLogprob(t, -1.0) for t in tokens),
            prompt_logprobs=(TokenLogprob(1, -2.0),) if knows and asked else None,
            finish=FINAL if leg.at == self.length else None,
            cached_tokens=16 * leg.submit.epoch if knows else 0,
        )

    @precondition(lambda self: self.channel)
    @rule(data=st.data(), doubled=st.booleans())
    def deliver(self, data, doubled: bool) -> None:
        index = data.draw(st.integers(0, len(self.channel) - 1))
        item, worker, incarnation = self.channel[index] if doubled else self.channel.pop(index)
        self.apply(self.flight.on_tokens(item, worker, incarnation, self.now))

    @precondition(lambda self: len(self.dead) < len(WORKERS))
    @rule(data=st.data(), with_its_messages=st.booleans())
    def kill(self, data, with_its_messages: bool) -> None:
        worker = data.draw(st.sampled_from([worker for worker in WORKERS if worker not in self.dead]))
        incarnation = self.alive[worker]
        self.dead.add(worker)
        if with_its_messages:
            self.channel = [sent for sent in self.channel if sent[1:] != (worker, incarnation)]
        self.without_prefill = True
        self.apply(self.flight.on_worker_lost(worker, incarnation, "killed", self.now))

    @precondition(lambda self: self.dead)
    @rule(data=st.data())
    def fork(self, data) -> None:
        worker = data.draw(st.sampled_from(sorted(self.dead)))
        self.dead.remove(worker)
        self.alive[worker] += 1

    @precondition(lambda self: any(not leg.over for leg in self.running()))
    @rule(data=st.data(), reason=st.sampled_from(["preempted", "pages_lost", "draining"]))
    def give_back(self, data, reason: str) -> None:
        leg = data.draw(st.sampled_from([leg for leg in self.running() if not leg.over]))
        leg.over = True
        self.apply(self.flight.on_returned(leg.submit.epoch, reason, leg.worker, leg.incarnation, self.now))

    @rule(seconds=st.sampled_from([0.01, 0.2, 0.3]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        if seconds > 0.2 or self.now > 0.25:
            self.without_prefill = True
        self.apply(self.flight.on_tick(self.now))

    @precondition(lambda self: self.delivered)
    @rule()
    def leave(self) -> None:
        self.left = True
        self.apply(self.flight.on_client_gone())

    # --- what must hold ---------------------------------------------------------------------------------------------

    @invariant()
    def nothing_runs_that_is_not_wanted(self) -> None:
        if not hasattr(self, "flight"):
            return
        assert all(key[2] == self.flight.epoch for key in self.open)
        assert len(self.open) <= 2
        if self.flight.phase is not RequestPhase.FLYING:
            assert not self.open

    def teardown(self) -> None:
        """From wherever it got: undisturbed, it comes to its end."""
        if not hasattr(self, "flight"):
            return
        self.dead.clear()
        self.alive = {worker: incarnation + 1 for worker, incarnation in self.alive.items()}
        for leg in list(self.legs):
            self.apply(self.flight.on_worker_lost(leg.worker, leg.incarnation, "killed", self.now))
        for _ in range(20):
            if self.flight.phase is RequestPhase.WAITING:
                names = [WORKERS[2], WORKERS[0]] if self.split else [WORKERS[0]]
                kinds = [RequestStage.DECODE, RequestStage.PREFILL] if self.split else [RequestStage.WHOLE]
                legs = tuple(self.chosen(kind, name) for kind, name in zip(kinds, names, strict=True))
                decision = Decision(at=self.now, policy="none", identity=IDENTITY, stages=legs)
                self.apply(self.flight.on_placed(decision, ROOT, self.now))
            for leg in self.running():
                if not leg.over:
                    self.step(leg, 3)
            sent, self.channel = self.channel, []
            for item, worker, incarnation in sent:
                self.apply(self.flight.on_tokens(item, worker, incarnation, self.now))
            self.nothing_runs_that_is_not_wanted()
        assert self.flight.phase is RequestPhase.DONE
        assert self.finished or self.left or self.failed is not None
        assert not self.open


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)


@pytest.mark.long
class TestAnyOrderForLong(AnyOrder.TestCase):
    """The same, for longer."""

    settings = settings(max_examples=2000, stateful_step_count=40, deadline=None)
