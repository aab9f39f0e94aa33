"""The lines of the start-up log: what runs where, what was decided, and how to use it."""

from __future__ import annotations

import ipaddress
import json
import logging
import shlex
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from penstock import __version__
from penstock.config.base import host_and_port
from penstock.config.cpu_cores import format_cpus
from penstock.config.kv_memory import format_size
from penstock.config.resolve import ServePlan, WorkerPlan
from penstock.kv_spec import FULL_ATTENTION
from penstock.launch.model_path import ModelLocation
from penstock.launch.sparse_attention import sparse_line
from penstock.types import Task
from penstock.weights.architecture.spec import ModelSpec

PROGRESS_EVERY_S = 2.0
"""Between two progress lines of a long load."""

log = logging.getLogger(__name__)

BUNDLED_MODEL_NOTE = (
    "the bundled storyteller only tells short stories; to serve a real model: "
    "penstock serve PATH (a Hugging Face folder) or penstock serve ORG/NAME (from the Hub)"
)


def model_lines(
    located: ModelLocation,
    name: str,
    spec: ModelSpec,
    max_model_len: int,
    notes: Iterable[str],
    *,
    generation_config: str = "none",
) -> Iterator[str]:
    """The model, before it is loaded.  ``generation_config``: as ``config.schema.RequestConfig``."""
    yield (
        f"penstock {__version__}, model {name}: {spec.architecture}, {spec.parameters / 1e6:,.1f} M parameters, "
        f"context {max_model_len} tokens, from {located.path}"
    )
    if located.bundled:
        yield BUNDLED_MODEL_NOTE
    if spec.sparse is not None:
        yield sparse_line(spec.sparse)
    suggested = spec.sampling.words()
    if suggested and generation_config == "auto" and spec.task is Task.GENERATE:
        yield f"sampling defaults of its generation_config.json: {suggested} (--generation-config none: OpenAI's)"
    yield from notes


def fleet_lines(plan: ServePlan, pid: Callable[[str], int | None]) -> Iterator[str]:
    """One line per worker, and one for what they share."""
    if plan.scheduler.pooling is not None:
        yield f"kernels {plan.family}, {plan.dtype}; a pooling model: one phase, no decode workers"
    else:
        yield _memory_line(plan)
    for worker in plan.workers:
        here = "" if worker.nodes.nodes == 1 else f", {len(worker.ranks)} here"
        ranks = f"{worker.mesh.name}: {worker.mesh.ranks} ranks{here}, together " if worker.ranks else ""
        yield f"{worker.worker}: pid {pid(worker.worker)}, {ranks}{_cores(worker)}"


def _memory_line(plan: ServePlan) -> str:
    kept = "" if plan.kv_dtype == plan.dtype else f" in {plan.kv_dtype}"
    reading = (
        "" if plan.prefill_plan is None else f" (prefill: {plan.prefill_plan.family} on {plan.prefill_plan.device})"
    )
    inputs = "" if plan.activation_dtype is None else f", inputs of quantized weights {plan.activation_dtype}"
    scheduler = plan.scheduler
    size = format_size(scheduler.pages * plan.page_bytes)
    if scheduler.reaches == (FULL_ATTENTION,):  # with windowed layers a request holds fewer pages
        tokens = scheduler.pages * scheduler.page_tokens
        size += f": {tokens:,} tokens, {tokens // scheduler.max_model_len:,} requests of {scheduler.max_model_len:,}"
    return (
        f"on {plan.device}, kernels {plan.family}{reading}, {plan.dtype}{inputs}; KV pages{kept} "
        f"{scheduler.pages} a worker ({size}), "
        + (f"handed over by {plan.connector}" if plan.split else "not handed over: one worker does both phases")
    )


def join_lines(endpoints: Iterable[str], members: str | None) -> Iterator[str]:
    """Where the workers on other hosts are: at these endpoints, or where ``members`` says."""
    where = ", ".join(endpoints) if members is None else f"those of {members}"
    yield f"no workers here; waiting for {where} to join"


