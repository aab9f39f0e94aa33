"""One rank's part of a model: its layers, heads, columns and experts as data, and the parts of tensors that hold them.

::

    tensor parallelism    rows of ``qkv``, ``gate_up``, ``sinks`` and ``head``; columns of ``out``, ``down``
    pipeline stages       whole layers; ``embed`` in the first stage, ``norm`` and ``head`` in the last
    on all of a stage     norms, routers, biases of ``out`` and ``down``; ``embed``

Columns of K are cut at the ends of the segments that its sum has anyway, rank r of n having segments 8 r / n up to
8 (r + 1) / n: so a rank's product is a node of the tree, and ``Ops.join`` gives the bits of the whole sum.  Shares may
be unequal: 5 heads on two ranks are 2 and 3.  A key-value head is on every rank that has one of its query heads.

Pure: knows no files, devices or processes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from msgspec import structs

from penstock.config.mesh import TENSOR_WAYS, Mesh, NodePlace
from penstock.errors import ConfigError
from penstock.kernels.operands import COLUMN_UNIT, TREE_SEGMENTS, HeadColumns, KvShape, PageShare, segment_ends
from penstock.kernels.sum_tree import experts_of, leaves_of
from penstock.weights.architecture.decoder import (
    AttentionConfig,
    DecoderConfig,
    GatedAttentionConfig,
    LayerConfig,
    MlpConfig,
    QkNorm,
)
from penstock.weights.architecture.gated_delta_net import GatedDeltaNetConfig
from penstock.weights.architecture.mla import MlaConfig
from penstock.weights.architecture.moe import MoeConfig
from penstock.weights.architecture.spec import ModelSpec
from penstock.weights.architecture.tensor_layout import Matrix, TensorPart, Vector, WeightLayout
from penstock.weights.architecture.vision import VisionDecoderConfig

HEAD_UNIT = 16
"""Rows of the head that stay together."""


def part_of(items: int, part: int, parts: int) -> range:
    """The items of one of ``parts`` parts, as equal as whole items allow: a rank's heads, a stage's layers."""
    return range(items * part // parts, items * (part + 1) // parts)


def head_rows(vocab: int, part: int, parts: int) -> range:
    """The rows of the head of one rank: whole panels of 16, as the kernels have them."""
    panels = part_of(-(-vocab // HEAD_UNIT), part, parts)
    return range(panels.start * HEAD_UNIT, min(vocab, panels.stop * HEAD_UNIT))


def column_range(ends: Sequence[int], part: int, parts: int) -> range:
    """The columns of one rank's segments, of the ends of all eight."""
    own = leaves_of(TREE_SEGMENTS, part, parts)
    return range((0, *ends)[own.start], ends[own.stop - 1])


