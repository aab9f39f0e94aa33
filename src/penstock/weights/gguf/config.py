"""A GGUF file's metadata as ``config.json``, so that families parse one form only.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, and llama.cpp's converter.  What the metadata do not
say and llama.cpp knows by the architecture, the number of layers or the vocabulary, is added here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ModelError
from penstock.weights.architecture.rope import Llama3RopeScaling
from penstock.weights.gguf.header import GgufHeader
from penstock.weights.gguf.tensors import LONG_FACTORS, ROPE_FACTORS, SHORT_FACTORS

Config = dict[str, Any]
Factors = Mapping[str, NDArray[np.float32]]
"""Divisors of rotary frequencies, by the names of their tensors (``tensors.RECIPES``)."""

_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "intermediate_size": "feed_forward_length",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "max_position_embeddings": "context_length",
        "rms_norm_eps": "attention.layer_norm_rms_epsilon",
        "rope_theta": "rope.freq_base",
    }
)
_ROPE_SCALING: Mapping[str, str] = MappingProxyType(
    {
        "factor": "factor",
        "original_max_position_embeddings": "original_context_length",
        "attention_factor": "yarn_attn_factor",
        "beta_fast": "yarn_beta_fast",
        "beta_slow": "yarn_beta_slow",
    }
)
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What all Llama 3 models with stretched frequencies have in common."""

_FACTORS_AGREE = 1e-4

_NEUTRAL: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {
        "attention.causal": (True,),
        "attention.clamp_kqv": (0,),
        "attention.max_alibi_bias": (0,),
        "attention.scale": (0,),
        "attention.temperature_scale": (0,),
        "attn_logit_softcapping": (0,),
        "embedding_scale": (0, 1),
        "expert_gating_func": (0, 1),
        "expert_group_count": (0, 1),
        "expert_shared_count": (0,),
        "expert_weights_scale": (0, 1),
        "final_logit_softcapping": (0,),
        "logit_scale": (0, 1),
        "pooling_type": (0,),
        "residual_scale": (0, 1),
        "rope.dimension_sections": (0,),
        "router_logit_softcapping": (0,),
        "use_parallel_residual": (False,),
    }
)
"""Keys that change what is computed, with the values that do not; a rule reads those that its architecture has."""

_TURN_ENDS = (
    *("<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<end_of_turn>", "<|end|>", "<|observation|>"),
    *("<|return|>", "<|call|>"),
)
"""Control tokens behind which nothing of an answer follows, whatever the file says."""

_CONTROL = 3
MAX_LAYERS = 1 << 12


class GgufMetadata:
    """The metadata of one architecture, by keys without its name."""

    def __init__(self, header: GgufHeader, architecture: str, factors: Factors, where: str) -> None:
        self.architecture = architecture
        self.factors = factors
        self._header = header
        self._where = where

    def error(self, reason: str) -> ModelError:
        return ModelError(f"{self._where}: {reason}")

    def value(self, key: str, default: Any = None) -> Any:
        """The value; of a list with one entry a layer, that of all if they are the same.

        A real number is as its makers wrote it: 1e-05, not what is left of it in 32 bits.
        """
        value = self._header.metadata.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(item == value[0] for item in value):
            value = value[0]
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def number(self, key: str, default: float) -> float:
        """A real number.  Raises ModelError for a value that is none."""
        value = self.value(key, default)
        if type(value) not in (int, float):
            raise self.error(f"{self.architecture}.{key} must be a number, got {value!r}")
        return float(value)

    def layer_values(self, key: str, layers: int) -> list[bool] | None:
        """One truth value a layer; None if the file has no such list.  Raises ModelError for one of another length."""
        value = self._header.metadata.get(f"{self.architecture}.{key}")
        if not isinstance(value, list):
            return None
        if len(value) < layers:
            raise self.error(f"{self.architecture}.{key} has {len(value)} entries for {layers} layers")
        return [bool(item) for item in value[:layers]]

    def has_tensor(self, name: str) -> bool:
        return name in self._header.tensors

    def tensor_rows(self, name: str) -> int:
        """Raises ModelError if the tensor is missing."""
        if not self.has_tensor(name):
            raise self.error(f"tensor {name!r} is missing")
        return self._header.tensors[name].shape[0]

    def fields(self, **keys: str) -> Config:
        """Fields of a ``config.json`` by the keys that they have here, those that the file has."""
        return {field: self.value(key) for field, key in keys.items() if self.value(key) is not None}

    def refuse_variants(self, known: frozenset[str]) -> None:
        """Raises ModelError for a key that changes what is computed and is not ``known``."""
        for key, neutral in _NEUTRAL.items():
            value = self.value(key)
            if key not in known and value is not None and value not in (*neutral, None):
                raise self.error(f"{self.architecture}.{key} is {value!r}: cannot be served")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rule:
    """How the metadata of one architecture become a ``config.json``."""

    fields: Callable[[GgufMetadata, Config], Config]  # what it has besides the usual sizes, or instead
    reads: frozenset[str] = frozenset()  # keys of ``_NEUTRAL``


