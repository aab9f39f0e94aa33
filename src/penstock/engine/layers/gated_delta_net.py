"""Gated delta net (arXiv:2412.06464): a recurrent block, whose state is all that it keeps of a sequence."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.layers.norm import NormLayer, OutputProjection, RmsNorm
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.ops import Ops


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDeltaNet:
    """Recurrent block ``layer`` of a model, counted among those.

    ``inward`` is one matrix: queries, keys, values, gates of the values, and of every head a gate of the change and one
    of the decay.  ``taps`` [K, channels], ``rates`` and ``shifts`` of the decay are vectors.
    """

    layer: int
    heads: int
    channels: int  # queries, keys and values
    norm: NormLayer
    inward: PackedLinear
    taps: Array
    rates: Array
    shifts: Array
    value_norm: RmsNorm
    out: OutputProjection

    def write(self, ops: Ops, hidden_TD: Array, batch: StepBatch, kv: Array) -> tuple[Array, Array]:
        """The state takes these tokens in; what they read of it, hidden [T, H value_dim], and what gates that."""
        wide_TN = ops.linear(self.norm(ops, hidden_TD), self.inward)
        qkv_TC = ops.causal_conv(wide_TN, self.taps, kv, self.layer, batch)
        read_TV = ops.delta_rule(
            qkv_TC,
            wide_TN,
            kv,
            self.layer,
            batch,
            rates_H=self.rates,
            shifts_H=self.shifts,
            beta=self.inward.n - 2 * self.heads,
            decay=self.inward.n - self.heads,
        )
        return read_TV, wide_TN

    def mix(self, ops: Ops, read: tuple[Array, Array], batch: StepBatch, kv: Array) -> Array:
        """What was read, normed head by head and gated; compute [T, H value_dim]."""
        read_TV, wide_TN = read
        return ops.gated_norm(read_TV, wide_TN, self.value_norm.weight, self.value_norm.eps, first=self.channels)

    def add_to(self, ops: Ops, mixed_TK: Array, hidden_TD: Array) -> None:
        """hidden += output projection, in place."""
        self.out.add_to(ops, mixed_TK, hidden_TD)
