"""The oracle's operations on logits.  One of the parts that ``reference`` puts together.

This module imports torch.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from penstock.kernels.draws import Sampled, SampleRow
from penstock.kernels.reference_sampling import sample_row, with_logprobs
from penstock.kernels.reference_tiles import numpy_of


class ReferenceHead:
    """See ``ops_head.HeadOps``."""

    def sample(self, logits_RV: Tensor, rows: list[SampleRow]) -> list[Sampled]:
        """See ``Ops.sample``."""
        logits = numpy_of(logits_RV)
        return [sample_row(logits_V, row) for logits_V, row in zip(logits, rows, strict=True)]

    def token_logprobs(self, logits_RV: Tensor, tokens_R: NDArray[np.int32], top: int) -> list[Sampled]:
        """See ``Ops.token_logprobs``."""
        logits = numpy_of(logits_RV)
        return [with_logprobs(logits_V, int(token), top) for logits_V, token in zip(logits, tokens_R, strict=True)]
