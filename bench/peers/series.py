"""Figures of many rounds: medians, spread, and ratios within a round.

A figure is named by its measure and the way to it: ``("decode", "16")``, ``("http8", "itl_s", "p99")``.  Where one
round has several tries of a figure, their median is the round's.  Pure.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from bench.peers.places import PEERS
from bench.peers.records import Record

Path = tuple[str, ...]
Rounds = dict[int, float]


@dataclass(frozen=True, slots=True)
class Spread:
    """Over the rounds."""

    median: float
    least: float
    most: float
    rounds: int

    @classmethod
    def of(cls, rounds: Rounds) -> Spread | None:
        if not rounds:
            return None
        return cls(statistics.median(rounds.values()), min(rounds.values()), max(rounds.values()), len(rounds))


class Series:
    """All records of one model."""

    def __init__(self, records: Iterable[Record], model: str) -> None:
        self._found = {
            (record.system, record.measure, record.round): record.figures
            for record in records
            if record.model == model and record.error is None and record.round >= 0
        }

    def values(self, system: str, path: Path) -> Rounds:
        """The figure of each round that has it."""
        found: Rounds = {}
        for (of, measure, number), figures in self._found.items():
            if (of, measure) == (system, path[0]):
                value = _follow(figures, path[1:])
                if value is not None:
                    found[number] = value
        return found

    def spread(self, system: str, path: Path) -> Spread | None:
        return Spread.of(self.values(system, path))

    def ratio(self, one: Rounds, other: Rounds) -> Spread | None:
        """one / other in each round that has both."""
        return Spread.of({number: one[number] / other[number] for number in one.keys() & other.keys()})

    def best_peer(self, path: Path, *, least: bool, peers: Sequence[str] = PEERS) -> str | None:
        """The peer with the best median."""
        medians = {peer: found.median for peer in peers if (found := self.spread(peer, path)) is not None}
        if not medians:
            return None
        return (min if least else max)(medians, key=medians.__getitem__)

    def against_best(self, system: str, path: Path, *, least: bool = False) -> tuple[str, Spread] | None:
        """(the best peer, our figure divided by its in each round)."""
        peer = self.best_peer(path, least=least)
        if peer is None:
            return None
        found = self.ratio(self.values(system, path), self.values(peer, path))
        return None if found is None else (peer, found)


def _follow(figures: object, path: Path) -> float | None:
    for step in path:
        if not isinstance(figures, dict) or step not in figures:
            return None
        figures = figures[step]
    if isinstance(figures, list):
        return statistics.median(figures) if figures else None
    return float(figures) if isinstance(figures, int | float) else None
