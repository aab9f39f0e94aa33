"""Makes what is measured: one checkpoint of random weights, and the same for the systems that want another file."""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from bench.peers.checkpoint import write_checkpoint
from bench.peers.install import installed, run
from bench.peers.places import CODED, HERE, LLAMA, OPENVINO, QUANTS, SHAPES, Workplace

SEED: Final = 0


def make(place: Workplace, models: Sequence[str]) -> None:
    """What is not there yet.  Raises InstallError when a converter fails."""
    for model in models:
        _checkpoint(place, model)
        _compressed(place, model)
        _gguf(place, model)
        for kind in QUANTS:
            _quantised(place, model, kind)
        _openvino(place, model)


def missing(place: Workplace, model: str, systems: Sequence[str]) -> list[str]:
    """Files that ``make`` would write and that these systems need."""
    files = {LLAMA: place.gguf(model), OPENVINO: place.openvino(model)}
    files |= {system: place.gguf(model, kind) for system, (_, kind) in CODED.items()}
    needed = [place.checkpoint(model) / "model.safetensors", place.compressed(model)]
    needed += [file for system, file in files.items() if system in systems]
    return [str(file) for file in dict.fromkeys(needed) if not file.exists()]


def _checkpoint(place: Workplace, model: str) -> None:
    folder = place.checkpoint(model)
    if (folder / "model.safetensors").exists():
        print(f"{folder}: there already")
        return
    shown = time.monotonic()

    def progress(done: int, total: int) -> None:
        nonlocal shown
        if time.monotonic() - shown > 5:
            shown = time.monotonic()
            print(f"{model}: {100 * done // total} % of {total / 1e9:.2f} GB written", flush=True)

    write_checkpoint(folder, SHAPES[model], SEED, progress)
    print(f"{folder}: {SHAPES[model].parameters / 1e6:.0f} M parameters")


def _compressed(place: Workplace, model: str) -> None:
    out = place.compressed(model)
    if out.exists():
        print(f"{out}: there already")
        return
    unfinished = out.with_name("compressing")
    command: list[str | Path] = [sys.executable, "-m", "penstock", "compress", place.checkpoint(model), unfinished]
    run(command, place.logs / "models.log", say=f"{model}: penstock compress")
    unfinished.rename(out)


def _gguf(place: Workplace, model: str) -> None:
    out = place.gguf(model)
    if out.exists():
        print(f"{out}: there already")
        return
    unfinished = out.with_suffix(".part")
    script = HERE / "drivers" / "to_gguf.py"
    command: list[str | Path] = [place.python(LLAMA), script, place.checkpoint(model), unfinished]
    run(command, place.logs / "models.log", say=f"{model}: BF16 gguf")
    shutil.move(unfinished, out)


def _quantised(place: Workplace, model: str, kind: str) -> None:
    out = place.gguf(model, kind)
    if out.exists():
        print(f"{out}: there already")
        return
    unfinished = out.with_suffix(".part")
    command: list[str | Path] = [place.llama_tool("llama-quantize"), place.gguf(model), unfinished, kind]
    run(command, place.logs / "models.log", say=f"{model}: {kind} gguf")
    shutil.move(unfinished, out)


def _openvino(place: Workplace, model: str) -> None:
    """Its converter knows no bf16; nearly all of these numbers are in fp16 what they were."""
    out = place.openvino(model)
    if out.exists() or not installed(place, OPENVINO):
        print(f"{out}: {'there already' if out.exists() else 'left out, OpenVINO is not installed'}")
        return
    unfinished = out.with_name("converting")
    command: list[str | Path] = [place.venv(OPENVINO) / "bin" / "optimum-cli", "export", "openvino"]
    command += ["--model", place.checkpoint(model), "--task", "text-generation-with-past", "--weight-format", "fp16"]
    run([*command, unfinished], place.logs / "models.log", say=f"{model}: OpenVINO")
    unfinished.rename(out)
