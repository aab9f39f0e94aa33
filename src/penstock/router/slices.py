"""Work for many streams at once, done in slices: so many units in one turn of the event loop, in order.

A host that dies takes thousands of streams with it, and one that becomes ready is waited for by as many.  All of them
are served soon, and the streams that go on meanwhile get their turns in between.  Knows nothing of what a unit is.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

log = logging.getLogger("penstock.router")


@contextmanager
def logged_errors(what: str) -> Iterator[None]:
    """Around what is done for one of many streams: an error in it is logged, and must not keep the others from theirs.

    Work that is given to ``Slices`` ends with the first error that it lets through.
    """
    try:
        yield
    except Exception:
        log.exception("%s", what)


class Slices:
    """``later`` runs what it is given in the next turn of the event loop."""

    def __init__(self, units_per_turn: int, later: Callable[[Callable[[], None]], object]) -> None:
        self._per_turn = units_per_turn
        self._left = units_per_turn  # units that may still be done in this turn
        self._later = later
        self._next_turn_is_due = False
        self._work: deque[Iterator[None]] = deque()
        self._running = False

    def __len__(self) -> int:
        """Pieces of work that are not finished."""
        return len(self._work)

    def add(self, work: Iterator[None]) -> None:
        """One unit is what ``work`` does up to its next ``yield``.  Begins at once, if this turn has room left."""
        self._work.append(work)
        self._run()

    def _run(self) -> None:
        if self._running:  # a unit has led to more work: whoever runs it comes to that, too
            return
        self._running = True
        try:
            while self._work and self._left > 0:
                self._left -= 1
                try:
                    next(self._work[0])
                except StopIteration:
                    self._work.popleft()
                except Exception:
                    log.exception("work for many streams failed")
                    self._work.popleft()
        finally:
            self._running = False
        if self._left < self._per_turn and not self._next_turn_is_due:
            self._next_turn_is_due = True
            self._later(self._turn)

    def _turn(self) -> None:
        self._next_turn_is_due = False
        self._left = self._per_turn
        self._run()
