"""What the scheduler's policy does to clients who ask again when they have their answer, on a machine of known speed.

The schedulers are the engine's own; the clock is virtual, and a step takes what the curves below say.  Split: a prefill
and a decode worker with a core each, and while one has nothing to do its core works for the other.  Nothing else is
simulated: no messages, no HTTP, no noise.  So it tells policies apart in seconds, on a machine that others use, and is
no measurement.

    python bench/closed_loop.py                              # split and aggregated, defaults
    python bench/closed_loop.py --prefill-budget-ms 500 --requests 96
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel, cost_prior
from penstock.engine.core.events import AddRequest, CreditGranted, FirstTokenArrived, PagesArrived, PagesReleased
from penstock.engine.core.plan import SampledTokens, StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.types import BlockHash, RequestId, RequestStage, SamplingParams

PARAMETERS = 1_236_000_000
ROWS = (1, 4, 8, 16, 32, 40, 48, 64, 72, 128, 256, 2048)
ONE_CORE_MS = (45, 48, 62, 90, 140, 168, 200, 264, 297, 527, 1053, 8430)
TWO_CORES_MS = (26, 28, 40, 61, 103, 125, 140, 170, 186, 300, 602, 4820)
"""A step of so many rows: the 1 B shape, compressed, on the two cores that docs/benchmarks.md tells of."""

GUEST = 1.05  # a lent core against an own one
TURN_S = 0.002  # from a token to the next request's arrival


def step_s(rows: int, cores: int, slower: float) -> float:
    """Seconds of a step."""
    curve = ONE_CORE_MS if cores == 1 else TWO_CORES_MS
    return slower * float(np.interp(rows, ROWS, curve)) / 1000


@dataclass(slots=True)
class Worker:
    """One scheduler and what it is computing."""

    scheduler: Scheduler
    cores: int
    plan: StepPlan | None = None
    begun: float = 0.0
    done: float = 0.0  # part of the step
    steps: list[tuple[float, int, int]] = field(default_factory=list)  # seconds, answers' rows, prompts' rows
    rests_until: float = 0.0

    def left_s(self, alone: bool, slower: float) -> float:
        """Seconds to the end of the step, should nothing change."""
        assert self.plan is not None
        rows = sum(row.count for row in self.plan.rows)
        seconds = step_s(rows, self.cores, slower)
        if self.cores == 1 and alone:
            seconds = min(seconds, GUEST * step_s(rows, 2, slower))
        return seconds * (1 - self.done)


@dataclass(slots=True)
class Client:
    """What it saw."""

    asked: float = 0.0
    last: float = 0.0


class Loop:
    """Closed loop: ``clients`` who ask ``requests`` times in all."""

    def __init__(self, args: argparse.Namespace, split: bool) -> None:
        self.args, self.split, self.now = args, split, 0.0
        names = ("decode", "prefill") if split else ("both",)
        self.workers = {name: Worker(self._scheduler(), 1 if split else 2) for name in names}
        self.arrivals: list[tuple[float, int]] = [(0.001 * c, c) for c in range(args.clients)]
        self.clients = {c: Client() for c in range(args.clients)}
        self.serial = itertools.count()
        self.owner: dict[RequestId, int] = {}
        self.ttft: list[float] = []
        self.itl: list[float] = []
        self.tokens = 0

    def _scheduler(self) -> Scheduler:
        args = self.args
        config = SchedulerConfig(
            pages=4096,
            max_model_len=4096,
            step_budget_ms=args.budget_ms,
            prefill_step_budget_ms=args.prefill_budget_ms,
            even_pace=self.split and args.even_pace,
        )
        return Scheduler(config, StepCostModel(cost_prior(PARAMETERS)))

    def run(self) -> None:
        """Until the last answer is there."""
        while len(self.ttft) < self.args.requests or self.owner:
            self._arrive()
            for name, worker in self.workers.items():
                self._begin(name, worker)
            self._advance()

    def _arrive(self) -> None:
        while self.arrivals and self.arrivals[0][0] <= self.now:
            _, client = self.arrivals.pop(0)
            number = next(self.serial)
            if number >= self.args.requests:
                continue
            self.clients[client].asked = self.now
            name = RequestId(f"r{number}")
            self.owner[name] = client
            prompt = tuple((number * 7919 + i * 31) % 60_000 for i in range(self.args.prompt))
            for leg, worker in self._legs():
                request = AddRequest(
                    id=name,
                    epoch=0,
                    stage=leg,
                    prompt=prompt,
                    sampling=SamplingParams(seed=0, max_tokens=self.args.answer, temperature=0.0),
                    arrival=self.now,
                    root=BlockHash(bytes(32)),
                )
                self.workers[worker].scheduler.apply(request, self.now)

    def _legs(self) -> tuple[tuple[RequestStage, str], ...]:
        return (
            ((RequestStage.DECODE, "decode"), (RequestStage.PREFILL, "prefill"))
            if self.split
            else ((RequestStage.WHOLE, "both"),)
        )

    def _begin(self, name: str, worker: Worker) -> None:
        if worker.plan is not None:
            return
        plan = worker.scheduler.plan(self.now)
        for request in plan.reserved:
            self.workers["prefill"].scheduler.apply(CreditGranted(id=request.id, epoch=0), self.now)
        if not plan.rows:
            self._take(name, worker.scheduler.commit(plan, (), self.now))
            worker.rests_until = worker.scheduler.resting_until or 0.0
            return
        worker.plan, worker.begun, worker.done = plan, self.now, 0.0

    def _advance(self) -> None:
        """To the next end of a step, arrival or turn."""
        busy = {name: worker for name, worker in self.workers.items() if worker.plan is not None}
        slower = self.args.slower
        ends = {name: worker.left_s(len(busy) == 1, slower) for name, worker in busy.items()}
        times = [self.now + left for left in ends.values()] + [at for at, _ in self.arrivals[:1]]
        times += [worker.rests_until for worker in self.workers.values() if worker.rests_until > self.now]
        until = min(times)
        for name, worker in busy.items():
            worker.done += (1 - worker.done) * min(1.0, (until - self.now) / max(ends[name], 1e-12))
        self.now = max(until, self.now)
        for name, worker in busy.items():
            if ends[name] + 1e-9 >= 0 and worker.done > 1 - 1e-9:
                self._end(name, worker)

    def _end(self, name: str, worker: Worker) -> None:
        plan = worker.plan
        assert plan is not None
        worker.plan = None
        seconds = self.now - worker.begun
        rows = [row.count for row in plan.rows]
        worker.steps.append((seconds, rows.count(1), sum(count for count in rows if count > 1)))
        drawn = [SampledTokens((7,)) if row.samples else SampledTokens() for row in plan.rows]
        self._take(name, worker.scheduler.commit(plan, drawn, self.now, seconds))

    def _take(self, name: str, outcome: StepOutcome) -> None:
        for progress in outcome.new_tokens:
            request = progress.request
            if name == "decode" and progress.index == 0:
                continue  # the prefill worker has told the client
            self._token(request.id, progress.index, ended=name != "prefill" and progress.finish is not None)
            if name == "prefill":
                decode = self.workers["decode"].scheduler
                decode.apply(PagesArrived(id=request.id, epoch=0, computed=len(request.prompt)), self.now)
                decode.apply(FirstTokenArrived(id=request.id, epoch=0, token=7), self.now)
                self.workers["prefill"].scheduler.apply(PagesReleased(id=request.id, epoch=0), self.now)

    def _token(self, request: RequestId, index: int, *, ended: bool) -> None:
        number = self.owner[request]
        client = self.clients[number]
        (self.ttft if index == 0 else self.itl).append(self.now - (client.asked if index == 0 else client.last))
        client.last = self.now
        self.tokens += 1
        if ended:
            del self.owner[request]
            self.arrivals.append((self.now + TURN_S, number))

    def line(self) -> str:
        """For people."""
        parts = [f"{self.tokens / self.now:6.1f} tokens/s"]
        parts += [f"TTFT {quantiles(self.ttft, 's', 1)}", f"ITL {quantiles(self.itl, 'ms', 1000)}"]
        for name, worker in self.workers.items():
            busy = sum(seconds for seconds, _, _ in worker.steps) / self.now
            prompts = [count for _, _, count in worker.steps if count]
            parts.append(f"{name}: busy {busy:.0%}, median chunk {int(np.median(prompts)) if prompts else 0}")
        return "; ".join(parts)


def quantiles(values: Iterable[float], unit: str, by: float) -> str:
    p50, p99, most = (float(np.quantile(list(values), q)) * by for q in (0.5, 0.99, 1.0))
    return f"{p50:.2f}/{p99:.2f}/{most:.2f} {unit}"


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--budget-ms", type=float, default=SchedulerConfig(pages=1).step_budget_ms)
    parser.add_argument("--prefill-budget-ms", type=float, default=SchedulerConfig(pages=1).prefill_step_budget_ms)
    parser.add_argument("--even-pace", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--slower", type=float, default=1.0, help="than the curves say")
    return parser


def main() -> None:
    args = build_parser().parse_args()
    print("p50/p99/max")
    for split in (True, False):
        loop = Loop(args, split)
        loop.run()
        print(f"{'split' if split else 'aggregated':11s}{loop.line()}")


if __name__ == "__main__":
    main()
