"""Decode and prefill through each system's offline interface: a fresh process each time, or one that stays.

``drivers/task.py`` says what is timed.  llama.cpp's own tools stand for a driver: ``llama-bench`` for prompts (to the
logits of the last token), ``llama-batched-bench`` for answers (as many prompts are read first, then the time of the
tokens written together).  They draw their own token ids.
"""

from __future__ import annotations

import glob
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bench.peers.places import CODED, COMPRESSED, HERE, INT8, LLAMA, OPENVINO, PLAIN, SHAPES, VLLM, Workplace
from bench.peers.processes import own_environment, peer_environment

TIMEOUT_S = 900
KV_GIB = 1


class MeasureError(Exception):
    """A system did not do what was asked; the message is the end of what it said."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What an offline measurement is about."""

    threads: int
    seed: int
    prefill: tuple[int, ...] = ()
    decode: tuple[int, ...] = ()
    steps: int = 16
    context: int = 64
    stay: bool = False


def command_of(place: Workplace, system: str, model: str, ask: Ask) -> tuple[list[str], dict[str, str]] | None:
    """A driver's command and environment; None for a system that has no driver."""
    maker, kind = CODED.get(system, (system, "BF16"))
    if maker == LLAMA:
        return None
    own = maker in (PLAIN, COMPRESSED, INT8)
    script = "penstock" if own else system
    others = {COMPRESSED: place.compressed(model), OPENVINO: place.openvino(model)}
    folder = place.gguf(model, kind) if system in CODED else others.get(system, place.checkpoint(model))
    python = sys.executable if own else str(place.python(system))
    environment = own_environment() if own else peer_environment(peer_settings(place, system, ask.threads))
    task = json.dumps({"model": str(folder), "vocab": SHAPES[model].vocab, "int8": maker == INT8, **asdict(ask)})
    return [python, str(HERE / "drivers" / f"drive_{script}.py"), task], environment


def measure(place: Workplace, system: str, model: str, ask: Ask) -> dict[str, dict[str, Any]]:
    """{"prefill": {"128": [tokens/s, ...]}, "decode": {"1": [tokens/s]}}.  Raises MeasureError."""
    driver = command_of(place, system, model, ask)
    if driver is None:
        return _llama(place, place.gguf(model, CODED.get(system, ("", "BF16"))[1]), ask)
    said = run(*driver)
    found: dict[str, dict[str, Any]] = json.loads(said.splitlines()[-1])
    return found


def peer_settings(place: Workplace, system: str, threads: int) -> dict[str, str]:
    """Environment variables with which a peer is at its best here."""
    if system == VLLM:
        return vllm_settings(place, threads)
    return {"OMP_NUM_THREADS": str(threads)}


def vllm_settings(place: Workplace, threads: int) -> dict[str, str]:
    """What its documents advise for a CPU: its threads bound, Intel's OpenMP, tcmalloc where it is installed."""
    preload = [place.venv(VLLM) / "lib" / "libiomp5.so"]
    preload += [Path(path) for path in sorted(glob.glob("/usr/lib/*/libtcmalloc_minimal.so.4"))[:1]]
    return {
        "LD_PRELOAD": ":".join(str(path) for path in preload if path.exists()),
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(place.root / "vllm-cache"),
    }


def run(command: Sequence[str], environment: Mapping[str, str]) -> str:
    """Standard output.  Raises MeasureError."""
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, check=False, timeout=TIMEOUT_S
        )
    except subprocess.TimeoutExpired as error:
        raise MeasureError(f"{Path(command[0]).name}: not done after {TIMEOUT_S} s") from error
    if done.returncode != 0:
        last = "\n".join(done.stderr.strip().splitlines()[-8:])
        raise MeasureError(f"{Path(command[0]).name} ended with {done.returncode}:\n{last}")
    return done.stdout


def _llama(place: Workplace, file: Path, ask: Ask) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {}
    gguf, threads = str(file), str(ask.threads)
    if ask.prefill:
        lengths = ",".join(map(str, ask.prefill))
        command = [str(place.llama_tool("llama-bench")), "-m", gguf, "-t", threads, "-p", lengths, "-n", "0"]
        rows = json.loads(run([*command, "-r", "1", "-o", "json"], peer_environment()))
        found["prefill"] = {str(row["n_prompt"]): [row["avg_ts"]] for row in rows}
    if ask.decode:
        streams = ",".join(map(str, ask.decode))
        room = max(ask.decode) * (ask.context + ask.steps + 16)
        command = [str(place.llama_tool("llama-batched-bench")), "-m", gguf, "-t", threads, "-tb", threads]
        command += ["-c", str(room), "-npp", str(ask.context), "-ntg", str(ask.steps), "-npl", streams]
        said = run([*command, "--output-format", "jsonl"], peer_environment())
        rows = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        found["decode"] = {str(row["pl"]): [row["speed_tg"]] for row in rows}
    return found
