"""F7: weight files that are damaged on disk."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from bench.faults.result import Budget, Result, judged

from penstock.bundled import storyteller
from penstock.errors import ModelError
from penstock.kernels.select import make_ops
from penstock.weights.compression_convert import decompress_folder
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from penstock.weights.manifest import ManifestStore

DAMAGES = 120


def f7(budget: Budget) -> Result:
    """Weight files that are corrupt, cut, or swapped: refused, with file (and tensor, where that can be told)."""
    count, dice, refused, named = budget.count(DAMAGES, least=9), random.Random(7), 0, 0
    kinds: dict[str, Callable[[Path, random.Random], None]] = {"flipped": _flip, "cut": _cut, "swapped": _swap}
    unseen: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        plain, cache = Path(folder) / "plain", Path(folder) / "cache"
        decompress_folder(storyteller(), plain, report=lambda _: None)
        _age(plain)
        _load(plain, cache)
        for number in range(count):
            kind = list(kinds)[number % len(kinds)]
            hurt = Path(folder) / "hurt"
            shutil.copytree(plain, hurt, copy_function=shutil.copy2)
            moved = Path(folder) / "moved"
            plain.rename(moved)
            hurt.rename(plain)  # the folder that is known by its manifest
            kinds[kind](plain / "model.safetensors", dice)
            try:
                _load(plain, cache)
                unseen.append(kind)
            except ModelError as error:
                refused += 1
                named += "model.safetensors" in str(error)
            shutil.rmtree(plain)
            moved.rename(plain)
    checks = {
        f"served all the same: {unseen[:3]}": refused == count,
        "a refusal does not name its file": named == refused,
    }
    return judged("F7", "damaged weight files", checks, {"damages": count, "refused": refused, "named": named})


def _load(folder: Path, cache: Path) -> None:
    ops = make_ops(family=None, compute_dtype="bf16", threads=1)
    load_model(folder, inspect_model(folder), ops, manifests=ManifestStore(cache))


def _age(folder: Path) -> None:
    """As written a while ago: what has just been written is not trusted."""

    long_ago = time.time() - 3600
    for path in folder.iterdir():
        os.utime(path, (long_ago, long_ago))


def _flip(path: Path, dice: random.Random) -> None:
    raw = bytearray(path.read_bytes())
    at = dice.randrange(len(raw) // 8, len(raw))
    raw[at] ^= 1 << dice.randrange(8)
    path.write_bytes(raw)


def _cut(path: Path, dice: random.Random) -> None:
    raw = path.read_bytes()
    path.write_bytes(raw[: dice.randrange(1, len(raw))])


def _swap(path: Path, dice: random.Random) -> None:
    """Two stretches of the data change places."""
    raw = bytearray(path.read_bytes())
    size = dice.randrange(64, 4096)
    one = dice.randrange(len(raw) // 8, len(raw) // 2)
    other = dice.randrange(len(raw) // 2 + size, len(raw) - size)
    raw[one : one + size], raw[other : other + size] = raw[other : other + size], raw[one : one + size]
    path.write_bytes(raw)
