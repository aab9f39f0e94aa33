"""What a GGUF file's metadata says of the model, in the words of a ``config.json``: families parse one language only.

Names and meanings: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's own converter.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.weights.gguf import GgufHeader
from penstock.weights.gguf_file import ROPE_FACTORS
from penstock.weights.rope import Llama3

ARCHITECTURES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "llama": ("LlamaForCausalLM", "llama"),
        "qwen2": ("Qwen2ForCausalLM", "qwen2"),
        "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    }
)
"""``general.architecture`` to the architecture and model_type of Hugging Face."""

_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
    }
)
_REALS: Mapping[str, str] = MappingProxyType(
    {"rms_norm_eps": "attention.layer_norm_rms_epsilon", "rope_theta": "rope.freq_base"}
)
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all Llama 3 models with stretched frequencies have in common."""

_FACTORS_AGREE = 1e-4


def config_of(header: GgufHeader, factors: NDArray[np.float32] | None, where: str) -> dict[str, Any]:
    """The configuration.  ``factors``: the tensor ``rope_freqs.weight`` if there is one.

    Raises ModelError for what a ``config.json`` could not say.
    """
    metadata = header.metadata
    architecture = metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise ModelError(
            f"{where}: general.architecture is {architecture!r}; of GGUF files these can be served: "
            f"{', '.join(sorted(ARCHITECTURES))}"
        )
    _refuse_variants(metadata, str(architecture), where)
    name, model_type = ARCHITECTURES[str(architecture)]
    config: dict[str, Any] = {"architectures": [name], "model_type": model_type}
    for field, key in _SIZES.items():
        if f"{architecture}.{key}" in metadata:
            config[field] = metadata[f"{architecture}.{key}"]
    for field, key in _REALS.items():
        if f"{architecture}.{key}" in metadata:
            config[field] = _shortest(metadata[f"{architecture}.{key}"])
    table = header.tensors.get("token_embd.weight")
    if table is None:
        raise ModelError(f"{where}: tensor 'token_embd.weight' is missing")
    config["vocab_size"] = table.shape[0]
    config["tie_word_embeddings"] = "output.weight" not in header.tensors
    config |= _end_tokens(metadata)
    scaling = _scaling(metadata, str(architecture), config, factors, where)
    return config | ({"rope_scaling": scaling} if scaling else {})


def _refuse_variants(metadata: Mapping[str, Any], architecture: str, where: str) -> None:
    """What the same architecture may also mean, and would be computed otherwise."""
    if metadata.get("split.count", 0) not in (0, 1):
        raise ModelError(
            f"{where}: is one of {metadata['split.count']} parts; llama.cpp's llama-gguf-split --merge joins them"
        )
    if metadata.get(f"{architecture}.expert_count", 0):
        raise ModelError(f"{where}: a mixture of experts out of a GGUF file cannot be served")
    hidden, heads = (metadata.get(f"{architecture}.{key}") for key in ("embedding_length", "attention.head_count"))
    head_dim = hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None
    head_dim = metadata.get(f"{architecture}.attention.key_length", head_dim)
    for key in ("attention.value_length", "rope.dimension_count"):
        size = metadata.get(f"{architecture}.{key}", head_dim)
        if size != head_dim:
            raise ModelError(f"{where}: {architecture}.{key} is {size}, heads have {head_dim}: cannot be served")


def _end_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """A chat model's turns end with another token than its texts: whatever ends either ends an answer."""
    found: dict[str, Any] = {}
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ends = [metadata[key] for key in keys if key in metadata]
    if ends:
        found["eos_token_id"] = list(dict.fromkeys(ends))
    if "tokenizer.ggml.bos_token_id" in metadata:
        found["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return found


def _scaling(
    metadata: Mapping[str, Any],
    architecture: str,
    config: Mapping[str, Any],
    factors: NDArray[np.float32] | None,
    where: str,
) -> dict[str, Any] | None:
    kind = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if kind != "none":
        scaling = {"rope_type": kind}
        for field, key in (("factor", "factor"), ("original_max_position_embeddings", "original_context_length")):
            if f"{architecture}.rope.scaling.{key}" in metadata:
                scaling[field] = _shortest(metadata[f"{architecture}.rope.scaling.{key}"])
        return scaling
    return None if factors is None else _llama3(config, factors, where)


def _llama3(config: Mapping[str, Any], factors: NDArray[np.float32], where: str) -> dict[str, Any]:
    """The recipe that gives these factors.  Raises ModelError if it is none that is known."""
    recipe = {"rope_type": "llama3", "factor": _shortest(float(factors.max())), **_LLAMA3}
    theta = float(config.get("rope_theta", 10_000.0))
    stretched = Llama3(
        factor=recipe["factor"],
        low_freq_factor=_LLAMA3["low_freq_factor"],
        high_freq_factor=_LLAMA3["high_freq_factor"],
        original_max_positions=int(_LLAMA3["original_max_position_embeddings"]),
    )
    plain = theta ** -(np.arange(len(factors)) / len(factors))
    if recipe["factor"] <= 1 or not np.allclose(plain / factors, stretched.of(plain, theta), rtol=_FACTORS_AGREE):
        raise ModelError(f"{where}: tensor {ROPE_FACTORS!r}: its factors follow no recipe that is known here")
    return recipe


def _shortest(value: Any) -> Any:
    """A real number as its makers wrote it: 1e-05, not what is left of it in 32 bits."""
    return float(str(np.float32(value))) if isinstance(value, float) else value
