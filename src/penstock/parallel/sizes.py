"""How many bytes a model's weights take, from its configuration alone: tensor by tensor, in the form that they are
stored in or in another.

What is counted is what a family's layout asks for, so a plan speaks of the tensors that would be loaded.  Knows no
devices; ``parallel.plan`` lays the result over them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.errors import ModelError
from penstock.kernels.operands import KvShape, StateShape
from penstock.kv_spec import KvSpec, max_blocks
from penstock.parallel.plan import CacheSize, LayerSize, ModelSize
from penstock.types import PAGE_TOKENS
from penstock.weights.architecture.decoder import DecoderConfig
from penstock.weights.architecture.gated_delta_net import GatedDeltaNetConfig
from penstock.weights.architecture.moe import MoeConfig
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, TensorPart, Vector, WeightLayout
from penstock.weights.config_json import ConfigFields
from penstock.weights.families.registry import checkpoint_format
from penstock.weights.inspect import ModelOutline
from penstock.weights.quantization.config import Quantization, parse_quantization

BF16_BITS = 16.0
LOSSLESS_SHARE = 0.703
"""Bytes of bf16 matrices after ``penstock compress``, as measured on trained weights (docs/compression.md)."""

FP8_BLOCK = 128
INT4_GROUP = 32
STEP_TOKENS = 2048
"""Tokens of the largest step: activations are counted for it (``max_step_tokens``)."""

STEP_DRAWS = 256
"""Rows of that step whose logits are stored (``max_running``)."""

PARTED_ROWS, PARTED_BYTES, PARTITION_KEYS = 256, 256 << 20, 512
"""Of attention whose partitions wait to be joined: rows, and bytes, at most; keys of a partition."""

UNBOUNDED = 1 << 40
"""Tokens of a sequence that is longer than any."""


class WeightFormat(StrEnum):
    """The format of matrices in memory."""

    STORED = "stored"
    BF16 = "bf16"
    FP8 = "fp8"
    INT4 = "int4"
    LOSSLESS = "lossless"


@dataclass(frozen=True, slots=True)
class WeightEncoding:
    """Bits of a number of a matrix: ``bits`` where it is coded, those of bf16 elsewhere.

    Of a matrix that is taken apart by heads (latent attention) the parts are held plain, whatever it is stored in.
    """

    name: str
    bits: float
    stored: Quantization | None = None  # says of each module what it is in
    by_tensor: Mapping[str, float] | None = None  # of those that are coded
    tables: bool = False  # embeddings and head are coded too
    experts_only: bool = False

    def bits_of_part(self, weight: Matrix, part: TensorPart) -> float:
        """Bits of each number of this part of a matrix."""
        if self.by_tensor is not None:
            return BF16_BITS if part.groups is not None else self.by_tensor.get(part.tensor, BF16_BITS)
        inside = weight.name[:1].isdigit()
        if not (inside or self.tables) or weight.name.endswith(".router"):
            return BF16_BITS
        if self.experts_only and not is_routed_expert(weight):
            return BF16_BITS
        if self.stored is None:
            return self.bits
        scheme = None if part.groups is not None else self.stored.scheme_of(part.tensor.removesuffix(".weight"))
        return BF16_BITS if scheme is None else scheme.bits_per_weight()


BF16 = WeightEncoding("bf16", BF16_BITS)


def weight_encoding(form: WeightFormat, outline: ModelOutline) -> WeightEncoding:
    """How matrices are coded.  Raises ModelError for a form of stored weights that is not known."""
    match form:
        case WeightFormat.STORED:
            return _gguf_encoding(outline) if outline.coded_bits else stored_encoding(outline.config)
        case WeightFormat.BF16:
            return BF16
        case WeightFormat.FP8:
            return WeightEncoding("fp8", 8 + 32 / FP8_BLOCK**2)
        case WeightFormat.INT4:
            routed = any(is_routed_expert(weight) for weight in outline.layout.weights)
            return WeightEncoding("int4", 4 + 16 / INT4_GROUP, experts_only=routed)
        case WeightFormat.LOSSLESS:
            return WeightEncoding("lossless", BF16_BITS * LOSSLESS_SHARE, tables=True)


def stored_encoding(config: ConfigFields) -> WeightEncoding:
    """What ``quantization_config`` says; bf16 without one.  Raises ModelError for a form that is not known."""
    try:
        stored = parse_quantization(config)
    except ModelError as error:
        raise ModelError(f"{error}; give --weights bf16, fp8, int4 or lossless") from error
    if stored is None:
        return BF16
    return WeightEncoding(stored.name, stored.groups[0].scheme.bits_per_weight(), stored=stored)


def _gguf_encoding(outline: ModelOutline) -> WeightEncoding:
    matrices = [part for own in outline.layout.weights if isinstance(own, Matrix) for part in own.parts]
    bits = sum(part.numbers * outline.coded_bits.get(part.tensor, BF16_BITS) for part in matrices)
    mean = bits / sum(part.numbers for part in matrices)
    return WeightEncoding("gguf", mean, by_tensor=outline.coded_bits)


def is_routed_expert(weight: Matrix | Vector) -> bool:
    """Whether it belongs to a routed expert."""
    return ".experts." in weight.name


def weight_bits(weight: Matrix | Vector, how: WeightEncoding) -> float:
    """Bits of a weight in memory; vectors are held in fp32."""
    if isinstance(weight, Vector):
        return 32.0 * sum(part.numbers for part in weight.parts)
    return sum(part.numbers * how.bits_of_part(weight, part) for part in weight.parts)


def model_size(spec: ModelSpec, layout: WeightLayout, how: WeightEncoding, kv_dtype: str = BF16.name) -> ModelSize:
    """The model as numbers, its KV pages in a type of ``kernels.operands.KV_TYPES``.

    Raises ModelError if a weight belongs to no layer and is no table, or nothing is kept of what is read, so that there
    is nothing to plan.
    """
    if not isinstance(spec.details, DecoderConfig) and not spec.audio_tokens:
        raise ModelError(f"{spec.architecture}: keeps no KV pages")
    tables = {"embed": 0.0, "head": 0.0}
    other = 0.0
    layers = [_LayerBits() for _ in range(spec.layers)]
    for weight in layout.weights:
        bits = weight_bits(weight, how)
        prefix = weight.name.partition(".")[0]
        if prefix.isdigit():
            layers[int(prefix)].add(weight, bits)
        elif prefix in tables:
            tables[prefix] += bits
        else:
            other += bits
    caches = cache_sizes(spec, kv_dtype)
    return ModelSize(
        embedding=_bytes(tables["embed"]),
        head=_bytes(tables["head"]),
        layers=tuple(layer.size(cache) for layer, cache in zip(layers, caches, strict=True)),
        other=_bytes(other),
        activation_bytes=activation_bytes(spec, layout),
        max_positions=spec.max_positions,
    )


def weight_bytes(layout: WeightLayout, how: WeightEncoding) -> int:
    """Bytes of all weights, each counted once."""
    return sum(_bytes(weight_bits(weight, how)) for weight in layout.weights)


class _LayerBits:
    """Bits of one layer's weights by how devices share them."""

    def __init__(self) -> None:
        self.divided = self.experts = self.whole = 0.0

    def add(self, weight: Matrix | Vector, bits: float) -> None:
        if isinstance(weight, Vector) or weight.name.endswith(".router"):
            self.whole += bits
        elif is_routed_expert(weight):
            self.experts += bits
        else:
            self.divided += bits

    def size(self, cache: CacheSize) -> LayerSize:
        return LayerSize(_bytes(self.divided), _bytes(self.experts), _bytes(self.whole), cache)


