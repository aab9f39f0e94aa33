"""GPT-2: learned positions, layer norms, biases everywhere, matrices stored inputs first."""

from __future__ import annotations

from dataclasses import replace

from penstock.weights import decoder
from penstock.weights.decoder import Decoder, Layer, Mlp, Names, Norm
from penstock.weights.decoder_fields import (
    decoder_spec,
    layer_count,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
)
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.spec import ModelSpec

NAMES = Names(
    model="transformer.",
    embed="wte",
    positions="wpe",
    norm="ln_f",
    layer="h.{}.",
    attention_norm="ln_1",
    qkv=("attn.c_attn",),
    out="attn.c_proj",
    mlp_norm="ln_2",
    gate_up=("mlp.c_fc",),
    down="mlp.c_proj",
    transposed=True,
    ignored=r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias",
)
"""As transformers writes them; the first releases have no "transformer." in front."""


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "gpt2")
    refuse_own_code(config)
    refuse_true(config, "scale_attn_by_inverse_layer_idx", "add_cross_attention")
    if not config.get("scale_attn_weights", bool, True):
        raise config.refuse("scale_attn_weights is false; only scaled attention can be served")
    hidden = config.size("n_embd")
    usual = {
        "hidden_size": hidden,
        "num_attention_heads": config.size("n_head"),
        "num_hidden_layers": layer_count(config, "n_layer"),
        "max_position_embeddings": config.size("n_positions", 1024),
    }
    sizes = parse_sizes(Fields(usual, config.where))
    layer = Layer(
        attention=sizes.attention(None, qkv_bias=True, out_bias=True),
        mlp=Mlp(
            intermediate=config.size("n_inner", 4 * hidden),
            activation=parse_activation(config, "activation_function", "gelu_new"),
            gated=False,
            bias=True,
        ),
    )
    details = Decoder(
        layers=(layer,) * sizes.layers,
        norm=Norm(eps=config.real("layer_norm_epsilon", 1e-5), kind="layer"),
        learned_positions=sizes.max_positions,
    )
    return decoder_spec(config, "GPT2LMHeadModel", sizes, details, tied=True)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, NAMES, replace(NAMES, model=""))
