"""An authenticated and encrypted TCP connection between two processes of one worker that are on different machines.

::

    connecting end                                        listening end
    nonce, X25519 key ------------------------------------->
            <------------------------------------- nonce, X25519 key, proof
    proof ------------------------------------------------->
            <------------- records, both ways ------------->     length, AES-256-GCM (NIST SP 800-38D) of the bytes

Both ends prove that they have the deployment's keys (``CurveKeys``), which never travel: proofs and the keys of the
records come, by keyed BLAKE2b (RFC 7693), from those, both nonces and a Diffie-Hellman secret (X25519, RFC 7748) of
this connection alone, so records that were overheard stay secret when the deployment's keys become known.  Where nodes
have keys of their own (``NodeKeys``), each end says which public key it has, and two more Diffie-Hellman secrets, of
each end's own key with the other's key for this connection, take the place of the shared keys (ee, es and se, as in
the patterns of https://noiseprotocol.org).  A record is numbered by its nonce: one that is lost, repeated or changed
ends the connection, and none is made again by itself.

Files of nodes' keys are looked at for each connection, so one that is made after a change goes by what holds then.
``RankListener`` greets many callers at once: one that says nothing keeps no other waiting.

Knows nothing about what records say.
"""

from __future__ import annotations

import contextlib
import os
import queue
import secrets
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from hmac import compare_digest
from typing import Any

from zmq.utils import z85

from penstock.config.node_registry import NodeEntry, NodeRight
from penstock.errors import ConfigError, ProtocolError
from penstock.wire.node_keys import HostKeys, NodeKeys

GREETING_S = 3.0
"""For the other end to prove that it has the keys."""

SILENCE_S = 4
"""Who says nothing for so long is taken to be gone: each end says something more often than that."""

MAX_GREETED = 16
"""Callers that a ``RankListener`` greets at once.  One more takes the place of one that is still silent."""

RECORD_BYTES = 1 << 18
"""The most bytes of one record: what is large goes as several, so that it is encrypted, sent and decrypted at once."""

_MAGIC = b"PNSR\1\0\0\0"
_NODES_MAGIC = b"PNSR\1\0\0\1"  # the greeting ends with the public key of a node
_KEY_BYTES = _NONCE_BYTES = _PROOF_BYTES = 32
_TAG_BYTES = 16
_HELLO_BYTES = len(_MAGIC) + _NONCE_BYTES + _KEY_BYTES
_LENGTH = struct.Struct("<I")

Part = bytes | bytearray | memoryview


