"""Checksums of the pages in a worker's own prefix cache: a bit that flips while a page lies there is found before use.

A page is sealed once, when it is full and final, and checked each time a request adopts it, so many bytes between two
steps.  XXH3-128 is made
for accidents: one flipped bit is always found, any other damage with all but 2^-128.
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from penstock.errors import PageCorrupt
from penstock.kernels.host_ops import copy_page, seal_page, xxh3_128
from penstock.kv.layout import KvLayout
from penstock.kv.memory import KvMemory
from penstock.types import ModelIdentity, PageId
from penstock.wire.transfer_messages import PageReady

BYTES_PER_TURN = 32 << 20
"""Checked between two steps: 1.5 to 4 ms."""

BYTES_PER_S = 10e9
"""Checked by one core, at least."""


class PageChecksums:
    """``engine.core.guard.PageGuard`` over memory that this process can read."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self.pages_per_step = max(1, BYTES_PER_TURN // memory.layout.page_bytes)
        self.page_s = memory.layout.page_bytes / BYTES_PER_S
        self._sums = [b""] * memory.pages

    def seal(self, page: PageId) -> None:
        """See ``PageVerifier``.  The page is read once."""
        self._sums[page] = xxh3_128(self._memory.view(page))

    def is_intact(self, page: PageId) -> bool:
        """See ``PageVerifier``.  The page is read once."""
        return xxh3_128(self._memory.view(page)) == self._sums[page]


class PageChecksum:
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
        return seal_page(page, self.suffix(generation))

    def suffix(self, generation: int) -> bytes:
        """What is hashed behind a page's bytes.  OverflowError for a number that is no generation."""
        return self._binding + generation.to_bytes(8, "little")

    def matches(self, frame: PageReady, page: memoryview) -> bool:
        """Is this page, which is one's own, the announced one?  It is read once."""
        return self.checksum(page, frame.generation) == frame.checksum

    def copy_checked(self, frame: PageReady, source: memoryview, into: memoryview) -> None:
        """Copy a page and check the copy in the same pass.

        Raises PageCorrupt when the sizes differ or the checksum is not the announced one; ``into`` is spoiled then.
        """
        try:
            found = copy_page(source, into, self.suffix(frame.generation))
        except (ValueError, OverflowError) as error:  # sizes, and numbers that are no generation
            raise PageCorrupt(f"page {frame.page} of generation {frame.generation}: {error}") from None
        if found != frame.checksum:
            raise PageCorrupt(f"block {frame.block} of {frame.request}: wrong checksum")
