"""The C++ kernels on logits.  One of the parts that ``native`` puts together."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.kernels import _native
from penstock.kernels.draws import Sampled, SampleRow
from penstock.kernels.native_arguments import NativeForm, draw_row, sampled
from penstock.kernels.operands import Array


class NativeHead:
    """See ``ops_head.HeadOps``."""

    def __init__(self, form: NativeForm) -> None:
        self._kernels = _native.Kernels(form.family, form.compute_dtype)

    def sample(self, logits_RV: Array, rows: list[SampleRow]) -> list[Sampled]:
        """See ``Ops.sample``.  Temperatures below 1e-5 count as 0."""
        return sampled(rows, self._kernels.sample(logits_RV, [draw_row(row) for row in rows]))

    def token_logprobs(self, logits_RV: Array, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        """See ``Ops.token_logprobs``."""
        answers = self._kernels.score_tokens(logits_RV, tokens_R, top)
        return [Sampled(token, logprob, tuple(likeliest)) for token, logprob, likeliest in answers]

    def gumbel(self, seed: int, position: int, choice: int, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """The noise that ``sample`` adds for each of these token ids (tests and tools)."""
        out = np.empty(ids.shape, np.float32)
        self._kernels.gumbel(seed, position, choice, ids, out)
        return out