def config_json(header: GgufHeader, factors: Factors, where: str) -> Config:
    """The configuration.  Raises ModelError for what a ``config.json`` could not say."""
    architecture = header.metadata.get("general.architecture")
    rule = _RULES.get(str(architecture))
    if rule is None:
        raise ModelError(
            f"{where}: general.architecture is {architecture!r}; of GGUF files these can be served: "
            f"{', '.join(sorted(_RULES))}"
        )
    metadata = GgufMetadata(header, str(architecture), factors, where)
    metadata.refuse_variants(rule.reads)
    config: Config = {"rope_theta": 10_000.0} | metadata.fields(**_SIZES)
    config["vocab_size"] = metadata.tensor_rows("token_embd.weight")
    config["tie_word_embeddings"] = not metadata.has_tensor("output.weight")
    config |= _end_tokens(header.metadata)
    if scaling := _rope_scaling(metadata):
        config["rope_scaling"] = scaling
    config |= rule.fields(metadata, config)
    return {field: value for field, value in config.items() if value is not None or field == "q_lora_rank"}


def _named(name: str, model_type: str) -> Config:
    return {"architectures": [name], "model_type": model_type}


def _end_tokens(metadata: Mapping[str, Any]) -> Config:
    """A chat model's turns end with another token than its texts: whatever ends either ends an answer."""
    found: Config = {}
    keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id", "tokenizer.ggml.eom_token_id")
    ends = [metadata[key] for key in keys if key in metadata]
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}", []) for key in ("tokens", "token_type"))
    if isinstance(tokens, list) and isinstance(kinds, list) and len(tokens) == len(kinds):
        named = {
            token: index
            for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
            if kind == _CONTROL and token in _TURN_ENDS
        }
        if "<|return|>" in named:
            named.pop("<|end|>", None)  # of gpt-oss, the end of a message that others follow
        ends += named.values()
    if ends:
        found["eos_token_id"] = list(dict.fromkeys(ends))
    if "tokenizer.ggml.bos_token_id" in metadata:
        found["bos_token_id"] = metadata["tokenizer.ggml.bos_token_id"]
    return found


# --- rotary positions -------------------------------------------------------------------------------------------------


def _rope_scaling(metadata: GgufMetadata) -> Config | None:
    kind = metadata.value("rope.scaling.type", "none")
    if LONG_FACTORS in metadata.factors:
        return _long_rope(metadata)
    if kind != "none":
        keys = {field: f"rope.scaling.{key}" for field, key in _ROPE_SCALING.items()}
        return {"rope_type": kind} | metadata.fields(**keys)
    if metadata.value("rope.scale_linear", 1) not in (0, 1):
        return {"rope_type": "linear", "factor": metadata.value("rope.scale_linear")}
    return _llama3(metadata) if ROPE_FACTORS in metadata.factors else None


def _long_rope(metadata: GgufMetadata) -> Config:
    """LongRoPE: a divisor for each frequency, for contexts up to the original length and beyond."""
    if SHORT_FACTORS not in metadata.factors:
        raise metadata.error(f"tensor {SHORT_FACTORS!r} is missing")
    keys = {
        "original_max_position_embeddings": "rope.scaling.original_context_length",
        "attention_factor": "rope.scaling.attn_factor",
    }
    lists = {"short_factor": SHORT_FACTORS, "long_factor": LONG_FACTORS}
    divisors = {field: [float(str(each)) for each in metadata.factors[name]] for field, name in lists.items()}
    return {"rope_type": "longrope", **divisors} | metadata.fields(**keys)


