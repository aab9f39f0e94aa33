"""The transport over ZeroMQ: one ROUTER a worker, DEALERs to it, and CURVE on every one of them.

There is no way to make a socket here without keys, so nothing can speak in clear, on or off the loopback.  A
listener accepts the deployment's client key, or those of nodes: the library asks ``ConnectionGate`` over an inproc
socket that is served from ``recv`` and ``wait``, so no second thread of Python is needed.  Between nodes each message
is judged by the key of its sender (``peer_rights``); keys are read again when their files change (``node_keys``).

A transport belongs to the process and the thread that made it; make it after the last fork.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import math
import os
import resource
import socket
import struct
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import zmq

from penstock.config.base import check_endpoint
from penstock.errors import ConfigError, ProtocolError, ProtocolVersionError
from penstock.wire.codec import (
    MAX_FRAME_BYTES,
    MAX_PAYLOAD_BYTES,
    PROTOCOL_VERSION,
    VERSION_NOTICE,
    PeerMessage,
    check_payload,
    decode_peer,
    encode_message,
    is_version_probe,
    version_probe,
    version_reason,
)
from penstock.wire.curve_sockets import (
    ConnectionEvents,
    ConnectionGate,
    LinkKey,
    ListenerSecurity,
    SecureListener,
    readable,
)
from penstock.wire.node_keys import RELOAD_S, HostKeys, NodeKeys
from penstock.wire.peer_rights import PeerRefusal, RefusalHandler, RefusalLog, response_refusal
from penstock.wire.transport import YIELD_BYTES, YIELD_EVERY, AsyncLink, Link, Listener, Received, Source, WireCounters

QUEUE_MESSAGES = 16_384
"""Messages that may wait to be sent to one peer."""

RECEIVED_MESSAGES = 1024
"""Messages of one peer that may wait here unread; what comes on top waits at the sender."""

WATCHED_LINKS = 128
"""Links of one process whose connections are watched, with a pair of sockets each.  The end of others is noticed by
silence."""

MIN_OPEN = 16
"""Sockets that a transport may have before it looks for closed ones."""

CONNECTIONS_WAITING = 1024
"""New connections that may wait to be accepted (listen(2))."""

MALFORMED_PER_TURN = 64
"""Frames dropped in one ``recv`` before the loop gets its turn again."""

DROPPING_S = 0.005
"""And the seconds: a large one takes long to decode."""

LOOK_S = 0.1
"""Between two looks at connections and keys of a listener where messages are always waiting; else each time none is."""

# As plain integers: arithmetic on the library's enumerations costs microseconds a message.
_LISTENING, _ACCEPTED = int(zmq.EVENT_LISTENING), int(zmq.EVENT_ACCEPTED)
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # socket(7)
_NOBLOCK, _RCVMORE = int(zmq.NOBLOCK), int(zmq.RCVMORE)

_IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID of zmq.h

log = logging.getLogger("penstock.wire")


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqIntervals:
    """The library's timers, in milliseconds: all that its I/O thread does by time."""

    handshake: int = 3_000
    """For a new connection to prove that it has the deployment's key.  Then it is closed."""

    reconnect_first: int = 20
    reconnect_max: int = 500
    """Over TCP the pause doubles up to that.  On one host it does not: a worker that was forked anew is reached as soon
    as it listens, not up to as long again as it took to begin, and a refused connection costs microseconds there."""

    heartbeat: int = 5_000  # TCP only: the library's own, answered by its I/O thread
    heartbeat_timeout: int = 7_000
    """A connection whose other end is silent is closed after both together.  Each heartbeat wakes the I/O threads of
    both ends, and ends a timer that the library looks for among all: with a heartbeat every two seconds and hundreds of
    idle workers, that was as much work as all messages."""


INTERVALS = ZmqIntervals()


