"""Short ways to say traces and fleets in the simulator's tests."""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec

from penstock.config.fleet_file import SimMemory
from penstock.sim.cluster import SimulationRun, SimulationSetup, simulate
from penstock.sim.fleet import SimulatedFleet, load_fleet, parse_workers
from penstock.sim.trace import BLOCK_TOKENS, Trace, TraceRequest


def trace(*jobs: tuple[float, int, int] | tuple[float, int, int, tuple[int, ...]], blocks: int = 0) -> Trace:
    """Of (seconds, prompt, answer[, blocks]); blocks of ``blocks`` tokens."""
    made = tuple(TraceRequest(n, job[0], job[1], job[2], job[3] if len(job) > 3 else ()) for n, job in enumerate(jobs))
    return Trace("made up", made, blocks)


def conversations(seed: int, requests: int = 60, rate: float = 6.0) -> Trace:
    """Turns of several conversations that begin alike."""
    rng = Random(seed)
    at, fresh, jobs, talks = 0.0, 1, [], [[0]]
    for number in range(requests):
        at += rng.expovariate(rate)
        talk = list(rng.choice(talks)) if rng.random() < 0.7 else [0]
        talk += range(fresh, fresh := fresh + rng.randrange(1, 8))
        talks.append(talk)
        jobs.append(
            TraceRequest(number, at, len(talk) * BLOCK_TOKENS - rng.randrange(500), rng.randrange(1, 200), tuple(talk))
        )
    return Trace("conversations", tuple(jobs), BLOCK_TOKENS)


def fleet(workers: str = "2", *, tokens: int = 1 << 19, host: int = 0, disk: int = 0, **limits: Any) -> SimulatedFleet:
    """The default's times; memory in tokens."""
    default = load_fleet("default")
    size = default.memory.token_bytes
    memory = SimMemory(token_bytes=size, device_bytes=tokens * size, host_bytes=host * size, disk_bytes=disk * size)
    scheduler = msgspec.structs.replace(default.scheduler, **limits)
    return msgspec.structs.replace(default.with_groups(*parse_workers(workers)), memory=memory, scheduler=scheduler)


def simulated(of: Trace, workers: SimulatedFleet, **setup: Any) -> SimulationRun:
    """A run."""
    return simulate(of, SimulationSetup(fleet=workers, **setup))


def seen(run: SimulationRun) -> list[tuple[float, float, int, int]]:
    """What each client saw: the first and the last token's times, tokens, cached tokens."""
    return [(each.first_at, each.last_at, each.tokens, each.cached) for each in run.results.requests.values()]
