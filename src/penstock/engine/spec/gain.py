"""Is a guess worth its time?  How often guesses of a kind stood, how long steps take, and what follows from both.

A step of r rows is expected to take base + slope * r seconds.  Reading the weights is most of a small step, so further
rows are cheap; where arithmetic is the limit they are not, and then nothing is guessed.  Both are measured all the
time, and forgotten again, so that a guess that lost once is tried again later.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heapify, heappop, heapreplace

from penstock.engine.spec.lookup import LONGEST_MATCH

MEMORY = 0.98
"""Share of what was measured that is still believed one step later."""

FIRST_SLOPE = 0.01
"""What a further row is thought to cost before it was measured, as a share of a step: little, so that it is tried."""

FIRST_SLOPE_WEIGHT = 4.0
"""How many measurements, a row apart, that thought is worth."""

LEAST_GAIN = 1.05
"""Guessing must promise so many times the tokens a second; below, measuring errors decide."""

PRIOR_TRIES = 2.0
"""How many tries the first opinion of a kind of guess is worth."""


class StepTimes:
    """Seconds of steps that only write answers, by their number of rows."""

    def __init__(self) -> None:
        self._weight = self._rows = self._rows2 = self._seconds = self._product = 0.0

    def learn(self, rows: int, seconds: float) -> None:
        """A step of so many rows took so long."""
        self._weight = MEMORY * self._weight + 1.0
        self._rows = MEMORY * self._rows + rows
        self._rows2 = MEMORY * self._rows2 + rows * rows
        self._seconds = MEMORY * self._seconds + seconds
        self._product = MEMORY * self._product + rows * seconds

    def line(self) -> tuple[float, float] | None:
        """(seconds of a step without rows, seconds of each row); None before anything was measured.

        Least squares, drawn to ``FIRST_SLOPE`` where the numbers of rows were too much alike to tell.
        """
        if self._weight == 0.0:
            return None
        rows, seconds = self._rows / self._weight, self._seconds / self._weight
        spread = self._rows2 - self._weight * rows * rows
        together = self._product - self._weight * rows * seconds
        slope = (together + FIRST_SLOPE_WEIGHT * FIRST_SLOPE * seconds) / (spread + FIRST_SLOPE_WEIGHT)
        slope = max(slope, 0.0)
        return max(seconds - slope * rows, 0.0), slope


class Acceptance:
    """How often a guessed token stood, by how many tokens before it had matched."""

    def __init__(self) -> None:
        self._tries = [PRIOR_TRIES] * (LONGEST_MATCH + 1)
        self._stood = [PRIOR_TRIES * match / (match + 2) for match in range(LONGEST_MATCH + 1)]

    def of(self, match: int) -> float:
        """Expected share, 0 to 1."""
        match = min(match, LONGEST_MATCH)
        return self._stood[match] / self._tries[match]

    @property
    def best(self) -> float:
        """Of the kind that stands most often."""
        return max(stood / tries for stood, tries in zip(self._stood, self._tries, strict=True))

    def learn(self, match: int, guessed: int, stood: int) -> None:
        """Of ``guessed`` tokens after a match the first ``stood`` were right, and the next one, if any, was wrong."""
        for index in range(min(stood + 1, guessed)):
            kind = min(match + index, LONGEST_MATCH)
            self._tries[kind] = MEMORY * self._tries[kind] + 1
            self._stood[kind] = MEMORY * self._stood[kind] + (index < stood)

    def chain(self, match: int, most: int) -> Iterator[float]:
        """For each of ``most`` guessed tokens: how likely it and all before it stand."""
        likely = 1.0
        for index in range(most):
            likely *= self.of(match + index)
            yield likely


def hopeless(rows: int, best: float, line: tuple[float, float]) -> bool:
    """Would a guess that stands with the share ``best`` lower the tokens a second of a step of so many rows?"""
    base, slope = line
    return best * (base + slope * rows) <= slope * rows


def worthwhile(rows: int, chains: Sequence[Sequence[float]], line: tuple[float, float], most: int) -> list[int]:
    """How many tokens of each guess to compute beside ``rows`` that are computed anyway; ``most`` in all.

    ``chains``: of each guess, how likely its first token stands, its first two, and so on (never growing).  Tokens a
    second are greatest when the likeliest are taken for as long as each brings more than the average so far.
    """
    base, slope = line
    tokens, seconds = float(rows), base + slope * rows
    plain = tokens / seconds if seconds > 0 else 0.0
    taken = [0] * len(chains)
    heap = [(-chain[0], index) for index, chain in enumerate(chains) if chain]
    heapify(heap)
    left = most
    while heap and left > 0:
        likely, index = -heap[0][0], heap[0][1]
        if likely * seconds <= slope * tokens:
            break
        tokens, seconds, left = tokens + likely, seconds + slope, left - 1
        taken[index] += 1
        chain = chains[index]
        if taken[index] < len(chain):
            heapreplace(heap, (-chain[taken[index]], index))
        else:
            heappop(heap)
    if seconds > 0 and tokens / seconds < LEAST_GAIN * plain:
        return [0] * len(chains)
    return taken
