"""CURVE on ZeroMQ sockets: who may connect to a listener, and which key the listener at the end of a link has.

With ``CurveKeys`` both are fixed.  With ``NodeKeys`` they change while sockets live: a listener takes another key by
being bound anew, to the same port, and a link tries the keys that its listener may have until one is right.  Both cut
connections, which messages survive as they do any other loss.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Iterator
from hmac import compare_digest
from itertools import count

import zmq
from zmq.utils import z85

from penstock.config.base import host_and_port
from penstock.errors import ConfigError
from penstock.wire.codec import message_kind
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.node_keys import HostKeys, NodeKeys
from penstock.wire.peer_rights import (
    UNKNOWN_KEY,
    PeerRefusal,
    RefusalHandler,
    connection_refusal,
    kind_refusal,
    request_refusal,
)
from penstock.wire.transport import Received, WireCounters

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
DOMAIN = b"penstock"
_NOBLOCK, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.EVENTS), int(zmq.POLLIN)

_HANDSHAKE_FAILED = int(
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_HANDSHAKE_SUCCEEDED, _DISCONNECTED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED), int(zmq.EVENT_DISCONNECTED)


class ConnectionGate:
    """Answers the library's question who may connect (ZAP, https://rfc.zeromq.org/spec/27)."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: HostKeys, on_refused: RefusalHandler) -> None:
        self._keys = keys
        self._on_refused = on_refused
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)
        self._refused = 0

    def take_refused(self) -> int:
        """Connections refused since this was asked last."""
        refused, self._refused = self._refused, 0
        return refused

    def serve(self) -> None:
        """Answer all authentication requests that are pending."""
        while readable(self.socket):
            frames = self.socket.recv_multipart(_NOBLOCK)
            # RFC 27: version, request, domain, address, identity, mechanism, credentials
            known = len(frames) == 7 and frames[0] == _ZAP_VERSION and frames[2] == DOMAIN and frames[5] == b"CURVE"
            user = b""
            refusal: PeerRefusal | None = PeerRefusal(UNKNOWN_KEY)
            if isinstance(self._keys, NodeKeys):
                user = z85.encode(frames[6]) if known else b""
                address = frames[3].decode(errors="replace") if known else ""
                refusal = connection_refusal(user, self._keys, address)
            elif known and compare_digest(frames[6], z85.decode(self._keys.client_public)):
                refusal = None
            # 300 has the other end try again by itself: its key may be accepted later.
            no = b"300" if isinstance(self._keys, NodeKeys) else b"400"
            status = (b"200", b"OK", user) if refusal is None else (no, b"unknown key", b"")
            if refusal is not None:
                self._refused += 1
                self._on_refused(refusal)
            request = frames[1] if len(frames) > 1 else b""
            self.socket.send_multipart([_ZAP_VERSION, request, *status, b""])


class SecureListener:
    """Binds a ROUTER with CURVE, and binds it anew when this node has another key."""

    def __init__(self, zmq_socket: zmq.Socket[bytes], endpoint: str, keys: HostKeys, backlog: int) -> None:
        """Raises ConfigError or zmq.ZMQError when it cannot listen there."""
        self._socket = zmq_socket
        self._keys = keys
        self._listening: socket.socket | None = None
        self._used = b""
        self._accepted: dict[str, frozenset[str]] = {}  # public keys of nodes that may have connected
        if isinstance(keys, NodeKeys) and endpoint.startswith("tcp://"):
            self._listening = _listen(endpoint, backlog)
        self._endpoint = endpoint
        zmq_socket.setsockopt(zmq.BACKLOG, backlog)
        zmq_socket.setsockopt(zmq.ZAP_DOMAIN, DOMAIN)
        zmq_socket.setsockopt(zmq.CURVE_SERVER, 1)
        try:
            self._bind(self._another_descriptor())
        except (zmq.ZMQError, ConfigError):
            self.close()
            raise

    def update(self) -> None:
        """Bind anew, which ends all connections, if the own key has changed or a node was revoked, though it may have
        another key now: its connection could fill this process' memory with a message that never ends.  Others connect
        again at once.  Nodes that change keys in order end no connections but their own.

        Raises zmq.ZMQError or ConfigError; the next update tries again.
        """
        if not isinstance(self._keys, NodeKeys) or self._listening is None:
            return
        accepted = self._keys.registry.accepted_keys
        is_revoked = any(keys.isdisjoint(accepted.get(node, ())) for node, keys in self._accepted.items())
        if self._keys.public == self._used and not is_revoked:
            self._accepted = accepted
        else:
            descriptor = self._another_descriptor()
            with contextlib.suppress(zmq.ZMQError):
                self._socket.unbind(self._socket.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0"))
            self._bind(descriptor)

    def close(self) -> None:
        """The port is free once the ZeroMQ socket is closed, too."""
        if self._listening is not None:
            self._listening.close()

    def _another_descriptor(self) -> int | None:
        """The library closes what it is given; with our own descriptor the port is never free in between."""
        try:
            return None if self._listening is None else os.dup(self._listening.fileno())
        except OSError as error:
            raise ConfigError(f"cannot listen at {self._endpoint}: {error.strerror}") from error

    def _bind(self, descriptor: int | None) -> None:
        public, secret = _own_pair(self._keys, listens=True)
        if isinstance(self._keys, NodeKeys):
            self._accepted = self._keys.registry.accepted_keys
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, public)
        if descriptor is not None:
            self._socket.setsockopt(zmq.USE_FD, descriptor)
        self._socket.bind(self._endpoint)
        self._used = public


