"""Requests that were sent to a worker and are not there: the gateway's book against what an idle worker reports.

A message can be lost with the connection that carried it, without either end hearing of it.  A worker that says
again and again that it has nothing, while the book says that it has, has lost them.  Pure; knows nothing of messages.
"""

from __future__ import annotations

from penstock.router.fleet import Fleet
from penstock.types import RequestId

FORGOTTEN_S = 1.5
"""How long a worker must have been idle, with the same requests in the book, before they count as lost."""


class Forgotten:
    """Remembers since when each worker has been idle against the book."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int], tuple[frozenset[RequestId], float]] = {}

    def look(self, fleet: Fleet, now: float) -> list[tuple[int, tuple[RequestId, ...]]]:
        """Slots, and the requests that their workers have lost."""
        since: dict[tuple[int, int], tuple[frozenset[RequestId], float]] = {}
        lost: list[tuple[int, tuple[RequestId, ...]]] = []
        for slot, report in enumerate(fleet.reports):
            work = tuple(fleet.work(slot))
            if report is None or not work or report.running or report.queued:
                continue
            key, book = (slot, fleet.incarnations[slot]), frozenset(work)
            before = self._since.get(key)
            began = before[1] if before is not None and before[0] == book else now
            if now - began >= FORGOTTEN_S and fleet.heard[slot] > began:
                lost.append((slot, work))
            else:
                since[key] = (book, began)
        self._since = since
        return lost
