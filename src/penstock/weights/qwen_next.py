"""Qwen 3 Next: three of four layers are gated delta nets (arXiv:2412.06464), the fourth is attention whose output is
gated; experts everywhere, and a shared one behind a gate of its own.

Guessing several tokens at once (the tensors ``mtp.*``) is not computed here: a state cannot take tokens back.
"""

from __future__ import annotations

import msgspec

from penstock.kernels.kinds import Activation, Gate
from penstock.kernels.operands import STATE_UNIT
from penstock.weights import decoder
from penstock.weights.decoder import Decoder, GatedAttention, Layer, Mlp, Names, Norm, QkNorm
from penstock.weights.decoder_fields import (
    Sizes,
    decoder_spec,
    parse_activation,
    parse_sizes,
    refuse_own_code,
    refuse_true,
    refuse_variants,
)
from penstock.weights.delta import Delta
from penstock.weights.fields import Fields
from penstock.weights.layout import WeightLayout
from penstock.weights.moe import GatedSharedMoe, MoeNames
from penstock.weights.moe_fields import parse_routing, sparse_layers
from penstock.weights.rope import parse_rope
from penstock.weights.spec import ModelSpec

FULL, LINEAR = "full_attention", "linear_attention"
MAX_TAPS = 8
MAX_KEY_DIM = 1024

NAMES = Names(
    moe=MoeNames(
        shared_gate_up=("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        shared_down="mlp.shared_expert.down_proj.weight",
        shared_gate="mlp.shared_expert_gate.weight",
    ),
    ignored=r".*\.rotary_emb\.inv_freq|mtp\..*",
)


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant."""
    refuse_variants(config, "qwen3_next")
    refuse_own_code(config)
    refuse_true(config, "use_sliding_window", "attention_bias")
    config = config.over({"head_dim": 256})
    sizes, activation = parse_sizes(config, max_positions=32768), parse_activation(config, "hidden_act", "silu")
    dense = Mlp(intermediate=config.size("intermediate_size", 5632), activation=activation)
    sparse = GatedSharedMoe(
        routing=parse_routing(config, experts="num_experts", normalised=config.get("norm_topk_prob", bool, True)),
        intermediate=config.size("moe_intermediate_size"),
        gate=Gate(activation=activation),
        shared=config.size("shared_expert_intermediate_size"),
    )
    blocks = parse_blocks(config, sizes, activation)
    layers = tuple(
        Layer(attention=block, mlp=sparse if has_experts else dense)
        for block, has_experts in zip(blocks, sparse_layers(config, sizes.layers), strict=True)
    )
    details = Decoder(layers=layers, norm=Norm(eps=config.real("rms_norm_eps", 1e-6), offset=1.0))
    return decoder_spec(config, "Qwen3NextForCausalLM", sizes, details)


def layout(spec: ModelSpec) -> WeightLayout:
    """See ``decoder.layout``."""
    return decoder.layout(spec, NAMES)


def parse_blocks(config: Fields, sizes: Sizes, activation: Activation) -> list[GatedAttention | Delta]:
    """The first block of every layer.  Raises ModelError where the kernels cannot compute them."""
    if activation is not Activation.SILU:
        raise config.refuse(f"hidden_act is {activation.value}; delta nets can be served with silu only")
    rope = parse_rope(config.over({"partial_rotary_factor": 0.25}), sizes.head_dim)
    full = GatedAttention(**msgspec.structs.asdict(sizes.attention(rope, qk_norm=QkNorm.HEAD)))
    delta = parse_delta(config)
    return [delta if kind == LINEAR else full for kind in layer_kinds(config, sizes.layers)]


def layer_kinds(config: Fields, layers: int) -> list[str]:
    """``layer_types``, or every ``full_attention_interval``-th layer full.  Both kinds must be there."""
    interval = config.size("full_attention_interval", 4)
    usual = [LINEAR if (index + 1) % interval else FULL for index in range(layers)]
    kinds = config.get("layer_types", list, usual)
    if len(kinds) != layers or set(kinds) != {FULL, LINEAR}:
        raise config.refuse(f"layer_types must name {layers} layers '{FULL}' or '{LINEAR}', some of each")
    return kinds


def parse_delta(config: Fields) -> Delta:
    """The sizes of a delta net.  Raises ModelError for sizes that the kernels cannot compute."""
    delta = Delta(
        key_heads=config.size("linear_num_key_heads", 16),
        heads=config.size("linear_num_value_heads", 32),
        key_dim=config.size("linear_key_head_dim", 128),
        value_dim=config.size("linear_value_head_dim", 128),
        taps=config.size("linear_conv_kernel_dim", 4),
    )
    if delta.heads % delta.key_heads:
        raise config.refuse(
            f"linear_num_value_heads ({delta.heads}) must be a multiple of linear_num_key_heads ({delta.key_heads})"
        )
    if delta.key_dim % 2 or max(delta.key_dim, delta.value_dim) > MAX_KEY_DIM:
        raise config.refuse(f"linear_key_head_dim must be even, and no linear head larger than {MAX_KEY_DIM}")
    if delta.value_dim % STATE_UNIT or delta.channels % STATE_UNIT:
        raise config.refuse(f"linear_value_head_dim, and all channels together, must be multiples of {STATE_UNIT}")
    if not 2 <= delta.taps <= MAX_TAPS:
        raise config.refuse(f"linear_conv_kernel_dim must be from 2 to {MAX_TAPS}, got {delta.taps}")
    return delta
