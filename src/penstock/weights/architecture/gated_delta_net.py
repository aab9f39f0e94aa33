"""A gated delta net (arXiv:2412.06464) as data, and which tensors its weights are made of.

``weights.architecture.decoder`` has it as one kind of a layer's first block.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from penstock.kernels.operands import StateShape, segment_ends
from penstock.weights.architecture.spec import ModelDetails
from penstock.weights.architecture.tensor_layout import HeadGroups, Matrix, TensorPart, Vector


class GatedDeltaNetConfig(ModelDetails, frozen=True, kw_only=True, tag="Delta"):
    """A recurrent block: queries, keys and values go through a short convolution, then each head's state changes by
    the delta rule; what is read of it is normed and gated."""

    key_heads: int
    heads: int  # of values, a multiple of key_heads
    key_dim: int
    value_dim: int
    taps: int  # of the convolution

    rope: ClassVar[None] = None
    window: ClassVar[None] = None
    chunk: ClassVar[None] = None

    def states(self, layers: int) -> StateShape:
        """The states that ``layers`` such layers keep of a sequence."""
        return StateShape(
            layers=layers,
            key_heads=self.key_heads,
            heads=self.heads,
            key_dim=self.key_dim,
            value_dim=self.value_dim,
            taps=self.taps,
        )

    @property
    def keys(self) -> int:
        """Numbers of all keys of a token."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Numbers of all values of a token."""
        return self.heads * self.value_dim

    @property
    def channels(self) -> int:
        """Queries, keys and values: what is convolved."""
        return 2 * self.keys + self.values


@dataclass(frozen=True, slots=True)
class GatedDeltaNetTensors:
    """The block of one layer: tensors begin with ``tensors``, weights with ``weights``.

    In the tensors queries, keys, values and gates lie together, key head by key head, and so do both small gates.
    """

    delta: GatedDeltaNetConfig
    tensors: str
    weights: str
    hidden: int

    def layout(self) -> list[Matrix | Vector]:
        """``delta_in``: rows of queries, keys, values, gates [H value_dim], and of each head's gates of the change and
        of the decay; ``conv`` [channels, taps], ``rates`` (logarithms) and ``shifts`` of the decay, ``delta_norm``,
        ``out``."""
        own = self.delta
        ends = segment_ends(own.values, own.value_dim)
        return [
            Matrix(f"{self.weights}delta_in", tuple(self._inward())),
            Vector(f"{self.weights}conv", (self._part("conv1d.weight", own.channels, 1, own.taps, flat=True),)),
            Vector(f"{self.weights}rates", (self._part("A_log", own.heads),)),
            Vector(f"{self.weights}shifts", (self._part("dt_bias", own.heads),)),
            Vector(f"{self.weights}delta_norm", (self._part("norm.weight", own.value_dim),)),
            Matrix(f"{self.weights}out", (self._part("out_proj.weight", self.hidden, own.values),), segments=ends),
        ]

    def _inward(self) -> Sequence[TensorPart]:
        own = self.delta
        each = own.heads // own.key_heads  # heads that share queries and keys
        wide = self._by_head("in_proj_qkvz", own.key_dim, own.key_dim, each * own.value_dim, each * own.value_dim)
        return [*wide, *self._by_head("in_proj_ba", each, each)]

    def _by_head(self, name: str, *sizes: int) -> list[TensorPart]:
        """Parts of a tensor whose rows lie key head by key head."""
        heads, rows = self.delta.key_heads, sum(sizes)
        parts, first = [], 0
        for size in sizes:
            groups = HeadGroups(heads, first, first + size)
            parts.append(self._part(f"{name}.weight", heads * rows, self.hidden, groups=groups))
            first += size
        return parts

    def _part(self, name: str, *shape: int, groups: HeadGroups | None = None, flat: bool = False) -> TensorPart:
        return TensorPart(f"{self.tensors}linear_attn.{name}", shape, groups=groups, flat=flat)
