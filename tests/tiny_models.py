"""Random tiny Llama checkpoints, written as Hugging Face folders without transformers or torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

Tensors = dict[str, NDArray[Any]]

NAMES = {
    np.dtype(ml_dtypes.bfloat16): "BF16",
    np.dtype(np.float16): "F16",
    np.dtype(np.float32): "F32",
    np.dtype(ml_dtypes.float8_e4m3fn): "F8_E4M3",
    np.dtype(np.int8): "I8",
    np.dtype(np.uint8): "U8",
    np.dtype(np.int32): "I32",
    np.dtype(np.int64): "I64",
}
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp16": np.dtype(np.float16), "fp32": np.dtype(np.float32)}


def llama_config(**changes: Any) -> dict[str, Any]:
    """A ``config.json`` of a model with 3 layers; ``changes`` replace fields, None removes one."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
    }
    config.update(changes)
    return {name: value for name, value in config.items() if value is not None}


def random_tensors(config: dict[str, Any], seed: int = 0, dtype: str = "bf16") -> Tensors:
    """Weights under which activations and logits keep a size of about one to three, so that nothing is trivial."""
    rng = np.random.default_rng(seed)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    head_dim = config.get("head_dim", hidden // heads)

    def matrix(n: int, k: int, gain: float = 1.0) -> NDArray[Any]:
        return (rng.standard_normal((n, k)) * gain / np.sqrt(k)).astype(DTYPES[dtype])

    def norm() -> NDArray[Any]:
        return (1.0 + 0.2 * rng.standard_normal(hidden)).astype(DTYPES[dtype])

    tensors: Tensors = {"model.embed_tokens.weight": matrix(config["vocab_size"], hidden, 2.5)}
    for index in range(config["num_hidden_layers"]):
        tensors |= {
            f"model.layers.{index}.{name}.weight": value
            for name, value in {
                "input_layernorm": norm(),
                "self_attn.q_proj": matrix(heads * head_dim, hidden, 1.5),
                "self_attn.k_proj": matrix(kv_heads * head_dim, hidden, 1.5),
                "self_attn.v_proj": matrix(kv_heads * head_dim, hidden),
                "self_attn.o_proj": matrix(hidden, heads * head_dim),
                "post_attention_layernorm": norm(),
                "mlp.gate_proj": matrix(inner, hidden),
                "mlp.up_proj": matrix(inner, hidden),
                "mlp.down_proj": matrix(hidden, inner),
            }.items()
        }
    tensors["model.norm.weight"] = norm()
    if not config.get("tie_word_embeddings", False):
        tensors["lm_head.weight"] = matrix(config["vocab_size"], hidden, 2.5)
    return tensors


def safetensors_bytes(tensors: Tensors) -> bytes:
    """A safetensors file with these tensors, in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, value in tensors.items():
        header[name] = {
            "dtype": NAMES[value.dtype],
            "shape": list(value.shape),
            "data_offsets": [end, end + value.nbytes],
        }
        end += value.nbytes
    raw = json.dumps(header).encode()
    raw += b" " * (-len(raw) % 8)
    return len(raw).to_bytes(8, "little") + raw + b"".join(value.tobytes() for value in tensors.values())


def write_weights(folder: Path, tensors: Tensors, shards: int = 1) -> None:
    """One file, or several with an index."""
    if shards == 1:
        (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors))
        return
    places: dict[str, str] = {}
    for shard in range(shards):
        file = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        part = dict(list(tensors.items())[shard::shards])
        (folder / file).write_bytes(safetensors_bytes(part))
        places |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(value.nbytes for value in tensors.values())}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def write_model(folder: Path, config: dict[str, Any], *, seed: int = 0, dtype: str = "bf16", shards: int = 1) -> Path:
    """A folder that can be served: configuration, a word-level tokenizer ("t0 t1 ..."), random weights."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder, config["vocab_size"])
    write_weights(folder, random_tensors(config, seed, dtype), shards)
    return folder


def write_tokenizer(folder: Path, vocab: int) -> None:
    """Word-level: "t0 t1 ..."."""
    words = {f"t{index}": index for index in range(vocab)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t0"},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
