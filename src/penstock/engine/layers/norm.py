"""Norms, and the products that may follow or precede them: with a bias, a norm, or into the residual stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from penstock.kernels.operands import Activation, Array, PackedLinear
from penstock.kernels.ops import Ops


class NormLayer(Protocol):
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


@dataclass(frozen=True, slots=True)
class LinearLayer:
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
class OutputProjection:
    """A block's last product, which goes to the residual stream, normed on the way where the family wants it."""

    linear: LinearLayer
    norm: RmsNorm | None = None

    def add_to(self, ops: Ops, x_TK: Array, hidden_TD: Array) -> None:
        """hidden += norm(x W^T + bias), in place."""
        if self.norm is not None:
            self.norm.add_to(ops, hidden_TD, self.linear(ops, x_TK))
        elif self.linear.bias is not None:
            ops.add(hidden_TD, self.linear(ops, x_TK))
        else:
            ops.linear_add(x_TK, self.linear.weight, hidden_TD)
