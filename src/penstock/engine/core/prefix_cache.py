"""The prefix cache: which page of which group of layers holds the block with this hash.

A hash names a block and all tokens before it, so a chain of known hashes is a prefix that need not be computed.  What
must be known of it differs by group: every block where layers read everything, the last ones where they read a window.
States are kept at a grid: a page of such a group has the hash of the last block of its cell, and a prefix that will be
gone on with here ends with a cell.
It owns no page: pages without a holder stay in the pool's cached list until they are evicted, and then leave here.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass

from penstock.engine.core.page_pool import PageLabel, PageLease, PagePool
from penstock.kv_spec import FULL_ATTENTION, KvSpec
from penstock.types import PAGE_TOKENS, BlockHash, PageId

NAMELESS = BlockHash(b"")
"""Labels a page whose content is damaged: its holders may still share it, and it is not found any more."""


@dataclass(frozen=True, slots=True)
class PrefixMatch:
    """A known prefix of ``blocks`` blocks, and the pages that a request needs of it, group by group."""

    blocks: int
    lease: PageLease


class PrefixCache:
    """Hash to page, for full and final pages of one pool."""

    def __init__(
        self, pool: PagePool, reaches: Sequence[KvSpec] = (FULL_ATTENTION,), page_tokens: int = PAGE_TOKENS
    ) -> None:
        """``reaches``: of each group, how far back its layers read."""
        self._pool = pool
        self._page_tokens = page_tokens
        self._reaches = tuple(reaches)
        self._page_of: list[dict[BlockHash, PageId]] = [{} for _ in self._reaches]
        self._strides = [reach.tokens_per_page(page_tokens) // page_tokens for reach in reaches]  # blocks of a page
        self._whole = [group for group, reach in enumerate(reaches) if reach.span is None]
        self._moving = [group for group, reach in enumerate(reaches) if reach.span is not None]
        self.reported_group = self._whole[0] if self._whole else 0  # the group that tells best what a prefix is worth
        self.on_change: Callable[[BlockHash, bool], None] = _untold  # hears of that group's blocks: known, or not
        self.on_evict: Callable[[PageLabel], None] = _unheard  # hears of every page that is not known any more
        pool.on_evict = self._evicted

    def __len__(self) -> int:
        return sum(map(len, self._page_of))

    def __contains__(self, block: BlockHash) -> bool:
        """Whether it is known in all groups."""
        for own in self._page_of:  # noqa: SIM110  (asked for every block of a prompt: a generator takes four times as long)
            if block not in own:
                return False
        return True

    @property
    def full_attention_groups(self) -> Sequence[int]:
        """Groups whose layers read the whole context."""
        return self._whole

    def has(self, group: int, block: BlockHash) -> bool:
        """Whether this block is known in this group."""
        return block in self._page_of[group]

    def match(self, hashes: Sequence[BlockHash], limit: int, position: int = 0) -> PrefixMatch:
        """Hold what is needed of the longest known prefix of ``hashes``, of at most ``limit`` blocks.

        Needed is what the next position reads, or the later ``position``, if nothing before that will be computed.
        """
        blocks = self.longest_prefix(hashes, min(limit, len(hashes)), position)
        held = [
            own[hashes[last]]
            for group, own in enumerate(self._page_of)
            for last in self.page_ends(group, blocks, self.first_needed_page(group, blocks, position))
        ]
        return PrefixMatch(blocks, self._pool.share(held))

    def first_needed_page(self, group: int, blocks: int, position: int = 0) -> int:
        """The first page that a group needs where ``blocks`` are known and ``position`` or what follows is next: the
        block, or the cell."""
        return self._reaches[group].first_needed_block(max(position, blocks * self._page_tokens), self._page_tokens)

    def full_pages(self, group: int, blocks: int) -> int:
        """Pages of a group that the first ``blocks`` blocks fill."""
        return blocks // self._strides[group]

    def page_ends(self, group: int, blocks: int, begin: int) -> range:
        """The last block of each page of a group within the first ``blocks`` blocks, from page ``begin`` on: whose hash
        is the page's name."""
        stride = self._strides[group]
        return range((begin + 1) * stride - 1, blocks, stride)

    def longest_prefix(
        self,
        hashes: Sequence[BlockHash],
        limit: int,
        position: int = 0,
        known_in: Sequence[Container[BlockHash]] | None = None,
    ) -> int:
        """Blocks of the longest known prefix of ``hashes``, of at most ``limit``; see ``match``.

        ``known_in``: what counts as known in each group, unless that is what is in this cache.
        """
        found = limit
        pages = known_in or self._page_of
        for group in self._whole:
            own = pages[group]
            known = 0
            while known < found and hashes[known] in own:
                known += 1
            found = known
        while (gap := self._gap(hashes, found, position, pages)) is not None:
            found = gap  # needed by every prefix that is longer than this, as what is needed never moves back
        return found

    def _gap(
        self, hashes: Sequence[BlockHash], blocks: int, position: int, known_in: Sequence[Container[BlockHash]]
    ) -> int | None:
        """The longest prefix below ``blocks`` blocks that could be known, if that one is not.

        Where what follows is computed here (``position`` 0), it must end with a cell of the grid; else the state comes
        from elsewhere with the blocks behind it, so one must be left that does.
        """
        arrives = position > blocks * self._page_tokens
        for group in self._moving:
            own, stride = known_in[group], self._strides[group]
            if blocks % stride and not arrives:
                return blocks - 1 if position else blocks - blocks % stride
            for page in range(blocks // stride - 1, self.first_needed_page(group, blocks, position) - 1, -1):
                last = (page + 1) * stride - 1
                if hashes[last] not in own:
                    return last if position else page * stride
        return None

    def insert(self, block: BlockHash, page: PageId, group: int = 0) -> bool:
        """Make a held, full and final page known.  False when the content is known already: the page stays private."""
        own = self._page_of[group]
        if block in own:
            return False
        own[block] = page
        self._pool.set_label(page, PageLabel(group, block, group in self._moving))
        if group == self.reported_group:
            self.on_change(block, True)
        return True

    def remove_page(self, page: PageId) -> None:
        """A held page is damaged: it is not found any more, and can be allocated when its last holder has gone."""
        label = self._pool.label(page)
        if label is None or self._page_of[label.group].get(label.block) != page:
            return
        self._evicted(label)
        self._pool.set_label(page, PageLabel(label.group, NAMELESS, label.windowed))

    def known_blocks(self) -> Iterable[BlockHash]:
        """Blocks that ``on_change`` has reported as known, oldest first."""
        return self._page_of[self.reported_group].keys()

    def _evicted(self, label: PageLabel) -> None:
        if label.block == NAMELESS:
            return
        del self._page_of[label.group][label.block]
        self.on_evict(label)
        if label.group == self.reported_group:
            self.on_change(label.block, False)


def _untold(block: BlockHash, known: bool) -> None:
    pass


def _unheard(label: PageLabel) -> None:
    pass
