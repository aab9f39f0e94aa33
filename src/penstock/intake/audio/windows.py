"""A long sound cut into windows that a model can hear, at quiet places."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

SEARCHED = 6
"""A window may end within the last sixth of its greatest length: five seconds of thirty."""

PIECES = 50
"""Pieces of that whose loudness is compared: a tenth of a second each."""


def windows(samples_N: NDArray[np.float32], longest: int) -> list[tuple[int, int]]:
    """(begin, end) of windows of at most ``longest`` samples, one after another; each but the last ends in the middle
    of the quietest piece of its end."""
    found: list[tuple[int, int]] = []
    begin, searched = 0, max(1, longest // SEARCHED)
    piece = max(1, searched // PIECES)
    while len(samples_N) - begin > longest:
        first = begin + longest - searched
        pieces = samples_N[first : first + searched // piece * piece].reshape(-1, piece)
        loudness = np.square(pieces, dtype=np.float64).sum(axis=1)
        quietest = len(loudness) - 1 - int(loudness[::-1].argmin())  # of equals the last
        end = first + quietest * piece + piece // 2
        found.append((begin, max(end, begin + 1)))
        begin = found[-1][1]
    return [*found, (begin, len(samples_N))]
