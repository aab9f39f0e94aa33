"""OLMo 2 (arXiv:2501.00656): blocks read the hidden state as it is, what they add is normed; queries and keys are
normed over all heads.  OLMo 3 reads through windows in three of four layers besides."""

from __future__ import annotations

from penstock.weights import decoder
from penstock.weights.decoder import Attention, Decoder, Layer, Mlp, Names, Norm, QkNorm
from penstock.weights.decoder_fields import (
    Sizes,
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
    sliding_layers,
    window_of,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.rope import parse_rope, parse_two_ropes
from penstock.weights.spec import ModelSpec

NAMES = Names(attention_norm_after="post_attention_layernorm", mlp_norm_after="post_feedforward_layernorm")


def parse_olmo2(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "olmo2")
    sizes = parse_sizes(config)
    attention = sizes.attention(parse_rope(config, sizes.head_dim), qk_norm=QkNorm.ALL)
    return _spec(config, "Olmo2ForCausalLM", sizes, [attention] * sizes.layers)


def parse_olmo3(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "olmo3")
    config = config.over({"sliding_window": 4096})
    sizes = parse_sizes(config)
    base = config.real("rope_theta", 500_000.0)
    near, far = parse_two_ropes(config, sizes.head_dim, near=base, far=base)
    sliding = sizes.attention(near, qk_norm=QkNorm.ALL, window=window_of(config))
    full = sizes.attention(far, qk_norm=QkNorm.ALL)
    slides = sliding_layers(config, sizes.layers, lambda index: (index + 1) % 4 != 0)
    return _spec(config, "Olmo3ForCausalLM", sizes, [sliding if slide else full for slide in slides])


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, NAMES)


def _spec(config: Fields, architecture: str, sizes: Sizes, attentions: list[Attention]) -> ModelSpec:
    refuse_own_code(config)
    refuse_true(config, "attention_bias")
    mlp = Mlp(intermediate=config.size("intermediate_size"), activation=parse_activation(config, "hidden_act", "silu"))
    details = Decoder(
        layers=tuple(Layer(attention=attention, mlp=mlp) for attention in attentions),
        norm=Norm(eps=config.real("rms_norm_eps", 1e-5)),
        norm_before=False,
        norm_after=True,
    )
    return decoder_spec(config, architecture, sizes, details)