class ConnectionEvents:
    """What befalls the connections of a ZeroMQ socket, such as handshakes that failed, and ends."""

    _numbers = count()

    def __init__(self, zmq_socket: zmq.Socket[bytes], events: int) -> None:
        """Raises zmq.ZMQError when there are no descriptors.  To be closed before ``zmq_socket``."""
        self._socket = zmq_socket
        place = f"inproc://connection-events-{next(self._numbers)}"
        self._reader: zmq.Socket[bytes] = zmq_socket.context.socket(zmq.PAIR)
        try:
            self._reader.setsockopt(zmq.LINGER, 0)
            # The monitor's socket takes one more: a reader that has connected in vain keeps its own until the end.
            os.close(_spare_descriptor())
            # The reader comes first: events without a reader stop the library's only I/O thread for good.
            self._reader.connect(place)
            zmq_socket.monitor(place, events)
        except zmq.ZMQError:
            self._reader.close(linger=0)
            raise

    def fileno(self) -> int:
        """Readable at an edge: when there are events, once."""
        descriptor = self._reader.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        return descriptor

    def read(self) -> Iterator[tuple[int, int]]:
        """The events since the last time, each with its value, for most of them a descriptor."""
        while readable(self._reader):
            payload, _address = self._reader.recv_multipart(_NOBLOCK)
            yield struct.unpack("=HI", payload)

    def close(self) -> None:
        """There are no events any more."""
        if not self._reader.closed:
            self._socket.monitor(None, 0)
            self._reader.close(linger=0)


class LinkKey:
    """Connects a DEALER with CURVE: with the key that its listener has, or may have.

    ``worker``: whose listener it is; empty: that of any worker, so that the keys of all are tried.  ``first``: the key
    to begin with.  ``public`` is the key that the other end has, if it has said anything; empty: no key is accepted,
    and there is no connection.  ``disconnected``: after ``watch_connection``, whether a connection has ended since this
    was last set to False.
    """

    def __init__(
        self, zmq_socket: zmq.Socket[bytes], endpoint: str, keys: HostKeys, worker: str = "", first: bytes = b""
    ) -> None:
        self._socket = zmq_socket
        self._endpoint = endpoint
        self._keys = keys
        self._worker = worker
        self._used = b""
        self.public = b""
        self.events: ConnectionEvents | None = None
        self.has_choice = False  # the listener may have one of several keys
        self.disconnected = False
        candidates = self._candidates()
        if candidates:
            self._connect(first if first in candidates else candidates[0])

    def update(self) -> None:
        """Keys have changed: connect anew if this end's or the other's is not accepted any more."""
        candidates = self._candidates()
        if self.public in candidates and isinstance(self._keys, NodeKeys) and self._used == self._keys.public:
            self._watch(candidates)
            return
        public = self.public if self.public in candidates else next(iter(candidates), b"")
        self._disconnect()
        if public:
            self._connect(public)

    def watch_connection(self) -> None:
        """From now on see when a connection ends.  Raises zmq.ZMQError when there are no descriptors."""
        if self.events is None:
            self.events = ConnectionEvents(self._socket, _HANDSHAKE_FAILED | _HANDSHAKE_SUCCEEDED | _DISCONNECTED)

    def read_events(self) -> None:
        """See what became of connections, and try the next key that the other end may have if it has not this one."""
        if self.events is None:
            return
        failed = False
        for event, _ in self.events.read():
            if event == _DISCONNECTED:
                self.disconnected = True
            else:
                failed = event != _HANDSHAKE_SUCCEEDED
        candidates = self._candidates()
        if failed and candidates and candidates != (self.public,):
            at = candidates.index(self.public) + 1 if self.public in candidates else 0
            self._disconnect()
            self._connect(candidates[at % len(candidates)])

    def close(self) -> None:
        """Before the socket is closed."""
        if self.events is not None:
            self.events.close()
            self.events = None

    def _candidates(self) -> tuple[bytes, ...]:
        keys = self._keys
        return (keys.server_public,) if isinstance(keys, CurveKeys) else keys.listener_keys(self._worker)

    def _connect(self, public: bytes) -> None:
        self._watch(self._candidates())
        own, secret = _own_pair(self._keys, listens=False)
        self._used, self.public = own, public
        self._socket.setsockopt(zmq.CURVE_SERVERKEY, public)
        self._socket.setsockopt(zmq.CURVE_SECRETKEY, secret)
        self._socket.setsockopt(zmq.CURVE_PUBLICKEY, own)
        self._socket.connect(self._endpoint)

    def _disconnect(self) -> None:
        if self.public:
            with contextlib.suppress(zmq.ZMQError):
                self._socket.disconnect(self._endpoint)
        self.public = b""

    def _watch(self, candidates: tuple[bytes, ...]) -> None:
        """A socket more, only where there is more than one key to try."""
        self.has_choice = len(candidates) > 1
        if self.has_choice:
            self.watch_connection()


