"""All that is to be fetched from one source: what waits, what is on its way, and over how many connections.

Called by the worker's loop (``fetch``, ``stop``) and by the threads of its connections (``take``, ``lost`` and so on).
What is asked for in one go is about as much as comes in ``BATCH_S``: a slow link is not filled for seconds with pages
that somebody may cancel.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.config.limits import HandOverConfig
from penstock.kv.transfer.port import REFUSED, Landed, PageSeal, Wanted
from penstock.kv.transfer.tcp_frames import MAX_PAGES
from penstock.kv.transfer.tcp_line import Batch, Errands, Key, Line, Order
from penstock.wire.messages import PageSource
from penstock.wire.page_doors import PagesAt

log = logging.getLogger("penstock.worker")

BATCH_S = 0.02
BATCH_BYTES = 8 << 20
"""Most of one go."""

FIRST_GUESS = 50e6
"""Bytes a second of a connection over which nothing has come yet."""

_SMOOTHING = 0.3


@dataclass(slots=True, eq=False)
class _Way:
    """One connection's part."""

    line: Line
    flying: list[Batch] = field(default_factory=list[Batch])


class Road(Errands):
    """To ``source``; ``land`` is told what becomes of pages, by any thread, and of none that was stopped before.
    ``busy_s`` is the processor time of its connections.

    It is called under this road's lock, and may take no lock that is held while this road is called.
    """

    def __init__(
        self,
        source: PageSource,
        config: HandOverConfig,
        seal: PageSeal,
        sealed: bool,
        land: Callable[[Sequence[Landed]], None],
    ) -> None:
        self.source = source
        self.config = config
        self.seal = seal
        self.sealed = sealed
        self._land = land
        self._changed = threading.Condition()  # of all that follows
        self._doors: dict[Key, PagesAt] = {}
        self._pending: deque[Order] = deque()
        self._ways: dict[Line, _Way] = {}
        self.busy_s = 0.0
        self._idle = 0  # lines that wait for something to do
        self._rate = FIRST_GUESS
        self._closed = False

    # --- for the worker's loop ---------------------------------------------------------------------------------------

    def door(self, at: PagesAt) -> None:
        """See ``port.PageCarrier``."""
        with self._changed:
            self._doors[at.request, at.epoch] = at

    def leads_to(self, key: Key) -> bool:
        """Did anybody say where these pages are?"""
        return key in self._doors

    def fetch(self, pages: Sequence[Wanted]) -> None:
        """Have pages brought, whose doors are known."""
        with self._changed:
            for wanted in pages:
                if self._doors[wanted.frame.request, wanted.frame.epoch].sealed == self.sealed:
                    self._pending.append(Order(wanted))
                else:
                    self._land((Landed(wanted, "its pages would not come as agreed"),))
            if not self._pending:
                return
            if self._idle:
                self._changed.notify()
            elif len(self._ways) < self.config.connections:
                self._open()

    def stop(self, key: Key) -> None:
        """See ``port.PageCarrier``."""
        with self._changed:
            self._doors.pop(key, None)
            if any(order.key == key for order in self._pending):
                self._pending = deque(order for order in self._pending if order.key != key)
            writing: list[tuple[Line, Batch]] = []
            for way in self._ways.values():
                for batch in way.flying:
                    if batch.key == key:
                        batch.stopped = True
                        writing.append((way.line, batch))
        for line, batch in writing:
            line.settle(batch)

    @property
    def unused(self) -> bool:
        """Is there nothing to come, and no connection?"""
        with self._changed:
            return not (self._doors or self._pending or self._ways)

    def close(self) -> None:
        """Hang up, and forget everything."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            lines = list(self._ways)
            self._changed.notify_all()
        for line in lines:
            line.hang_up()

    # --- for its connections -----------------------------------------------------------------------------------------

    def take(self, line: Line, wait_s: float) -> Batch | None:
        """Something to do.  None after ``wait_s`` without any; a line that waited in vain is none of this road's any
        more."""
        with self._changed:
            if not self._pending and not self._closed and wait_s:
                self._idle += 1
                self._changed.wait_for(lambda: self._pending or self._closed, wait_s)
                self._idle -= 1
            if self._closed or not self._pending:
                if wait_s:
                    self._ways.pop(line, None)
                return None
            batch = self._batch()
            self._ways[line].flying.append(batch)
            if self._pending and self._idle:
                self._changed.notify()
            elif self._pending and len(self._ways) < self.config.connections:
                self._open()
            return batch

    def came(self, line: Line, batch: Batch, seconds: float) -> None:
        """All of a batch is here, so many seconds after the one before it on that line, or after it was asked for."""
        nbytes = len(batch.orders) * self.seal.layout.page_bytes
        with self._changed:
            self._ways[line].flying.remove(batch)
            self._rate += _SMOOTHING * (nbytes / max(seconds, 1e-6) - self._rate)

    def refused(self, line: Line, batch: Batch) -> None:
        """The sender hands these out no more."""
        with self._changed:
            self._ways[line].flying.remove(batch)
            if not batch.stopped:
                self._fail(batch.orders, REFUSED)

    def landed(self, batch: Batch, failures: Sequence[str | None]) -> None:
        """The next pages of a batch are here, or others are: for each what is wrong with it."""
        with self._changed:  # what is told after a stop would be taken for news of whoever pulls it next
            first, batch.landed = batch.landed, batch.landed + len(failures)
            if not batch.stopped:
                orders = batch.orders[first : batch.landed]
                self._land([Landed(order.wanted, why) for order, why in zip(orders, failures, strict=True)])

    def worked(self, seconds: float) -> None:
        """So much processor time was spent."""
        with self._changed:
            self.busy_s += seconds

    def lost(self, line: Line, why: str) -> bool:
        """The connection broke: what was to come over it is asked for again.  False: this road is closed.

        Answers come in the order of the questions, so only the first batch can have been what it broke over, and only
        that has lost a try.
        """
        with self._changed:
            way = self._ways[line]
            given_up = self._charge(way.flying[0]) if way.flying else []
            hopeless = {order.key for order in given_up}
            for batch in reversed(way.flying):
                if not batch.stopped and batch.key in self._doors:
                    self._pending.extendleft(reversed(batch.orders[batch.landed :]))
            if hopeless:
                self._pending = deque(order for order in self._pending if order.key not in hopeless)
            way.flying.clear()
            self._fail(given_up, f"its pages cannot be fetched: {why}")
            self._changed.notify()
            return not self._closed

    # --- inside ------------------------------------------------------------------------------------------------------

    def _charge(self, batch: Batch) -> list[Order]:
        """A connection was lost over it.  Those of its pages that are not fetched any more."""
        left = [] if batch.stopped else batch.orders[batch.landed :]
        for order in left:
            order.tries += 1
        return [order for order in left if order.tries >= self.config.fetch_tries]

    def _open(self) -> None:
        """One connection more, if there can be; what waits fails when there is none at all."""
        line = Line(self)
        self._ways[line] = _Way(line)
        try:
            line.start()
        except RuntimeError as error:  # the system gives no more threads
            log.warning("no further connection for pages of %s: %s", self.source.worker, error)
            del self._ways[line]
            if not self._ways:
                waiting, self._pending = list(self._pending), deque()
                self._fail(waiting, f"its pages cannot be fetched: {error}")

    def _batch(self) -> Batch:
        """The first that waits, and what follows of the same leg."""
        size = self.seal.layout.page_bytes
        most = min(MAX_PAGES, max(1, int(min(BATCH_BYTES, self._rate * BATCH_S)) // size))
        orders = [self._pending.popleft()]
        key = orders[0].key
        while self._pending and len(orders) < most and self._pending[0].key == key:
            orders.append(self._pending.popleft())
        return Batch(key, self._doors[key], orders)

    def _fail(self, orders: list[Order], why: str) -> None:
        self._land([Landed(order.wanted, why) for order in orders])
