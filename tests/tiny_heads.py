"""Random tiny draft heads in the format of EAGLE-3, for models of ``tiny_models``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from tiny_models import DTYPES, Tensors, safetensors_bytes


def head_config(model: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A head's ``config.json`` for a model's; ``changes`` replace fields, None removes one."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads")
    config = {name: model[name] for name in (*names, "hidden_act", "rms_norm_eps", "rope_theta")}
    config |= {"architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "max_position_embeddings": 2048}
    config |= {"eagle_aux_hidden_state_layer_ids": [0, 2, 1]}
    config |= changes
    return {name: value for name, value in config.items() if value is not None}


def head_tensors(config: dict[str, Any], seed: int = 5, dtype: str = "bf16", layer: str = "midlayer.") -> Tensors:
    """As a head has them that shares its model's embedding and output."""
    rng = np.random.default_rng(seed)
    width, inner = config["hidden_size"], config["intermediate_size"]
    size = width // config["num_attention_heads"]
    taps = len(config["eagle_aux_hidden_state_layer_ids"])

    def matrix(n: int, k: int) -> Any:
        return (rng.standard_normal((n, k)) / np.sqrt(k)).astype(DTYPES[dtype])

    def norm() -> Any:
        return (1.0 + 0.2 * rng.standard_normal(width)).astype(DTYPES[dtype])

    keys = config["num_key_value_heads"] * size
    return {
        "fc.weight": matrix(width, taps * width),
        f"{layer}input_layernorm.weight": norm(),
        f"{layer}hidden_norm.weight": norm(),
        f"{layer}post_attention_layernorm.weight": norm(),
        f"{layer}self_attn.q_proj.weight": matrix(config["num_attention_heads"] * size, 2 * width),
        f"{layer}self_attn.k_proj.weight": matrix(keys, 2 * width),
        f"{layer}self_attn.v_proj.weight": matrix(keys, 2 * width),
        f"{layer}self_attn.o_proj.weight": matrix(width, config["num_attention_heads"] * size),
        f"{layer}mlp.gate_proj.weight": matrix(inner, width),
        f"{layer}mlp.up_proj.weight": matrix(inner, width),
        f"{layer}mlp.down_proj.weight": matrix(width, inner),
        "norm.weight": norm(),
    }


def write_head(folder: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """A folder with a head."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
    return folder
