"""The C++ kernels of recurrent layers.  One of the parts that ``native`` puts together."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.kernels import _native
from penstock.kernels.native_arguments import NativeForm, NativeKv
from penstock.kernels.operands import Array, StepBatch


class NativeStates:
    """See ``ops_states.StateOps``."""

    def __init__(self, form: NativeForm, checked: Callable[[StepBatch], _native.Batch]) -> None:
        """``checked``: a step's tokens as the kernels hold them."""
        self._form = form
        self._checked = checked
        self._states = _native.StateKernels(form.family, form.compute_dtype)

    def causal_conv(self, x_TN: Array, weight_KC: Array, kv: NativeKv, layer: int, batch: StepBatch) -> Array:
        """See ``Ops.causal_conv``."""
        out_TC = self._form.buffers.empty((len(x_TN), weight_KC.shape[1]), np.float32)
        self._states.causal_conv(x_TN, weight_KC, kv.handle, layer, self._checked(batch), out_TC)
        return out_TC

    def delta_rule(
        self,
        qkv_TC: Array,
        gates_TN: Array,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        rates_H: Array,
        shifts_H: Array,
        beta: int,
        decay: int,
    ) -> Array:
        """See ``Ops.delta_rule``."""
        own = kv.shape.kept_states
        out = self._form.buffers.empty((len(qkv_TC), own.heads * own.value_dim), np.float32)
        step = kv.handle, layer, self._checked(batch)
        self._states.delta_rule(qkv_TC, gates_TN, (beta, decay), rates_H, shifts_H, *step, out)
        return out
