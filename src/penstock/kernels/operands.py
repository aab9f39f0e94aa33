# ruff: noqa: N815  (field names carry shapes)
"""What operations are given: packed weights, the tokens of a step, the shape of the KV memory.

Knows no operation; ``ops`` says what the letters in the names mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.groups import LayerGroup, layer_groups
from penstock.kernels.kv_types import KV_TYPES
from penstock.reach import EVERYTHING, Reach
from penstock.types import PAGE_TOKENS

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
    cell: int = STATE_CELL  # a page holds the state behind the last token computed of so many positions

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
        """Of all layers."""
        return 4 * self.layers * self.layer_rows * self.value_dim

    @property
    def reach(self) -> Reach:
        """The state before a token is all that it reads."""
        return Reach(window=1, cell=self.cell)

    def first_cell(self, position: int) -> int:
        """The first cell that a step from this position on reads or writes."""
        return max(0, position - 1) // self.cell


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token leaves in the KV memory: in every layer, a key and a value of every key-value head.

    ``shared``: a value is the first ``value_dim`` numbers of its key and stored only there (the latent cache of MLA,
    one head a layer).  ``groups``: layers that share pages; none: all layers stand in one page and read everything.
    ``states``: what recurrent layers keep beside; layers are then those with keys and values, counted by themselves.
    A state is cut into parts of a page each, and every part is a group behind the others.
    """

    layers: int
    kv_heads: int
    key_dim: int  # even
    value_dim: int  # even
    shared: bool = False
    groups: tuple[LayerGroup, ...] = ()
    states: StateShape | None = None

    @classmethod
    def plain(cls, *, layers: int, kv_heads: int, head_dim: int) -> KvShape:
        """Keys and values of one size."""
        return cls(layers=layers, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim)

    def grouped(self, reaches: Sequence[Reach]) -> KvShape:
        """The same for layers that read so far back, one entry a layer."""
        return replace(self, groups=layer_groups(reaches))

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """Of every group, how far back its layers read; those of states come last."""
        own = tuple(group.reach for group in self.groups) or (EVERYTHING,)
        return own if self.states is None else own + (self.states.reach,) * self.state_parts

    @property
    def layer_groups(self) -> int:
        """Groups of layers with keys and values."""
        return len(self.groups) or 1

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
        return max((len(group.layers) for group in self.groups), default=self.layers)

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Of every layer: its group, and its place in that group's pages."""
        found = {
            layer: (group, place) for group, own in enumerate(self.groups) for place, layer in enumerate(own.layers)
        }
        return tuple(found.get(layer, (0, layer)) for layer in range(self.layers))

    @property
    def numbers(self) -> int:
        """That one token has room for in a page: in all layers of a group."""
        return self.page_layers * self.kv_heads * (self.key_dim + (0 if self.shared else self.value_dim))

    def head_bytes(self, dtype: str) -> int:
        """What one token leaves of each key-value head of a layer, kept in a type of ``kv_types.KV_TYPES``."""
        kind = KV_TYPES[dtype]
        widths = (self.key_dim,) if self.shared else (self.key_dim, self.value_dim)
        return sum(width * kind.number_bytes + kind.row_bytes for width in widths)

    def page_bytes(self, dtype: str, page_tokens: int = PAGE_TOKENS) -> int:
        """Of one page of a group of layers."""
        return self.page_layers * self.kv_heads * self.head_bytes(dtype) * page_tokens


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight matrix [N, K] in the backend's own layout.  Made once, in the zygote; read-only afterwards."""

    n: int
    k: int
    segments: tuple[int, ...]  # ends of the segments of K; (k,) for a plain sum
    data: Array
    nbytes: int


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
    tapped: tuple[int, ...] = ()  # hidden states behind so many layers are handed out, of the rows above
    taps_RW: NDArray[np.float32] | None = None  # where they go, side by side; None: nothing is handed out
    states_SW: NDArray[np.int32] | None = None
    """Pages of the states of each sequence, where layers keep them: all parts of its ``StateShape.first_cell``, then of
    the next cell, up to that of its last position."""
    adapters_S: NDArray[np.int32] | None = None  # slot of each sequence's adapter, below 0: none; None: nobody has one

    def features(self, width: int) -> NDArray[np.float32]:
        """What comes with every token.  Raises ValueError unless it is there, [T, width]."""
        if self.features_TW is None or self.features_TW.shape != (len(self.tokens_T), width):
            raise ValueError(f"a step needs features [{len(self.tokens_T)}, {width}]")
        return self.features_TW

    def hand_out(self, hidden_RD: NDArray[np.float32], place: int) -> None:
        """Put hidden states where they go.  Raises ValueError if there is no room."""
        rows, width = hidden_RD.shape
        if self.taps_RW is None or self.taps_RW.shape != (rows, width * len(self.tapped)):
            raise ValueError(f"a step needs room for taps [{rows}, {width * len(self.tapped)}]")
        self.taps_RW[:, place * width : (place + 1) * width] = hidden_RD

    def table_of(self, group: int, groups: int) -> NDArray[np.int32]:
        """The columns of one of ``groups`` groups."""
        width = self.table_SP.shape[1] // groups
        return self.table_SP[:, group * width : (group + 1) * width]
