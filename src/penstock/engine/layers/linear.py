"""Matrix products with what may follow them: a bias, a norm, the residual stream."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.layers.norm import RmsNorm
from penstock.kernels.operands import Array, PackedLinear
from penstock.kernels.ops import Ops


@dataclass(frozen=True, slots=True)
class Linear:
    """x W^T + bias."""

    weight: PackedLinear
    bias: Array | None = None

    def __call__(self, ops: Ops, x_TK: Array) -> Array:
        """hidden [T, N] of compute [T, K]."""
        out_TN = ops.linear(x_TK, self.weight)
        if self.bias is not None:
            ops.add_bias(out_TN, self.bias)
        return out_TN


@dataclass(frozen=True, slots=True)
class Output:
    """A block's last product, which goes to the residual stream, normed on the way where the family wants it."""

    linear: Linear
    norm: RmsNorm | None = None

    def add_to(self, ops: Ops, x_TK: Array, hidden_TD: Array) -> None:
        """hidden += norm(x W^T + bias), in place."""
        if self.norm is not None:
            self.norm.add_to(ops, hidden_TD, self.linear(ops, x_TK))
        elif self.linear.bias is not None:
            ops.add(hidden_TD, self.linear(ops, x_TK))
        else:
            ops.linear_add(x_TK, self.linear.weight, hidden_TD)
