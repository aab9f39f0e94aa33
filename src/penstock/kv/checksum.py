"""Checksums of KV pages: of pages that travel to another worker, and of pages in a worker's own prefix cache.

Both are XXH3-128, which is made for accidents: one flipped bit is always found, any other damage with all but 2^-128.
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from penstock.errors import PageCorrupt
from penstock.kernels.host_ops import copy_page, seal_page, xxh3_128
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.types import ModelIdentity, PageId
from penstock.wire.transfer_messages import PageReady

BYTES_PER_TURN = 32 << 20
"""Checked between two steps: 1.5 to 4 ms."""

BYTES_PER_S = 10e9
"""Checked by one core, at least."""


class PageChecksums:
    """Checksums of the pages in this worker's prefix cache (``engine.core.kv_cache_manager.PageVerifier``).

    A page is recorded once, when it is full and final, and verified each time a request adopts it, so a bit that flips
    in between is found before use.  Each call reads the page once; verification is spread over steps.
    """

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self.pages_per_step = max(1, BYTES_PER_TURN // memory.layout.page_bytes)
        self.page_s = memory.layout.page_bytes / BYTES_PER_S
        self._sums = [b""] * memory.pages

    def seal(self, page: PageId) -> None:
        self._sums[page] = xxh3_128(self._memory.view(page))

    def is_intact(self, page: PageId) -> bool:
        return xxh3_128(self._memory.view(page)) == self._sums[page]


class PageChecksum:
    """Checksums of travelling pages: over (page, fingerprint, numerics, layout, generation) of one model in one layout.

    ``generation`` counts how often the sender had allocated the page: a page reused meanwhile has another one.
    """

    def __init__(self, identity: ModelIdentity, layout: KvLayout) -> None:
        self.identity = identity
        self.layout = layout
        fields = (identity.fingerprint.encode(), identity.numerics.encode(), layout.name.encode())
        self._binding = b"".join(len(raw).to_bytes(4, "little") + raw for raw in fields)

    def checksum(self, page: memoryview, generation: int) -> bytes:
        """16 bytes.  Reads the page once."""
        return seal_page(page, self.suffix(generation))

    def suffix(self, generation: int) -> bytes:
        """What is hashed behind a page's bytes.  Raises OverflowError for an impossible generation."""
        return self._binding + generation.to_bytes(8, "little")

    def matches(self, frame: PageReady, page: memoryview) -> bool:
        """Whether the worker's own page is the announced one.  Reads it once."""
        return self.checksum(page, frame.generation) == frame.checksum

    def copy_checked(self, frame: PageReady, source: memoryview, into: memoryview) -> None:
        """Copy a page and verify the copy in one pass.

        Raises PageCorrupt when the sizes or checksums differ; ``into`` is spoiled then.
        """
        try:
            found = copy_page(source, into, self.suffix(frame.generation))
        except (ValueError, OverflowError) as error:  # sizes, and numbers that are no generation
            raise PageCorrupt(f"page {frame.page} of generation {frame.generation}: {error}") from None
        if found != frame.checksum:
            raise PageCorrupt(f"block {frame.index} of {frame.request}: wrong checksum")
