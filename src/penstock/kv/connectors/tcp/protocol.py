"""The protocol of the connections over which pages are fetched: frames, authentication and a socket with timeouts.

::

    sender                                              receiver
    HELLO nonce -------------------------------------->
        <------------------------ ATTACH grant, nonce, proof      once per transfer and connection
    ATTACHED proof ----------------------------------->         the sender authenticates, too
        <------------------------ FETCH grant, number, pages
    PAGES number; page, page, … ---------------------->         or REFUSED number

Both ends prove that they have the transfer's token, which only the authenticated control channel carries
(``FetchTicket``): keyed BLAKE2b (RFC 7693) over both nonces, so an overheard proof is useless on another
connection.  A page travels as it is or, where that was agreed, under AES-256-GCM (NIST SP 800-38D) with a key of the
connection's own and the number of the page in its stream as nonce; transfer and page are additional data.

Every frame but the pages has a fixed size, and pages have the size that both ends know: no length comes from a peer.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any

from penstock.errors import ConfigError, ProtocolError

MAGIC = b"PNSK"
VERSION = 1
NONCE_BYTES = PROOF_BYTES = 32
TAG_BYTES = 16
MAX_PAGES = 256
"""Pages in one FETCH."""

ATTACH, ATTACHED, FETCH, PAGES, REFUSED = range(1, 6)

_HELLO = struct.Struct("<4sHH32s")  # magic, version, sealed, nonce
_HEAD = struct.Struct("<BxHIQ")  # kind, pages, number, grant_id
HELLO_BYTES, HEAD_BYTES = _HELLO.size, _HEAD.size


def pack_hello(nonce: bytes, *, sealed: bool) -> bytes:
    """The sender's first frame."""
    return _HELLO.pack(MAGIC, VERSION, sealed, nonce)


def parse_hello(raw: bytes | bytearray, *, sealed: bool) -> bytes:
    """The nonce.  Raises ProtocolError for anything but a HELLO of this version that agrees about encryption."""
    magic, version, is_sealed, nonce = _HELLO.unpack(raw)
    if (magic, version, is_sealed) != (MAGIC, VERSION, sealed):
        raise ProtocolError("no greeting of a worker that sends pages as agreed")
    assert isinstance(nonce, bytes)
    return nonce


def pack_head(kind: int, grant_id: int, *, count: int = 0, number: int = 0) -> bytes:
    """The fixed part of every other frame."""
    return _HEAD.pack(kind, count, number, grant_id)


def parse_head(raw: bytes | bytearray) -> tuple[int, int, int, int]:
    """(kind, pages, number, grant_id)."""
    kind, count, number, grant_id = _HEAD.unpack(raw)
    return kind, count, number, grant_id


def pack_fetch(grant_id: int, number: int, pages: Sequence[int]) -> bytes:
    """A request for these pages of the sender's memory."""
    return pack_head(FETCH, grant_id, count=len(pages), number=number) + struct.pack(f"<{len(pages)}Q", *pages)


def parse_pages(raw: bytes | bytearray) -> tuple[int, ...]:
    """The page numbers of a FETCH."""
    return struct.unpack(f"<{len(raw) // 8}Q", raw)


class Handshake:
    """The two nonces of a connection, and the proofs made with them."""

    def __init__(self, sender: bytes, receiver: bytes) -> None:
        self._both = sender + receiver

    def receiver_proof(self, token: bytes, grant_id: int) -> bytes:
        """Proof that the receiver has the transfer's token."""
        return self._keyed(token, b"receiver", grant_id)

    def sender_proof(self, token: bytes, grant_id: int) -> bytes:
        """Proof that the sender has it."""
        return self._keyed(token, b"sender", grant_id)

    def cipher(self, token: bytes, grant_id: int) -> Any:
        """The cipher for pages on this connection, whose first transfer this is."""
        return aes_gcm()(self._keyed(token, b"pages", grant_id))

    def _keyed(self, token: bytes, what: bytes, grant_id: int) -> bytes:
        mac = blake2b(key=token, digest_size=PROOF_BYTES, person=b"penstock-pages")
        mac.update(self._both + grant_id.to_bytes(8, "little") + what)
        return mac.digest()