def _llama3(metadata: GgufMetadata) -> Config:
    """The recipe that gives these factors.  Raises ModelError if it is none that is known."""
    factors = metadata.factors[ROPE_FACTORS]
    factor = float(str(factors.max()))
    theta = metadata.number("rope.freq_base", 10_000.0)
    stretched = Llama3RopeScaling(
        factor=factor,
        low_freq_factor=_LLAMA3_ROPE["low_freq_factor"],
        high_freq_factor=_LLAMA3_ROPE["high_freq_factor"],
        original_max_positions=int(_LLAMA3_ROPE["original_max_position_embeddings"]),
    )
    plain = theta ** -(np.arange(len(factors)) / len(factors))
    if factor <= 1 or not np.allclose(plain / factors, stretched.of(plain, theta), rtol=_FACTORS_AGREE):
        raise metadata.error(f"tensor {ROPE_FACTORS!r}: its factors follow no recipe that is known here")
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


# --- attention --------------------------------------------------------------------------------------------------------


def _head_dim(metadata: GgufMetadata, config: Config) -> int:
    """Columns of a head.  Raises ModelError if values have others."""
    head_dim = config.get("head_dim", _divided(config))
    if type(head_dim) is not int or head_dim < 1:
        raise metadata.error(f"{metadata.architecture}.attention.key_length is {head_dim!r}, it must be a size")
    _check_columns(metadata, "attention.value_length", head_dim)
    return head_dim


def _divided(config: Config) -> int | None:
    """Hidden size over heads; None if that is no size."""
    hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
    return hidden // heads if type(hidden) is int and type(heads) is int and heads > 0 else None


def _whole_heads(metadata: GgufMetadata, config: Config) -> int:
    """The same where all columns are rotated.  Raises ModelError if they are not."""
    head_dim = _head_dim(metadata, config)
    _check_columns(metadata, "rope.dimension_count", head_dim)
    return head_dim


def _check_columns(metadata: GgufMetadata, key: str, head_dim: int) -> None:
    size = metadata.value(key, head_dim)
    if size != head_dim:
        raise metadata.error(f"{metadata.architecture}.{key} is {size}, heads have {head_dim}: cannot be served")


def _rotated_part(metadata: GgufMetadata, head_dim: int) -> float:
    """Which part of a head is rotated."""
    size = metadata.value("rope.dimension_count", head_dim)
    if type(size) is not int or not 0 < size <= head_dim:
        raise metadata.error(f"{metadata.architecture}.rope.dimension_count is {size!r}, heads have {head_dim}")
    return size / head_dim


def _windows(metadata: GgufMetadata, config: Config, period: int) -> Config:
    """``sliding_window`` and the layers that have it: all but every ``period``-th, if the file does not say which."""
    window, layers = metadata.value("attention.sliding_window", 0), config.get("num_hidden_layers")
    if type(layers) is not int or not 0 < layers <= MAX_LAYERS:
        return {}  # the family refuses it
    pattern = metadata.layer_values("attention.sliding_window_pattern", layers)
    if pattern is None:
        period = metadata.value("attention.sliding_window_pattern", period)
        if type(period) is not int or period < 0:
            raise metadata.error(f"{metadata.architecture}.attention.sliding_window_pattern is {period!r}")
        pattern = [period == 0 or index % period < period - 1 for index in range(layers)]
    kinds = ["sliding_attention" if slides and window else "full_attention" for slides in pattern]
    return {"sliding_window": window or None, "layer_types": kinds}


# --- architectures ----------------------------------------------------------------------------------------------------


def _llama(metadata: GgufMetadata, config: Config) -> Config:
    """Llama, Mistral and what else is converted to it; with experts Mixtral."""
    _whole_heads(metadata, config)
    if metadata.value("expert_count", 0):
        return _named("MixtralForCausalLM", "mixtral") | metadata.fields(
            num_local_experts="expert_count", num_experts_per_tok="expert_used_count"
        )
    biases = {"attention_bias": "blk.0.attn_q.bias", "mlp_bias": "blk.0.ffn_up.bias"}
    return _named("LlamaForCausalLM", "llama") | {
        field: True for field, tensor in biases.items() if metadata.has_tensor(tensor)
    }