class ZmqTransport:
    """``transport.Transport`` over ipc (only this user's processes may connect) and TCP."""

    def __init__(
        self, keys: HostKeys, on_refused: RefusalHandler | None = None, *, intervals: ZmqIntervals = INTERVALS
    ) -> None:
        """``on_refused``: called for what is refused because of its sender's key, besides the log."""
        self._keys = keys
        self._intervals = intervals
        self._on_refused = RefusalLog(on_refused)
        self._proven: dict[str, bytes] = {}  # by endpoint: the key that its listener had last
        self._timer: asyncio.TimerHandle | None = None
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # The library's own default of 1,023 would end a gateway's fleet at 511 workers.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._gate: ConnectionGate | None = None
        self._open: list[_ZmqListener | _ZmqLink | _ZmqAsyncLink] = []  # and some that are closed
        self.watched_links = 0  # whose end is noticed at once
        self._keys_again_at = math.inf  # when keys are applied that could not be
        self._most_open = MIN_OPEN  # with more of them, those that are closed are removed
        self.reload_keys()  # those inherited over fork are as old as the parent

    def listen(self, endpoint: str) -> Listener:
        self._check_process()
        if self._gate is None:
            self._gate = self._make_gate()
            _draw_first_routing_id()
        made = self._socket(zmq.ROUTER, endpoint)
        limit: _ConnectionLimit | None = None
        try:
            if endpoint.startswith("tcp://"):
                limit = _ConnectionLimit(made)
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)
            if endpoint.startswith("ipc://"):
                # By SO_PEERCRED: a connection of another user is closed before it is spoken to, keys or no keys.
                made.setsockopt(_IPC_FILTER_UID, os.geteuid())
            made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # payloads go from listeners to links only
            secure = SecureListener(made, endpoint, self._keys, CONNECTIONS_WAITING)
            bound = made.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except (zmq.ZMQError, ConfigError) as error:
            if limit is not None:
                limit.close()
            made.close(linger=0)
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"cannot listen at {endpoint}: {error.strerror}") from error
        security = ListenerSecurity(self._keys, self._gate, secure, self.on_refused)
        listener = _ZmqListener(made, bound, self, security, limit)
        self._open.append(listener)
        return listener

    def connect(self, endpoint: str, *, worker: str = "") -> Link:
        link = self._link(endpoint, worker, is_polled=True)
        self._open.append(link)
        return link

    def connect_async(self, endpoint: str, *, worker: str = "") -> AsyncLink:
        loop = asyncio.get_running_loop()
        link = _ZmqAsyncLink(self._link(endpoint, worker, is_polled=False), loop)
        self._open.append(link)
        if self._timer is None and isinstance(self._keys, NodeKeys):
            self._timer = loop.call_later(RELOAD_S, self._reload_again, loop)
        return link

    def reload_keys(self) -> None:
        """Read keys again if their files have changed, and apply them to all sockets."""
        if isinstance(self._keys, NodeKeys) and (self._keys.reload() or time.monotonic() >= self._keys_again_at):
            self._keys_again_at = math.inf
            for source in self._open:
                if not source.closed:
                    source.on_keys_changed()

    def _reload_again(self, loop: asyncio.AbstractEventLoop) -> None:
        self._timer = loop.call_later(RELOAD_S, self._reload_again, loop)
        self.reload_keys()

    def wait(self, timeout_s: float | None, sources: Iterable[Source], descriptors: Iterable[int] = ()) -> bool:
        watched: list[tuple[zmq.Socket[bytes] | int, int]] = []
        for source in sources:
            if not isinstance(source, _ZmqListener | _ZmqLink):
                raise TypeError(f"{source!r} is not of this transport")
            if not source.closed:
                watched.append((source.socket, zmq.POLLIN))
        watched.extend((descriptor, zmq.POLLIN) for descriptor in descriptors)
        if self._gate is not None:
            watched.append((self._gate.socket, zmq.POLLIN))
        self.reload_keys()
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while True:
            left = -1 if deadline is None else max(0, math.ceil((deadline - time.monotonic()) * 1000))
            ready: list[object] = [source for source, _ in zmq.zmq_poll(watched, left)]
            if self._gate is None or self._gate.socket not in ready:
                return bool(ready)
            self._gate.serve()
            if len(ready) > 1:
                return True

    def close(self, *, linger_s: float = 0.0) -> None:
        if os.getpid() != self._pid or self._context.closed:
            return
        if self._timer is not None:
            self._timer.cancel()
        for source in self._open:
            if isinstance(source, _ZmqAsyncLink):
                source.close()
            else:
                source.close(linger_ms=round(linger_s * 1000))
        self._open.clear()
        if self._gate is not None:
            self._gate.socket.close(linger=0)
        self._context.term()

    def _link(self, endpoint: str, worker: str, *, is_polled: bool) -> _ZmqLink:
        self._check_process()
        socket = self._socket(zmq.DEALER, endpoint)
        try:
            socket.setsockopt(zmq.RECONNECT_IVL, self._intervals.reconnect_first)
            longest = self._intervals.reconnect_max if endpoint.startswith("tcp://") else 0
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, longest)
            key = LinkKey(socket, endpoint, self._keys, worker, self._proven.get(endpoint, b""))
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from error
        return _ZmqLink(socket, endpoint, key, self, is_polled=is_polled)

    # --- for sockets of this transport -------------------------------------------------------------------------------

    @property
    def nodes(self) -> NodeKeys | None:
        """The keys of nodes; None: all processes share theirs, and are equal."""
        return self._keys if isinstance(self._keys, NodeKeys) else None

    def apply_keys_again(self) -> None:
        """A socket could not take other keys, as for want of descriptors: after a while it is tried again."""
        self._keys_again_at = time.monotonic() + RELOAD_S

    def on_refused(self, refusal: PeerRefusal) -> None:
        """Log what is refused."""
        self._on_refused(refusal)

    def on_proven(self, endpoint: str, public: bytes) -> None:
        """The listener at ``endpoint`` has this key."""
        self._proven[endpoint] = public

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        check_endpoint(endpoint)
        if len(self._open) > self._most_open:  # not each time: that is quadratic in a fleet's workers
            self._open = [source for source in self._open if not source.closed]
            self._most_open = MIN_OPEN + 2 * len(self._open)
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot open a socket for {endpoint}: {error.strerror}") from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, self._intervals.handshake)
        socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES))
        if endpoint.startswith("tcp://"):
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.setsockopt(zmq.HEARTBEAT_IVL, self._intervals.heartbeat)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, self._intervals.heartbeat_timeout)
            socket.setsockopt(zmq.HEARTBEAT_TTL, self._intervals.heartbeat_timeout)
        return socket

    def _make_gate(self) -> ConnectionGate:
        try:
            return ConnectionGate(self._context, self._keys, self.on_refused)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot open a socket to check keys: {error.strerror}") from error

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a ZeroMQ transport cannot be used after a fork")


