"""GLM-4 9B and its 32B successor as transformers has them (``GlmForCausalLM``, ``Glm4ForCausalLM``): half of every
head is rotated, in neighboring pairs; the later ones also normalize a block's output.  GLM-4.5 and 4.6
(arXiv:2508.06471): the first layers dense, then routed experts and a shared one."""

from __future__ import annotations

from dataclasses import replace

from penstock.kernels.operands import Gate, Score
from penstock.weights.architecture import decoder
from penstock.weights.architecture.decoder import (
    DecoderConfig,
    DecoderTensorNames,
    LayerConfig,
    MlpConfig,
    NormConfig,
    QkNorm,
)
from penstock.weights.architecture.moe import MoeConfig
from penstock.weights.architecture.rope import parse_rope
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.fields import (
    decoder_spec,
    parse_activation,
    parse_routing,
    parse_sizes,
    refuse_own_code,
    refuse_variants,
)

GLM_NAMES = DecoderTensorNames(
    gate_up=("mlp.gate_up_proj",),
    attention_norm_after="post_self_attn_layernorm",
    mlp_norm_after="post_mlp_layernorm",
)
GLM_DEFAULTS = {"num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072}


def parse_glm(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "glm")
    return _spec(config, "GlmForCausalLM", around=False)


def parse_glm4(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "glm4")
    return _spec(config, "Glm4ForCausalLM", around=True)


def glm_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``)."""
    return decoder.decoder_layout(spec, GLM_NAMES)


def _spec(config: ConfigFields, architecture: str, *, around: bool) -> ModelSpec:
    refuse_own_code(config)
    config = config.with_defaults(GLM_DEFAULTS)
    sizes = parse_sizes(config)
    halved = config.with_defaults({"partial_rotary_factor": 0.5})
    layer = LayerConfig(
        attention=sizes.attention(
            parse_rope(halved, sizes.head_dim, interleaved=True), qkv_bias=config.get("attention_bias", bool, True)
        ),
        mlp=MlpConfig(
            intermediate=config.positive_int("intermediate_size"),
            activation=parse_activation(config, "hidden_act", "silu"),
        ),
    )
    details = DecoderConfig(
        layers=(layer,) * sizes.layers,
        norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1.5625e-07)),
        norm_after=around,
    )
    return decoder_spec(config, architecture, sizes, details)


def parse_glm4_moe(config: ConfigFields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "glm4_moe")
    refuse_own_code(config)
    sizes = parse_sizes(config)
    attention = sizes.attention(
        parse_rope(config.with_defaults({"partial_rotary_factor": 0.5}), sizes.head_dim),
        qk_norm=QkNorm.HEAD if config.get("use_qk_norm", bool, False) else QkNorm.NONE,
        qkv_bias=config.get("attention_bias", bool, False),
    )
    activation = parse_activation(config, "hidden_act", "silu")
    dense = MlpConfig(intermediate=config.positive_int("intermediate_size"), activation=activation)
    sparse, first = _moe(config, Gate(activation=activation)), config.get("first_k_dense_replace", int, 1)
    layers = tuple(
        LayerConfig(attention=attention, mlp=dense if index < first else sparse) for index in range(sizes.layers)
    )
    details = DecoderConfig(layers=layers, norm=NormConfig(eps=config.positive_float("rms_norm_eps", 1e-5)))
    return decoder_spec(config, "Glm4MoeForCausalLM", sizes, details)


def glm4_moe_layout(spec: ModelSpec) -> WeightLayout:
    """The model's weights by tensor names (``decoder_layout``).  The layer behind the last one predicts further tokens
    and is not read."""
    return decoder.decoder_layout(spec, replace(DecoderTensorNames(), ignored=rf"model\.layers\.{spec.layers}\..*"))


def _moe(config: ConfigFields, gate: Gate) -> MoeConfig:
    groups, inner = config.positive_int("n_group", 1), config.positive_int("moe_intermediate_size")
    return MoeConfig(
        routing=parse_routing(
            config,
            experts="n_routed_experts",
            score=Score.SIGMOID,
            normalised=config.get("norm_topk_prob", bool, True),
            groups=groups,
            groups_kept=config.positive_int("topk_group", 1),
            pairs=groups > 1,
            factor=config.positive_float("routed_scaling_factor", 1.0),
        ),
        intermediate=inner,
        gate=gate,
        choice_bias=True,
        shared=config.positive_int("n_shared_experts", 1) * inner,
    )
