"""The transport over ZeroMQ: one ROUTER a worker, DEALERs to it, and CURVE on every one of them.

There is no way to make a socket here without keys, so nothing can speak in clear, on or off the loopback.  A
listener accepts only the deployment's client key: the library asks ``_Gate`` (ZAP, https://rfc.zeromq.org/spec/27)
over an inproc socket that is served from ``recv`` and ``wait``, so no second thread of Python is needed.

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
from collections.abc import Iterable
from hmac import compare_digest

import zmq
from zmq.utils import z85

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
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.transport import YIELD_BYTES, YIELD_EVERY, AsyncLink, Link, Listener, Received, Source, WireCounters

QUEUE_MESSAGES = 16_384
"""Messages that may wait to be sent to one peer."""

RECEIVED_MESSAGES = 1024
"""Messages of one peer that may wait here unread; what comes on top waits at the sender."""

HANDSHAKE_MS = 3_000
"""For a new connection to prove that it has the deployment's key.  Then it is closed."""

CONNECTIONS_WAITING = 1024
"""New connections that may wait to be accepted (listen(2))."""

MALFORMED_PER_TURN = 64
"""Frames dropped in one ``recv`` before the loop gets its turn again."""

RECONNECT_FIRST_MS = 20
RECONNECT_MAX_MS = 500
"""Over TCP the pause doubles up to that.  On one host it does not: a worker that was forked anew is reached as soon as
it listens, not up to as long again as it took to begin, and a refused connection costs microseconds there."""
HEARTBEAT_MS = 2_000  # TCP only: the library's own, answered by its I/O thread
HEARTBEAT_TIMEOUT_MS = 10_000
IPC_NAME_MAX = 107  # unix(7)

# As plain integers: arithmetic on the library's enumerations costs microseconds a message.
_LISTENING, _ACCEPTED = int(zmq.EVENT_LISTENING), int(zmq.EVENT_ACCEPTED)
_SO_ATTACH_FILTER, _SO_DETACH_FILTER = 26, 27  # socket(7)
_NOBLOCK, _RCVMORE, _EVENTS, _POLLIN = int(zmq.NOBLOCK), int(zmq.RCVMORE), int(zmq.EVENTS), int(zmq.POLLIN)

_IPC_FILTER_UID = 59  # ZMQ_IPC_FILTER_UID of zmq.h
_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_ZAP_VERSION = b"1.0"
_DOMAIN = b"penstock"


log = logging.getLogger("penstock.wire")


