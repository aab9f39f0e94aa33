# ruff: noqa: N815  (field names carry shapes)
"""How one token is to be drawn, and what was drawn: data between the runner and the kernels."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class SampleRow:
    """How one token is to be drawn (see types.SamplingParams) and what was drawn before."""

    seed: int
    position: int  # absolute position that the drawn token will have: the generator's first counter word
    choice: int
    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    output_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # distinct ids of the answer
    output_counts: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # how often each
    prompt_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # distinct ids of the prompt
    bias_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    bias_values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    banned_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # cannot be drawn now
    allowed: NDArray[np.uint32] | None = None  # [ceil(V / 32)]: bit i % 32 of word i // 32 says whether i can be drawn
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """What was drawn for one row."""

    token: int
    logprob: float | None = None  # of the unmodified distribution, when asked for
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Picks:
    """F rows that draw from all tokens by temperature alone: the largest logit, or logit / temperature + noise.

    Their logits need never be stored.  ``tokens_F`` receives the tokens.
    """

    seeds_F: NDArray[np.uint64]
    positions_F: NDArray[np.uint32]  # absolute positions that the drawn tokens will have
    choices_F: NDArray[np.uint32]
    temperatures_F: NDArray[np.float32]
    tokens_F: NDArray[np.int32]

    @classmethod
    def empty(cls, count: int) -> Picks:
        """Room for so many rows, zeroed."""
        return cls(
            np.zeros(count, np.uint64),
            np.zeros(count, np.uint32),
            np.zeros(count, np.uint32),
            np.zeros(count, np.float32),
            np.zeros(count, np.int32),
        )

    def rows(self) -> list[SampleRow]:
        """The same rows as ``Ops.sample`` wants them."""
        columns = (self.seeds_F, self.positions_F, self.choices_F, self.temperatures_F)
        return [SampleRow(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]
