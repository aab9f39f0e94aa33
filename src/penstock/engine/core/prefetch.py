"""Pages that come from outside while their request still waits: room for them, and their names when they are there.

::

    begin      -> holds the cached pages of the prefix, so that they are not evicted, and fresh pages for the others
    on_filled  -> a page with the right content gets its name and is in the prefix cache from then on; else it is free
    release    -> holds nothing any more: the pages are in the prefix cache, where the request finds them

A page that is being filled belongs to its writer until ``on_filled`` or ``on_withdrawn`` is called, whatever becomes of
the request.
Pure; knows nothing about where pages come from.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import cast

from penstock.engine.core.kv_cache_manager import KvCacheManager
from penstock.engine.core.page_pool import PageShortfall
from penstock.engine.core.prefix_cache import PrefixCache
from penstock.types import BlockHash, PageId

SPARE_SHARE = 8
"""One page in this many stays available for others."""


@dataclass(slots=True, eq=False)
class Prefetch:
    """Pages on their way, in the order in which they were asked for."""

    requested: Sequence[tuple[BlockHash, int]]  # (block, group) of each
    in_flight: dict[int, PageId]  # by place in ``requested``: pages that are being filled
    known_pages: list[PageId]  # the part of the prefix that was there
    filled: dict[int, PageId] = field(default_factory=dict[int, PageId])  # those with a name, held until let go
    released: bool = False  # its request no longer waits


class Prefetches:
    """The prefetches of one worker."""

    def __init__(self, memory: KvCacheManager) -> None:
        self._memory = memory
        self._open: list[Prefetch] = []
        memory.foreign_owners.append(self.owned_pages)

    # --- what to bring ----------------------------------------------------------------------------------------------

    def reachable_blocks(self, hashes: Sequence[BlockHash], limit: int, there: Callable[[BlockHash, int], bool]) -> int:
        """Blocks of the longest prefix of ``hashes``, at most ``limit``, that could be reused if every page for which
        ``there`` is true were in the cache, too."""
        prefix = self._memory.prefix
        either = [_Either(prefix, there, group) for group in range(self._memory.groups)]
        return prefix.longest_prefix(hashes, limit, known_in=either)

    def missing_pages(self, hashes: Sequence[BlockHash], blocks: int) -> list[tuple[int, int]]:
        """The pages that a prefix of ``blocks`` blocks lacks, in order of use: (last block, group) of each."""
        prefix = self._memory.prefix
        return sorted(
            (last, group)
            for group in range(self._memory.groups)
            for last in prefix.page_ends(group, blocks, prefix.first_needed_page(group, blocks))
            if not prefix.has(group, hashes[last])
        )

    # --- bringing it ------------------------------------------------------------------------------------------------

    def begin(
        self, hashes: Sequence[BlockHash], limit: int, wanted: Sequence[tuple[BlockHash, int]]
    ) -> Prefetch | None:
        """Allocate these pages, and hold the cached ones of the prefix.  None: too few pages are available."""
        pool = self._memory.pool
        with self._memory.prefix.match(hashes, limit).lease as known:
            fresh = pool.allocate(len(wanted), spare=pool.pages // SPARE_SHARE)
            if isinstance(fresh, PageShortfall):
                return None
            brought = Prefetch(wanted, dict(enumerate(fresh.detach())), known.detach())
        self._open.append(brought)
        return brought

    def on_filled(self, brought: Prefetch, place: int, good: bool) -> PageId | None:
        """A page was filled.  It is returned if it is new in the prefix cache."""
        page = brought.in_flight.pop(place)
        block, group = brought.requested[place]
        new = good and self._memory.prefix.insert(block, page, group)
        if new:
            self._memory.seal(page)
        if new and not brought.released:
            brought.filled[place] = page
        else:
            self._memory.pool.release([page])
        self._forget_if_done(brought)
        return page if new else None

    def on_withdrawn(self, brought: Prefetch, places: Sequence[int]) -> None:
        """These pages will not be filled."""
        self._memory.pool.release([brought.in_flight.pop(place) for place in places])
        self._forget_if_done(brought)

    def release(self, brought: Prefetch) -> None:
        """The request no longer waits.  Pages that are still being filled stay with their writer."""
        held = [*brought.known_pages, *(brought.filled[place] for place in sorted(brought.filled))]
        brought.known_pages.clear()
        brought.filled.clear()
        brought.released = True
        self._memory.pool.release(held)
        self._forget_if_done(brought)

    def owned_pages(self) -> list[PageId]:
        """All pages that are held here, for integrity checks."""
        return [
            page for own in self._open for page in (*own.known_pages, *own.filled.values(), *own.in_flight.values())
        ]

    def _forget_if_done(self, brought: Prefetch) -> None:
        if brought.released and not brought.in_flight and brought in self._open:
            self._open.remove(brought)


class _Either:
    """Blocks that a group has in the cache, or that are there."""

    def __init__(self, prefix: PrefixCache, there: Callable[[BlockHash, int], bool], group: int) -> None:
        self._prefix = prefix
        self._there = there
        self._group = group

    def __contains__(self, block: object) -> bool:
        name = cast(BlockHash, block)
        return self._prefix.has(self._group, name) or self._there(name, self._group)
