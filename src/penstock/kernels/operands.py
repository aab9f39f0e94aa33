# ruff: noqa: N815  (field names carry shapes)
"""Arguments of the operations: packed weights, the tokens of a step, the shape of KV memory, gates, routing, attention.

Knows no operation; ``ops`` explains the letters in the names.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from penstock.kv_spec import FULL_ATTENTION, KvSpec, LayerGroup, layer_groups
from penstock.types import FP8_E4M3, PAGE_TOKENS

LEAST_EXPONENT: Final = 20
"""So that the smallest code is a normal number in bf16."""

MOST_EXPONENT: Final = 253
NO_NUMBER: Final = 255


@dataclass(frozen=True, slots=True)
class KvType:
    """Storage of keys and values: bytes of one number, and of a token's row besides its numbers.

    ``fp8_e4m3`` is the E4M3 format of the OCP standard, with one power of two for each token and key-value head of a
    layer, for its key and for its value: the least with which the row's largest number does not exceed 448.

    ::

        layer in a page | keys [G, 16, C] | values [G, 16, value_dim] | exponents of keys [G, 16] | of values [G, 16] |

    An exponent e, 20 to 253, means that a code c is E4M3(c) * 2^(e - 135); 255 means that the row holds a NaN or a
    number beyond 1.75 * 2^126, and reads as NaN.  Codes and scale follow from that row alone, and no number is cut
    off.  Scales are powers of two, so a code's value is exact in the compute type, and it makes no difference to any
    bit whether keys are scaled or their scores, values or their weights.  Where values are the first columns of their
    keys (latent attention), one exponent serves both.
    """

    number_bytes: int
    row_bytes: int = 0


KV_TYPES: Mapping[str, KvType] = MappingProxyType(
    {"bf16": KvType(2), "fp16": KvType(2), "fp32": KvType(4), FP8_E4M3: KvType(1, row_bytes=1)}
)


INT8: Final = "int8"
"""Type of the inputs that are multiplied with quantized weights, other than the compute type."""


def numerics_with(numerics: str, kv_dtype: str | None, activation_dtype: str | None = None) -> str:
    """The numerics class of a backend that keeps keys and values in the one type, and multiplies quantized weights with
    inputs of the other; None: in its compute type."""
    numerics = numerics if activation_dtype is None else f"{numerics}-act_{activation_dtype}"
    return numerics if kv_dtype is None else f"{numerics}-kv_{kv_dtype}"


Array = Any
"""An array of the backend: never looked into above ``kernels``."""

TREE_SEGMENTS = 8
"""Segments of K where tensor parallelism will cut the sum (attention output, MLP down)."""

COLUMN_UNIT = 32
"""Columns in one unit of K when the sum is not over heads."""


def segment_ends(k: int, unit: int) -> tuple[int, ...]:
    """Ends of the 8 segments of K for a tree sum: segment i ends at floor((i + 1) * U / 8) units of ``unit`` columns.

    The last unit may be short.  Segments may be empty (their sum is zero).
    """
    units = -(-k // unit)
    return tuple(min(k, (i + 1) * units // TREE_SEGMENTS * unit) for i in range(TREE_SEGMENTS))


STATE_CELL = 512
"""Positions of a cell of the grid at which states are kept, unless a shape says otherwise: a multiple of a page's."""

