"""Names: which tensor of a Hugging Face checkpoint each tensor of a GGUF file is, by architecture.

llama.cpp stacks the matrices of all experts in one tensor, expert after expert: each is a tensor of its own here.
A name that is not known stays, and is refused by the model's layout.  What must be computed (``gguf.assembled``) keeps
its name, too.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from penstock.errors import ModelError
from penstock.weights.safetensors_header import TensorInfo

ROPE_FACTORS = "rope_freqs.weight"
LONG_FACTORS, SHORT_FACTORS = "rope_factors_long.weight", "rope_factors_short.weight"
RECIPES = frozenset({ROPE_FACTORS, LONG_FACTORS, SHORT_FACTORS})
"""Divisors of the rotary frequencies; a recipe in a config.json, so no tensors of a checkpoint."""

MAX_EXPERTS = 1 << 12

_OUTSIDE: Mapping[str, str] = MappingProxyType(
    {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
)
_ATTENTION: Mapping[str, str] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
    }
)
_MLP: Mapping[str, str] = MappingProxyType(
    {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
)
_DENSE: Mapping[str, str] = MappingProxyType({**_ATTENTION, **_MLP})
_FUSED: Mapping[str, str] = MappingProxyType({"ffn_up": "mlp.gate_up_proj", "ffn_down": "mlp.down_proj"})
_EXPERTS: Mapping[str, str] = MappingProxyType(
    {part: f"mlp.experts.{{}}.{part}_proj.weight" for part in ("gate", "up", "down")}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensorNames:
    """One architecture: llama.cpp's names of what a layer has, to Hugging Face's, without prefix and kind."""

    layer: Mapping[str, str]
    experts: Mapping[str, str] = field(default_factory=dict)  # "gate", "up" and "down", with an expert's number
    router: str = "ffn_gate_inp"
    paired: bool = False  # rows of q and k are in the order of llama.cpp's rotary embedding
    norms_plus_one: bool = False  # norms are stored as they are multiplied, Hugging Face has them less one


TENSOR_NAMES: Mapping[str, GgufTensorNames] = MappingProxyType(
    {
        "llama": GgufTensorNames(
            layer={**_DENSE, "ffn_gate_inp": "block_sparse_moe.gate"},
            experts={
                part: f"block_sparse_moe.experts.{{}}.{name}.weight"
                for part, name in (("gate", "w1"), ("down", "w2"), ("up", "w3"))
            },
            paired=True,
        ),
        "qwen2": GgufTensorNames(layer=_DENSE),
        "qwen3": GgufTensorNames(layer=_DENSE),
        "qwen3moe": GgufTensorNames(layer={**_DENSE, "ffn_gate_inp": "mlp.gate"}, experts=_EXPERTS),
        "gemma": GgufTensorNames(layer=_DENSE, norms_plus_one=True),
        **dict.fromkeys(
            ("gemma2", "gemma3"),
            GgufTensorNames(
                layer={
                    **_DENSE,
                    "post_attention_norm": "post_attention_layernorm",
                    "ffn_norm": "pre_feedforward_layernorm",
                    "post_ffw_norm": "post_feedforward_layernorm",
                },
                norms_plus_one=True,
            ),
        ),
        "phi3": GgufTensorNames(layer={**_ATTENTION, **_FUSED, "attn_qkv": "self_attn.qkv_proj"}),
        "glm4": GgufTensorNames(
            layer={
                **_ATTENTION,
                **_FUSED,
                "post_attention_norm": "post_self_attn_layernorm",
                "post_ffw_norm": "post_mlp_layernorm",
            }
        ),
        "gpt-oss": GgufTensorNames(
            layer={
                **_ATTENTION,
                "post_attention_norm": "post_attention_layernorm",
                "ffn_gate_inp": "mlp.router",
                "attn_sinks": "self_attn.sinks",
            }
        ),
        "deepseek2": GgufTensorNames(
            layer={
                **_DENSE,
                "attn_q_a": "self_attn.q_a_proj",
                "attn_q_a_norm": "self_attn.q_a_layernorm",
                "attn_q_b": "self_attn.q_b_proj",
                "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
                "attn_kv_a_norm": "self_attn.kv_a_layernorm",
                "attn_kv_b": "self_attn.kv_b_proj",
                "ffn_gate_inp": "mlp.gate",
                "ffn_gate_shexp": "mlp.shared_experts.gate_proj",
                "ffn_up_shexp": "mlp.shared_experts.up_proj",
                "ffn_down_shexp": "mlp.shared_experts.down_proj",
            },
            experts=_EXPERTS,
        ),
    }
)
"""By ``general.architecture``."""

_BARE: Mapping[str, str] = MappingProxyType(
    {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias", "attn_sinks.weight": "self_attn.sinks"}
)
"""Tensors of a layer that have no kind in a Hugging Face checkpoint."""

_LAYER_NAME = re.compile(r"blk\.(\d{1,5})\.((\w+)\.(weight|bias))")
_STACK_NAME = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|down|gate_up)_exps\.weight")
_EXPERT_NAME = re.compile(r"blk\.(\d{1,5})\.ffn_(gate|up|down)\.(\d{1,4})\.weight")


def layer_of(name: str) -> int | None:
    """The layer that a tensor of a GGUF file belongs to; None for those outside."""
    match = re.match(r"blk\.(\d{1,5})\.", name)
    return None if match is None else int(match[1])


def hugging_face_name(name: str, names: GgufTensorNames) -> str:
    """The tensor's name in a Hugging Face checkpoint, the same name if it is not known."""
    if (match := _LAYER_NAME.fullmatch(name)) is not None:
        prefix = f"model.layers.{match[1]}."
        if match[2] in _BARE:
            return prefix + _BARE[match[2]]
        return f"{prefix}{names.layer[match[3]]}.{match[4]}" if match[3] in names.layer else name
    if (match := _EXPERT_NAME.fullmatch(name)) is not None and match[2] in names.experts:
        return f"model.layers.{match[1]}.{names.experts[match[2]].format(int(match[3]))}"
    stem, _, kind = name.rpartition(".")
    return f"{_OUTSIDE[stem]}.{kind}" if stem in _OUTSIDE else name


def renamed_tensors(info: TensorInfo, names: GgufTensorNames, where: str) -> Iterator[TensorInfo]:
    """The tensors that a stored one is in a Hugging Face checkpoint: one, or those of all experts of a stack.

    Raises ModelError for a stack that is none.
    """
    match = _STACK_NAME.fullmatch(info.name)
    if match is None or not names.experts:
        name = hugging_face_name(info.name, names)
        computed = names.norms_plus_one and name.endswith("norm.weight")
        yield info if computed else replace(info, name=name)
        return
    if len(info.shape) != 3 or info.shape[0] > MAX_EXPERTS:
        raise ModelError(
            f"{where}: tensor {info.name!r} has shape {list(info.shape)}, "
            f"it must be a stack of matrices of up to {MAX_EXPERTS} experts"
        )
    prefix, parts = f"model.layers.{match[1]}.", match[2].split("_")
    experts, rows, columns = info.shape
    each = info.nbytes // experts // len(parts)
    if rows % len(parts):
        raise ModelError(f"{where}: tensor {info.name!r}: {rows} rows are no halves of gate and up")
    for index in range(experts * len(parts)):
        expert, part = divmod(index, len(parts))
        start = info.start + index * each
        name = prefix + names.experts[parts[part]].format(expert)
        yield TensorInfo(name, info.dtype, (rows // len(parts), columns), start, start + each)
