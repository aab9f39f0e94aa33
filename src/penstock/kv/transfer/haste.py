"""Is it sooner to compute here what is slow to come from another worker?  Pure.

Everything was computed elsewhere and only bytes are missing, so what has come since then says how long the rest will
take: pages left, by pages a second.  A sender that was stopped, a link that is slow and one that is crowded all look
alike.  The two may race: the pages are fetched only until computing begins, and by law 1 both have the same content.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from penstock.config.limits import HandOverConfig
from penstock.types import RequestId

Predict = Callable[[RequestId, int, int], float | None]
"""Seconds to compute tokens [start, stop) of a request here, with what lies before it; None: it cannot be done."""

BEFORE_THE_FIRST = 0.5
"""Pages that are taken to have come while none has: the first is on its way."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """For bytes alone: since when, and how many pages were missing then."""

    since: float
    missing: int


def nobody_can(request: RequestId, start: int, stop: int) -> float | None:
    """``Predict`` of a worker that computes no prompts."""
    del request, start, stop
    return None


class Haste:
    """``predict`` is set by whoever knows how fast this worker computes."""

    def __init__(self, config: HandOverConfig) -> None:
        self.predict: Predict = nobody_can
        self._after_s = config.hedge_after_s
        self._margin = config.hedge_margin

    def outruns(self, request: RequestId, waiting: Waiting, left: tuple[int, int, int], now: float) -> bool:
        """``left``: pages that are missing now; tokens that are here; tokens that there are to be."""
        elapsed = now - waiting.since
        missing, here, tokens = left
        if elapsed < self._after_s or not missing:
            return False
        came = max(waiting.missing - missing, BEFORE_THE_FIRST)
        coming = elapsed * missing / came
        computing = self.predict(request, here, tokens)
        return coming > self._margin * (inf if computing is None else computing)
