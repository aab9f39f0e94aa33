"""What the latencies of a run add up to: pure arithmetic over finished requests.

Definitions (those of ``vllm bench serve``, but for the start of the clock):

* TTFT: from when the request was *due* to the first event that carried text.
* TPOT: (last event - first event) / (output tokens - 1), one value a request; undefined below two tokens.
* ITL: gaps between successive events with text, all requests together.
* E2E: from when the request was due to the last event with text.
* goodput: requests a second that met every objective given.

A request of an open loop is due when the schedule says so, however late the client came to send it or the server to
accept it: a stall is charged to every request that it delays (no coordinated omission).  In a closed loop (an
infinite rate under a concurrency limit) a request is due when its slot became free.

Knows nothing about HTTP, clocks or printing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np


@dataclass(slots=True)
class RequestRecord:
    """One request as its client saw it.  Times are seconds on one monotonic clock."""

    due: float
    sent: float
    events: list[float] = field(default_factory=list[float])  # arrivals of events with text
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0  # as the server counts; events where it does not tell
    error: str | None = None  # short kind

    @property
    def ok(self) -> bool:
        return self.error is None

    @property
    def ttft(self) -> float:
        return self.events[0] - self.due

    @property
    def e2e(self) -> float:
        return self.events[-1] - self.due

    @property
    def tpot(self) -> float | None:
        if self.output_tokens < 2:
            return None
        return (self.events[-1] - self.events[0]) / (self.output_tokens - 1)


@dataclass(frozen=True, slots=True)
class Objectives:
    """Service levels in seconds; None is no objective."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Objectives:
        """From ``ttft:500 tpot:50 e2el:2000`` (milliseconds).  Raises ValueError."""
        found: dict[str, float] = {}
        for text in texts:
            name, _, number = text.partition(":")
            key = {"ttft": "ttft", "tpot": "tpot", "e2el": "e2e", "e2e": "e2e"}.get(name)
            if key is None:
                raise ValueError(f"unknown objective {name!r}: ttft, tpot or e2el, as in ttft:500")
            milliseconds = float(number)
            if not milliseconds > 0:
                raise ValueError(f"an objective must be above 0 ms: {text!r}")
            found[key] = milliseconds / 1000
        return cls(**found)

    def met_by(self, request: RequestRecord) -> bool:
        tpot = request.tpot or 0.0
        limits = ((request.ttft, self.ttft), (tpot, self.tpot), (request.e2e, self.e2e))
        return all(limit is None or value <= limit for value, limit in limits)

    def as_dict(self) -> dict[str, float]:
        named = {"ttft_s": self.ttft, "tpot_s": self.tpot, "e2e_s": self.e2e}
        return {name: value for name, value in named.items() if value is not None}


def summary(values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float] | None:
    """mean, std, min, max and linearly interpolated percentiles as ``p50``, ``p99.9``; None of nothing."""
    if not len(values):
        return None
    array = np.asarray(values, np.float64)
    found = {"mean": float(array.mean()), "std": float(array.std()), "min": float(array.min())}
    for percentile in percentiles:
        found[f"p{percentile:g}"] = float(np.percentile(array, percentile))
    return found | {"max": float(array.max())}


def gaps(requests: Sequence[RequestRecord]) -> list[float]:
    """Inter-token latencies of all requests."""
    return [b - a for request in requests for a, b in pairwise(request.events)]


def gaps_during(requests: Sequence[RequestRecord], since: float, until: float) -> list[float]:
    """Gaps that overlap [since, until], in full: a stall at either end counts."""
    return [b - a for request in requests for a, b in pairwise(request.events) if b >= since and a <= until]


def gaps_before(requests: Sequence[RequestRecord], moment: float) -> list[float]:
    """Gaps that ended before ``moment``."""
    return [b - a for request in requests for a, b in pairwise(request.events) if b < moment]


def error_counts(requests: Sequence[RequestRecord]) -> dict[str, int]:
    """Failures by kind, most frequent first."""
    return dict(Counter(request.error for request in requests if request.error).most_common())


def measure(
    requests: Sequence[RequestRecord],
    *,
    duration: float,
    percentiles: Sequence[float],
    objectives: Objectives | None = None,
) -> dict[str, Any]:
    """All statistics of these requests over ``duration`` seconds; times are in seconds.

    Latencies are those of complete responses; failures are counted by kind.
    """
    good = [request for request in requests if request.ok and request.events]
    tpots = [tpot for request in good if (tpot := request.tpot) is not None]
    output = sum(request.output_tokens for request in good)
    prompt = sum(request.prompt_tokens for request in good)
    events = sum(len(request.events) for request in good)
    latencies: Mapping[str, Sequence[float]] = {
        "ttft_s": [request.ttft for request in good],
        "tpot_s": tpots,
        "itl_s": gaps(good),
        "e2e_s": [request.e2e for request in good],
        "send_lag_s": [request.sent - request.due for request in requests],
    }
    return {
        "duration_s": duration,
        "requests": len(requests),
        "completed": len(good),
        "failed": len(requests) - len(good),
        "errors": error_counts(requests),
        "prompt_tokens": prompt,
        "cached_tokens": sum(request.cached_tokens for request in good),
        "output_tokens": output,
        "tokens_per_event": output / events if events else None,
        "request_throughput": len(good) / duration,
        "output_throughput": output / duration,
        "total_token_throughput": (output + prompt) / duration,
        "goodput": sum(map(objectives.met_by, good)) / duration if objectives else None,
        "objectives": objectives.as_dict() if objectives else None,
    } | {name: summary(values, percentiles) for name, values in latencies.items()}
