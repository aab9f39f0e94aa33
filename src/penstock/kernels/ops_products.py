"""Operations over packed matrices: tables, products, adapters, and experts with their routing.

Part of ``ops.Ops``, which says what the letters in the names mean.  Here goes whatever reads a ``PackedLinear``.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.adapters import AdapterTable
from penstock.kernels.kinds import Gate
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.routing import PackedExperts, Routes, Routing


class ProductOps(Protocol):
    """x W^T and its kin."""

    def embed(self, table: PackedLinear, tokens_T: NDArray[np.int32], scale: float = 1.0) -> Array:
        """hidden [T, D]: rows of the table, times ``scale`` in fp32."""
        ...

    def embed_add(self, table: PackedLinear, positions_T: NDArray[np.int32], hidden_TD: Array) -> None:
        """hidden += rows of the table, in place: learned positions.  Recorded: the batch's ``positions_T`` only."""
        ...

    def linear(self, x_TK: Array, weight: PackedLinear) -> Array:
        """hidden [T, N] = x W^T, summed in fp32 over K, segment by segment."""
        ...

    def linear_add(self, x_TK: Array, weight: PackedLinear, hidden_TN: Array) -> None:
        """hidden += x W^T, in place: the product is finished before it is added."""
        ...

    def lora_add(
        self, x_TK: Array, batch: StepBatch, adapters: AdapterTable, site: int, out_TN: Array, *, wanted: bool
    ) -> None:
        """out += scale * up (down x), in place, for rows whose sequence has an adapter (``batch.adapters_S``) that adds
        to this product; all others stay as they are, to the bit.

        Rows are tokens of the batch, or wanted rows.  down x is summed in the product's segments and rounded once to
        the compute type, up is summed over the rank, both in fp32; the rest is one fused multiply and add."""

    def heads_linear(self, x_THK: Array, weight: PackedLinear, *, heads: int) -> Array:
        """compute [T, H N]: head h of x times rows [h N, (h + 1) N) of a weight [H N, K] (plain, one segment), each sum
        in fp32 over K from low to high, rounded once."""
        ...

    def route(self, logits_TE: Array, routing: Routing, bias_E: Array | None = None) -> Routes:
        """Each token's experts and their weights, by fp32 logits; ``bias_E`` (a vector) matters for the choice only."""
        ...

    def experts_add(self, x_TK: Array, routes: Routes, experts: PackedExperts, kind: Gate, hidden_TD: Array) -> None:
        """hidden += sum over a token's experts of weight * (down(gated(gate_up(x) + bias)) + bias), in place.

        Rows are grouped by expert; an expert that nobody chose is not read.  A token's experts are summed in fp32, by
        ascending id, and the finished sum is added.
        """
        ...

    def routes_to_numpy(self, routes: Routes) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """ids [T, top_k] and weights [T, top_k] (tests and tools)."""
        ...
