"""The C++ kernels over packed matrices, whatever form these have.  One of the parts that ``native`` puts together."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.adapters import AdapterTable, row_slots
from penstock.kernels.kinds import Gate
from penstock.kernels.native_arguments import NativeForm, gate_words, routing_words
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.routing import PackedExperts, Routes, Routing


class NativeProducts:
    """See ``ops_products.ProductOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._kernels = _native.Kernels(form.family, form.compute_dtype)
        self._attention = _native.AttentionKernels(form.family, form.compute_dtype)
        self._compressed = _native.CompressedKernels(form.family)
        self._experts = _native.ExpertKernels(form.family, form.compute_dtype)
        self._quantised = _native.QuantKernels(form.family, form.compute_dtype)
        self._rows = _native.RowKernels(form.family, form.compute_dtype)
        self._adapters = _native.AdapterKernels(form.family, form.compute_dtype)

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Array:
        """See ``Ops.embed``."""
        hidden_TD = self._form.buffers.empty((len(tokens_T), table.k), np.float32)
        self._kernels_of(table).embed(table.data, tokens_T, hidden_TD)
        if scale != 1.0:
            self._rows.form(hidden_TD, scale, 0.0)
        return hidden_TD

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Array) -> None:
        """See ``Ops.embed_add``."""
        self._rows.add(self.embed(table, positions_T), hidden_TD)

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        """See ``Ops.linear``."""
        out_TN = self._form.buffers.empty((x_TK.shape[0], weight.n), np.float32)
        self._kernels_of(weight).linear(x_TK, weight.data, out_TN, False)
        return out_TN

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        """See ``Ops.linear_add``."""
        self._kernels_of(weight).linear(x_TK, weight.data, hidden_TN, True)

    def lora_add(
        self, x_TK: Array, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Array, *, wanted: bool
    ) -> None:
        """See ``Ops.lora_add``."""
        self._adapters.add(x_TK, row_slots(batch, wanted=wanted), adapters.data, site, out_TN)

    def heads_linear(self, x_THK: Array, weight: PackedLinear, *, heads: int) -> Array:
        """See ``Ops.heads_linear``."""
        out = self._form.buffers.empty((x_THK.shape[0], weight.n), self._form.dtype)
        self._attention.heads_linear(x_THK, weight.data, heads, out)
        return out

    def route(self, logits_TE: Array, routing: Routing, bias_E: Array | None = None) -> Routes:
        """See ``Ops.route``: ids, then weights, 32 bits each."""
        routes = np.empty((len(logits_TE), 2 * routing.top_k), np.uint32)
        self._experts.route(logits_TE, routing_words(routing), bias_E, routes)
        return Routes(routes, routing.top_k)

    def experts_add(self, x_TK: Array, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Array) -> None:
        """See ``Ops.experts_add``."""
        self._experts.add(x_TK, routes.data, experts.data, gate_words(kind), hidden_TD)

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """See ``Ops.routes_to_numpy``."""
        ids, weights = np.split(routes.data, 2, axis=1)
        return ids.astype(np.int32), np.ascontiguousarray(weights).view(np.float32)

    def _kernels_of(self, weight: PackedLinear) -> Any:
        """Those that read weights of this form."""
        forms = {_native.CompressedWeights: self._compressed, _native.QuantWeights: self._quantised}
        return forms.get(type(weight.data), self._kernels)
