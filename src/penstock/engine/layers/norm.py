"""Root-mean-square norm (arXiv:1910.07467)."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.kernels.ops import Array, Ops


@dataclass(frozen=True, slots=True)
class RmsNorm:
    """Scales each row to unit mean square, then by ``weight`` [D]."""

    weight: Array
    eps: float

    def __call__(self, ops: Ops, hidden_TD: Array) -> Array:
        """compute [T, D] of hidden [T, D]."""
        return ops.rms_norm(hidden_TD, self.weight, self.eps)
