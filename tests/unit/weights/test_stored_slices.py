"""Matrices in slices: the same weights and fingerprint, and a rank reads and proves its own slices only."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.config.mesh import Mesh, parse_mesh
from penstock.errors import ModelError
from penstock.kernels.native.backend import NativeOps, families
from penstock.kernels.operands import PackedLinear
from penstock.parallel.shard import ModelShard, shard_model
from penstock.parallel.stored_cuts import folder_cuts
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_convert import compress_folder, decompress_folder, shard_folder, verify_folder
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.inspect import inspect_model
from penstock.weights.load import LoadedModel, load_parts, needed_slices
from sharded_bench import CompressedOps, ShardedModel, WholeModel, answers
from tiny_models import llama_config, write_model

CONFIG = llama_config(
    vocab_size=512,
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=1024,
    num_hidden_layers=2,
    max_position_embeddings=256,
)
FORMS = ("plain", "compressed")


def write_sliced(folder: Path, form: str, config: dict[str, Any] = CONFIG, shards: int = 1) -> tuple[Path, Path]:
    """A model as it was, and in slices."""
    plain = write_model(folder / "original", config, shards=shards)
    convert = shard_folder if form == "plain" else compress_folder
    convert(plain, folder / "sliced", threads=2, report=lambda _: None, cuts=folder_cuts(plain))
    return plain, folder / "sliced"


@pytest.fixture(scope="module", params=FORMS)
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_sliced(tmp_path_factory.mktemp(request.param), request.param, shards=2)


def load(folder: Path, ops: NativeOps, shards: Sequence[ModelShard | None]) -> list[LoadedModel]:
    selects = [None if shard is None else shard.layout for shard in shards]
    return load_parts(folder, inspect_model(folder), ops, selects, threads=2)


def rows_of(ops: NativeOps, loaded: LoadedModel) -> dict[str, bytes]:
    """Every number of the weights."""
    found = {}
    for name, weight in loaded.weights.items():
        if isinstance(weight, PackedLinear):
            found[name] = ops.embed(weight, np.arange(weight.n, dtype=np.int32)).tobytes()
        else:
            found[name] = np.asarray(weight).tobytes()
    return found


def test_what_plans_cut_is_stored_by_their_cuts(folders: tuple[Path, Path]) -> None:
    with Checkpoint(folders[1]) as checkpoint:
        table = {
            name.split("layers.0.")[1]: (slices[0].axis, [own.stop for own in slices])
            for name in checkpoint.names
            if (slices := checkpoint.slices(name))[0].axis and "layers.0" in name
        }
        (head,) = [checkpoint.slices(name) for name in checkpoint.names if "lm_head" in name]
        assert len(checkpoint.slices("model.embed_tokens.weight")) == 1
    assert table == {
        "self_attn.q_proj.weight": ("rows", list(range(32, 257, 32))),
        "self_attn.k_proj.weight": ("rows", [32, 64]),
        "self_attn.v_proj.weight": ("rows", [32, 64]),
        "self_attn.o_proj.weight": ("columns", list(range(32, 257, 32))),
        "mlp.gate_proj.weight": ("rows", list(range(128, 1025, 128))),
        "mlp.up_proj.weight": ("rows", list(range(128, 1025, 128))),
        "mlp.down_proj.weight": ("columns", list(range(128, 1025, 128))),
    }
    assert [own.stop for own in head] == list(range(64, 513, 64))


def test_every_number_and_the_fingerprint_stay(folders: tuple[Path, Path], tmp_path: Path) -> None:
    plain, sliced = folders
    assert verify_folder(plain, sliced) == 21
    for ops in (NativeOps(families()[0], "bf16"), CompressedOps(families()[0], "bf16"), NativeOps("portable", "fp32")):
        (one,), (other,) = load(plain, ops, [None]), load(sliced, ops, [None])
        assert (one.fingerprint, one.weights_hash) == (other.fingerprint, other.weights_hash)
        assert rows_of(ops, one) == rows_of(ops, other)
    decompress_folder(sliced, tmp_path, report=lambda _: None)
    assert verify_folder(plain, tmp_path) == 21


def test_rows_of_plain_matrices_stay_where_every_reader_looks_for_them(tmp_path: Path) -> None:
    plain, sliced = write_sliced(tmp_path, "plain")
    raw = (sliced / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:start])
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        by_columns = name.endswith(("o_proj.weight", "down_proj.weight"))
        assert (entry["dtype"] == "U8") == by_columns
        if not by_columns:
            with Checkpoint(plain) as checkpoint:
                first, stop = entry["data_offsets"]
                assert raw[start + first : start + stop] == bytes(checkpoint.raw(name))


@pytest.mark.parametrize("mesh", ["tp2", "tp8", "tp4,pp2"])
@pytest.mark.parametrize("kind", [NativeOps, CompressedOps])
def test_a_plan_changes_no_bit(folders: tuple[Path, Path], mesh: str, kind: type[NativeOps]) -> None:
    ops = kind(families()[0], "bf16")
    assert answers(ShardedModel(folders[1], ops, parse_mesh(mesh))) == answers(WholeModel(folders[0], ops))


@pytest.mark.parametrize("mesh", ["tp2", "tp4", "tp8", "pp2", "tp2,pp2"])
def test_a_rank_reads_its_share_and_what_all_keep(folders: tuple[Path, Path], mesh: str) -> None:
    """At most 2 % more than the bytes of the slices that its rows and columns make."""
    plan, ops = parse_mesh(mesh), NativeOps(families()[0], "bf16")
    spec = inspect_model(folders[1])
    whole = checkpoint_format(spec.architecture, "").layout(spec)
    for rank in range(plan.ranks):
        shard = shard_model(spec, plan, rank)
        (loaded,) = load(folders[1], ops, [shard])
        assert loaded.read_bytes <= 1.02 * share_bytes(folders[1], shard.layout(whole))
        assert loaded.fingerprint == load(folders[0], ops, [None])[0].fingerprint


def share_bytes(folder: Path, layout: WeightLayout) -> float:
    """Bytes that a layout's parts have in a folder, if each number of a tensor took equally many."""
    with Checkpoint(folder) as checkpoint:
        total = {name: checkpoint.info(name) for name in checkpoint.names}
        parts = {(part.tensor, part.rows, part.columns): part for part in layout.parts}.values()
        return sum(total[part.tensor].nbytes * part.numbers / np.prod(part.shape) for part in parts)


