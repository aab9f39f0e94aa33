"""Feed-forward blocks: dense, and of routed experts (arXiv:1701.06538, arXiv:2401.04088)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.engine.layers.norm import LinearLayer, NormLayer, OutputProjection
from penstock.kernels.operands import Activation, Array, Gate, PackedExperts, PackedLinear, Routing
from penstock.kernels.ops import Ops


class FeedForward(Protocol):
    """A feed-forward block."""

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place."""
        ...


@dataclass(frozen=True, slots=True)
class GatedMlp:
    """down(activation(gate(x)) * up(x)) of the normed hidden state (arXiv:2002.05202); ``gate_up`` is one matrix,
    gate's rows first."""

    norm: NormLayer
    gate_up: LinearLayer
    down: OutputProjection
    gate: Gate

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place."""
        gate_up_T2I = self.gate_up(ops, self.norm(ops, hidden_TD))
        self.down.add_to(ops, ops.gated(gate_up_T2I, self.gate), hidden_TD)


@dataclass(frozen=True, slots=True)
class PlainMlp:
    """down(activation(up(x))) of the normed hidden state."""

    norm: NormLayer
    up: LinearLayer
    down: OutputProjection
    activation: Activation
    alpha: float = 1.0  # of silu

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place."""
        up_TI = self.up(ops, self.norm(ops, hidden_TD))
        self.down.add_to(ops, ops.activate(up_TI, self.activation, self.alpha), hidden_TD)


@dataclass(frozen=True, slots=True)
class SharedExpert:
    """What every token passes besides its own experts."""

    gate_up: PackedLinear
    down: PackedLinear
    gate: PackedLinear | None = None  # [1, D]: of its output, which is else added as it is

    def add_to(self, ops: Ops, x_TD: Array, kind: Gate, hidden_TD: Array) -> None:
        """hidden += expert(x), in place."""
        inner_TI = ops.gated(ops.linear(x_TD, self.gate_up), kind)
        if self.gate is None:
            ops.linear_add(inner_TI, self.down, hidden_TD)
        else:
            ops.gated_add(hidden_TD, ops.linear(inner_TI, self.down), ops.linear(x_TD, self.gate))


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutedExperts:
    """The experts that a token's router chooses, each weighed, and the shared one."""

    norm: NormLayer
    router: LinearLayer
    choice_bias: Array | None
    routing: Routing
    experts: PackedExperts
    gate: Gate
    shared: SharedExpert | None

    def add_to(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden += block(hidden), in place: the experts' sum, then the shared one."""
        x_TD = self.norm(ops, hidden_TD)
        routes = ops.route(self.router(ops, x_TD), self.routing, self.choice_bias)
        ops.experts_add(x_TD, routes, self.experts, self.gate, hidden_TD)
        if self.shared is not None:
            self.shared.add_to(ops, x_TD, self.gate, hidden_TD)
