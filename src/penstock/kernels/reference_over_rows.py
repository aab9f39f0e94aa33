"""The oracle's operations that work row by row: tiles of rows through the functions of ``reference_rows``.

One of the parts that ``reference`` puts together.  This module imports torch.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.kinds import SILU, Activation, Gate
from penstock.kernels.operands import StepBatch
from penstock.kernels.reference_rows import activated, gated, gated_norm, layer_norm, rms_norm, softcapped
from penstock.kernels.reference_tiles import TorchForm, numpy_of


class ReferenceRows:
    """See ``ops_rows.RowOps``."""

    def __init__(self, form: TorchForm) -> None:
        self._form = form

    def features(self, batch: StepBatch, width: int) -> Tensor:
        """See ``Ops.features``.  Raises ValueError where the batch brings none of that width."""
        return self._form.tensor(np.array(batch.features(width), np.float32))

    def tap(self, hidden_TD: Tensor, batch: StepBatch, place: int) -> None:
        """See ``Ops.tap``.  Raises ValueError where there is not enough room."""
        if batch.taps_RW is not None:
            batch.hand_out(numpy_of(self.rows(hidden_TD, batch.sample_rows_R)), place)

    def place_rows(self, hidden_TD: Tensor, batch: StepBatch) -> None:
        """See ``Ops.place_rows``."""
        if batch.given is not None:
            hidden_TD[self._form.indices(batch.given.rows_G)] = batch.given.values_GD

    def joined_rows(self, x_TK: Tensor, count: int) -> Tensor:
        """See ``Ops.joined_rows``."""
        return x_TK.reshape(-1, count * x_TK.shape[1])

    def rows(self, x_TD: Tensor, rows_R: NDArray[np.int32]) -> Tensor:
        """See ``Ops.rows``."""
        return x_TD[self._form.indices(rows_R)]

    def rms_norm(self, hidden_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
        """See ``Ops.rms_norm``."""
        return self._form.tiles.map(lambda tile: rms_norm(tile, weight_D, eps), hidden_TD).to(self._form.dtype)

    def norm_add(self, hidden_TD: Tensor, x_TD: Tensor, weight_D: Tensor, eps: float) -> None:
        """See ``Ops.norm_add``."""
        hidden_TD += self._form.tiles.map(lambda tile: rms_norm(tile, weight_D, eps), x_TD)

    def layer_norm(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> Tensor:
        """See ``Ops.layer_norm``."""
        return self._form.tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD).to(
            self._form.dtype
        )

    def layer_norm_in_place(self, hidden_TD: Tensor, weight_D: Tensor, bias_D: Tensor | None, eps: float) -> None:
        """See ``Ops.layer_norm_in_place``."""
        hidden_TD.copy_(self._form.tiles.map(lambda tile: layer_norm(tile, weight_D, bias_D, eps), hidden_TD))

    def norm_heads(self, x_TN: Tensor, weight_C: Tensor, eps: float, *, first: int, count: int) -> None:
        """See ``Ops.norm_heads``."""
        size = len(weight_C)

        def norm(tile: Tensor) -> Tensor:
            groups = tile.view(-1, count, size)
            return (groups * torch.rsqrt(groups.square().mean(dim=2, keepdim=True) + eps) * weight_C).flatten(1)

        columns = slice(first, first + count * size)
        x_TN[:, columns] = self._form.tiles.map(norm, x_TN[:, columns])

    def gated(self, gate_up_T2I: Tensor, kind: Gate = SILU) -> Tensor:
        """See ``Ops.gated``."""
        return self._form.tiles.map(lambda tile: gated(tile, kind), gate_up_T2I).to(self._form.dtype)

    def activate(self, x_TI: Tensor, kind: Activation, alpha: float = 1.0) -> Tensor:
        """See ``Ops.activate``."""
        return self._form.tiles.map(lambda tile: activated(tile, kind, alpha), x_TI).to(self._form.dtype)

    def add(self, hidden_TD: Tensor, x_TD: Tensor) -> None:
        """See ``Ops.add``."""
        hidden_TD += x_TD

    def add_bias(self, x_TN: Tensor, bias_N: Tensor) -> None:
        """See ``Ops.add_bias``."""
        x_TN += bias_N

    def scale(self, x_TN: Tensor, factor: float) -> None:
        """See ``Ops.scale``."""
        x_TN *= factor

    def softcap(self, x_TN: Tensor, cap: float) -> None:
        """See ``Ops.softcap``."""
        x_TN.copy_(self._form.tiles.map(lambda tile: softcapped(tile, cap), x_TN))

    def gated_norm(self, x_TN: Tensor, gate_TM: Tensor, weight_C: Tensor, eps: float, *, first: int) -> Tensor:
        """See ``Ops.gated_norm``."""
        both_TNN = torch.cat([x_TN, gate_TM[:, first : first + x_TN.shape[1]]], dim=1)
        return self._form.tiles.map(lambda tile: gated_norm(tile, weight_C, eps), both_TNN).to(self._form.dtype)

    def sigmoid_gated(self, x_TN: Tensor, gate_TN: Tensor) -> Tensor:
        """See ``Ops.sigmoid_gated``."""
        gated_TN = self._form.tiles.map(torch.sigmoid, gate_TN) * x_TN.view(gate_TN.shape).float()
        return gated_TN.to(self._form.dtype)

    def gated_add(self, hidden_TD: Tensor, x_TD: Tensor, gate_T1: Tensor) -> None:
        """See ``Ops.gated_add``."""
        hidden_TD += self._form.tiles.map(torch.sigmoid, gate_T1) * x_TD
