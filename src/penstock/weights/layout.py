"""Which tensors of a checkpoint make which weight of a model: plain data, filled in by a family.

Several tensors may be one weight (queries, keys and values are one matrix product): their rows follow one another.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from penstock.errors import ModelError
from penstock.weights.reader import Checkpoint


@dataclass(frozen=True, slots=True)
class Part:
    """One tensor of the checkpoint and the shape it must have."""

    tensor: str
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight of ``linear`` or ``embed``: rows of its parts, one part after another."""

    name: str
    parts: tuple[Part, ...]
    segments: tuple[int, ...] | None = None  # ends of the segments of K; None for a plain sum


@dataclass(frozen=True, slots=True)
class Vector:
    """A norm weight."""

    name: str
    part: Part

    @property
    def parts(self) -> tuple[Part, ...]:
        return (self.part,)


@dataclass(frozen=True, slots=True)
class WeightLayout:
    """All weights of a model, and the tensors that may be there although nothing needs them."""

    weights: tuple[Matrix | Vector, ...]
    ignored: re.Pattern[str]

    def check(self, checkpoint: Checkpoint) -> None:
        """Raises ModelError unless every tensor is there with its shape, and no unknown one beside them."""
        known = set[str]()
        for weight in self.weights:
            for part in weight.parts:
                known.add(part.tensor)
                shape = checkpoint.info(part.tensor).shape
                if shape != part.shape:
                    raise ModelError(
                        f"{checkpoint.path_of(part.tensor)}: tensor {part.tensor!r} has shape {list(shape)}, "
                        f"by config.json it must have {list(part.shape)}"
                    )
        for name in checkpoint.names:
            if name not in known and not self.ignored.fullmatch(name):
                raise ModelError(
                    f"{checkpoint.path_of(name)}: tensor {name!r} is not part of this architecture; "
                    "leaving it out would change the answers"
                )

    def widest_dtype(self, checkpoint: Checkpoint) -> str:
        """ "bf16", "fp16" or "fp32": what holds every matrix without loss (bf16 beside fp16 needs fp32).

        Raises ModelError for a type that weights cannot have.
        """
        found = set[str]()
        for weight in self.weights:
            for part in weight.parts:
                dtype = checkpoint.weight_dtype(part.tensor)
                if isinstance(weight, Matrix):
                    found.add(dtype)
        return found.pop() if len(found) == 1 else "fp32"