class _ConnectionLimit:
    """Limits connections over the network, so that other sockets do not run out of descriptors.

    The library accepts every connection, so the kernel refuses them: a filter on the listening socket drops what begins
    a connection, which is tried again a second later.  Existing connections stay, and one that
    proves no key is gone after ``ZmqIntervals.handshake``; then it opens again.  To be made before the socket is bound.
    """

    def __init__(self, zmq_socket: zmq.Socket[bytes]) -> None:
        self._socket = zmq_socket
        self._most = most_connections()
        self._connected = 0
        self._shut = False
        self._listening: socket.socket | None = None
        self._events = ConnectionEvents(zmq_socket, _LISTENING | _ACCEPTED | zmq.EVENT_DISCONNECTED)

    def update(self) -> None:
        """Count connections that came and went."""
        for event, descriptor in self._events.read():
            if event == _LISTENING:
                self._listen_at(descriptor)
            else:
                self._connected = max(0, self._connected + (1 if event == _ACCEPTED else -1))
        full = self._connected >= self._most
        if full != self._shut and self._listening is not None:
            self._shut = full
            how = "takes no more connections: it has" if full else "takes connections again: it has"
            log.warning("the mailbox %s %d; at most %d", how, self._connected, self._most)
            with contextlib.suppress(OSError):  # a sandbox may know no filters
                if full:
                    nothing = ctypes.create_string_buffer(struct.pack("HBBI", 0x06, 0, 0, 0))  # BPF_RET: 0 bytes
                    program = struct.pack("HP", 1, ctypes.addressof(nothing))
                    self._listening.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)
                else:
                    self._listening.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)

    def _listen_at(self, descriptor: int) -> None:
        """It was bound, for the first time or anew: that ends connections, mostly without an event.  A filter stays."""
        self._connected = 0
        if self._listening is not None:
            self._listening.close()
        try:
            self._listening = socket.socket(fileno=os.dup(descriptor))
        except OSError as error:
            self._listening = None
            log.warning("the mailbox has no limit of connections: %s", error.strerror)

    def close(self) -> None:
        """To be called before its socket is closed."""
        self._events.close()
        if self._listening is not None:
            self._listening.close()


