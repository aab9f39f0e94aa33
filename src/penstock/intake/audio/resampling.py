"""Samples at another rate: band-limited interpolation by a windowed sinc (J. O. Smith, "Digital Audio Resampling").

Each sample asked for is a sum over its neighbours within ``ZEROS`` zero crossings, weighed by a sinc under a Kaiser
window.  Rates are whole numbers, so the weights repeat: one set of them a phase.  Sums are in float64 and rounded once,
so that hardly a bit depends on how a library orders them.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

ZEROS = 64
"""Zero crossings of the sinc on either side."""

ROLL_OFF = 0.945
"""Where half of a tone is left, of the lower rate's half: below 89 % of that nothing is lost, and above it, where it
would fold, nothing is left."""

BETA = 11.16
"""Of the Kaiser window: side lobes are 110 dB below."""

_AT_A_TIME = 4096
"""Samples of one phase that are made together: bounds the memory for their neighbours."""

_PHASES_AT_A_TIME = 64
"""Whose weights are made together."""


def working_bytes(rate: int, wanted: int) -> int:
    """What ``resampled`` takes at its peak beside its samples and a copy of them: neighbours in float64."""
    if rate == wanted:
        return 0
    scale = min(1.0, wanted / rate) * ROLL_OFF
    return 8 * _AT_A_TIME * 2 * math.ceil(ZEROS / scale)


def resampled(samples_N: NDArray[np.float32], rate: int, wanted: int) -> NDArray[np.float32]:
    """The same sound with ``wanted`` samples a second instead of ``rate``."""
    if rate == wanted:
        return samples_N
    shared = math.gcd(rate, wanted)
    up, down = wanted // shared, rate // shared
    scale = min(1.0, up / down) * ROLL_OFF
    half = math.ceil(ZEROS / scale)
    count = -(-len(samples_N) * up // down)
    padded_N = np.pad(samples_N, (half - 1, half + down))
    near_N2 = sliding_window_view(padded_N, 2 * half)
    out = np.empty(count, np.float32)
    for first in range(0, min(up, count), _PHASES_AT_A_TIME):
        phases_P = np.arange(first, min(first + _PHASES_AT_A_TIME, up, count))
        begins_P, left_P = np.divmod(phases_P * down, up)
        for phase, begin, weights_K in zip(phases_P, begins_P, _weights(left_P / up, scale, half), strict=True):
            own = out[phase::up]
            for at in range(0, len(own), _AT_A_TIME):
                stop = min(len(own), at + _AT_A_TIME)
                near = near_N2[begin + at * down : begin + (stop - 1) * down + 1 : down]
                own[at:stop] = near.astype(np.float64) @ weights_K
    return out


def _weights(fractions_P: NDArray[np.float64], scale: float, half: int) -> NDArray[np.float64]:
    """[P, 2 half] of the neighbours from ``half - 1`` before to ``half`` behind places so far behind a sample."""
    away_PK = np.arange(1 - half, half + 1) - fractions_P[:, None]
    window_PK = np.i0(BETA * np.sqrt(np.clip(1 - (away_PK / half) ** 2, 0, 1))) / np.i0(BETA)
    return np.asarray(scale * np.sinc(scale * away_PK) * window_PK)
