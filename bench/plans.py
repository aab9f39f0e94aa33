"""What the simulator predicts for a step of a model over ranks beside what it takes, and what each stage computes.

    ./dev bench plans                              1 B shape, random weights: tp2, pp2, predicted and measured
    ./dev bench plans --stages                     CPU seconds of each stage over the mean, decode and chunks
    ./dev bench plans --stages --shape moe
    ./dev bench plans --model DIR --rows 1,8 --chunks 128 --json FILE

Predicted from what is measured without a plan: a step of one process with one thread, how much slower two such
processes are at the same time, and an exchange over shared memory (``penstock.sim.resources.RankedStep``).  Steps of
all systems are measured in turns; those in which no thread was taken off its processor count.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from bench.collectives import SPINNING_US, exchange
from bench.peers.checkpoint import write_checkpoint
from bench.peers.places import SHAPES, Shape
from bench.ranks import StepTime, System, started, system

from penstock.config.fleet_file import SimRankTimes, WorkerGroup
from penstock.config.mesh import Mesh, parse_mesh
from penstock.parallel.shard import cut_stages, head_cost, layer_costs, stage_layers
from penstock.sim.resources import RankedStep
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.inspect import inspect_model

MOE = Shape(hidden=1024, layers=12, heads=16, kv_heads=4, head_dim=64, intermediate=1792, vocab=32_000, experts=8)
"""A mixture of experts with the proportions of Mixtral 8x7B, a quarter of it in each direction."""

SMALL_EXCHANGE, LARGE_EXCHANGE = 8 << 10, 128 << 10
EXCHANGES = 4_000
FLIGHTS = 9
"""Steps that follow each other through the stages where their spacing is measured."""

STAGES = ("pp2", "pp3", "pp4")
Work = tuple[int, int]
"""Rows of answers, or tokens of a chunk."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, metavar="DIR", help="default: random weights of --shape")
    parser.add_argument("--shape", choices=(*SHAPES, "moe"), default="1b", help="default: %(default)s")
    parser.add_argument("--stages", action="store_true", help="what each stage computes, instead of predictions")
    parser.add_argument("--plans", help="default: tp2,pp2 are predicted, stages are measured of pp2 pp3 pp4")
    parser.add_argument("--rows", default="1,8", help="answers in a step (default: %(default)s)")
    parser.add_argument("--chunks", default="128", help="tokens of a chunk of a prompt (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=30, help="of each kind, at least (default: %(default)s)")
    parser.add_argument("--minutes", type=float, default=4.0, help="of all steps, at most (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    works = [(int(rows), 0) for rows in args.rows.split(",") if rows]
    works += [(1, int(chunk)) for chunk in args.chunks.split(",") if chunk]
    with tempfile.TemporaryDirectory() as made:
        folder = args.model or Path(made)
        if args.model is None:
            write_checkpoint(folder, MOE if args.shape == "moe" else SHAPES[args.shape], 1, lambda *_: None)
        if args.stages:
            plans = args.plans.split() if args.plans else STAGES
            found = [figures for plan in plans for figures in stage_figures(folder, plan, works, args)]
        else:
            found = predictions(folder, works, args)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1), encoding="utf-8")


def calm_ms(steps: Sequence[StepTime]) -> float:
    """The median of steps in which no thread was taken off its processor; of all where none was left alone."""
    calm = calm_steps(steps)
    return 1e3 * statistics.median(step.seconds for step in calm or steps)


def calm_steps(steps: Sequence[StepTime]) -> list[StepTime]:
    """Those in which no thread was taken off its processor against its will."""
    return [step for step in steps if not step.switches]


# --- predictions -----------------------------------------------------------------------------------------------------


def predictions(folder: Path, works: Sequence[Work], args: argparse.Namespace) -> list[dict[str, float | str]]:
    """Prints, for each kind of step and each plan, what was predicted and what was measured."""
    spec, cores = inspect_model(folder), tuple(sorted(os.sched_getaffinity(0)))
    most = max(rows for rows, _ in works)
    one, tp2, pp2 = (system(name, folder, spec, most, cores) for name in ("1 thread", "tp2", "pp2"))
    other = one.beside(cores[-1])
    found = []
    join_s, byte_s = exchange_times(list(cores))
    print(f"an exchange of {SMALL_EXCHANGE} bytes takes {1e6 * (join_s + byte_s * SMALL_EXCHANGE):.1f} us")
    print("step              alone ms  beside   plan            predicted ms  measured ms  ratio   calm steps of all")
    with started((one, other, tp2, pp2)):
        for work in works:
            kept = measured(one, other, tp2, pp2, work, args.steps, 60 * args.minutes / len(works))
            alone, beside = calm_ms(kept["alone"]), calm_ms(kept["beside"])
            ranks = SimRankTimes(
                layers=spec.layers,
                join_s=join_s,
                join_token_s=4 * spec.hidden * byte_s,
                send_s=join_s,
                send_token_s=4 * spec.hidden * byte_s,
                beside=max(0.0, beside / alone - 1),
            )
            for plan, value in predicted(spec, ranks, alone / 1e3, work):
                ms, calm = calm_ms(kept[plan]), len(calm_steps(kept[plan]))
                own = {"step": name_of(work), "plan": plan, "predicted_ms": value, "measured_ms": ms, "calm": calm}
                found.append({**own, "alone_ms": alone, "beside": beside / alone, "steps": len(kept[plan])})
                print(
                    f"{name_of(work):16}  {alone:8.2f}  {beside / alone:5.3f}x   {plan:14}  {value:12.2f}  {ms:11.2f}"
                    f"  {value / ms:5.3f}   {calm} of {len(kept[plan])}",
                    flush=True,
                )
    return found