def _qwen2(metadata: GgufMetadata, config: Config) -> Config:
    _whole_heads(metadata, config)
    return _named("Qwen2ForCausalLM", "qwen2")


def _qwen3(metadata: GgufMetadata, config: Config) -> Config:
    return _named("Qwen3ForCausalLM", "qwen3") | {"head_dim": _whole_heads(metadata, config)}


def _qwen3_moe(metadata: GgufMetadata, config: Config) -> Config:
    return {
        **_named("Qwen3MoeForCausalLM", "qwen3_moe"),
        "head_dim": _whole_heads(metadata, config),
        "norm_topk_prob": True,
        "intermediate_size": config.get("intermediate_size", metadata.value("expert_feed_forward_length")),
        **metadata.fields(
            num_experts="expert_count",
            num_experts_per_tok="expert_used_count",
            moe_intermediate_size="expert_feed_forward_length",
        ),
    }


def _gemma(metadata: GgufMetadata, config: Config) -> Config:
    return _named("GemmaForCausalLM", "gemma") | {"head_dim": _whole_heads(metadata, config)}


GEMMA2_27B_LAYERS, GEMMA3_27B_LAYERS = 46, 62
"""Models whose scores are scaled by hidden size over heads; llama.cpp knows them by their layers, too."""


def _gemma_scores(metadata: GgufMetadata, config: Config, layers_of_27b: int) -> Config:
    head_dim = _whole_heads(metadata, config)
    by_hidden = config.get("num_hidden_layers") == layers_of_27b
    return {"head_dim": head_dim, "query_pre_attn_scalar": _divided(config) if by_hidden else head_dim}


def _gemma2(metadata: GgufMetadata, config: Config) -> Config:
    return {
        **_named("Gemma2ForCausalLM", "gemma2"),
        **_gemma_scores(metadata, config, GEMMA2_27B_LAYERS),
        **_windows(metadata, config, 2),
        **metadata.fields(
            attn_logit_softcapping="attn_logit_softcapping", final_logit_softcapping="final_logit_softcapping"
        ),
    }


def _gemma3(metadata: GgufMetadata, config: Config) -> Config:
    return {
        **_named("Gemma3ForCausalLM", "gemma3_text"),
        **_gemma_scores(metadata, config, GEMMA3_27B_LAYERS),
        **_windows(metadata, config, 6),
        "rope_local_base_freq": metadata.value("rope.freq_base_swa", 10_000.0),
        "final_logit_softcapping": metadata.value("final_logit_softcapping") or None,
    }


def _phi3(metadata: GgufMetadata, config: Config) -> Config:
    """Phi-3 to 4.  The window counts, which llama.cpp ignores."""
    return {
        **_named("Phi3ForCausalLM", "phi3"),
        "partial_rotary_factor": _rotated_part(metadata, _head_dim(metadata, config)),
        "sliding_window": metadata.value("attention.sliding_window", 0) or None,
    }


def _glm4(metadata: GgufMetadata, config: Config) -> Config:
    head_dim = _head_dim(metadata, config)
    return {
        **_named("Glm4ForCausalLM", "glm4"),
        "head_dim": head_dim,
        "partial_rotary_factor": _rotated_part(metadata, head_dim),
        "attention_bias": metadata.has_tensor("blk.0.attn_q.bias"),
    }


def _gpt_oss(metadata: GgufMetadata, config: Config) -> Config:
    scaling = config.get("rope_scaling")
    return {
        **_named("GptOssForCausalLM", "gpt_oss"),
        "head_dim": _whole_heads(metadata, config),
        "rope_scaling": scaling and scaling | {"truncate": False},
        **_windows(metadata, config, 2),
        **metadata.fields(
            intermediate_size="expert_feed_forward_length",
            num_local_experts="expert_count",
            num_experts_per_tok="expert_used_count",
        ),
    }


_SIGMOID = 2
_GROUPS: Mapping[tuple[bool, int], tuple[int, int]] = MappingProxyType({(True, 256): (8, 4), (False, 160): (8, 3)})
"""Groups of experts, and those chosen, of models whose files may not say it: DeepSeek-V3 and R1, and V2 and V2.5."""


