"""PEFT's folders: what is read, how it is scaled, and what is refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ModelError
from penstock.weights.inspect import inspect_model
from penstock.weights.lora import LoraAdapter, LoraFileLimits, LoraTarget, lora_targets, read_lora_adapter
from tiny_adapters import adapter_tensors, write_adapter
from tiny_models import llama_config, safetensors_bytes, write_model

LIMITS = LoraFileLimits(max_rank=32, max_bytes=1 << 24)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("model"), llama_config(num_hidden_layers=2))


@pytest.fixture(scope="module")
def targets(model: Path) -> dict[str, LoraTarget]:
    return lora_targets(inspect_model(model))


def read(folder: Path, targets: dict[str, LoraTarget]) -> LoraAdapter:
    return read_lora_adapter(folder, targets, LIMITS)


def test_parts_of_a_fused_product_have_their_columns(
    tmp_path: Path, model: Path, targets: dict[str, LoraTarget]
) -> None:
    adapter = read(write_adapter(tmp_path, model, rank=3, lora_alpha=6), targets)
    assert sorted(adapter.parts) == sorted(f"{i}.{name}" for i in (0, 1) for name in ("qkv", "out", "gate_up", "down"))
    shapes = {(part.first, len(part.up_NR)): part.down_RK.shape for part in adapter.parts["0.qkv"]}
    assert shapes == {(0, 64): (3, 64), (64, 32): (3, 64), (96, 32): (3, 64)}
    assert {part.first for part in adapter.parts["1.gate_up"]} == {0, 96}
    assert {part.scale for own in adapter.parts.values() for part in own} == {2.0}
    assert adapter.rank == 3


def test_patterns_and_the_root_of_the_rank(tmp_path: Path, model: Path, targets: dict[str, LoraTarget]) -> None:
    write_adapter(
        tmp_path, model, ("q_proj", "down_proj"), rank=8, lora_alpha=16, use_rslora=True,
        alpha_pattern={"layers.1.mlp.down_proj": 4, "^model.layers.0.self_attn.q_proj": 2, "proj": 99},
    )  # fmt: skip
    adapter = read(tmp_path, targets)
    scales = {name: own[0].scale for name, own in adapter.parts.items()}
    root = math.sqrt(8)
    assert scales == {"0.qkv": 2 / root, "1.qkv": 16 / root, "0.down": 16 / root, "1.down": 4 / root}


def test_ranks_may_differ_by_module(tmp_path: Path, model: Path, targets: dict[str, LoraTarget]) -> None:
    write_adapter(tmp_path, model, ("q_proj",), rank=4, rank_pattern={"v_proj": 9})
    tensors = adapter_tensors(targets, ("q_proj",), rank=4) | adapter_tensors(targets, ("v_proj",), rank=9)
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    adapter = read(tmp_path, targets)
    assert adapter.rank == 9
    assert sorted(part.down_RK.shape[0] for part in adapter.parts["0.qkv"]) == [4, 9]


def test_the_fingerprint_is_that_of_the_content(tmp_path: Path, model: Path, targets: dict[str, LoraTarget]) -> None:
    def fingerprint(name: str, **changes: Any) -> str:
        return read(write_adapter(tmp_path / name, model, **changes), targets).fingerprint

    first = fingerprint("a")
    assert fingerprint("b", lora_dropout=0.1, base_model_name_or_path="elsewhere") == first
    assert (
        len({first, fingerprint("c", seed=1), fingerprint("d", lora_alpha=5), fingerprint("e", use_rslora=True)}) == 4
    )


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "DoRA": ({"use_dora": True}, "use_dora: DoRA"),
    "whole modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "biases": ({"bias": "all"}, "bias 'all'"),
    "another kind": ({"peft_type": "IA3"}, "peft_type 'IA3' is not LORA"),
    "a pattern that is a program": ({"alpha_pattern": {"(a+)+$": 3}}, "regular expression"),
    "a rank that is not that of the tensors": ({"r": 5}, "has rank 4 in its tensors, 5 by r"),
    "experts": ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
    "no rank": ({"r": None}, "has no r"),
    "alpha": ({"lora_alpha": -1}, "lora_alpha must be a positive number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_configurations_that_are_not_computed(
    tmp_path: Path, model: Path, targets: dict[str, LoraTarget], case: str
) -> None:
    changes, words = REFUSED[case]
    write_adapter(tmp_path, model, ("q_proj",))
    config = json.loads((tmp_path / "adapter_config.json").read_text()) | changes
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=r"adapter_config\.json: ") as refused:
        read(tmp_path, targets)
    assert words in str(refused.value)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
TENSORS: dict[str, tuple[dict[str, tuple[int, int]], str]] = {
    "no B": ({f"{Q}A.weight": (4, 64)}, "has no lora_B"),
    "embeddings": ({"base_model.model.model.embed_tokens.lora_embedding_A": (4, 128)}, "embeddings"),
    "a magnitude": ({f"{Q}magnitude_vector": (64, 1)}, "DoRA"),
    "the head": (
        {f"base_model.model.lm_head.lora_{side}.weight": shape for side, shape in (("A", (4, 64)), ("B", (128, 4)))},
        "embeddings and of the head",
    ),
    "a module that is not there": (
        {f"base_model.model.model.layers.7.mlp.up_proj.lora_{s}.weight": (4, 4) for s in "AB"}, "no module",
    ),
    "another model": ({f"{Q}A.weight": (4, 65), f"{Q}B.weight": (64, 4)}, "made for another one"),
    "two ranks": ({f"{Q}A.weight": (4, 64), f"{Q}B.weight": (64, 5)}, "not two matrices of one rank"),
    "a rank too high": ({f"{Q}A.weight": (33, 64), f"{Q}B.weight": (64, 33)}, "max_lora_rank = 32"),
}  # fmt: skip


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_belong(tmp_path: Path, model: Path, targets: dict[str, LoraTarget], case: str) -> None:
    shapes, words = TENSORS[case]
    write_adapter(tmp_path, model, ("q_proj",), rank=33 if "33" in str(shapes) else 4)
    tensors = {name: np.ones(shape, np.float32) for name, shape in shapes.items()}
    (tmp_path / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: ") as refused:
        read(tmp_path, targets)
    assert words in str(refused.value)


def test_files_that_are_not_sound(tmp_path: Path, model: Path, targets: dict[str, LoraTarget]) -> None:
    write_adapter(tmp_path, model, ("q_proj",))
    file = tmp_path / "adapter_model.safetensors"
    raw = file.read_bytes()
    file.write_bytes(raw[:-1])
    with pytest.raises(ModelError, match="truncated"):
        read(tmp_path, targets)
    with pytest.raises(ModelError, match="lora_memory = 100"):
        read_lora_adapter(tmp_path, targets, LoraFileLimits(max_rank=32, max_bytes=100))
    file.rename(tmp_path / "adapter_model.bin")
    with pytest.raises(ModelError, match="pickle"):
        read(tmp_path, targets)
    with pytest.raises(ModelError, match="cannot be read"):
        read(tmp_path / "nowhere", targets)
