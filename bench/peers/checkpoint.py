"""A checkpoint of random weights in bf16: a Hugging Face folder, written a tensor at a time.

Weights are Gaussian with a deviation of 0.02, norms are one; the same seed gives the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from bench.peers.places import Shape
from bench.peers.vocabulary import SPECIALS, write_tokenizer
from numpy.typing import NDArray

DEVIATION = 0.02
ROWS_AT_ONCE = 4096

TensorShape = tuple[int, ...]


def tensors(shape: Shape) -> dict[str, TensorShape]:
    """Names and shapes in the order of the file."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    found: dict[str, TensorShape] = {"model.embed_tokens.weight": (shape.vocab, shape.hidden)}
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        found |= {
            f"{at}input_layernorm.weight": (shape.hidden,),
            f"{at}self_attn.q_proj.weight": (queries, shape.hidden),
            f"{at}self_attn.k_proj.weight": (keys, shape.hidden),
            f"{at}self_attn.v_proj.weight": (keys, shape.hidden),
            f"{at}self_attn.o_proj.weight": (shape.hidden, queries),
            f"{at}post_attention_layernorm.weight": (shape.hidden,),
        }
        names = ("gate_proj", "up_proj", "down_proj")
        found |= _experts(shape, at) if shape.experts else _mlp(shape, f"{at}mlp.", names)
    return found | {"model.norm.weight": (shape.hidden,)}


def _mlp(shape: Shape, at: str, names: tuple[str, str, str]) -> dict[str, TensorShape]:
    gate, up, down = (f"{at}{name}.weight" for name in names)
    return {
        gate: (shape.intermediate, shape.hidden),
        up: (shape.intermediate, shape.hidden),
        down: (shape.hidden, shape.intermediate),
    }


def _experts(shape: Shape, at: str) -> dict[str, TensorShape]:
    """As Mixtral names them."""
    found: dict[str, TensorShape] = {f"{at}block_sparse_moe.gate.weight": (shape.experts, shape.hidden)}
    for expert in range(shape.experts):
        found |= _mlp(shape, f"{at}block_sparse_moe.experts.{expert}.", ("w1", "w3", "w2"))
    return found


def values(of: TensorShape, rng: np.random.Generator) -> Iterator[NDArray[np.uint16]]:
    """The tensor's bf16 bits, some rows at a time."""
    if len(of) == 1:
        yield np.ones(of, ml_dtypes.bfloat16).view(np.uint16)
        return
    rows, columns = of
    for begin in range(0, rows, ROWS_AT_ONCE):
        part = rng.standard_normal((min(ROWS_AT_ONCE, rows - begin), columns), dtype=np.float32)
        yield (part * np.float32(DEVIATION)).astype(ml_dtypes.bfloat16).view(np.uint16)


def config(shape: Shape) -> dict[str, object]:
    """The contents of ``config.json``.  No scaling of the rotary frequencies: it costs nothing at run time."""
    experts = {"num_local_experts": shape.experts, "num_experts_per_tok": shape.top_k} if shape.experts else {}
    return {
        **experts,
        "architectures": ["MixtralForCausalLM" if shape.experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if shape.experts else "llama",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.max_positions,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "initializer_range": DEVIATION,
        "bos_token_id": shape.vocab - SPECIALS,
        "eos_token_id": shape.vocab - SPECIALS + 1,
    }


def write_checkpoint(folder: Path, shape: Shape, seed: int, progress: Callable[[int, int], None]) -> None:
    """The whole folder; ``progress`` is called with (bytes written, bytes in all)."""
    folder.mkdir(parents=True, exist_ok=True)
    names = tensors(shape)
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    total = 0
    for name, of in names.items():
        size = 2 * int(np.prod(of))
        header[name] = {"dtype": "BF16", "shape": list(of), "data_offsets": [total, total + size]}
        total += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 64)
    rng = np.random.default_rng(seed)
    unfinished = folder / "model.safetensors.part"
    done = 0
    with unfinished.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for of in names.values():
            for part in values(of, rng):
                done += file.write(part.tobytes())
                progress(done, total)
    (folder / "config.json").write_text(json.dumps(config(shape), indent=1), encoding="utf-8")
    write_tokenizer(folder, shape.vocab, shape.max_positions)
    unfinished.rename(folder / "model.safetensors")
