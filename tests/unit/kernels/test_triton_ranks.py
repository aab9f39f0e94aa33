"""Law 1 over plans on GPUs' kernels, each rank with memory of its own: the bits of the undivided model.

Interpreted where there is no GPU, so models and steps are small.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from kernel_cases import INTERPRETED, TRITONS, make

from peer_ranks import PeerMemories
from penstock.config.mesh import Mesh, parse_mesh
from penstock.errors import KernelError
from penstock.kernels.operands import KvShape, PageShare
from penstock.kernels.sampling import GumbelRows
from penstock.weights.compression_convert import compress_folder
from sharded_bench import FEW_CHUNKS, ShardedModel, WholeModel, answers, batches
from tiny_models import Tensors, llama_config, random_tensors, write_model, write_weights

LONG = [pytest.mark.long] if INTERPRETED else []
EXPERTS = 8
DENSE = llama_config(
    vocab_size=113,
    num_hidden_layers=2,
    num_attention_heads=12,
    num_key_value_heads=4,
    head_dim=16,
    intermediate_size=272,
    max_position_embeddings=64,
)
ROUTED = DENSE | {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 3,
    "num_attention_heads": 8,
    "intermediate_size": 64,
}


MODELS = {"dense": DENSE, "experts": ROUTED, "one layer of experts": ROUTED | {"num_hidden_layers": 1}}


def write(folder: Path, config: dict[str, Any]) -> Path:
    write_model(folder, config)
    if "num_local_experts" in config:
        write_weights(folder, routed(random_tensors(config)))
    return folder


def routed(tensors: Tensors) -> Tensors:
    """The same with experts in place of each MLP, as Mixtral names them."""
    rng, found = np.random.default_rng(9), Tensors()
    for name, value in tensors.items():
        layer, _, kind = name.partition(".mlp.")
        if not kind:
            found[name] = value
            continue
        own = {"gate_proj.weight": "w1", "up_proj.weight": "w3", "down_proj.weight": "w2"}[kind]
        gate = rng.standard_normal((EXPERTS, ROUTED["hidden_size"]))
        found[f"{layer}.block_sparse_moe.gate.weight"] = gate.astype(value.dtype)
        for expert in range(EXPERTS):
            mixed = value.astype(np.float32) * (1 + rng.standard_normal((len(value), 1)) / 2)
            found[f"{layer}.block_sparse_moe.experts.{expert}.{own}.weight"] = mixed.astype(value.dtype)
    return found


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Any, Any]]:
    """A folder, the backend and what the undivided model computes: made once."""
    made = dict[tuple[str, str], tuple[Path, Any, Any]]()

    def of(name: str, compute: str) -> tuple[Path, Any, Any]:
        if (name, compute) not in made:
            root = tmp_path_factory.mktemp("model")
            folder = write(root / "plain", MODELS.get(name, DENSE))
            if name == "compressed":  # what is cut is loaded as plain weights
                compress_folder(folder, root / name, threads=1, report=lambda _: None)
                folder = root / name
            ops = make(TRITONS[0][0], compute)
            made[name, compute] = folder, ops, answers(WholeModel(folder, ops, FEW_CHUNKS))
        return made[name, compute]

    return of


Whole = Callable[[str, str], tuple[Path, Any, Any]]


def peers_of(ops: Any, mesh: Mesh) -> PeerMemories:
    """Room for the largest product of few rows that ranks of a stage join."""
    segments = 8 // mesh.tensor
    return PeerMemories(ops, mesh.tensor, half=segments * 64 * DENSE["hidden_size"], stages=mesh.pipeline)


PLANS = [
    ("compressed", "tp2,pp2", "bf16"),
    *(
        (name, plan, compute)
        for name in ("dense", "experts")
        for plan, compute in (*((plan, "bf16") for plan in ("tp2", "tp4", "tp8", "pp2", "tp2,pp2")), ("tp2", "fp32"))
    ),
]


@pytest.mark.parametrize(("name", "plan", "compute"), [pytest.param(*each, marks=LONG) for each in PLANS])
def test_a_plan_changes_no_bit(name: str, plan: str, compute: str, whole: Whole) -> None:
    """Sums over ranks are gathered."""
    folder, ops, want = whole(name, compute)
    mesh = parse_mesh(plan)
    assert answers(ShardedModel(folder, ops, mesh, unshared=True, chunks=FEW_CHUNKS)) == want


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        ("one layer of experts", "tp2"),
        *(pytest.param(*each, marks=LONG) for each in (("dense", "tp8"), ("dense", "tp2,pp2"), ("experts", "tp4"))),
    ],
)
def test_a_step_that_joins_out_of_all_ranks_memory_has_the_same_bits(name: str, plan: str, whole: Whole) -> None:
    folder, ops, want = whole(name, "bf16")
    mesh = parse_mesh(plan)
    peers = peers_of(ops, mesh)
    model = ShardedModel(folder, ops, mesh, unshared=True, chunks=FEW_CHUNKS, connect=peers.connect)
    assert answers(model) == want
    sums = 2 if name == "dense" else 1  # of a layer: attention's output; the MLP's
    for rank, memory in zip(model.ranks, peers.memories, strict=True):
        skipped = int(rank.shard.is_last)  # the last layer of the first step, which has no output rows
        joins = sums * (len(rank.shard.layers) * len(FEW_CHUNKS) - skipped)
        assert set(memory.words[:-1].flatten().tolist()) == {joins}


@pytest.mark.long
def test_ranks_sample_together(whole: Whole) -> None:
    """The last ones of a step's rows are picked on the device, the first is sampled from logits."""
    folder, ops, _ = whole("dense", "bf16")
    undivided = WholeModel(folder, ops, FEW_CHUNKS)
    model = ShardedModel(folder, ops, Mesh(tensor=2), unshared=True, chunks=FEW_CHUNKS)
    batch = list(batches(undivided.spec, chunks=FEW_CHUNKS))[1]
    tokens = model.picked(batch, picked_rows())
    assert tokens == [undivided.picked(batch, picked_rows()), None]


def picked_rows() -> GumbelRows:
    picks = GumbelRows.empty(1)
    picks.seeds_F[:], picks.temperatures_F[:] = 11, 1.0
    return picks


def test_pages_are_not_shared() -> None:
    """Ranks have a device's memory each, so pages of the whole model are refused."""
    shape = KvShape.plain(layers=2, kv_heads=4, head_dim=16)
    share = replace(shape, kv_heads=2, share=PageShare(shape, range(2), (0, 1)))
    ops = make(TRITONS[0][0], "bf16")
    with pytest.raises(KernelError, match="pages that one rank has alone"):
        ops.new_kv(share, pages=1)
    assert ops.page_bytes(share.unshared) * 2 == ops.page_bytes(shape)
