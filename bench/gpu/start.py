"""From files in the page cache to the first token, by phase; and whether the plan knew what memory there would be."""

from __future__ import annotations

import json
import math
import shutil
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.gpu.models import LLAMA_8B, TINY, Numbers
from bench.gpu.place import Place

from penstock.engine.models.registry import build_model
from penstock.kernels.operands import StepBatch
from penstock.kernels.ops import CapturableProgram, Ops
from penstock.kernels.sampling import GumbelRows
from penstock.weights.inspect import inspect_model, read_outline, spec_for_length
from penstock.weights.load import load_model
from penstock.weights.manifest import ManifestStore

THREADS = 8
PAGES = 512
MIB = 1 << 20
WEIGHTS_8B = 16_060_522_496
"""Bytes of the 8 B model."""

SETTLED_NS = 3_600 * 10**9
"""A manifest trusts files that are older than its hashes; these are as if written an hour ago."""


def place_for(nbytes: int) -> Path | None:
    """A folder with room for a checkpoint: memory if there is enough of it, else the usual place."""
    for folder in (Path("/dev/shm"), Path(tempfile.gettempdir())):
        if folder.is_dir() and shutil.disk_usage(folder).free > nbytes * 5 // 4:
            return folder
    return None


def measured(ops: Ops, place: Place) -> dict[str, Any]:
    """Seconds by phase of a second start: the first one hashes the weights and is told apart.

    Raises OSError where no folder has room for the checkpoint.
    """
    base = place_for(MIB if place.dry else WEIGHTS_8B)
    if base is None:
        raise OSError(f"no folder has room for {WEIGHTS_8B:,} bytes")
    with tempfile.TemporaryDirectory(dir=base) as folder:
        path = Path(folder) / "model"
        nbytes = write(path, TINY if place.dry else LLAMA_8B)
        manifests = ManifestStore(Path(folder) / "manifests", now_ns=lambda: time.time_ns() + SETTLED_NS)
        first = _start(path, ops, place, manifests)
        second = _start(path, ops, place, manifests)
    return {**second, "hashing_too_s": first["load_s"], "weights_bytes": nbytes}


def write(folder: Path, config: Mapping[str, Any]) -> int:
    """A checkpoint of random weights, as fast as memory is written; bytes of its tensors."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")
    (folder / "tokenizer.json").write_text("{}", encoding="utf-8")
    shapes = read_outline(folder).layout.shapes
    header: dict[str, object] = {}
    total = 0
    for name, shape in shapes.items():
        size = 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    numbers = Numbers()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            file.write(numbers.matrix(math.prod(shape), 1).view(np.uint16))
    return total


def _start(path: Path, ops: Ops, place: Place, manifests: ManifestStore) -> dict[str, float]:
    begun = time.perf_counter()
    spec = spec_for_length(inspect_model(path), 256)
    loaded = load_model(path, spec, ops, threads=2 if place.dry else THREADS, manifests=manifests)
    place.wait()
    read = time.perf_counter()
    model = build_model(loaded, ops, 256)
    program = ops.record(model, kv := ops.new_kv(spec.kv, pages=PAGES))
    if isinstance(program, CapturableProgram) and not place.dry:
        program.capture()
    place.wait()
    ready = time.perf_counter()
    picks = GumbelRows.empty(1)
    program.run(
        StepBatch(
            np.arange(16, dtype=np.int32),
            np.arange(16, dtype=np.int32),
            np.array([0, 16], np.int32),
            np.zeros((1, 1), np.int32),
            np.array([15], np.int32),
        ),
        0,
        [],
        picks,
    )
    end = time.perf_counter()
    del kv
    return {"load_s": read - begun, "ready_s": ready - read, "token_s": end - ready, "all_s": end - begun}


def memory_beside(accounted: int, place: Place) -> float | None:
    """GiB of the device that are neither weights nor KV; None where there is no device."""
    if not place.cuda:
        return None
    torch.cuda.empty_cache()  # what earlier parts had
    free, total = torch.cuda.mem_get_info()
    return (total - free - accounted) / 2**30


def plan_error(place: Place) -> float | None:
    """How far what the plan says is free is from what torch says; before anything else is on the device."""
    if not place.cuda:
        return None
    from penstock.launch.gpu_probe import gpu_report

    gpu = gpu_report().gpu
    if gpu is None:
        return 1.0
    free, _ = torch.cuda.mem_get_info()
    return abs(gpu.free_bytes - free) / free
