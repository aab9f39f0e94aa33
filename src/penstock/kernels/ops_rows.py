"""Operations that work row by row: norms, activations, sums, and what picks or places rows.

Part of ``ops.Ops``, which says what the letters in the names mean.  Here goes whatever looks at one row (or head) at a
time and reads no packed matrix and no KV memory.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.kinds import SILU, Activation, Gate
from penstock.kernels.operands import Array, StepBatch


class RowOps(Protocol):
    """Rows in, rows out."""

    def features(self, batch: StepBatch, width: int) -> Array:
        """hidden [T, width]: what the batch brings with every token; once a step."""
        ...

    def tap(self, hidden_TD: Array, batch: StepBatch, place: int) -> None:
        """Hand the wanted rows of a hidden state out: they become columns [place D, (place + 1) D) of the batch's
        ``taps_RW``, if it has one."""
        ...

    def place_rows(self, hidden_TD: Array, batch: StepBatch) -> None:
        """The batch's given rows take the place of those of hidden; nothing where none are given."""
        ...

    def joined_rows(self, x_TK: Array, count: int) -> Array:
        """compute [T / count, count K]: rows, ``count`` at a time, one after another in a row."""
        ...

    def rows(self, x_TD: Array, rows_R: NDArray[np.int32]) -> Array:
        """The rows of x with these indices."""
        ...

    def rms_norm(self, hidden_TD: Array, weight_D: Array, eps: float) -> Array:
        """compute [T, D]: x / sqrt(mean(x^2) + eps) * weight, in fp32, rounded once."""
        ...

    def norm_add(self, hidden_TD: Array, x_TD: Array, weight_D: Array, eps: float) -> None:
        """hidden += rms_norm(x), in place; x fp32 [T, D], and the norm is not rounded to the compute type."""
        ...

    def layer_norm(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> Array:
        """compute [T, D]: (x - mean) / sqrt(variance + eps) * weight + bias, in fp32, rounded once
        (arXiv:1607.06450); the variance is the mean square distance, in a second pass."""
        ...

    def layer_norm_in_place(self, hidden_TD: Array, weight_D: Array, bias_D: Array | None, eps: float) -> None:
        """hidden = layer_norm(hidden), in place and fp32: post-norm encoders, whose residual stream is normed."""
        ...

    def norm_heads(self, x_TN: Array, weight_C: Array, eps: float, *, first: int, count: int) -> None:
        """In place, in fp32: ``rms_norm`` of each of ``count`` groups of C columns of hidden [T, N], the first of which
        begins at column ``first`` (norms of queries and keys; with C = all heads together, one norm for them)."""
        ...

    def gated(self, gate_up_T2I: Array, kind: Gate = SILU) -> Array:
        """compute [T, I] = activation(gate) * up, in fp32, rounded once.  ``kind`` says which columns are which."""
        ...

    def activate(self, x_TI: Array, kind: Activation, alpha: float = 1.0) -> Array:
        """compute [T, I] = activation(x), in fp32, rounded once."""
        ...

    def add(self, hidden_TD: Array, x_TD: Array) -> None:
        """hidden += x, in place; both fp32."""
        ...

    def add_bias(self, x_TN: Array, bias_N: Array) -> None:
        """x += bias in every row, in place; x fp32."""
        ...

    def scale(self, x_TN: Array, factor: float) -> None:
        """x *= factor, in place; x fp32.  Of logits: tokens can still be picked without storing them."""
        ...

    def softcap(self, x_TN: Array, cap: float) -> None:
        """x = cap * tanh(x / cap), in place; x fp32.  Of logits: as ``scale``, which may come before it."""
        ...

    def gated_norm(self, x_TN: Array, gate_TM: Array, weight_C: Array, eps: float, *, first: int) -> Array:
        """compute [T, N]: ``rms_norm`` of each group of C columns of hidden x, times silu of the gate: columns
        [first, first + N) of hidden [T, M].  In fp32, rounded once."""
        ...

    def sigmoid_gated(self, x_TN: Array, gate_TN: Array) -> Array:
        """compute [T, N] = x * sigmoid(gate), of compute x and hidden gates, in fp32, rounded once."""
        ...

    def gated_add(self, hidden_TD: Array, x_TD: Array, gate_T1: Array) -> None:
        """hidden += x * sigmoid(gate), in place; all fp32, multiply and add are fused."""
        ...
