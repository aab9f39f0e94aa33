"""Random numbers of the sampler, written out plainly in NumPy: the definition that every backend is tested against.

Philox4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (2011).  Counter-based, so a
draw depends on (seed, position, choice, token) only: never on order, batch or worker.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

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
