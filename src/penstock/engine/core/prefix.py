"""The prefix cache: which page holds the block with this hash.

A hash names a block and all tokens before it, so a chain of known hashes is a prefix that need not be computed.
It owns no page: pages that nobody holds stay in the pool's cached list until they are evicted, and then leave here.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.engine.core.blocks import BlockPool, Lease
from penstock.types import BlockHash, PageId


class PrefixCache:
    """Hash to page, for full and final pages of one pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._page_of: dict[BlockHash, PageId] = {}
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return len(self._page_of)

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._page_of

    def match(self, hashes: Sequence[BlockHash], limit: int) -> Lease:
        """Hold the pages of the longest known prefix of ``hashes``, of at most ``limit`` pages."""
        pages: list[PageId] = []
        for index in range(min(limit, len(hashes))):
            page = self._page_of.get(hashes[index])
            if page is None:
                break
            pages.append(page)
        return self._pool.retain(pages)

    def insert(self, block: BlockHash, page: PageId) -> bool:
        """Make a held, full and final page known.  False when the content is known already: the page stays private."""
        if block in self._page_of:
            return False
        self._page_of[block] = page
        self._pool.set_label(page, block)
        return True

    def _evicted(self, block: BlockHash) -> None:
        del self._page_of[block]
