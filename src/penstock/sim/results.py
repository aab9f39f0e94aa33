"""What happened to each request, token by token, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]

QUANTILES = (0.5, 0.9, 0.99)


@dataclass(frozen=True, slots=True, kw_only=True)
class LatencyTargets:
    """What an answer must keep to count as good."""

    ttft_s: float = 1.0
    itl_s: float = 0.05  # the mean of the answer's intervals


@dataclass(slots=True)
class RequestResult:
    """One request, as its client sees it."""

    arrival: float
    prompt: int  # tokens
    first_at: float = 0.0
    last_at: float = 0.0
    tokens: int = 0
    cached: int = 0  # prompt tokens that were not computed
    late: int = 0  # intervals beyond the target
    done: bool = False
    failed: str = ""  # why it has no answer

    @property
    def ttft_s(self) -> float:
        return self.first_at - self.arrival

    @property
    def itl_s(self) -> float:
        """The mean."""
        return (self.last_at - self.first_at) / (self.tokens - 1) if self.tokens > 1 else 0.0


@dataclass(slots=True)
class RunResults:
    """Everything measured in a run.  Intervals are kept as (seconds, how many)."""

    targets: LatencyTargets
    requests: dict[int, RequestResult] = field(default_factory=dict[int, RequestResult])
    _gaps: list[float] = field(default_factory=list[float])
    _counts: list[int] = field(default_factory=list[int])

    def add_request(self, number: int, arrival: float, prompt: int) -> None:
        """A request has come."""
        self.requests[number] = RequestResult(arrival, prompt)

    def add_tokens(self, number: int, tokens: int, now: float, spacing_s: float) -> None:
        """Add ``tokens`` tokens, the last of them now, each ``spacing_s`` after the one before."""
        request = self.requests[number]
        begin = now - (tokens - 1) * spacing_s
        if request.tokens:
            self._interval(request, begin - request.last_at, 1)
        else:
            request.first_at = begin
        if tokens > 1:
            self._interval(request, spacing_s, tokens - 1)
        request.tokens += tokens
        request.last_at = now

    def _interval(self, request: RequestResult, seconds: float, count: int) -> None:
        self._gaps.append(seconds)
        self._counts.append(count)
        if seconds > self.targets.itl_s:
            request.late += count

    @property
    def intervals(self) -> tuple[FloatArray, FloatArray]:
        """(seconds, how many)."""
        return np.array(self._gaps, np.float64), np.array(self._counts, np.float64)

    def within_targets(self) -> list[RequestResult]:
        """Requests that were answered within the targets."""
        ttft_s, itl_s = self.targets.ttft_s, self.targets.itl_s
        return [each for each in self.requests.values() if each.done and each.ttft_s <= ttft_s and each.itl_s <= itl_s]

    def smooth(self) -> list[RequestResult]:
        """Requests within the targets with 99 of 100 intervals within the target, each interval by itself."""
        return [each for each in self.within_targets() if each.late <= 0.01 * max(1, each.tokens - 1)]

    def ttfts(self) -> FloatArray:
        """Seconds to first tokens, in order of arrival."""
        return np.array([each.ttft_s for each in self.requests.values() if each.tokens], np.float64)


def quantiles(values: FloatArray, counts: FloatArray | None = None) -> dict[str, float]:
    """p50, p90, p99 and the mean of values, each of which stands for ``counts`` of its kind; zeros of none."""
    names = [f"p{round(q * 100)}" for q in QUANTILES]
    if not len(values):
        return dict.fromkeys((*names, "mean"), 0.0)
    counts = np.ones(len(values)) if counts is None else counts
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(counts[order])
    places = np.minimum(np.searchsorted(reached, np.array(QUANTILES) * reached[-1]), len(values) - 1)
    found = {name: float(values[order[place]]) for name, place in zip(names, places, strict=True)}
    return found | {"mean": float(values @ counts / counts.sum())}
