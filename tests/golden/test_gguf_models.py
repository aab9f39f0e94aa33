"""GGUF files of every architecture that is served: the same file, dequantized by the format's own package, in
transformers in fp32 gives the same log-probabilities."""

from __future__ import annotations

import json
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family_cases import CASES
from gguf import GGMLQuantizationType as Type
from parity_oracle import Oracle, write_random_model
from shrunk_models import LONG, MLA
from whole_rows import TOLERANCE, check_rows, read_rows

from gguf_models import Kinds, read_gguf_model, write_gguf_model
from penstock.weights.checkpoint_reader import Checkpoint
from runner_bench import RunnerBench
from tiny_models import Tensors, write_tokenizer, write_weights

LENGTH = 90


@dataclass(frozen=True, kw_only=True)
class GgufCase:
    """A published model, made small, and what llama.cpp calls its architecture."""

    config: str
    architecture: str
    changes: dict[str, Any] = field(default_factory=dict)

    def shrunk(self) -> dict[str, Any]:
        case = next(case for case in CASES if case.config == self.config)
        values: dict[str, Any] = deepcopy(case.shrunk() | self.changes)  # transformers changes what it is given
        return {name: value for name, value in values.items() if value is not None}


LATENT = MLA | {"qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64, "q_lora_rank": 32}
MODELS = {
    "Llama 3": GgufCase(config="llama_3_2_1b", architecture="llama"),
    "Mistral": GgufCase(config="mistral_7b_v0_2", architecture="llama", changes={"head_dim": 24, "hidden_size": 96}),
    "Mixtral": GgufCase(config="mixtral_8x7b", architecture="llama"),
    "Qwen2.5": GgufCase(config="qwen_2_5_0_5b", architecture="qwen2"),
    "Qwen3": GgufCase(config="qwen_3_4b", architecture="qwen3"),
    "Qwen3 MoE": GgufCase(
        config="qwen_3_30b_a3b",
        architecture="qwen3moe",
        changes={"mlp_only_layers": [], "moe_intermediate_size": 64, "norm_topk_prob": True},
    ),
    "Gemma 1": GgufCase(config="gemma_7b", architecture="gemma"),
    "Gemma 2": GgufCase(config="gemma_2_2b", architecture="gemma2", changes={"query_pre_attn_scalar": 32}),
    "Gemma 3": GgufCase(
        config="gemma_3_1b",
        architecture="gemma3",
        changes={"query_pre_attn_scalar": 32, "rope_scaling": {"rope_type": "linear", "factor": 8.0}},
    ),
    "Phi-3": GgufCase(config="phi_3_mini_128k", architecture="phi3", changes={**LONG, "sliding_window": 50}),
    "GLM-4": GgufCase(config="glm_4_9b_0414", architecture="glm4"),
    "gpt-oss": GgufCase(config="gpt_oss_20b_bf16", architecture="gpt-oss"),
    "DeepSeek-V2": GgufCase(
        config="deepseek_v2_lite",
        architecture="deepseek2",
        changes=LATENT | {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    "DeepSeek-V3": GgufCase(
        config="deepseek_v3",
        architecture="deepseek2",
        changes=LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    "Kimi K2": GgufCase(
        config="kimi_k2_bf16", architecture="deepseek2", changes=LATENT | {"model_type": "deepseek_v3"}
    ),
}


def mixed(name: str) -> Type:
    """Queries and the head in one type, the rest in others, as quantized files mix them."""
    if ".experts." in name:
        return Type.MXFP4 if "down" not in name else Type.Q8_0
    return Type.Q5_1 if "q_proj" in name or "lm_head" in name else Type.Q8_0


FILES: dict[str, Kinds] = {"F32": Type.F32, "BF16": Type.BF16, "quantized": mixed}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[GgufCase, Tensors]:
    """A model of random weights."""
    case, folder = MODELS[request.param], tmp_path_factory.mktemp("model") / "hf"
    write_random_model(folder, case.shrunk())
    with Checkpoint(folder) as checkpoint:
        return case, {name: np.array(checkpoint.array(name), np.float32) for name in checkpoint.names}


@pytest.mark.parametrize("kinds", FILES)
def test_log_probabilities_are_those_of_transformers(
    model: tuple[GgufCase, Tensors], kinds: str, tmp_path: Path
) -> None:
    (case, tensors), path, folder = model, tmp_path / "model.gguf", tmp_path / "said"
    config = case.shrunk()
    write_gguf_model(path, case.architecture, config, tensors, FILES[kinds])
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    write_weights(folder, read_gguf_model(path, case.architecture, config, tensors))
    tokens = np.random.default_rng(1).integers(0, config["vocab_size"], LENGTH).tolist()
    want_TV = Oracle.of(folder).logprobs_TV(tokens)
    got_TV = read_rows(RunnerBench(path), tokens, 37)
    check_rows(got_TV, want_TV[: len(got_TV)])
    assert np.abs(got_TV - want_TV[: len(got_TV)]).max() <= TOLERANCE
    assert len(np.unique(want_TV.argmax(1))) > 5