def worker_lines(endpoint: str, model: str | None, keys: str | None, *, took: str) -> Iterator[str]:
    """The last lines of ``penstock worker``: ready, and how to join it.

    ``model`` as given; None: bundled.  ``keys``: those that all hosts share, if they do.
    """
    yield f"ready after {took}, at {endpoint}"
    words = ["penstock", "serve"]
    if model is not None:
        folder = Path(model).expanduser()
        words.append(str(folder.absolute()) if folder.exists() else model)
    folder_of_keys = "DIR" if keys is None else str(Path(keys).expanduser().absolute())
    words += ["--keys", folder_of_keys, "--join", _reachable(endpoint)]
    yield f"join it: {shlex.join(words)}"


def _reachable(endpoint: str) -> str:
    """The endpoint for other hosts: this host's name if the worker listens on all addresses."""
    host, port = host_and_port(endpoint)
    try:
        everywhere = host == "*" or ipaddress.ip_address(host).is_unspecified
    except ValueError:  # a name
        everywhere = False
    return f"tcp://{socket.gethostname()}:{port}" if everywhere else endpoint


def client_lines(
    url: str, served: tuple[str, Task], *, needs_key: bool, took: str, state: str = "ready"
) -> Iterator[str]:
    """The last lines of ``penstock serve``: ready, and commands to try.  ``served``: the model's name and task."""
    yield f"{state} after {took}: {url}" + (", with a key" if needs_key else "") + f"; metrics: {url}/metrics"
    model, task = served
    key = ' -H "Authorization: Bearer $PENSTOCK_API_KEY"' if needs_key else ""
    if task is Task.TRANSCRIBE:
        yield f"try it: curl {url}/v1/audio/transcriptions{key} -F model={shlex.quote(model)} -F file=@FILE.wav"
        return
    if task is not Task.GENERATE:
        path = "/v1/embeddings" if task is Task.EMBED else "/classify"
        body = json.dumps({"model": model, "input": "A fox."})
        yield f"try it: curl {url}{path} -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"
        return
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    body = json.dumps({"model": model, "messages": messages, "stream": True})
    at = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    yield f"talk to it: {'PENSTOCK_API_KEY=KEY ' if needs_key else ''}penstock chat{at}"
    yield f"or: curl -N {url}/v1/chat/completions -H 'Content-Type: application/json'{key} -d {shlex.quote(body)}"


def _cores(worker: WorkerPlan) -> str:
    """The worker's own threads, and the cores that it may borrow."""
    own = f"{worker.threads} thread{'s' if worker.threads > 1 else ''}"
    if worker.cpus:
        own += f" on processors {format_cpus(worker.cpus)}"
    if worker.niceness:
        own += f", nice {worker.niceness}"
    borrowed = sum(loan.cores for loan in worker.loans)
    return own + (f", {borrowed} more while other workers are idle" if borrowed else "")


class StartupTimer:
    """Measures the phases of a start, from ``began``."""

    def __init__(self, began: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._began = self._last = began
        self._clock = clock
        self._parts: list[str] = []

    def end_phase(self, phase: str) -> None:
        """End the current phase and begin the next."""
        now = self._clock()
        self._parts.append(f"{phase} {now - self._last:.2f}")
        self._last = now

    def __str__(self) -> str:
        return f"{self._last - self._began:.2f} s ({', '.join(self._parts)})"


class LoadProgressLog:
    """Called while weights are loaded: polls the supervisor, and logs the progress of a long load."""

    def __init__(self, keep_watch: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_watch = keep_watch
        self._clock = clock
        self._said = (clock(), 0)

    def __call__(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are loaded; both are equal while the weights are only hashed."""
        self._keep_watch()
        now, (then, before) = self._clock(), self._said
        if now < then + PROGRESS_EVERY_S or done >= total:
            return
        self._said = (now, done)
        log.info(
            "loading weights: %d %%, %s of %s, %s/s",
            100 * done // total,
            format_size(done),
            format_size(total),
            format_size(int((done - before) / (now - then))),
        )