@dataclass(frozen=True, slots=True)
class HeadShare:
    """The heads of one rank.  ``kv``: the key-value head of each of its slots, which serve ``group`` consecutive query
    heads each.  A head may have several slots: kernels want groups of one size, and a rank may have 3 query heads of
    one key-value head and 1 of the next."""

    queries: range
    kv: tuple[int, ...]
    group: int

    @classmethod
    def of(cls, heads: int, kv_heads: int, part: int, parts: int) -> HeadShare:
        """The share of rank ``part`` of ``parts``, of ``heads`` query heads; ``kv_heads`` divides them."""
        queries, whole = part_of(heads, part, parts), heads // kv_heads
        read = range(queries.start // whole, -(-queries.stop // whole))
        counts = {
            kv: min(queries.stop, (kv + 1) * whole) - max(queries.start, kv * whole) for kv in read if len(queries)
        }
        group = math.gcd(*counts.values()) or 1
        return cls(queries, tuple(kv for kv, count in counts.items() for _ in range(count // group)), group)


@dataclass(frozen=True, slots=True)
class LayerShare:
    """What one rank has of a layer.  ``columns``: of the inner ones of its MLP, or of its shared expert."""

    heads: tuple[HeadShare, ...]  # of every rank of the stage, as norms over all heads need them
    columns: range
    experts: range
    tensor: int  # which rank of the stage

    @property
    def own_heads(self) -> HeadShare:
        return self.heads[self.tensor]


@dataclass(frozen=True, slots=True)
class ModelShard:
    """One rank's part of a model.  ``spec``: its layers, heads and columns, as if they were a model of their own."""

    whole: ModelSpec
    spec: ModelSpec
    mesh: Mesh
    rank: int
    layers: range  # of the whole model's
    shares: tuple[LayerShare, ...]  # one for each of these layers

    @property
    def is_first(self) -> bool:
        """Whether it is of the first stage, which embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last(self) -> bool:
        """Whether it is of the last stage, which has the head."""
        return self.layers.stop == self.whole.layers

    @property
    def head_widths(self) -> tuple[int, ...]:
        """How many rows of the head each rank of the last stage has, one after another: ids of tokens."""
        return tuple(len(head_rows(self.whole.vocab, part, self.mesh.tensor)) for part in range(self.mesh.tensor))

    def layout(self, whole: WeightLayout) -> WeightLayout:
        """The rank's weights, by the names that ``spec`` has them under, of a layout of the whole model."""
        return WeightLayout(tuple(self._weights(whole)), whole.ignored)

    def _weights(self, whole: WeightLayout) -> Iterator[Matrix | Vector]:
        for weight in whole.weights:
            first, _, rest = weight.name.partition(".")
            if first.isdigit():
                index = int(first)
                if index in self.layers:
                    yield from self._layer_weight(index, rest, weight)
            elif first in ("embed", "positions"):
                if self.is_first:
                    yield weight
                if self.is_last and first == "embed" and self.whole.tied and not self.spec.tied:
                    yield self._head(replace(weight, name="head"))
            elif self.is_last:
                yield self._head(weight) if first.startswith("head") else weight

    def _head(self, weight: Matrix | Vector) -> Matrix | Vector:
        """The rank's rows of the head."""
        tensor = self.mesh.tensor
        if tensor == 1:
            return weight
        return _with_rows(weight, [head_rows(self.whole.vocab, self.mesh.place(self.rank).tensor, tensor)])

    def _layer_weight(self, index: int, kind: str, weight: Matrix | Vector) -> Iterator[Matrix | Vector]:
        """The rank's part of a layer's weight, if it has one; ``kind``: its name without the layer."""
        weight = replace(weight, name=f"{index - self.layers.start}.{kind}")
        if self.mesh.tensor == 1:
            yield weight
            return
        layer, share = self.whole.details_as(DecoderConfig).layers[index], self.shares[index - self.layers.start]
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, AttentionConfig), "refused by check_supported"
        matrix = kind.removesuffix("_bias")
        if matrix.startswith("experts."):
            if int(matrix.split(".")[1]) in share.experts:
                yield weight
        elif matrix == "qkv":
            yield _with_rows(weight, _qkv_rows(attention, share.own_heads))
        elif matrix == "sinks":
            yield _with_rows(weight, [share.own_heads.queries])
        elif matrix in ("q_norm", "k_norm") and attention.qk_norm is QkNorm.ALL and isinstance(weight, Vector):
            yield replace(weight, heads=_head_columns(attention, share, keys=matrix == "k_norm"))
        elif matrix in ("gate_up", "shared_gate_up"):
            yield _with_rows(weight, _gate_up_rows(mlp, share.columns))
        elif kind in ("out", "down", "shared_down") and isinstance(weight, Matrix):
            yield _with_columns(weight, share.tensor, self.mesh.tensor)
        else:
            yield weight


def shard_model(spec: ModelSpec, mesh: Mesh, rank: int, *, nodes: int = 1, prompts: bool = False) -> ModelShard:
    """One rank's part of a model.  ``nodes``: machines that the ranks are on; the KV pages of one have its layers.
    ``prompts``: stages are cut for prefill, not for decode (``stage_layers``).

    Raises ConfigError for a model that cannot be divided yet, or not over that number of ranks: one line, with the
    numbers and a plan that would work.
    """
    _check_divisible(spec, mesh)
    place = mesh.place(rank)
    if mesh.ranks == 1:
        return ModelShard(spec, spec, mesh, rank, range(spec.layers), ())
    layers = stage_layers(spec, mesh.pipeline, prompts=prompts)[place.stage]
    decoder = spec.details_as(DecoderConfig)
    own = decoder.layers[layers.start : layers.stop]
    shares = tuple(_layer_share(layer, place.tensor, mesh.tensor) for layer in own)
    node = node_layers(spec, mesh, NodePlace(nodes=nodes, node=mesh.node_of(rank, nodes)))
    local = structs.replace(
        spec,
        layers=len(layers),
        kv=_local_kv(spec, node, layers, shares),
        tied=False,
        details=structs.replace(decoder, layers=tuple(map(_local_layer, own, shares))),
    )
    return ModelShard(spec, local, mesh, rank, layers, shares)


def stage_layers(spec: ModelSpec, stages: int, *, prompts: bool = False) -> tuple[range, ...]:
    """The layers of each stage, so that the stage with most to compute has as little as possible.

    What a layer costs is taken to be the numbers of its matrices that a token is multiplied with, as many as a step of
    decode reads; the last stage has the head besides.  ``prompts``: for steps that compute many tokens of a prompt and
    draw from the last of them at most.
    """
    return cut_stages(layer_costs(spec, prompts=prompts), 0 if prompts else head_cost(spec), stages)


def cut_stages(costs: Sequence[float], head: float, stages: int) -> tuple[range, ...]:
    """The layers of each stage, of layers with these costs and a head after the last one."""
    sums, count = (0, *accumulate(costs)), len(costs)

    def cost(begin: int, end: int) -> float:
        return sums[end] - sums[begin] + (head if end == count else 0)

    best: list[tuple[float, tuple[int, ...]]] = [(cost(0, end), ()) for end in range(count + 1)]  # of layers up to each
    for stage in range(1, stages):
        best = [
            min(
                ((max(best[cut][0], cost(cut, end)), (*best[cut][1], cut)) for cut in range(stage, end)),
                default=(0, ()),
            )
            for end in range(count + 1)
        ]
    cuts = best[count][1]
    return tuple(range(begin, end) for begin, end in pairwise((0, *cuts, count)))


def head_cost(spec: ModelSpec) -> int:
    """The numbers of the head: what it costs where every token is drawn from, as in decode."""
    return spec.vocab * spec.hidden


def layer_costs(spec: ModelSpec, *, prompts: bool = False) -> list[int]:
    """The numbers of each layer's matrices that a token is multiplied with.

    ``prompts``: of a token that nothing is drawn from, of which the last layer computes only keys and values.
    """
    layers = spec.details_as(DecoderConfig).layers
    costs = [_layer_cost(layer, spec.hidden) for layer in layers]
    last = layers[-1].attention
    if prompts and isinstance(last, AttentionConfig):
        costs[-1] = spec.hidden * 2 * last.kv_heads * last.head_dim
    return costs


def _layer_cost(layer: LayerConfig, hidden: int) -> int:
    attention, mlp = layer.attention, layer.mlp
    assert isinstance(attention, AttentionConfig), "refused by check_supported"
    heads = 2 * attention.heads + 2 * attention.kv_heads
    inner = mlp.intermediate if isinstance(mlp, MlpConfig) else mlp.routing.top_k * mlp.intermediate + (mlp.shared or 0)
    gated = not isinstance(mlp, MlpConfig) or mlp.gated
    return hidden * (heads * attention.head_dim + inner * (3 if gated else 2))


def token_numbers(spec: ModelSpec) -> int:
    """Numbers of the model's weights that one token is multiplied with; all of them where the model is not divided."""
    try:
        check_supported(spec, Mesh(tensor=2))
    except ConfigError:
        return spec.parameters
    return sum(layer_costs(spec)) + head_cost(spec)


def tensor_ways(spec: ModelSpec) -> tuple[tuple[int, ...], str]:
    """Numbers of tensor ranks that can divide a model, 1 aside; and why none can, if none can."""
    found, why = list[int](), ""
    for ways in TENSOR_WAYS[1:]:
        try:
            _check_divisible(spec, Mesh(tensor=ways))
        except ConfigError as error:
            why = why or str(error).partition(": ")[2].partition(";")[0]
        else:
            found.append(ways)
    return tuple(found), "" if found else why


def possible_meshes(spec: ModelSpec, cores: int) -> list[Mesh]:
    """One process, and the meshes of ranks that can divide a model and have a core each: fewest stages first."""
    found = [Mesh()]
    for pipeline in TENSOR_WAYS:
        for tensor in TENSOR_WAYS:
            if not 1 < tensor * pipeline <= cores:
                continue
            mesh = Mesh(tensor=tensor, pipeline=pipeline)
            try:
                _check_divisible(spec, mesh)
            except ConfigError:
                continue
            found.append(mesh)
    return found


def check_supported(spec: ModelSpec, mesh: Mesh, *, lora: bool = False, speculation: bool = False) -> None:
    """Raises ConfigError for what cannot be divided over ranks yet.  ``lora``, ``speculation``: are to be used."""
    if mesh.ranks == 1:
        return
    decoder = spec.details if isinstance(spec.details, DecoderConfig) else None
    attentions = [layer.attention for layer in decoder.layers] if decoder is not None else []
    reasons = {
        "a model that transcribes": spec.audio_tokens > 0,
        "a pooling model": spec.pooler is not None,
        f"the architecture {spec.architecture}": decoder is None,
        "images": isinstance(decoder, VisionDecoderConfig),
        "latent attention (MLA)": any(isinstance(one, MlaConfig) for one in attentions),
        "recurrent layers": any(isinstance(one, GatedDeltaNetConfig) for one in attentions),
        "gated attention": any(isinstance(one, GatedAttentionConfig) for one in attentions),
        "quantized weights": spec.quantization is not None,
        "sparse attention": spec.sparse is not None,
        "LoRA adapters": lora,
        "speculation": speculation,
    }
    for what, found in reasons.items():
        if found:
            raise ConfigError(f"plan {mesh.name}: {what} cannot be divided over ranks yet; serve without a plan")


def _check_divisible(spec: ModelSpec, mesh: Mesh) -> None:
    """Raises ConfigError for a model that cannot be divided yet, or not over these ranks."""
    check_supported(spec, mesh)
    _check_shares(spec, mesh)


def _check_shares(spec: ModelSpec, mesh: Mesh) -> None:
    """Raises ConfigError if a rank would have nothing to compute."""
    if mesh.ranks == 1:
        return
    if mesh.pipeline > spec.layers:
        works = Mesh(tensor=_tensor_that_works(spec, mesh.tensor), pipeline=spec.layers)
        raise ConfigError(
            f"plan {mesh.name}: {spec.layers} layers make no {mesh.pipeline} stages; {works.name} would work"
        )
    works = Mesh(tensor=_tensor_that_works(spec, mesh.tensor), pipeline=mesh.pipeline)
    if works != mesh:
        count, what = min(_divided(spec))
        raise ConfigError(
            f"plan {mesh.name}: {count} {what} cannot be divided over {mesh.tensor} ranks; {works.name} would work"
        )


def _tensor_that_works(spec: ModelSpec, most: int) -> int:
    fewest = min(count for count, _ in _divided(spec))
    return max(ways for ways in TENSOR_WAYS if ways <= min(most, fewest))


def _divided(spec: ModelSpec) -> Iterator[tuple[int, str]]:
    """The number of what is divided over the ranks of a stage, and its name; a rank has at least one of each."""
    yield -(-spec.vocab // HEAD_UNIT), f"units of {HEAD_UNIT} tokens ({spec.vocab} in the vocabulary)"
    for layer in spec.details_as(DecoderConfig).layers:
        if isinstance(layer.attention, AttentionConfig):
            yield layer.attention.heads, "heads"
        if isinstance(layer.mlp, MoeConfig):
            yield layer.mlp.routing.experts, "experts"
        columns = _inner_columns(layer.mlp)
        if columns is not None:
            yield -(-columns // COLUMN_UNIT), f"units of {COLUMN_UNIT} columns ({columns} in an MLP)"


def _inner_columns(mlp: MlpConfig | MoeConfig) -> int | None:
    """Inner columns of what every token passes; None where there are only routed experts."""
    return mlp.shared if isinstance(mlp, MoeConfig) else mlp.intermediate


def _layer_share(layer: LayerConfig, part: int, parts: int) -> LayerShare:
    attention, columns = layer.attention, _inner_columns(layer.mlp)
    assert isinstance(attention, AttentionConfig), "refused by check_supported"
    return LayerShare(
        heads=tuple(HeadShare.of(attention.heads, attention.kv_heads, each, parts) for each in range(parts)),
        columns=range(0) if columns is None else column_range(segment_ends(columns, COLUMN_UNIT), part, parts),
        experts=experts_of(layer.mlp.routing.experts, part, parts) if isinstance(layer.mlp, MoeConfig) else range(0),
        tensor=part,
    )


def _local_layer(layer: LayerConfig, share: LayerShare) -> LayerConfig:
    own, mlp = share.own_heads, layer.mlp
    attention = structs.replace(layer.attention, heads=len(own.queries), kv_heads=len(own.kv))
    if isinstance(mlp, MoeConfig):
        shared = None if mlp.shared is None else len(share.columns)
        return structs.replace(layer, attention=attention, mlp=structs.replace(mlp, shared=shared))
    return structs.replace(layer, attention=attention, mlp=structs.replace(mlp, intermediate=len(share.columns)))


def node_layers(spec: ModelSpec, mesh: Mesh, place: NodePlace) -> range:
    """The layers of all ranks on one machine; there are no more machines than stages."""
    if place.nodes == 1:
        return range(spec.layers)
    stages, ranks = stage_layers(spec, mesh.pipeline), mesh.node_ranks(place)
    return range(stages[mesh.place(ranks[0]).stage].start, stages[mesh.place(ranks[-1]).stage].stop)


def node_kv(spec: ModelSpec, mesh: Mesh, place: NodePlace) -> KvShape:
    """What the KV pages of one machine have: its layers, in the groups of the whole model, so that all have one table
    of pages."""
    return spec.kv.with_layers(node_layers(spec, mesh, place))


def _local_kv(spec: ModelSpec, node: range, layers: range, shares: Sequence[LayerShare]) -> KvShape:
    """These layers and the rank's heads in the pages that ranks of a machine share, which have those of ``node``."""
    kept = {share.own_heads.kv for share in shares}
    if len(kept) > 1:
        raise ConfigError(f"{spec.architecture}: layers with different numbers of heads cannot be divided over ranks")
    heads = kept.pop()
    share = PageShare(spec.kv.with_layers(node), range(layers.start - node.start, layers.stop - node.start), heads)
    return replace(spec.kv, layers=len(layers), kv_heads=len(heads), groups=(), share=share)


def _qkv_rows(attention: AttentionConfig, own: HeadShare) -> list[range]:
    """Queries, then keys, then values."""
    size = attention.head_dim
    keys, values = attention.heads * size, (attention.heads + attention.kv_heads) * size
    rows = [range(own.queries.start * size, own.queries.stop * size)]
    return rows + [range(begin + kv * size, begin + (kv + 1) * size) for begin in (keys, values) for kv in own.kv]


def _gate_up_rows(mlp: MlpConfig | MoeConfig, columns: range) -> list[range]:
    """The rows that make these inner columns."""
    if isinstance(mlp, MlpConfig) and not mlp.gated:
        return [columns]
    if isinstance(mlp, MoeConfig) and mlp.gate.interleaved:
        return [range(2 * columns.start, 2 * columns.stop)]
    inner = _inner_columns(mlp) or 0
    return [columns, range(inner + columns.start, inner + columns.stop)]


def _head_columns(attention: AttentionConfig, share: LayerShare, *, keys: bool) -> HeadColumns:
    """Where queries, or keys, stand in what ``qkv`` makes on each rank."""
    size = attention.head_dim
    return HeadColumns(
        size,
        firsts=tuple(len(own.queries) * size if keys else 0 for own in share.heads),
        heads=tuple(own.kv if keys else tuple(own.queries) for own in share.heads),
        rank=share.tensor,
    )


def _with_rows(weight: Matrix | Vector, wanted: Sequence[range]) -> Matrix | Vector:
    """These rows of a weight, in this order, whichever of its parts they are in."""
    ends = (0, *accumulate(part.outputs for part in weight.parts))
    parts: list[TensorPart] = []
    for rows in _merged(wanted):
        for part, (begin, end) in zip(weight.parts, pairwise(ends), strict=True):
            first, stop = max(rows.start, begin), min(rows.stop, end)
            if first < stop:
                parts.append(part.row_range(first - begin, stop - begin))
    return replace(weight, parts=tuple(parts))


def _merged(wanted: Sequence[range]) -> list[range]:
    """The same rows in as few ranges as they make."""
    merged: list[range] = []
    for rows in wanted:
        if merged and merged[-1].stop == rows.start:
            merged[-1] = range(merged[-1].start, rows.stop)
        else:
            merged.append(rows)
    return merged


def _with_columns(weight: Matrix, part: int, parts: int) -> Matrix:
    """The columns of one rank's segments."""
    assert weight.segments is not None, "what is cut along K has the segments of the tree"
    columns, own = column_range(weight.segments, part, parts), leaves_of(TREE_SEGMENTS, part, parts)
    (whole,) = weight.parts
    cut = replace(whole, columns=(columns.start, columns.stop))
    ends = tuple(end - columns.start for end in weight.segments[own.start : own.stop])
    return replace(weight, parts=(cut,), segments=ends, partial=True)
