"""What is said on the connections over which pages are fetched: the frames, and who proves what.

::

    sender                                              receiver
    HELLO nonce -------------------------------------->
        <------------------------ ATTACH leg, nonce, proof      once a leg and connection
    ATTACHED proof ----------------------------------->         the sender proves itself, too
        <------------------------ FETCH leg, number, pages
    PAGES number; page, page, … ---------------------->         or REFUSED number

Both prove that they have the leg's token, which only the authenticated control channel has given out
(``wire.page_doors``): keyed BLAKE2b (RFC 7693) over both nonces, so that what is overheard is of no use on another
connection.  A page comes as it is, or, where that was agreed, under AES-256-GCM (NIST SP 800-38D) with a key of the
connection's own and the number of the page in its stream as nonce; leg and page are additional data.

Every frame but the pages has a fixed size, and those have the size that both know: no length comes from a peer.
"""

from __future__ import annotations

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
_HEAD = struct.Struct("<BxHIQ")  # kind, pages, number, leg
HELLO_BYTES, HEAD_BYTES = _HELLO.size, _HEAD.size


def hello(nonce: bytes, *, sealed: bool) -> bytes:
    """The sender's first words."""
    return _HELLO.pack(MAGIC, VERSION, sealed, nonce)


def read_hello(raw: bytes | bytearray, *, sealed: bool) -> bytes:
    """The nonce.  Raises ProtocolError for anything but a HELLO of this version that agrees about encryption."""
    magic, version, is_sealed, nonce = _HELLO.unpack(raw)
    if (magic, version, is_sealed) != (MAGIC, VERSION, sealed):
        raise ProtocolError("no greeting of a worker that sends pages as agreed")
    assert isinstance(nonce, bytes)
    return nonce


def head(kind: int, leg: int, *, count: int = 0, number: int = 0) -> bytes:
    """The fixed part of every other frame."""
    return _HEAD.pack(kind, count, number, leg)


def read_head(raw: bytes | bytearray) -> tuple[int, int, int, int]:
    """(kind, pages, number, leg)."""
    kind, count, number, leg = _HEAD.unpack(raw)
    return kind, count, number, leg


def fetch(leg: int, number: int, pages: Sequence[int]) -> bytes:
    """Ask for these pages of the sender's memory."""
    return head(FETCH, leg, count=len(pages), number=number) + struct.pack(f"<{len(pages)}Q", *pages)


def read_pages(raw: bytes | bytearray) -> tuple[int, ...]:
    """The page numbers of a FETCH."""
    return struct.unpack(f"<{len(raw) // 8}Q", raw)


class Pair:
    """The two nonces of a connection, and what is proved with them."""

    def __init__(self, sender: bytes, receiver: bytes) -> None:
        self._both = sender + receiver

    def receiver_proof(self, token: bytes, leg: int) -> bytes:
        """That the receiver has the token of the leg."""
        return self._keyed(token, b"receiver", leg)

    def sender_proof(self, token: bytes, leg: int) -> bytes:
        """That the sender has it, too."""
        return self._keyed(token, b"sender", leg)

    def cipher(self, token: bytes, leg: int) -> Any:
        """With which pages are sealed on this connection, whose first leg this is."""
        return aead()(self._keyed(token, b"pages", leg))

    def _keyed(self, token: bytes, what: bytes, leg: int) -> bytes:
        mac = blake2b(key=token, digest_size=PROOF_BYTES, person=b"penstock-pages")
        mac.update(self._both + leg.to_bytes(8, "little") + what)
        return mac.digest()


def nonce_of(count: int) -> bytes:
    """Of the page that is the ``count``-th on its connection."""
    return count.to_bytes(12, "little")


def names_of(leg: int, page: int) -> bytes:
    """What a sealed page is bound to."""
    return struct.pack("<QQ", leg, page)


def aead() -> Callable[[bytes], Any]:
    """The cipher.  Raises ConfigError without the library, and for one that cannot encrypt into a buffer."""
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        _ = AESGCM.encrypt_into, AESGCM.decrypt_into  # older releases lack them
    except (ImportError, AttributeError):
        raise ConfigError(
            "--transfer tcp between hosts encrypts pages, which needs the package cryptography, and a recent one: "
            "pip install 'penstock[encryption]' on all of them; or --transfer curve"
        ) from None
    return AESGCM
