"""A rank's part of a model: every number of a weight is on the rank that computes with it, and on no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from numpy.typing import NDArray

from penstock.config.mesh import Mesh, NodePlace, parse_mesh
from penstock.errors import ConfigError
from penstock.kernels.operands import COLUMN_UNIT, Sparse, segment_ends
from penstock.parallel.shard import (
    HeadShare,
    ModelShard,
    check_supported,
    column_range,
    layer_costs,
    node_kv,
    part_of,
    shard_model,
    stage_layers,
)
from penstock.types import PAGE_TOKENS
from penstock.weights.architecture.decoder import AttentionConfig, DecoderConfig, MlpConfig
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, Vector, WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.quantization.config import parse_quantization
from tiny_models import llama_config

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"
WAYS = (1, 2, 4, 8)
UNEVEN = llama_config(num_attention_heads=9, num_key_value_heads=3, head_dim=16, intermediate_size=300)


def model_of(config: dict[str, Any]) -> tuple[ModelSpec, WeightLayout]:
    family = checkpoint_format(config["architectures"][0], "")
    spec = family.parse(ConfigFields(config, "config.json"))
    return spec, family.layout(spec)


def published(name: str, **changes: Any) -> tuple[ModelSpec, WeightLayout]:
    return model_of(json.loads((CONFIGS / f"{name}.json").read_text()) | changes)


def contents(weight: Matrix | Vector) -> NDArray[Any]:
    """The weight, if each tensor had the numbers 0, 1, 2, ... and a thousandth of its name's length."""
    parts = []
    for part in weight.parts:
        tensor = np.arange(np.prod(part.shape), dtype=np.float64).reshape(part.shape) + len(part.tensor) / 1000
        parts.append(part.of(tensor))
        assert parts[-1].size == part.numbers
        assert len(parts[-1]) == part.outputs
    return np.concatenate(parts)


def by_name(layout: WeightLayout) -> dict[str, Matrix | Vector]:
    return {weight.name: weight for weight in layout.weights}


def stage_of(spec: ModelSpec, layout: WeightLayout, tensor: int) -> tuple[list[ModelShard], list[dict[str, Any]]]:
    """All ranks of the only stage, and the contents of their weights."""
    shards = [shard_model(spec, Mesh(tensor=tensor), rank) for rank in range(tensor)]
    weights = [by_name(shard.layout(layout)) for shard in shards]
    return shards, [{name: contents(weight) for name, weight in own.items()} for own in weights]


# --- shares -----------------------------------------------------------------------------------------------------------


