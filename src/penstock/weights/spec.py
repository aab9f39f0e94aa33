"""What a model is, without its weights: sizes, rotary recipe, end tokens.  Immutable; can cross a process boundary.

Knows neither files nor architectures: ``weights.llama`` and its like make a ``ModelSpec`` of a ``config.json``.
"""

from __future__ import annotations

import math
from enum import StrEnum

import msgspec
import numpy as np
from numpy.typing import NDArray


class RopeKind(StrEnum):
    """How rotary frequencies were stretched to a longer context."""

    DEFAULT = "default"
    LINEAR = "linear"
    LLAMA3 = "llama3"


class Rope(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Recipe of the rotary frequencies (RoPE, arXiv:2104.09864; scalings as Hugging Face transformers has them)."""

    theta: float = 10_000.0
    kind: RopeKind = RopeKind.DEFAULT
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3 only, as the next two
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192

    def inv_freq(self, head_dim: int) -> NDArray[np.float64]:
        """Radians a position for each pair of columns; [head_dim / 2]."""
        exponents = np.arange(0, head_dim, 2, dtype=np.float64) / head_dim
        plain = self.theta**-exponents
        match self.kind:
            case RopeKind.DEFAULT:
                return plain
            case RopeKind.LINEAR:
                return plain / self.factor
            case RopeKind.LLAMA3:
                return self._llama3(plain)

    def _llama3(self, plain: NDArray[np.float64]) -> NDArray[np.float64]:
        """Short wavelengths stay, long ones are divided by ``factor``, those in between are blended."""
        turns = self.original_max_positions * plain / (2 * math.pi)  # within the original context
        kept = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = np.clip(kept, 0.0, 1.0)
        return plain * (kept + (1.0 - kept) / self.factor)


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
    heads: int  # query heads
    kv_heads: int  # divides heads
    head_dim: int  # even
    intermediate: int
    rms_eps: float
    rope: Rope
    tied: bool  # the head is the embedding table
    max_positions: int
    checkpoint_dtype: str  # "bf16", "fp16" or "fp32": the widest type of its matrices
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    sampling: SamplingDefaults = SamplingDefaults()

    @property
    def qkv_rows(self) -> int:
        """Outputs of the fused query, key and value projection."""
        return (self.heads + 2 * self.kv_heads) * self.head_dim

    @property
    def parameters(self) -> int:
        """Number of weights."""
        width = self.heads * self.head_dim
        layer = self.hidden * (self.qkv_rows + width + 3 * self.intermediate + 2)
        tables = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.layers * layer + tables + self.hidden
