"""A tensor of a model that a checkpoint does not have in that form, but can be computed of the stored ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class ComputedTensor:
    """A tensor that is computed at load, such as two halves put together.  Its values are held in the compute type."""

    shape: tuple[int, ...]  # as the model has it
    dtype: str  # "bf16", "fp16" or "fp32": what holds its values without loss
    sources: tuple[str, ...]  # stored tensors that it is computed of
    quantized: bool  # whether one of them is stored as codes
    read: Callable[[int], NDArray[Any]]  # a matrix of a stack (three axes) by its number; of others all, by 0

    def array(self) -> NDArray[Any]:
        """All of it."""
        if len(self.shape) < 3:
            return self.read(0)
        return np.stack([self.read(index) for index in range(self.shape[0])])
