"""Tiny models of every architecture as GGUF files, written and read with the format's own package.

``write_gguf_model`` does what llama.cpp's converter does, ``read_gguf_model`` undoes it: both go by the package's names
of tensors, and nothing of Penstock's readers is used.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from bench.peers.drivers.to_gguf import paired
from gguf import GGMLQuantizationType as Type
from numpy.typing import NDArray

from tiny_gguf import add_bytes_tokenizer, encoded
from tiny_models import Tensors

ARCHITECTURES = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
PAIRED = frozenset({"llama"})
PLUS_ONE = frozenset({"gemma", "gemma2", "gemma3"})
EXPERT = re.compile(r"(model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.)(\d+)\.(\w+)\.weight")
STACKED_AS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
"""Mixtral's names of the parts of an expert."""

Kinds = Type | Callable[[str], Type]
"""Types of matrices, by Hugging Face's names or for all."""


def write_gguf_model(
    path: Path,
    architecture: str,
    config: dict[str, Any],
    tensors: Tensors,
    kinds: Kinds,
    *,
    template: str | None = None,
    most_tensors: int = 0,
) -> None:
    """A file of these tensors, which have Hugging Face's names; ``template``: of chats.

    ``most_tensors``: of one part; 0: the file is not split.
    """
    writer = gguf.GGUFWriter(str(path), architecture, split_max_tensors=most_tensors)
    add_settings(writer, architecture, config)
    add_bytes_tokenizer(writer, config)
    if template is not None:
        writer.add_chat_template(template)
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])
    kind_of = kinds if callable(kinds) else lambda name: kinds
    for name, value in stored_forms(architecture, config, tensors):
        own = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert own is not None, name
        narrow = value.ndim < 2 or own.endswith(".bias") or "ffn_gate_inp" in own
        kind = Type.F32 if narrow else kind_of(name)
        raw, _ = encoded(np.ascontiguousarray(value.reshape(-1, value.shape[-1]), np.float32), kind)
        writer.add_tensor(own, raw.reshape(*value.shape[:-1], -1), raw_dtype=kind)
    for own, factors in rope_factors(config):
        writer.add_tensor(own, np.array(factors, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def read_gguf_model(path: Path, architecture: str, config: dict[str, Any], like: Tensors) -> Tensors:
    """What the file's tensors say, by Hugging Face's names: those of ``like``, and their shapes."""
    said = {
        tensor.name: np.asarray(gguf.quants.dequantize(tensor.data, tensor.tensor_type), np.float32).reshape(
            tensor.shape[::-1]
        )
        for tensor in gguf.GGUFReader(path).tensors
    }
    names = gguf.get_tensor_name_map(ARCHITECTURES[architecture], config["num_hidden_layers"])

    def own(name: str) -> NDArray[np.float32]:
        found = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert found is not None, name
        return said[found]

    plain = {name: plain_form(architecture, config, name, own) for name in like}
    assert {name: value.shape for name, value in plain.items()} == {name: value.shape for name, value in like.items()}
    return plain


# --- tensors ----------------------------------------------------------------------------------------------------------


def stored_forms(
    architecture: str, config: dict[str, Any], tensors: Tensors
) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """Tensors as llama.cpp has them, by the names that the package knows."""
    stacks: dict[str, dict[int, NDArray[Any]]] = {}
    for name, stored in tensors.items():
        value = stored.astype(np.float32)
        if (match := EXPERT.fullmatch(name)) is not None:
            stacks.setdefault(stack_name(match), {})[int(match[3])] = value
        elif architecture == "gpt-oss" and ".experts." in name:
            yield from stacks_of_gpt_oss(name, value)
        elif name.endswith("kv_b_proj.weight"):
            keys, values = expansion(config, value)
            yield name.replace("kv_b_proj", "k_b_proj"), keys.swapaxes(1, 2)
            yield name.replace("kv_b_proj", "v_b_proj"), values
        elif architecture in PAIRED and (heads := heads_of(name, config)):
            yield name, paired(value.reshape(len(value), -1), heads).reshape(value.shape)
        elif architecture in PLUS_ONE and name.endswith("norm.weight"):
            yield name, value + 1
        elif name.endswith("e_score_correction_bias"):
            yield name.replace("e_score_correction_bias", "e_score_correction.bias"), value
        else:
            yield name + ".weight" * name.endswith("sinks"), value
    for name, experts in stacks.items():
        yield name, np.stack([experts[index] for index in range(len(experts))])


def plain_form(
    architecture: str, config: dict[str, Any], name: str, own: Callable[[str], NDArray[np.float32]]
) -> NDArray[np.float32]:
    """A tensor as transformers has it."""
    if (match := EXPERT.fullmatch(name)) is not None:
        return own(stack_name(match))[int(match[3])]
    if architecture == "gpt-oss" and ".experts." in name:
        return stack_for_gpt_oss(name, own)
    if name.endswith("kv_b_proj.weight"):
        keys = own(name.replace("kv_b_proj", "k_b_proj")).swapaxes(1, 2)
        values = own(name.replace("kv_b_proj", "v_b_proj"))
        return np.concatenate([keys, values], axis=1).reshape(-1, values.shape[2])
    if architecture in PAIRED and (heads := heads_of(name, config)):
        value = own(name)
        rows = np.arange(len(value)).reshape(heads, -1, 2).swapaxes(1, 2).reshape(-1)
        return value[rows]
    if architecture in PLUS_ONE and name.endswith("norm.weight"):
        return own(name) - 1
    if name.endswith("e_score_correction_bias"):
        return own(name.replace("e_score_correction_bias", "e_score_correction.bias"))
    return own(name + ".weight" * name.endswith("sinks"))


def stack_name(match: re.Match[str]) -> str:
    return f"model.layers.{match[2]}.mlp.experts.{STACKED_AS.get(match[4], match[4])}.weight"


def heads_of(name: str, config: dict[str, Any]) -> int:
    """Of q and k, else 0."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}
    return next((int(config[field]) for part, field in heads.items() if part in name), 0)


def expansion(config: dict[str, Any], value: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """[heads, columns, rank] of keys and of values."""
    columns = config["qk_nope_head_dim"]
    by_head = value.reshape(config["num_attention_heads"], columns + config["v_head_dim"], -1)
    return by_head[:, :columns], by_head[:, columns:]


def stacks_of_gpt_oss(name: str, value: NDArray[np.float32]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    kind = "bias" if name.endswith("_bias") else "weight"
    turned = value if kind == "bias" else value.swapaxes(1, 2)
    if "down_proj" in name:
        yield f"{name.removesuffix('_bias')}.{kind}", turned
        return
    for first, part in enumerate(("gate_proj", "up_proj")):
        yield f"{name.removesuffix('_bias').replace('gate_up_proj', part)}.{kind}", turned[:, first::2]


def stack_for_gpt_oss(name: str, own: Callable[[str], NDArray[np.float32]]) -> NDArray[np.float32]:
    kind, stem = ("bias" if name.endswith("_bias") else "weight"), name.removesuffix("_bias")
    if "down_proj" in name:
        found = own(f"{stem}.{kind}")
    else:
        gate, up = (own(f"{stem.replace('gate_up_proj', part)}.{kind}") for part in ("gate_proj", "up_proj"))
        found = np.stack([gate, up], axis=2).reshape(gate.shape[0], -1, *gate.shape[2:])
    return found if kind == "bias" else found.swapaxes(1, 2)


# --- metadata ---------------------------------------------------------------------------------------------------------


def add_settings(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    """What the converter writes of every architecture, and of this one."""
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(1 if architecture == "deepseek2" else config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", 1e-6))
    if architecture != "gemma2":
        writer.add_rope_freq_base(config.get("rope_theta", 1e6 if architecture == "gemma3" else 1e4))
    if config.get("head_dim") and architecture != "deepseek2":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    partial = config.get("partial_rotary_factor", 1.0)
    if architecture in ("llama", "phi3", "glm4"):
        writer.add_rope_dimension_count(int(head_dim * partial))
    add_experts(writer, config)
    add_rope_scaling(writer, architecture, config)
    if architecture == "deepseek2":
        add_latent(writer, config)
    window = config.get("sliding_window")
    if architecture in ("gemma2", "gemma3", "phi3", "gpt-oss"):
        writer.add_sliding_window(window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])


def add_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    fields = ("num_local_experts", "num_experts", "n_routed_experts")
    count = next((config[field] for field in fields if field in config), None)
    if count is None:
        return
    writer.add_expert_count(count)
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(config.get("moe_intermediate_size", config["intermediate_size"]))


def add_rope_scaling(writer: gguf.GGUFWriter, architecture: str, config: dict[str, Any]) -> None:
    scaling = config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if architecture == "deepseek2":
            writer.add_rope_scaling_yarn_log_mul(0.1 * scaling["mscale_all_dim"])
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    if kind == "longrope":
        writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])


def rope_factors(config: dict[str, Any]) -> Iterator[tuple[str, list[float]]]:
    """Divisors of frequencies, which are tensors of a GGUF file."""
    scaling = config.get("rope_scaling") or {}
    for field, name in (("long_factor", "rope_factors_long.weight"), ("short_factor", "rope_factors_short.weight")):
        if field in scaling:
            yield name, scaling[field]
    if scaling.get("rope_type") == "llama3":
        head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        frequencies = config["rope_theta"] ** -(np.arange(0, head_dim, 2) / head_dim)
        turns = scaling["original_max_position_embeddings"] * frequencies / (2 * np.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        smooth = np.clip((turns - low) / (high - low), 0, 1)
        yield "rope_freqs.weight", (1 / ((1 - smooth) / scaling["factor"] + smooth)).tolist()


def add_latent(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rank, turned = config["kv_lora_rank"], config["qk_rope_head_dim"]
    sigmoid = config["model_type"] == "deepseek_v3"
    writer.add_kv_lora_rank(rank)
    if config.get("q_lora_rank"):
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_key_length(rank + turned)
    writer.add_value_length(rank)
    writer.add_key_length_mla(config["qk_nope_head_dim"] + turned)
    writer.add_value_length_mla(config["v_head_dim"])
    writer.add_rope_dimension_count(turned)
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID if sigmoid else gguf.ExpertGatingFuncType.SOFTMAX)
    if config.get("norm_topk_prob"):
        writer.add_expert_weights_norm(True)
    if config.get("n_group") and config.get("topk_group"):
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
