"""Plain weights: a matrix [N, K] of the compute type as it lies in its file.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.triton.matmul import Operand, ends_tensor, multiply, tile_of
from penstock.kernels.triton.numerics import TritonContext, dot


@triton.jit
def plain_step(sums_TN, x_TK, weight, outputs_N, k, end, DEPTH: tl.constexpr, EVEN: tl.constexpr):
    """``weight``: the matrix and its row's stride."""
    columns_K = k + tl.arange(0, DEPTH)
    at_NK = weight[0] + outputs_N.to(tl.int64)[:, None] * weight[1] + columns_K[None, :]
    if EVEN:
        w_NK = tl.load(at_NK)
    else:
        w_NK = tl.load(at_NK, mask=(columns_K < end)[None, :], other=0.0)
    return dot(x_TK, tl.trans(w_NK), sums_TN)


@dataclass(frozen=True, slots=True)
class PlainWeights:
    """``WeightForm`` of a matrix in the compute type."""

    form: TritonContext
    matrix_NK: Tensor
    operands: tuple[Operand, ...]

    @classmethod
    def over(cls, form: TritonContext, matrix_NK: Tensor, ends: tuple[int, ...]) -> PlainWeights:
        """Weights over a matrix on the device, which is not copied."""
        return cls(form, matrix_NK, (plain_operand(form, matrix_NK, ends),))

    def multiply(self, x_TK: Tensor, out_TN: Tensor, *, add: bool) -> None:
        multiply(self.form, x_TK, self.operands[0], out_TN, add=add)

    def mixed(self, rows: int, *, in_tiles: bool) -> Operand | None:
        return self.operands[0]

    def rows(self, ids_T: Tensor) -> Tensor:
        return self.matrix_NK[ids_T].float()

    @property
    def order_K(self) -> None:  # noqa: N802
        return

    @classmethod
    def stacked(cls, forms: Sequence[PlainWeights]) -> Operand | None:
        tall_NK = adopt([form.matrix_NK for form in forms])
        own = forms[0].operands[0]
        return replace(own, n=len(tall_NK), arguments=(tall_NK, tall_NK.stride(0)))


def adopt(parts: Sequence[Tensor]) -> Tensor:
    """One tensor of all of them, one below the other; each becomes a view of its place there, and frees its own."""
    whole = torch.cat(list(parts))
    first = 0
    for part in parts:
        stop = first + len(part)
        part.set_(whole[first:stop])  # type: ignore[call-overload]
        first = stop
    return whole


def plain_operand(form: TritonContext, matrix_NK: Tensor, ends: tuple[int, ...], *, first: int = 0) -> Operand:
    """The matrix as something to multiply with; its outputs begin at column ``first`` of the result."""
    n, k = matrix_NK.shape
    tile = tile_of(ends, form.dtype)
    arguments = (matrix_NK, matrix_NK.stride(0))
    return Operand(n, k, len(ends), ends_tensor(form, ends), tile, plain_step, arguments, first)
