"""Penstock, offline: the engine's own loop with its scheduler and runner, as an aggregated worker drives them.

No gateway, no messages: requests come out of a list and their tokens go into a count.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from task import WARM_STEPS, Task, prefill_rates, serve

from penstock.clock import MonotonicClock
from penstock.config.schema import SchedulerConfig
from penstock.engine.core.cost_model import StepCostModel, cost_prior
from penstock.engine.core.events import AddRequest, CancelRequest, EngineEvent
from penstock.engine.core.plan import StepOutcome, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.loop import EngineLoop
from penstock.engine.models.registry import build_model
from penstock.engine.runner.model_runner import ModelRunner
from penstock.kernels.select import make_ops
from penstock.types import PAGE_TOKENS, BlockHash, RequestId, RequestStage, SamplingParams
from penstock.weights.inspect import compute_dtype_for, inspect_model
from penstock.weights.load import load_model

KV_TOKENS = 16_384
MAX_MODEL_LEN = 4096


class ListMailbox:
    """Requests in, counts of tokens out."""

    def __init__(self) -> None:
        self.waiting: list[EngineEvent] = []
        self.told: dict[RequestId, int] = {}

    def drain_events(self) -> Iterable[EngineEvent]:
        events, self.waiting = self.waiting, []
        return events

    def on_plan(self, plan: StepPlan) -> None:
        pass

    def on_step_begin(self, predicted_s: float) -> None:
        pass

    def publish(self, outcome: StepOutcome, plan: StepPlan) -> None:
        for progress in outcome.new_tokens:
            self.told[progress.request.id] = progress.index + len(progress.tokens)


class Engine:
    """One model behind the loop of a worker."""

    def __init__(self, task: Task) -> None:
        folder = Path(task.model)
        spec = inspect_model(folder)
        ops = make_ops(
            compute_dtype=compute_dtype_for(spec, "auto"),
            threads=task.threads,
            activation_dtype="int8" if task.int8 else None,
        )
        model = build_model(load_model(folder, spec, ops), ops, spec.max_positions)
        pages = KV_TOKENS // PAGE_TOKENS
        runner = ModelRunner(model, ops, ops.new_kv(spec.kv, pages=pages))
        self._clock = MonotonicClock()
        self._mailbox = ListMailbox()
        scheduler = Scheduler(
            SchedulerConfig(pages=pages, max_model_len=MAX_MODEL_LEN), StepCostModel(cost_prior(spec.parameters))
        )
        self._loop = EngineLoop(self._mailbox, scheduler, runner, self._clock)
        self._serial = 0

    def add(self, prompt: list[int], tokens: int) -> None:
        """Hand a request over; it is read with the next steps."""
        self._serial += 1
        request = AddRequest(
            id=RequestId(f"r{self._serial}"),
            epoch=0,
            stage=RequestStage.WHOLE,
            prompt=tuple(prompt),
            sampling=SamplingParams(seed=0, max_tokens=tokens, temperature=0.0),
            arrival=float(self._serial),
            root=BlockHash(bytes(32)),
        )
        self._mailbox.told[request.id] = 0
        self._mailbox.waiting.append(request)

    def run(self, tokens: int) -> None:
        """Turn the loop until every stream has ``tokens`` at least."""
        told = self._mailbox.told
        while min(told.values()) < tokens:
            self._loop.step()

    def timed(self, steps: int) -> float:
        """Tokens/s of so many steps.  Raises RuntimeError when one of them was not a token of every stream."""
        told = self._mailbox.told
        since = time.perf_counter()
        for _ in range(steps):
            before = list(told.values())
            self._loop.step()
            if [new - old for new, old in zip(told.values(), before, strict=True)] != [1] * len(told):
                raise RuntimeError(f"a step did not write one token of each of {len(told)} streams")
        return steps * len(told) / (time.perf_counter() - since)

    def leave(self) -> None:
        """Forget every stream, whether it has ended or not."""
        self._mailbox.waiting += [CancelRequest(id=request, epoch=0) for request in self._mailbox.told]
        self._mailbox.told.clear()
        self._loop.step()


def first_token(engine: Engine, prompt: list[int]) -> None:
    engine.add(prompt, 1)
    engine.run(1)
    engine.leave()


def decode(engine: Engine, task: Task) -> dict[str, list[float]]:
    """Prompts are read a piece a step, and those that are read write meanwhile; so answers are longer than what is
    timed, and the clock starts when the last of them is on its way."""
    found: dict[str, list[float]] = {}
    for streams in task.decode:
        for prompt in task.prompts(streams):
            engine.add(prompt, MAX_MODEL_LEN - len(prompt))
        engine.run(WARM_STEPS)
        found[str(streams)] = [engine.timed(task.steps)]
        engine.leave()
    return found


def main() -> None:
    task = Task.from_arguments()
    began = time.perf_counter()
    engine = Engine(task)
    load_s = time.perf_counter() - began
    engine.add(task.prompt(task.context, "warm"), 2)
    engine.run(2)
    engine.leave()
    serve(
        task,
        load_s,
        lambda asked: prefill_rates(asked, lambda prompt: first_token(engine, prompt)),
        lambda asked: decode(engine, asked),
    )


if __name__ == "__main__":
    main()
