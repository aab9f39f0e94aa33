"""A whole engine with two lanes against one without: the same answers, log-probabilities and scores, bit for bit.

Where there is no device the lanes compute one after the other, by the same code.
"""

from __future__ import annotations

import select
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from threading import Event as Signal
from typing import Any

import numpy as np
import pytest
import torch
from kernel_cases import TRITONS
from test_device_program import HostPick

from penstock.clock import VirtualClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import Arrive, Cancelled, Event, Lane, Outcome, Plan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.lane_loop import LaneLoop
from penstock.engine.loop import EngineLoop
from penstock.engine.runner.device_lanes import DeviceLanes
from penstock.engine.runner.model_runner import Aids
from penstock.kernels.lanes import HasLanes, Lanes
from penstock.kernels.select import REFERENCE, TRITON
from penstock.kernels.triton.bell import Bell
from penstock.kernels.triton.program import DeviceProgram
from penstock.types import BlockHash, Leg, RequestId, SamplingParams
from runner_bench import RunnerBench
from tiny_models import llama_config, write_model

VOCAB = 67
CONFIG = llama_config(vocab_size=VOCAB, num_hidden_layers=2, hidden_size=32, intermediate_size=48, head_dim=16)
PAGES = 8
MANY, FEW = (1, 8, 40), (3,)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), CONFIG, seed=3)


class Told:
    """A mailbox: events by the turn that they come in, and everything that was told."""

    def __init__(self, events: list[Event]) -> None:
        self.events = events
        self.told: dict[RequestId, list[Any]] = {}
        self.lanes: set[Lane | None] = set()
        self.several = False
        self.turn = 0

    def drain(self) -> Iterable[Event]:
        self.turn += 1
        count = 6 if self.turn == 1 else self.turn % 2
        coming, self.events = self.events[:count], self.events[count:]
        return coming

    def about_to_run(self, predicted_s: float) -> None:
        return

    def publish(self, outcome: Outcome, plan: Plan) -> None:
        if plan.rows:
            self.lanes.add(plan.lane)
        self.several = self.several or plan.steps > 1
        for item in outcome.progress:
            own = self.told.setdefault(item.request.id, [])
            own += zip(item.tokens, item.logprobs or [None] * len(item.tokens), strict=True)
            if item.prompt_logprobs or item.finish is not None:
                own.append((item.prompt_logprobs, item.finish))


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"temperature": 1.1},
    {"temperature": 0.8},
    {"top_k": 9, "logprobs": 2, "prompt_logprobs": 1},
    {"top_p": 0.7, "repetition_penalty": 1.3, "min_tokens": 3, "stop_token_ids": (5, 6)},
    {"presence_penalty": 0.6, "frequency_penalty": 0.3, "logprobs": 0},
)


def requests(count: int, answers: tuple[int, ...]) -> list[Event]:
    """Some share the beginning of their prompts; together they want more pages than there are."""
    random, shared = Random(4), np.random.default_rng(0).integers(0, VOCAB, 64).tolist()
    found: list[Event] = []
    for number in range(count):
        length = random.choice([1, 2, 16, 17, 33])
        own = [random.randrange(VOCAB) for _ in range(length)]
        sampling = SamplingParams(seed=number, max_tokens=random.choice(answers), **SAMPLINGS[number % 6])
        found.append(
            Arrive(
                id=RequestId(f"r{number}"),
                epoch=0,
                leg=Leg.WHOLE,
                prompt=tuple((shared + own)[:length] if number % 2 else own),
                sampling=sampling,
                arrival=float(number),
                root=BlockHash(bytes(32)),
            )
        )
    return found


def scheduler(pages: int = PAGES) -> Scheduler:
    return Scheduler(SchedulerConfig(pages=pages, max_model_len=80, max_chunk_tokens=16, step_budget_ms=1e6))


def run(loop: EngineLoop | LaneLoop, mailbox: Told) -> dict[RequestId, list[Any]]:
    for _ in range(4000):
        if not loop.step() and not mailbox.events and not loop.scheduler.load().running:
            break
    assert loop.scheduler.check().total == 0
    assert loop.scheduler.load().pages_used == 0
    return mailbox.told


def without_lanes(bench: RunnerBench, events: list[Event]) -> dict[RequestId, list[Any]]:
    mailbox = Told(events)
    return run(EngineLoop(mailbox, scheduler(), bench.runner, VirtualClock()), mailbox)


def with_lanes(
    bench: RunnerBench, programs: Lanes, max_steps: int, events: list[Event]
) -> tuple[dict[RequestId, list[Any]], Scheduler]:
    mailbox, own = Told(events), scheduler()
    runner = DeviceLanes(bench.model, bench.ops, bench.kv, programs, Aids(adapters=bench.adapters))
    found = run(LaneLoop(mailbox, own, runner, VirtualClock(), max_steps=max_steps), mailbox)
    assert mailbox.lanes == {Lane.READING, Lane.WRITING}
    assert mailbox.several == (max_steps > 1)
    return found, own


def lanes_of(bench: RunnerBench, **options: Any) -> Lanes:
    programs = [DeviceProgram(bench.ops, bench.model, bench.kv, device=torch.device("cpu"), **options) for _ in "rw"]
    return Lanes(*programs, how="one after the other")