class RankLink:
    """A connection whose ends know each other.  Threads may send while one receives.

    Raises OSError when the connection is gone, ProtocolError for what no rank sends.
    """

    def __init__(
        self, sock: socket.socket, send_key: bytes, receive_key: bytes, peer: tuple[str, bytes] = ("", b"")
    ) -> None:
        """``peer``: the name of the other end's node, and the public key, as Z85, by which it was known."""
        self._sock = sock
        self.peer_node, self._peer_key = peer
        """The node of the other end; empty where hosts share their keys."""
        self._send_cipher, self._receive_cipher = _cipher(send_key), _cipher(receive_key)
        self._sent = self._received = 0
        self._sending = threading.Lock()  # records leave in the order of their numbers
        sock.setblocking(True)

    @property
    def peer_host(self) -> str:
        """The address of the other end."""
        host: str = self._sock.getpeername()[0]
        return host

    def is_accepted(self, keys: HostKeys) -> bool:
        """Whether the other end would be accepted now, too: keys of nodes are revoked while links are open."""
        if not isinstance(keys, NodeKeys):
            return True
        node = _worker_node(keys.current(), self._peer_key)
        return node is not None and node.name == self.peer_node

    def fileno(self) -> int:
        """The socket's descriptor, to wait for."""
        return self._sock.fileno()

    def send(self, *parts: Part) -> None:
        """One record, of ``RECORD_BYTES`` at most; waits until the system has taken it."""
        body = b"".join(parts)
        if len(body) > RECORD_BYTES:
            raise ValueError(f"a record of {len(body)} bytes; at most {RECORD_BYTES} are allowed")
        head = _LENGTH.pack(len(body))
        with self._sending:
            self._sent += 1
            self._sock.sendall(head + self._send_cipher.encrypt(_nonce(self._sent), body, head))

    def recv(self, deadline: float | None = None) -> bytes:
        """The next record.  Raises TimeoutError when nothing comes for ``SILENCE_S``, or when not all of it has come by
        ``deadline``, in seconds of the monotonic clock."""
        from cryptography.exceptions import InvalidTag

        head = _receive(self._sock, _LENGTH.size, deadline)
        (length,) = _LENGTH.unpack(head)
        if length > RECORD_BYTES:
            raise ProtocolError(f"a record of {length} bytes; at most {RECORD_BYTES} are allowed")
        sealed = _receive(self._sock, length + _TAG_BYTES, deadline)
        if deadline is not None:
            self._sock.setblocking(True)
        self._received += 1
        try:
            body: bytes = self._receive_cipher.decrypt(_nonce(self._received), sealed, head)
        except InvalidTag:
            raise ProtocolError("a record that was changed, repeated or lost on its way") from None
        return body

    def close(self) -> None:
        """End the connection; a thread that waits for it is woken.  Idempotent."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()


def listen_for_ranks(host: str, port: int) -> socket.socket:
    """A listening socket, which does not block; port 0 is any free one.

    Raises ConfigError when it cannot listen there.
    """
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family)
    except OSError as error:
        raise ConfigError(f"cannot listen for other machines at {host}:{port}: {error.strerror}") from None
    listening.setblocking(False)  # one that was announced may have gone before it is accepted
    return listening


@dataclass(frozen=True, slots=True)
class RankCaller:
    """One that has the keys, from which address it has connected, and the first record that it sent."""

    link: RankLink
    host: str
    first: bytes


@dataclass(eq=False, slots=True)
class _Greeting:
    """A caller that is greeted.  ``sock`` is the listener's, to end the connection; the thread has a descriptor of its
    own."""

    sock: socket.socket
    host: str
    thread: threading.Thread = field(init=False)
    proven: bool = False
    outcome: RankCaller | Exception = field(default_factory=lambda: ConnectionError("it was not greeted to the end"))


class RankListener:
    """Greets those who connect to a listening socket, each in a short-lived thread: none keeps another waiting.

    One thread calls its methods.  Leaving its context ends all threads, and closes connections that were not taken.
    """

    def __init__(self, listening: socket.socket, keys: HostKeys, on_refused: Callable[[str, Exception], None]) -> None:
        """``listening``: does not block, and stays open.  ``on_refused``: called with the address of each caller that
        does not prove that it has the keys, or says nothing, and with the reason."""
        self._listening = listening
        self._keys = keys
        self._on_refused = on_refused
        self._greetings: list[_Greeting] = []  # in the order in which they came
        self._over = queue.SimpleQueue[_Greeting]()
        self._any_over = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def __enter__(self) -> RankListener:
        return self

    def __exit__(self, *error: object) -> None:
        for greeting in self._greetings:
            _interrupt(greeting)
            greeting.sock.close()
            if isinstance(greeting.outcome, RankCaller):
                greeting.outcome.link.close()
        self._greetings.clear()
        os.close(self._any_over)

    @property
    def descriptors(self) -> tuple[int, ...]:
        """When one of them can be read, ``callers`` has something to do."""
        return self._listening.fileno(), self._any_over

    def callers(self) -> Iterator[RankCaller]:
        """Callers that have been greeted since the last call."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._any_over)
        self._accept()
        while not self._over.empty():
            greeting = self._over.get()
            if greeting not in self._greetings:
                continue  # another one took its place
            self._forget(greeting)
            if isinstance(greeting.outcome, RankCaller):
                yield greeting.outcome
            else:
                self._on_refused(greeting.host, greeting.outcome)

    def _accept(self) -> None:
        for _ in range(MAX_GREETED):  # more of them next time
            try:
                sock, (host, *_) = self._listening.accept()
            except BlockingIOError:
                return
            except OSError as error:
                self._on_refused("one that has gone already", error)
                return
            if len(self._greetings) == MAX_GREETED:
                self._make_room()
            greeting = _Greeting(sock, host)
            greeting.thread = threading.Thread(target=self._greet, args=(greeting,), name=f"greet {host}", daemon=True)
            self._greetings.append(greeting)
            greeting.thread.start()

    def _make_room(self) -> None:
        """End a greeting: that of a caller without a proof before others, of the address with most of them, the
        oldest."""
        crowd = Counter(greeting.host for greeting in self._greetings)
        greets = threading.Thread.is_alive
        last = min(self._greetings, key=lambda each: (each.proven, greets(each.thread), -crowd[each.host]))
        _interrupt(last)
        self._forget(last)
        if isinstance(last.outcome, RankCaller):  # it was ready meanwhile
            last.outcome.link.close()
        self._on_refused(last.host, ConnectionError(f"it was silent, and more than {MAX_GREETED} wait to be greeted"))

    def _forget(self, greeting: _Greeting) -> None:
        self._greetings.remove(greeting)
        greeting.thread.join()
        greeting.sock.close()

    def _greet(self, greeting: _Greeting) -> None:
        try:
            link = accept_rank(greeting.sock.dup(), self._keys)
            greeting.proven = True
            try:
                first = link.recv(time.monotonic() + SILENCE_S)
            except BaseException:
                link.close()
                raise
            greeting.outcome = RankCaller(link, greeting.host, first)
        except (OSError, ProtocolError) as error:
            greeting.outcome = error
        finally:
            self._over.put(greeting)
            os.eventfd_write(self._any_over, 1)


