"""Penstock, offline: the engine's own loop with its scheduler and runner, as an aggregated worker drives them.

No gateway, no messages: requests come out of a list and their tokens go into a count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from task import WARM_STEPS, Task, answer, prefill_rates

from penstock.clock import MonotonicClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost import StepCost, prior_for
from penstock.engine.core.plan import Arrive, Event, Outcome, Plan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner
from penstock.kernels.select import make_ops
from penstock.types import PAGE_TOKENS, BlockHash, Leg, RequestId, SamplingParams
from penstock.weights.checkpoint import compute_dtype_for, inspect_model
from penstock.weights.load import load_model

KV_TOKENS = 16_384


class ListMailbox:
    """Requests in, counts of tokens out."""

    def __init__(self) -> None:
        self.waiting: list[Event] = []
        self.told: dict[RequestId, int] = {}

    def drain(self) -> Iterable[Event]:
        events, self.waiting = self.waiting, []
        return events

    def about_to_run(self, predicted_s: float) -> None:
        pass

    def publish(self, outcome: Outcome, plan: Plan) -> None:
        for progress in outcome.progress:
            self.told[progress.request.id] = progress.index + len(progress.tokens)


class Engine:
    """One model behind the loop of a worker."""

    def __init__(self, task: Task) -> None:
        folder = Path(task.model)
        spec = inspect_model(folder)
        ops = make_ops(compute_dtype=compute_dtype_for(spec, "auto"), threads=task.threads)
        model = build_model(load_model(folder, spec, ops), ops, spec.max_positions)
        sizes = {"layers": spec.kv.layers, "kv_heads": spec.kv.kv_heads, "head_dim": spec.kv.key_dim}
        pages = KV_TOKENS // PAGE_TOKENS
        runner = ModelRunner(model, ops, ops.new_kv(pages=pages, **sizes))
        self._clock = MonotonicClock()
        self._mailbox = ListMailbox()
        scheduler = Scheduler(SchedulerConfig(pages=pages, max_model_len=4096), StepCost(prior_for(spec.parameters)))
        self._loop = EngineLoop(self._mailbox, scheduler, runner, self._clock)
        self._serial = 0

    def add(self, prompt: list[int], tokens: int) -> None:
        self._serial += 1
        request = Arrive(
            id=RequestId(f"r{self._serial}"),
            epoch=0,
            leg=Leg.WHOLE,
            prompt=tuple(prompt),
            sampling=SamplingParams(seed=0, max_tokens=tokens, temperature=0.0),
            arrival=float(self._serial),
            root=BlockHash(bytes(32)),
        )
        self._mailbox.waiting.append(request)

    def run(self, tokens: int, enough: int = 0) -> tuple[tuple[float, int], tuple[float, int]]:
        """Turn the loop until every request added has ``tokens``: (time, tokens) when each first had ``enough``, and
        in the end."""
        told = self._mailbox.told = {}
        streams = len(self._mailbox.waiting)
        marked = None
        while True:
            self._loop.step()
            least = min(told.values()) if len(told) == streams else -1
            if marked is None and least >= enough:
                marked = (time.perf_counter(), sum(told.values()))
            if marked is not None and least >= tokens:
                return marked, (time.perf_counter(), sum(told.values()))


def first_token(engine: Engine, prompt: list[int]) -> None:
    engine.add(prompt, 1)
    engine.run(1)


def decode(engine: Engine, task: Task) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for streams in task.decode:
        for prompt in task.prompts(streams):
            engine.add(prompt, WARM_STEPS + task.steps)
        (since, before), (until, after) = engine.run(WARM_STEPS + task.steps, enough=WARM_STEPS)
        found[str(streams)] = [(after - before) / (until - since)]
    return found


def main() -> None:
    task = Task.from_arguments()
    began = time.perf_counter()
    engine = Engine(task)
    load_s = time.perf_counter() - began
    engine.add(task.prompt(task.context, "warm"), 2)
    engine.run(2)
    answer(prefill_rates(task, lambda prompt: first_token(engine, prompt)), decode(engine, task), load_s)


if __name__ == "__main__":
    main()
