"""How messages travel between processes, as its users see it.

A *listener* is one worker's mailbox: many peers, each named by opaque bytes that live as long as its connection.
A *link* is one connection to a mailbox.  Nothing here ever blocks but ``Transport.wait``, and nothing raises because
of what a peer did: a frame that is not one of ours is counted and dropped, a message that cannot leave at once is
answered with False, and so are a message that cannot be encoded and sending on a closed end.  Order between one link
and its listener is kept; delivery is not promised, so the sender keeps what must not be lost.

A listener answers a frame of another protocol version with its own version, so that the other end can say why nothing
works.  ``wire.zeromq`` is the real one, ``wire.in_memory`` its double within one process.  Knows nothing about what a
message means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from penstock.wire.codec import PeerMessage

YIELD_EVERY = 64
"""Messages that an AsyncLink gives in a row before other tasks get their turn."""

YIELD_BYTES = 256 << 10
"""The same of their bytes: some 10 ms of decoding log-probabilities."""


@dataclass(frozen=True, slots=True)
class Received:
    """One message.  ``payload`` is valid as long as it is referenced; ``peer`` is empty on a link."""

    peer: bytes
    message: PeerMessage
    payload: memoryview | None = None


@dataclass(slots=True)
class WireCounters:
    """What went over one listener or link; numbers only grow."""

    received: int = 0
    sent: int = 0
    malformed: int = 0  # frames that were not ours: dropped
    other_version: int = 0  # protocol version of the last frame that was dropped for its version
    refused: int = 0  # connections and messages whose sender's key does not allow them
    unsent: int = 0  # messages that could not leave: the peer was gone, its queue full, or they were too large


class Listener(Protocol):
    """The bound end."""

    endpoint: str
    """Where links connect to; a port that was asked for as 0 is the real one here."""

    counters: WireCounters

    def recv(self) -> Received | None:
        """The next message, or None when there is none now.  Never raises for what a peer sent."""
        ...

    def send(self, peer: bytes, message: PeerMessage, payload: memoryview | None = None) -> bool:
        """Hand one message over for sending; the payload may be reused at once.

        False: the message will not be sent: the peer is gone or takes nothing more now, or message or payload are over
        the size caps (``codec.fits_in_frame``).  Never raises because of what is sent.
        """
        ...

    def close(self) -> None:
        """Give everything back; what was not sent yet is dropped.  May be called twice."""
        ...


class Link(Protocol):
    """The connected end.  It connects again by itself when the connection breaks."""

    endpoint: str
    counters: WireCounters

    def recv(self) -> Received | None:
        """The next message, or None when there is none now."""
        ...

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        """As ``Listener.send``.  Messages wait for the connection, up to the queue's limit."""
        ...

    def close(self) -> None:
        """As ``Listener.close``."""
        ...


_SelfLink = TypeVar("_SelfLink", bound="AsyncLink")


class AsyncLink(Protocol):
    """A link for an event loop: ``async for received in link`` ends when the link is closed.

    Sending is not a coroutine: it either goes into the bounded queue at once or answers False.
    """

    endpoint: str
    counters: WireCounters

    def __aiter__(self: _SelfLink) -> _SelfLink: ...

    async def __anext__(self) -> Received: ...

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        """As ``Link.send``."""
        ...

    def notify_disconnected(self, call: Callable[[], None]) -> None:
        """From now on ``call`` is called when a connection ends, where that is noticed: not when nothing arrives any
        more, and not for each of very many links."""
        ...

    def probe_version(self) -> bool:
        """Ask for the protocol version of a listener that does not answer; ``counters.other_version`` will have it."""
        ...

    def close(self) -> None:
        """Ends the iteration and gives everything back."""
        ...


Source = Listener | Link


class Transport(Protocol):
    """Makes listeners and links.  One a process, made after fork; used by one thread."""

    def listen(self, endpoint: str) -> Listener:
        """Bind.  Raises ConfigError for an endpoint that cannot be bound, or is of no known kind, and where the process
        has no more sockets or descriptors."""
        ...

    def connect(self, endpoint: str, *, worker: str = "") -> Link:
        """Connect; the other end need not be there yet.  Raises ConfigError as ``listen``.

        ``worker``: whose mailbox it must be, where nodes have keys of their own; empty: any worker's.
        """
        ...

    def connect_async(self, endpoint: str, *, worker: str = "") -> AsyncLink:
        """As ``connect``, for the running event loop."""
        ...

    def wait(self, timeout_s: float | None, sources: Iterable[Source], descriptors: Iterable[int] = ()) -> bool:
        """Sleep until a source may have a message or a descriptor is readable, or time is over (None: no limit).

        False when nothing came in time.  True may be early: ``recv`` decides.
        """
        ...

    def close(self, *, linger_s: float = 0.0) -> None:
        """Close everything that is still open.  May be called twice, and in a forked child, where it does nothing.

        What was not sent yet has ``linger_s`` to leave, and is dropped then; the call takes so long at most.
        """
        ...
