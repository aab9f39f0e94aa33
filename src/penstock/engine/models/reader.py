"""A decoder that only reads: its last layer's states, normed, and a head over labels if it has one.

Causal ones go through KV pages like any prompt, in pieces if need be.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.engine.models.decoder import DecoderModel
from penstock.engine.models.port import Model
from penstock.errors import ModelError
from penstock.kernels.operands import Array, PackedLinear, StepBatch
from penstock.kernels.ops import Ops
from penstock.weights.architecture.spec import Pooler


class ReadingDecoder:
    """See ``engine.models.port.Reader``."""

    def __init__(self, decoder: Model, pooler: Pooler, score: PackedLinear | None) -> None:
        """Raises ModelError for a model that is no decoder of ours."""
        if not isinstance(decoder, DecoderModel):
            raise ModelError("an installed package's model writes text, and gives no vectors")
        self.pooler = pooler
        self._decoder = decoder
        self._score = score

    def states(self, ops: Ops, batch: StepBatch, second_T: NDArray[np.int32], kv: Array) -> Array | None:
        """compute [R, D]; it knows no second text."""
        hidden_RD = self._decoder.forward(ops, batch, kv)
        return None if hidden_RD is None else self._decoder.norm(ops, hidden_RD)

    def scores(self, ops: Ops, states_RD: Array) -> Array:
        """See ``engine.models.port.Reader``."""
        assert self._score is not None, "a model without labels"
        return ops.linear(states_RD, self._score)