def _draw_first_routing_id() -> None:
    """The library numbers connections of a ROUTER from ``rand()`` on, which it leaves as every process has it.  A peer
    that guesses such a number may take it for itself: then the connection that is to have it ends this process."""
    ctypes.CDLL(None).srand(int.from_bytes(os.urandom(4), "little"))


def most_connections() -> int:
    """To one listener: half of the descriptors that this process may have."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _ZmqListener:
    def __init__(
        self,
        socket: zmq.Socket[bytes],
        endpoint: str,
        transport: ZmqTransport,
        security: ListenerSecurity,
        limit: _ConnectionLimit | None,
    ) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.counters = WireCounters()
        self._transport = transport
        self._security = security
        self._limit = limit
        self._next_look = 0.0
        self._refused_versions: set[int] = set()

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def recv(self) -> Received | None:
        begun = time.monotonic()
        if begun >= self._next_look and not self.closed:
            self._look_at_connections(begun)
        for _ in range(0 if self.closed else MALFORMED_PER_TURN):
            if not readable(self.socket):
                self._look_at_connections(begun)
                return None
            peer = self.socket.recv(_NOBLOCK)
            header = self._security.receive(self.socket, peer)
            if self._security.refuses_unread(peer, header, self.counters):
                _drop_rest(self.socket)
                continue
            received = _received(self.socket, peer, header, self.counters)
            if received is not None:
                if self._security.allows(received, self.counters):
                    return received
                continue
            if header and header[0] != PROTOCOL_VERSION:
                self._refuse_version(peer, header)
            if time.monotonic() - begun > DROPPING_S:
                break
        return None

    def _look_at_connections(self, now: float) -> None:
        """Answer what asks to connect, take changed keys, and count connections."""
        self._next_look = now + LOOK_S
        self._security.serve(self.counters)
        self._transport.reload_keys()
        if self._limit is not None:
            self._limit.update()

    def on_keys_changed(self) -> None:
        """Take the own key that is used now."""
        try:
            self._security.secure.update()
        except (zmq.ZMQError, ConfigError) as error:
            log.error("cannot listen at %s with another key: %s", self.endpoint, error)
            self._transport.apply_keys_again()

    def _refuse_version(self, peer: bytes, header: bytes) -> None:
        """Answer with our version; say once for each other version that it was refused."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([peer, VERSION_NOTICE], _NOBLOCK)
        if header[0] not in self._refused_versions and not is_version_probe(header):
            self._refused_versions.add(header[0])
            log.warning("refused: %s", version_reason(header[0]))

    def send(self, peer: bytes, message: PeerMessage, payload: memoryview | None = None) -> bool:
        if not self._security.may_hear(peer):
            self.counters.unsent += 1
            return False
        return _send(self.socket, [peer], message, payload, self.counters)

    def close(self, *, linger_ms: int = 0) -> None:
        if self._limit is not None:
            self._limit.close()
        self._security.secure.close()
        self.socket.close(linger=linger_ms)


