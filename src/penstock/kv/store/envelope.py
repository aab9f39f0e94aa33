"""Proof and encryption of stored pages.

Without a key: XXH3-128 over the page, its key, and the model, numerics class and layout that it belongs to.  That finds
accidents (flipped bits, torn writes, misplaced pages, files of other models), not forgery: anyone who may write a file
or a Redis may forge pages, unless there is a key.

With a key: AES-256-GCM (NIST SP 800-38D) with the same names as additional data.  Each run of a worker draws 16 bytes,
derives a key of its own from them (BLAKE3, keyed mode) and counts its pages: no nonce is used twice with a key.

::

    proof   | tag or checksum 16 | run 16 | count 8 |      run and count are zeros without a key
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from blake3 import blake3

from penstock.errors import ConfigError, PageCorrupt
from penstock.kernels.host_ops import copy_page, seal_page
from penstock.kv.page_memory import KvLayout
from penstock.kv.store.tier import PageKey
from penstock.types import ModelIdentity

PROOF_BYTES = 40
KEY_BYTES = 32

_NO_RUN = bytes(24)
_MOST_RUNS = 256  # keys of other runs that are kept ready


class PageEnvelope:
    """Proofs of pages of one model in one layout."""

    encrypts = False
    kind = "p"
    """Equal for workers that may read each other's pages: part of the names of pages in a shared store."""

    def __init__(self, identity: ModelIdentity, layout: KvLayout) -> None:
        self.identity = identity
        self.layout = layout
        self._names = identity_digest(identity, layout)

    def seal(self, key: PageKey, page: memoryview) -> tuple[memoryview, bytes]:
        """The bytes to store, and their proof."""
        return page, seal_page(page, self._names + page_key_bytes(key)) + _NO_RUN

    def unseal(self, key: PageKey, stored: memoryview, proof: bytes, into: memoryview) -> None:
        """Copy a stored page and verify the copy.  Raises PageCorrupt; ``into`` is spoiled then."""
        if stored.nbytes != into.nbytes:
            raise PageCorrupt(f"stored page of {stored.nbytes} bytes, expected {into.nbytes}")
        if copy_page(stored, into, self._names + page_key_bytes(key)) + _NO_RUN != proof:
            raise PageCorrupt("stored page: wrong checksum")


class EncryptedEnvelope:
    """A ``PageEnvelope`` with a key.  The stored bytes are as long as the page."""

    encrypts = True

    def __init__(self, identity: ModelIdentity, layout: KvLayout, key: bytes) -> None:
        """Raises ConfigError without the library."""
        self.identity = identity
        self.layout = layout
        self._names = identity_digest(identity, layout)
        self._key = key
        self.kind = "e" + blake3(b"penstock/kv-store/1 which key", key=key).hexdigest()[:8]
        self._cipher = _cipher()
        self._ciphers: dict[bytes, Any] = {}
        self._run = os.urandom(16)
        self._count = itertools.count()

    def seal(self, key: PageKey, page: memoryview) -> tuple[memoryview, bytes]:
        count = next(self._count).to_bytes(8, "little")
        sealed = self._cipher_of(self._run).encrypt(bytes(4) + count, page, self._names + page_key_bytes(key))
        return memoryview(sealed)[:-16], sealed[-16:] + self._run + count

    def unseal(self, key: PageKey, stored: memoryview, proof: bytes, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        if stored.nbytes != into.nbytes:
            raise PageCorrupt(f"stored page of {stored.nbytes} bytes, expected {into.nbytes}")
        tag, run, count = proof[:16], proof[16:32], proof[32:]
        try:
            page = self._cipher_of(run).decrypt(
                bytes(4) + count, bytes(stored) + tag, self._names + page_key_bytes(key)
            )
        except InvalidTag:
            raise PageCorrupt("stored page: not encrypted with this key, or changed") from None
        into[:] = page

    def _cipher_of(self, run: bytes) -> Any:
        cipher = self._ciphers.get(run)
        if cipher is None:
            if len(self._ciphers) >= _MOST_RUNS:
                self._ciphers.clear()
            cipher = self._ciphers[run] = self._cipher(blake3(b"penstock/kv-store/1" + run, key=self._key).digest())
        return cipher


AnyEnvelope = PageEnvelope | EncryptedEnvelope


def make_envelope(identity: ModelIdentity, layout: KvLayout, key: bytes | None) -> AnyEnvelope:
    """An envelope that encrypts if there is a key.  Raises ConfigError."""
    return PageEnvelope(identity, layout) if key is None else EncryptedEnvelope(identity, layout, key)


def read_key(path: Path) -> bytes:
    """A key of 32 bytes: 64 hexadecimal digits in a file that only its owner may read.  Raises ConfigError."""
    hint = f"make one with: (umask 077; openssl rand -hex {KEY_BYTES} > {path})"
    try:
        mode, text = path.stat().st_mode, path.read_text(encoding="ascii")[: 4 * KEY_BYTES].strip()
        key = bytes.fromhex(text)
    except OSError as error:
        raise ConfigError(f"--kv-key {path}: {error.strerror}; {hint}") from None
    except ValueError:
        key = b""
    if len(key) != KEY_BYTES:
        raise ConfigError(f"--kv-key {path}: expected {2 * KEY_BYTES} hexadecimal digits; {hint}")
    if mode & 0o077:
        raise ConfigError(f"--kv-key {path}: others may read it; chmod 600 {path}")
    return key


def check_cipher() -> None:
    """Raises ConfigError when pages cannot be encrypted here."""
    _cipher()


def identity_digest(identity: ModelIdentity, layout: KvLayout) -> bytes:
    """32 bytes that every page of this model in this layout is bound to."""
    fields = (identity.fingerprint.encode(), identity.numerics.encode(), layout.name.encode())
    return blake3(b"penstock/kv-store/1" + b"".join(len(raw).to_bytes(4, "little") + raw for raw in fields)).digest()


def page_key_bytes(key: PageKey) -> bytes:
    """A page's key as bytes."""
    return key.block + key.group.to_bytes(2, "little")


def _cipher() -> Callable[[bytes], Any]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError:
        raise ConfigError("--kv-key needs the package cryptography: pip install 'penstock[encryption]'") from None
    return AESGCM
