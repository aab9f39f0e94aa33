"""A histogram that counts an observation as often as it stands for: one look for all tokens of a message.

Shown like those of prometheus_client, which takes a lock and walks its buckets for each single observation.  For one
thread.  Knows nothing about names.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from itertools import accumulate

from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString


class WeightedHistogram:
    """``buckets``: upper bounds, ascending, without infinity."""

    def __init__(self, buckets: Sequence[float]) -> None:
        self._bounds = [float(bound) for bound in buckets]
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0
        self._created = time.time()

    def observe(self, value: float, times: int = 1) -> None:
        """``value`` was seen so many times."""
        self._counts[bisect_left(self._bounds, value)] += times
        self._sum += value * times

    def family(self, name: str, help_: str, labels: Mapping[str, str]) -> Metric:
        """For a scrape."""
        metric = Metric(name, help_, "histogram")
        below = list(accumulate(self._counts))
        for bound, count in zip([*self._bounds, float("inf")], below, strict=True):
            metric.add_sample(f"{name}_bucket", {**labels, "le": _shown(bound)}, count)
        metric.add_sample(f"{name}_count", dict(labels), below[-1])
        metric.add_sample(f"{name}_sum", dict(labels), self._sum)
        metric.add_sample(f"{name}_created", dict(labels), self._created)
        return metric


def _shown(bound: float) -> str:
    return str(floatToGoString(bound))  # type: ignore[no-untyped-call]