class ZmqTransport:
    """``transport.Transport`` over ipc (only this user's processes may connect) and TCP."""

    def __init__(self, keys: CurveKeys) -> None:
        self._keys = keys
        self._pid = os.getpid()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=1)
        # The library's own default of 1,023 would end a gateway's fleet at 511 workers.
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))
        self._gate: _Gate | None = None
        self._open: list[_ZmqListener | _ZmqLink | _ZmqAsyncLink] = []

    def listen(self, endpoint: str) -> Listener:
        self._check_process()
        if self._gate is None:
            self._gate = self._make_gate()
        made = self._socket(zmq.ROUTER, endpoint)
        limit: _ConnectionLimit | None = None
        try:
            if endpoint.startswith("tcp://"):
                limit = _ConnectionLimit(made)
            made.setsockopt(zmq.ROUTER_MANDATORY, 1)
            made.setsockopt(zmq.BACKLOG, CONNECTIONS_WAITING)
            if endpoint.startswith("ipc://"):
                # By SO_PEERCRED: a connection of another user is closed before it is spoken to, keys or no keys.
                made.setsockopt(_IPC_FILTER_UID, os.geteuid())
            made.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)  # payloads go from listeners to links only
            made.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
            made.setsockopt(zmq.CURVE_SERVER, 1)
            made.setsockopt(zmq.CURVE_SECRETKEY, self._keys.server_secret)
            made.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.server_public)
            made.bind(endpoint)
            bound = made.getsockopt_string(zmq.LAST_ENDPOINT).rstrip("\0")
        except zmq.ZMQError as error:
            if limit is not None:
                limit.close()
            made.close(linger=0)
            raise ConfigError(f"cannot listen at {endpoint}: {error.strerror}") from error
        listener = _ZmqListener(made, bound, self._gate, limit)
        self._open.append(listener)
        return listener

    def connect(self, endpoint: str) -> Link:
        link = self._link(endpoint)
        self._open.append(link)
        return link

    def connect_async(self, endpoint: str) -> AsyncLink:
        link = _ZmqAsyncLink(self._link(endpoint), asyncio.get_running_loop())
        self._open.append(link)
        return link

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
        for source in self._open:
            if isinstance(source, _ZmqListener):
                source.close_limit()
            if isinstance(source, _ZmqAsyncLink):
                source.close()
            else:
                source.socket.close(linger=round(linger_s * 1000))
        self._open.clear()
        if self._gate is not None:
            self._gate.socket.close(linger=0)
        self._context.term()

    def _link(self, endpoint: str) -> _ZmqLink:
        self._check_process()
        socket = self._socket(zmq.DEALER, endpoint)
        try:
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server_public)
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.client_secret)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.client_public)
            socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_FIRST_MS)
            socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS if endpoint.startswith("tcp://") else 0)
            socket.connect(endpoint)
        except zmq.ZMQError as error:
            socket.close(linger=0)
            raise ConfigError(f"cannot connect to {endpoint}: {error.strerror}") from error
        return _ZmqLink(socket, endpoint)

    def _socket(self, kind: int, endpoint: str) -> zmq.Socket[bytes]:
        check_endpoint(endpoint)
        self._open = [source for source in self._open if not source.closed]
        try:
            socket = self._context.socket(kind)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot open a socket for {endpoint}: {error.strerror}") from error
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, QUEUE_MESSAGES)
        socket.setsockopt(zmq.RCVHWM, RECEIVED_MESSAGES)
        socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.setsockopt(zmq.MAXMSGSIZE, max(MAX_FRAME_BYTES, MAX_PAYLOAD_BYTES))
        if endpoint.startswith("tcp://"):
            socket.setsockopt(zmq.IPV6, int("[" in endpoint))
            socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
            socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        return socket

    def _make_gate(self) -> _Gate:
        try:
            return _Gate(self._context, self._keys.client_public)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot open a socket to check keys: {error.strerror}") from error

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("a ZeroMQ transport cannot be used after a fork")


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError unless it is ``ipc:///path``, ``ipc://@name`` (an abstract name) or ``tcp://host:port``."""
    kind, _, rest = endpoint.partition("://")
    if kind == "ipc" and rest.startswith(("@", "/")) and 1 < len(rest.encode()) <= IPC_NAME_MAX:
        return
    host, _, port = rest.rpartition(":")
    if kind == "tcp" and host and port.isascii() and port.isdigit() and int(port) < 1 << 16:
        return
    raise ConfigError(f"{endpoint!r} is not an endpoint; ipc:///path, ipc://@name and tcp://host:port are")


