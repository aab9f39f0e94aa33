"""Law 1 over plans: hidden states and logits have the bits of the undivided model, whatever the mesh."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from numpy.typing import NDArray

from forked_ranks import run_forked
from penstock.config.mesh import Mesh, parse_mesh
from penstock.errors import ModelError
from penstock.kernels import _native
from penstock.kernels.native.backend import families
from penstock.kernels.operands import PackedLinear, StepBatch
from penstock.kernels.ops import DirectProgram, Ops
from penstock.kernels.sampling import GumbelRows
from penstock.kernels.select import make_ops
from penstock.parallel.collectives.interface import Collectives
from penstock.parallel.shard import shard_model
from penstock.weights.compression_convert import compress_folder
from penstock.weights.compression_format import GPU
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.inspect import inspect_model
from penstock.weights.load import LoadedModel, load_model, load_parts
from sharded_bench import CompressedOps, ShardedModel, WholeModel, answers, batches, rank_of
from tiny_gguf import write_gguf
from tiny_models import DTYPES, Tensors, llama_config, random_tensors, write_model, write_weights

MESHES = [Mesh(tensor=tensor, pipeline=pipeline) for tensor, pipeline in product((1, 2, 4, 8), (1, 2, 3))]
SIZES = {
    "vocab_size": 113,
    "num_attention_heads": 8,
    "head_dim": 16,
    "intermediate_size": 272,
    "max_position_embeddings": 256,
}
GROUPED = llama_config(**SIZES, num_key_value_heads=2)
MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": GROUPED,
    "parts of groups": llama_config(**SIZES | {"num_attention_heads": 12}, num_key_value_heads=4),
    "one key-value head, tied": llama_config(**SIZES, num_key_value_heads=1, tie_word_embeddings=True),
    "biases": llama_config(**SIZES, num_key_value_heads=4, attention_bias=True, mlp_bias=True),
}
FIVE_HEADS = llama_config(**SIZES | {"num_attention_heads": 5}, num_key_value_heads=1)


def write(folder: Path, config: dict[str, Any], dtype: str = "bf16") -> Path:
    """A random model, its biases too."""
    write_model(folder, config, dtype=dtype)
    if config["attention_bias"]:
        write_weights(folder, with_biases(random_tensors(config, dtype=dtype), DTYPES[dtype]))
    return folder


def with_biases(tensors: Tensors, dtype: np.dtype[Any]) -> Tensors:
    rng = np.random.default_rng(7)
    matrices = [name for name in tensors if "_proj" in name]
    return tensors | {
        name.replace("weight", "bias"): (rng.standard_normal(len(tensors[name])) / 4).astype(dtype) for name in matrices
    }


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of one of ``MODELS``, written once."""
    root, written = tmp_path_factory.mktemp("models"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write(root / name, MODELS[name])
        return written[name]

    return folder


def check(folder: Path, ops: Ops, *meshes: Mesh) -> None:
    """Every mesh computes what the undivided model does."""
    want = answers(WholeModel(folder, ops))
    (first, *others), pages = want
    assert first is None
    assert all(rows is not None for rows in others)
    assert any(pages)
    for mesh in meshes:
        assert answers(ShardedModel(folder, ops, mesh)) == want, mesh.name


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh", ["tp2", "tp8", "tp4,pp2"])
def test_a_plan_changes_no_bit(name: str, mesh: str, folders: Callable[[str], Path]) -> None:
    check(folders(name), make_ops(compute_dtype="bf16"), parse_mesh(mesh))


def test_a_plan_changes_no_bit_of_the_reference(folders: Callable[[str], Path]) -> None:
    check(folders("biases"), make_ops(family="reference", compute_dtype="fp32"), parse_mesh("tp2,pp3"))


def test_five_heads_on_two_ranks_are_two_and_three(tmp_path: Path) -> None:
    folder, ops = write(tmp_path, FIVE_HEADS), make_ops(compute_dtype="fp32")
    check(folder, ops, Mesh(tensor=2))
    ranks = ShardedModel(folder, ops, Mesh(tensor=2)).ranks
    assert [rank.shard.shares[0].own_heads.queries for rank in ranks] == [range(2), range(2, 5)]
    assert [rank.shard.spec.kv.share.heads for rank in ranks if rank.shard.spec.kv.share] == [(0,), (0,)]


@pytest.mark.long
@pytest.mark.parametrize(("family", "dtype"), list(product((None, "reference"), ("bf16", "fp32"))))
@pytest.mark.parametrize("name", MODELS)
def test_no_plan_changes_a_bit(name: str, family: str | None, dtype: str, folders: Callable[[str], Path]) -> None:
    check(folders(name), make_ops(family=family, compute_dtype=dtype), *MESHES)


@pytest.mark.parametrize("mesh", ["tp2", "pp3", "tp4,pp2"])
def test_a_rank_holds_its_share_of_the_bytes(mesh: str, folders: Callable[[str], Path]) -> None:
    """And all of what every rank keeps.  The fingerprint is the whole model's."""
    ops, plan = make_ops(compute_dtype="bf16"), parse_mesh(mesh)
    whole = WholeModel(folders("grouped queries"), ops).loaded
    for rank in ShardedModel(folders("grouped queries"), ops, plan).ranks:
        assert rank.loaded.fingerprint == whole.fingerprint
        layers = sum(matrix_bytes(rank.loaded.weights[name]) for name in rank.loaded.weights if name[0].isdigit())
        numbers = sum(
            part.numbers
            for weight in rank.shard.layout(checkpoint_format(whole.spec.architecture, "").layout(whole.spec)).weights
            if weight.name.endswith(("qkv", "out", "gate_up", "down"))
            for part in weight.parts
        )
        assert layers == 2 * numbers
        embed = matrix_bytes(whole.weights["embed"]) if rank.shard.is_first else 0
        rows = rank.shard.head_widths[plan.place(rank.shard.rank).tensor] if rank.shard.is_last else 0
        assert rank.loaded.nbytes - layers == embed + -(-rows // 16) * 16 * whole.spec.hidden * 2


def matrix_bytes(weight: PackedLinear | NDArray[np.float32]) -> int:
    return weight.nbytes if isinstance(weight, PackedLinear) else 0


@pytest.mark.parametrize(("mesh", "layout"), [("tp2", ""), ("tp8", ""), ("tp4,pp2", ""), ("tp2", GPU)])
def test_compressed_weights_stay_so_and_change_no_bit(
    mesh: str, layout: str, folders: Callable[[str], Path], tmp_path: Path
) -> None:
    """Heads of 16 columns: a rank's columns begin within a chunk of blocks.  Some 32 columns of the GPU's layout, whose
    blocks have 64, would be larger than plain ones."""
    plain, ops, plan = folders("grouped queries"), CompressedOps(families()[0], "bf16"), parse_mesh(mesh)
    compress_folder(plain, tmp_path, threads=1, report=lambda _: None, layout=layout)
    whole = WholeModel(plain, ops)
    want = answers(whole)
    assert answers(WholeModel(tmp_path, ops)) == want
    sharded = ShardedModel(tmp_path, ops, plan)
    assert answers(sharded) == want
    for rank in sharded.ranks:
        assert rank.loaded.fingerprint == whole.loaded.fingerprint
        matrices = [weight for weight in rank.loaded.weights.values() if isinstance(weight, PackedLinear)]
        kept = [isinstance(weight.data, _native.CompressedWeights) for weight in matrices]
        assert all(kept) if layout == "" else sum(kept) > len(kept) / 2


def test_a_gguf_file_is_divided_where_it_is_plain(tmp_path: Path) -> None:
    ops, config = make_ops(compute_dtype="fp32"), GROUPED | {"hidden_size": 128}
    write_gguf(tmp_path / "plain.gguf", config, random_tensors(config))
    check(tmp_path / "plain.gguf", ops, Mesh(tensor=2, pipeline=2))
    write_gguf(tmp_path / "codes.gguf", config, random_tensors(config), {"o_proj": GGMLQuantizationType.Q8_0})
    with pytest.raises(ModelError, match="is quantized, and columns of codes cannot be divided over ranks yet"):
        ShardedModel(tmp_path / "codes.gguf", ops, Mesh(tensor=2))


def test_a_step_whose_ranks_do_not_share_memory_is_not_recorded(folders: Callable[[str], Path]) -> None:
    """No rank waits for another while a backend tries to record its steps."""
    ops = make_ops(compute_dtype="fp32")
    for rank in ShardedModel(folders("grouped queries"), ops, parse_mesh("tp2")).ranks:
        assert isinstance(rank.program, DirectProgram)


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_two_processes_over_shared_memory_have_the_bits_of_one(mesh: str, folders: Callable[[str], Path]) -> None:
    folder, plan = folders("parts of groups"), parse_mesh(mesh)
    whole = WholeModel(folder, make_ops(compute_dtype="bf16"))
    steps = list(batches(whole.spec))
    pages = memoryview(mmap.mmap(-1, len(whole.pages)))

    def rank(group: Collectives) -> list[str | None]:
        ops = make_ops(compute_dtype="bf16")
        own = rank_of(folder, ops, shard_model(whole.spec, plan, group.rank), (group, group), pages)
        assert not isinstance(own.program, DirectProgram)  # recorded
        rows = [own.step(ops, batch) for batch in steps]
        return [None if each is None else each[0].hex() + each[1].hex() for each in rows]

    want = [None if each is None else each[0].hex() + each[1].hex() for each in answers(whole)[0]]
    found = run_forked([rank, rank])
    assert found[1] == want
    assert found[0] == (want if plan.tensor == 2 else [None] * len(want))
    assert pages == whole.pages


@pytest.mark.parametrize("mesh", ["tp2", "pp2"])
def test_ranks_find_tokens_together(mesh: str, folders: Callable[[str], Path]) -> None:
    """Of the rows of a step, one is sampled from logits that come together, the others are the best of all ranks'."""
    folder, plan = folders("one key-value head, tied"), parse_mesh(mesh)
    whole = WholeModel(folder, make_ops(compute_dtype="bf16"))
    pages = memoryview(mmap.mmap(-1, len(whole.pages)))
    steps = list(batches(whole.spec))[1:]
    want = [whole.picked(batch, picks_of(batch)) for batch in steps]

    def rank(group: Collectives) -> list[list[int] | None]:
        ops = make_ops(compute_dtype="bf16")
        own = rank_of(folder, ops, shard_model(whole.spec, plan, group.rank), (group, group), pages)
        return [own.picked(ops, batch, picks_of(batch)) for batch in steps]

    found = run_forked([rank, rank])
    leader = 0 if plan.tensor == 2 else 1
    assert found[leader] == want
    assert found[1 - leader] == [None] * len(steps)


def picks_of(batch: StepBatch) -> GumbelRows:
    """All rows of a step but the first, some of them without noise."""
    picks = GumbelRows.empty(len(batch.sample_rows_R) - 1)
    picks.seeds_F[:] = np.arange(len(picks.seeds_F)) + 11
    picks.temperatures_F[:] = np.arange(len(picks.seeds_F)) % 2
    return picks


def test_ranks_that_are_loaded_together_have_what_is_the_same_once(folders: Callable[[str], Path]) -> None:
    folder, ops = folders("biases"), make_ops(compute_dtype="bf16")
    spec = inspect_model(folder)
    shards = [shard_model(spec, parse_mesh(text), rank) for text in ("tp2", "pp2") for rank in range(2)]
    together = load_parts(folder, spec, ops, [None, *(shard.layout for shard in shards)])
    alone = [load_model(folder, spec, ops), *(load_model(folder, spec, ops, select=shard.layout) for shard in shards)]
    for part, own in zip(together, alone, strict=True):
        assert (part.fingerprint, part.weights_hash, part.nbytes) == (own.fingerprint, own.weights_hash, own.nbytes)
        assert part.weights.keys() == own.weights.keys()
        assert all(product(ops, part.weights[name]) == product(ops, own.weights[name]) for name in own.weights)
    whole, first, second, before, behind = (part.weights for part in together)
    assert whole["embed"] is first["embed"] is second["embed"] is before["embed"]
    assert whole["2.gate_up"] is behind["0.gate_up"]
    assert first["0.qkv"] is not second["0.qkv"]


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "compressed"])
def test_a_head_that_is_the_embedding_is_in_memory_once(
    folders: Callable[[str], Path], tmp_path: Path, compressed: bool
) -> None:
    folder, ops = folders("one key-value head, tied"), make_ops(compute_dtype="bf16")
    if compressed:
        compress_folder(folder, tmp_path / "compressed", threads=1, report=lambda *_: None)
        folder = tmp_path / "compressed"
    spec = inspect_model(folder)
    shards = [shard_model(spec, parse_mesh("tp2"), rank) for rank in range(2)]
    alone = [load_model(folder, spec, ops, select=shard.layout) for shard in shards]
    kept: list[bool] = []

    class Ranks:
        """The backend, which says whether rows are in the memory of the whole."""

        def __getattr__(self, name: str) -> Any:
            return getattr(ops, name)

        def packed_rows(self, weight: PackedLinear, rows: range) -> PackedLinear | None:
            part = ops.packed_rows(weight, rows)
            kept.append(part is not None)
            return part

    together = load_parts(folder, spec, cast(Ops, Ranks()), [shard.layout for shard in shards])
    assert kept == [True, True]
    for part, own in zip(together, alone, strict=True):
        head = part.weights["head"]
        assert (head.n, head.k) == (own.weights["head"].n, own.weights["head"].k)
        assert product(ops, head) == product(ops, own.weights["head"])
        assert answers_of_embedding(ops, part) == answers_of_embedding(ops, own)
    assert sum(part.weights["head"].n for part in together) == spec.vocab


def answers_of_embedding(ops: Ops, part: LoadedModel) -> bytes:
    """The embeddings of some tokens."""
    return ops.to_numpy(ops.embed(part.weights["embed"], np.arange(0, 113, 7, dtype=np.int32))).tobytes()


def test_rows_in_the_memory_of_the_whole_are_whole_panels(folders: Callable[[str], Path]) -> None:
    folder, ops = folders("one key-value head, tied"), make_ops(compute_dtype="bf16")
    whole = load_model(folder, inspect_model(folder), ops).weights["embed"]
    for rows in (range(8, 32), range(16, 40), range(96, 128), range(32, 32)):
        with pytest.raises(ValueError, match="whole panels of 16"):
            ops.packed_rows(whole, rows)
    assert make_ops(family="reference", compute_dtype="bf16").packed_rows(whole, range(16)) is None


def product(ops: Ops, weight: Any) -> bytes:
    """The bits of a weight, or of what it makes of some rows."""
    if not isinstance(weight, PackedLinear):
        return bytes(weight)
    x_TK = ops.compute(np.random.default_rng(3).standard_normal((3, weight.k)))
    return ops.to_numpy(ops.linear(x_TK, weight)).tobytes()