def page_nonce(count: int) -> bytes:
    """Nonce of the ``count``-th page on its connection."""
    return count.to_bytes(12, "little")


def page_associated_data(grant_id: int, page: int) -> bytes:
    """Additional data that an encrypted page is bound to."""
    return struct.pack("<QQ", grant_id, page)


def aes_gcm() -> Callable[[bytes], Any]:
    """The cipher class.  Raises ConfigError without the library, and for one that cannot encrypt into a buffer."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        _ = AESGCM.encrypt_into, AESGCM.decrypt_into  # older releases lack them
    except (ImportError, AttributeError):
        raise ConfigError(
            "--transfer tcp between hosts encrypts pages, which needs the package cryptography, and a recent one: "
            "pip install 'penstock[encryption]' on all of them; or --transfer curve"
        ) from None
    return AESGCM


MAX_PARTS = 512
"""Buffers in one call; the system takes 1,024."""

HUNG_UP = "the other end hung up"

_SHORTEST_S = 1e-3  # to wait; zero would be for ever

Part = bytes | bytearray | memoryview


class TimedSocket:
    """A connected socket with a timeout; copies nothing.  Used by one thread; ``shut_down`` may be called by any.

    A send or receive is one system call for all of its buffers: waking a Python thread costs as much as copying a page.
    Raises TimeoutError when nothing moves for ``timeout_s``, ConnectionError or OSError when the peer is gone.
    """

    def __init__(self, sock: socket.socket, patience_s: float) -> None:
        sock.setblocking(True)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.timeout_s = patience_s
        self._told = {socket.SO_RCVTIMEO: -1.0, socket.SO_SNDTIMEO: -1.0}  # for how long the system waits

    def receive_exactly(self, nbytes: int) -> bytearray:
        """Exactly ``nbytes`` bytes."""
        raw = bytearray(nbytes)
        self.receive_into(memoryview(raw))
        return raw

    def receive_into(self, view: memoryview) -> None:
        """Fill the view."""
        while view.nbytes:
            view = view[self.receive_some(view, socket.MSG_WAITALL) :]

    def receive_some(self, view: memoryview, flags: int = 0) -> int:
        """Receive what is there, at least a byte; returns how many."""
        self._be_patient(socket.SO_RCVTIMEO)
        try:
            got = self.sock.recv_into(view, 0, flags)
        except BlockingIOError:
            raise self.stall_error() from None
        if got == 0:
            raise ConnectionError(HUNG_UP)
        return got

    def send(self, parts: Sequence[Part]) -> None:
        """Send all buffers without copying them."""
        self._be_patient(socket.SO_SNDTIMEO)
        views = [memoryview(part) for part in parts]
        at = 0
        while at < len(views):
            try:
                sent = self.sock.sendmsg(views[at : at + MAX_PARTS])
            except BlockingIOError:
                raise self.stall_error() from None
            at = advance(views, at, sent)

    def stall_error(self) -> TimeoutError:
        """The error for a connection on which nothing moves."""
        return TimeoutError(f"nothing moved for {self.timeout_s:g} s")

    def shut_down(self) -> None:
        """Wakes a thread that waits on this socket."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        self.sock.close()

    def _be_patient(self, option: int) -> None:
        if self._told[option] != self.timeout_s:
            self._told[option] = self.timeout_s
            seconds = max(self.timeout_s, _SHORTEST_S)
            timeval = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
            self.sock.setsockopt(socket.SOL_SOCKET, option, timeval)


def advance(views: list[memoryview], at: int, nbytes: int) -> int:
    """Mark ``nbytes`` more of ``views[at:]`` as sent.  Returns the index of the first unfinished view, cut to its
    rest."""
    while nbytes:
        size = views[at].nbytes
        if nbytes < size:
            views[at] = views[at][nbytes:]
            return at
        nbytes -= size
        at += 1
    return at
