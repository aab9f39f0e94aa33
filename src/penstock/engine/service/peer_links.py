"""Links from this worker to the workers that send it pages, or encode images for it: one for each, made when a request
first names it.

A link whose other end is gone keeps reconnecting.  So one that was not used for ``idle_s`` is closed, and
made again should a request name its source once more.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

from penstock.errors import ConfigError
from penstock.types import is_older_incarnation
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import EncodeImage, PagesReceived, PullPages
from penstock.wire.transport import Link, Received, Transport

log = logging.getLogger("penstock.worker")

MESSAGES_PER_LINK = 1024
"""Messages taken from one link in one turn."""


class PeerLinks:
    """Connections to page sources, by source.  A restarted source has another incarnation and another endpoint."""

    def __init__(self, transport: Transport, idle_s: float) -> None:
        self._transport = transport
        self._idle_s = idle_s
        self._links: dict[PageSource, Link] = {}
        self._used: dict[PageSource, float] = {}  # of each link: when it was last named or spoken over

    def connect(self, source: PageSource, now: float) -> bool:
        """Have a link to this source.  Done early, because a worker accepts new connections between two steps only.

        False when there is none to be had: a later incarnation is known, or the endpoint is none.
        """
        if source in self._links:
            self._used[source] = now
            return True
        others = [known for known in self._links if known.worker == source.worker]
        if any(is_older_incarnation(source.incarnation, known.incarnation) for known in others):
            return False
        try:
            link = self._transport.connect(source.endpoint, worker=source.worker)
        except ConfigError:
            return False
        for known in others:  # an earlier incarnation never comes back
            self._close(known)
        self._links[source] = link
        self._used[source] = now
        return True

    def send(self, source: PageSource, message: PullPages | PagesReceived | EncodeImage, now: float) -> None:
        """Say something to a source.  What is lost is said again by the hand-over's own timers."""
        link = self._links.get(source)
        if link is not None:
            link.send(message)
            if not isinstance(message, PagesReceived):  # a last word wants no answer
                self._used[source] = now

    def messages(self) -> Iterator[tuple[PageSource, Received]]:
        """Everything that has come over any link, up to a limit a link."""
        for source, link in list(self._links.items()):
            for _ in range(MESSAGES_PER_LINK):
                received = link.recv()
                if received is None:
                    break
                yield source, received

    def close_idle(self, now: float) -> int:
        """Close links that were not used for too long; how many."""
        idle = [source for source, used in self._used.items() if now - used >= self._idle_s]
        for source in idle:
            log.info("the link to %s (%s) is not used any more", source.worker, source.endpoint)
            self._close(source)
        return len(idle)

    def links(self) -> list[Link]:
        """What to wait for."""
        return list(self._links.values())

    def _close(self, source: PageSource) -> None:
        self._links.pop(source).close()
        del self._used[source]
