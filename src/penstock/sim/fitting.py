"""From measured steps to a fleet's ``StepTimes``: least squares of relative errors, with no negative weight.  Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from penstock.errors import ConfigError
from penstock.sim.fleet import StepTimes
from penstock.sim.measures import Array


@dataclass(frozen=True, slots=True)
class Reading:
    """A step that computed ``count`` prompt tokens from position ``start``."""

    start: int
    count: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Writing:
    """A step that wrote one token of each of ``rows`` answers with ``context`` tokens together."""

    rows: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Fit:
    """The times, and the median relative error that they leave of reading and of writing steps."""

    times: StepTimes
    reading_error: float
    writing_error: float


def fit(readings: Sequence[Reading], writings: Sequence[Writing]) -> Fit:
    """Raises ConfigError for too few measurements."""
    if len(readings) < 3 or len(writings) < 3:
        raise ConfigError(f"{len(readings)} steps that read and {len(writings)} that write are too few to fit")
    read = np.array([(1.0, r.count, r.count * r.start + r.count * (r.count + 1) / 2) for r in readings])
    write = np.array([(1.0, w.rows, w.context) for w in writings])
    read_s, write_s = np.array([r.seconds for r in readings]), np.array([w.seconds for w in writings])
    (read_step, token, pair), (step, row, context) = nonnegative(read, read_s), nonnegative(write, write_s)
    times = StepTimes(step_s=step, row_s=row, context_s=context, read_step_s=read_step, token_s=token, pair_s=pair)
    return Fit(
        times,
        _error(read @ np.array((read_step, token, pair)), read_s),
        _error(write @ np.array((step, row, context)), write_s),
    )


def nonnegative(columns: Array, seconds: Array) -> tuple[float, ...]:
    """Weights of ``columns[measurement, feature]`` with the least squared relative error, none below 0.

    The best of all sets of features whose own least squares need no negative weight.
    """
    features = columns.shape[1]
    scaled = columns / seconds[:, None]
    best, least = np.zeros(features), np.inf
    for mask in range(1, 1 << features):
        chosen = [feature for feature in range(features) if mask >> feature & 1]
        weights = np.zeros(features)
        weights[chosen] = np.linalg.lstsq(scaled[:, chosen], np.ones(len(seconds)), rcond=None)[0]
        error = float(((scaled @ weights - 1) ** 2).sum())
        if (weights >= 0).all() and error < least:
            best, least = weights, error
    return tuple(float(weight) for weight in best)


def _error(predicted: Array, seconds: Array) -> float:
    return float(np.median(np.abs(predicted / seconds - 1)))