def exchange_times(cores: list[int]) -> tuple[float, float]:
    """Seconds of an exchange of two ranks, and more for each byte."""
    small, large = (
        float(np.median(exchange(2, nbytes, EXCHANGES, SPINNING_US, cores)[EXCHANGES // 10 :])) / 1e9
        for nbytes in (SMALL_EXCHANGE, LARGE_EXCHANGE)
    )
    byte_s = max(0.0, large - small) / (LARGE_EXCHANGE - SMALL_EXCHANGE)
    return small - byte_s * SMALL_EXCHANGE, byte_s


def name_of(work: Work) -> str:
    rows, chunk = work
    return f"chunk of {chunk}" if chunk else f"{rows} rows"


def predicted(spec: ModelSpec, ranks: SimRankTimes, alone_s: float, work: Work) -> Iterator[tuple[str, float]]:
    """Milliseconds of a step of each plan, by what it takes alone."""
    rows, chunk = work
    tokens = chunk or rows
    yield "tp2", 1e3 * RankedStep(ranks, WorkerGroup(count=1, group="tp2")).stage_s(0, alone_s, tokens)
    costs, head = layer_costs(spec, prompts=chunk > 0), head_cost(spec) * (rows / tokens if chunk else 1)
    own = [sum(costs[layer] for layer in stage) for stage in stage_layers(spec, 2)]
    own[-1] += head
    staged = RankedStep(ranks, WorkerGroup(count=1, group="pp2", stages=tuple(cost / sum(own) for cost in own)))
    yield "pp2", 1e3 * sum(staged.stage_s(stage, alone_s, tokens) for stage in range(2))
    yield "pp2, in flight", 1e3 * staged.spacing_s(alone_s, tokens)


def measured(
    one: System, other: System, tp2: System, pp2: System, work: Work, steps: int, seconds: float
) -> dict[str, list[StepTime]]:
    """Steps of all systems, in turns."""
    kept: dict[str, list[StepTime]] = {name: [] for name in ("alone", "beside", "tp2", "pp2", "pp2, in flight")}
    until = time.monotonic() + seconds
    for each in (one, other, tp2, pp2):
        each.step(*work)
    while min(len(calm_steps(own)) for own in kept.values()) < steps and time.monotonic() < until:
        kept["alone"].append(one.step(*work))
        one.ask(*work)
        other.ask(*work)
        kept["beside"].append(both(one.answer(), other.answer()))
        kept["tp2"].append(tp2.step(*work))
        kept["pp2"].append(pp2.step(*work))
        kept["pp2, in flight"].append(pp2.step(*work, FLIGHTS))
    return kept


def both(one: StepTime, other: StepTime) -> StepTime:
    """Two steps at the same time, as one that takes as long as they do on average."""
    return StepTime((one.seconds + other.seconds) / 2, one.cpu + other.cpu, one.switches + other.switches)


# --- stages ----------------------------------------------------------------------------------------------------------


def stage_figures(
    folder: Path, plan: str, works: Sequence[Work], args: argparse.Namespace
) -> Iterator[dict[str, object]]:
    """Prints CPU seconds of each stage over the mean of all, and the least that any cut of whole layers has."""
    spec, mesh = inspect_model(folder), parse_mesh(plan)
    cores = tuple(sorted(os.sched_getaffinity(0)))
    for prompts in (False, True):
        own = system(plan, folder, spec, max(rows for rows, _ in works), cores, prompts=prompts)
        cut = stage_layers(spec, mesh.pipeline, prompts=prompts)
        with started((own,)):
            for work in [work for work in works if bool(work[1]) == prompts]:
                own.step(*work)
                seconds = np.min([own.step(*work).cpu for _ in range(args.steps)], axis=0)  # others only add to it
                over = float(seconds.max() / seconds.mean())
                best = min(over, best_over_mean(layer_costs(spec, prompts=prompts), mesh, cut, seconds))
                layers = "+".join(str(len(stage)) for stage in cut)
                times = ", ".join(f"{1e3 * one:.2f}" for one in seconds)
                figures = f"{over:5.3f} of the mean, best {best:5.3f}  ({times} ms)"
                print(f"{plan}  {name_of(work):14}  layers {layers:12}  {figures}", flush=True)
                yield {"plan": plan, "step": name_of(work), "layers": layers, "over_mean": over, "best": best}


def best_over_mean(counted: Sequence[int], mesh: Mesh, cut: Sequence[range], seconds: np.ndarray) -> float:
    """The least that a cut has, by these seconds: layers with these numbers cost what the stages before the last say,
    and the head what is left of the last."""
    rate = sum(seconds[:-1]) / sum(counted[layer] for stage in cut[:-1] for layer in stage)
    costs = [rate * cost for cost in counted]
    head = max(0.0, float(seconds[-1]) - sum(costs[layer] for layer in cut[-1]))
    best = cut_stages(costs, head, mesh.pipeline)
    own = [sum(costs[layer] for layer in stage) for stage in best]
    own[-1] += head
    return max(own) / (sum(own) / len(own))


if __name__ == "__main__":
    main()
