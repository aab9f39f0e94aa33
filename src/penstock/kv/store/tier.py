"""The protocol of a KV tier: storage for full and final pages, found by their content.

A tier may block: it is called from threads (``tier_worker``), except for ``contains`` of a local tier.  It does not
decide which pages are worth storing or fetching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.types import BlockHash, PageId


class PageKey(NamedTuple):
    """The key of a page everywhere: the block's chain hash, which covers model, numerics, adapter, tenant and all
    tokens up to its end, and the group of layers."""

    block: BlockHash
    group: int


class FinalPage(NamedTuple):
    """A full page of this worker that does not change while it keeps its ``generation``."""

    key: PageKey
    page: PageId
    generation: int
    saves_s: float  # computing that is needed again when it is lost, all that stands behind it included
    gain_s: float  # computing that it is expected to save: the page's own, times the chance that it is asked for
    chance: float  # of being asked for


class KvTier(Protocol):
    """One tier.  All methods but ``close`` may raise OSError or TierError, and must return in bounded time."""

    name: str
    """"peers", "host", "disk", "redis" or "mooncake": as in metrics."""

    stores_copies: bool
    """Whether storing a page copies it and takes space (not so for ``peers``)."""

    is_remote: bool
    """Whether ``contains`` needs the network, and so must run on a thread."""

    @property
    def pages(self) -> int:
        """Pages known to be stored; 0 where the number is unknown."""
        ...

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which of these pages are probably there."""
        ...

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        """Copy a page and verify the copy.  False: it is gone.

        Raises PageCorrupt when it is not the right page; ``into`` is spoiled then, and the page is not offered again.
        """
        ...

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        """Store a page.  ``content`` does not change.  False: there is no room worth evicting for it."""
        ...

    def on_evicted(self, key: PageKey) -> None:
        """The page has left this worker's own memory.  Called between steps: must not block."""
        ...

    def close(self) -> None:
        """Release all resources.  Stored pages stay."""
        ...
