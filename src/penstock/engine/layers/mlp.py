"""Feed-forward blocks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.layers.linear import Linear, Output
from penstock.engine.layers.norm import Norm
from penstock.kernels.operands import Activation, Array, Gate
from penstock.kernels.ops import Ops


class Feed(Protocol):
    """A feed-forward block."""

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)) of the normed hidden state (arXiv:2002.05202); ``gate_up`` is one matrix,
    gate's rows first."""

    norm: Norm
    gate_up: Linear
    down: Output
    gate: Gate

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place."""
        gate_up_T2I = self.gate_up(ops, self.norm(ops, hidden_TD))
        self.down.add_to(ops, ops.gated(gate_up_T2I, self.gate), hidden_TD)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up(x))) of the normed hidden state."""

    norm: Norm
    up: Linear
    down: Output
    activation: Activation
    alpha: float = 1.0  # of silu

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place."""
        up_TI = self.up(ops, self.norm(ops, hidden_TD))
        self.down.add_to(ops, ops.activate(up_TI, self.activation, self.alpha), hidden_TD)
