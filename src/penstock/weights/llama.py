"""The Llama family's ``config.json`` and tensor names, as Hugging Face transformers writes them (versions 4 and 5)."""

from __future__ import annotations

import re

from penstock.kernels.ops import COLUMN_UNIT, segment_ends
from penstock.weights.fields import Fields
from penstock.weights.layout import Matrix, Part, Vector, WeightLayout
from penstock.weights.spec import ModelSpec, Rope, RopeKind

MAX_HEAD_DIM = 1024
MAX_LAYERS = 4096


def parse(config: Fields) -> ModelSpec:
    """The specification.  Raises ModelError for anything that would be computed otherwise than its makers meant.

    ``eos_ids``, ``sampling`` and ``checkpoint_dtype`` are left for the caller, who has the other files.
    """
    _refuse_variants(config)
    hidden, heads = config.size("hidden_size"), config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.refuse(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if not config.has("head_dim") and hidden % heads:
        raise config.refuse(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}), and no head_dim")
    head_dim = config.size("head_dim", hidden // heads or 1)
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise config.refuse(f"head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}")
    layers = config.size("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise config.refuse(f"num_hidden_layers must be at most {MAX_LAYERS}, got {layers}")
    max_positions = config.size("max_position_embeddings", 2048)
    return ModelSpec(
        architecture="LlamaForCausalLM",
        vocab=config.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        intermediate=config.size("intermediate_size"),
        rms_eps=config.real("rms_norm_eps", 1e-6),
        rope=_parse_rope(config, max_positions),
        tied=config.get("tie_word_embeddings", bool, False),
        max_positions=max_positions,
        checkpoint_dtype="fp32",
    )


def layout(spec: ModelSpec) -> WeightLayout:
    """Weights ``embed``, ``norm``, ``head`` (unless tied), and of layer i ``i.attention_norm``, ``i.qkv``, ``i.out``,
    ``i.mlp_norm``, ``i.gate_up``, ``i.down``.  Where tensor parallelism will cut K, it has the 8 segments of the tree.
    """
    table = (spec.vocab, spec.hidden)
    weights: list[Matrix | Vector] = [Matrix("embed", (Part("model.embed_tokens.weight", table),))]
    for index in range(spec.layers):
        weights += _layer(spec, index)
    weights.append(Vector("norm", Part("model.norm.weight", (spec.hidden,))))
    if not spec.tied:
        weights.append(Matrix("head", (Part("lm_head.weight", table),)))
    ignored = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    if spec.tied:
        ignored += r"|lm_head\.weight"
    return WeightLayout(tuple(weights), re.compile(ignored))


def _layer(spec: ModelSpec, index: int) -> list[Matrix | Vector]:
    hidden, inner = spec.hidden, spec.intermediate
    queries, keys = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim

    def part(name: str, *shape: int) -> Part:
        return Part(f"model.layers.{index}.{name}.weight", shape)

    return [
        Vector(f"{index}.attention_norm", part("input_layernorm", hidden)),
        Matrix(
            f"{index}.qkv",
            (
                part("self_attn.q_proj", queries, hidden),
                part("self_attn.k_proj", keys, hidden),
                part("self_attn.v_proj", keys, hidden),
            ),
        ),
        Matrix(
            f"{index}.out", (part("self_attn.o_proj", hidden, queries),), segments=segment_ends(queries, spec.head_dim)
        ),
        Vector(f"{index}.mlp_norm", part("post_attention_layernorm", hidden)),
        Matrix(f"{index}.gate_up", (part("mlp.gate_proj", inner, hidden), part("mlp.up_proj", inner, hidden))),
        Matrix(f"{index}.down", (part("mlp.down_proj", hidden, inner),), segments=segment_ends(inner, COLUMN_UNIT)),
    ]


def _refuse_variants(config: Fields) -> None:
    """Everything that the name ``LlamaForCausalLM`` may cover and that is not computed here."""
    kind = config.get("model_type", str, "llama")
    if kind != "llama":
        raise config.refuse(f"model_type is {kind!r}, not 'llama': the architecture is another one than it says")
    if "AutoModelForCausalLM" in config.get("auto_map", dict, {}):
        raise config.refuse(
            "auto_map: needs Python code of its own, which is never run; plain Llama models can be served"
        )
    if config.has("quantization_config") or config.has("compression_config"):
        raise config.refuse("its weights are quantized; the original in bf16, fp16 or fp32 can be served")
    activation = config.get("hidden_act", str, "silu")
    if activation not in ("silu", "swish"):
        raise config.refuse(f"hidden_act is {activation!r}; only 'silu' can be served")
    for name in ("attention_bias", "mlp_bias"):
        if config.get(name, bool, False):
            raise config.refuse(f"{name} is true; only models without biases can be served")


def _parse_rope(config: Fields, max_positions: int) -> Rope:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` and ``rope_scaling``, with their fall-backs."""
    scaling = config.section("rope_scaling") or config.section("rope_parameters") or Fields({}, config.where)
    theta = scaling.real("rope_theta", config.real("rope_theta", 10_000.0))
    for source in (config, scaling):
        if source.real("partial_rotary_factor", 1.0) != 1.0:
            raise source.refuse("partial_rotary_factor must be 1: only whole heads can be rotated")
    name = scaling.get("rope_type", str, scaling.get("type", str, "default"))
    if any(isinstance(value, dict) for value in scaling.values.values()):
        raise scaling.refuse("differs from layer to layer; one recipe for all layers can be served")
    if name not in list(RopeKind):
        raise scaling.refuse(f"rope_type {name!r} cannot be served; these can: {', '.join(RopeKind)}")
    kind = RopeKind(name)
    if kind is RopeKind.DEFAULT:
        return Rope(theta=theta)
    if kind is RopeKind.LINEAR:
        return Rope(theta=theta, kind=kind, factor=scaling.real("factor"))
    low, high = scaling.real("low_freq_factor"), scaling.real("high_freq_factor")
    if high <= low:
        raise scaling.refuse(f"high_freq_factor ({high}) must be above low_freq_factor ({low})")
    return Rope(
        theta=theta,
        kind=kind,
        factor=scaling.real("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_positions=scaling.size(
            "original_max_position_embeddings", config.size("original_max_position_embeddings", max_positions)
        ),
    )
