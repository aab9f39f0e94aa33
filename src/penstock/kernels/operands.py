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
from penstock.reach import EVERYTHING, Reach

Array = Any
"""An array of the backend: never looked into above ``kernels``."""

PLAIN_SEGMENTS = 1
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


@dataclass(frozen=True, slots=True, kw_only=True)
class KvShape:
    """What one token leaves in the KV memory: in every layer, a key and a value of every key-value head.

    ``shared``: a value is the first ``value_dim`` numbers of its key and stored only there (the latent cache of MLA,
    one head a layer).  ``groups``: layers that share pages; none: all layers stand in one page and read everything.
    """

    layers: int
    kv_heads: int
    key_dim: int  # even
    value_dim: int  # even
    shared: bool = False
    groups: tuple[LayerGroup, ...] = ()

    @classmethod
    def plain(cls, *, layers: int, kv_heads: int, head_dim: int) -> KvShape:
        """Keys and values of one size."""
        return cls(layers=layers, kv_heads=kv_heads, key_dim=head_dim, value_dim=head_dim)

    def grouped(self, reaches: Sequence[Reach]) -> KvShape:
        """The same for layers that read so far back, one entry a layer."""
        return replace(self, groups=layer_groups(reaches))

    @property
    def reaches(self) -> tuple[Reach, ...]:
        """Of every group, how far back its layers read."""
        return tuple(group.reach for group in self.groups) or (EVERYTHING,)

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
