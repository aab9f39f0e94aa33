"""The transport's double within one process and one thread: deterministic, no sockets, no clock.

Every message is encoded and decoded as on the real one, so what cannot travel there cannot travel here.  ``wait``
never sleeps: in one thread nothing can arrive meanwhile.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from penstock.errors import ConfigError, ProtocolError, ProtocolVersionError
from penstock.wire.codec import VERSION_NOTICE, PeerMessage, check_payload, decode_peer, encode_message, version_probe
from penstock.wire.transport import YIELD_EVERY, AsyncLink, Link, Listener, Received, Source, WireCounters

SCHEME = "memory://"
QUEUE_MESSAGES = 16_384
"""Messages that may wait at one end."""


@dataclass(slots=True)
class _Parcel:
    peer: bytes
    header: bytes
    payload: bytes | None


@dataclass(slots=True)
class _Box:
    """What waits at one end, and how that end hears of it."""

    parcels: deque[_Parcel] = field(default_factory=deque)
    on_arrival: Callable[[], None] | None = None

    def put(self, parcel: _Parcel, capacity: int) -> bool:
        if len(self.parcels) >= capacity:
            return False
        self.parcels.append(parcel)
        if self.on_arrival is not None:
            self.on_arrival()
        return True


class InMemoryHub:
    """``transport.Transport`` for endpoints ``memory://name``; the ends made by one hub see each other.

    As with sockets, a link may be made before its listener, and messages wait for it.  ``capacity`` bounds every
    queue.
    """

    def __init__(self, *, capacity: int = QUEUE_MESSAGES) -> None:
        self.capacity = capacity
        self._mailboxes: dict[str, _Box] = {}
        self._listening: set[str] = set()
        self._links: dict[bytes, _Box] = {}
        self._made = 0

    def listen(self, endpoint: str) -> Listener:
        _check(endpoint)
        if endpoint in self._listening:
            raise ConfigError(f"cannot listen at {endpoint}: Address already in use")
        self._listening.add(endpoint)
        return _MemoryListener(self, endpoint, self._mailbox(endpoint))

    def connect(self, endpoint: str, *, worker: str = "") -> Link:
        del worker  # no keys here
        return self._connect(endpoint)

    def connect_async(self, endpoint: str, *, worker: str = "") -> AsyncLink:
        del worker
        return _MemoryAsyncLink(self._connect(endpoint))

    def wait(self, timeout_s: float | None, sources: Iterable[Source], descriptors: Iterable[int] = ()) -> bool:
        del timeout_s, descriptors
        return any(isinstance(s, _MemoryListener | _MemoryLink) and s.box.parcels for s in sources)

    def close(self, *, linger_s: float = 0.0) -> None:
        del linger_s  # whatever was sent has arrived
        self._mailboxes.clear()
        self._listening.clear()
        self._links.clear()

    def to_listener(self, endpoint: str, parcel: _Parcel) -> bool:
        """For links that are open: leave a parcel in a mailbox, whether or not somebody listens yet."""
        return parcel.peer in self._links and self._mailbox(endpoint).put(parcel, self.capacity)

    def to_link(self, peer: bytes, parcel: _Parcel) -> bool:
        """For listeners: answer a link.  False when it is gone or full."""
        box = self._links.get(peer)
        return box is not None and box.put(parcel, self.capacity)

    def remove_listener(self, endpoint: str) -> None:
        """For listeners: closed, and what waited is dropped."""
        self._listening.discard(endpoint)
        self._mailboxes.pop(endpoint, None)

    def remove_link(self, peer: bytes) -> None:
        """For links: closed; sending to it answers False from now on."""
        self._links.pop(peer, None)

    def _mailbox(self, endpoint: str) -> _Box:
        return self._mailboxes.setdefault(endpoint, _Box())

    def _connect(self, endpoint: str) -> _MemoryLink:
        _check(endpoint)
        self._made += 1
        peer = b"\0" + self._made.to_bytes(4, "big")
        self._links[peer] = _Box()
        return _MemoryLink(self, endpoint, peer, self._links[peer])


class _MemoryListener:
    def __init__(self, hub: InMemoryHub, endpoint: str, box: _Box) -> None:
        self._hub = hub
        self.endpoint = endpoint
        self.box = box
        self.counters = WireCounters()
        self._closed = False

    def recv(self) -> Received | None:
        return _receive(self.box, self.counters, self._hub.to_link)

    def send(self, peer: bytes, message: PeerMessage, payload: memoryview | None = None) -> bool:
        parcel = _pack(b"", message, payload)
        sent = parcel is not None and not self._closed and self._hub.to_link(peer, parcel)
        return _count(sent, self.counters)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self.box.parcels.clear()
            self._hub.remove_listener(self.endpoint)


class _MemoryLink:
    def __init__(self, hub: InMemoryHub, endpoint: str, peer: bytes, box: _Box) -> None:
        self._hub = hub
        self._peer = peer
        self.endpoint = endpoint
        self.box = box
        self.counters = WireCounters()

    def recv(self) -> Received | None:
        return _receive(self.box, self.counters)

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        parcel = _pack(self._peer, message, payload)
        return _count(parcel is not None and self._hub.to_listener(self.endpoint, parcel), self.counters)

    def send_raw(self, header: bytes, payload: bytes | None = None) -> bool:
        """Put any bytes on the wire."""
        return self._hub.to_listener(self.endpoint, _Parcel(self._peer, header, payload))

    def close(self) -> None:
        self.box.parcels.clear()
        self._hub.remove_link(self._peer)


class _MemoryAsyncLink:
    def __init__(self, link: _MemoryLink) -> None:
        self._link = link
        self._signal = asyncio.Event()
        self._closed = False
        self._received = 0
        self.endpoint = link.endpoint
        self.counters = link.counters
        link.box.on_arrival = self._signal.set

    def __aiter__(self) -> _MemoryAsyncLink:
        return self

    async def __anext__(self) -> Received:
        self._received += 1
        if self._received % YIELD_EVERY == 0:
            await asyncio.sleep(0)
        while not self._closed:
            received = self._link.recv()
            if received is not None:
                return received
            self._signal.clear()
            await self._signal.wait()
        raise StopAsyncIteration

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        return self._link.send(message, payload)

    def notify_disconnected(self, call: Callable[[], None]) -> None:
        del call  # no connection ends here but with one of its ends

    def probe_version(self) -> bool:
        return self._link.send_raw(version_probe())

    def close(self) -> None:
        self._closed = True
        self._link.close()
        self._signal.set()


def _check(endpoint: str) -> None:
    if not endpoint.startswith(SCHEME) or endpoint == SCHEME:
        raise ConfigError(f"{endpoint!r} is not an endpoint; memory://name is")


def _pack(peer: bytes, message: PeerMessage, payload: memoryview | None) -> _Parcel | None:
    try:
        if payload is not None:
            check_payload(payload)
        return _Parcel(peer, encode_message(message), None if payload is None else payload.tobytes())
    except ProtocolError:
        return None


def _receive(
    box: _Box, counters: WireCounters, answer: Callable[[bytes, _Parcel], bool] | None = None
) -> Received | None:
    while box.parcels:
        parcel = box.parcels.popleft()
        try:
            message = decode_peer(parcel.header)
        except ProtocolVersionError as error:
            counters.malformed += 1
            counters.other_version = error.version
            if answer is not None:
                answer(parcel.peer, _Parcel(b"", VERSION_NOTICE, None))
            continue
        except ProtocolError:
            counters.malformed += 1
            continue
        counters.received += 1
        return Received(parcel.peer, message, None if parcel.payload is None else memoryview(parcel.payload))
    return None


def _count(sent: bool, counters: WireCounters) -> bool:
    if sent:
        counters.sent += 1
    else:
        counters.unsent += 1
    return sent
