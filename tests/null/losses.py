"""A hub whose connections break: everything under way over one is lost, and whoever made it connects anew by itself.

That is what a DEALER over TCP does when the other end, or the way to it, goes down: neither end is told, and the
listener knows the next connection under another name.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.wire.codec import PeerMessage, decode_peer
from penstock.wire.in_memory import InMemoryHub

Loses = Callable[[PeerMessage], bool]


class BreakingHub(InMemoryHub):
    """``loses`` sees every message; when it says True, that message's connection breaks with it."""

    def __init__(self) -> None:
        super().__init__()
        self.loses: Loses = lambda message: False
        self.lost: list[PeerMessage] = []
        self._names: dict[bytes, bytes] = {}  # what a link calls itself -> what listeners call its present connection
        self._renamed = 0

    def to_listener(self, endpoint, parcel):
        link = parcel.peer
        parcel.peer = self._names.get(link, link)
        if self._breaks(parcel):
            mailbox = self._mailbox(endpoint).parcels
            for waiting in [waiting for waiting in mailbox if waiting.peer == parcel.peer]:
                mailbox.remove(waiting)
            self._reconnect(link)
            return True
        return super().to_listener(endpoint, parcel)

    def to_link(self, peer, parcel):
        if peer in self._links and self._breaks(parcel):
            self._reconnect(next((link for link, name in self._names.items() if name == peer), peer))
            return True
        return super().to_link(peer, parcel)

    def _breaks(self, parcel) -> bool:
        message = decode_peer(parcel.header)
        if not self.loses(message):
            return False
        self.lost.append(message)
        return True

    def _reconnect(self, link: bytes) -> None:
        box = self._links.pop(self._names.get(link, link), None)
        if box is None:
            return
        box.parcels.clear()
        self._renamed += 1
        self._names[link] = b"\1" + self._renamed.to_bytes(4, "big")
        self._links[self._names[link]] = box

    def remove_link(self, peer):
        super().remove_link(self._names.pop(peer, peer))


class SwallowingHub(InMemoryHub):
    """Loses what ``loses`` says, and every connection lives on."""

    def __init__(self) -> None:
        super().__init__()
        self.loses: Loses = lambda message: False
        self.lost: list[PeerMessage] = []

    def to_listener(self, endpoint, parcel):
        return self._swallows(parcel) or super().to_listener(endpoint, parcel)

    def to_link(self, peer, parcel):
        return self._swallows(parcel) or super().to_link(peer, parcel)

    def _swallows(self, parcel) -> bool:
        message = decode_peer(parcel.header)
        lost = self.loses(message)
        if lost:
            self.lost.append(message)
        return lost


class Nth:
    """Says True once: for the nth message of a kind."""

    def __init__(self, kind: type, nth: int = 1, times: int = 1) -> None:
        self._kind = kind
        self._first, self._last = nth, nth + times - 1
        self.seen = 0

    def __call__(self, message: PeerMessage) -> bool:
        if not isinstance(message, self._kind):
            return False
        self.seen += 1
        return self._first <= self.seen <= self._last
