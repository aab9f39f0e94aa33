"""How much of workers' messages is handled in one turn of the event loop, by all links together.

Knows nothing of messages but what they weigh.
"""

from __future__ import annotations

import asyncio


class TurnRoom:
    """Units that are left in this turn.  What takes the last of them may be larger than what was left."""

    def __init__(self, units: int) -> None:
        self._units = units
        self._left = units

    @property
    def has_room(self) -> bool:
        """May one more message be handled in this turn?"""
        return self._left > 0

    @property
    def left(self) -> int:
        """Units."""
        return self._left

    def take(self, units: int) -> None:
        """A message is handled."""
        if self._left == self._units:
            asyncio.get_running_loop().call_soon(self._next_turn)
        self._left -= units

    def _next_turn(self) -> None:
        self._left = self._units
