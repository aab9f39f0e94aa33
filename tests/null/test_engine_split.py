"""Two engines over the null device, and between them only what the messages carry: split equals whole."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import (
    AddRequest,
    CancelRequest,
    CreditGranted,
    FirstTokenArrived,
    PagesArrived,
    PagesReleased,
)
from penstock.engine.core.plan import ReturnedRequest, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.runner.null_runner import NullRunner
from penstock.types import BlockHash, FinishReason, RequestId, RequestStage, SamplingParams

ROOT = BlockHash(bytes(32))
MAX_LEN = 96


def config(pages: int) -> SchedulerConfig:
    return SchedulerConfig(pages=pages, max_model_len=MAX_LEN, max_chunk_tokens=32, max_step_tokens=48)


class Split:
    """A prefill and a decode engine, a gateway that resubmits, and a network that delivers late and out of step."""

    def __init__(self, *, prefill_pages: int, decode_pages: int, seed: int) -> None:
        self.prefill = Scheduler(config(prefill_pages))
        self.decode = Scheduler(config(decode_pages))
        self.runner = NullRunner(vocab=40)
        self.random = Random(seed)
        self.sent: list[tuple[Scheduler, object]] = []
        self.events: dict[RequestId, AddRequest] = {}
        self.tokens: dict[RequestId, list[int]] = {}
        self.finish: dict[RequestId, FinishReason] = {}
        self.filled: dict[tuple[RequestId, int], int] = {}
        self.returned: list[ReturnedRequest] = []

    def submit(self, event: AddRequest) -> None:
        self.events[event.id] = event
        self.tokens.setdefault(event.id, [])
        self.sent.append((self.decode, replace(event, stage=RequestStage.DECODE)))
        self.prefill.apply(replace(event, stage=RequestStage.PREFILL), 0.0)

    def deliver(self) -> None:
        """A random part of what is under way, in order."""
        count = self.random.randint(0, len(self.sent))
        now, self.sent = self.sent[:count], self.sent[count:]
        for scheduler, event in now:
            scheduler.apply(event, 0.0)  # type: ignore[arg-type]

    def turn(self, scheduler: Scheduler) -> bool:
        plan = scheduler.plan(0.0)
        outcome = scheduler.commit(plan, self.runner.run(plan), 0.0)
        self.publish(scheduler, plan, outcome)
        assert scheduler.check_leaks().total == 0
        return bool(plan.rows or plan.reserved or plan.preempted or outcome.new_tokens)

    def publish(self, scheduler: Scheduler, plan: StepPlan, outcome: StepOutcome) -> None:
        for request in plan.reserved:
            self.filled[request.id, request.epoch] = request.computed
            self.sent.append((self.prefill, CreditGranted(id=request.id, epoch=request.epoch)))
        for page in outcome.completed_pages:
            key = page.request.id, page.request.epoch
            upto = page.block * 16 + page.tokens
            self.filled[key] = max(self.filled.get(key, 0), upto)
            self.sent.append((self.decode, PagesArrived(id=key[0], epoch=key[1], computed=self.filled[key])))
        for item in outcome.new_tokens:
            request = item.request
            received = self.tokens[request.id]
            assert tuple(received[item.index : item.index + len(item.tokens)]) in ((), item.tokens)
            if item.index == len(received):
                received.extend(item.tokens)
            if item.finish is not None:
                self.finish[request.id] = item.finish
            if scheduler is self.prefill:
                first = FirstTokenArrived(id=request.id, epoch=request.epoch, token=item.tokens[0], finish=item.finish)
                self.sent += [(self.decode, first), (self.prefill, PagesReleased(id=request.id, epoch=request.epoch))]
        self.returned += plan.returned

    def resubmit(self) -> None:
        """As a gateway does with what comes back from the decode worker."""
        for item in self.returned:
            assert item.reason == "preempted"
            self.sent.append((self.prefill, CancelRequest(id=item.id, epoch=item.epoch)))
            event = self.events[item.id]
            if item.epoch == event.epoch and item.id not in self.finish:
                self.submit(replace(event, epoch=event.epoch + 1, emitted=tuple(self.tokens[item.id])))
        self.returned.clear()

    def run(self) -> None:
        for _ in range(20_000):
            self.deliver()
            moved = [self.turn(self.prefill), self.turn(self.decode)]
            self.resubmit()
            if not any(moved) and not self.sent and len(self.finish) == len(self.events):
                return
        raise AssertionError("the two engines do not come to rest")


def requests(count: int) -> list[AddRequest]:
    random = Random(11)
    return [
        AddRequest(
            id=RequestId(f"r{number}"),
            epoch=0,
            stage=RequestStage.WHOLE,
            prompt=tuple(range(number % 3, random.choice([4, 16, 33, 40, 64]) + number % 3)),
            sampling=SamplingParams(seed=number, max_tokens=random.choice([1, 2, 25]), stop_token_ids=(5,)),
            arrival=float(number),
            root=ROOT,
        )
        for number in range(count)
    ]


def whole(events: list[AddRequest]) -> tuple[dict[RequestId, list[int]], dict[RequestId, FinishReason]]:
    scheduler, runner = Scheduler(config(64)), NullRunner(vocab=40)
    tokens: dict[RequestId, list[int]] = {}
    finish: dict[RequestId, FinishReason] = {}
    for event in events:
        scheduler.apply(event, 0.0)
    while len(finish) < len(events):
        plan = scheduler.plan(0.0)
        for item in scheduler.commit(plan, runner.run(plan), 0.0).new_tokens:
            tokens.setdefault(item.request.id, []).extend(item.tokens)
            if item.finish is not None:
                finish[item.request.id] = item.finish
    return tokens, finish


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("prefill_pages", "decode_pages"), [(64, 128), (6, 128), (64, 8), (6, 7)])
def test_split_equals_whole(prefill_pages: int, decode_pages: int, seed: int) -> None:
    events = requests(16)
    split = Split(prefill_pages=prefill_pages, decode_pages=decode_pages, seed=seed)
    for event in events:
        split.submit(event)
    split.run()
    assert (split.tokens, split.finish) == whole(events)
    for scheduler in (split.prefill, split.decode):
        load = scheduler.load()
        assert (load.running, load.awaiting, load.handing_over, load.queued, load.pages_used) == (0, 0, 0, 0, 0)


def test_a_small_decode_worker_did_preempt() -> None:
    """What the test above claims to cover took place."""
    split = Split(prefill_pages=64, decode_pages=8, seed=0)
    for event in requests(16):
        split.submit(event)
    split.run()
    assert split.decode.preemptions > 0
    assert split.decode.memory.hit_tokens > 0
    assert max(event.epoch for event in split.events.values()) > 0
