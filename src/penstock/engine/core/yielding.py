"""How long a class may be left out: the first of its requests then goes on as one of the first class.

Work of lower classes fills what the first one leaves, and the first may leave nothing, neither time nor pages.  Once
nothing of a class was computed for ``patience_s``, one request of it is promoted, for good: the first that runs, or
else the first that waits.  So every request ends, and of all that is promoted only one at a time takes part in steps
that it would not fill.  Pure; knows no steps.
"""

from __future__ import annotations

from penstock.engine.core.request import Request
from penstock.engine.core.table import RequestTable
from penstock.types import Leg


class Yielding:
    """Since when each class was left out."""

    def __init__(self, table: RequestTable, patience_s: float) -> None:
        self._table = table
        self._patience_s = patience_s
        self._since: dict[int, float] = {}  # rank -> when something of it was computed last, or could first have been

    def look(self, now: float) -> int | None:
        """Promote who is due.  The rank of the first class that has anything to do here; None: nobody has."""
        table = self._table
        ranks = {request.rank for request in table.running.values()} | table.queue.ranks()
        first = min(ranks, default=None)
        if len(ranks) < 2:
            self._since.clear()
            return first
        self._since = {rank: self._since.get(rank, now) for rank in sorted(ranks) if rank != first}
        for rank, since in self._since.items():
            if now - since >= self._patience_s:
                self._promote(rank)
                self._since[rank] = now
                first = 0
        return first

    def served(self, ranks: set[int], now: float) -> None:
        """Something of these classes is computed now."""
        for rank in ranks & self._since.keys():
            self._since[rank] = now

    def _promote(self, rank: int) -> None:
        table = self._table
        runs = [each for each in table.running.values() if each.rank == rank]
        if runs:
            min(runs, key=_order).promote()
            return
        table.queue.promote(next(each for each in table.queue.heads() if each.rank == rank))


def _order(request: Request) -> tuple[bool, tuple[int, float, int]]:
    """Who holds a receiver's pages, too, first: two workers' memory waits for it."""
    return request.leg is not Leg.PREFILL, request.order
