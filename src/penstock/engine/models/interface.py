"""What the runner needs of a model."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.operands import Array, StepBatch
from penstock.kernels.ops import Ops
from penstock.types import MediaInput
from penstock.weights.architecture.spec import PoolerConfig


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


class PoolingModel(Protocol):
    """A model that only reads: what the pooling runner needs of one.  Stateless like ``Model``."""

    pooler: PoolerConfig

    def states(self, ops: Ops, batch: StepBatch, second_T: NDArray[np.int32], kv: Array) -> Array | None:
        """Final states, compute or hidden [R, D], of the rows ``batch.sample_rows_R``, or None when there are none.

        ``second_T``: 1 for tokens of the second of two texts, else 0.  Unless the model is causal, every sequence of
        the batch is a whole text.
        """
        ...

    def scores(self, ops: Ops, states_RD: Array) -> Array:
        """hidden [R, labels]: the head's outputs for rows that ``states`` returned."""
        ...


class MediaEncoding(Protocol):
    """One picture or sound on its way through its encoder."""

    def advance(self, ops: Ops) -> bool:
        """One block more; True when there is none left and ``rows`` are there."""
        ...

    @property
    def rows(self) -> NDArray[np.float32]:
        """What it gives, once it is finished: [tokens, width]."""
        ...


class MediaEncoder(Protocol):
    """Encodes images or sounds one by one, in blocks of layers.  The rows of one depend on nothing else."""

    has_axes: bool
    """Whether the decoder's tokens have positions by row and column."""

    leading_tokens: int
    """Tokens that stand for one at the beginning of every prompt; 0: anywhere, or nowhere."""

    @property
    def width(self) -> int:
        """Numbers in a row."""
        ...

    def check(self, medium: MediaInput) -> None:
        """Raises ImageRefused for what it cannot read."""
        ...

    def begin(self, ops: Ops, medium: MediaInput) -> MediaEncoding:
        """The encoding of this one, begun.  Raises ImageRefused."""
        ...


@runtime_checkable
class SupportsMedia(Protocol):
    """What a model has besides, if its prompts can hold images or sounds."""

    encoder: MediaEncoder | None


@runtime_checkable
class SupportsCrossAttention(Protocol):
    """What a model has besides, if the first tokens of every sequence are an encoder's rows that all others read by
    keys and values of their own (cross-attention)."""

    source_tokens: int
    """Number of tokens; ``forward`` is given none of them."""

    def write_source(self, ops: Ops, rows_TD: Array, batch: StepBatch, kv: Array) -> None:
        """Keys and values of every layer to the pages of the batch's tokens, whose rows are compute [T, D]."""
        ...


def encoder_of(model: Model | PoolingModel) -> MediaEncoder | None:
    """What encodes images or sounds for this model; None for one that reads text only."""
    return model.encoder if isinstance(model, SupportsMedia) else None
