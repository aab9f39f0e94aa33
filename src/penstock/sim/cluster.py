"""A whole run: a trace, a fleet and a policy in; what every client and every worker saw out."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.config.limits import RoutingConfig
from penstock.errors import ConfigError
from penstock.sim.fleet import SimulatedFleet, check_fleet
from penstock.sim.gateway import SimGateway
from penstock.sim.resources import EventQueue, SharedMachine
from penstock.sim.results import LatencyTargets, RunResults, quantiles
from penstock.sim.trace import Trace, TracePrompts
from penstock.sim.worker import SimContext, SimWorker, WorkerPlace, make_worker
from penstock.types import PAGE_TOKENS, RequestId, WorkerId

MOST_INDEXED = 1 << 24


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSetup:
    """What is simulated."""

    fleet: SimulatedFleet
    policy: str = "penstock"
    always_split: bool = False
    rate_scale: float = 1.0  # the factor by which arrivals are faster than in the trace
    targets: LatencyTargets = field(default_factory=LatencyTargets)
    page_tokens: int | None = None  # None: the trace's blocks where it has any, or a page as workers have it


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRun:
    """What came of it."""

    setup: SimulationSetup
    trace: str
    results: RunResults
    workers: tuple[SimWorker, ...]
    splits: int
    decisions: int
    ideal_tokens: int
    end_s: float  # the last answer's end; the first request came at 0
    wall_s: float  # that simulating took

    @property
    def hit_tokens(self) -> int:
        """Prompt tokens that were not computed where the prompt was read first."""
        return sum(each.cached for each in self.results.requests.values())


def simulate(trace: Trace, setup: SimulationSetup, progress: Callable[[int], None] | None = None) -> SimulationRun:
    """Run the whole trace; ``progress`` is called with the number of requests that have newly come.

    The same arguments give the same run.  Raises ConfigError for what cannot be simulated.
    """
    began = time.perf_counter()
    page_tokens = _page_tokens(trace, setup)
    agenda = EventQueue()
    routing = RoutingConfig(
        policy=setup.policy,  # type: ignore[arg-type]  # the caller has checked it against ``baselines.NAMES``
        split="always" if setup.always_split else "auto",
        max_indexed_blocks=MOST_INDEXED,
        max_indexed_workers=6 * setup.fleet.count,  # each has three tiers, and begins twice: also with all that it has
        remembered_requests=0,
    )
    gateway = SimGateway(routing, agenda, setup.fleet.links, page_tokens)
    crowd = SharedMachine(setup.fleet.steps.beside)
    stage = SimContext(agenda, gateway, crowd, {RequestId(f"{job.number}"): job.output for job in trace.requests})
    workers = tuple(make_worker(place, setup.fleet, page_tokens, stage) for place in _places(setup.fleet))
    measures = RunResults(setup.targets)
    gateway.add_workers(workers, measures)
    prompts = TracePrompts(trace, page_tokens)

    def arrive(place: int) -> None:
        if place + 1 < len(trace.requests):
            agenda.call_at(trace.requests[place + 1].at / setup.rate_scale, arrive, place + 1)
        gateway.serve(prompts.request(place, agenda.now))
        if progress is not None:
            progress(1)

    agenda.call_at(0.0, arrive, 0)
    with _little_garbage():
        while agenda.run_next():
            pass
    if gateway.open:
        raise RuntimeError(f"{gateway.open} requests have no end: a fault of the simulator or of the scheduler")
    return SimulationRun(
        setup=setup,
        trace=trace.name,
        results=measures,
        workers=workers,
        splits=gateway.splits,
        decisions=gateway.decisions,
        ideal_tokens=prompts.ideal_tokens,
        end_s=max(each.last_at for each in measures.requests.values()),
        wall_s=time.perf_counter() - began,
    )


@contextmanager
def _little_garbage() -> Iterator[None]:
    """What a run makes is kept to its end, so looking for garbage among it is in vain: it is looked for rarely."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def _places(fleet: SimulatedFleet) -> list[WorkerPlace]:
    counts: dict[str, int] = {}
    places = []
    for group in check_fleet(fleet).workers:
        for _ in range(group.count):
            number = counts[group.role] = counts.get(group.role, -1) + 1
            places.append(WorkerPlace(WorkerId(f"{group.role.value}-{number}"), group.role, group))
    return places


