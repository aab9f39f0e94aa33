"""DeepSeek V2 (arXiv:2405.04434), V3 and R1 (arXiv:2412.19437), Kimi K2 (arXiv:2507.20534) and the text model of Kimi
K2.5: latent attention in its absorbed form, the first layers dense, then routed experts and shared ones.

The releases contain Python code, which is not run: transformers has the same architectures under these names.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace

from penstock.kernels.operands import Gate, KvShape, Score
from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import DecoderConfig, DecoderTensorNames, LayerConfig, MlpConfig, NormConfig
from penstock.weights.architecture.mla import MlaConfig
from penstock.weights.architecture.moe import MoeConfig
from penstock.weights.architecture.rope import parse_rope, rope_section
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    MAX_HEAD_DIM,
    DecoderSizes,
    decoder_spec,
    layer_count,
    parse_activation,
    parse_routing,
    refuse_true,
    refuse_variants,
)

KIMI_IMAGES = r"(model\.)?(vision_tower|mm_projector)\..*"


def parse_deepseek_v2(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "deepseek_v2")
    refuse_true(config, "norm_topk_prob", "mlp_bias")
    method = config.get("topk_method", str, "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise config.error(f"topk_method is {method!r}; 'greedy' and 'group_limited_greedy' can be served")
    grouped = method == "group_limited_greedy"
    moe = _moe(
        config,
        choice_bias=False,
        score=Score.SOFTMAX,
        groups=config.positive_int("n_group") if grouped else 1,
        groups_kept=config.positive_int("topk_group") if grouped else 1,
    )
    return _spec(config, "DeepseekV2ForCausalLM", moe, interleaved=True)


def parse_deepseek_v3(config: ConfigFields) -> ModelSpec:
    """The same for V3, R1 and Kimi K2."""
    return _parse_v3(config, "DeepseekV3ForCausalLM")


def parse_kimi_with_images(config: ConfigFields) -> ModelSpec:
    """The text model of Kimi K2.5, which also reads images and films.  Raises ModelError as the others."""
    refuse_variants(config, "kimi_k25")
    text = config.section("text_config")
    if text is None:
        raise config.error("has no text_config, the section of the model that writes")
    return _parse_v3(text, "KimiK25ForConditionalGeneration")


def _parse_v3(config: ConfigFields, architecture: str) -> ModelSpec:
    kind = config.get("model_type", str, "deepseek_v3")
    refuse_variants(config, "kimi_k2" if kind == "kimi_k2" else "deepseek_v3")
    if config.get("scoring_func", str, "sigmoid") != "sigmoid":
        raise config.error("scoring_func must be 'sigmoid'")
    groups = config.positive_int("n_group", 8)
    moe = _moe(
        config,
        choice_bias=True,
        score=Score.SIGMOID,
        normalised=config.get("norm_topk_prob", bool, True),
        groups=groups,
        groups_kept=config.positive_int("topk_group", 4),
        pairs=groups > 1,
    )
    return _spec(config, architecture, moe, interleaved=config.get("rope_interleave", bool, True))


def deepseek_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``).  The layers behind the last one predict further tokens
    and are not read."""
    return decoder.decoder_layout(spec, replace(DecoderTensorNames(), ignored=_ignored(spec, "model.")))


def kimi_with_images_layout(spec: ModelSpec) -> WeightLayout:
    """The same inside a model that also reads images: what does is not loaded."""
    published = DecoderTensorNames(model="language_model.model.", head="language_model.lm_head")
    newer = DecoderTensorNames(model="model.language_model.")
    return decoder.decoder_layout(
        spec, *(replace(names, ignored=rf"{KIMI_IMAGES}|{_ignored(spec, names.model)}") for names in (published, newer))
    )


def _ignored(spec: ModelSpec, model: str) -> str:
    """Layers that predict further tokens, and what can be computed from the configuration."""
    return rf"{re.escape(model)}layers\.{spec.layers}\..*|.*\.rotary_emb\.inv_freq"


def _spec(config: ConfigFields, architecture: str, moe: MoeConfig, *, interleaved: bool) -> ModelSpec:
    if config.positive_int("moe_layer_freq", 1) != 1:
        raise config.error("moe_layer_freq must be 1: experts in every layer behind the first ones")
    latent = _latent(config, interleaved=interleaved)
    layers, dense = layer_count(config, "num_hidden_layers"), config.get("first_k_dense_replace", int, 0)
    first = MlpConfig(intermediate=config.positive_int("intermediate_size"), activation=moe.gate.activation)
    details = DecoderConfig(
        layers=tuple(LayerConfig(attention=latent, mlp=first if index < dense else moe) for index in range(layers)),
        norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6)),
    )
    sizes = DecoderSizes(
        hidden=config.positive_int("hidden_size"),
        layers=layers,
        heads=latent.heads,
        kv_heads=1,
        head_dim=latent.rank + latent.rope.columns,
        max_positions=config.positive_int("max_position_embeddings", 2048),
    )
    kv = KvShape(layers=layers, kv_heads=1, key_dim=sizes.head_dim, value_dim=latent.rank, shared=True)
    return decoder_spec(config, architecture, sizes, details, kv=kv)


def _latent(config: ConfigFields, *, interleaved: bool) -> MlaConfig:
    plain, turned = config.positive_int("qk_nope_head_dim"), config.positive_int("qk_rope_head_dim")
    rank = config.positive_int("kv_lora_rank")
    for name, size in (("kv_lora_rank", rank), ("qk_nope_head_dim", plain), ("qk_rope_head_dim", turned)):
        if size % 2 or size > MAX_HEAD_DIM:
            raise config.error(f"{name} must be even and at most {MAX_HEAD_DIM}, got {size}")
    if rank + turned > MAX_HEAD_DIM:
        raise config.error(f"kv_lora_rank and qk_rope_head_dim together must be at most {MAX_HEAD_DIM}")
    return MlaConfig(
        heads=config.positive_int("num_attention_heads"),
        rank=rank,
        plain_dim=plain,
        value_dim=config.positive_int("v_head_dim"),
        rope=parse_rope(config, turned, interleaved=interleaved),
        scale=(plain + turned) ** -0.5 * _stretch(config) ** 2,
        q_rank=_query_rank(config),
        bias=config.get("attention_bias", bool, False),
    )


def _query_rank(config: ConfigFields) -> int | None:
    """Null says that there is none, silence that there is the usual one."""
    if config.has("q_lora_rank"):
        return config.positive_int("q_lora_rank")
    return None if "q_lora_rank" in config.values else 1536


def _stretch(config: ConfigFields) -> float:
    """By YaRN, scores of longer contexts are sharper: ``mscale_all_dim``, once for queries and once for keys."""
    section = rope_section(config)
    name = section.get("rope_type", str, section.get("type", str, "default"))
    weight = section.values.get("mscale_all_dim")
    if name == "default" or not weight:
        return 1.0
    factor = section.positive_float("factor")
    return 1.0 if factor <= 1 else 0.1 * section.positive_float("mscale_all_dim") * math.log(factor) + 1.0


def _moe(config: ConfigFields, *, choice_bias: bool, **how: object) -> MoeConfig:
    inner = config.positive_int("moe_intermediate_size")
    return MoeConfig(
        routing=parse_routing(
            config, experts="n_routed_experts", factor=config.positive_float("routed_scaling_factor", 1.0), **how
        ),
        intermediate=inner,
        gate=Gate(activation=parse_activation(config, "hidden_act", "silu")),
        choice_bias=choice_bias,
        shared=config.positive_int("n_shared_experts") * inner,
    )
