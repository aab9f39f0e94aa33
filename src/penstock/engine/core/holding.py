"""The pages of one request in one group of layers, by block; of a group of states, by cell of the grid.

::

    blocks   0 ....... begin ............ len(pages)
    pages  | not held | held, one reference each |     whatever stands at the front is read by nobody
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.types import PAGE_TOKENS, PageId

NOWHERE = PageId(0)
"""Stands for a page that was never held; tables must name pages that there are."""


class Holding:
    """Grows at its end, gives back at its front."""

    __slots__ = ("begin", "page_tokens", "pages")

    def __init__(self, begin: int = 0, pages: Sequence[PageId] = (), page_tokens: int = PAGE_TOKENS) -> None:
        """``page_tokens``: of one page."""
        self.begin = begin
        self.page_tokens = page_tokens
        self.pages: list[PageId] = [NOWHERE] * begin
        self.pages.extend(pages)

    def drop(self, block: int) -> list[PageId]:
        """Hold nothing below ``block`` any more; the caller gives back what is returned."""
        end = min(block, len(self.pages))
        if end <= self.begin:
            return []
        dropped = self.pages[self.begin : end]
        self.begin = end
        return dropped


def all_pages(held: Sequence[Holding]) -> list[PageId]:
    """Everything held, block by block: given back in this order, all groups lose the same blocks first."""
    if len(held) == 1:
        return held[0].pages[held[0].begin :]
    last = max((len(own.pages) for own in held), default=0)
    first = min((own.begin for own in held), default=0)
    return [own.pages[block] for block in range(first, last) for own in held if own.begin <= block < len(own.pages)]
