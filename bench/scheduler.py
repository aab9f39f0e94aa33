"""How long the scheduler takes to decide: microseconds a step and a row, without any model.

    PYTHONPATH=src python bench/scheduler.py [--rows 1,16,64,256] [--steps 400]

``decode`` is the steady state: every row writes one token a step and needs a page every 16.  ``several`` grants eight
steps at once.  ``churn`` is a full life a request: it arrives with ready-made hashes, half of its prompt is cached,
it is computed in chunks, writes 16 tokens and goes.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import perf_counter

from penstock.config.schema import SchedulerConfig
from penstock.engine.core.events import AddRequest
from penstock.engine.core.plan import SampledTokens, StepPlan
from penstock.engine.core.scheduler import Scheduler
from penstock.hashing import block_hashes
from penstock.types import BlockHash, RequestId, RequestStage, SamplingParams

ROOT = BlockHash(bytes(32))
NEVER = 1e9  # milliseconds: no time budget


def arrive(number: int, prompt: tuple[int, ...], hashes: tuple[BlockHash, ...], max_tokens: int) -> AddRequest:
    return AddRequest(
        id=RequestId(f"r{number}"),
        epoch=0,
        stage=RequestStage.WHOLE,
        prompt=prompt,
        sampling=SamplingParams(seed=number, max_tokens=max_tokens),
        arrival=float(number),
        root=ROOT,
        hashes=hashes,
    )


def config(rows: int) -> SchedulerConfig:
    return SchedulerConfig(
        pages=rows * 512,
        max_model_len=8192,
        max_running=rows,
        max_step_tokens=8192,
        step_budget_ms=NEVER,
        prefill_step_budget_ms=NEVER,
    )


def draw(plan: StepPlan) -> list[SampledTokens]:
    one = SampledTokens((7,) * plan.steps)
    none = SampledTokens()
    return [one if row.samples else none for row in plan.rows]


def step(scheduler: Scheduler, max_steps: int = 1) -> tuple[StepPlan, float]:
    """One plan and commit; the seconds of those two alone."""
    begin = perf_counter()
    plan = scheduler.plan(begin, max_steps)
    middle = perf_counter()
    drawn = draw(plan)
    again = perf_counter()
    scheduler.commit(plan, drawn, again, 0.01)
    return plan, middle - begin + perf_counter() - again


def decode(rows: int, steps: int, max_steps: int = 1) -> tuple[float, float]:
    scheduler = Scheduler(config(rows))
    for number in range(rows):
        scheduler.apply(arrive(number, (number, 2, 3), (), 8000), 0.0)
    while scheduler.load().queued:
        step(scheduler)
    timed = [step(scheduler, max_steps) for _ in range(steps)]
    assert all(len(plan.rows) == rows for plan, _ in timed)
    seconds = sum(spent for _, spent in timed)
    return seconds / steps, seconds / sum(len(plan.rows) * plan.steps for plan, _ in timed)


def several(rows: int, steps: int) -> tuple[float, float]:
    return decode(rows, min(steps, 200), 8)


def churn(rows: int, steps: int) -> tuple[float, float]:
    """Seconds a step, and a request from arrival to end."""
    scheduler = Scheduler(config(rows))
    shared = tuple(range(512))
    prompts = [shared + tuple(range(number, number + 512)) for number in range(2 * rows + 64)]
    hashes = [tuple(block_hashes(ROOT, prompt)) for prompt in prompts]
    seconds, taken, done = 0.0, 0, 0
    for number, (prompt, ready) in enumerate(zip(prompts, hashes, strict=True)):
        begin = perf_counter()
        scheduler.apply(arrive(number, prompt, ready, 16), 0.0)
        seconds += perf_counter() - begin
    while scheduler.load().running + scheduler.load().queued:
        _, spent = step(scheduler)
        seconds, taken = seconds + spent, taken + 1
    done = len(prompts)
    assert scheduler.check_leaks().total == 0
    return seconds / taken, seconds / done


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="1,16,64,256")
    parser.add_argument("--steps", type=int, default=400)
    options = parser.parse_args()
    scenes: dict[str, tuple[Callable[[int, int], tuple[float, float]], str]] = {
        "decode": (decode, "row and token"),
        "several": (several, "row and token"),
        "churn": (churn, "request, 1024 prompt + 16 output tokens"),
    }
    for name, (scene, unit) in scenes.items():
        for rows in map(int, options.rows.split(",")):
            a_step, a_unit = min(scene(rows, options.steps) for _ in range(3))
            print(f"{name:8} {rows:4} rows   {a_step * 1e6:9.1f} us a step   {a_unit * 1e6:8.2f} us a {unit}")


if __name__ == "__main__":
    main()
