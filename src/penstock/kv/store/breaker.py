"""When a tier that fails is left alone, and when it is tried again.  Pure."""

from __future__ import annotations

FAILURES = 3
"""In a row, after which nothing is asked of the tier for a while."""

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0


class Breaker:
    """Closed while the tier works.  Opens after failures in a row, longer each time; one success closes it."""

    def __init__(self) -> None:
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._until = float("-inf")

    def allows(self, now: float) -> bool:
        """May the tier be asked?  After a rest everybody may; the first failure ends that."""
        return now >= self._until

    def worked(self) -> None:
        """It did what was asked, in time."""
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._until = float("-inf")

    def failed(self, now: float) -> bool:
        """It did not.  True when it is left alone from now on, and was not before."""
        self._failures += 1
        if self._failures < FAILURES or now < self._until:
            return False
        self._until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        return True
