"""What the runner needs of a model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from penstock.engine.models.vision import ImageEncoder
from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops


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


@runtime_checkable
class Seeing(Protocol):
    """What a model has besides, if images can be read into its prompts."""

    vision: ImageEncoder | None


def encoder_of(model: Model) -> ImageEncoder | None:
    """What encodes images for this model; None for one that reads text only."""
    return model.vision if isinstance(model, Seeing) else None
