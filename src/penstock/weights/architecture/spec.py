"""What a model is, without its weights.  Immutable.

Knows neither files nor families: what rooms outside a model's family need stands in ``ModelSpec``, everything else in
the family's own ``ModelDetails``, which only the family reads.
"""

from __future__ import annotations

from enum import StrEnum
from typing import TypeVar

import msgspec

from penstock.kernels.operands import KvShape, Sparse
from penstock.types import Task
from penstock.weights.config_json import SamplingDefaults
from penstock.weights.quantization.config import Quantization

D = TypeVar("D", bound="ModelDetails")


class ModelDetails(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of what a family keeps of a ``config.json``.  All fields and the tag are part of the model's fingerprint:
    what changes a bit of an answer belongs here, and nothing else does.  A renamed class or field keeps its stored
    name."""


class PoolingType(StrEnum):
    """Which hidden states of a text are pooled."""

    CLS = "cls"  # the first token's
    MEAN = "mean"  # all of them, on average
    LAST = "last"  # the last token's


class ScoreFunction(StrEnum):
    """The function applied to the scores of labels."""

    RAW = "raw"  # nothing
    SIGMOID = "sigmoid"  # a probability for each label by itself
    SOFTMAX = "softmax"  # probabilities that sum up to 1


class PoolerConfig(ModelDetails, frozen=True, kw_only=True, tag="Pooler"):
    """How a pooling model's hidden states become a vector, or scores of labels."""

    pooling: PoolingType
    causal: bool = True  # a token reads what stands before it; else all of its text
    normalised: bool = False  # embeddings are brought to length 1
    labels: int = 0  # of a classification head; 0: there is none
    scores: ScoreFunction = ScoreFunction.RAW
    dense: bool = False  # tanh of a square product before the head

    @property
    def task(self) -> Task:
        """The task of a model with this pooler."""
        return Task.CLASSIFY if self.labels else Task.EMBED


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A transformer.  Sizes are checked by its family's parser."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    kv: KvShape
    max_positions: int
    tied: bool  # the head is the embedding table
    details: ModelDetails
    checkpoint_dtype: str = "fp32"  # "bf16", "fp16" or "fp32": the widest type of its matrices
    parameters: int = 0  # weights that its tensors hold
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    quantization: Quantization | None = None  # how a folder's matrices are stored
    pooler: PoolerConfig | None = None  # None: the model writes
    audio_tokens: int = 0  # first tokens of every sequence, which stand for a sound; 0: the model hears nothing
    sparse: Sparse | None = None  # how little is read of long contexts; None: everything, as its makers meant it

    @property
    def task(self) -> Task:
        """The task that the model serves."""
        if self.audio_tokens:
            return Task.TRANSCRIBE
        return Task.GENERATE if self.pooler is None else self.pooler.task

    def details_as(self, kind: type[D]) -> D:
        """The family's details.  Raises TypeError if they are another family's."""
        if not isinstance(self.details, kind):
            raise TypeError(f"{self.architecture}: details are {type(self.details).__name__}, not {kind.__name__}")
        return self.details
