"""Kinds of activation and gate: data that layers give to operations, the same for every backend."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum


class Activation(StrEnum):
    """A function of one value.  Names as in Hugging Face's ``hidden_act``."""

    SILU = "silu"  # x / (1 + exp(-alpha x))
    GELU = "gelu"  # x Phi(x), with the error function (arXiv:1606.08415)
    GELU_TANH = "gelu_tanh"  # its approximation with tanh, "gelu_new" and "gelu_pytorch_tanh"
    RELU = "relu"
    RELU2 = "relu2"  # relu(x)^2 (arXiv:2109.08668)
    NONE = "none"  # x


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """A gated unit (arXiv:2002.05202): ``activation(min(gate, limit)) * (clamp(up, -limit, limit) + shift)``."""

    activation: Activation = Activation.SILU
    alpha: float = 1.0  # of silu
    limit: float = math.inf
    shift: float = 0.0
    interleaved: bool = False  # columns are gate, up, gate, up, ...; else all of gate, then all of up

    def __post_init__(self) -> None:
        if not self.limit > 0:
            raise ValueError(f"the limit of a gate must be above 0, got {self.limit}")


SILU = Gate()
SWIGLU_OAI = Gate(alpha=1.702, limit=7.0, shift=1.0, interleaved=True)
"""The gate of gpt-oss (arXiv:2508.10925)."""
