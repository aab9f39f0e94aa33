"""An adapter's answers are those of transformers with PEFT, both in fp32, teacher-forced."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from parity_oracle import Oracle, write_random_model
from whole_rows import check_rows, read_rows

from runner_bench import RunnerBench
from tiny_adapters import write_adapter
from tiny_models import llama_config

VOCAB = 113
LENGTH = 120
LLAMA = llama_config(vocab_size=VOCAB, tie_word_embeddings=True)
PHI: dict[str, Any] = LLAMA | {
    "architectures": ["Phi3ForCausalLM"], "model_type": "phi3", "pad_token_id": 0, "tie_word_embeddings": False,
}  # fmt: skip


def adapted_rows(folder: Path, adapter: Path, tokens: list[int]) -> Any:
    """Log-probabilities of the whole vocabulary after every position."""
    bench = RunnerBench(folder)
    return read_rows(bench, tokens, 50, adapter=bench.load_adapter(adapter))


def test_an_adapter_is_what_it_would_be_merged(tmp_path: Path) -> None:
    oracle = write_random_model(tmp_path / "model", LLAMA)
    adapter = write_adapter(tmp_path / "lora", tmp_path / "model", rank=5, seed=4, lora_alpha=3)
    tokens = np.random.default_rng(1).integers(0, VOCAB, LENGTH).tolist()
    got_TV = adapted_rows(tmp_path / "model", adapter, tokens)
    merge(oracle, adapter, 3 / 5)
    check_rows(got_TV, oracle.logprobs_TV(tokens))


def merge(oracle: Oracle, adapter: Path, scale: float) -> None:
    from safetensors.torch import load_file

    tensors = load_file(adapter / "adapter_model.safetensors")
    with torch.no_grad():
        for name in [name for name in tensors if "lora_A" in name]:
            module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            product = tensors[name.replace("lora_A", "lora_B")] @ tensors[name]
            oracle.model.get_submodule(module).weight += scale * product


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers in its older words
@pytest.mark.parametrize("config", [LLAMA, PHI], ids=["llama", "phi3"])
@pytest.mark.parametrize("root", [False, True], ids=["lora", "rslora"])
def test_adapters_that_peft_made(tmp_path: Path, config: dict[str, Any], root: bool) -> None:
    """Its own folder, its own names, patterns of ranks and alphas."""
    peft = pytest.importorskip("peft")
    oracle = write_random_model(tmp_path / "model", config)
    fused = config is PHI
    lora = peft.LoraConfig(
        r=8,
        lora_alpha=12,
        use_rslora=root,
        target_modules=["qkv_proj", "gate_up_proj", "down_proj"]
        if fused
        else ["q_proj", "v_proj", "up_proj", "o_proj"],
        rank_pattern={"down_proj" if fused else "up_proj": 3},
        alpha_pattern={"layers.1.mlp.down_proj" if fused else "layers.1.self_attn.o_proj": 30},
        task_type="CAUSAL_LM",
    )
    model = peft.get_peft_model(oracle.model, lora)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "lora_" in name:
                weight.copy_(torch.randn_like(weight) / weight.shape[1] ** 0.5)
    model.save_pretrained(tmp_path / "lora")
    assert json.loads((tmp_path / "lora/adapter_config.json").read_text())["use_rslora"] is root
    tokens = np.random.default_rng(2).integers(0, VOCAB, LENGTH).tolist()
    want_TV = Oracle(model).logprobs_TV(tokens)
    check_rows(adapted_rows(tmp_path / "model", tmp_path / "lora", tokens), want_TV)
