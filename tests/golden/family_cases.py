"""What can be served, as data: one entry a family and feature, tested by ``test_families.py``, printed into
docs/models.md by ``family_table.py``.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CONFIGS = Path(__file__).parents[1] / "fixtures/configs"

SMALL = {
    "vocab_size": 113,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A published model, made small."""

    models: str  # as people call what this entry stands for
    config: str  # file of the real config.json, without suffix
    parameters: int  # of the real model, as its makers count
    features: str  # what this entry proves
    small: dict[str, Any] = field(default_factory=dict)  # further changes; None removes a field
    sizes: dict[str, Any] = field(default_factory=lambda: SMALL)
    inside: str | None = None  # the section of config.json that all of these are in

    @property
    def name(self) -> str:
        """Of the tests."""
        return f"{self.config}: {self.features}"

    @property
    def architecture(self) -> str:
        """As ``config.json`` names it."""
        (name,) = self.real()["architectures"]
        return str(name)

    def real(self) -> dict[str, Any]:
        """The published ``config.json``."""
        values: dict[str, Any] = json.loads((CONFIGS / f"{self.config}.json").read_text())
        return values

    def shrunk(self) -> dict[str, Any]:
        """The same with small sizes."""
        values = self.real()
        if self.inside is None:
            return self._changed(values)
        return values | {self.inside: self._changed(values[self.inside])} | NO_IMAGES

    def _changed(self, values: dict[str, Any]) -> dict[str, Any]:
        """With other sizes, and without what they say None of."""
        changes = self.sizes | self.small
        return {name: value for name, value in (values | changes).items() if value is not None or name not in changes}


NO_IMAGES = {
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "image_size": 28,
        "patch_size": 14,
    }
}
"""The smallest reader of images; only text is served."""


LLAMA4 = {
    "num_hidden_layers": 4,
    "head_dim": 16,
    "intermediate_size_mlp": 80,
    "attention_chunk_size": 48,
    "floor_scale": 32,
    "attn_scale": 0.7,
    "num_local_experts": 8,
}

GPT2_SMALL = {
    "vocab_size": 113,
    "n_embd": 64,
    "n_head": 4,
    "n_layer": 3,
    "n_positions": 256,
    "n_ctx": 256,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
"""Its fields have other names."""


LONG = {
    "original_max_position_embeddings": 64,
    "rope_scaling": {
        "type": "longrope",
        "short_factor": [1.0, 1.05, 1.1, 1.15, 1.2, 1.3, 1.4, 1.5],
        "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0],
    },
}
"""Divisors for heads of 16 columns."""


AXES = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}, "max_window_layers": 3}
VISION: dict[str, Any] = {
    "depth": 2,
    "num_heads": 2,
    "in_chans": 3,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}
"""Small readers of images.  Texts without any are tested here, images in ``test_vision.py``."""


MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 18,
    "qk_rope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 40,
    "max_position_embeddings": 512,
    "rope_scaling": {
        "type": "yarn",
        "factor": 4.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 128,
    },
}
"""Latent attention, made small."""


