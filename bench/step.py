"""Where the time of one decode step goes, in a worker's own objects: scheduler, mailbox, ZeroMQ, runner, kernels.

A gateway in this process asks for answers; the worker's loop is turned by hand and only its turns are timed.  Parts:

    drain     messages in                                kernels   the one call of the recorded step
    plan      the scheduler's decision                   commit    the tokens taken up
    arrays    from requests to arrays, and back          publish   messages out

The parts come from a run with a stopwatch around each, "step" and the allocations from another run without.  Medians
over the steps, in microseconds; the machine should have nothing else to do.

    python bench/step.py
    python bench/step.py --direct              # operation by operation instead of as recorded
    python bench/step.py --model DIR --rows 1 16 --threads 2 --temperature 0 --json
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from penstock.bundled import storyteller
from penstock.clock import MonotonicClock
from penstock.config.limits import KvTransferConfig
from penstock.config.schema import SchedulerConfig, WorkerConfig
from penstock.engine.core.cost_model import StepCostModel, cost_prior
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner
from penstock.engine.service.kv_transfer import TransferEnds
from penstock.engine.service.worker_service import WorkerService
from penstock.hashing import chain_root
from penstock.kernels.ops import DirectProgram
from penstock.kernels.select import make_ops
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.shm import InMemoryConnector
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.kv.transfer.receiver import KvReceiver
from penstock.kv.transfer.sender import KvSender
from penstock.types import ModelIdentity, RequestId, RequestStage, Role, SamplingParams, WorkerId, pack_token_ids
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import Cancel, Hello, Recipient, Submit, Tokens
from penstock.wire.zeromq import ZmqTransport

PARTS = ("drain", "plan", "arrays", "kernels", "commit", "publish")
REST = "rest"
PROMPT = 24
WARM_STEPS = 30
ALLOCATION_STEPS = 40
ALLOCATIONS = ("blocks kept", "peak bytes")


class Stopwatch:
    """Seconds by part.  A part inside another stops the outer one: parts add up to the step."""

    def __init__(self) -> None:
        self._spent = dict.fromkeys((*PARTS, REST), 0.0)
        self._open = [REST]
        self._since = 0.0

    def wrap(self, part: str, fn: Callable[..., Any]) -> Callable[..., Any]:
        """``fn``, with its time charged to ``part``."""

        def timed(*args: Any, **named: Any) -> Any:
            self._turn()
            self._open.append(part)
            try:
                return fn(*args, **named)
            finally:
                self._turn()
                self._open.pop()

        return timed

    def begin(self) -> None:
        """A step begins."""
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._since = time.perf_counter()

    def end(self) -> dict[str, float]:
        """Seconds of the step by part."""
        self._turn()
        return self._spent

    def _turn(self) -> None:
        now = time.perf_counter()
        self._spent[self._open[-1]] += now - self._since
        self._since = now


class Watched:
    """An object whose methods are timed as one part."""

    def __init__(self, inner: Any, watch: Stopwatch, part: str) -> None:
        self._inner, self._watch, self._part = inner, watch, part

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if callable(value):
            value = self._watch.wrap(self._part, value)
        setattr(self, name, value)
        return value


class Worker:
    """One worker with everything real but its process, and a gateway's link to it."""

    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        self.spec = inspect_model(folder)
        self.ops = make_ops(family=args.family, compute_dtype=args.compute, threads=args.threads)
        loaded = load_model(folder, self.spec, self.ops)
        self.model = build_model(loaded, self.ops, self.spec.max_positions)
        self.identity = ModelIdentity(fingerprint=loaded.fingerprint, numerics=self.ops.numerics)
        layout = KvLayout.for_shape(self.spec.kv, args.compute)
        length = min(self.spec.max_positions, PROMPT + 2 * (args.steps + WARM_STEPS + ALLOCATION_STEPS) + 32)
        self.length = length
        pages = max(args.rows) * -(-length // layout.page_tokens) + 8
        config = WorkerConfig(
            worker=WorkerId("w"),
            incarnation=1,
            role=Role.BOTH,
            endpoint=f"ipc://@penstock-bench-step-{os.getpid()}",
            connector="memory",
            scheduler=SchedulerConfig(pages=pages, max_model_len=length, max_running=max(args.rows)),
            hand_over=KvTransferConfig(),
        )
        self.transport = ZmqTransport(CurveKeys.ephemeral())
        memory = KvMemory.anonymous(layout, pages)
        carrier = InMemoryConnector(memory, {}, PageChecksum(self.identity, layout))
        self.scheduler = Scheduler(config.scheduler, StepCostModel(cost_prior(self.spec.parameters)))
        sender = KvSender(config.hand_over, carrier, 1)
        receiver = KvReceiver(config.hand_over, carrier)
        clock = MonotonicClock()
        hand_over = TransferEnds(self.identity, sender, receiver)
        self.mailbox = WorkerService(config, self.scheduler, hand_over, self.transport, clock)
        self.kv = kv = self.ops.new_kv(self.spec.kv, pages=pages, memory=memory.buffer)
        program = DirectProgram(self.ops, self.model, kv) if args.direct else None
        self.runner = ModelRunner(self.model, self.ops, kv, program)
        self.loop = EngineLoop(self.mailbox, self.scheduler, self.runner, clock)
        self.link = self.transport.connect(config.endpoint)
        self._asked = 0

    def ask(self, rows: int, temperature: float) -> list[RequestId]:
        """So many answers, all of them being written when this returns."""
        ids = [RequestId(f"r{self._asked + row}") for row in range(rows)]
        self._asked += rows
        self.link.send(Hello(gateway="g", incarnation=1))
        for index, request in enumerate(ids):
            prompt = tuple((index * 31 + place * 7 + 9) % self.spec.vocab for place in range(PROMPT))
            self.link.send(
                Submit(
                    recipient=Recipient(worker=WorkerId("w"), incarnation=1, identity=self.identity),
                    request=request,
                    epoch=1,
                    stage=RequestStage.WHOLE,
                    prompt=bytes(pack_token_ids(prompt)),
                    emitted=(),
                    sampling=SamplingParams(seed=index, max_tokens=self.length - PROMPT, temperature=temperature),
                    root=chain_root(self.identity),
                )
            )
        while not self.ready(rows):
            self.loop.step()
            self.hear()
        return ids

    def ready(self, rows: int) -> bool:
        """Do all of them only write?"""
        requests = [self.scheduler.get_request(RequestId(f"r{self._asked - rows + row}")) for row in range(rows)]
        return all(request is not None and request.output for request in requests)

    def forget(self, ids: list[RequestId]) -> None:
        """Cancel them all."""
        for request in ids:
            self.link.send(Cancel(request=request, epoch=1))
        while self.scheduler.load().pages_used:
            self.loop.step()
            self.hear()

    def hear(self) -> int:
        """The gateway reads its mail; messages with tokens."""
        told = 0
        while (received := self.link.recv()) is not None:
            told += isinstance(received.message, Tokens)
        return told

    @contextmanager
    def watched(self, watch: Stopwatch) -> Iterator[None]:
        """Every part times itself while this is open."""
        loop, ops, program = self.loop, self.ops, self.runner.program
        before = [dict(owner.__dict__) for owner in (loop, ops, program)]
        drained = Both(
            Watched(self.mailbox, watch, "publish"), Watched(self.mailbox, watch, "drain"), ("drain_events",)
        )
        loop.service = Both(drained, Watched(self.mailbox, watch, "plan"), ("on_plan",))
        loop.scheduler = Both(
            Watched(self.scheduler, watch, "commit"), Watched(self.scheduler, watch, "plan"), ("plan", "apply")
        )
        loop.runner = Watched(self.runner, watch, "arrays")
        for owner, name in ((ops, "_kernels"), (ops, "_compressed"), (program, "step")):
            if hasattr(owner, name):
                setattr(owner, name, Watched(getattr(owner, name), watch, "kernels"))
        try:
            yield
        finally:
            for owner, kept in zip((loop, ops, program), before, strict=True):
                owner.__dict__.clear()
                owner.__dict__.update(kept)


class Both:
    """Methods named in ``names`` of the second, all others of the first."""

    def __init__(self, first: Any, second: Any, names: tuple[str, ...]) -> None:
        self._first, self._second, self._names = first, second, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._second if name in self._names else self._first, name)


