"""A model whose products have what adapters add to them.

The layers know nothing of it: the operations they are given add what an adapter adds right after the product.  Recorded
as a program of its own, so that steps without adapters stay what they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.engine.models.port import Model
from penstock.kernels.lora import AdapterTable
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.ops import Ops


class AdaptedModel:
    """See ``engine.models.port.Model``.  ``products``: those of the model that ``table`` was made for, in its order."""

    def __init__(self, model: Model, table: AdapterTable, products: Mapping[str, PackedLinear]) -> None:
        self._model = model
        self._table = table
        self._products = tuple(products.values())
        self._sites = {id(weight): site for site, weight in enumerate(self._products)}

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        adding = cast(Ops, _AddingOps(ops, batch, self._table, self._sites))
        return self._model.forward(adding, batch, kv)

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        return self._model.logits(ops, hidden_RD)


class _AddingOps:
    """The operations of one step; what is not said here is the backend's own."""

    def __init__(self, ops: Ops, batch: StepBatch, table: AdapterTable, sites: Mapping[int, int]) -> None:
        self._ops = ops
        self._batch = batch
        self._table = table
        self._sites = sites
        self._wanted = False  # only wanted rows are left

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        """See ``Ops.linear``."""
        out_TN = self._ops.linear(x_TK, weight)
        self._add(x_TK, weight, out_TN)
        return out_TN

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        """See ``Ops.linear_add``."""
        self._ops.linear_add(x_TK, weight, hidden_TN)
        self._add(x_TK, weight, hidden_TN)

    def rows(self, x_TD: Array, rows_R: NDArray[np.int32]) -> Array:
        """See ``Ops.rows``.  A model goes on with the wanted rows once it has picked them."""
        self._wanted = self._wanted or rows_R is self._batch.sample_rows_R
        return self._ops.rows(x_TD, rows_R)

    def _add(self, x_TK: Array, weight: PackedLinear, out_TN: Array) -> None:
        site = self._sites.get(id(weight))
        if site is not None:
            self._ops.lora_add(x_TK, self._batch, self._table, site, out_TN, wanted=self._wanted)
