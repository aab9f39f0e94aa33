"""Answers under long prompts: how evenly they are written when one worker does both in turn, and when it has two lanes.

The engine's own loop, scheduler and runner, without messages.  Answers are being written when long prompts come, all at
once; looked at are the tokens of the answers until the last of the prompts has been read.  All ways must draw the same.
"""

from __future__ import annotations

import select
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from bench.gpu.engine import Sizes
from bench.gpu.models import Made
from bench.gpu.place import Place

from penstock.clock import MonotonicClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.plan import Arrive, Event, Outcome, Plan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.lane_loop import LaneLoop
from penstock.engine.loop import EngineLoop
from penstock.engine.runner.device_lanes import DeviceLanes
from penstock.engine.runner.model_runner import ModelRunner
from penstock.kernels.lanes import HasLanes
from penstock.kernels.ops import Captures, Ops
from penstock.types import PAGE_TOKENS, BlockHash, Leg, RequestId, SamplingParams

IN_TURN = "in turn"
LEAST_THROUGHPUT = 0.9
WARM_TOKENS = 2
CAPTURE_S = 4.0
IDLE_S = 0.25
ROOM = 64


@dataclass(frozen=True, slots=True)
class Load:
    """Answers that are written all the time, and prompts that come then."""

    answers: int
    context: int
    prompts: int
    tokens: int  # of each of those
    chunk: int

    @classmethod
    def of(cls, place: Place, sizes: Sizes) -> Load:
        """For real, or dry."""
        few, many = (2, 4, 2), (16, 256, 8)
        return cls(*(few if place.dry else many), sizes.prompt, sizes.chunk)


@dataclass(slots=True)
class Watch:
    """A mailbox that writes down when each token came."""

    clock: MonotonicClock
    events: list[Event] = field(default_factory=list)
    times: dict[RequestId, list[float]] = field(default_factory=dict)
    tokens: dict[RequestId, list[int]] = field(default_factory=dict)

    def drain(self) -> Iterable[Event]:
        events, self.events = self.events, []
        return events

    def about_to_run(self, predicted_s: float) -> None:
        return

    def publish(self, outcome: Outcome, plan: Plan) -> None:
        now = self.clock.now()
        for item in outcome.progress:
            self.times.setdefault(item.request.id, []).extend([now] * len(item.tokens))
            self.tokens.setdefault(item.request.id, []).extend(item.tokens)


def measured(made: Made, ops: Ops, place: Place, sizes: Sizes) -> tuple[list[dict[str, Any]], bool]:
    """A line a way, the first one in turn; and whether all drew the same tokens."""
    ways = (IN_TURN, "auto") if place.dry else (IN_TURN, "priority", "green")
    load, lines, drawn = Load.of(place, sizes), list[dict[str, Any]](), list[dict[RequestId, list[int]]]()
    for way in ways:
        line, tokens = _one(way, made, ops, place, load)
        lines.append(line)
        drawn.append(tokens)
        if place.cuda:
            torch.cuda.empty_cache()
    for line in lines:
        for name in ("prompt_tokens_per_s", "answer_tokens_per_s"):
            line[f"of_{name}"] = line[name] / lines[0][name]
        line["of_p99"] = line["itl_p99_ms"] / lines[0]["itl_p99_ms"]
    return lines, all(_agree(drawn[0], other) for other in drawn[1:])


def best(lines: Sequence[dict[str, Any]]) -> tuple[float, str]:
    """p99 of the best way with lanes against that in turn, and a note; first those that keep up the throughput."""
    found = []
    for line in lines[1:]:
        kept = min(line["of_prompt_tokens_per_s"], line["of_answer_tokens_per_s"])
        found.append((kept < LEAST_THROUGHPUT, line["of_p99"], f"{line['how']}, at {kept:.2f} of the throughput"))
    _, value, note = min(found)
    return value, note


def _agree(one: dict[RequestId, list[int]], other: dict[RequestId, list[int]]) -> bool:
    return all(a == b for name in one for a, b in zip(one[name], other[name], strict=False))


def _one(way: str, made: Made, ops: Ops, place: Place, load: Load) -> tuple[dict[str, Any], dict[RequestId, list[int]]]:
    longest = load.tokens + ROOM  # what the model was made for
    answer = longest - load.context
    pages = (load.answers * longest + 2 * longest) // PAGE_TOKENS + load.answers + 2
    kv = ops.new_kv(made.spec.kv, pages=pages)
    clock = MonotonicClock()
    watch = Watch(clock)
    scheduler = Scheduler(SchedulerConfig(pages=pages, max_model_len=longest, max_chunk_tokens=load.chunk))
    loop, wakes, how = _loop(way, made, ops, kv, (watch, scheduler, clock, place))
    texts = np.random.default_rng(11).integers(0, made.spec.vocab, (load.answers + load.prompts, load.tokens))
    watch.events = [_ask(f"a{n}", texts[n, : load.context], answer) for n in range(load.answers)]
    answers = [event.id for event in watch.events]
    _until(loop, wakes, lambda: all(len(watch.times.get(name, ())) >= WARM_TOKENS for name in answers))
    begun = clock.now()
    watch.events = [_ask(f"p{n}", texts[load.answers + n], 1) for n in range(load.prompts)]
    prompts = [event.id for event in watch.events]
    _until(loop, wakes, lambda: all(name in watch.times for name in prompts))
    seconds = max(watch.times[name][0] for name in prompts) - begun
    gaps, count = list[float](), 0
    for name in answers:
        times = np.array([at for at in watch.times[name] if begun <= at <= begun + seconds])
        gaps += np.diff(times).tolist()
        count += len(times)
    p50, p99 = np.percentile(gaps, (50, 99)) if gaps else (seconds, seconds)
    return {
        "way": way,
        "how": how,
        "itl_p50_ms": float(p50) * 1e3,
        "itl_p99_ms": float(p99) * 1e3,
        "prompt_tokens_per_s": load.prompts * load.tokens / seconds,
        "answer_tokens_per_s": max(count, 1) / seconds,
    }, watch.tokens


def _loop(
    way: str, made: Made, ops: Ops, kv: Any, beside: tuple[Watch, Scheduler, MonotonicClock, Place]
) -> tuple[EngineLoop | LaneLoop, Sequence[int], str]:
    watch, scheduler, clock, place = beside
    if way == IN_TURN:
        program = ops.record(made.model, kv)
        if isinstance(program, Captures) and place.cuda:
            program.capture()
        return EngineLoop(watch, scheduler, ModelRunner(made.model, ops, kv, program), clock, max_steps=2), (), IN_TURN
    if not isinstance(ops, HasLanes):
        raise TypeError("this backend has no lanes")
    programs = ops.lanes(made.model, kv, way)
    if place.cuda:
        programs.make_ready(lambda: None, CAPTURE_S)
    runner = DeviceLanes(made.model, ops, kv, programs)
    return LaneLoop(watch, scheduler, runner, clock, max_steps=2), runner.descriptors, programs.how


def _until(loop: EngineLoop | LaneLoop, wakes: Sequence[int], over: Any) -> None:
    while not over():
        if not loop.step():
            select.select(wakes, [], [], IDLE_S)


def _ask(name: str, text_N: Any, answer: int) -> Arrive:
    return Arrive(
        id=RequestId(name),
        epoch=0,
        leg=Leg.WHOLE,
        prompt=tuple(text_N.tolist()),
        sampling=SamplingParams(seed=len(name), max_tokens=answer, temperature=1.0),
        arrival=0.0,
        root=BlockHash(bytes(32)),
    )
