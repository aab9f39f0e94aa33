"""The C++ kernels over KV memory, and attention without one.  One of the parts that ``native`` puts together."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from penstock.errors import KernelError
from penstock.kernels import _native
from penstock.kernels.native_arguments import NativeForm, NativeKv, attention_rule
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.sparse import Sparse


class NativeAttention:
    """See ``ops_attention.AttentionOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._form = form
        self._attention = _native.AttentionKernels(form.family, form.compute_dtype)
        self._batch: tuple[StepBatch, _native.Batch] | None = None

    def rope_and_write(
        self,
        qkv_TN: Array,
        rope: _native.Rope | None,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        heads: int,
        kv_heads: int,
        q_scale: Array | None = None,
    ) -> Array:
        """See ``Ops.rope_and_write``."""
        if kv_heads != kv.shape.kv_heads:
            raise KernelError(f"the KV memory has {kv.shape.kv_heads} heads, not {kv_heads}")
        q_THC = self._form.buffers.empty((qkv_TN.shape[0], heads, kv.shape.key_dim), self._form.dtype)
        self._attention.rope_and_write(qkv_TN, rope, q_scale, kv.handle, layer, self.checked(batch), heads, q_THC)
        return q_THC

    def latent_write(
        self,
        latent_TC: Array,
        rope: _native.Rope,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        norm: Array,
        eps: float,
    ) -> None:
        """See ``Ops.latent_write``."""
        self._attention.latent_write(latent_TC, norm, eps, rope, kv.handle, layer, self.checked(batch))

    def latent_query(
        self, q_TN: Array, absorb: PackedLinear, rope: _native.Rope, kv: NativeKv, batch: StepBatch, *, heads: int
    ) -> Array:
        """See ``Ops.latent_query``."""
        q_THC = self._form.buffers.empty((q_TN.shape[0], heads, kv.shape.key_dim), self._form.dtype)
        self._attention.latent_query(q_TN, absorb.data, rope, kv.handle, self.checked(batch), heads, q_THC)
        return q_THC

    def paged_attention(
        self,
        q_THC: Array,
        kv: NativeKv,
        layer: int,
        batch: StepBatch,
        *,
        scale: float,
        window: int | None = None,
        chunk: int | None = None,
        softcap: float | None = None,
        sinks_H: Array | None = None,
        until: int | None = None,
        sparse: Sparse | None = None,
    ) -> Array:
        """See ``Ops.paged_attention``."""
        heads = math.prod(q_THC.shape[1:]) // kv.shape.key_dim
        out = self._form.buffers.empty((len(q_THC), heads * kv.shape.value_dim), self._form.dtype)
        rule = attention_rule(scale, window, chunk, softcap, sinks_H, until=until, sparse=sparse)
        self._attention.attention(q_THC, kv.handle, layer, self.checked(batch), heads, rule, out)
        return out

    def attention(
        self,
        qkv_TN: Array,
        starts_S1: NDArray[np.int32],
        *,
        heads: int,
        kv_heads: int,
        scale: float,
        causal: bool = False,
        window: int | None = None,
        softcap: float | None = None,
        rope: _native.Rope | None = None,
        rows_T: NDArray[np.int32] | None = None,
        bias_HR: Array | None = None,
    ) -> Array:
        """See ``Ops.attention``."""
        tokens, width = qkv_TN.shape
        out = self._form.buffers.empty((tokens, width // (heads + 2 * kv_heads) * heads), self._form.dtype)
        rule = attention_rule(scale, window, None, softcap, None)
        self._attention.attention_once(qkv_TN, starts_S1, rope, rows_T, (heads, kv_heads), causal, rule, bias_HR, out)
        return out

    def checked(self, batch: StepBatch) -> _native.Batch:
        """The step's tokens as the kernels hold them, made once a step."""
        if self._batch is None or self._batch[0] is not batch:
            table_SP = np.ascontiguousarray(batch.table_SP, np.int32)
            own = _native.Batch(batch.positions_T, batch.starts_S1, table_SP, batch.turns_T3)
            if batch.states_SW is not None:
                own.recur(batch.states_SW)
            self._batch = (batch, own)
        return self._batch[1]
