"""Products of packed weights, whatever form they have.  One of the parts that ``backend`` puts together.

A weight's ``data`` is a ``WeightForm``: what can be multiplied with, and rows for tables.  Here nothing knows which.

This module imports torch and triton.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.lora import AdapterTable
from penstock.kernels.operands import Gate, PackedExperts, PackedLinear, Routes, Routing, StepBatch
from penstock.kernels.reference.tiles import numpy_of
from penstock.kernels.triton.adapters import TritonAdapters
from penstock.kernels.triton.experts import Experts
from penstock.kernels.triton.form import TritonForm
from penstock.kernels.triton.matmul import Operand, multiply
from penstock.kernels.triton.routing import chosen_experts


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


class TritonProducts:
    """See ``ops_products.ProductOps``."""

    def __init__(self, form: TritonForm, gated: Callable[[Tensor, Gate], Tensor]) -> None:
        """``gated``: that of the rows."""
        self._form = form
        self._gated = gated

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32] | Tensor, scale: float = 1.0) -> Tensor:
        """See ``Ops.embed``; the ids may be on the device already."""
        own: WeightForm = table.data
        rows_TD = own.rows(self._form.integers(tokens_T).long())
        return rows_TD if scale == 1.0 else rows_TD * scale

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32] | Tensor, hidden_TD: Tensor) -> None:
        """See ``Ops.embed_add``."""
        hidden_TD += self.embed(table, positions_T)

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        """See ``Ops.linear``.  Raises ValueError for an input of another width."""
        out_TN = self._form.empty((len(x_TK), weight.n))
        self._multiply(x_TK, weight, out_TN, add=False)
        return out_TN

    def linear_add(self, x_TK: Tensor, weight: PackedLinear, hidden_TN: Tensor) -> None:
        """See ``Ops.linear_add``."""
        self._multiply(x_TK, weight, hidden_TN, add=True)

    def heads_linear(self, x_THK: Tensor, weight: PackedLinear, *, heads: int) -> Tensor:
        """See ``Ops.heads_linear``.  Raises KernelError for weights that are not plain."""
        operands = weight.data.operands
        if len(operands) > 1 or len(weight.segments) > 1:
            raise KernelError("products of heads need a plain weight of one segment")
        out_TN = self._form.empty((len(x_THK), weight.n), self._form.dtype)
        x_TK = x_THK.to(self._form.dtype).reshape(len(x_THK), heads * weight.k)
        multiply(self._form, x_TK, operands[0], out_TN, add=False, heads=heads)
        return out_TN

    def lora_add(
        self, x_TK: Tensor, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Tensor, *, wanted: bool
    ) -> None:
        """See ``Ops.lora_add``."""
        if not isinstance(adapters, TritonAdapters):
            raise KernelError("the adapters are another backend's")
        adapters.add(x_TK, batch, site, out_TN, wanted=wanted)

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> Routes:
        """See ``Ops.route``."""
        return Routes(chosen_experts(self._form, logits_TE, routing, bias_E), routing.top_k)

    def experts_add(self, x_TK: Tensor, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Tensor) -> None:
        """See ``Ops.experts_add``."""
        own = Experts(self._form, gated=lambda wide_RN: self._gated(wide_RN, kind))
        own.add(x_TK, routes.data, experts, hidden_TD)

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See ``Ops.routes_to_numpy``."""
        return routes.data.ids.cpu().numpy().astype(np.int32), numpy_of(routes.data.weights)

    def _multiply(self, x_TK: Tensor, weight: PackedLinear, out_TN: Tensor, *, add: bool) -> None:
        if x_TK.ndim != 2 or x_TK.shape[1] != weight.k:
            raise ValueError(f"an input {list(x_TK.shape)} does not fit a weight of {weight.k} columns")
        own: WeightForm = weight.data
        own.multiply(x_TK.to(self._form.dtype), out_TN, add=add)
