"""What guessing has won and lost, so that it never costs much: it is switched off when its account is empty.

Counted in plain steps, so the machine's speed cancels out.  Pure.
"""

from __future__ import annotations

FIRST = 3.0
"""Plain steps' time that may be lost before guessing is switched off for the first time."""

MOST = 15.0
"""The same after a success, however long."""

ENOUGH = 2.0
"""What is left of it when guessing is tried again."""

EXPLORED = 0.004
"""Part of a plain step's time that each step adds: what may be lost by trying again, in the long run."""

LARGEST_LOSS = 4.0
"""One step counts as a loss of so many plain steps at most: what is beyond was no fault of the guess."""


class Account:
    """Open while there is something to lose.  Closed, it opens again when enough of it has been saved."""

    def __init__(self) -> None:
        self._left = FIRST
        self.is_open = True

    def step(self) -> bool:
        """A step was computed, with guesses or without.  True if the account has just been opened again."""
        self._left = min(max(FIRST, self._left), self._left + EXPLORED)
        if self.is_open or self._left < ENOUGH:
            return False
        self.is_open = True
        return True

    def settle(self, gained: float) -> None:
        """A step brought so many plain steps' worth of tokens more than the plain steps' worth of time that it took,
        guessing included; negative: less."""
        self._left = min(MOST, self._left + max(gained, -LARGEST_LOSS))
        if self._left <= 0.0:
            self.is_open = False