def timed_steps(worker: Worker, steps: int) -> list[float]:
    """Seconds of each step as a worker makes it."""
    result: list[float] = []
    for _ in range(steps):
        worker.hear()
        begin = time.perf_counter()
        worker.loop.step()
        result.append(time.perf_counter() - begin)
    return result


def parts_of(worker: Worker, steps: int) -> dict[str, float]:
    """Median seconds of each part."""
    watch = Stopwatch()
    seen: list[dict[str, float]] = []
    with worker.watched(watch):
        for _ in range(steps):
            worker.hear()
            watch.begin()
            worker.loop.step()
            seen.append(watch.end())
    return {part: statistics.median(one[part] for one in seen) for part in (*PARTS, REST)}


def allocations(worker: Worker, steps: int) -> dict[str, float]:
    """Blocks that are still there after a step, and the most bytes that Python had at once in one beyond before."""
    blocks, peaks = [], []
    gc.collect()
    for _ in range(steps):
        worker.hear()
        before = sys.getallocatedblocks()
        worker.loop.step()
        blocks.append(sys.getallocatedblocks() - before)
    tracemalloc.start()
    for _ in range(steps):
        worker.hear()
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        worker.loop.step()
        peaks.append(tracemalloc.get_traced_memory()[1] - before)
    tracemalloc.stop()
    return dict(zip(ALLOCATIONS, (statistics.median(blocks), statistics.median(peaks)), strict=True))


