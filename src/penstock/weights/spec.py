"""What a model is, without its weights.  Immutable.

Knows neither files nor families: what rooms outside a model's family need stands in ``ModelSpec``, everything else in
the family's own ``Details``, which only the family reads.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from penstock.kernels.operands import KvShape
from penstock.weights.formats.quantization import Quantization

D = TypeVar("D", bound="Details")


class Details(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag=True):
    """Base of what a family keeps of a ``config.json``.  All fields, and the class's name, are part of the model's
    fingerprint: whatever changes a bit of an answer stands here, and nothing else does."""


class SamplingDefaults(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the model's makers suggest (generation_config.json).  For information: nothing is sampled by it unasked."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A decoder-only transformer.  Sizes are checked by whoever makes one."""

    architecture: str
    vocab: int
    hidden: int
    layers: int
    kv: KvShape
    max_positions: int
    tied: bool  # the head is the embedding table
    details: Details
    checkpoint_dtype: str = "fp32"  # "bf16", "fp16" or "fp32": the widest type of its matrices
    parameters: int = 0  # weights that its tensors hold
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    quantization: Quantization | None = None  # how a folder's matrices are stored

    def own(self, kind: type[D]) -> D:
        """The family's details.  Raises TypeError if they are another family's."""
        if not isinstance(self.details, kind):
            raise TypeError(f"{self.architecture}: details are {type(self.details).__name__}, not {kind.__name__}")
        return self.details
