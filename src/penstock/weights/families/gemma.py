"""Gemma 1 (arXiv:2403.08295), 2 (arXiv:2408.00118: soft caps, every second layer through a window) and 3
(arXiv:2503.19786: two rotary recipes, heads normed).  Of Gemma 3 with images, the text is served.
"""

from __future__ import annotations

from dataclasses import replace

from msgspec import structs

from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import (
    DecoderConfig,
    DecoderTensorNames,
    LayerConfig,
    MlpConfig,
    NormConfig,
    QkNorm,
)
from penstock.weights.architecture.rope import parse_rope, parse_two_ropes
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    DecoderSizes,
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_true,
    refuse_variants,
    sliding_layers,
    sliding_window,
    without_window,
)

AROUND = DecoderTensorNames(
    attention_norm_after="post_attention_layernorm",
    mlp_norm="pre_feedforward_layernorm",
    mlp_norm_after="post_feedforward_layernorm",
)
GEMMA3_IMAGES = r"(model\.)?(vision_tower|multi_modal_projector)\..*"

GEMMA2_DEFAULTS = {
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "hidden_activation": "gelu_pytorch_tanh",
}
GEMMA3_DEFAULTS = GEMMA2_DEFAULTS | {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window_pattern": 6,
}
"""What the published files leave out."""


def parse_gemma(config: ConfigFields) -> ModelSpec:
    """Gemma 1.  Its files say "gelu" and mean the approximation by tanh, unless ``hidden_activation`` says otherwise.

    Raises ModelError for anything that would be computed otherwise than its makers meant.
    """
    refuse_variants(config, "gemma")
    sizes = parse_sizes(config.with_defaults({"head_dim": 256}))
    attention = sizes.attention(parse_rope(config, sizes.head_dim))
    layers = (LayerConfig(attention=attention, mlp=_mlp(config)),) * sizes.layers
    return _spec(config, "GemmaForCausalLM", sizes, layers, around=False)


def parse_gemma2(config: ConfigFields) -> ModelSpec:
    """Gemma 2.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "gemma2")
    config = config.with_defaults(GEMMA2_DEFAULTS)
    sizes = parse_sizes(config)
    sliding = sizes.attention(
        parse_rope(config, sizes.head_dim),
        window=sliding_window(config),
        scale=config.positive_float("query_pre_attn_scalar") ** -0.5,
        softcap=_cap(config, "attn_logit_softcapping"),
    )
    full = without_window(sliding)
    layers = tuple(
        LayerConfig(attention=sliding if slides else full, mlp=_mlp(config))
        for slides in sliding_layers(config, sizes.layers, lambda index: index % 2 == 0)
    )
    return _spec(config, "Gemma2ForCausalLM", sizes, layers, around=True)


def parse_gemma3(config: ConfigFields) -> ModelSpec:
    """Gemma 3 for text.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "gemma3_text")
    return _parse_gemma3(config, "Gemma3ForCausalLM")


def parse_gemma3_with_images(config: ConfigFields) -> ModelSpec:
    """The text model of a Gemma 3 that also reads images.  Raises ModelError as the others."""
    refuse_variants(config, "gemma3")
    text = config.section("text_config")
    if text is None:
        raise config.error("has no text_config")
    refuse_variants(text, "gemma3_text")
    return _parse_gemma3(text, "Gemma3ForConditionalGeneration")


def gemma_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())


def gemma2_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``): norms before and after each block, as Gemma 2 and 3
    have them."""
    return decoder.decoder_layout(spec, AROUND)


def gemma3_with_images_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``): the text model inside one that also reads images."""
    published = replace(AROUND, model="language_model.model.", head="language_model.lm_head", ignored=GEMMA3_IMAGES)
    newer = replace(AROUND, model="model.language_model.", ignored=GEMMA3_IMAGES)
    return decoder.decoder_layout(spec, published, newer)


def _parse_gemma3(config: ConfigFields, architecture: str) -> ModelSpec:
    refuse_true(config, "use_bidirectional_attention")
    config = config.with_defaults(GEMMA3_DEFAULTS)
    sizes = parse_sizes(config)
    bases = {"near": config.positive_float("rope_local_base_freq", 10_000.0), "far": 1_000_000.0}
    near_rope, far_rope = parse_two_ropes(config, sizes.head_dim, **bases)
    near = sizes.attention(
        near_rope,
        window=sliding_window(config),
        scale=config.positive_float("query_pre_attn_scalar") ** -0.5,
        softcap=_cap(config, "attn_logit_softcapping"),
        qk_norm=QkNorm.HEAD,
    )
    far = structs.replace(near, window=None, rope=far_rope)
    pattern = config.positive_int("sliding_window_pattern")
    layers = tuple(
        LayerConfig(attention=near if slides else far, mlp=_mlp(config))
        for slides in sliding_layers(config, sizes.layers, lambda index: (index + 1) % pattern != 0)
    )
    return _spec(config, architecture, sizes, layers, around=True)


def _mlp(config: ConfigFields) -> MlpConfig:
    return MlpConfig(
        intermediate=config.positive_int("intermediate_size"),
        activation=parse_activation(config, "hidden_activation", "gelu_pytorch_tanh"),
    )


def _cap(config: ConfigFields, name: str) -> float | None:
    return config.positive_float(name) if config.has(name) else None


def _spec(
    config: ConfigFields, architecture: str, sizes: DecoderSizes, layers: tuple[LayerConfig, ...], *, around: bool
) -> ModelSpec:
    refuse_true(config, "attention_bias")
    details = DecoderConfig(
        layers=layers,
        norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6), offset=1.0),
        norm_after=around,
        embed_scale=sizes.hidden**0.5,
        logit_softcap=_cap(config, "final_logit_softcapping"),
    )
    return decoder_spec(config, architecture, sizes, details, tied=True)
