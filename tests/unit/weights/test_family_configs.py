"""What a family's ``config.json`` may not say is refused with the field and the reason; what it leaves out is what its
makers' own code takes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ModelError
from penstock.kernels.operands import Activation, KvShape
from penstock.weights.architecture.decoder import DecoderConfig, MlpConfig
from penstock.weights.architecture.mla import MlaConfig
from penstock.weights.architecture.rope import LinearRopeScaling
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format

CONFIGS = Path(__file__).parents[2] / "fixtures/configs"


def parsed(name: str, **changes: Any) -> ModelSpec:
    """The real configuration with changes; None removes a field."""
    config = json.loads((CONFIGS / f"{name}.json").read_text()) | changes
    config = {field: value for field, value in config.items() if value is not None}
    (architecture,) = config["architectures"]
    return checkpoint_format(architecture, "").parse(ConfigFields(config, "config.json"))


def windows(spec: ModelSpec) -> list[int | None]:
    return [layer.attention.window for layer in spec.details_as(DecoderConfig).layers]


NEXT = "qwen_3_next_80b_a3b"

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another type": ("qwen_3_4b", {"model_type": "qwen2"}, "model_type is 'qwen2', not 'qwen3'"),
    "positions of images": ("qwen_2_7b", {"use_mrope": True}, "use_mrope is true"),
    "code of its own": ("qwen_2_7b", {"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "which is never run"),
    "too few kinds of layers": ("gemma_2_2b", {"layer_types": ["full_attention"]}, "layer_types must name 26 layers"),
    "a kind not known": ("gemma_2_2b", {"layer_types": ["linear_attention"] * 26}, "layer_types must name 26 layers"),
    "no window": ("gemma_2_2b", {"sliding_window": 0}, "sliding_window must be a positive integer"),
    "no cap": ("gemma_2_2b", {"attn_logit_softcapping": -1.0}, "attn_logit_softcapping must be a positive number"),
    "biases": ("gemma_2_2b", {"attention_bias": True}, "attention_bias is true"),
    "an encoder": ("gemma_3_1b", {"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    "no text": ("gemma_3_27b", {"text_config": None}, "has no text_config"),
    "another text": ("gemma_3_27b", {"text_config": {"model_type": "llama"}}, "text_config: model_type is 'llama'"),
    "too few flags": ("smollm_3_3b", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 36 entries"),
    "flags of another kind": ("smollm_3_3b", {"no_rope_layers": [2] * 36}, "each 0 or 1"),
    "scaled by layer": ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is true"),
    "not scaled": ("gpt2", {"scale_attn_weights": False}, "scale_attn_weights is false"),
    "activation": ("gpt2", {"activation_function": "tanh"}, "activation_function is 'tanh'; these can be served"),
    "divisors of another width": ("phi_3_mini_128k", {"head_dim": 192}, "short_factor must have 96 numbers"),
    "experts every other layer": ("deepseek_v3", {"moe_layer_freq": 2}, "moe_layer_freq must be 1"),
    "another score": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func must be 'sigmoid'"),
    "groups that do not divide": ("deepseek_v3", {"n_group": 7}, "256 experts in 7 groups"),
    "a latent vector too long": ("deepseek_v3", {"kv_lora_rank": 1000}, "together must be at most 1024"),
    "an odd latent vector": ("kimi_k2_bf16", {"kv_lora_rank": 511}, "kv_lora_rank must be even"),
    "another choice": ("deepseek_v2_lite", {"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'"),
    "weights that are normalised": ("deepseek_v2_lite", {"norm_topk_prob": True}, "norm_topk_prob is true"),
    "nothing recurrent": (NEXT, {"layer_types": ["full_attention"] * 48}, "layer_types must name 48 layers .* each"),
    "heads of states": (NEXT, {"linear_num_value_heads": 24}, r"linear_num_value_heads \(24\) must be a multiple of"),
    "odd values of states": (NEXT, {"linear_value_head_dim": 120}, "linear_value_head_dim, .* multiples of 16"),
    "too long a convolution": (NEXT, {"linear_conv_kernel_dim": 9}, "linear_conv_kernel_dim must be from 2 to 8"),
    "another gate": (NEXT, {"hidden_act": "gelu"}, "hidden_act is gelu; delta nets can be served with silu only"),
    "an odd part of a head": ("glm_4_9b_0414", {"partial_rotary_factor": 0.09}, "0.09 of heads of 128 is no even"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_computed_otherwise_is_refused(case: str) -> None:
    name, changes, reason = REFUSED[case]
    with pytest.raises(ModelError, match=reason) as caught:
        parsed(name, **changes)
    assert str(caught.value).startswith("config.json")


def test_which_layers_have_the_window() -> None:
    assert windows(parsed("mistral_7b")) == [4096] * 32
    assert windows(parsed("gemma_2_2b")) == [4096, None] * 13
    assert windows(parsed("gemma_3_1b")) == ([512] * 5 + [None]) * 4 + [512] * 2
    assert windows(parsed("qwen_2_7b")) == [None] * 28
    assert windows(parsed("qwen_2_7b", use_sliding_window=True, sliding_window=99, max_window_layers=20)) == [
        *[None] * 20,
        *[99] * 8,
    ]
    kinds = ["full_attention", "sliding_attention"] * 13
    assert windows(parsed("gemma_2_2b", layer_types=kinds)) == [None, 4096] * 13


def test_a_window_as_long_as_the_context_is_none() -> None:
    assert windows(parsed("phi_3_mini_128k")) == [None] * 32
    assert windows(parsed("mistral_7b", sliding_window=32767)) == [32767] * 32
    assert windows(parsed("mistral_7b", sliding_window=32768)) == [None] * 32


def test_gemma_3_rotates_near_and_far_layers_by_recipes_of_their_own() -> None:
    near, far = (parsed("gemma_3_27b").details_as(DecoderConfig).layers[index].attention.rope for index in (0, 5))
    assert near is not None
    assert far is not None
    assert (near.theta, near.scaling, far.theta, far.scaling) == (
        10_000.0,
        None,
        1_000_000.0,
        LinearRopeScaling(factor=8.0),
    )


def test_gelu_of_gemma_1_is_the_approximation() -> None:
    mlp = parsed("gemma_7b").details_as(DecoderConfig).layers[0].mlp
    assert isinstance(mlp, MlpConfig)
    assert mlp.activation is Activation.GELU_TANH


def test_deepseek_keeps_one_latent_vector_a_token() -> None:
    spec = parsed("deepseek_v3")
    assert spec.kv == KvShape(layers=61, kv_heads=1, key_dim=576, value_dim=512, shared=True)
    layers = spec.details_as(DecoderConfig).layers
    assert [isinstance(layer.mlp, MlpConfig) for layer in layers] == [True] * 3 + [False] * 58
    latent = layers[0].attention
    assert isinstance(latent, MlaConfig)
    assert latent.rope.interleaved
    assert latent.scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)  # as its makers' code has it
    assert latent.rope.attention_factor == 1.0


def test_no_rank_of_queries_is_said_by_null() -> None:
    config = json.loads((CONFIGS / "deepseek_v2_lite.json").read_text())
    ranks = []
    for values in (config, {name: value for name, value in config.items() if name != "q_lora_rank"}):
        spec = checkpoint_format("DeepseekV2ForCausalLM", "").parse(ConfigFields(values, "config.json"))
        latent = spec.details_as(DecoderConfig).layers[0].attention
        assert isinstance(latent, MlaConfig)
        ranks.append(latent.q_rank)
    assert ranks == [None, 1536]


def test_every_fourth_layer_of_smollm_knows_no_position() -> None:
    ropes = [layer.attention.rope for layer in parsed("smollm_3_3b").details_as(DecoderConfig).layers]
    assert [rope is None for rope in ropes] == [False, False, False, True] * 9
