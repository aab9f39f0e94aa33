"""Links from this worker to the workers that send it pages: one for each, made when a request first names it."""

from __future__ import annotations

from collections.abc import Iterator

from penstock.errors import ConfigError
from penstock.wire.messages import PageSource, PagesReceived, PullPages
from penstock.wire.transport import Link, Received, Transport

MESSAGES_PER_LINK = 1024
"""Messages taken from one link in one turn."""


class Peers:
    """Connections to page sources, by source.  A restarted source has another incarnation and another endpoint."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._links: dict[PageSource, Link] = {}

    def reach(self, source: PageSource) -> bool:
        """Have a link to this source.  Done early: whoever listens lets new connections in between two steps only.

        False when there is none to be had: a later incarnation is known, or the endpoint is none.
        """
        if source in self._links:
            return True
        incarnations = [known.incarnation for known in self._links if known.worker == source.worker]
        if any(incarnation > source.incarnation for incarnation in incarnations):
            return False
        try:
            link = self._transport.connect(source.endpoint)
        except ConfigError:
            return False
        self._close_older(source)
        self._links[source] = link
        return True

    def send(self, source: PageSource, message: PullPages | PagesReceived) -> None:
        """Say something to a source.  What is lost is said again by the hand-over's own timers."""
        link = self._links.get(source)
        if link is not None:
            link.send(message)

    def received(self) -> Iterator[tuple[PageSource, Received]]:
        """Everything that has come over any link, up to a limit a link."""
        for source, link in list(self._links.items()):
            for _ in range(MESSAGES_PER_LINK):
                received = link.recv()
                if received is None:
                    break
                yield source, received

    def links(self) -> list[Link]:
        """What to wait for."""
        return list(self._links.values())

    def _close_older(self, source: PageSource) -> None:
        """Earlier incarnations of a worker never come back."""
        for known in [s for s in self._links if s.worker == source.worker and s.incarnation < source.incarnation]:
            self._links.pop(known).close()