def _page_tokens(trace: Trace, setup: SimulationSetup) -> int:
    """Raises ConfigError for pages that do not fit the trace's blocks or the workers' memory."""
    size = setup.page_tokens or trace.block_tokens or PAGE_TOKENS
    if size < PAGE_TOKENS or size % PAGE_TOKENS or (trace.block_tokens and trace.block_tokens % size):
        whole = f" and divide the trace's blocks of {trace.block_tokens}" if trace.block_tokens else ""
        raise ConfigError(f"--page-tokens {size}: must be a multiple of {PAGE_TOKENS}{whole}")
    memory, fleet = setup.fleet.memory, setup.fleet.name
    held = memory.device_bytes // (memory.token_bytes * size) * size
    longest = max(job.prompt + job.output for job in trace.requests)
    most = min(held, setup.fleet.scheduler.max_model_len)
    if longest >= most:
        raise ConfigError(
            f"fleet {fleet}: a worker takes requests of {most} tokens (memory.device_bytes, "
            f"scheduler.max_model_len), but the trace has one of {longest}"
        )
    return size


def _share(run: SimulationRun, seconds: Sequence[float]) -> float:
    """Share of the run's time, averaged over the workers."""
    return sum(seconds) / len(seconds) / run.end_s if run.end_s else 0.0


def run_json(run: SimulationRun) -> dict[str, Any]:
    """The figures of a run; seconds, shares, requests a second."""
    measures, setup = run.results, run.setup
    requests = list(measures.requests.values())
    prompt_tokens = sum(each.prompt for each in requests)
    good = measures.within_targets()
    reads = [sum(worker.tier_reads()[tier] for worker in run.workers) for tier in range(2)]
    page = run.workers[0].config.page_tokens
    return {
        "trace": run.trace,
        "fleet": setup.fleet.name,
        "workers": len(run.workers),
        "roles": {group.role.value: group.count for group in setup.fleet.workers},
        "policy": setup.policy,
        "rate_scale": setup.rate_scale,
        "requests": len(requests),
        "failed": sum(not each.done for each in requests),
        "split": run.splits,
        "prompt_tokens": prompt_tokens,
        "answer_tokens": sum(each.tokens for each in requests),
        "ttft_s": quantiles(measures.ttfts()),
        "itl_s": quantiles(*measures.intervals),
        "targets": {"ttft_s": measures.targets.ttft_s, "itl_s": measures.targets.itl_s},
        "goodput": len(good) / run.end_s if run.end_s else 0.0,
        "good_share": len(good) / len(requests),
        "smooth_share": len(measures.smooth()) / len(requests),
        "hit_ratio": run.hit_tokens / prompt_tokens,
        "ideal_hit_ratio": run.ideal_tokens / prompt_tokens,
        "read_from_host_tokens": reads[0] * page,
        "read_from_disk_tokens": reads[1] * page,
        "utilisation": _share(run, [worker.busy.seconds for worker in run.workers]),
        "link_utilisation": _share(run, [max(worker.into.busy_s, worker.out.busy_s) for worker in run.workers]),
        "host_utilisation": _share(run, [worker.wires[0].busy_s for worker in run.workers]),
        "disk_utilisation": _share(run, [worker.wires[1].busy_s for worker in run.workers]),
        "preemptions": sum(worker.scheduler.preemptions for worker in run.workers),
        "steps": sum(worker.steps for worker in run.workers),
        "decisions": run.decisions,
        "page_tokens": page,
        "simulated_s": run.end_s,
        "wall_s": run.wall_s,
    }