@pytest.fixture(scope="module")
def in_turn(folder: Path) -> tuple[RunnerBench, dict[RequestId, list[Any]]]:
    bench = RunnerBench(folder, "bf16", pages=PAGES, family=REFERENCE)
    return bench, without_lanes(bench, requests(12, MANY))


@pytest.mark.parametrize("max_steps", [1, 3])
def test_lanes_write_what_one_worker_writes(
    in_turn: tuple[RunnerBench, dict[RequestId, list[Any]]], max_steps: int
) -> None:
    bench, wanted = in_turn
    assert len(wanted) == 12
    programs = lanes_of(bench, pick=HostPick(bench.ops), most_rows=4)
    found, own = with_lanes(bench, programs, max_steps, requests(12, MANY))
    assert found == wanted
    assert own.preemptions > 0
    assert own.memory.found_tokens > 0


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), TRITONS)
def test_the_kernels_lanes_write_the_same(folder: Path, family: str, dtype: str) -> None:
    bench = RunnerBench(folder, dtype, pages=PAGES, family=family)
    assert isinstance(bench.ops, HasLanes)
    programs, wanted = bench.ops.lanes(bench.model, bench.kv, "auto"), without_lanes(bench, requests(4, FEW))
    assert with_lanes(bench, programs, 2, requests(4, FEW))[0] == wanted


@pytest.mark.cuda
@pytest.mark.parametrize("how", ["priority", "green"])
def test_lanes_on_a_device_write_the_same(folder: Path, how: str) -> None:
    """On a GPU: streams, graphs and multiprocessors of their own, and both at once."""
    bench = RunnerBench(folder, "bf16", pages=PAGES, family=TRITON, device="cuda")
    programs = bench.ops.lanes(bench.model, bench.kv, how)  # type: ignore[attr-defined]
    assert with_lanes(bench, programs, 2, requests(12, MANY))[0] == without_lanes(bench, requests(12, MANY))


def test_a_plan_for_no_lane_is_refused(folder: Path) -> None:
    bench = RunnerBench(folder, "fp32", pages=PAGES, family=REFERENCE)
    runner = DeviceLanes(bench.model, bench.ops, bench.kv, lanes_of(bench))
    with pytest.raises(RuntimeError, match="no lane"):
        runner.begin(Plan())
    assert runner.descriptors == []


def looped(bench: RunnerBench, programs: Lanes, events: list[Event]) -> LaneLoop:
    runner = DeviceLanes(bench.model, bench.ops, bench.kv, programs, Aids(adapters=bench.adapters))
    return LaneLoop(Told(events), scheduler(), runner, VirtualClock())


def test_a_bell_that_rings_late_is_heard_once(in_turn: tuple[RunnerBench, dict[RequestId, list[Any]]]) -> None:
    """The lane was finished before its thread came to say so: a host that sleeps for it must not be woken for ever."""
    bench, programs, over = in_turn[0], lanes_of(in_turn[0]), Signal()
    bell = programs.reading._bell = Bell(over.wait)  # type: ignore[attr-defined]
    (event,) = requests(1, (1,))
    assert isinstance(event, Arrive)
    loop = looped(bench, programs, [replace(event, prompt=(1, 2, 3))])  # is read by one step, so there is one ring
    run(loop, loop.mailbox)  # type: ignore[arg-type]
    assert not select.select([bell.descriptor], [], [], 0)[0]
    over.set()
    assert select.select([bell.descriptor], [], [], 30)[0]
    loop.step()
    assert not select.select([bell.descriptor], [], [], 0)[0]


@pytest.mark.parametrize("gone", [False, True])
def test_answers_are_written_while_a_prompt_is_under_way(
    in_turn: tuple[RunnerBench, dict[RequestId, list[Any]]], monkeypatch: pytest.MonkeyPatch, gone: bool
) -> None:
    """It may be cancelled then: its pages are free once the device has done with them."""
    bench, programs, arrived = in_turn[0], lanes_of(in_turn[0]), [True]
    monkeypatch.setattr(programs.reading._returned, "arrived", lambda: arrived[0])  # type: ignore[attr-defined]
    (first, second), wanted = requests(2, (8,)), without_lanes(bench, requests(2, (8,)))
    loop = looped(bench, programs, [first])
    mailbox = loop.mailbox
    assert isinstance(mailbox, Told)
    assert isinstance(second, Arrive)
    while first.id not in mailbox.told:
        loop.step()
    arrived[0] = False
    mailbox.events = [second]
    while not any(request.under_way for request in map(loop.scheduler.find, [second.id]) if request):
        loop.step()
    if gone:
        mailbox.events = [Cancelled(id=second.id, epoch=0)]
    for _ in range(20):
        loop.step()
    assert mailbox.told[first.id] == wanted[first.id]
    assert second.id not in mailbox.told
    assert loop.scheduler.memory.importing == gone
    assert loop.scheduler.check().total == 0
    arrived[0] = True
    run(loop, mailbox)
    assert not loop.scheduler.memory.importing
    assert mailbox.told.get(second.id) == (None if gone else wanted[second.id])
