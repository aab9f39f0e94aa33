"""The life of a manifest: made, trusted, brought up to date, refused, damaged, raced for."""

from __future__ import annotations

import logging
import os
import re
import shutil
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ModelError
from penstock.kernels.native.backend import NativeOps, families
from penstock.weights import load as weights_load
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import compress_folder
from penstock.weights.compression_format import GPU
from penstock.weights.inspect import inspect_model
from penstock.weights.load import load_model
from penstock.weights.manifest import FOLDER, MAX_MANIFESTS, RACY_NS, ManifestStore
from tiny_models import llama_config, random_tensors, write_model, write_weights

LATER_NS = 3600 * 10**9
CONFIG = llama_config(num_hidden_layers=1, vocab_size=64, hidden_size=32, intermediate_size=64)
NAME = "model.layers.0.mlp.up_proj.weight"


class Stage:
    """A model folder, a cache, and a clock that is ahead of the files by as much as is wanted."""

    def __init__(self, base: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> None:
        self.folder = write_model(base / "model", CONFIG)
        self.cache = base / "cache"
        self.hashed: list[str] = []
        self.ahead_ns = LATER_NS
        original = weights_load.TensorHasher._digest
        stage = self

        def digest(self: Any, name: str, buffer: bytearray) -> bytes:
            stage.hashed.append(name)
            return original(self, name, buffer)

        if monkeypatch is not None:
            monkeypatch.setattr(weights_load.TensorHasher, "_digest", digest)

    def load(self, *, accept: bool = False) -> tuple[str, int]:
        """(fingerprint, tensors that were hashed)."""
        self.hashed.clear()
        newest = max(max(p.stat().st_mtime_ns, p.stat().st_ctime_ns) for p in self.folder.glob("*.safetensors"))
        manifests = ManifestStore(self.cache, accept_new=accept, now_ns=lambda: newest + self.ahead_ns)
        ops = NativeOps(families()[0], "bf16")
        loaded = load_model(self.folder, inspect_model(self.folder), ops, threads=2, manifests=manifests)
        return loaded.fingerprint, len(self.hashed)

    @property
    def manifest(self) -> Path:
        (path,) = (self.cache / FOLDER).glob("*.json")
        return path

    def flip(self, name: str = NAME, bit: int = 1) -> None:
        """Another bit in one weight; size as before."""
        tensors = random_tensors(CONFIG)
        tensors[name].view(np.uint16).reshape(-1)[3] ^= bit
        write_weights(self.folder, tensors)


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    return Stage(tmp_path, monkeypatch)


def keep_times(path: Path, change: Any) -> None:
    """Change a file's bytes and give it its old times; its inode-change time cannot be given back."""
    stat = path.stat()
    change()
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


def test_hashed_once_and_then_known(stage: Stage) -> None:
    first, hashed = stage.load()
    assert hashed == len(random_tensors(CONFIG))
    assert stage.load() == (first, 0)
    assert not list((stage.cache / FOLDER).glob("*.partial"))


def test_the_same_bytes_in_another_file_are_the_same_weights(stage: Stage) -> None:
    first, all_of_them = stage.load()
    path = stage.folder / "model.safetensors"
    shutil.copyfile(path, stage.folder / "copy")
    (stage.folder / "copy").replace(path)
    assert stage.load() == (first, all_of_them)
    assert stage.load() == (first, 0)
    path.unlink()
    write_weights(stage.folder, random_tensors(CONFIG), shards=3)
    assert stage.load() == (first, all_of_them)
    assert stage.load() == (first, 0)


@pytest.mark.parametrize("keeping_times", [False, True])
def test_other_bytes_are_refused_until_they_are_meant(stage: Stage, keeping_times: bool) -> None:
    first, _ = stage.load()
    if keeping_times:
        keep_times(stage.folder / "model.safetensors", stage.flip)
    else:
        stage.flip()
    for _ in range(2):
        with pytest.raises(ModelError) as refused:
            stage.load()
        text = str(refused.value)
        assert f"model.safetensors: tensor {NAME!r} has BLAKE3 " in text
        assert "--accept-new-weights" in text
        assert len(set(re.findall(r"[0-9a-f]{64}", text))) == 2
    second, _ = stage.load(accept=True)
    assert second != first
    assert stage.load() == (second, 0)


def test_new_and_missing_tensors_are_other_weights(stage: Stage) -> None:
    stage.load()
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(4, np.float32)}
    write_weights(stage.folder, random_tensors(CONFIG) | extra)
    with pytest.raises(ModelError, match="inv_freq' was not there"):
        stage.load()
    stage.load(accept=True)
    assert stage.load()[1] == 0  # a tensor that no weight needs is known by its file's stamp
    write_weights(stage.folder, random_tensors(CONFIG))
    with pytest.raises(ModelError, match="inv_freq' is missing"):
        stage.load()