def _deepseek2(metadata: GgufMetadata, config: Config) -> Config:
    """DeepSeek V2, V3 and R1, Kimi K2 and others of their form."""
    sigmoid, experts = metadata.value("expert_gating_func", 0) == _SIGMOID, metadata.value("expert_count")
    groups, kept = _GROUPS.get((sigmoid, experts), (1, 1)) if type(experts) is int else (1, 1)
    groups = metadata.value("expert_group_count", groups)
    kept = metadata.value("expert_group_used_count", kept)
    of_v2 = {"topk_method": "greedy" if groups == 1 else "group_limited_greedy"}
    named = _named("DeepseekV3ForCausalLM", "deepseek_v3") | {"scoring_func": "sigmoid"} if sigmoid else {}
    return {
        **(named or _named("DeepseekV2ForCausalLM", "deepseek_v2") | of_v2),
        **_latent(metadata),
        "num_hidden_layers": _without_predicting(metadata, config),
        "n_group": groups,
        "topk_group": kept,
        "norm_topk_prob": bool(metadata.value("expert_weights_norm", False)),
        "routed_scaling_factor": metadata.value("expert_weights_scale") or 1.0,
        "first_k_dense_replace": metadata.value("leading_dense_block_count", 0),
        **metadata.fields(
            n_routed_experts="expert_count",
            n_shared_experts="expert_shared_count",
            num_experts_per_tok="expert_used_count",
            moe_intermediate_size="expert_feed_forward_length",
        ),
    }


def _latent(metadata: GgufMetadata) -> Config:
    """Sizes of latent attention, in newer files with keys of their own, and its rotary positions."""
    of_heads = "_mla" if metadata.value("attention.key_length_mla") is not None else ""
    key, turned = metadata.value(f"attention.key_length{of_heads}"), metadata.value("rope.dimension_count")
    if type(key) is not int or type(turned) is not int or not 0 < turned < key:
        raise metadata.error(f"deepseek2.attention.key_length{of_heads} is {key!r}, of which {turned!r} are rotated")
    found = metadata.fields(kv_lora_rank="attention.kv_lora_rank", v_head_dim=f"attention.value_length{of_heads}")
    found |= {
        "qk_nope_head_dim": key - turned,
        "qk_rope_head_dim": turned,
        "q_lora_rank": metadata.value("attention.q_lora_rank") or None,
        "head_dim": None,
        "num_key_value_heads": None,
    }
    scaling, stretch = _rope_scaling(metadata), metadata.number("rope.scaling.yarn_log_multiplier", 0.0)
    if scaling and stretch:  # the converter writes a tenth; all models of this architecture have both alike
        weight = float(str(np.float32(stretch * 10)))
        found["rope_scaling"] = scaling | {"mscale": weight, "mscale_all_dim": weight}
    return found


def _without_predicting(metadata: GgufMetadata, config: Config) -> Any:
    """Layers without those that predict further tokens, which are not read."""
    layers, further = config.get("num_hidden_layers"), metadata.value("nextn_predict_layers", 0)
    return layers - further if type(layers) is int and type(further) is int else layers


_SOFT_CAPS = frozenset({"attn_logit_softcapping", "final_logit_softcapping"})
_RULES: Mapping[str, _Rule] = MappingProxyType(
    {
        "llama": _Rule(fields=_llama),
        "qwen2": _Rule(fields=_qwen2),
        "qwen3": _Rule(fields=_qwen3),
        "qwen3moe": _Rule(fields=_qwen3_moe),
        "gemma": _Rule(fields=_gemma),
        "gemma2": _Rule(fields=_gemma2, reads=_SOFT_CAPS),
        "gemma3": _Rule(fields=_gemma3, reads=frozenset({"final_logit_softcapping"})),
        "phi3": _Rule(fields=_phi3),
        "glm4": _Rule(fields=_glm4),
        "gpt-oss": _Rule(fields=_gpt_oss, reads=frozenset({"expert_gating_func"})),
        "deepseek2": _Rule(
            fields=_deepseek2,
            reads=frozenset(
                {"expert_gating_func", "expert_group_count", "expert_shared_count", "expert_weights_scale"}
            ),
        ),
    }
)
"""By ``general.architecture``."""