class _ZmqLink:
    def __init__(
        self, socket: zmq.Socket[bytes], endpoint: str, key: LinkKey, transport: ZmqTransport, *, is_polled: bool
    ) -> None:
        """``is_polled``: no event loop waits for it."""
        self.socket = socket
        self.endpoint = endpoint
        self.counters = WireCounters()
        self.received_bytes = 0  # of messages, without payloads
        self.key = key
        self._transport = transport
        self._nodes = transport.nodes
        self._proven = b""
        self._is_polled = is_polled
        self._watched = False

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def recv(self) -> Received | None:
        # An event loop reads them by itself; where there is none, they must not pile up.
        if self.key.has_choice or self._is_polled:
            self.key.read_events()
        for _ in range(0 if self.closed else MALFORMED_PER_TURN):
            try:
                header = self.socket.recv(_NOBLOCK)
            except zmq.Again:
                return None
            received = _received(self.socket, b"", header, self.counters)
            if received is not None and self._allows(received):
                self.received_bytes += len(header)
                return received
        return None

    def _allows(self, received: Received) -> bool:
        """Whether the listener's node may say this, and under this name."""
        if self._nodes is None:
            return True
        refusal = response_refusal(received.message, self.key.public, self._nodes)
        if refusal is not None:
            self.counters.refused += 1
            self._transport.on_refused(refusal)
            return False
        if self._proven != self.key.public:
            self._proven = self.key.public
            self._transport.on_proven(self.endpoint, self._proven)
        return True

    def on_keys_changed(self) -> None:
        """Connect anew if need be."""
        try:
            self.key.update()
        except zmq.ZMQError as error:
            log.error("cannot connect to %s with another key: %s", self.endpoint, error.strerror)
            self._transport.apply_keys_again()

    def readable(self) -> bool:
        """Whether a message is here.  Also re-arms the descriptor, which signals edges only."""
        return not self.closed and readable(self.socket)

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        if not self.key.public:
            self.counters.unsent += 1
            return False
        return _send(self.socket, [], message, payload, self.counters)

    def send_frame(self, frame: bytes) -> bool:
        """Send a frame that is no message of this version."""
        try:
            self.socket.send(frame, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def watch_connection(self) -> bool:
        """From now on see when the connection ends.  False where this process watches enough of them, or is short of
        descriptors."""
        if self._transport.watched_links >= WATCHED_LINKS:
            return False
        try:
            self.key.watch_connection()
        except zmq.ZMQError as error:
            log.warning("the end of the connection to %s is noticed by silence: %s", self.endpoint, error.strerror)
            return False
        self._transport.watched_links += 1
        self._watched = True
        return True

    def close(self, *, linger_ms: int = 0) -> None:
        if not self.closed:
            self._transport.watched_links -= self._watched
            self.key.close()
        self.socket.close(linger=linger_ms)


class _ZmqAsyncLink:
    def __init__(self, link: _ZmqLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._signal = asyncio.Event()  # set while a message may be here
        self._signal.set()
        self._received = 0
        self._descriptor = _number(link.socket, zmq.FD)
        self.endpoint = link.endpoint
        self.counters = link.counters
        self._monitor: int | None = None  # the descriptor that tells of failed handshakes and ended connections
        self._on_disconnected: Callable[[], None] | None = None
        loop.add_reader(self._descriptor, self._on_readable)
        self._read_monitor()

    @property
    def closed(self) -> bool:
        return self._link.closed

    def __aiter__(self) -> _ZmqAsyncLink:
        return self

    async def __anext__(self) -> Received:
        self._received += 1
        if self._received % YIELD_EVERY == 0 or self._link.received_bytes >= YIELD_BYTES:
            self._link.received_bytes = 0
            await asyncio.sleep(0)
        while not self.closed:
            await self._signal.wait()
            received = self._link.recv()
            if self._link.key.disconnected:
                self._note_disconnected()
            if not self._link.readable():  # a recv that raises Again takes twice as long
                self._signal.clear()
            if received is not None:
                return received
        raise StopAsyncIteration

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        sent = self._link.send(message, payload)
        # Sending may swallow the edge that announced a message.
        self._check_readable()
        return sent

    def probe_version(self) -> bool:
        return self._link.send_frame(version_probe())

    def close(self) -> None:
        if not self.closed:
            if not self._loop.is_closed():
                self._loop.remove_reader(self._descriptor)
                if self._monitor is not None:
                    self._loop.remove_reader(self._monitor)
            self._link.close()
            self._signal.set()

    def notify_disconnected(self, call: Callable[[], None]) -> None:
        if self._link.watch_connection():
            self._on_disconnected = call
            self._read_monitor()

    def on_keys_changed(self) -> None:
        self._link.on_keys_changed()
        self._read_monitor()
        self._check_readable()

    def _read_monitor(self) -> None:
        if self._link.key.events is not None and self._monitor is None:
            self._monitor = self._link.key.events.fileno()
            self._loop.add_reader(self._monitor, self._on_event)
            self._on_event()

    def _on_event(self) -> None:
        self._link.key.read_events()
        if self._link.key.disconnected:
            self._note_disconnected()
        self._check_readable()

    def _note_disconnected(self) -> None:
        self._link.key.disconnected = False
        if self._on_disconnected is not None:
            self._on_disconnected()

    def _on_readable(self) -> None:
        """The reader finds out what has come.  Until then the descriptor stays readable, unless this looks itself."""
        if self._signal.is_set():
            self._check_readable()
        else:
            self._signal.set()

    def _check_readable(self) -> None:
        if self._link.readable():
            self._signal.set()


def _number(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value


def _drop_rest(socket: zmq.Socket[bytes]) -> None:
    """The parts of a message that follow the one that was received."""
    while _number(socket, _RCVMORE):
        socket.recv(_NOBLOCK, copy=False)


def _received(socket: zmq.Socket[bytes], peer: bytes, header: bytes, counters: WireCounters) -> Received | None:
    """The message of a header and its payload, if there is one.  None for anything else, which is dropped."""
    payload: memoryview | None = None
    extra = 0
    while _number(socket, _RCVMORE):
        frame = socket.recv(_NOBLOCK, copy=False)
        if extra == 0:
            payload = frame.buffer
        extra += 1
    try:
        if extra > 1:
            raise ProtocolError(f"{extra} payloads with one message; at most one is allowed")
        message = decode_peer(header)
    except ProtocolVersionError as error:
        counters.malformed += 1
        counters.other_version = error.version
        return None
    except ProtocolError:
        counters.malformed += 1
        return None
    counters.received += 1
    return Received(peer, message, payload)


def _send(
    socket: zmq.Socket[bytes],
    address: list[bytes],
    message: PeerMessage,
    payload: memoryview | None,
    counters: WireCounters,
) -> bool:
    if socket.closed:
        counters.unsent += 1
        return False
    try:
        frames: list[bytes | memoryview] = [*address, encode_message(message)]
        if payload is not None:
            check_payload(payload)
            frames.append(payload)
    except ProtocolError as error:
        log.error("%s is not sent: %s", type(message).__name__, error)
        counters.unsent += 1
        return False
    try:
        socket.send_multipart(frames, _NOBLOCK)
    except zmq.ZMQError as error:
        if error.errno not in (zmq.EAGAIN, zmq.EHOSTUNREACH):
            log.error("%s is not sent: %s", type(message).__name__, error.strerror)
        counters.unsent += 1
        return False
    counters.sent += 1
    return True