def _interrupt(greeting: _Greeting) -> None:
    with contextlib.suppress(OSError):
        greeting.sock.shutdown(socket.SHUT_RDWR)  # wakes the thread
    greeting.thread.join()


def accept_rank(sock: socket.socket, keys: HostKeys) -> RankLink:
    """The link of a connection that a listening socket has accepted.

    Raises ProtocolError if the other end does not prove that it has the keys, OSError if it is gone or too slow; the
    connection is closed then.
    """
    return _greeted(sock, keys, connecting=False)


def connect_rank(host: str, port: int, keys: HostKeys) -> RankLink:
    """A link to who listens there.  Raises as ``accept_rank``."""
    return _greeted(socket.create_connection((host, port), timeout=GREETING_S), keys, connecting=True)


def _greeted(sock: socket.socket, keys: HostKeys, *, connecting: bool) -> RankLink:
    try:
        _watch(sock)
        return _handshake(sock, keys, time.monotonic() + GREETING_S, connecting=connecting)
    except BaseException:
        sock.close()
        raise


def _handshake(sock: socket.socket, keys: HostKeys, deadline: float, *, connecting: bool) -> RankLink:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    if isinstance(keys, NodeKeys):
        keys = keys.current()
    own = X25519PrivateKey.generate()
    hello = secrets.token_bytes(_NONCE_BYTES) + own.public_key().public_bytes_raw()
    hello = _NODES_MAGIC + hello + z85.decode(keys.public) if isinstance(keys, NodeKeys) else _MAGIC + hello
    if connecting:
        _send(sock, hello, deadline)
        theirs, node = _receive_hello(sock, keys, deadline)
        master = _master_key(keys, (hello, theirs), own, connecting=True)
        _check_proof(_receive(sock, _PROOF_BYTES, deadline), master, b"listening")
        _send(sock, _derived(master, b"connecting"), deadline)
    else:
        theirs, node = _receive_hello(sock, keys, deadline)
        master = _master_key(keys, (theirs, hello), own, connecting=False)
        _send(sock, hello + _derived(master, b"listening"), deadline)
        _check_proof(_receive(sock, _PROOF_BYTES, deadline), master, b"connecting")
    ways = _derived(master, b"to the listening end"), _derived(master, b"to the connecting end")
    send_key, receive_key = ways if connecting else ways[::-1]
    return RankLink(sock, send_key, receive_key, (node, z85.encode(theirs[_HELLO_BYTES:])))


