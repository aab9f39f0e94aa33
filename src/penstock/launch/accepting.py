"""Who of several processes takes a connection of the port that they share.

All of them wait on one listening socket, so that none of what is queued there is lost with a process; and whoever woke
first would take a whole burst.  So each takes one a turn of its loop, and leaves the next to the others while it is
ahead of them::

    ready to accept --not ahead--> accept one
          |
          +--------ahead of a ready sibling--> look again in RETRY_S; nobody took it for PATIENCE_S --> accept one

Ahead: more than ``LEAD`` times as many connections as the sibling that has fewest, and ``SLACK`` more.  Those that do
not beat are no siblings.  A connection counts while it is open, and for a second at least.  Knows nothing about HTTP.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from penstock.clock import Clock
from penstock.launch.board import Slot
from penstock.types import WorkerState

log = logging.getLogger(__name__)

LEAD, SLACK = 1.1, 2
RETRY_S = 0.005
PATIENCE_S = 0.05
"""So long a connection waits at most for a process that is behind and does not take it."""

FRESH_S = 0.5
"""A process that has not beaten for so long takes nothing now."""

COUNTED_S = 1.0
ALONE_AT_ONCE = 64
"""Connections that are taken a turn where there are no siblings."""

NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
NO_ROOM_S = 1.0
"""Between two tries while this process, or the system, has no room for a connection more."""


class Take(Protocol):
    """What becomes of a connection that was accepted."""

    def __call__(self, connection: socket.socket) -> None: ...


def is_ahead(own: int, others: Sequence[int]) -> bool:
    """Has a process with ``own`` connections so many more than one of the ``others`` that it leaves them the next?"""
    return bool(others) and own >= LEAD * min(others) + SLACK


class Acceptor:
    """Use: ``start`` on the running loop, ``stop``.  ``opened``: connections of this process that are open."""

    def __init__(
        self,
        listener: socket.socket,
        slots: tuple[Slot, Sequence[Slot]],
        take: Take,
        opened: Callable[[], int],
        clock: Clock,
    ) -> None:
        """``slots``: this process' own, and its siblings'."""
        self._listener = listener
        self._slot, self._siblings = slots
        self._take = take
        self._opened = opened
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._latest: deque[float] = deque()  # when connections were accepted within ``COUNTED_S``
        self._left_since: float | None = None  # since when the next connection is left to others
        self._left = 0.0  # when that was last so

    def start(self) -> None:
        """Begin to accept."""
        self._listener.setblocking(False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._listener.fileno(), self.on_readable)

    def stop(self) -> None:
        """Accept nothing more; what is queued stays for others.  Harmless when said twice."""
        if self._loop is None:
            return
        self._loop.remove_reader(self._listener.fileno())
        if self._timer is not None:
            self._timer.cancel()
        self._loop = self._timer = None

    def count(self) -> int:
        """Connections of this process, as its siblings are told."""
        since = self._clock.now() - COUNTED_S
        while self._latest and self._latest[0] < since:
            self._latest.popleft()
        count = max(self._opened(), len(self._latest))
        self._slot.tell_connections(count)
        return count

    def on_readable(self) -> None:
        """A connection waits."""
        now = self._clock.now()
        others = [slot.connections for slot in self._siblings if self._accepts(slot, now)]
        if not others:
            for _ in range(ALONE_AT_ONCE):
                if not self._accept(now):
                    return
        elif not is_ahead(self.count(), others) or self._waited(now):
            self._accept(now)
            self._left_since = None
        else:
            self._rest(RETRY_S)

    def _waited(self, now: float) -> bool:
        """Was the connection left to others for long enough?"""
        if self._left_since is None or now - self._left > 3 * RETRY_S:
            self._left_since = now  # another one: somebody took the one before
        self._left = now
        return now - self._left_since >= PATIENCE_S

    def _accept(self, now: float) -> bool:
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return False
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            log.warning("no connection can be accepted: %s", error.strerror)
            self._rest(NO_ROOM_S)
            return False
        connection.setblocking(False)
        self._latest.append(now)
        self._take(connection)
        self.count()
        return True

    def _rest(self, seconds: float) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._listener.fileno())
            self._timer = self._loop.call_later(seconds, self._go_on)

    def _go_on(self) -> None:
        self._timer = None
        if self._loop is not None:
            self._loop.add_reader(self._listener.fileno(), self.on_readable)

    def _accepts(self, slot: Slot, now: float) -> bool:
        heartbeat = slot.read()
        return heartbeat.state is WorkerState.READY and now - heartbeat.beat_s <= FRESH_S
