"""Decoders that differ from Llama in little.

Phi-3 and Phi-4 (arXiv:2404.14219): one matrix for queries, keys and values, one for gate and up; LongRoPE. SmolLM3:
every fourth layer has no positions (NoPE, arXiv:2501.18795). StableLM 3B and StableLM 2 1.6B: layer norms, a quarter of
every head rotated. OLMo 2 (arXiv:2501.00656): norms after the blocks instead of before them, and over all heads'
queries and keys; OLMo 3 also has windows in three of four layers. Command R: both blocks of a layer read the same norm,
which has no bias; neighboring columns are rotated together; logits are scaled.
"""

from __future__ import annotations

from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import (
    AttentionConfig,
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
    refuse_own_code,
    refuse_true,
    refuse_variants,
    sliding_layers,
    sliding_window,
)

PHI3_NAMES = DecoderTensorNames(qkv=("self_attn.qkv_proj",), gate_up=("mlp.gate_up_proj",))


def parse_phi3(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant.

    The files bring Python code along that is what transformers has itself: it is neither run nor needed.
    """
    refuse_variants(config, "phi3")
    sizes = parse_sizes(config)
    layer = LayerConfig(
        attention=sizes.attention(parse_rope(config, sizes.head_dim), window=sliding_window(config)),
        mlp=MlpConfig(
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-5))
    )
    return decoder_spec(config, "Phi3ForCausalLM", sizes, details)


def phi3_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, PHI3_NAMES)


def parse_smollm3(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "smollm3")
    refuse_own_code(config)
    sizes = parse_sizes(config.with_defaults({"num_key_value_heads": 4}), max_positions=32_768)
    rope, bias = parse_rope(config, sizes.head_dim, theta=2_000_000.0), config.get("attention_bias", bool, False)
    rotated = rotated_layers(config, sizes.layers)
    window = sliding_window(config) if config.get("use_sliding_window", bool, False) else None
    slides = sliding_layers(config, sizes.layers, lambda index: not rotated[index])
    mlp = MlpConfig(
        intermediate=config.positive_int("intermediate_size"),
        activation=parse_activation(config, "hidden_act", "silu"),
        bias=config.get("mlp_bias", bool, False),
    )
    layers = tuple(
        LayerConfig(
            attention=sizes.attention(
                rope if rotated[index] else None,
                window=window if slides[index] else None,
                qkv_bias=bias,
                out_bias=bias,
            ),
            mlp=mlp,
        )
        for index in range(sizes.layers)
    )
    details = DecoderConfig(layers=layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-6)))
    return decoder_spec(config, "SmolLM3ForCausalLM", sizes, details, tied=True)


def rotated_layers(config: ConfigFields, layers: int) -> list[bool]:
    """Which layers rotate queries and keys: 1 in ``no_rope_layers``, by default all but every fourth."""
    interval = config.positive_int("no_rope_layer_interval", 4)
    flags = config.get("no_rope_layers", list, [int((index + 1) % interval != 0) for index in range(layers)])
    if len(flags) < layers or not set(flags[:layers]) <= {0, 1}:
        raise config.error(f"no_rope_layers must have {layers} entries, each 0 or 1")
    return [bool(flag) for flag in flags[:layers]]


def smollm3_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())


def parse_stablelm(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "stablelm")
    refuse_own_code(config)
    refuse_true(config, "qk_layernorm")
    sizes = parse_sizes(config, max_positions=4096)
    rope = parse_rope(config.with_defaults({"partial_rotary_factor": 0.25}), sizes.head_dim)
    layer = LayerConfig(
        attention=sizes.attention(rope, qkv_bias=config.get("use_qkv_bias", bool, False)),
        mlp=MlpConfig(
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers,
        norm=NormConfig(eps=config.positive_float("layer_norm_eps", 1e-5), kind="layer"),
        parallel=config.get("use_parallel_residual", bool, False),
    )
    return decoder_spec(config, "StableLmForCausalLM", sizes, details)


def stablelm_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())


OLMO_NAMES = DecoderTensorNames(
    attention_norm_after="post_attention_layernorm", mlp_norm_after="post_feedforward_layernorm"
)


def parse_olmo2(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "olmo2")
    sizes = parse_sizes(config)
    attention = sizes.attention(parse_rope(config, sizes.head_dim), qk_norm=QkNorm.ALL)
    return _spec(config, "Olmo2ForCausalLM", sizes, [attention] * sizes.layers)


def parse_olmo3(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "olmo3")
    config = config.with_defaults({"sliding_window": 4096})
    sizes = parse_sizes(config)
    base = config.positive_float("rope_theta", 500_000.0)
    near, far = parse_two_ropes(config, sizes.head_dim, near=base, far=base)
    sliding = sizes.attention(near, qk_norm=QkNorm.ALL, window=sliding_window(config))
    full = sizes.attention(far, qk_norm=QkNorm.ALL)
    slides = sliding_layers(config, sizes.layers, lambda index: (index + 1) % 4 != 0)
    return _spec(config, "Olmo3ForCausalLM", sizes, [sliding if slide else full for slide in slides])


def olmo_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, OLMO_NAMES)


def _spec(config: ConfigFields, architecture: str, sizes: DecoderSizes, attentions: list[AttentionConfig]) -> ModelSpec:
    refuse_own_code(config)
    refuse_true(config, "attention_bias")
    mlp = MlpConfig(
        intermediate=config.positive_int("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu")
    )
    details = DecoderConfig(
        layers=tuple(LayerConfig(attention=attention, mlp=mlp) for attention in attentions),
        norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-5)),
        norm_before=False,
        norm_after=True,
    )
    return decoder_spec(config, architecture, sizes, details)


def parse_cohere(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "cohere")
    refuse_own_code(config)
    refuse_true(config, "use_qk_norm", "attention_bias")
    sizes = parse_sizes(config, max_positions=8192)
    layer = LayerConfig(
        attention=sizes.attention(parse_rope(config, sizes.head_dim, theta=500_000.0, interleaved=True)),
        mlp=MlpConfig(
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers,
        norm=NormConfig(eps=config.positive_float("layer_norm_eps", 1e-5), kind="layer", bias=False),
        parallel=True,
        logit_scale=config.positive_float("logit_scale", 0.0625),
    )
    return decoder_spec(config, "CohereForCausalLM", sizes, details, tied=True)


def cohere_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, DecoderTensorNames())