def _receive_hello(sock: socket.socket, keys: HostKeys, deadline: float) -> tuple[bytes, str]:
    """The other end's greeting, with the public key of a node that may have workers, and its name, if nodes have
    keys."""
    by_node = isinstance(keys, NodeKeys)
    hello = bytes(_receive(sock, _HELLO_BYTES, deadline))
    if hello[: len(_MAGIC)] != (_NODES_MAGIC if by_node else _MAGIC):
        raise ProtocolError("what connects is no rank of a worker of this version, or has keys of the other form")
    if not isinstance(keys, NodeKeys):
        return hello, ""
    node_key = bytes(_receive(sock, _KEY_BYTES, deadline))
    node = _worker_node(keys, z85.encode(node_key))
    if node is None:
        raise ProtocolError("the other end's key is of no node that may have workers")
    return hello + node_key, node.name


def _worker_node(keys: NodeKeys, public: bytes) -> NodeEntry | None:
    """The node with this public key, as Z85, if it may have workers."""
    node = keys.sender(public)
    return node if node is not None and node.may(NodeRight.WORKER) else None


def _master_key(keys: HostKeys, greetings: tuple[bytes, bytes], own: Any, *, connecting: bool) -> bytes:
    """The key of this connection.  ``greetings``: of the connecting and the listening end; ``own``: this end's private
    key of this connection."""
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    theirs = greetings[connecting]
    once, whole = slice(_HELLO_BYTES - _KEY_BYTES, _HELLO_BYTES), b"".join(greetings)
    shared = _agreed(own, theirs[once])
    if not isinstance(keys, NodeKeys):
        secret = keys.server_secret + keys.client_secret
    else:
        node = X25519PrivateKey.from_private_bytes(z85.decode(keys.secret))
        pairs = _agreed(own, theirs[_HELLO_BYTES:]), _agreed(node, theirs[once])
        secret = b"".join(pairs if connecting else pairs[::-1])
    proven = blake2b(secret, digest_size=_KEY_BYTES, person=b"penstock ranks")
    return _derived(proven.digest(), whole + shared)


def _agreed(private: Any, public: bytes) -> bytes:
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PublicKey

    try:
        agreed: bytes = private.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ProtocolError("a key that agrees with none") from None
    return agreed


def _derived(key: bytes, what: bytes) -> bytes:
    return blake2b(what, key=key, digest_size=_KEY_BYTES, person=b"penstock ranks").digest()


def _check_proof(proof: bytearray, master: bytes, who: bytes) -> None:
    if not compare_digest(proof, _derived(master, who)):
        raise ProtocolError("the other end has other keys")


def _cipher(key: bytes) -> Any:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return AESGCM(key)


def _nonce(count: int) -> bytes:
    return count.to_bytes(12, "little")


def _watch(sock: socket.socket) -> None:
    """Small records leave at once, and who says nothing is noticed."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, SILENCE_S * 1000)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # also where nothing is said until all are there
    for each in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL):
        sock.setsockopt(socket.IPPROTO_TCP, each, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", SILENCE_S, 0))


def _send(sock: socket.socket, data: bytes, deadline: float) -> None:
    sock.settimeout(_left(deadline))
    sock.sendall(data)


def _left(deadline: float) -> float:
    """Seconds until then.  Raises TimeoutError when there are none."""
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left


def _receive(sock: socket.socket, nbytes: int, deadline: float | None = None) -> bytearray:
    """Exactly so many bytes.  ``deadline``: of the monotonic clock; else the socket's own patience with each piece."""
    data, got = bytearray(nbytes), 0
    view = memoryview(data)
    while got < nbytes:
        if deadline is not None:
            sock.settimeout(_left(deadline))
        try:
            received = sock.recv_into(view[got:])
        except BlockingIOError:
            raise TimeoutError(f"nothing came for {SILENCE_S} s") from None
        if received == 0:
            raise ConnectionError("the other end has closed the connection")
        got += received
    return data