class _Gate:
    """Answers the library's question who may connect: the holder of one client key."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], client_public: bytes) -> None:
        self._allowed = z85.decode(client_public)
        self.socket = context.socket(zmq.REP)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.bind(_ZAP_ENDPOINT)
        self.refused = 0

    def serve(self) -> None:
        """Answer all authentication requests that are pending."""
        while _readable(self.socket):
            frames = self.socket.recv_multipart(_NOBLOCK)
            # RFC 27: version, request, domain, address, identity, mechanism, credentials
            known = len(frames) == 7 and frames[0] == _ZAP_VERSION and frames[2] == _DOMAIN and frames[5] == b"CURVE"
            allowed = known and compare_digest(frames[6], self._allowed)
            self.refused += not allowed
            status = (b"200", b"OK") if allowed else (b"400", b"unknown key")
            request = frames[1] if len(frames) > 1 else b""
            self.socket.send_multipart([_ZAP_VERSION, request, *status, b"", b""])


class _ConnectionLimit:
    """Limits connections over the network, so that other sockets do not run out of descriptors.

    The library accepts every connection, so the kernel refuses them: a filter on the listening socket drops what begins
    a connection, which is tried again a second later.  Existing connections stay, and one that
    proves no key is gone after ``HANDSHAKE_MS``; then it opens again.  To be made before the socket is bound.
    """

    def __init__(self, zmq_socket: zmq.Socket[bytes]) -> None:
        self._socket = zmq_socket
        self._most = most_connections()
        self._connected = 0
        self._shut = False
        self._listening: socket.socket | None = None
        self._events = zmq_socket.get_monitor_socket(_LISTENING | _ACCEPTED | zmq.EVENT_DISCONNECTED)
        self._events.setsockopt(zmq.LINGER, 0)

    def update(self) -> None:
        """Count connections that came and went."""
        with contextlib.suppress(zmq.Again):
            while True:
                payload, _address = self._events.recv_multipart(_NOBLOCK)
                event, descriptor = struct.unpack("=HI", payload)
                if event == _LISTENING:
                    self._listening = socket.socket(fileno=os.dup(descriptor))
                else:
                    self._connected += 1 if event == _ACCEPTED else -1
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

    def close(self) -> None:
        """To be called before its socket is closed."""
        if not self._events.closed:
            self._socket.disable_monitor()
            self._events.close(linger=0)
            if self._listening is not None:
                self._listening.close()


def most_connections() -> int:
    """To one listener: half of the descriptors that this process may have."""
    return max(16, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


class _ZmqListener:
    def __init__(self, socket: zmq.Socket[bytes], endpoint: str, gate: _Gate, limit: _ConnectionLimit | None) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.counters = WireCounters()
        self._gate = gate
        self._limit = limit
        self._refused_versions: set[int] = set()

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def recv(self) -> Received | None:
        for _ in range(0 if self.closed else MALFORMED_PER_TURN):
            if not _readable(self.socket):
                self._gate.serve()
                if self._limit is not None:
                    self._limit.update()
                return None
            peer = self.socket.recv(_NOBLOCK)
            header = self.socket.recv(_NOBLOCK)
            received = _received(self.socket, peer, header, self.counters)
            if received is not None:
                return received
            if header and header[0] != PROTOCOL_VERSION:
                self._refuse_version(peer, header)
        return None

    def _refuse_version(self, peer: bytes, header: bytes) -> None:
        """Answer with our version; say once for each other version that it was refused."""
        with contextlib.suppress(zmq.ZMQError):
            self.socket.send_multipart([peer, VERSION_NOTICE], _NOBLOCK)
        if header[0] not in self._refused_versions and not is_version_probe(header):
            self._refused_versions.add(header[0])
            log.warning("refused: %s", version_reason(header[0]))

    def send(self, peer: bytes, message: PeerMessage, payload: memoryview | None = None) -> bool:
        return _send(self.socket, [peer], message, payload, self.counters)

    def close(self) -> None:
        self.close_limit()
        self.socket.close(linger=0)

    def close_limit(self) -> None:
        """Before the socket is closed."""
        if self._limit is not None:
            self._limit.close()


class _ZmqLink:
    def __init__(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        self.socket = socket
        self.endpoint = endpoint
        self.counters = WireCounters()
        self.received_bytes = 0  # of messages, without payloads

    @property
    def closed(self) -> bool:
        return self.socket.closed

    def recv(self) -> Received | None:
        for _ in range(0 if self.closed else MALFORMED_PER_TURN):
            try:
                header = self.socket.recv(_NOBLOCK)
            except zmq.Again:
                return None
            received = _received(self.socket, b"", header, self.counters)
            if received is not None:
                self.received_bytes += len(header)
                return received
        return None

    def readable(self) -> bool:
        """Whether a message is here.  Also re-arms the descriptor, which signals edges only."""
        return not self.closed and _readable(self.socket)

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        return _send(self.socket, [], message, payload, self.counters)

    def send_frame(self, frame: bytes) -> bool:
        """Send a frame that is no message of this version."""
        try:
            self.socket.send(frame, _NOBLOCK)
        except zmq.ZMQError:
            return False
        return True

    def close(self) -> None:
        self.socket.close(linger=0)


class _ZmqAsyncLink:
    def __init__(self, link: _ZmqLink, loop: asyncio.AbstractEventLoop) -> None:
        self._link = link
        self._loop = loop
        self._signal = asyncio.Event()
        self._received = 0
        self._descriptor = _number(link.socket, zmq.FD)
        self.endpoint = link.endpoint
        self.counters = link.counters
        loop.add_reader(self._descriptor, self._check_readable)

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
            received = self._link.recv()
            if received is not None:
                return received
            self._signal.clear()
            self._check_readable()
            await self._signal.wait()
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
            self._link.close()
            self._signal.set()

    def _check_readable(self) -> None:
        if self._link.readable():
            self._signal.set()


def _number(socket: zmq.Socket[bytes], option: int) -> int:
    value = socket.getsockopt(option)
    assert isinstance(value, int)
    return value


def _readable(socket: zmq.Socket[bytes]) -> bool:
    """Whether a message is here: in half the time of a ``recv`` that raises Again."""
    return bool(_number(socket, _EVENTS) & _POLLIN)


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
