"""Each system's OpenAI server: how it is started, when its first token comes, and how it ends.

All have the same room for keys and values, 1 GiB in all, and the same greatest context; everything else is their
default.  transformers has a server too, which is left out: it is made to try models, one request at a time.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from bench.peers.offline import KV_GIB, MeasureError, peer_settings
from bench.peers.places import AGGREGATED, LLAMA, SHAPES, SPLIT, SPLIT_PLAIN, VLLM, Workplace
from bench.peers.processes import free_port, own_environment, peer_environment, spawn, stop

NAME: Final = "bench"
"""As which every server knows the model."""

CONTEXT: Final = 4096
START_S: Final = 300.0
LLAMA_SLOTS: Final = 12
RETRY_S: Final = 0.01
PROBE: Final = tuple(range(1000, 1016))


@dataclass(frozen=True, slots=True)
class Server:
    """A running one."""

    system: str
    process: subprocess.Popen[bytes]
    port: int
    first_token_s: float  # from spawning it to the first token of a request sent as soon as it listens

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@contextmanager
def running(place: Workplace, system: str, model: str, threads: int, flags: Sequence[str] = ()) -> Iterator[Server]:
    """A server that has answered once; ``flags`` are added to its command.

    Raises MeasureError with the end of its log when it does not come up.
    """
    port = free_port()
    log = place.logs / f"{system}-{model}.log"
    command, environment = _start(place, system, model, threads, port)
    began = time.perf_counter()
    process = spawn([*command, *flags], environment, log)
    try:
        while True:
            if process.poll() is not None or time.perf_counter() - began > START_S:
                last = "\n".join(log.read_text(errors="replace").splitlines()[-8:])
                raise MeasureError(f"{system} did not come up ({process.returncode}):\n{last}")
            try:
                first_token_s = probe(port)[0] - began
                break
            except (OSError, http.client.HTTPException, MeasureError):
                time.sleep(RETRY_S)
        yield Server(system, process, port, first_token_s)
    finally:
        stop(process)


def probe(port: int, tokens: int = 2, timeout: float = 60.0) -> list[float]:
    """Times (``perf_counter``) of the events with text of one short answer.  Raises MeasureError, OSError."""
    body = {"model": NAME, "prompt": list(PROBE), "max_tokens": tokens, "temperature": 0, "stream": True}
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        text = json.dumps({**body, "ignore_eos": True})
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            raise MeasureError(f"http {reply.status}: {reply.read(300)!r}")
        times = [time.perf_counter() for line in reply if _has_text(line)]
    finally:
        connection.close()
    if not times:
        raise MeasureError("an answer without text")
    return times


def _has_text(line: bytes) -> bool:
    data = line.removeprefix(b"data:").strip()
    if not data.startswith(b"{"):
        return False
    chunk: dict[str, Any] = json.loads(data)
    return any(choice.get("text") for choice in chunk.get("choices", ()))


def _start(place: Workplace, system: str, model: str, threads: int, port: int) -> tuple[list[str], dict[str, str]]:
    """(command, environment)."""
    kv_bytes = KV_GIB << 30
    if system == LLAMA:
        room = kv_bytes // SHAPES[model].kv_bytes_per_token
        command = [str(place.llama_tool("llama-server")), "-m", str(place.gguf(model)), "--alias", NAME]
        command += ["-t", str(threads), "-tb", str(threads), "-c", str(min(room, LLAMA_SLOTS * CONTEXT))]
        command += ["-np", str(LLAMA_SLOTS), "--cache-ram", "0", "--host", "127.0.0.1", "--port", str(port)]
        return command, peer_environment()
    if system == VLLM:
        # What `vllm serve` starts; that command itself looks for a package called "vllm", which the CPU build is not.
        command = [str(place.python(VLLM)), "-m", "vllm.entrypoints.openai.api_server"]
        command += ["--model", str(place.checkpoint(model))]
        command += ["--served-model-name", NAME, "--dtype", "bfloat16", "--max-model-len", str(CONTEXT)]
        command += ["--host", "127.0.0.1", "--port", str(port), "--uvicorn-log-level", "warning"]
        return command, peer_environment(peer_settings(place, VLLM, threads))
    folder = place.checkpoint(model) if system == SPLIT_PLAIN else place.compressed(model)
    if system not in (SPLIT, SPLIT_PLAIN, AGGREGATED):
        raise ValueError(f"{system} is no server")
    workers = 1 if system == AGGREGATED else 2
    command = [sys.executable, "-m", "penstock", "serve", str(folder), "--served-model-name", NAME]
    command += ["--max-model-len", str(CONTEXT), "--kv-memory", str(kv_bytes // workers), "--port", str(port)]
    return [*command, *(["--aggregated"] if workers == 1 else [])], own_environment()
