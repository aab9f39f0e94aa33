"""What the runner needs of a model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.engine.models.vision import ImageEncoder
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops
from penstock.weights.spec import Pooler


class Model(Protocol):
    """Weights and the order of operations.  Stateless: everything that changes is in the KV memory."""

    def forward(self, ops: Ops, batch: StepBatch, kv: Array) -> Array | None:
        """Compute all tokens of the batch and write their keys and values.

        Hidden states behind the layers ``batch.tapped`` are handed out (``Ops.tap``) by a model that has its own
        layers; a model that hands out none cannot have a head.  Returns hidden [R, D] of the rows
        ``batch.sample_rows_R``, in that order, or None when there are none.
        """
        ...

    def logits(self, ops: Ops, hidden_RD: Array) -> Array:
        """hidden [R, V]: the head's scores for rows that ``forward`` returned.  R x V x 4 bytes: ask in pieces."""
        ...


class Reader(Protocol):
    """A model that only reads: what the pooling runner needs of one.  Stateless like ``Model``."""

    pooler: Pooler

    def states(self, ops: Ops, batch: StepBatch, second_T: NDArray[np.int32], kv: Array) -> Array | None:
        """Final states, compute or hidden [R, D], of the rows ``batch.sample_rows_R``, or None when there are none.

        ``second_T``: 1 for tokens of the second of two texts, else 0.  Unless the model is causal, every sequence of
        the batch is a whole text.
        """
        ...

    def scores(self, ops: Ops, states_RD: Array) -> Array:
        """hidden [R, labels]: the head's outputs for rows that ``states`` returned."""
        ...


@runtime_checkable
class Seeing(Protocol):
    """What a model has besides, if images can be read into its prompts."""

    vision: ImageEncoder | None


def encoder_of(model: Model | Reader) -> ImageEncoder | None:
    """What encodes images for this model; None for one that reads text only."""
    return model.vision if isinstance(model, Seeing) else None