@given(st.integers(1, 12), st.integers(1, 12), st.sampled_from(WAYS))
def test_every_query_head_is_on_one_rank_with_the_key_value_head_that_it_reads(
    kv_heads: int, group: int, parts: int
) -> None:
    heads = kv_heads * group
    shares = [HeadShare.of(heads, kv_heads, part, parts) for part in range(parts)]
    assert [head for share in shares for head in share.queries] == list(range(heads))
    for share in shares:
        read = [share.kv[place // share.group] for place in range(len(share.queries))]
        assert read == [head // group for head in share.queries]
        assert len(share.kv) * share.group == len(share.queries)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "ways", "slots"), [(5, 1, 2, 1), (28, 4, 2, 2), (28, 4, 8, 1), (8, 2, 8, 1)]
)
def test_key_value_heads_are_not_repeated_where_ranks_have_whole_groups_or_parts_of_one(
    heads: int, kv_heads: int, ways: int, slots: int
) -> None:
    assert {len(HeadShare.of(heads, kv_heads, part, ways).kv) for part in range(ways)} == {slots}


def test_a_rank_with_parts_of_groups_has_slots_of_one_size() -> None:
    assert HeadShare.of(9, 3, 0, 2) == HeadShare(range(4), (0, 0, 0, 1), 1)
    assert HeadShare.of(40, 10, 0, 4) == HeadShare(range(10), (0, 0, 1, 1, 2), 2)


@given(st.integers(1, 5000), st.sampled_from([1, 16, COLUMN_UNIT, 128]), st.sampled_from(WAYS))
def test_ranks_have_whole_segments_and_heads_end_where_they_do(units: int, unit: int, parts: int) -> None:
    ends = segment_ends(units * unit, unit)
    for part in range(parts):
        columns, whole = column_range(ends, part, parts), part_of(units, part, parts)
        assert (columns.start, columns.stop) == (whole.start * unit, whole.stop * unit)
        assert columns.stop in ends


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tensor", WAYS)
@pytest.mark.parametrize(
    "model",
    [
        model_of(UNEVEN),
        model_of(llama_config(num_attention_heads=8, num_key_value_heads=8, intermediate_size=256)),
        published("phi_3_mini_128k", num_hidden_layers=1, hidden_size=256, num_attention_heads=8, num_key_value_heads=8,
                  intermediate_size=256, vocab_size=140, rope_scaling=None),
        published("gpt2", n_layer=1, n_embd=128, n_head=8, vocab_size=140, n_positions=20),
        published("qwen_2_5_0_5b", num_hidden_layers=1, hidden_size=112, intermediate_size=256, vocab_size=140),
    ],
    ids=["unequal", "own key-value heads", "fused", "stored inputs first, with biases", "biases of some"],
)  # fmt: skip
def test_the_parts_of_all_ranks_are_the_weights_of_the_model(
    model: tuple[ModelSpec, WeightLayout], tensor: int
) -> None:
    spec, layout = model
    layer = spec.details_as(DecoderConfig).layers[0]
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionConfig)
    assert isinstance(mlp, MlpConfig)
    shards, ranks = stage_of(spec, layout, tensor)
    whole, size = {name: contents(weight) for name, weight in by_name(layout).items()}, attention.head_dim
    for name in whole.keys() - {
        f"0.{kind}{end}" for kind in ("qkv", "gate_up", "out", "down") for end in ("", "_bias")
    }:
        if name.startswith("0."):
            assert all(np.array_equal(own[name], whole[name]) for own in ranks), name
    assert all(np.array_equal(own["embed"], whole["embed"]) for own in ranks)
    heads = [own["embed" if tensor == 1 and spec.tied else "head"] for own in ranks]
    assert np.array_equal(np.concatenate(heads), whole["embed" if spec.tied else "head"])
    assert [len(rows) for rows in heads] == list(shards[0].head_widths)
    assert all(len(rows) % 16 == 0 for rows in heads[:-1])
    for name in ("0.out", "0.down"):
        assert np.array_equal(np.concatenate([own[name] for own in ranks], axis=1), whole[name])
        assert all(np.array_equal(own.get(f"{name}_bias", 0), whole.get(f"{name}_bias", 0)) for own in ranks)
    for name in {"0.gate_up", "0.gate_up_bias"} & whole.keys():
        halves = [np.split(own[name], 2 if mlp.gated else 1) for own in ranks]
        assert np.array_equal(
            np.concatenate([half for column in zip(*halves, strict=True) for half in column]), whole[name]
        )
    for name in {"0.qkv", "0.qkv_bias"} & whole.keys():
        heads = np.split(whole[name], attention.heads + 2 * attention.kv_heads)
        for shard, own in zip(shards, ranks, strict=True):
            share = HeadShare.of(attention.heads, attention.kv_heads, shard.rank, tensor)
            keys = [attention.heads + kv for kv in share.kv]
            wanted = [*share.queries, *keys, *(key + attention.kv_heads for key in keys)]
            assert np.array_equal(own[name], np.concatenate([heads[head] for head in wanted]))
            assert len(own[name]) == size * len(wanted)


def test_a_rank_has_its_segments_of_what_is_cut_along_k_and_says_so() -> None:
    spec, layout = model_of(UNEVEN)
    own = by_name(shard_model(spec, Mesh(tensor=4), 1).layout(layout))
    down = own["2.down"]
    assert isinstance(down, Matrix)
    assert down.partial
    assert down.parts[0].columns == (64, 160)
    assert down.segments == (32, 96)  # the third and the fourth of 1, 1, 1, 2, 1, 1, 1 and 2 units of 32
    assert {name for name, weight in own.items() if isinstance(weight, Matrix) and weight.partial} == {
        f"{layer}.{kind}" for layer in range(3) for kind in ("out", "down")
    }


