"""Fields of a ``config.json`` that decoders share, with and without experts: parsed and checked once."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import msgspec

from penstock.kernels.operands import Activation, KvShape, Routing
from penstock.kv_spec import FULL_ATTENTION, KvSpec
from penstock.weights.architecture.decoder import AttentionConfig, DecoderConfig, LayerConfig
from penstock.weights.architecture.gated_delta_net import GatedDeltaNetConfig
from penstock.weights.architecture.rope import RopeConfig
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.config_json import ConfigFields

MAX_HEAD_DIM = 1024
MAX_LAYERS = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderSizes:
    """The sizes that every decoder has."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    max_positions: int

    def attention(self, rope: RopeConfig | None, *, window: int | None = None, **changes: Any) -> AttentionConfig:
        """The plain kind with ``changes``.  A window as long as the context is none."""
        return AttentionConfig(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            rope=rope,
            window=None if window is not None and window >= self.max_positions else window,
            **{"scale": self.head_dim**-0.5} | changes,
        )

    def kv(self) -> KvShape:
        """Full keys and values in every layer."""
        return KvShape(
            layers=self.layers, kv_heads=self.kv_heads, key_dim=self.head_dim, value_dim=self.head_dim, shared=False
        )


def parse_sizes(config: ConfigFields, *, max_positions: int = 2048) -> DecoderSizes:
    """The sizes under their usual names.  Raises ModelError if they contradict each other or are out of bounds."""
    hidden, heads = config.positive_int("hidden_size"), config.positive_int("num_attention_heads")
    kv_heads = config.positive_int("num_key_value_heads", heads)
    if heads % kv_heads:
        raise config.error(f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads ({kv_heads})")
    if not config.has("head_dim") and hidden % heads:
        raise config.error(f"hidden_size ({hidden}) is no multiple of num_attention_heads ({heads}), and no head_dim")
    head_dim = config.positive_int("head_dim", hidden // heads or 1)
    if head_dim % 2 or head_dim > MAX_HEAD_DIM:
        raise config.error(f"head_dim must be even and at most {MAX_HEAD_DIM}, got {head_dim}")
    return DecoderSizes(
        hidden=hidden,
        layers=layer_count(config, "num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        max_positions=config.positive_int("max_position_embeddings", max_positions),
    )


def sliding_window(config: ConfigFields) -> int | None:
    """``sliding_window``: positions that a token reads, its own included.  None: all before it."""
    return config.positive_int("sliding_window") if config.has("sliding_window") else None


def sliding_layers(config: ConfigFields, layers: int, usual: Callable[[int], bool]) -> list[bool]:
    """Which layers have the window: those that ``layer_types`` says, or those of the ``usual`` pattern."""
    kinds = config.get("layer_types", list, [])
    if not kinds:
        return [usual(index) for index in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        raise config.error(f"layer_types must name {layers} layers 'full_attention' or 'sliding_attention'")
    return [kind == "sliding_attention" for kind in kinds]


def without_window(attention: AttentionConfig) -> AttentionConfig:
    """The same block over everything before."""
    return msgspec.structs.replace(attention, window=None)


def layer_count(config: ConfigFields, name: str) -> int:
    """The number of layers.  Raises ModelError if there are more than any model has."""
    layers = config.positive_int(name)
    if layers > MAX_LAYERS:
        raise config.error(f"{name} must be at most {MAX_LAYERS}, got {layers}")
    return layers


def decoder_spec(
    config: ConfigFields,
    architecture: str,
    sizes: DecoderSizes,
    decoder: DecoderConfig,
    *,
    tied: bool = False,
    kv: KvShape | None = None,
) -> ModelSpec:
    """The specification; embeddings are ``tied`` or not unless the file says otherwise.

    ``kv``: where it is not full keys and values in every layer.
    """
    positions = [
        layer.attention.rope.positions(sizes.max_positions) for layer in decoder.layers if layer.attention.rope
    ]
    return ModelSpec(
        architecture=architecture,
        vocab=config.positive_int("vocab_size"),
        hidden=sizes.hidden,
        layers=len(decoder.layers),
        kv=_cache(config, kv or sizes.kv(), decoder),
        max_positions=max(positions, default=sizes.max_positions),
        tied=config.get("tie_word_embeddings", bool, tied),
        details=decoder,
    )


def _cache(config: ConfigFields, kv: KvShape, decoder: DecoderConfig) -> KvShape:
    """What layers keep of a sequence: keys and values in pages by reach, and the states of recurrent layers."""
    recurrent = [layer.attention for layer in decoder.layers if isinstance(layer.attention, GatedDeltaNetConfig)]
    keyed = [layer for layer in decoder.layers if not isinstance(layer.attention, GatedDeltaNetConfig)]
    kv = replace(kv, layers=len(keyed)).grouped([layer_kv_spec(layer) for layer in keyed])
    if not recurrent:
        return kv
    kv = replace(kv, states=recurrent[0].states(len(recurrent)))
    if not kv.state_rows_a_page:
        raise config.error("its pages of keys and values are too small for its states")
    return kv


def layer_kv_spec(layer: LayerConfig) -> KvSpec:
    """How far back a layer reads."""
    attention = layer.attention
    if not isinstance(attention, AttentionConfig):
        return FULL_ATTENTION
    return KvSpec(window=attention.window, chunk=attention.chunk)


def at_length(spec: ModelSpec, positions: int) -> ModelSpec:
    """The same model for contexts of at most ``positions`` positions (``RopeConfig.at_length``)."""
    decoder = spec.details_as(DecoderConfig)
    return msgspec.structs.replace(
        spec,
        details=msgspec.structs.replace(decoder, layers=tuple(_layer_at(layer, positions) for layer in decoder.layers)),
    )


def _layer_at(layer: LayerConfig, positions: int) -> LayerConfig:
    rope = layer.attention.rope
    if rope is None or rope.at_length(positions) == rope:
        return layer
    attention = msgspec.structs.replace(layer.attention, rope=rope.at_length(positions))
    return msgspec.structs.replace(layer, attention=attention)


def refuse_variants(config: ConfigFields, model_type: str) -> None:
    """Everything that a known architecture's name may cover and that is computed nowhere here."""
    kind = config.get("model_type", str, model_type)
    if kind != model_type:
        raise config.error(f"model_type is {kind!r}, not {model_type!r}: the architecture is another one than it says")


def refuse_own_code(config: ConfigFields) -> None:
    """Where the files bring Python code along, it may compute something else than the architecture's name says."""
    if "AutoModelForCausalLM" in config.get("auto_map", dict, {}):
        raise config.error(
            "auto_map: needs Python code of its own, which is never run; the release in transformers' own format can "
            "be served"
        )


def refuse_true(config: ConfigFields, *names: str) -> None:
    """Switches that must be off."""
    for name in names:
        if config.get(name, bool, False):
            raise config.error(f"{name} is true; only models without can be served")


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "silu": Activation.SILU,
        "swish": Activation.SILU,
        "gelu": Activation.GELU,
        "gelu_pytorch_tanh": Activation.GELU_TANH,
        "gelu_new": Activation.GELU_TANH,
        "relu": Activation.RELU,
        "relu2": Activation.RELU2,
    }
)
"""Activations by the names of transformers."""


def parse_activation(config: ConfigFields, field: str, default: str) -> Activation:
    """The activation's name among the kernels' own."""
    name = config.get(field, str, default)
    if name not in ACTIVATIONS:
        raise config.error(f"{field} is {name!r}; these can be served: {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def parse_routing(config: ConfigFields, *, experts: str, **how: Any) -> Routing:
    """``num_experts_per_tok`` of as many as the field ``experts`` says (or its newer name), chosen as ``how`` says.

    Raises ModelError for a choice that cannot be made.
    """
    try:
        count = config.positive_int(experts if config.has(experts) else "num_local_experts")
        return Routing(experts=count, top_k=config.positive_int("num_experts_per_tok"), **how)
    except ValueError as error:
        raise config.error(str(error)) from error


def sparse_layers(config: ConfigFields, layers: int) -> list[bool]:
    """Which layers have experts: every ``decoder_sparse_step``-th, without those that ``mlp_only_layers`` names."""
    step, dense = config.positive_int("decoder_sparse_step", 1), config.get("mlp_only_layers", list, [])
    return [index not in dense and (index + 1) % step == 0 for index in range(layers)]
