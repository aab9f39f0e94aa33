"""What a person reads at the start."""

from __future__ import annotations

import json
import shlex
import socket
from pathlib import Path

import msgspec
import pytest

from penstock.bundled import storyteller
from penstock.config.facts import MachineFacts, ModelFacts
from penstock.config.resolve import resolve
from penstock.config.schema import PoolingConfig, ServeConfig
from penstock.launch.model_path import ModelLocation
from penstock.launch.startup_log import StartupTimer, client_lines, fleet_lines, model_lines, worker_lines
from penstock.types import Task
from penstock.weights.inspect import inspect_model

MACHINE = MachineFacts(cpus=tuple(range(16)), cores=16, memory_bytes=64 << 30, kernel_families=("avx2", "portable"))
MODEL = ModelFacts(name="m", max_positions=2048, parameters=10**7, auto_dtype="bf16", page_bytes_bf16=32 << 10)


def test_the_bundled_model_is_introduced_with_its_limits() -> None:
    spec = inspect_model(storyteller())
    lines = list(
        model_lines(
            ModelLocation(storyteller(), "storyteller", bundled=True), "storyteller", spec, 2048, ["context cut"]
        )
    )
    assert "10.2 M parameters" in lines[0]
    assert "only tells short stories" in lines[1]
    assert lines[2] == "context cut"
    lines = list(model_lines(ModelLocation(storyteller(), "mine"), "mine", spec, 2048, []))
    assert "stories" not in "".join(lines[1:])


def test_every_worker_has_a_line() -> None:
    plan = resolve(ServeConfig(prefill=2, decode=2), MACHINE, MODEL)
    shared, *workers = fleet_lines(plan, {w.worker: 100 + i for i, w in enumerate(plan.workers)}.get)
    kv = "KV pages 8192 a worker (256MiB: 131,072 tokens, 64 requests of 2,048)"
    assert shared == f"on cpu, kernels avx2, bf16; {kv}, handed over by shm"
    assert workers[0] == "prefill-0: pid 100, 4 threads on processors 0-3, 12 more while other workers are idle"
    assert workers[3] == "decode-1: pid 103, 4 threads on processors 12-15, 12 more while other workers are idle"
    plan = resolve(ServeConfig(decode_cores="0-15", lend_cores=False), MACHINE, MODEL)
    assert next(line for line in fleet_lines(plan, {}.get) if "prefill-0" in line).endswith("processors 0-15, nice 10")
    (shared, both) = fleet_lines(resolve(ServeConfig(aggregated=True, threads=1), MACHINE, MODEL), {}.get)
    assert both == "both-0: pid None, 1 thread"
    assert "one worker does both phases" in shared


def test_the_curl_line_is_one_that_a_shell_understands() -> None:
    ready, talk, curl = client_lines("http://127.0.0.1:8001", ("it's", Task.GENERATE), needs_key=True, took="1.23 s")
    assert ready.startswith("ready after 1.23 s: http://127.0.0.1:8001, with a key; metrics: ")
    assert talk == "talk to it: PENSTOCK_API_KEY=KEY penstock chat --url http://127.0.0.1:8001"
    words = shlex.split(curl.removeprefix("or: "))
    assert words[:3] == ["curl", "-N", "http://127.0.0.1:8001/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert (body["model"], body["stream"]) == ("it's", True)
    assert "Authorization: Bearer $PENSTOCK_API_KEY" in words
    ready, talk, _ = client_lines("http://127.0.0.1:8000", ("m", Task.GENERATE), needs_key=False, took="1.23 s")
    assert ready == "ready after 1.23 s: http://127.0.0.1:8000; metrics: http://127.0.0.1:8000/metrics"
    assert talk == "talk to it: penstock chat"


def test_a_model_that_only_reads_is_introduced_by_its_own_route() -> None:
    for task, path in ((Task.EMBED, "/v1/embeddings"), (Task.CLASSIFY, "/classify")):
        _, curl = client_lines("http://127.0.0.1:8000", ("bge", task), needs_key=False, took="1.23 s")
        words = shlex.split(curl.removeprefix("try it: "))
        assert words[1] == f"http://127.0.0.1:8000{path}"
        assert json.loads(words[words.index("-d") + 1]) == {"model": "bge", "input": "A fox."}
    reads = PoolingConfig(whole_prompts=True, share_prefixes=False)
    plan = resolve(ServeConfig(threads=1), MACHINE, msgspec.structs.replace(MODEL, pooling=reads))
    (shared, both) = fleet_lines(plan, {}.get)
    assert both == "both-0: pid None, 1 thread"
    assert "no decode workers" in shared


def test_a_start_is_told_phase_by_phase() -> None:
    times = iter((100.25, 100.5, 102.0))
    phases = StartupTimer(100.0, lambda: next(times))
    for phase in ("imports", "plan", "weights"):
        phases.end_phase(phase)
    assert str(phases) == "2.00 s (imports 0.25, plan 0.25, weights 1.50)"


def test_sampling_defaults_that_are_taken_have_a_line() -> None:
    located, spec = ModelLocation(storyteller(), "mine"), inspect_model(storyteller())
    taken = [*model_lines(located, "mine", spec, 2048, [], generation_config="auto")]
    assert "sampling defaults of its generation_config.json: temperature 0.7, top_p 0.9" in taken[1]
    assert len([*model_lines(located, "mine", spec, 2048, [], generation_config="none")]) == 1


def test_a_workers_join_line_can_be_pasted_on_another_host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my model").mkdir()
    _, line = worker_lines("tcp://0.0.0.0:9000", "my model", "keys", took="1 s")
    command = f"penstock serve '{tmp_path}/my model' --keys {tmp_path}/keys --join tcp://{socket.gethostname()}:9000"
    assert line == f"join it: {command}"
    _, line = worker_lines("tcp://10.0.0.1:9000", None, "/keys", took="1 s")
    assert line == "join it: penstock serve --keys /keys --join tcp://10.0.0.1:9000"