def test_bytes_that_changed_under_an_unchanged_stamp_are_found(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    stage.load()
    stamp = os.stat(stage.folder / "model.safetensors")
    stage.flip()
    real = os.fstat

    def as_it_was(descriptor: int) -> os.stat_result:
        found = real(descriptor)
        return stamp if found.st_ino == stamp.st_ino and found.st_size == stamp.st_size else found

    monkeypatch.setattr("penstock.weights.files.os.fstat", as_it_was)
    with pytest.raises(ModelError, match=f"tensor '{NAME}': damaged, its bytes are not those that were hashed"):
        stage.load()


def test_a_file_that_was_hashed_too_soon_after_it_was_written_is_not_trusted(stage: Stage) -> None:
    stage.ahead_ns = RACY_NS
    first, hashed = stage.load()
    assert stage.load() == (first, hashed)
    stage.ahead_ns = RACY_NS + 1
    assert stage.load() == (first, hashed)
    assert stage.load() == (first, 0)


def test_a_damaged_manifest_is_never_used(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    first, hashed = stage.load()
    whole = stage.manifest.read_bytes()
    rng = np.random.default_rng(7)
    cuts = [b"", whole[:-2], whole[: len(whole) // 2], whole + b"x", whole.replace(b'"version":1', b'"version":2')]
    for _ in range(25):
        at = int(rng.integers(len(whole) - 1))
        cuts.append(whole[:at] + bytes([whole[at] ^ 1 << int(rng.integers(8))]) + whole[at + 1 :])
    for damaged in cuts:
        stage.manifest.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert stage.load() == (first, hashed), damaged
        assert "are those of the last load is unknown" in caplog.text
        assert stage.load() == (first, 0)


def test_a_cache_that_cannot_be_written_costs_the_hashing_only(stage: Stage, caplog: pytest.LogCaptureFixture) -> None:
    stage.cache.write_text("a file where the folder should be")
    first, hashed = stage.load()
    assert stage.load() == (first, hashed)
    assert "will be hashed at every start" in caplog.text


def test_plain_and_compressed_are_the_same_weights(stage: Stage, tmp_path: Path) -> None:
    first, _ = stage.load()
    compress_folder(stage.folder, tmp_path / "small", threads=1, report=lambda _: None)
    (tmp_path / "small/model.safetensors").replace(stage.folder / "model.safetensors")
    assert stage.load() == (first, 0)
    raw = bytearray((stage.folder / "model.safetensors").read_bytes())
    raw[-1] ^= 1
    (stage.folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match="damaged, its bytes are not those that were compressed"):
        stage.load()


def test_what_comes_as_arrays_is_checked_by_its_checksum(stage: Stage, tmp_path: Path) -> None:
    """As compressed weights do on a GPU, and everywhere those in another device's layout."""
    wide = llama_config(num_hidden_layers=1, vocab_size=64, hidden_size=128, intermediate_size=256)
    stage.folder = write_model(tmp_path / "wide", wide)
    first, _ = stage.load()
    compress_folder(stage.folder, tmp_path / "small", threads=1, report=lambda _: None, layout=GPU)
    (tmp_path / "small/model.safetensors").replace(stage.folder / "model.safetensors")
    shutil.rmtree(stage.cache)
    assert stage.load() == (first, 0)
    with Checkpoint(stage.folder) as checkpoint:
        assert checkpoint.compressed_matrix(NAME) is not None
        place = checkpoint.file_range(NAME)
    raw = bytearray((stage.folder / "model.safetensors").read_bytes())
    raw[place.offset + place.nbytes - 1] ^= 1
    (stage.folder / "model.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match=f"'{NAME}': damaged, its bytes are not those that were compressed"):
        stage.load()


def test_a_long_hashing_can_be_seen_to_get_on(tmp_path: Path) -> None:
    with (
        Checkpoint(write_model(tmp_path, CONFIG)) as checkpoint,
        weights_load.TensorHasher(checkpoint, checkpoint.names) as own,
    ):
        own.start(2)
        assert own.join(lambda: None).keys() == set(checkpoint.names)
        assert own.done == sum(checkpoint.file_range(name).nbytes for name in checkpoint.names)


def test_the_oldest_are_forgotten(stage: Stage) -> None:
    folder = stage.cache / FOLDER
    folder.mkdir(parents=True)
    for index in range(MAX_MANIFESTS):
        path = folder / f"{index}.json"
        path.touch()
        os.utime(path, (index, index))
    stage.load()
    assert len(list(folder.iterdir())) == MAX_MANIFESTS
    assert not (folder / "0.json").exists()
    assert (folder / "1.json").exists()


def _start(folder: Path, cache: Path, results: Any) -> None:
    ops = NativeOps(families()[0], "bf16")
    loaded = load_model(folder, inspect_model(folder), ops, threads=2, manifests=ManifestStore(cache))
    results.put(loaded.fingerprint)


def test_two_starts_at_once(stage: Stage) -> None:
    spawn = get_context("spawn")
    results = spawn.Queue()
    starts = [spawn.Process(target=_start, args=(stage.folder, stage.cache, results)) for _ in range(2)]
    for start in starts:
        start.start()
    found = {results.get(timeout=60) for _ in starts}
    for start in starts:
        start.join(60)
        assert start.exitcode == 0
    assert found == {stage.load()[0]}
    assert stage.manifest.exists()


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.sampled_from(["load", "touch", "flip", "accept", "damage", "forget", "copy"]), max_size=8))
def test_what_is_served_is_what_was_accepted(tmp_path_factory: pytest.TempPathFactory, steps: list[str]) -> None:
    """Whatever happens to file and manifest: a load gives the fingerprint of what is there, or refuses it."""
    stage = Stage(tmp_path_factory.mktemp("life"))
    prints: dict[bool, str] = {}
    flipped, accepted = False, None
    for step in ["load", *steps, "load"]:
        path = stage.folder / "model.safetensors"
        match step:
            case "touch":
                os.utime(path)
            case "copy":
                shutil.copyfile(path, stage.folder / "copy")
                (stage.folder / "copy").replace(path)
            case "flip":
                flipped = not flipped
                stage.flip(bit=int(flipped))
            case "damage":
                for manifest in (stage.cache / FOLDER).iterdir():
                    manifest.write_bytes(manifest.read_bytes()[:-9])
                accepted = None
            case "forget":
                shutil.rmtree(stage.cache, ignore_errors=True)
                (stage.cache / FOLDER).mkdir(parents=True)
                accepted = None
            case _ if step == "load" and accepted not in (None, flipped):
                with pytest.raises(ModelError, match="--accept-new-weights"):
                    stage.load()
            case _:
                found, _ = stage.load(accept=step == "accept")
                assert prints.setdefault(flipped, found) == found
                accepted = flipped
    assert len(set(prints.values())) == len(prints)
