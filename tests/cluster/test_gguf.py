"""``penstock serve FILE.gguf``, as somebody meets it who has downloaded one: a split file of Qwen3 with experts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type

from gguf_models import write_gguf_model
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from tiny_models import Tensors

from .asking import penstock
from .conftest import Serve

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 130,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def random_tensors(seed: int = 0) -> Tensors:
    """What the model's layout lists, of a size under which nothing is trivial."""
    rng, family = np.random.default_rng(seed), checkpoint_format(CONFIG["architectures"][0], "")
    shapes = family.layout(family.parse(ConfigFields(CONFIG, "config.json"))).shapes
    return {
        name: (1 + 0.2 * rng.standard_normal(shape) if len(shape) == 1 else rng.standard_normal(shape) / math.sqrt(64))
        for name, shape in shapes.items()
    }


@pytest.fixture(scope="module")
def first_part(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gguf")
    path = folder / "tiny-moe-Q8_0.gguf"
    write_gguf_model(path, "qwen3moe", CONFIG, random_tensors(), Type.Q8_0, template=TEMPLATE, most_tensors=15)
    return sorted(folder.iterdir())[0]


def test_a_split_file_is_served_and_examined(first_part: Path, serve: Serve) -> None:
    examined = penstock("doctor", str(first_part))
    assert "would serve tiny-moe-Q8_0 (" in examined.stdout, examined.stdout + examined.stderr
    server = serve(str(first_part))
    (model,) = httpx.get(f"{server.url}/v1/models", trust_env=False).json()["data"]
    assert model["id"] == "tiny-moe-Q8_0"
    body = {"model": model["id"], "max_tokens": 12, "seed": 3, "ignore_eos": True}
    body |= {"messages": [{"role": "user", "content": "Hello"}], "logprobs": True}
    answers = [
        httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False).json() for _ in range(2)
    ]
    assert answers[0]["usage"] == {**answers[0]["usage"], "prompt_tokens": 5, "completion_tokens": 12}
    first, again = (answer["choices"][0] for answer in answers)
    assert first["message"]["content"] == again["message"]["content"] != ""
    assert first["logprobs"] == again["logprobs"]


def test_what_cannot_be_served_is_refused_in_one_line(first_part: Path, tmp_path: Path) -> None:
    lonely = tmp_path / first_part.name
    lonely.write_bytes(first_part.read_bytes())
    refused = penstock("serve", str(lonely))
    assert refused.returncode != 0
    assert "its part 'tiny-moe-Q8_0-00002-of-" in refused.stderr
    other = tmp_path / "mamba.gguf"
    writer = gguf.GGUFWriter(str(other), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused = penstock("serve", str(other))
    assert refused.returncode != 0
    (line,) = [line for line in refused.stderr.splitlines() if "mamba" in line]
    assert "general.architecture is 'mamba'; of GGUF files these can be served: deepseek2, gemma" in line
