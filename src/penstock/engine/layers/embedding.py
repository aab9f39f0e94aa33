"""What comes before the first layer, and what after the last."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.layers.norm import NormLayer
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.ops import Ops


class HiddenSource(Protocol):
    """Where the first layer's hidden state comes from."""

    def __call__(self, ops: Ops, batch: StepBatch) -> Array:
        """hidden [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class TokenEmbedding:
    """Rows of a table, times ``scale``; ``positions`` is a table of learned ones, which are added.  ``given_rows``: the
    batch may bring rows in place of some."""

    table: PackedLinear
    scale: float
    positions: PackedLinear | None
    given_rows: bool

    def __call__(self, ops: Ops, batch: StepBatch) -> Array:
        """hidden [T, D]."""
        hidden_TD = ops.embed(self.table, batch.tokens_T, self.scale)
        if self.given_rows:
            ops.place_rows(hidden_TD, batch)
        if self.positions is not None:
            ops.embed_add(self.positions, batch.positions_T, hidden_TD)
        return hidden_TD


@dataclass(frozen=True, slots=True)
class ReceivedHidden:
    """The hidden state of an earlier stage, which the batch brings as features of ``width`` numbers."""

    width: int

    def __call__(self, ops: Ops, batch: StepBatch) -> Array:
        """hidden [T, D]."""
        return ops.features(batch, self.width)


@dataclass(frozen=True, slots=True)
class OutputHead:
    """The last norm and the matrix of logits, which are multiplied by ``scale`` and soft-capped."""

    norm: NormLayer
    weight: PackedLinear
    scale: float = 1.0
    softcap: float | None = None

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        """hidden [R, V]."""
        logits_RV = ops.linear(self.norm(ops, hidden_RD), self.weight)
        if self.scale != 1.0:
            ops.scale(logits_RV, self.scale)
        if self.softcap is not None:
            ops.softcap(logits_RV, self.softcap)
        return logits_RV
