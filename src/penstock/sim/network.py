"""Links between workers and to their tiers: first come, first served, at a number of bytes a second."""

from __future__ import annotations


class Wire:
    """One direction of one link."""

    def __init__(self, bytes_s: float) -> None:
        self._bytes_s = bytes_s
        self.free_at = 0.0  # seconds: when what was given to it so far is through
        self.busy_s = 0.0

    def carry(self, nbytes: float, now: float, other: Wire | None = None) -> float:
        """When so many bytes are through that are given to it now; ``other`` is busy with them, too."""
        begin = max(now, self.free_at, other.free_at if other is not None else 0.0)
        took = nbytes / min(self._bytes_s, other._bytes_s if other is not None else self._bytes_s)
        for wire in (self, other):
            if wire is not None:
                wire.free_at = begin + took
                wire.busy_s += took
        return begin + took
