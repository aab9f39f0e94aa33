"""Products of packed weights, whatever form they have.  One of the parts that ``backend`` puts together.

A weight's ``data`` is a ``WeightForm``: what can be multiplied with, and rows for tables.  Here nothing knows which.

This module imports torch and triton.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from penstock.kernels.triton.matmul import Operand


class WeightForm(Protocol):
    """``PackedLinear.data``."""

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The outputs, in order."""
        ...

    def multiply(self, x_TK: Tensor, out_TN: Tensor, *, add: bool) -> None:
        """out = x W^T, or out += x W^T; x of the compute type."""
        ...

    def rows(self, ids_T: Tensor) -> Tensor:
        """fp32 [T, K]: the weights of these outputs, exactly."""
        ...

    def mixed(self, rows: int, *, in_tiles: bool) -> Operand | None:
        """All outputs, for products of so many rows that take them in any order; None: only as they are.

        ``in_tiles``: those of one tile lie in two tiles of the matrix at most.
        """
        ...
