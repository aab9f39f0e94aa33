"""What this gateway has at workers, so that their numbers are right between two reports.

::

    sent --a report has heard of it--> counted --> ended
     |  on top of what is reported      |  in what is reported       |  taken off it until the next report
     +--> begun: its prompt is read, and only its answer is left

A report that comes over a link was made after everything that came over it before; so the next one no longer counts
what has ended.  Pure: knows slots and requests, and what they ask (``columns.Due``).
"""

from __future__ import annotations

from penstock.router.columns import Columns, Due
from penstock.types import RequestId


class Book:
    """Keeps the gateway's own part of ``columns``.  A request is at a slot at most once."""

    def __init__(self, columns: Columns) -> None:
        self._columns = columns
        self._sent: list[dict[RequestId, tuple[int, Due]]] = []  # by slot: (serial, what it asks)
        self._counted: list[dict[RequestId, Due]] = []  # by slot

    def add(self) -> None:
        """One slot more."""
        self._sent.append({})
        self._counted.append({})

    def clear(self, slot: int) -> None:
        """Everything there is over."""
        self._sent[slot].clear()
        self._counted[slot].clear()
        self._columns.forget_sent(slot)

    def sent(self, slot: int, request: RequestId, due: Due, serial: int) -> None:
        """It was sent there, instead of what it had there before."""
        self.ended(slot, request)
        self._sent[slot][request] = (serial, due)
        self._columns.sent(slot, due)

    def reported(self, slot: int, heard: int) -> None:
        """A report has come that counts what was sent up to the serial number ``heard``."""
        self._columns.forget_gone(slot)
        sent = self._sent[slot]
        for request in [request for request, (serial, _) in sent.items() if serial <= heard]:
            due = self._counted[slot][request] = sent.pop(request)[1]
            self._columns.counted(slot, due)

    def begun(self, slot: int, request: RequestId) -> None:
        """Its prompt is read: a token came."""
        due = self._counted[slot].get(request)
        if due is not None:
            if due.tokens:
                self._columns.gone(slot, _read_of(due))
                self._counted[slot][request] = _unread(due)
            return
        serial, due = self._sent[slot].get(request, (0, None))
        if due is not None and due.tokens:
            self._columns.counted(slot, _read_of(due))
            self._sent[slot][request] = (serial, _unread(due))

    def ended(self, slot: int, request: RequestId) -> None:
        """It has nothing there any more."""
        due = self._counted[slot].pop(request, None)
        if due is not None:
            self._columns.gone(slot, due)
            return
        sent = self._sent[slot].pop(request, None)
        if sent is not None:
            self._columns.counted(slot, sent[1])


def _read_of(due: Due) -> Due:
    """Of what is due, the reading."""
    return Due(tokens=due.tokens, pairs=due.pairs, batch_tokens=due.batch_tokens, batch_pairs=due.batch_pairs)


def _unread(due: Due) -> Due:
    """Of what is due, all but the reading."""
    return due._replace(tokens=0, pairs=0, batch_tokens=0, batch_pairs=0)
