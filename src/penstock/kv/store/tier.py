"""What a tier of the KV store is: somewhere else where full and final pages stand, found by what is in them.

A tier may block; it is called from threads of its own (``hands``), but for ``has`` of a tier that is not remote.  It
decides nothing about which pages are worth keeping or fetching.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from penstock.types import BlockHash, PageId


class PageKey(NamedTuple):
    """The name of a page everywhere: the block's chain hash, which covers model, numerics, adapter, tenant and all
    tokens up to its end, and which group of layers the page is of."""

    block: BlockHash
    group: int


class FinalPage(NamedTuple):
    """A page of this worker's that is full and will not change while it keeps its ``generation``."""

    key: PageKey
    page: PageId
    generation: int
    saves_s: float  # computing that is needed again when it is lost, all that stands behind it included
    gain_s: float  # computing that it is expected to save: the page's own, times the chance that it is asked for
    chance: float  # of being asked for


class KvTier(Protocol):
    """One place.  All methods but ``close`` may raise OSError or TierFailed, and must come back in bounded time."""

    name: str
    """"peers", "host", "disk", "redis" or "mooncake": as in metrics."""

    stores_copies: bool
    """Does a page that is kept take room and more than a look at it?"""

    is_remote: bool
    """Does ``has`` take a journey?"""

    @property
    def pages(self) -> int:
        """That are known to be there; 0 where nobody can say."""
        ...

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """Which of these pages are probably there."""
        ...

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        """Copy a page and prove the copy.  False: it is not there any more.

        Raises PageCorrupt when it is not the right one; ``into`` is spoiled then, and the page will not be offered
        again.
        """
        ...

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        """Keep a page.  ``content`` is a copy of it that does not change.  False: there is no room that is worth it."""
        ...

    def on_evicted(self, key: PageKey) -> None:
        """This worker's own memory does not have the page any more.  Called between steps: must not block."""
        ...

    def close(self) -> None:
        """Give everything back.  What is kept stays kept."""
        ...
