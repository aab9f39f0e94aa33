"""What a client sees of a running server: clients side by side, long prompts amid answers, memory, a killed worker.

``penstock bench`` is the client of every server, with the same seed and so the same token ids.
"""

from __future__ import annotations

import http.client
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from bench.peers.offline import KV_GIB, MeasureError, run
from bench.peers.places import SPLIT
from bench.peers.processes import memory_bytes, own_environment
from bench.peers.servers import NAME, Server, probe

LONG_PROMPT: Final = 2000
LONG_ANSWER: Final = 8
RUNNING: Final = 8
KILLS: Final = 3
RECOVERED_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """How much is asked of a server."""

    seed: int
    requests: int = 48  # of eight clients together: the first and the last wave are a third of that
    prompt: int = 256
    answer: int = 64
    stutter_s: float = 8.0  # at least, and one long prompt
    weight_bytes: int = 0  # of the files that the server reads


def bench(server: Server, *flags: object) -> dict[str, Any]:
    """One run of ``penstock bench``.  Raises MeasureError."""
    command = [sys.executable, "-m", "penstock", "bench", "--base-url", server.url, "--model", NAME, "--ignore-eos"]
    command += ["--json", "--disable-tqdm", "--num-warmups", "0", *map(str, flags)]
    found: dict[str, Any] = json.loads(run(command, own_environment()))
    if found["prompts"] != "token ids":
        raise MeasureError(f"{server.system}: prompts are {found['prompts']}, so their length is not known")
    return found


def clients(server: Server, load: Load, count: int, requests: int) -> dict[str, Any]:
    """Closed loop: ``count`` clients, each asking again when it has its answer."""
    shape = ("--random-input-len", load.prompt, "--random-output-len", load.answer, "--seed", load.seed)
    found = bench(server, "--num-prompts", requests, "--max-concurrency", count, *shape)
    if found["failed"]:
        raise MeasureError(f"{server.system}: {found['failed']} of {requests} requests failed: {found['errors']}")
    return {
        "output_tokens_per_s": found["output_throughput"],
        "ttft_s": _quantiles(found["ttft_s"]),
        "itl_s": _quantiles(found["itl_s"]),
        "tokens_per_event": found["tokens_per_event"],
    }


def http8(server: Server, load: Load) -> dict[str, Any]:
    return clients(server, load, 8, load.requests)


def http1(server: Server, load: Load) -> dict[str, Any]:
    return clients(server, load, 1, 2)


def stutter(server: Server, load: Load) -> dict[str, Any]:
    """Eight running answers, and a long prompt every twice the time that it takes alone."""
    one = ("--num-prompts", 1, "--max-concurrency", 1, "--random-output-len", LONG_ANSWER, "--seed", load.seed + 7)
    alone = bench(server, *one, "--random-input-len", LONG_PROMPT)["ttft_s"]["p50"]
    duration = max(load.stutter_s, 2 * alone)
    shape = ("--random-input-len", 64, "--random-output-len", 512, "--num-prompts", 4 * RUNNING, "--seed", load.seed)
    scenario = ("--long-prompt-len", LONG_PROMPT, "--long-prompt-every", 2 * alone, "--running-answers", RUNNING)
    more = ("--long-output-len", LONG_ANSWER, "--duration", duration, "--warmup", 2)
    found = bench(server, *shape, *scenario, *more)
    running, long = found["running"], found["long"]
    if long["failed"]:
        raise MeasureError(f"{server.system}: {long['failed']} long prompts failed: {long['errors']}")
    return {
        "alone_s": alone,
        "long_prompts": long["completed"],
        "long_ttft_s": _quantiles(long["ttft_s"]),
        "itl_s": _quantiles(running["itl_s"]),
        "itl_before_s": _quantiles(running["itl_before_s"]),
        "running_tokens_per_s": running["events_per_s"],
        "all_tokens_per_s": running["events_per_s"] + long["total_token_throughput"],
    }


def memory(server: Server, load: Load) -> dict[str, Any]:
    """All processes of the server together, as they are now."""
    room = {"kv_room_bytes": KV_GIB << 30, "weight_bytes": load.weight_bytes}
    return {**memory_bytes(server.process.pid), **room}


def kill(server: Server, load: Load) -> dict[str, Any]:
    """SIGKILL of each worker in turn; how long until a request sent right then is answered, and what one takes else.

    Of the answer's two tokens a prefill worker makes the first and a decode worker the second.
    """
    found: dict[str, Any] = {}
    for name in sorted(_workers(server)):
        undisturbed = [_answered(server) for _ in range(KILLS)]
        after = []
        for _ in range(KILLS):
            worker = _workers(server)[name]
            os.kill(worker, signal.SIGKILL)
            after.append(_answered(server))
            _wait_for_fork(server, name, worker)
        found[name] = {"undisturbed_s": statistics.median(undisturbed), "after_s": after}
    return found


def _answered(server: Server) -> float:
    began = time.perf_counter()
    return probe(server.port)[-1] - began


def _workers(server: Server) -> dict[str, int]:
    """Process ids of the workers that serve, by name."""
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
    try:
        connection.request("GET", "/admin/workers")
        rows = json.loads(connection.getresponse().read())["workers"]
    finally:
        connection.close()
    return {row["id"]: row["pid"] for row in rows if row["state"] == "ready"}


def _wait_for_fork(server: Server, name: str, old: int) -> None:
    end = time.monotonic() + RECOVERED_S
    while _workers(server).get(name) in (None, old):
        if time.monotonic() > end:
            raise MeasureError(f"{name} did not come back within {RECOVERED_S:g} s")
        time.sleep(0.1)


def _quantiles(summary: dict[str, float] | None) -> dict[str, float]:
    kept = ("p50", "p99", "max")
    return {name: summary[name] for name in kept} if summary else {}


Measure = Callable[[Server, Load], dict[str, Any]]

MEASURES: Final[dict[str, Measure]] = {"http1": http1, "http8": http8, "stutter": stutter, "memory": memory}
"""In this order on one server; what a client did before is in its memory."""


def online_measures(system: str) -> dict[str, Measure]:
    """What is measured of a server.  Only Penstock has workers to kill; killing them comes last."""
    return {**MEASURES, "kill": kill} if system == SPLIT else dict(MEASURES)