class SenderKeys:
    """The key that each peer of a listener has proved, read from every message: a peer may choose the routing id by
    which the library knows its connection, and so take that of one that has gone."""

    MOST = 1 << 16
    """Peers remembered, those that are gone among them; then all are forgotten until their next messages."""

    def __init__(self) -> None:
        self._known: dict[bytes, bytes] = {}

    def of(self, peer: bytes) -> bytes:
        """As Z85, of its last message; empty for one that has said nothing yet."""
        return self._known.get(peer, b"")

    def receive(self, zmq_socket: zmq.Socket[bytes], peer: bytes) -> bytes:
        """The next frame, which is this peer's."""
        frame = zmq_socket.recv(_NOBLOCK, copy=False)
        user = frame.get("User-Id")
        if len(self._known) >= self.MOST:
            self._known.clear()
        self._known[peer] = user.encode() if isinstance(user, str) else b""
        return frame.bytes


class ListenerSecurity:
    """What peers of a listener may do: connect, say something, and hear something."""

    def __init__(
        self, keys: HostKeys, gate: ConnectionGate, secure: SecureListener, on_refused: RefusalHandler
    ) -> None:
        self._nodes = keys if isinstance(keys, NodeKeys) else None
        self._gate = gate
        self._on_refused = on_refused
        self._senders = SenderKeys()
        self.secure = secure

    def serve(self, counters: WireCounters) -> None:
        """Between messages: answer who may connect."""
        self._gate.serve()
        counters.refused += self._gate.take_refused()

    def receive(self, zmq_socket: zmq.Socket[bytes], peer: bytes) -> bytes:
        """The header of a peer's message."""
        if self._nodes is None:
            return zmq_socket.recv(_NOBLOCK)
        return self._senders.receive(zmq_socket, peer)

    def refuses_unread(self, peer: bytes, header: bytes, counters: WireCounters) -> bool:
        """Whether its sender may not say any such thing, so that it is not even decoded."""
        if self._nodes is None:
            return False
        refusal = kind_refusal(message_kind(header), self._senders.of(peer), self._nodes)
        return refusal is not None and self._refuse(refusal, counters)

    def allows(self, received: Received, counters: WireCounters) -> bool:
        """Whether its sender may say this."""
        if self._nodes is None:
            return True
        refusal = request_refusal(received.message, self._senders.of(received.peer), self._nodes)
        return refusal is None or not self._refuse(refusal, counters)

    def _refuse(self, refusal: PeerRefusal, counters: WireCounters) -> bool:
        counters.refused += 1
        self._on_refused(refusal)
        return True

    def may_hear(self, peer: bytes) -> bool:
        """Whether something may be sent to this peer: its node may have been revoked."""
        if self._nodes is None:
            return True
        key = self._senders.of(peer)
        return not key or self._nodes.sender(key) is not None


def _spare_descriptor() -> int:
    """A descriptor that is free.  Raises zmq.ZMQError when there is none."""
    try:
        return os.eventfd(0)
    except OSError as error:
        raise zmq.ZMQError(error.errno) from error


def readable(zmq_socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is here: in half the time of a ``recv`` that raises Again."""
    events = zmq_socket.getsockopt(_EVENTS)
    assert isinstance(events, int)
    return bool(events & _POLLIN)


def _own_pair(keys: HostKeys, *, listens: bool) -> tuple[bytes, bytes]:
    """Public and secret key of this end."""
    if isinstance(keys, NodeKeys):
        return keys.public, keys.secret
    return (keys.server_public, keys.server_secret) if listens else (keys.client_public, keys.client_secret)


def _listen(endpoint: str, backlog: int) -> socket.socket:
    host, port = host_and_port(endpoint)
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            None if host == "*" else host,
            port,
            family=socket.AF_INET6 if "[" in endpoint else socket.AF_INET,  # as links connect
            type=socket.SOCK_STREAM,
            flags=socket.AI_PASSIVE,
        )[0]
        listening = socket.socket(family, kind | socket.SOCK_NONBLOCK, protocol)
    except OSError as error:
        raise ConfigError(f"cannot listen at {endpoint}: {error.strerror}") from error
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind(address)
        listening.listen(backlog)
    except OSError as error:
        listening.close()
        raise ConfigError(f"cannot listen at {endpoint}: {error.strerror}") from error
    return listening