STATE_UNIT = 16
"""Columns of a state, and channels of its convolution, are multiples of this: a kernel's vector."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateShape:
    """What recurrent layers keep of a sequence, whatever its length: in each layer a matrix [key_dim, value_dim] for
    every head, and the last ``taps - 1`` inputs of a convolution over the channels, all in fp32.

    It lies in rows of ``value_dim`` numbers: matrices, inputs, layer after layer.
    """

    layers: int
    key_heads: int
    heads: int  # a multiple of key_heads
    key_dim: int  # even
    value_dim: int  # a multiple of STATE_UNIT, as are the channels
    taps: int
    cell: int = STATE_CELL  # a page holds the state after the last computed token of this many positions

    @property
    def channels(self) -> int:
        """Queries, keys and values of a token."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @property
    def matrix_rows(self) -> int:
        """Rows of a layer's matrices."""
        return self.heads * self.key_dim

    @property
    def layer_rows(self) -> int:
        """Rows of a layer."""
        return self.matrix_rows - (-(self.taps - 1) * self.channels // self.value_dim)

    @property
    def nbytes(self) -> int:
        """Bytes of the states of all layers."""
        return 4 * self.layers * self.layer_rows * self.value_dim

    @property
    def reach(self) -> KvSpec:
        """The state before a token is all that it reads."""
        return KvSpec(window=1, state_interval=self.cell)

    def first_cell(self, position: int) -> int:
        """The first cell that a step from this position on reads or writes."""
        return max(0, position - 1) // self.cell


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token leaves in the KV memory: in every layer, a key and a value of every key-value head.

    ``shared``: a value is the first ``value_dim`` numbers of its key and stored only there (the latent cache of MLA,
    one head a layer).  ``groups``: layers that share pages; none: all layers stand in one page and read everything.
    ``states``: the states of recurrent layers; ``layers`` then counts only layers with keys and values.
    A state is cut into parts of a page each, and every part is a group behind the others.  ``share``: these layers and
    heads are those of one rank, which finds them in pages of the whole model.
    """

    layers: int
    kv_heads: int
    key_dim: int  # even
    value_dim: int  # even
    shared: bool = False
    groups: tuple[LayerGroup, ...] = ()
    states: StateShape | None = None
    share: PageShare | None = None

    @classmethod
    def plain(cls, *, layers: int, kv_heads: int, head_dim: int) -> KvShape:
        """Keys and values of one size."""
        return cls(layers=layers, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim)

    def grouped(self, reaches: Sequence[KvSpec]) -> KvShape:
        """The same for layers that read so far back, one entry a layer."""
        return replace(self, groups=layer_groups(reaches))

    @property
    def unshared(self) -> KvShape:
        """The layers and heads of one rank in pages of its own, as on devices that share no memory."""
        if self.share is None:
            return self
        return replace(self.share.whole.with_layers(self.share.layers), kv_heads=self.kv_heads)

    def with_layers(self, layers: range) -> KvShape:
        """Some of the layers in pages of their own.  Groups keep their numbers, also those without a layer here."""
        groups = tuple(
            replace(group, layers=tuple(layer - layers.start for layer in group.layers if layer in layers))
            for group in self.groups
        )
        return replace(self, layers=len(layers), groups=groups)

    @property
    def of_pages(self) -> KvShape:
        """What the pages have: the whole model's, where ranks share them."""
        return self if self.share is None else self.share.whole

    @property
    def reaches(self) -> tuple[KvSpec, ...]:
        """How far back the layers of each group read; groups of states come last."""
        if self.share is not None:
            return self.share.whole.reaches
        own = tuple(group.spec for group in self.groups) or (FULL_ATTENTION,)
        return own if self.states is None else own + (self.states.reach,) * self.state_parts

    @property
    def layer_groups(self) -> int:
        """Groups of layers with keys and values."""
        return len(self.of_pages.groups) or 1

    @property
    def kept_states(self) -> StateShape:
        """The states.  Raises ValueError where there are none."""
        if self.states is None:
            raise ValueError("no recurrent layer keeps a state in this KV memory")
        return self.states

    @property
    def state_rows_a_page(self) -> int:
        """Rows of states in a page: as many as fit where numbers of keys and values have 2 bytes, whatever they have,
        so that models have one number of groups."""
        return self.numbers * PAGE_TOKENS * 2 // (4 * self.kept_states.value_dim)

    @property
    def state_parts(self) -> int:
        """Pages of one state."""
        own = self.kept_states
        return -(-own.layers * own.layer_rows // self.state_rows_a_page)

    @property
    def page_layers(self) -> int:
        """Layers that a page has room for."""
        whole = self.of_pages
        return max((len(group.layers) for group in whole.groups), default=whole.layers)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Each layer's group, and its place in that group's pages."""
        if self.share is not None:
            whole = self.share.whole.places
            return tuple(whole[layer] for layer in self.share.layers)
        found = {
            layer: (group, place) for group, own in enumerate(self.groups) for place, layer in enumerate(own.layers)
        }
        return tuple(found.get(layer, (0, layer)) for layer in range(self.layers))

    @property
    def numbers(self) -> int:
        """That one token has room for in a page: in all layers of a group."""
        return self.page_layers * self.of_pages.kv_heads * (self.key_dim + (0 if self.shared else self.value_dim))

    def head_bytes(self, dtype: str) -> int:
        """What one token leaves of each key-value head of a layer, kept in a type of ``KV_TYPES``."""
        kind = KV_TYPES[dtype]
        widths = (self.key_dim,) if self.shared else (self.key_dim, self.value_dim)
        return sum(width * kind.number_bytes + kind.row_bytes for width in widths)

    def page_bytes(self, dtype: str, page_tokens: int = PAGE_TOKENS) -> int:
        """Bytes of one page of a group of layers."""
        return self.page_layers * self.of_pages.kv_heads * self.head_bytes(dtype) * page_tokens


@dataclass(frozen=True, slots=True)
class PageShare:
    """What one rank has of pages that it shares with the others: some layers of the ``whole``, and in each of them some
    key-value heads; ``heads`` has the number of each of its own heads, and may repeat one."""

    whole: KvShape
    layers: range
    heads: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight matrix [N, K] in the backend's own layout.  Made before workers are forked; read-only afterwards."""

    n: int
    k: int
    segments: tuple[int, ...]  # ends of the segments of K; (k,) for a plain sum
    data: Array
    nbytes: int
    partial: bool = False
    """K is only the segments of the sum that one rank has, so the product is a part of the sum (``Ops.join``)."""


@dataclass(frozen=True, slots=True)
class HeadColumns:
    """Which columns of several ranks' arrays are which heads.  A head may be in several arrays, with the same values,
    and more than once in one."""

    size: int  # columns of a head
    firsts: tuple[int, ...]  # column of the first head in each rank's array
    heads: tuple[tuple[int, ...], ...]  # heads of each rank's array, in the order of its columns
    rank: int  # whose part this is

    def collect(self, parts: Sequence[Array], all_TN: Array) -> None:
        """Copy the heads out of the ranks' arrays to their places among all heads."""
        for part_TN, first, heads in zip(parts, self.firsts, self.heads, strict=True):
            for place, head in enumerate(heads):
                all_TN[:, self._columns(0, head)] = part_TN[:, self._columns(first, place)]

    def put_own(self, all_TN: Array, x_TN: Array) -> None:
        """Copy this rank's heads out of all heads to their places in its array."""
        first = self.firsts[self.rank]
        for place, head in enumerate(self.heads[self.rank]):
            x_TN[:, self._columns(first, place)] = all_TN[:, self._columns(0, head)]

    def _columns(self, first: int, head: int) -> slice:
        return slice(first + head * self.size, first + (head + 1) * self.size)


@dataclass(frozen=True, slots=True)
class GatheredNorm:
    """The weight of a norm over all heads of a layer, of which each rank has some (``Ops.norm_gathered``)."""

    weight: Array  # fp32, of all heads
    heads: HeadColumns


@dataclass(frozen=True, slots=True)
class GivenRows:
    """Rows of the residual stream that begin with values of their own (an image's) instead of an embedding."""

    rows_G: NDArray[np.int32]  # indices into T, each once
    values_GD: Array  # fp32


@dataclass(frozen=True, slots=True)
class StepBatch:
    """The tokens of one step, as the kernels want them.  Sequence s owns tokens ``starts[s]:starts[s + 1]``."""

    tokens_T: NDArray[np.int32]
    positions_T: NDArray[np.int32]  # absolute, from 0
    starts_S1: NDArray[np.int32]  # S + 1 entries
    table_SP: NDArray[np.int32]
    """Page of each block, read below ceil((last position + 1) / 16) only; of several groups of layers (``KvShape``)
    one after another, each P / groups columns."""
    sample_rows_R: NDArray[np.int32]  # indices into T whose logits are wanted
    turns_T3: NDArray[np.int32] | None = None  # from 0 to the position; None: all three are the position
    given: GivenRows | None = None
    features_TW: NDArray[np.float32] | None = None  # what comes with every token, for steps that read it
    tapped: tuple[int, ...] = ()  # numbers of layers after which the hidden states of the rows above are returned
    taps_RW: NDArray[np.float32] | None = None  # where they go, side by side; None: nothing is handed out
    states_SW: NDArray[np.int32] | None = None
    """Pages of the states of each sequence, where layers keep them: all parts of its ``StateShape.first_cell``, then of
    the next cell, up to that of its last position."""
    adapters_S: NDArray[np.int32] | None = (
        None  # slot of each sequence's adapter, below 0: none; None: no sequence has one
    )

    def features(self, width: int) -> NDArray[np.float32]:
        """What comes with every token.  Raises ValueError unless it is there, [T, width]."""
        if self.features_TW is None or self.features_TW.shape != (len(self.tokens_T), width):
            raise ValueError(f"a step needs features [{len(self.tokens_T)}, {width}]")
        return self.features_TW

    def store_taps(self, hidden_RD: NDArray[np.float32], place: int) -> None:
        """Put hidden states where they go.  Raises ValueError if there is no room."""
        rows, width = hidden_RD.shape
        if self.taps_RW is None or self.taps_RW.shape != (rows, width * len(self.tapped)):
            raise ValueError(f"a step needs room for taps [{rows}, {width * len(self.tapped)}]")
        self.taps_RW[:, place * width : (place + 1) * width] = hidden_RD

    def table_of(self, group: int, groups: int) -> NDArray[np.int32]:
        """The columns of one of ``groups`` groups."""
        width = self.table_SP.shape[1] // groups
        return self.table_SP[:, group * width : (group + 1) * width]


class Activation(StrEnum):
    """A function of one value.  Names as in Hugging Face's ``hidden_act``."""

    SILU = "silu"  # x / (1 + exp(-alpha x))
    GELU = "gelu"  # x Phi(x), with the error function (arXiv:1606.08415)
    GELU_TANH = "gelu_tanh"  # its approximation with tanh, "gelu_new" and "gelu_pytorch_tanh"
    RELU = "relu"
    RELU2 = "relu2"  # relu(x)^2 (arXiv:2109.08668)
    NONE = "none"  # x


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A gated unit (arXiv:2002.05202): ``activation(min(gate, limit)) * (clamp(up, -limit, limit) + shift)``."""

    activation: Activation = Activation.SILU
    alpha: float = 1.0  # of silu
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False  # columns are gate, up, gate, up, ...; else all of gate, then all of up

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"the limit of a gate must be above 0, got {self.limit}")


SILU = Gate()
SWIGLU_OAI = Gate(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)
"""The gate of gpt-oss (arXiv:2508.10925)."""


MAX_EXPERTS = 4096


class Score(StrEnum):
    """What makes an expert's logit its weight."""

    SOFTMAX = "softmax"  # over all experts
    SIGMOID = "sigmoid"
    SOFTMAX_CHOSEN = "softmax_chosen"  # over the chosen ones


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """How ``top_k`` of ``experts`` are chosen for a token, and what they weigh.

    Chosen are the largest logits; where there is a bias (arXiv:2408.15664) or groups count by pairs, the largest scores
    plus bias.  With groups, neighboring experts are a group, and only the best ``groups_kept`` groups can be chosen
    from (arXiv:2405.04434, arXiv:2412.19437).  Of equal ones the lower id is better.
    """

    experts: int
    top_k: int
    score: Score = Score.SOFTMAX
    normalised: bool = False  # the chosen weights are divided by their sum; the name is part of fingerprints
    groups: int = 1
    groups_kept: int = 1
    pairs: bool = False  # a group is as good as its best two experts together, else as its best
    factor: float = 1.0  # of all weights

    def __post_init__(self) -> None:
        if not 1 <= self.experts <= MAX_EXPERTS or self.groups < 1 or self.experts % self.groups:
            raise ValueError(f"{self.experts} experts in {self.groups} groups: 1 to {MAX_EXPERTS}, in equal groups")
        if not 1 <= self.groups_kept <= self.groups or not 1 <= self.top_k <= self.groups_kept * self.group_size:
            raise ValueError(
                f"{self.top_k} experts cannot be chosen from {self.groups_kept} groups of {self.group_size}"
            )
        if self.pairs and self.group_size < 2:
            raise ValueError("groups of one expert have no best two")

    @property
    def group_size(self) -> int:
        return self.experts // self.groups


@dataclass(frozen=True, slots=True)
class Routes:
    """Each token's experts, best first, with their weights.  Opaque to layers."""

    data: Any
    top_k: int


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """The experts of one layer, all of one shape: ``gate_up`` [2 I, K] and ``down`` [D, I] each.  Read-only."""

    count: int
    k: int
    inner: int
    n: int
    data: Any
    nbytes: int  # of the experts that are here
    partial: bool = False  # other ranks have some of them


BLOCK_KEYS = 64
"""Keys of a block: what attention reduces at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sparse:
    """Sparse attention: the blocks of 64 keys that a token reads.  ``start`` is a position, the rest counts blocks.

    ::

        blocks of 64   | sinks | ........ candidates ........ | window, up to the token's own |
        read           |  all  | the best-scored ones          |            all               |

    A query's score of a block is the best of the block's four pages: its product with the mean of that page's keys.  Of
    the query heads that share keys the highest score counts, so they read the same blocks; of equal scores the earlier
    block wins.

    Each token chooses for itself.  The choice follows from the token's queries, its position and the keys before it,
    and blocks are cut by absolute position: so it is the same however a prompt is cut, on any worker, for prompt and
    output tokens alike (docs/determinism.md).  Output tokens are treated like a prompt's: they are part of the next
    turn's prompt.

    After MInference (arXiv:2407.02490), Quest (arXiv:2406.10774) and StreamingLLM (arXiv:2309.17453).
    """

    sinks: int  # at the beginning
    window: int  # up to the token's own, which is one of them
    chosen: int
    start: int  # positions before it read everything

    def __post_init__(self) -> None:
        for name in ("sinks", "window", "chosen"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}")

    @property
    def name(self) -> str:
        """Part of the numerics class, and of log lines."""
        return f"sparse{self.sinks}.{self.window}.{self.chosen}.{self.start}"

    @property
    def keys(self) -> int:
        """The most keys that a token reads where it does not read all."""
        return (self.sinks + self.window + self.chosen) * BLOCK_KEYS

    def thins(self, position: int) -> bool:
        """Whether this position leaves blocks out."""
        return position >= self.start and position // BLOCK_KEYS >= self.sinks + self.window + self.chosen

    def candidates(self, position: int) -> range:
        """Blocks that a position chooses among: complete ones, before its window."""
        return range(self.sinks, position // BLOCK_KEYS - self.window + 1)


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Which keys the tokens of a layer read, and how scores become weights (``Ops.paged_attention``)."""

    scale: float
    window: int | None = None  # the number of last keys, the token's own included
    chunk: int | None = None  # keys with the token's floor(position / chunk)
    softcap: float | None = None
    sinks_H: Array | None = None
    until: int | None = None  # instead: the keys below this position, wherever the token is
    sparse: Sparse | None = None

    def keys_of(self, position: int) -> tuple[int, int]:
        """Keys [first, end) that a position reads, where no blocks are left out."""
        return (self.first_key(position), position + 1) if self.until is None else (0, self.until)

    def first_key(self, position: int) -> int:
        """The first key up to its own that a position reads."""
        first_of_window = 0 if self.window is None else position - self.window + 1
        first_of_chunk = 0 if self.chunk is None else position // self.chunk * self.chunk
        return max(0, first_of_window, first_of_chunk)
