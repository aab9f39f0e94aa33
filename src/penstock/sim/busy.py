"""When a worker computed: spans of time, and how much of them lies between given moments."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray


class Busy:
    """Spans in order of time; those that touch are one."""

    def __init__(self) -> None:
        self._spans: list[tuple[float, float]] = []

    def note(self, begun: float, until: float) -> None:
        """From then until now."""
        if self._spans and self._spans[-1][1] == begun:
            begun = self._spans.pop()[0]
        self._spans.append((begun, until))

    @property
    def seconds(self) -> float:
        """All together."""
        return sum(end - begin for begin, end in self._spans)

    def between(self, edges: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of those, how many lie between each two of ``edges``."""
        ends = np.array([(0.0, 0.0), *self._spans])
        reached = np.concatenate(([0.0], np.cumsum(ends[:, 1] - ends[:, 0])))
        place = np.searchsorted(ends[:, 0], edges, side="right") - 1
        until: NDArray[np.float64] = reached[place] + np.clip(edges, ends[place, 0], ends[place, 1]) - ends[place, 0]
        return np.diff(until)