@pytest.mark.parametrize("tied", [False, True])
def test_stages_have_whole_layers_and_only_the_ends_have_tables(tied: bool) -> None:
    spec, layout = model_of(llama_config(num_hidden_layers=5, tie_word_embeddings=tied))
    shards = [shard_model(spec, Mesh(pipeline=3), rank) for rank in range(3)]
    assert [list(shard.layers) for shard in shards] == [[0, 1], [2, 3], [4]]
    weights = [by_name(shard.layout(layout)) for shard in shards]
    tables = [{name for name in own if "." not in name} for own in weights]
    assert tables == [{"embed"}, set(), {"norm", "head"}]
    assert weights[2]["head"].parts[0].tensor == ("model.embed_tokens.weight" if tied else "lm_head.weight")
    assert weights[1]["1.down"].parts == by_name(layout)["3.down"].parts
    assert [shard.spec.layers for shard in shards] == [2, 2, 1]
    assert not any(shard.spec.tied for shard in shards)


def test_a_plan_of_one_rank_is_the_model() -> None:
    spec, layout = model_of(UNEVEN)
    shard = shard_model(spec, Mesh(), 0)
    assert shard.spec == spec
    assert shard.layout(layout) == layout


@pytest.mark.parametrize("name", ["llama_3_2_1b", "phi_3_mini_128k", "mistral_7b", "mixtral_8x7b", "qwen_3_30b_a3b"])
@pytest.mark.parametrize("mesh", [Mesh(tensor=8), Mesh(tensor=4, pipeline=2), Mesh(tensor=2, pipeline=3)])
def test_no_rank_has_more_than_its_share(name: str, mesh: Mesh) -> None:
    spec, layout = published(name)
    layer = numbers_in_layers(layout) / spec.layers
    for rank in range(mesh.ranks):
        shard = shard_model(spec, mesh, rank)
        assert numbers_in_layers(shard.layout(layout)) <= 1.02 * layer * len(shard.layers) / mesh.tensor


def numbers_in_layers(layout: WeightLayout) -> int:
    return sum(part.numbers for weight in layout.weights if weight.name[0].isdigit() for part in weight.parts)


def test_the_head_is_weighed_where_layers_become_stages() -> None:
    """The 1 B model's head costs as much as 4.3 of its layers: no stage has more than 1.05 of the mean."""
    spec, _ = published("llama_3_2_1b")
    assert stage_layers(spec, 2) == (range(10), range(10, 16))
    assert stage_layers(spec, 2, prompts=True) == (range(8), range(8, 16))
    assert stage_layers(spec, 3, prompts=True) == (
        range(5),
        range(5, 10),
        range(10, 16),
    )  # of the last only keys, values
    assert layer_costs(spec, prompts=True)[:-1] == layer_costs(spec)[:-1]
    assert layer_costs(spec, prompts=True)[-1] == 2048 * 2 * 8 * 64
    assert stage_layers(spec, 1) == (range(16),)
    assert stage_layers(spec, 16) == tuple(range(layer, layer + 1) for layer in range(16))
    for stages in range(1, 17):
        found = stage_layers(spec, stages)
        assert [layer for own in found for layer in own] == [*range(16)]
        assert all(found)


@pytest.mark.parametrize("name", ["gemma_3_1b", "llama_3_2_1b"])
def test_a_rank_finds_its_layers_in_pages_of_the_whole_model(name: str) -> None:
    spec, _ = published(name)
    for mesh in (Mesh(pipeline=spec.layers), Mesh(pipeline=3)):
        places = [place for rank in range(mesh.ranks) for place in shard_model(spec, mesh, rank).spec.kv.places]
        assert tuple(places) == spec.kv.places
        for kv in (shard_model(spec, mesh, rank).spec.kv for rank in range(mesh.ranks)):
            assert (kv.reaches, kv.layer_groups) == (spec.kv.reaches, spec.kv.layer_groups)
            assert kv.page_bytes("bf16") == spec.kv.page_bytes("bf16")


@pytest.mark.parametrize("name", ["gemma_3_1b", "llama_3_2_1b"])
@pytest.mark.parametrize("nodes", [2, 3])
def test_the_pages_of_a_machine_have_its_layers_in_the_groups_of_the_whole_model(name: str, nodes: int) -> None:
    spec, _ = published(name)
    mesh = Mesh(tensor=2, pipeline=4)
    groups: list[int] = []  # of each layer, in the order of stages
    for node in reversed(range(nodes)):
        kv = node_kv(spec, mesh, NodePlace(nodes=nodes, node=node))
        ranks = mesh.node_ranks(NodePlace(nodes=nodes, node=node))
        shards = [shard_model(spec, mesh, rank, nodes=nodes) for rank in ranks]
        assert {shard.spec.kv.of_pages for shard in shards} == {kv}
        assert [place for shard in shards if shard.rank % 2 == 0 for place in shard.spec.kv.places] == list(kv.places)
        assert all(shard.spec.kv.layer_groups == spec.kv.layer_groups for shard in shards)
        share = 1 if spec.kv.groups else len(kv.places) / spec.layers  # a group may be whole on one machine
        assert kv.page_bytes("bf16") == spec.kv.page_bytes("bf16") * share
        assert len(set(kv.places)) == len(kv.places)
        groups += [group for group, _ in kv.places]
    assert groups == [group for group, _ in spec.kv.places]


