"""What carries a page, and how a page is proved to be the right one.

A carrier moves bytes; it decides nothing.  Every page is checked by the receiver on its own copy, after copying: a
sender that writes, dies or wakes up meanwhile can spoil a copy but cannot make a spoiled copy pass.
"""

from __future__ import annotations

from typing import Protocol

import xxhash

from penstock.errors import PageCorrupt
from penstock.kv.layout import KvLayout
from penstock.kv.memory import KvMemory
from penstock.types import ModelIdentity, PageId
from penstock.wire.messages import PageReady, PageSource

COPY_CHUNK_BYTES = 256 << 10
"""Copied, then hashed while still in the cache."""


class PageSeal:
    """Checksums of pages of one model in one layout: XXH3-128 over (page, fingerprint, numerics, layout, generation).

    ``generation`` says how often the sender had given this page out: a page that was reused meanwhile has another.
    https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
    """

    def __init__(self, identity: ModelIdentity, layout: KvLayout) -> None:
        self.identity = identity
        self.layout = layout
        fields = (identity.fingerprint.encode(), identity.numerics.encode(), layout.name.encode())
        self._binding = b"".join(len(raw).to_bytes(4, "little") + raw for raw in fields)

    def checksum(self, page: memoryview, generation: int) -> bytes:
        """16 bytes.  The page is read once."""
        hasher = xxhash.xxh3_128(page)
        hasher.update(self._binding + generation.to_bytes(8, "little"))
        return hasher.digest()

    def copy(self, frame: PageReady, source: memoryview, into: memoryview) -> None:
        """Copy a page and check the copy in the same pass.

        Raises PageCorrupt when the sizes differ or the checksum is not the announced one; ``into`` is spoiled then.
        """
        if source.nbytes != into.nbytes:
            raise PageCorrupt(f"page of {source.nbytes} bytes, expected {into.nbytes}")
        hasher = xxhash.xxh3_128()
        for start in range(0, into.nbytes, COPY_CHUNK_BYTES):
            part = into[start : start + COPY_CHUNK_BYTES]
            part[:] = source[start : start + COPY_CHUNK_BYTES]
            hasher.update(part)
        if not 0 <= frame.generation < 1 << 64:
            raise PageCorrupt(f"generation {frame.generation} of page {frame.page}")
        hasher.update(self._binding + frame.generation.to_bytes(8, "little"))
        if hasher.digest() != frame.checksum:
            raise PageCorrupt(f"block {frame.block} of {frame.request}: wrong checksum")


class PageCarrier(Protocol):
    """One way for page bytes to get from worker to worker.  Both ends of a hand-over use the same kind."""

    name: str
    """"shm", "tcp" or "memory": as in ``PullPages.carrier``."""

    own: KvMemory
    """This worker's pages: read by the sending end, written by the receiving end."""

    seal: PageSeal

    def payload(self, page: PageId) -> memoryview | None:
        """Sending end: what goes with the announcement of a page; None when the receiver fetches it itself."""
        ...

    def copy(self, source: PageSource, frame: PageReady, payload: memoryview | None, into: memoryview) -> None:
        """Receiving end: copy the announced page of ``source`` into a page of one's own, then verify the copy.

        Raises PageCorrupt for a page that is not the announced one, HandOverRefused for a source out of reach.
        """
        ...