def cache_sizes(spec: ModelSpec, kv_dtype: str) -> list[CacheSize]:
    """What each layer keeps of a sequence: keys and values, or a state."""
    keyed, states = keyed_sizes(spec.kv, kv_dtype), spec.kv.states
    if states is None:
        return keyed
    state, others = state_size(spec.kv, states, kv_dtype), iter(keyed)
    return [
        state if isinstance(layer.attention, GatedDeltaNetConfig) else next(others)
        for layer in spec.details_as(DecoderConfig).layers
    ]


def state_size(kv: KvShape, states: StateShape, kv_dtype: str) -> CacheSize:
    """What a recurrent layer keeps of a sequence: states of as many cells as a step enters, and one before."""
    cells = max_blocks(states.reach, UNBOUNDED, ahead=STEP_TOKENS, page_tokens=PAGE_TOKENS)
    pages = kv.page_bytes(kv_dtype) * kv.state_parts
    return CacheSize(0, states.key_heads, fixed=-(-cells * pages // states.layers))


def keyed_sizes(kv: KvShape, kv_dtype: str) -> list[CacheSize]:
    """What each layer with keys and values keeps of a sequence, its part of what is left empty in pages included.

    A layer with a window grows until it has the blocks that it reads and those that one step computes.
    """
    a_head = kv.head_bytes(kv_dtype)
    heads = 1 if kv.shared else kv.kv_heads
    slots, layers = Counter[KvSpec](), Counter[KvSpec]()
    for own in kv.groups:
        slots[own.spec] += kv.page_layers
        layers[own.spec] += len(own.layers)
    found = []
    for group, _ in kv.places:
        reach = kv.reaches[group]
        padded = -(-a_head * slots[reach] // layers[reach]) if kv.groups else a_head
        most = None
        if reach.span is not None:
            most = PAGE_TOKENS * max_blocks(reach, UNBOUNDED, ahead=STEP_TOKENS, page_tokens=PAGE_TOKENS)
        found.append(CacheSize(padded * heads, heads, most))
    return found


def activation_bytes(spec: ModelSpec, layout: WeightLayout) -> int:
    """Buffers of the largest step on one device that computes all of a layer.

    The residual stream in fp32 and its norm in bf16; the widest product of a layer in fp32 and its result in
    bf16; logits of the rows that draw, once for steps as they are and once for recorded ones.  Experts' products count
    as often as a token chooses experts.  Partitions of attention that wait to be joined: those of ``PARTED_ROWS`` rows
    (``kernels.triton.attention``), as many as the longest context has; no wider than the widest product.
    """
    widest = max(
        _rows(weight) for weight in layout.weights if _is_layer_matrix(weight) and not is_routed_expert(weight)
    )
    experts = [_rows(weight) for weight in layout.weights if _is_layer_matrix(weight) and is_routed_expert(weight)]
    chosen = _experts_chosen(spec)
    widest = max(widest, chosen * max(experts, default=0))
    parted = min(PARTED_BYTES, PARTED_ROWS * widest * -(-spec.max_positions // PARTITION_KEYS) * 4)
    return STEP_TOKENS * (spec.hidden * (4 + 2) + widest * (4 + 2)) + 2 * STEP_DRAWS * spec.vocab * 4 + parted


def step_bytes(spec: ModelSpec) -> int:
    """``activation_bytes`` of a model whose files need not be there; 0 where its family says too little."""
    if not isinstance(spec.details, DecoderConfig):
        return 0
    return activation_bytes(spec, checkpoint_format(spec.architecture, spec.architecture).layout(spec))


def _is_layer_matrix(weight: Matrix | Vector) -> bool:
    return isinstance(weight, Matrix) and weight.name[:1].isdigit()


def _rows(weight: Matrix | Vector) -> int:
    """Outputs of a matrix."""
    return sum(part.outputs for part in weight.parts)


def _experts_chosen(spec: ModelSpec) -> int:
    """Experts that a token passes in a layer, at most."""
    layers = spec.details.layers if isinstance(spec.details, DecoderConfig) else ()
    return max((layer.mlp.routing.top_k for layer in layers if isinstance(layer.mlp, MoeConfig)), default=1)


def _bytes(bits: float) -> int:
    return math.ceil(bits / 8)
