"""The pages of one worker's KV memory: who holds them, and which of them could be given away.

Knows page numbers only: not what stands in a page, nor where it lies in memory.

::

    every page is in exactly one of three places
        free      without a holder, and without known content
        cached    without a holder, its content has a name (a label): evictable, oldest first; counts as available
        leased    held by one or more owners (its reference count)

A request gives a windowed page back when its window has passed it, and allocates another one in exchange.  So that
this never fails, each further owner of a shared windowed page reserves one free page, which ``available`` excludes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import TracebackType

import msgspec

from penstock.types import BlockHash, PageId


class PageLabel(msgspec.Struct, frozen=True, gc=False):
    """The name of what stands in a full and final page."""

    group: int  # of layers
    block: BlockHash
    windowed: bool = False  # it is given back before its owners end


@dataclass(frozen=True, slots=True)
class PageShortfall:
    """``missing`` more pages would have been needed; nothing was reserved."""

    missing: int


@dataclass(frozen=True, slots=True)
class LeakCheck:
    """What the integrity check found.  All zero at every moment between two steps."""

    leaked: int = 0  # held more often than owners know of
    double: int = 0  # owned more often than held, owned though given up, or unlabeled with several owners
    lost: int = 0  # in none of the three places, or in two; or promised wrongly

    @property
    def total(self) -> int:
        """The figure reported as ``kv_pages_leaked``."""
        return self.leaked + self.double + self.lost


class PageLease:
    """Pages held for a while.  Leaving the scope gives them back, unless they were taken."""

    __slots__ = ("_pool", "pages")

    def __init__(self, pool: PagePool, pages: list[PageId]) -> None:
        self._pool = pool
        self.pages = pages

    def detach(self) -> list[PageId]:
        """Move the pages to the caller, who now owns one reference of each; the lease holds nothing more."""
        pages, self.pages = self.pages, []
        return pages

    def __len__(self) -> int:
        return len(self.pages)

    def __enter__(self) -> PageLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.release(self.detach())


class PagePool:
    """A fixed number of pages, counted.  ``on_evict`` is called with the label of every cached page that is evicted."""

    def __init__(self, pages: int, on_evict: Callable[[PageLabel], None] | None = None) -> None:
        self.pages = pages
        self.on_evict = on_evict
        self.release_count = 0  # how often something was given back: who waits for room need not ask again before
        self._references = [0] * pages
        self._generations = [0] * pages
        self._labels: list[PageLabel | None] = [None] * pages
        self._promised = 0  # reserved pages, one for each further owner of a shared windowed one
        self._free = [PageId(page) for page in range(pages - 1, -1, -1)]
        self._cached: OrderedDict[PageId, None] = OrderedDict()  # oldest first

    @property
    def free(self) -> int:
        """Pages with nothing in them."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Pages without a holder whose content is known."""
        return len(self._cached)

    @property
    def leased(self) -> int:
        """Pages with an owner."""
        return self.pages - len(self._free) - len(self._cached)

    @property
    def available(self) -> int:
        """Pages that can be reserved now."""
        return len(self._free) + len(self._cached) - self._promised

    def generation(self, page: PageId) -> int:
        """How often ``page`` has been given out."""
        return self._generations[page]

    def label(self, page: PageId) -> PageLabel | None:
        """The name of what stands in ``page``, when it is full and final."""
        return self._labels[page]

    def allocate(self, count: int, *, spare: int = 0) -> PageLease | PageShortfall:
        """Hold ``count`` unlabeled pages, all or none, such that ``spare`` more would still be available."""
        missing = count + spare - self.available
        if missing > 0:
            return PageShortfall(missing)
        return PageLease(self, [self._give_out() for _ in range(count)])

    def share(self, pages: Iterable[PageId]) -> PageLease:
        """Hold labeled pages once more.  Call ``allocate`` before using them: ``available`` may be negative now."""
        held = list(pages)
        for page in held:
            if self._references[page] == 0:
                del self._cached[page]
            elif self._moves(page):
                self._promised += 1
            self._references[page] += 1
        return PageLease(self, held)

    def release(self, pages: Sequence[PageId]) -> None:
        """Release one reference of each.  In reverse, so that a chain is evicted from its leaf."""
        if not pages:
            return
        self.release_count += 1
        for page in reversed(pages):
            self._references[page] -= 1
            if self._references[page] == 0:
                if self._labels[page] is None:
                    self._free.append(page)
                else:
                    self._cached[page] = None
            elif self._moves(page):
                self._promised -= 1

    def _moves(self, page: PageId) -> bool:
        label = self._labels[page]
        return label is not None and label.windowed

    def set_label(self, page: PageId, label: PageLabel) -> None:
        """Name the content of a page that is held; it stays cached when the last owner has gone."""
        self._labels[page] = label

    def check_leaks(self, owners: Iterable[Sequence[PageId]]) -> LeakCheck:
        """Compare the reference counts with what ``owners`` hold.  O(pages + owned); changes nothing."""
        owned = [0] * self.pages
        for pages in owners:
            for page in pages:
                owned[page] += 1
        places = [0] * self.pages
        for page in (*self._free, *self._cached):
            places[page] += 1
        leaked = double = lost = promised = 0
        for index, held in enumerate(self._references):
            if held > 1 and self._moves(PageId(index)):
                promised += held - 1
            leaked += held > owned[index]
            double += held < owned[index] or (owned[index] > 1 and self._labels[index] is None)
            lost += places[index] + (held > 0) != 1
        lost += abs(promised - self._promised) + max(0, -self.available)
        return LeakCheck(leaked, double, lost)

    def _give_out(self) -> PageId:
        if self._free:
            page = self._free.pop()
        else:
            page, _ = self._cached.popitem(last=False)
        label, self._labels[page] = self._labels[page], None
        self._references[page] = 1
        self._generations[page] += 1  # before ``on_evict``: another thread sees it here
        if label is not None and self.on_evict is not None:
            self.on_evict(label)
        return page
