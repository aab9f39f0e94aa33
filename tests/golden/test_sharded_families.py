"""Every family that can be divided over ranks has the bits of the undivided model, over any plan."""

from __future__ import annotations

import mmap
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from family_cases import CASES
from parity_oracle import write_random_model
from shrunk_models import GPT2_SMALL, Case

from forked_ranks import run_forked
from penstock.config.mesh import Mesh
from penstock.kernels.native.backend import families
from penstock.kernels.ops import DirectProgram
from penstock.kernels.select import make_ops
from penstock.parallel.collectives.interface import Collectives
from penstock.parallel.shard import shard_model
from penstock.parallel.stored_cuts import folder_cuts
from penstock.weights.compression_convert import compress_folder, shard_folder
from sharded_bench import CompressedOps, Rows, ShardedModel, WholeModel, answers, batches, rank_of

REFUSED = ("qwen_3_next", "deepseek", "kimi", "qwen_2_vl", "qwen_2_5_vl")
"""Families with what cannot be divided yet (``penstock.parallel.shard.check_supported``)."""

FIRST = ("olmo_2_1b", "gemma_2_2b", "gpt_oss_20b_bf16")
"""In the default tier: norms over all heads; norms around blocks; experts, sinks, windows and biases."""

MESHES = [Mesh(tensor=tensor, pipeline=pipeline) for tensor, pipeline in product((1, 2, 4, 8), (1, 2, 3))]


def wider(case: Case) -> Case:
    """The same model with 8 heads, and inner columns for 8 ranks."""
    if case.sizes is GPT2_SMALL:
        return replace(case, small=case.small | {"n_embd": 128, "n_head": 8})
    kv_heads = {1: 1, 2: 4, 4: 8}[case.small.get("num_key_value_heads", 2)]
    changes: dict[str, Any] = {
        "hidden_size": 128,
        "num_attention_heads": 8,
        "num_key_value_heads": kv_heads,
        "intermediate_size": 272,
    }
    own = {"moe_intermediate_size": 272, "intermediate_size_mlp": 272}
    return replace(case, small=case.small | changes | {name: own[name] for name in own.keys() & case.small.keys()})


def cases() -> list[Any]:
    return [
        pytest.param(case, id=case.name, marks=() if case.config in FIRST else pytest.mark.long)
        for case in CASES
        if not case.config.startswith(REFUSED)
    ]


def check(case: Case, folder: Path, family: str | None, dtype: str, meshes: list[Mesh]) -> None:
    write_random_model(folder, wider(case).shrunk())
    ops = make_ops(family=family, compute_dtype=dtype)
    want = answers(WholeModel(folder, ops))
    for mesh in meshes:
        assert answers(ShardedModel(folder, ops, mesh)) == want, mesh.name


@pytest.mark.parametrize("case", cases())
def test_a_family_has_the_same_bits_over_two_times_two_ranks(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, None, "bf16", [Mesh(tensor=2, pipeline=2)])


@pytest.mark.parametrize(("ranks", "dtype"), [(2, "bf16"), pytest.param(4, "fp32", marks=pytest.mark.long)])
def test_norms_over_all_heads_are_recorded(ranks: int, dtype: str, tmp_path: Path) -> None:
    """Processes that share memory gather the heads within the recorded step, piece by piece."""
    (case,) = (case for case in CASES if case.config == "olmo_2_1b")
    write_random_model(tmp_path, wider(case).shrunk())
    whole = WholeModel(tmp_path, make_ops(compute_dtype=dtype))
    pages = memoryview(mmap.mmap(-1, len(whole.pages)))

    def rank(group: Collectives) -> list[str]:
        ops = make_ops(compute_dtype=dtype)
        shard = shard_model(whole.spec, Mesh(tensor=ranks), group.rank)
        own = rank_of(tmp_path, ops, shard, (group, group), pages)
        assert not isinstance(own.program, DirectProgram)
        return [hexed(own.step(ops, batch)) for batch in batches(whole.spec)]

    want = [hexed(rows) for rows in answers(whole)[0]]
    assert run_forked([rank] * ranks, slot_bytes=1 << 11) == [want] * ranks
    assert pages == whole.pages


def hexed(rows: Rows) -> str:
    return "" if rows is None else rows[0].hex() + rows[1].hex()


@pytest.mark.parametrize("form", ["in slices", "compressed", "compressed, in slices"])
@pytest.mark.parametrize("case", cases())
def test_a_family_has_the_same_bits_however_it_is_stored(case: Case, form: str, tmp_path: Path) -> None:
    """Compressed weights stay so, also where the processor has no instructions for them."""
    plain, stored = tmp_path / "plain", tmp_path / "stored"
    write_random_model(plain, wider(case).shrunk())
    cuts = folder_cuts(plain) if "slices" in form else {}
    if form == "in slices":
        shard_folder(plain, stored, threads=1, report=lambda _: None, cuts=cuts)
    else:
        compress_folder(plain, stored, threads=1, report=lambda _: None, cuts=cuts)
    ops = CompressedOps(families()[0], "bf16")
    want = answers(WholeModel(plain, ops))
    assert answers(WholeModel(stored, ops)) == want
    for mesh in (Mesh(tensor=4), Mesh(tensor=2, pipeline=2)):
        assert answers(ShardedModel(stored, ops, mesh)) == want, mesh.name


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("case", [case for param in cases() for case in param.values], ids=lambda case: case.name)
def test_a_family_has_the_same_bits_over_every_plan(case: Case, dtype: str, tmp_path: Path) -> None:
    check(case, tmp_path, None, dtype, MESHES)


@pytest.mark.long
@pytest.mark.parametrize("case", [case for param in cases() for case in param.values], ids=lambda case: case.name)
def test_a_family_has_the_same_bits_on_the_reference(case: Case, tmp_path: Path) -> None:
    check(case, tmp_path, "reference", "bf16", [Mesh(tensor=2, pipeline=2), Mesh(tensor=8)])
