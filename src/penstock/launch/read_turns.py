"""How much of what clients send is parsed in one turn of the event loop, by all connections together.

Requests that arrive together would else all begin in one turn.  Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable


class ReadTurns:
    """So many pieces a turn; the others wait in the order in which they came."""

    def __init__(self, per_turn: int) -> None:
        self._per_turn = per_turn
        self._left = per_turn  # in this turn
        self._waiting: deque[Callable[[], None]] = deque()
        self._next_turn_is_due = False

    def take(self) -> bool:
        """May a piece be parsed now?  Else it is to wait."""
        if self._waiting or not self._left:
            return False
        self._left -= 1
        self._look_again()
        return True

    def wait(self, parse: Callable[[], None]) -> None:
        """Call this when it is its turn.  There is no way to take it back: of who has gone it may do nothing."""
        self._waiting.append(parse)
        self._look_again()

    def _look_again(self) -> None:
        if not self._next_turn_is_due:
            self._next_turn_is_due = True
            asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        self._next_turn_is_due, self._left = False, self._per_turn
        try:
            while self._waiting and self._left:
                self._left -= 1
                self._waiting.popleft()()
        finally:
            if self._waiting or self._left < self._per_turn:
                self._look_again()
