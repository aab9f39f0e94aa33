"""The consumer's end of one flight: what was delivered and not yet taken, and a way to wait for more.

Knows nothing about workers.  Bounded by the answer's own length, since a flight delivers each token once.
"""

from __future__ import annotations

import asyncio
from collections import deque

from penstock.errors import PenstockError
from penstock.router.effects import Effects
from penstock.router.failover import Flight
from penstock.router.spans import FlightSpans, Place
from penstock.types import TokenBatch


class Stream:
    """A flight and its buffer.  One consumer; waking it costs one task switch for all that has come meanwhile."""

    __slots__ = (
        "_batches",
        "_error",
        "_waiter",
        "first_at",
        "flight",
        "last_at",
        "queued_s",
        "retried",
        "settled",
        "spans",
        "stopped",
    )

    def __init__(self, flight: Flight, spans: FlightSpans | None = None) -> None:
        self.flight = flight
        self.spans = spans  # None: nobody records it
        self.settled = False  # the flight is over and has been counted
        self.stopped = False  # the consumer has what it wanted, though the flight was not over
        self.first_at: float | None = None  # when the first token came
        self.last_at = 0.0
        self.queued_s = 0.0
        self.retried = 1  # the latest epoch that was counted as a resubmission after a failure
        self._batches: deque[TokenBatch] = deque()
        self._error: PenstockError | None = None
        self._waiter: asyncio.Future[None] | None = None

    def failed(self, place: Place, reason: str, effects: Effects, now: float) -> None:
        """For whoever records it; see ``FlightSpans.failed``."""
        if self.spans is not None:
            self.spans.failed(place, reason, effects, now)

    def retries(self) -> bool:
        """Is what comes next a resubmission after a failure?  Once an epoch."""
        flight = self.flight
        counted, self.retried = self.retried, max(self.retried, flight.epoch if flight.after_failure else 0)
        return self.retried > counted

    def put(self, batch: TokenBatch) -> None:
        """Deliver to the consumer."""
        self._batches.append(batch)
        self._wake()

    def fail(self, error: PenstockError) -> None:
        """The consumer gets what is buffered, and then this."""
        self._error = error
        self._wake()

    async def take(self) -> TokenBatch:
        """The next batch.  Raises what ``fail`` was given, once nothing is buffered."""
        while not self._batches:
            if self._error is not None:
                raise self._error
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._batches.popleft()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
