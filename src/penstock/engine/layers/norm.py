"""What stands between the residual stream and a block's first product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.kernels.operands import Activation, Array
from penstock.kernels.ops import Ops


class Norm(Protocol):
    """A norm of the hidden state."""

    def __call__(self, ops: Ops, hidden_TD: Array) -> Array:
        """compute [T, D] of hidden [T, D]."""
        ...


@dataclass(frozen=True, slots=True)
class NoNorm:
    """The hidden state as it is, in the compute type."""

    def __call__(self, ops: Ops, hidden_TD: Array) -> Array:
        """compute [T, D] of hidden [T, D]."""
        return ops.activate(hidden_TD, Activation.NONE)


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Scales each row to unit mean square, then by ``weight`` [D] (arXiv:1910.07467)."""

    weight: Array
    eps: float

    def __call__(self, ops: Ops, hidden_TD: Array) -> Array:
        """compute [T, D] of hidden [T, D]."""
        return ops.rms_norm(hidden_TD, self.weight, self.eps)

    def add_to(self, ops: Ops, hidden_TD: Array, x_TD: Array) -> None:
        """hidden += norm(x), in place; x fp32."""
        ops.norm_add(hidden_TD, x_TD, self.weight, self.eps)


@dataclass(frozen=True, slots=True)
class LayerNorm:
    """Brings each row to mean 0 and variance 1, then scales and shifts it (arXiv:1607.06450)."""

    weight: Array
    bias: Array | None
    eps: float

    def __call__(self, ops: Ops, hidden_TD: Array) -> Array:
        """compute [T, D] of hidden [T, D]."""
        return ops.layer_norm(hidden_TD, self.weight, self.bias, self.eps)

    def in_place(self, ops: Ops, hidden_TD: Array) -> None:
        """hidden = norm(hidden): of encoders whose residual stream is normed."""
        ops.layer_norm_in_place(hidden_TD, self.weight, self.bias, self.eps)