@pytest.mark.parametrize("name", ["gemma_3_1b", "llama_3_2_1b"])
@pytest.mark.parametrize("plan", ["pp3", "tp2,pp2"])
def test_pages_of_one_rank_have_its_layers_and_heads_alone(name: str, plan: str) -> None:
    """One page table serves all ranks: groups keep their numbers, also those that have no layer on a rank."""
    (spec, _), mesh = published(name), parse_mesh(plan)
    for rank in range(mesh.ranks):
        shard = shard_model(spec, mesh, rank)
        kv = shard.spec.kv.unshared
        assert (kv.reaches, kv.layer_groups) == (spec.kv.reaches, spec.kv.layer_groups)
        assert [group for group, _ in kv.places] == [spec.kv.places[layer][0] for layer in shard.layers]
        assert len(set(kv.places)) == kv.layers == len(shard.layers)
        most = max(len([1 for group, _ in kv.places if group == each]) for each in range(kv.layer_groups))
        own = -(-spec.kv.kv_heads // mesh.tensor)
        assert kv.page_bytes("bf16") == most * own * spec.kv.head_bytes("bf16") * PAGE_TOKENS


# --- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "mesh", "says"),
    [
        ({"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 999}, Mesh(tensor=8),
         "plan tp8: 5 heads cannot be divided over 8 ranks; tp4 would work"),
        ({"num_attention_heads": 8}, Mesh(tensor=8, pipeline=2),
         "plan tp8,pp2: 3 units of 32 columns (96 in an MLP) cannot be divided over 8 ranks; tp2,pp2 would work"),
        ({}, Mesh(pipeline=4), "plan pp4: 3 layers make no 4 stages; pp3 would work"),
        ({}, Mesh(tensor=4, pipeline=4), "plan tp4,pp4: 3 layers make no 4 stages; tp2,pp3 would work"),
    ],
)  # fmt: skip
def test_a_rank_without_work_is_an_error_with_a_plan_that_works(changes: dict[str, Any], mesh: Mesh, says: str) -> None:
    spec, _ = model_of(llama_config(**changes))
    with pytest.raises(ConfigError) as caught:
        shard_model(spec, mesh, 0)
    assert str(caught.value) == says


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("qwen_3_next_80b_a3b", "recurrent layers"),
        ("deepseek_v2_lite", "latent attention (MLA)"),
        ("qwen_2_5_vl_7b", "images"),
        ("whisper_tiny", "a model that transcribes"),
    ],
)
def test_what_cannot_be_divided_is_named(name: str, what: str) -> None:
    spec, _ = published(name)
    with pytest.raises(
        ConfigError, match=r"^plan tp2: .* cannot be divided over ranks yet; serve without a plan$"
    ) as caught:
        shard_model(spec, Mesh(tensor=2), 0)
    assert what in str(caught.value)


def test_what_rides_on_a_model_is_named_too() -> None:
    spec, _ = model_of(UNEVEN)
    sparse = structs.replace(spec, sparse=Sparse(sinks=1, window=1, chosen=1, start=0))
    with pytest.raises(ConfigError, match="plan pp2: sparse attention cannot"):
        shard_model(sparse, Mesh(pipeline=2), 0)
    stored = ConfigFields(
        {"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "config.json"
    )
    with pytest.raises(ConfigError, match="quantized weights cannot"):
        shard_model(structs.replace(spec, quantization=parse_quantization(stored)), Mesh(tensor=2), 0)
    with pytest.raises(ConfigError, match="LoRA adapters cannot"):
        check_supported(spec, Mesh(pipeline=2), lora=True)
    with pytest.raises(ConfigError, match="speculation cannot"):
        check_supported(spec, Mesh(tensor=2), speculation=True)
    check_supported(spec, Mesh(), lora=True, speculation=True)