CASES = (
    Case(
        models="Llama 2",
        config="llama_2_7b",
        parameters=6_738_415_616,
        features="a key-value head each",
        small={"num_key_value_heads": 4},
    ),
    Case(
        models="Llama 3, 3.1, 3.2, 3.3",
        config="llama_3_2_1b",
        parameters=1_235_814_400,
        features="grouped queries, stretched rotary positions (llama3), tied embeddings",
        small={"head_dim": 16},
    ),
    Case(
        models="Llama 3, 3.1, 3.2, 3.3",
        config="llama_3_2_1b",
        parameters=1_235_814_400,
        features="biases in every matrix, YaRN",
        small={
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    Case(
        models="Qwen2, Qwen2.5",
        config="qwen_2_5_0_5b",
        parameters=494_032_768,
        features="biases of queries, keys and values, tied embeddings",
    ),
    Case(
        models="Qwen2, Qwen2.5",
        config="qwen_2_7b",
        parameters=7_615_616_512,
        features="a window in the upper layers (use_sliding_window)",
        small={"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 40},
    ),
    Case(
        models="Qwen3",
        config="qwen_3_4b",
        parameters=4_022_468_096,
        features="normed heads of another width, tied embeddings",
        small={"head_dim": 32},
    ),
    Case(
        models="Mistral 7B v0.1",
        config="mistral_7b",
        parameters=7_241_732_096,
        features="a window in every layer",
        small={"sliding_window": 33},
    ),
    Case(
        models="Mistral 7B from v0.2, Nemo",
        config="mistral_7b_v0_2",
        parameters=7_241_732_096,
        features="grouped queries, heads of another width",
        small={"head_dim": 24},
    ),
    Case(
        models="Phi-3, Phi-3.5, Phi-4",
        config="phi_3_mini_128k",
        parameters=3_821_079_552,
        features="fused matrices, LongRoPE",
        small=LONG,
    ),
    Case(
        models="Phi-3, Phi-3.5, Phi-4",
        config="phi_3_mini_128k",
        parameters=3_821_079_552,
        features="three quarters of a head rotated, tied embeddings, a window",
        small={
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 64,
            "rope_scaling": {
                "type": "longrope",
                "short_factor": [1.0] * 6,
                "long_factor": [1.0, 1.5, 2.0, 3.0, 4.0, 9.0],
            },
            "sliding_window": 50,
            "tie_word_embeddings": True,
        },
    ),
    Case(
        models="Gemma 1",
        config="gemma_7b",
        parameters=8_537_680_896,
        features="norms that store w - 1, scaled embeddings, gelu",
        small={"head_dim": 32, "num_key_value_heads": 1, "hidden_act": "gelu_pytorch_tanh"},
    ),
    Case(
        models="Mixtral 8x7B, 8x22B",
        config="mixtral_8x7b",
        parameters=46_702_792_704,
        features="experts",
    ),
    Case(
        models="Gemma 2",
        config="gemma_2_2b",
        parameters=2_614_341_888,
        features="soft caps, a window in every other layer, norms around blocks",
        small={"head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 40},
    ),
    Case(
        models="Gemma 3",
        config="gemma_3_1b",
        parameters=999_885_952,
        features="two rotary recipes, a window in five of six layers, normed heads",
        small={"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 40},
    ),
    Case(
        models="Gemma 3 with images (text only)",
        config="gemma_3_27b",
        parameters=27_009_346_304,
        features="the text model inside one that reads images; stretched positions in the upper recipe only",
        small={"num_hidden_layers": 6, "head_dim": 32, "query_pre_attn_scalar": 24, "sliding_window": 40},
        inside="text_config",
    ),
    Case(
        models="OLMo 2",
        config="olmo_2_1b",
        parameters=1_484_916_736,
        features="norms behind blocks only, all heads normed together",
        small={"rope_theta": 10000.0},
    ),
    Case(
        models="OLMo 3",
        config="olmo_3_7b",
        parameters=7_298_011_136,
        features="windows and two rotary recipes (YaRN without a window) beside what OLMo 2 has",
        small={
            "num_hidden_layers": 4,
            "sliding_window": 40,
            "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        },
    ),
    Case(
        models="StableLM 3B, StableLM 2 1.6B",
        config="stablelm_3b",
        parameters=2_795_443_200,
        features="layer norms, part of a head rotated",
        small={"head_dim": None, "num_key_value_heads": 4, "partial_rotary_factor": 0.5, "use_qkv_bias": True},
    ),
    Case(
        models="Command R",
        config="command_r",
        parameters=34_980_831_232,
        features="both blocks of a layer read the same, scaled logits",
        small={"logit_scale": 0.5},
    ),
    Case(
        models="SmolLM3",
        config="smollm_3_3b",
        parameters=3_075_098_624,
        features="every fourth layer without positions",
        small={"num_hidden_layers": 4, "no_rope_layers": [1, 1, 0, 1]},
    ),
    Case(
        models="GLM-4 0414",
        config="glm_4_9b_0414",
        parameters=9_400_279_040,
        features="half of a head rotated in neighbouring pairs, norms around blocks",
        small={"head_dim": 32},
    ),
    Case(
        models="GLM-4 9B (-hf releases)",
        config="glm_4_9b_chat_hf",
        parameters=9_399_951_360,
        features="half of a head rotated in neighbouring pairs, biases",
        small={"head_dim": 32},
    ),
    Case(
        models="GPT-2",
        config="gpt2",
        parameters=124_439_808,
        features="learned positions, layer norms, biases, matrices stored inputs first",
        sizes=GPT2_SMALL,
    ),
    Case(
        models="Qwen3 30B-A3B, 235B-A22B",
        config="qwen_3_30b_a3b",
        parameters=30_532_122_624,
        features="experts beside a dense layer, normed heads",
        small={"num_experts": 16, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "mlp_only_layers": [1]},
    ),
    Case(
        models="GLM-4.5, GLM-4.6",
        config="glm_4_5_air",
        parameters=106_852_251_264,
        features="a dense layer first, experts chosen in groups with a bias, a shared expert; half of a head rotated",
        small={
            "head_dim": 16,
            "use_qk_norm": True,
            "n_routed_experts": 16,
            "num_experts_per_tok": 3,
            "n_group": 4,
            "topk_group": 2,
            "moe_intermediate_size": 40,
            "routed_scaling_factor": 1.5,
        },
    ),
    Case(
        models="gpt-oss (weights in bf16)",
        config="gpt_oss_20b_bf16",
        parameters=20_914_757_184,
        features="sinks, a window in every other layer, biases everywhere, gates column by column in stacked experts",
        small={
            "head_dim": 16,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            "sliding_window": 40,
            "num_local_experts": 8,
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "truncate": False,
            },
        },
    ),
    Case(
        models="DeepSeek-V2 Lite",
        config="deepseek_v2_lite",
        parameters=15_706_484_224,
        features="latent attention, experts beside shared ones, YaRN with sharper scores",
        small=MLA,
    ),
    Case(
        models="DeepSeek-V2",
        config="deepseek_v2_lite",
        parameters=15_706_484_224,
        features="queries by way of a shorter vector, experts chosen in groups",
        small=MLA | {"q_lora_rank": 40, "topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
    ),
    Case(
        models="DeepSeek-V3, R1 (weights in bf16)",
        config="deepseek_v3",
        parameters=671_026_419_200,
        features="experts chosen in groups by sigmoid with a bias",
        small=MLA | {"q_lora_rank": 40, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1},
    ),
    Case(
        models="Kimi K2 (weights in bf16)",
        config="kimi_k2_bf16",
        parameters=1_026_408_232_448,
        features="one group of experts",
        small=MLA | {"model_type": "deepseek_v3", "q_lora_rank": 24, "v_head_dim": 22},
    ),
    Case(
        models="Llama 4 Scout, Maverick (text only)",
        config="llama_4_scout",
        parameters=107_769_861_120,
        features="chunks, layers without positions that grow sharper, one expert on a weighed input and a shared one",
        small=LLAMA4 | {"interleave_moe_layer_step": 2},
        inside="text_config",
    ),
    Case(
        models="Llama 4 Scout, Maverick (text only)",
        config="llama_4_scout_text",
        parameters=107_769_861_120,
        features="the text model by itself, plain heads",
        small=LLAMA4 | {"use_qk_norm": False},
    ),
    Case(
        models="Qwen2-VL",
        config="qwen_2_vl_2b",
        parameters=2_208_985_600,
        features="images ([vision.md](vision.md)): positions of three axes",
        small=AXES | {"vision_config": VISION | {"embed_dim": 32, "hidden_size": 64, "mlp_ratio": 2}},
    ),
    Case(
        models="Qwen2.5-VL",
        config="qwen_2_5_vl_7b",
        parameters=8_292_166_656,
        features="images; windows and gated units in their reader",
        small=AXES
        | {
            "vision_config": VISION
            | {
                "hidden_size": 32,
                "intermediate_size": 48,
                "out_hidden_size": 64,
                "window_size": 56,
                "fullatt_block_indexes": [1],
            }
        },
    ),
)
