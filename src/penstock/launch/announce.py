"""What the start-up log tells a person: what runs where, what was decided, and how to talk to it.  Text only."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable, Iterator

from penstock.config.resolve import ServePlan, show_bytes
from penstock.launch.locate import Located
from penstock.weights.spec import ModelSpec

ONLY_STORIES = (
    "the bundled storyteller only tells short stories; to serve a real model: "
    "penstock serve PATH (a Hugging Face folder) or penstock serve ORG/NAME (from the Hub)"
)


def model_lines(
    located: Located, name: str, spec: ModelSpec, max_model_len: int, notes: Iterable[str]
) -> Iterator[str]:
    """What will be served, before anything is loaded."""
    yield (
        f"model {name}: {spec.architecture}, {spec.parameters / 1e6:,.1f} M parameters, "
        f"context {max_model_len} tokens, from {located.path}"
    )
    if located.bundled:
        yield ONLY_STORIES
    yield from notes


def fleet_lines(plan: ServePlan, pid: Callable[[str], int | None]) -> Iterator[str]:
    """One line a worker, and one for what they share."""
    threads = plan.workers[0].threads
    yield (
        f"kernels {plan.family}, {plan.dtype}, {threads} thread{'s' if threads > 1 else ''} a worker; "
        f"KV pages {plan.scheduler.pages} a worker ({show_bytes(plan.scheduler.pages * plan.page_bytes)}), "
        + (f"handed over by {plan.carrier}" if plan.split else "not handed over: one worker does both phases")
    )
    for worker in plan.workers:
        cpus = f", processors {_ranges(worker.cpus)}" if worker.cpus else ""
        yield f"{worker.worker}: pid {pid(worker.worker)}{cpus}"


def join_lines(endpoints: Iterable[str]) -> Iterator[str]:
    """Whose workers are used."""
    yield f"no workers here; asked to join: {', '.join(endpoints)}"


def worker_lines(endpoint: str, keys: str, *, seconds: float) -> Iterator[str]:
    """Ready, and how a gateway joins it."""
    yield f"ready after {seconds:.1f} s at {endpoint}"
    yield f"join it: penstock serve MODEL --keys {keys} --join {endpoint}"


def talk_lines(url: str, model: str, *, needs_key: bool, seconds: float) -> Iterator[str]:
    """Ready, and how to talk to it."""
    yield f"ready after {seconds:.1f} s: {url}"
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    body = json.dumps({"model": model, "messages": messages, "stream": True})
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if needs_key else ""
    at = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    yield f"talk to it: penstock chat{at}"
    yield f"or: curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _ranges(cpus: tuple[int, ...]) -> str:
    """ "0-3,8" for (0, 1, 2, 3, 8)."""
    runs: list[list[int]] = []
    for cpu in cpus:
        if runs and runs[-1][1] == cpu - 1:
            runs[-1][1] = cpu
        else:
            runs.append([cpu, cpu])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
