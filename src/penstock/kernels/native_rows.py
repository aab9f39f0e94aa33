"""The C++ kernels that work row by row.  One of the parts that ``native`` puts together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.kinds import SILU, Activation, Gate
from penstock.kernels.native_arguments import ACTIVATIONS, NativeForm, gate_words
from penstock.kernels.operands import Array, StepBatch


class NativeRows:
    """See ``ops_rows.RowOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._kernels = _native.Kernels(form.family, form.compute_dtype)
        self._attention = _native.AttentionKernels(form.family, form.compute_dtype)
        self._rows = _native.RowKernels(form.family, form.compute_dtype)
        self._states = _native.StateKernels(form.family, form.compute_dtype)

    def features(self, batch: StepBatch, width: int) -> Array:
        """See ``Ops.features``.  Raises ValueError where the batch brings none of that width."""
        return np.array(batch.features(width), np.float32)

    def tap(self, hidden_TD: Array, batch: StepBatch, place: int) -> None:
        """See ``Ops.tap``.  Raises ValueError where there is not enough room."""
        if batch.taps_RW is not None:
            batch.hand_out(hidden_TD[batch.sample_rows_R], place)

    def place_rows(self, hidden_TD: Array, batch: StepBatch) -> None:
        """See ``Ops.place_rows``."""
        if batch.given is not None:
            hidden_TD[batch.given.rows_G] = batch.given.values_GD

    def joined_rows(self, x_TK: Array, count: int) -> Array:
        """See ``Ops.joined_rows``."""
        return x_TK.reshape(-1, count * x_TK.shape[1])

    def rows(self, x_TD: Array, rows_R: NDArray[np.int32]) -> Array:
        """See ``Ops.rows``."""
        return x_TD[rows_R]

    def rms_norm(self, hidden_TD: Array, weight_D: Array, eps: float) -> Array:
        """See ``Ops.rms_norm``."""
        out_TD = self._form.buffers.empty(hidden_TD.shape, self._form.dtype)
        self._kernels.rms_norm(hidden_TD, weight_D, eps, out_TD)
        return out_TD

    def norm_add(self, hidden_TD: Array, x_TD: Array, weight_D: Array, eps: float) -> None:
        """See ``Ops.norm_add``."""
        self._rows.norm_add(x_TD, weight_D, eps, hidden_TD)

    def layer_norm(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> Array:
        """See ``Ops.layer_norm``."""
        out_TD = self._form.buffers.empty(hidden_TD.shape, self._form.dtype)
        self._rows.layer_norm(hidden_TD, weight_D, bias_D, eps, out_TD)
        return out_TD

    def layer_norm_in_place(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> None:
        """See ``Ops.layer_norm_in_place``."""
        self._rows.layer_norm_in_place(hidden_TD, weight_D, bias_D, eps)

    def norm_heads(self, x_TN: Array, weight_C: Array, eps: float, *, first: int, count: int) -> None:
        """See ``Ops.norm_heads``."""
        self._attention.norm_heads(x_TN, weight_C, eps, first, count)

    def gated(self, gate_up_T2I: Array, kind: Gate = SILU) -> Array:
        """See ``Ops.gated``."""
        tokens, width = gate_up_T2I.shape
        out_TI = self._form.buffers.empty((tokens, width // 2), self._form.dtype)
        self._rows.gated(gate_up_T2I, gate_words(kind), out_TI)
        return out_TI

    def activate(self, x_TI: Array, kind: Activation, alpha: float = 1.0) -> Array:
        """See ``Ops.activate``."""
        out_TI = self._form.buffers.empty(x_TI.shape, self._form.dtype)
        self._rows.activate(x_TI, ACTIVATIONS[kind], alpha, out_TI)
        return out_TI

    def add(self, hidden_TD: Array, x_TD: Array) -> None:
        """See ``Ops.add``."""
        self._rows.add(x_TD, hidden_TD)

    def add_bias(self, x_TN: Array, bias_N: Array) -> None:
        """See ``Ops.add_bias``."""
        self._rows.add_bias(x_TN, bias_N)

    def scale(self, x_TN: Array, factor: float) -> None:
        """See ``Ops.scale``."""
        self._rows.form(x_TN, factor, 0.0)

    def softcap(self, x_TN: Array, cap: float) -> None:
        """See ``Ops.softcap``."""
        self._rows.form(x_TN, 1.0, cap)

    def gated_norm(self, x_TN: Array, gate_TM: Array, weight_C: Array, eps: float, *, first: int) -> Array:
        """See ``Ops.gated_norm``."""
        out_TN = self._form.buffers.empty(x_TN.shape, self._form.dtype)
        self._states.gated_norm(x_TN, gate_TM, first, weight_C, eps, out_TN)
        return out_TN

    def sigmoid_gated(self, x_TN: Array, gate_TN: Array) -> Array:
        """See ``Ops.sigmoid_gated``."""
        out_TN = self._form.buffers.empty(gate_TN.shape, self._form.dtype)
        self._states.sigmoid_gated(x_TN, gate_TN, out_TN)
        return out_TN

    def gated_add(self, hidden_TD: Array, x_TD: Array, gate_T1: Array) -> None:
        """See ``Ops.gated_add``."""
        self._states.gated_add(x_TD, gate_T1, hidden_TD)
