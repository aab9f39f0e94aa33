"""Gated feed-forward block (SwiGLU, arXiv:2002.05202)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.layers.norm import RmsNorm
from penstock.kernels.ops import Array, Ops, PackedLinear


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(silu(gate(x)) * up(x)) of the normed hidden state; ``gate_up`` is one matrix, gate's rows first."""

    norm: RmsNorm
    gate_up: PackedLinear
    down: PackedLinear

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place."""
        gate_up_T2I = ops.linear(self.norm(ops, hidden_TD), self.gate_up)
        ops.linear_add(ops.gated(gate_up_T2I), self.down, hidden_TD)
