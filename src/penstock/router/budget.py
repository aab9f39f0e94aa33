"""How many resubmissions failures may cause: a bucket that new requests and time fill, and each resubmission empties.

A worker's death costs one resubmission for each of its requests, and there is enough for that.  Where everything that
is resubmitted fails again, the bucket is empty soon and the rest is spread out in time: the fleet does not drown in
repetitions of what does not work.  Nothing is refused here; a request's own patience ends it.  Pure: time is handed in.
"""

from __future__ import annotations

from penstock.config.schema import FailoverConfig


class RetryBudget:
    """Full to begin with."""

    def __init__(self, config: FailoverConfig, now: float) -> None:
        self._config = config
        self._left = float(config.retry_burst)
        self._at = now

    def request(self) -> None:
        """A new request has come."""
        self._left = min(self._left + self._config.retry_share, float(self._config.retry_burst))

    def spend(self, now: float) -> float:
        """One resubmission: when it may go, ``now`` or later."""
        config = self._config
        self._left = min(self._left + max(0.0, now - self._at) * config.retry_per_s, float(config.retry_burst)) - 1
        self._at = max(self._at, now)
        return now if self._left >= 0 else now - self._left / config.retry_per_s
