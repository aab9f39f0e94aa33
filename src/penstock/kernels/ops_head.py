"""Operations on logits: which token a row draws, and how likely given ones were.

Part of ``ops.Ops``, which says what the letters in the names mean.  Here goes what ends a step.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.draws import Sampled, SampleRow
from penstock.kernels.operands import Array


class HeadOps(Protocol):
    """From logits to tokens."""

    def sample(self, logits_RV: Array, rows: list[SampleRow]) -> list[Sampled]:
        """Draw one token a row: logit_bias, penalties, bans and mask, then temperature, top_k, top_p, min_p, then
        Gumbel-max (or argmax at temperature 0, ties to the lower id).  Random numbers: Philox4x32-10 as in
        ``kernels.philox``."""
        ...

    def token_logprobs(self, logits_RV: Array, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        """Log-probability of given tokens under each row, with the ``top`` likeliest (ties to the lower id)."""
        ...
