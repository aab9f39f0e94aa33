"""Checksums of the pages in a worker's own prefix cache: a bit that flips while a page lies there is found before use.

A page is sealed once, when it is full and final, and checked each time a request adopts it, so many bytes between two
steps.  XXH3-128 is made
for accidents: one flipped bit is always found, any other damage with all but 2^-128.
https://github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md
"""

from __future__ import annotations

from penstock.kernels.host_ops import xxh3_128
from penstock.kv.memory import KvMemory
from penstock.types import PageId

BYTES_PER_TURN = 32 << 20
"""Checked between two steps: 1.5 to 4 ms."""

BYTES_PER_S = 10e9
"""Checked by one core, at least."""


class PageSeals:
    """``engine.core.guard.PageGuard`` over memory that this process can read."""

    def __init__(self, memory: KvMemory) -> None:
        self._memory = memory
        self.pages_per_turn = max(1, BYTES_PER_TURN // memory.layout.page_bytes)
        self.page_s = memory.layout.page_bytes / BYTES_PER_S
        self._sums = [b""] * memory.pages

    def seal(self, page: PageId) -> None:
        """See ``PageGuard``.  The page is read once."""
        self._sums[page] = xxh3_128(self._memory.view(page))

    def intact(self, page: PageId) -> bool:
        """See ``PageGuard``.  The page is read once."""
        return xxh3_128(self._memory.view(page)) == self._sums[page]