def figures(worker: Worker, rows: int, args: argparse.Namespace) -> dict[str, float]:
    """Microseconds by part, of a step with so many rows; what it allocates."""
    ids = worker.ask(rows, args.temperature)
    timed_steps(worker, WARM_STEPS)
    steps = [us for _ in range(3) for us in timed_steps(worker, args.steps // 3)]
    parts = {part: seconds * 1e6 for part, seconds in parts_of(worker, args.steps).items()}
    kept = allocations(worker, ALLOCATION_STEPS)
    worker.forget(ids)
    step = statistics.median(steps) * 1e6
    python = sum(us for part, us in parts.items() if part != "kernels")
    return {"rows": rows, "step": step, "python": python, **parts, **kept}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=storyteller(), help="folder of the model (the bundled one)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64], help="answers written at once")
    parser.add_argument("--steps", type=int, default=300, help="steps measured, each way")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)), help="of the kernels")
    parser.add_argument("--temperature", type=float, default=1.0, help="0 draws the likeliest token")
    parser.add_argument("--family", help="kernel family")
    parser.add_argument("--compute", choices=("bf16", "fp32"), default="bf16")
    parser.add_argument("--direct", action="store_true", help="operation by operation instead of as recorded")
    parser.add_argument("--json", action="store_true", help="one object a line")
    args = parser.parse_args()
    worker = Worker(args.model, args)
    columns = ("rows", "step", "python", *PARTS, REST, *ALLOCATIONS)
    if not args.json:
        print(f"{worker.ops.numerics}, {args.threads} threads, us a step")
        print(" ".join(f"{name:>12}" for name in columns))
    for rows in args.rows:
        row = figures(worker, rows, args)
        print(json.dumps(row) if args.json else " ".join(f"{row[name]:12.1f}" for name in columns), flush=True)
    worker.transport.close()


if __name__ == "__main__":
    main()
