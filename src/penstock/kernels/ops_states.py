"""Operations of recurrent layers, which keep no keys but a state of fixed size (``operands.StateShape``).

Part of ``ops.Ops``, which says what the letters in the names mean.  Here goes whatever reads and writes states.

The state behind a token is made of the state before it and of the token, in fp32, one token after another; where it is
kept between steps it loses no bit.  So how a prompt is cut changes nothing.
"""

from __future__ import annotations

from typing import Protocol

from penstock.kernels.operands import Array, StepBatch


class StateOps(Protocol):
    """Along the tokens of a sequence.  The pages of its states are ``StepBatch.states_SW``."""

    def causal_conv(self, x_TN: Array, weight_KC: Array, kv: Array, layer: int, batch: StepBatch) -> Array:
        """hidden [T, C]: silu of a convolution over time of the first C columns of hidden x, each column by itself.

        ``weight_KC``, a vector [K, C]: tap K - 1 is the token's own, tap 0 that of the token K - 1 before it; before
        the first token there are zeros.  Summed from tap 0 on, in fp32.
        """
        ...

    def delta_rule(
        self,
        qkv_TC: Array,
        gates_TN: Array,
        kv: Array,
        layer: int,
        batch: StepBatch,
        *,
        rates_H: Array,
        shifts_H: Array,
        beta: int,
        decay: int,
    ) -> Array:
        """hidden [T, H value_dim]: the gated delta rule (arXiv:2412.06464), of hidden [T, C] queries, keys, values.

        Head h has the queries and keys of head floor(h G / H) of the G key heads.  Of its gates, columns ``beta + h``
        and ``decay + h`` of hidden ``gates_TN``, are made b = sigmoid(gate) and d = exp(-rate softplus(gate + shift)).
        Queries and keys are brought to length 1 (x / sqrt(sum of squares + 1e-6)), queries then divided by
        sqrt(key_dim).  Of the state S [key_dim, value_dim], zero before the first token, becomes d S + k u with
        u = b (v - d S^T k); what comes out is S^T q of the new one.  All in fp32; the two sums over key_dim are each of
        even rows, then of odd ones, joined last.
        """
        ...