def test_a_rank_needs_no_other_byte(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """All others are turned round: its weights are the same, and another rank's are refused."""
    ops, spec = NativeOps(families()[0], "bf16"), inspect_model(folders[1])
    first, second = (shard_model(spec, Mesh(tensor=2), rank) for rank in range(2))
    torn = tmp_path / "torn"
    torn.mkdir()
    for path in folders[1].iterdir():
        (torn / path.name).write_bytes(path.read_bytes())
    layout = first.layout(checkpoint_format(spec.architecture, "").layout(spec))
    with Checkpoint(folders[1]) as checkpoint:
        keep: dict[Path, list[tuple[int, int]]] = {}
        for part in layout.parts:
            place = checkpoint.file_range(part.tensor)
            for own in needed_slices(checkpoint, part)[1]:
                begin = place.offset + own.begin
                keep.setdefault(checkpoint.path_of(part.tensor), []).append((begin, begin + own.nbytes))
    for path, ranges in keep.items():
        raw = path.read_bytes()
        start = 8 + int.from_bytes(raw[:8], "little")
        other = np.frombuffer(raw, np.uint8) ^ np.uint8(0xFF)
        other[:start] = np.frombuffer(raw, np.uint8)[:start]
        for begin, end in ranges:
            other[begin:end] = np.frombuffer(raw, np.uint8)[begin:end]
        (torn / path.name).write_bytes(other.tobytes())
    (wanted,), (found,) = load(folders[1], ops, [first]), load(torn, ops, [first])
    assert rows_of(ops, found) == rows_of(ops, wanted)
    assert found.fingerprint == wanted.fingerprint
    for others in ([second], [None], [first, second]):
        with pytest.raises(ModelError, match="damaged"):
            load(torn, ops, others)
