"""Law 1 with real processes for a model whose layers keep states, at a grid of 512 tokens, beside keys and values.

A small Qwen3-Next with random weights and the bundled model's tokens: its answers mean nothing, but every bit of its
states counts.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from ml_dtypes import bfloat16

from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from tiny_models import write_weights

from .one_answer import assert_same_in_a_crowd, plain_answers
from .server import PenstockServer

CONFIG = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "intermediate_size": 64,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}
CONTEXT = ("--max-model-len", "1600")
LENGTH = 96  # tokens of an answer: so small a model has written fewer before a worker has died
TIGHT = "512KiB"  # 128 pages of 4 KiB: one full context and its states, and less than the crowd's two answers
WAYS = (
    ("--max-chunk-tokens", "16"),
    ("--max-chunk-tokens", "128", "--transfer", "tcp", "--speculate", "lookup"),
    ("--max-chunk-tokens", "600", "--aggregated"),
)


@pytest.fixture(scope="module")
def recurrent(plain_storyteller: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "storyteller"
    folder.mkdir()
    for file in plain_storyteller.iterdir():
        if file.suffix == ".json" and "safetensors" not in file.name and file.name != "penstock-manifest.json":
            shutil.copy(file, folder)
    told = json.loads((plain_storyteller / "config.json").read_text())
    tokens = {name: told[name] for name in ("vocab_size", "bos_token_id", "eos_token_id") if name in told}
    (folder / "config.json").write_text(json.dumps(CONFIG | tokens))
    family, random = checkpoint_format("Qwen3NextForCausalLM", ""), np.random.default_rng(5)
    shapes = family.layout(family.parse(ConfigFields(CONFIG | tokens, "config.json"))).shapes
    scales = {1: 0.3, 2: 0.2, 3: 0.5}  # under which answers vary and nothing explodes
    write_weights(
        folder,
        {name: (random.standard_normal(s) * scales[len(s)]).astype(bfloat16) for name, s in shapes.items()},
    )
    return str(folder)


@pytest.mark.long
@pytest.mark.timeout(600)
def test_states_give_one_answer(recurrent: str) -> None:
    """Split and aggregated, in chunks, in too little memory, in a batch, with a kill, then from the cache."""
    plain = plain_answers([recurrent, *CONTEXT], length=LENGTH, crowd_prompt=1)
    assert len({str(answer["choices"]) for answer in plain.varied}) == len(plain.varied)
    for flags in WAYS:
        with PenstockServer([recurrent, *CONTEXT, *flags, "--kv-memory", TIGHT]) as server:
            assert_same_in_a_crowd(server, plain, " ".join(flags), length=LENGTH)
