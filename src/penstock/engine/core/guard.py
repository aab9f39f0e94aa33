"""Whether a cached page is still what it was when it was filled: the port that the page memory asks."""

from __future__ import annotations

import sys
from typing import Protocol

from penstock.types import PageId


class PageGuard(Protocol):
    """Knows the content of full and final pages by a checksum (``kv.seals``)."""

    pages_per_turn: int
    """Pages that may be looked at between two steps, one at least: everybody waits meanwhile."""

    page_s: float
    """About how long one takes."""

    def seal(self, page: PageId) -> None:
        """This page is full and final now."""
        ...

    def intact(self, page: PageId) -> bool:
        """Is it what it was when it was sealed?"""
        ...


class Trust:
    """Checks nothing: for pages that this process cannot read."""

    pages_per_turn = sys.maxsize
    page_s = 0.0

    def seal(self, page: PageId) -> None:
        """See ``PageGuard``."""

    def intact(self, page: PageId) -> bool:
        """See ``PageGuard``."""
        return True
