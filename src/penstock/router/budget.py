"""How many repeated resubmissions there may be: a bucket that new requests and time fill, and each of them empties.

A stream's first resubmission costs nothing: a host that dies with thousands of streams must not keep any of them from
going on.  Who fails again without a new token in between pays.  There is enough for every open stream to do so once;
where everything that is resubmitted fails again and again, the rest is spread out in time, and the fleet does not drown
in repetitions of what does not work.  Nothing is refused here, and nobody waits for longer than ``retry_wait_s``.
Pure: time is handed in.
"""

from __future__ import annotations

from penstock.config.limits import FailoverConfig


class RetryBudget:
    """Full to begin with."""

    def __init__(self, config: FailoverConfig, now: float) -> None:
        self._config = config
        self._spent = 0.0  # what has not been filled up again
        self._at = now

    def request(self) -> None:
        """A new request has come."""
        self._spent = max(0.0, self._spent - self._config.retry_share)

    def spend(self, now: float, open_streams: int) -> float:
        """One resubmission: when it may go, ``now`` or later.  There is room for each of the ``open_streams``."""
        config = self._config
        self._spent = max(0.0, self._spent - max(0.0, now - self._at) * config.retry_per_s) + 1
        self._at = max(self._at, now)
        lacking = self._spent - max(config.retry_burst, open_streams)
        return now + min(max(0.0, lacking / config.retry_per_s), config.retry_wait_s)
