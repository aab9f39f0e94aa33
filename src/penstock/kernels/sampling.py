# ruff: noqa: N815  (field names carry shapes)
"""Parameters and results of sampling a token, and the random numbers that every backend is tested against.

Random numbers are Philox4x32-10 (Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", 2011).
The generator is counter-based: a number depends on (seed, position, choice, token) only, not on order, batch or worker.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class SampleRow:
    """Sampling parameters of one token (types.SamplingParams), and the tokens sampled before."""

    seed: int
    position: int  # absolute position that the sampled token will have: the generator's first counter word
    choice: int
    temperature: float
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    output_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # distinct output ids
    output_counts: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # how often each
    prompt_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # distinct ids of the prompt
    bias_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    bias_values: NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    banned_ids: NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))  # cannot be sampled now
    allowed: NDArray[np.uint32] | None = None  # [ceil(V / 32)]: bit i % 32 of word i // 32: whether i is allowed
    logprobs: int | None = None


@dataclass(frozen=True, slots=True)
class Sampled:
    """The token sampled for one row."""

    token: int
    logprob: float | None = None  # of the unmodified distribution, when asked for
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class GumbelRows:
    """F rows that sample from all tokens by temperature alone: the largest logit, or logit / temperature + noise.

    Their logits need never be stored.  ``tokens_F`` receives the tokens.
    """

    seeds_F: NDArray[np.uint64]
    positions_F: NDArray[np.uint32]  # absolute positions that the sampled tokens will have
    choices_F: NDArray[np.uint32]
    temperatures_F: NDArray[np.float32]
    tokens_F: NDArray[np.int32]

    @classmethod
    def empty(cls, count: int) -> GumbelRows:
        """Arrays for ``count`` rows, zeroed."""
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


_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_LOW = np.uint64(0xFFFFFFFF)
_WORD = np.uint64(32)
ROUNDS = 10


def philox4x32(key: int, counter: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Blocks [..., 4] of random words for counters [..., 4] under a key of 64 bits (low word first)."""
    c0, c1, c2, c3 = (counter[..., i].astype(np.uint64) for i in range(4))
    k0, k1 = key & 0xFFFFFFFF, key >> 32
    for _ in range(ROUNDS):
        a, b = _MULTIPLIERS[0] * c0, _MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (b >> _WORD) ^ c1 ^ np.uint64(k0), b & _LOW, (a >> _WORD) ^ c3 ^ np.uint64(k1), a & _LOW
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def gumbel(seed: int, position: int, choice: int, ids: NDArray[np.int32]) -> NDArray[np.float64]:
    """Standard Gumbel noise of each token id: -log(-log u), u = ((first word >> 8) + 1/2) * 2^-24."""
    counter = np.zeros((*ids.shape, 4), np.uint32)
    counter[..., 0] = position
    counter[..., 1] = choice
    counter[..., 2] = ids
    words = philox4x32(seed, counter)[..., 0]
    u = ((words >> np.uint32(8)).astype(np.float64) + 0.5) * 2.0**-24
    return np.asarray(-np.log(-np.log(u)))
