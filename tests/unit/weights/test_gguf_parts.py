"""Split GGUF files: opened by the first part, each part checked, and whatever is wrong named."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ModelError
from penstock.kernels.native.backend import NativeOps, families
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from penstock.weights.manifest import ManifestStore
from penstock.weights.model_files import TOKENIZER, model_files
from tiny_gguf import write_gguf
from tiny_models import llama_config, random_tensors

CONFIG = llama_config(vocab_size=130)


def part(folder: Path, number: int, name: str = "m") -> Path:
    return folder / f"{name}-{number:05}-of-00003.gguf"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one model in one file and in three."""
    folder = tmp_path_factory.mktemp("split")
    write_gguf(folder / "whole.gguf", CONFIG, random_tensors(CONFIG))
    write_gguf(folder / "m.gguf", CONFIG, random_tensors(CONFIG), parts=3)
    write_gguf(folder / "other.gguf", CONFIG, random_tensors(CONFIG, seed=1), parts=3)
    return folder


def test_parts_are_the_model_that_one_file_is(written: Path, tmp_path: Path) -> None:
    whole, split = written / "whole.gguf", part(written, 1)
    spec = inspect_model(split)
    assert spec == inspect_model(whole)
    assert model_files(split).read(TOKENIZER) == model_files(whole).read(TOKENIZER)
    ops, manifests = NativeOps(families()[0], "fp32"), ManifestStore(tmp_path / "cache")
    loaded = [load_model(path, spec, ops, threads=2, manifests=manifests) for path in (whole, split, split)]
    assert len({own.fingerprint for own in loaded}) == 1
    x = ops.compute(np.random.default_rng(0).standard_normal((3, 64)))
    for name in ("0.qkv", "2.gate_up", "head"):
        wanted, *others = (ops.to_numpy(ops.linear(x, own.weights[name])) for own in loaded)
        for got in others:
            np.testing.assert_array_equal(got, wanted)
    with Checkpoint(split) as checkpoint:
        assert {path.name for path in map(checkpoint.path_of, checkpoint.names)} == {
            part(written, number).name for number in (1, 2, 3)
        }


def lose(folder: Path) -> None:
    part(folder, 2).unlink()


def swap(folder: Path) -> None:
    shutil.copy(part(folder, 2), part(folder, 3))


def cut(folder: Path) -> None:
    raw = part(folder, 3).read_bytes()
    part(folder, 3).write_bytes(raw[:-40])


def overwrite(folder: Path) -> None:
    part(folder, 3).write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("damage", "file", "reason"),
    [
        (lose, "m-00001-of-00003.gguf", "its part 'm-00002-of-00003.gguf' is missing"),
        (swap, "m-00003-of-00003.gguf", "is part 3 of 3 by its name, but its split.no is 1"),
        (cut, "m-00003-of-00003.gguf", "truncated, tensor"),
        (overwrite, "m-00003-of-00003.gguf", "truncated, the version"),
    ],
)
def test_a_part_that_is_missing_or_another_is_named(
    written: Path, tmp_path: Path, damage: Callable[[Path], None], file: str, reason: str
) -> None:
    for number in (1, 2, 3):
        shutil.copy(part(written, number), tmp_path)
    damage(tmp_path)
    with pytest.raises(ModelError, match=rf"{re.escape(file)}: {re.escape(reason)}"):
        inspect_model(part(tmp_path, 1))


def test_a_model_is_named_by_its_first_part(written: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ModelError, match=r"m-00002-of-00003\.gguf: is a part of a model; give the first one: .*m-00001"
    ):
        inspect_model(part(written, 2))
    shutil.copy(written / "whole.gguf", tmp_path / "m-00001-of-00003.gguf")
    with pytest.raises(ModelError, match=r"is the first of 3 parts by its name, but its split\.count is 0"):
        inspect_model(part(tmp_path, 1))
    shutil.copy(part(written, 1), tmp_path / "renamed.gguf")
    with pytest.raises(
        ModelError, match=r"renamed\.gguf: is one of 3 parts; the first must be called NAME-00001-of-00003"
    ):
        inspect_model(tmp_path / "renamed.gguf")


def test_parts_of_two_models_are_not_mixed(written: Path, tmp_path: Path) -> None:
    """Of models whose tensors are divided alike no header tells; the manifest's hashes do, at the next load."""
    for number in (1, 2, 3):
        shutil.copy(part(written, number), tmp_path)
    shutil.copy(part(written, 1), part(tmp_path, 1, "x"))
    shutil.copy(part(written, 3), part(tmp_path, 2, "x"))
    shutil.copy(part(written, 2), part(tmp_path, 3, "x"))
    with pytest.raises(ModelError, match=r"x-00002-of-00003\.gguf: is part 2 of 3 by its name, but its split\.no is 2"):
        inspect_model(part(tmp_path, 1, "x"))
    ops, manifests = NativeOps(families()[0], "fp32"), ManifestStore(tmp_path / "cache")
    load_model(part(tmp_path, 1), inspect_model(part(tmp_path, 1)), ops, manifests=manifests)
    shutil.copy(part(written, 2, "other"), part(tmp_path, 2))
    with pytest.raises(ModelError, match="not the weights that were loaded from here before"):
        load_model(part(tmp_path, 1), inspect_model(part(tmp_path, 1)), ops, manifests=manifests)
