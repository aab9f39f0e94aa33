"""The oracle's attention without a cache: one sequence after the other, each as a whole.

What a sequence gives depends on its own shapes only, whatever stands beside it.  This module imports torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.reference_attention import ReferenceRope, Rule, rotated


@dataclass(frozen=True, slots=True)
class Once:
    """See ``Ops.attention``."""

    heads: int
    kv_heads: int
    rule: Rule
    causal: bool
    bias: Tensor | None  # [H, 2 R + 1]

    def attend(
        self,
        qkv_TN: Tensor,
        starts_S1: NDArray[np.int32],
        rope: ReferenceRope | None,
        rows_T: NDArray[np.int32] | None,
        dtype: torch.dtype,
    ) -> Tensor:
        """[T, H C]; queries, keys and values are rounded to ``dtype`` before they meet."""
        heads, kv_heads = self.heads, self.kv_heads
        if rows_T is None:  # each token's place in its sequence
            rows_T = np.arange(len(qkv_TN), dtype=np.int32) - np.repeat(starts_S1[:-1], np.diff(starts_S1))
        places_T = torch.from_numpy(rows_T.astype(np.int64)).to(qkv_TN.device)
        qkv_THC = qkv_TN.view(len(qkv_TN), heads + 2 * kv_heads, -1)
        q_THC, k_TGC, v_TGC = qkv_THC.split_with_sizes([heads, kv_heads, kv_heads], dim=1)
        q_THC, k_TGC = rotated(q_THC, rope, places_T), rotated(k_TGC, rope, places_T)
        out_THC = qkv_TN.new_empty(q_THC.shape, dtype=dtype)
        for begin, end in pairwise(starts_S1.tolist()):
            if begin < end:
                own = (x_THC[begin:end].to(dtype).float().transpose(0, 1) for x_THC in (q_THC, k_TGC, v_TGC))
                out_THC[begin:end] = self._sequence(*(x_HTC.contiguous() for x_HTC in own)).transpose(0, 1).to(dtype)
        return out_THC.flatten(1)

    def _sequence(self, q_HTC: Tensor, k_GTC: Tensor, v_GTC: Tensor) -> Tensor:
        repeat = self.heads // self.kv_heads
        k_HTC, v_HTC = (x_GTC.repeat_interleave(repeat, dim=0) for x_GTC in (k_GTC, v_GTC))
        scores_HTT = (q_HTC @ k_HTC.transpose(1, 2)) * self.rule.scale
        if self.rule.softcap is not None:
            scores_HTT = torch.tanh(scores_HTT / self.rule.softcap) * self.rule.softcap
        places_T = torch.arange(scores_HTT.shape[-1], device=scores_HTT.device)
        apart_TT = places_T[None] - places_T[:, None]  # key - position
        if self.bias is not None:
            reach = self.bias.shape[1] // 2
            scores_HTT = scores_HTT + self.bias[:, apart_TT.clamp(-reach, reach) + reach]
        hidden_TT = apart_TT > 0 if self.causal else torch.zeros_like(apart_TT, dtype=torch.bool)
        if self.rule.window is not None:
            hidden_TT = hidden_TT | (apart_TT.abs() >= self.rule.window)
        weights_HTT = torch.softmax(scores_HTT.masked_fill(hidden_TT, -torch.inf), dim=-1)
        return weights_HTT @ v_HTC
