"""The prefix cache: which page of which group of layers holds the block with this hash.

A hash names a block and all tokens before it, so a chain of known hashes is a prefix that need not be computed.  What
must be known of it differs by group: every block where layers read everything, the last ones where they read a window.
It owns no page: pages that nobody holds stay in the pool's cached list until they are evicted, and then leave here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from penstock.engine.core.blocks import BlockPool, Label, Lease
from penstock.reach import EVERYTHING, Reach
from penstock.types import PAGE_TOKENS, BlockHash, PageId


@dataclass(frozen=True, slots=True)
class Match:
    """A known prefix of so many blocks, and the pages that a request needs of it, group by group."""

    blocks: int
    lease: Lease


class PrefixCache:
    """Hash to page, for full and final pages of one pool."""

    def __init__(
        self, pool: BlockPool, reaches: Sequence[Reach] = (EVERYTHING,), page_tokens: int = PAGE_TOKENS
    ) -> None:
        """``reaches``: of each group, how far back its layers read."""
        self._pool = pool
        self._page_tokens = page_tokens
        self._reaches = tuple(reaches)
        self._page_of: list[dict[BlockHash, PageId]] = [{} for _ in self._reaches]
        self._whole = [group for group, reach in enumerate(reaches) if reach.span is None]
        self._moving = [group for group, reach in enumerate(reaches) if reach.span is not None]
        self._told = self._whole[0] if self._whole else 0  # the group that tells best what a prefix is worth
        self.on_change: Callable[[BlockHash, bool], None] = _untold  # hears of that group's blocks: known, or not
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return sum(map(len, self._page_of))

    def __contains__(self, block: BlockHash) -> bool:
        """In all groups?"""
        for own in self._page_of:  # noqa: SIM110  (asked for every block of a prompt: a generator takes four times as long)
            if block not in own:
                return False
        return True

    def match(self, hashes: Sequence[BlockHash], limit: int, position: int = 0) -> Match:
        """Hold what is needed of the longest known prefix of ``hashes``, of at most ``limit`` blocks.

        Needed is what the next position reads, or the later ``position``, if nothing before that will be computed.
        """
        blocks = self.longest(hashes, min(limit, len(hashes)), position)
        held = [
            own[name]
            for group, own in enumerate(self._page_of)
            for name in hashes[self.needed(group, blocks, position) : blocks]
        ]
        return Match(blocks, self._pool.retain(held))

    def needed(self, group: int, blocks: int, position: int = 0) -> int:
        """The first block that a group needs where ``blocks`` are known and ``position`` or what follows is next."""
        return self._reaches[group].kept(max(position, blocks * self._page_tokens), self._page_tokens)

    def longest(self, hashes: Sequence[BlockHash], limit: int, position: int = 0) -> int:
        """Blocks of the longest known prefix of ``hashes``, of at most ``limit``; see ``match``."""
        found = limit
        for group in self._whole:
            own = self._page_of[group]
            known = 0
            while known < found and hashes[known] in own:
                known += 1
            found = known
        while (gap := self._gap(hashes, found, position)) is not None:
            found = gap  # needed by every prefix that is longer than this, as what is needed never moves back
        return found

    def _gap(self, hashes: Sequence[BlockHash], blocks: int, position: int) -> int | None:
        """The last block that is missing for a prefix of ``blocks`` blocks."""
        for group in self._moving:
            own = self._page_of[group]
            for index in range(blocks - 1, self.needed(group, blocks, position) - 1, -1):
                if hashes[index] not in own:
                    return index
        return None

    def insert(self, block: BlockHash, page: PageId, group: int = 0) -> bool:
        """Make a held, full and final page known.  False when the content is known already: the page stays private."""
        own = self._page_of[group]
        if block in own:
            return False
        own[block] = page
        self._pool.set_label(page, Label(group, block, group in self._moving))
        if group == self._told:
            self.on_change(block, True)
        return True

    def blocks(self) -> Iterable[BlockHash]:
        """Those that ``on_change`` has told as known, known longest first."""
        return self._page_of[self._told].keys()

    def _evicted(self, label: Label) -> None:
        del self._page_of[label.group][label.block]
        if label.group == self._told:
            self.on_change(label.block, False)


def _untold(block: BlockHash, known: bool) -> None:
    pass
