"""The oracle's operations over packed matrices.  One of the parts that ``reference`` puts together.

This module imports torch.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.errors import KernelError
from penstock.kernels.adapters import AdapterTable, row_slots
from penstock.kernels.kinds import Gate
from penstock.kernels.operands import PackedLinear, StepBatch
from penstock.kernels.reference_adapters import ReferenceAdapters, lora_add
from penstock.kernels.reference_experts import Chosen, mixed, route
from penstock.kernels.reference_tiles import TorchForm, numpy_of
from penstock.kernels.routing import PackedExperts, Routes, Routing


class ReferenceProducts:
    """See ``ops_products.ProductOps``."""

    def __init__(self, form: TorchForm, gated: Callable[[Tensor, Gate], Tensor]) -> None:
        """``gated``: that of the rows."""
        self._form = form
        self._gated = gated

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Tensor:
        """See ``Ops.embed``."""
        ids_T = self._form.indices(tokens_T)
        return torch.cat([part[ids_T] for part in table.data], dim=1) * scale

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Tensor) -> None:
        """See ``Ops.embed_add``."""
        hidden_TD += self.embed(table, positions_T)

    def linear(self, x_TK: Tensor, weight: PackedLinear) -> Tensor:
        """See ``Ops.linear``."""
        sums, begin = [], 0
        for part, end in zip(weight.data, weight.segments, strict=True):
            sums.append(self._form.tiles.product(x_TK[:, begin:end].float(), part))
            begin = end
        while len(sums) > 1:
            sums = [sums[i] + sums[i + 1] for i in range(0, len(sums), 2)]
        return sums[0]

    def linear_add(self, x_TK: Tensor, weight: PackedLinear, hidden_TN: Tensor) -> None:
        """See ``Ops.linear_add``."""
        hidden_TN += self.linear(x_TK, weight)

    def lora_add(
        self, x_TK: Tensor, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Tensor, *, wanted: bool
    ) -> None:
        """See ``Ops.lora_add``."""
        if not isinstance(adapters, ReferenceAdapters):
            raise KernelError("the adapters are another backend's")
        slots_T = row_slots(batch, wanted=wanted)
        lora_add(x_TK, slots_T, adapters, site, out_TN, linear=self.linear)

    def heads_linear(self, x_THK: Tensor, weight: PackedLinear, *, heads: int) -> Tensor:
        """See ``Ops.heads_linear``."""
        x_THK = x_THK.view(len(x_THK), heads, weight.k)
        (whole,) = weight.data
        products = [
            self._form.tiles.product(x_THK[:, head].float(), rows.contiguous())
            for head, rows in enumerate(whole.chunk(heads))
        ]
        return torch.cat(products, dim=1).to(self._form.dtype)

    def route(self, logits_TE: Tensor, routing: Routing, bias_E: Tensor | None = None) -> Routes:
        """See ``Ops.route``."""
        rows = [route(row_1E, routing, bias_E) for row_1E in logits_TE.clone()[:, None]]
        ids_TK, weights_TK = torch.cat([row.ids for row in rows]), torch.cat([row.weights for row in rows])
        return Routes(Chosen(ids_TK, weights_TK), routing.top_k)

    def experts_add(self, x_TK: Tensor, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Tensor) -> None:
        """See ``Ops.experts_add``."""
        hidden_TD += mixed(
            x_TK, routes.data, experts, linear=self.linear, gated=lambda wide_RN: self._gated(wide_RN, kind)
        )

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See ``Ops.routes_to_numpy``."""
        return routes.data.ids.cpu().numpy().astype(np.int32), numpy_of(routes.data.weights)
