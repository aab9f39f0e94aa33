"""A request's pages from admission to release: shared prefix, fresh pages, growth, naming of what is final.

::

    pages of one request, in token order
           | shared prefix | arrived from prefill | computed here |
    now    | +1 reference  | verified, counted    | written       |
    full   | known already | named by their hash, offered to the prefix cache |
    at end | -1 reference each; what has a name stays cached, the rest is free

Layers that read equally far back are a group with pages of its own (``penstock.kv_spec``); all groups' pages come out
of one pool.  A sliding-window group reserves its maximum for the prompt at admission, and swaps one page per page that
leaves the window: so an admitted request never waits for memory before its prompt is computed.  Pages of states stand
for a cell of many blocks; what is shared of them ends with a cell.

Pages of a request that leaves while a micro-batch with it is in flight are held until that is committed: until then
they may still be written to.

Knows nothing about budgets or the order of service.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from typing import Protocol

from penstock.engine.core.page_pool import LeakCheck, PageLease, PagePool, PageShortfall
from penstock.engine.core.prefix_cache import PrefixCache
from penstock.engine.core.request import PageTable, Request, pages_of_all_groups
from penstock.errors import ConfigError
from penstock.hashing import block_hash, image_block_marks
from penstock.kv_spec import FULL_ATTENTION, KvSpec, TransferOrder, blocks_for, max_blocks, max_pages
from penstock.types import BlockHash, PageId, RequestStage


class PageVerifier(Protocol):
    """Knows the content of full and final pages by a checksum (``kv.checksum``)."""

    pages_per_step: int
    """Pages that may be verified between two steps, at least one; all requests wait meanwhile."""

    page_s: float
    """The estimated time to verify one."""

    def seal(self, page: PageId) -> None:
        """This page is full and final now."""
        ...

    def is_intact(self, page: PageId) -> bool:
        """Whether its content is what it was when it was sealed."""
        ...


class UnverifiedPages:
    """Checks nothing: for pages that this process cannot read."""

    pages_per_step = sys.maxsize
    page_s = 0.0

    def seal(self, page: PageId) -> None:
        pass

    def is_intact(self, page: PageId) -> bool:
        return True


class AdmissionRefusal(Enum):
    """Why a request cannot be admitted now."""

    NO_ROOM = "not enough pages"
    BEING_COMPUTED = "another request is computing a block that this one can share"
    BEING_CHECKED = "cached pages that it can share are compared with their checksums, some in each turn"


class KvCacheManager:
    """The pool and the prefix cache of one worker, as requests use them."""

    def __init__(
        self,
        *,
        pages: int,
        page_tokens: int,
        reaches: Sequence[KvSpec] = (FULL_ATTENTION,),
        ahead: int = 1,
        shares_prefixes: bool = True,
        verifier: PageVerifier | None = None,
    ) -> None:
        """``reaches``: of each group of layers; ``ahead``: tokens of one request that a step computes at most.

        Raises ConfigError for cells of a state that are not whole blocks, or not all equally long.
        """
        self.page_tokens = page_tokens
        self.reaches = tuple(reaches)
        self._shares_prefixes = shares_prefixes
        self.pool = PagePool(pages)
        self.prefix = PrefixCache(self.pool, self.reaches, page_tokens)
        self.queried_tokens = 0  # tokens looked up in the prefix cache, and found there, since the start
        self.hit_tokens = 0
        self.on_final: Callable[[Request, int, int], None] = _untold  # hears of (request, page of it, group): new
        self._written: dict[Request, list[PageId]] = {}  # given up while they were still written to
        self.foreign_owners: list[Callable[[], Sequence[PageId]]] = [self._still_written]  # of pages, besides requests
        self.verifier: PageVerifier = verifier or UnverifiedPages()
        self._turn = 0  # plans so far
        self._checked: dict[PageId, int] = {}  # in which of them a cached page was found to be what it was
        self.verified_now = 0  # pages looked at in this turn
        self.damaged_pages = 0  # cached pages that were not what they had been, found before they were used
        self._ahead = ahead
        self._sizes = [reach.tokens_per_page(page_tokens) for reach in self.reaches]  # tokens of a page of each group
        longest = max(self._sizes)
        self._stride = longest // page_tokens  # blocks from one point to the next at which shared prefixes can end
        if longest % page_tokens or not set(self._sizes) <= {page_tokens, longest}:
            raise ConfigError(f"cells of a state must all have one multiple of {page_tokens} tokens, got {self._sizes}")
        self._by_block = [group for group, size in enumerate(self._sizes) if size == page_tokens]
        self._moving = [group for group, reach in enumerate(self.reaches) if reach.span is not None]
        self._being_computed: dict[BlockHash, Request] = {}
        self._refused: tuple[Request, int] | None = None  # who found no room, and the pool's releases at that time

    def begin_step(self) -> None:
        """A step is planned: ``PageVerifier.pages_per_step`` pages may be verified again."""
        self._turn += 1
        self.verified_now = 0

    def seal(self, page: PageId) -> None:
        """This page is full and final now."""
        self._checked.pop(page, None)
        self.verifier.seal(page)

    def cached_tokens(self, hashes: Sequence[BlockHash]) -> int:
        """Tokens of a prompt with these block hashes that the prefix cache has now."""
        return self.prefix.longest_prefix(hashes, len(hashes)) * self.page_tokens

    @property
    def groups(self) -> int:
        """Groups of layers: pages that one more block takes."""
        return len(self.reaches)

    @property
    def keeps_states(self) -> bool:
        """Whether there are recurrent layers."""
        return self._stride > 1

    def most_pages(self, tokens: int) -> int:
        """The most pages that a request of ``tokens`` tokens holds at any time."""
        return max_pages(self.reaches, tokens, ahead=self._ahead, page_tokens=self.page_tokens)

    def missing_pages(self, request: Request, tokens: int) -> int:
        """Pages that ``request`` lacks for its first ``tokens`` tokens."""
        missing = 0
        for own in request.page_tables:
            lacks = blocks_for(tokens, own.page_tokens) - len(own.pages)
            if lacks > 0:
                missing += lacks
        return missing

    def pieces(self, request: Request) -> TransferOrder:
        """The pages in the order in which they are transferred with ``request``."""
        return TransferOrder(self.reaches, len(request.prompt) + request.emitted, self.page_tokens)

    def admit(self, request: Request, *, spare: int) -> AdmissionRefusal | None:
        """Allocate pages for all known tokens of ``request``, as many as possible from the prefix cache, which count as
        computed.  All or nothing; ``spare`` pages stay available for the growth of others.
        """
        if request.awaited_block in self._being_computed:
            return AdmissionRefusal.BEING_COMPUTED
        if self._refused == (request, self.pool.release_count):
            return AdmissionRefusal.NO_ROOM
        request.awaited_block = None
        if self._shares_prefixes:
            self._hash(request, self._nameable(request, request.known))
        limit = self._shareable(request)
        match = self.prefix.match(request.hashes, limit, self._next(request))
        found = match.blocks
        with match.lease as shared:
            last = found + self._stride - 1  # the next block that could be shared with those before it
            if (
                last < limit
                and request.stage is not RequestStage.DECODE
                and request.hashes[last] in self._being_computed
            ):
                request.awaited_block = request.hashes[last]
                return AdmissionRefusal.BEING_COMPUTED
            sound = self._sound(request, shared.pages)
            if sound is None:
                return AdmissionRefusal.BEING_CHECKED
            if sound:
                spans = [self._span(request, group, found) for group in range(self.groups)]
                fresh = self.pool.allocate(sum(end - max(begin, known) for begin, known, end in spans), spare=spare)
                if isinstance(fresh, PageShortfall):
                    self._refused = (request, self.pool.release_count + (len(shared) > 0))  # it is released on leaving
                    return AdmissionRefusal.NO_ROOM
                with fresh:
                    request.set_page_tables(_dealt(spans, self._sizes, shared.detach(), fresh.detach()))
        if not sound:
            return self.admit(request, spare=spare)
        request.verified_since = None
        self._count_found(request, found, limit)
        return None

    def _sound(self, request: Request, pages: Sequence[PageId]) -> bool | None:
        """Whether these cached pages are intact.  Those that are not leave the cache and are recomputed.

        None: some are not verified yet.  The number of pages verified per step is limited; a page that was intact since
        the request's first call is not verified again.
        """
        if request.verified_since is None:
            request.verified_since = self._turn
        since, turn, checked = request.verified_since, self._turn, self._checked
        unknown = [page for page in pages if checked.get(page, -1) < since]
        now = unknown[: max(0, self.verifier.pages_per_step - self.verified_now)]
        self.verified_now += len(now)
        broken = [page for page in now if not self.verifier.is_intact(page)]
        checked.update(dict.fromkeys(now, turn))
        for page in broken:
            del checked[page]
            self.prefix.remove_page(page)
        self.damaged_pages += len(broken)
        if broken:
            return False
        return True if len(now) == len(unknown) else None

    def extend(self, request: Request, tokens: int) -> bool:
        """Allocate pages for the first ``tokens`` tokens.  False when there are not enough: nothing has changed."""
        missing = self.missing_pages(request, tokens)
        if missing == 0:
            return True
        fresh = self.pool.allocate(missing)
        if isinstance(fresh, PageShortfall):
            return False
        self._extend(request, [blocks_for(tokens, size) for size in self._sizes], fresh)
        return True

    def extend_windows(self, request: Request) -> None:
        """After a chunk: allocate windowed pages for the next one in place of those that left the window."""
        if not self._moving:
            return
        ends = [len(own.pages) for own in request.page_tables]
        missing = 0
        for group in self._moving:
            blocks = blocks_for(request.known, self._sizes[group])
            end = min(blocks, request.page_tables[group].first + self._ring(group, request.known))
            missing += max(0, end - ends[group])
            ends[group] = max(end, ends[group])
        fresh = self.pool.allocate(missing)
        assert isinstance(fresh, PageLease), "each page that fell out made room for another"
        self._extend(request, ends, fresh)

    def cache_full_pages(self, request: Request) -> None:
        """Name the pages that have become full and final, offer them to the prefix cache, and give back what no later
        position reads."""
        full = request.computed // self.page_tokens if self._shares_prefixes else 0
        named = self._nameable(request, full * self.page_tokens)
        self._hash(request, named)
        while request.settled < full:
            block = request.settled
            if block >= named:
                request.settled = full
                break
            name = request.hashes[block]
            self._name(request, block)
            if self._being_computed.get(name) is request:
                del self._being_computed[name]
            request.settled += 1
        for group in () if request.retains_pages else self._moving:
            self.pool.release(
                request.page_tables[group].free_before(
                    self.reaches[group].first_needed_block(request.computed, self.page_tokens)
                )
            )

    def release(self, request: Request) -> None:
        """Release all pages of ``request``; nothing of it is computed any more."""
        for name in request.hashes[request.settled :]:
            if self._being_computed.get(name) is request:
                del self._being_computed[name]
        if request.page_tables:
            pages = request.clear_pages()
            if request.in_flight:
                self._written[request] = pages
            else:
                self.pool.release(pages)

    @property
    def has_windows(self) -> bool:
        """Whether pages are given back, and others taken, while a prompt is computed."""
        return bool(self._moving)

    def release_in_flight(self, requests: Iterable[Request]) -> None:
        """A micro-batch with these requests was computed: release pages that they gave up while they were in flight."""
        for request in requests:
            request.in_flight -= 1
            if not request.in_flight:
                self.pool.release(self._written.pop(request, ()))

    def _still_written(self) -> Sequence[PageId]:
        return [page for pages in self._written.values() for page in pages]

    def check_leaks(self, requests: Iterable[Request]) -> LeakCheck:
        """The pool's integrity check, with ``requests`` and ``owners`` as all the owners there are."""
        return self.pool.check_leaks(
            (
                *(pages_of_all_groups(request.page_tables) for request in requests),
                *(own() for own in self.foreign_owners),
            )
        )

    @property
    def has_foreign_pages(self) -> bool:
        """Whether pages have owners other than requests."""
        return self.foreign_pages > 0

    @property
    def foreign_pages(self) -> int:
        """Pages whose owners are not requests: a tier, or a step in flight, still writes into them."""
        return len({page for own in self.foreign_owners for page in own()})

    def _next(self, request: Request) -> int:
        """The position that is computed next after those that are computed elsewhere; 0 when there are none."""
        if request.stage is not RequestStage.DECODE:
            return 0
        return request.known - 1 if request.extra_tokens else request.remote_tokens

    def _ring(self, group: int, tokens: int) -> int:
        """The most blocks that a group holds at once while ``tokens`` tokens are processed."""
        return max_blocks(self.reaches[group], tokens, ahead=self._ahead, page_tokens=self.page_tokens)

    def _span(self, request: Request, group: int, found: int) -> tuple[int, int, int]:
        """Pages [begin, end) that a group needs to begin with, the first ``found`` blocks being known, and in the
        middle the first that is not."""
        begin = self.prefix.first_needed_page(group, found, self._next(request))
        known, blocks = (
            self.prefix.full_pages(group, found),
            blocks_for(request.known + request.extra_tokens, self._sizes[group]),
        )
        if request.extra_tokens:
            return begin, known, blocks
        return begin, known, min(blocks, begin + self._ring(group, request.known))

    def _name(self, request: Request, block: int) -> None:
        """Offer the pages that end with this block, which is full and final."""
        name = request.hashes[block]
        end = block + 1
        for group in self._by_block if end % self._stride else range(self.groups):
            own = request.page_tables[group]
            page = self.prefix.full_pages(group, end) - 1
            if page >= own.first and self.prefix.insert(name, own.pages[page], group):
                self.seal(own.pages[page])
                self.on_final(request, page, group)

    def _extend(self, request: Request, ends: Sequence[int], fresh: PageLease) -> None:
        """Extend each group's table to its entry of ``ends``."""
        with fresh:
            pages = fresh.detach()
            for own, end in zip(request.page_tables, ends, strict=True):
                missing = end - len(own.pages)
                if missing > 0:
                    own.pages += pages[:missing]
                    del pages[:missing]
            request.update_capacity()

    def _shareable(self, request: Request) -> int:
        """Pages that may come from the cache: at least one token stays to be computed where a token will be drawn."""
        if request.stage is RequestStage.DECODE:
            return self._nameable(request, self._next(request))
        alone = request.wants_prompt_logprobs or not self._shares_prefixes
        return 0 if alone else (request.known - 1) // self.page_tokens

    def _nameable(self, request: Request, tokens: int) -> int:
        """Full pages of the first ``tokens`` tokens that have a name."""
        border = request.uncacheable_from
        return (tokens if border is None else min(tokens, border)) // self.page_tokens

    def _count_found(self, request: Request, found: int, limit: int) -> None:
        request.computed = found * self.page_tokens
        request.settled = found
        self.queried_tokens += limit * self.page_tokens
        self.hit_tokens += request.computed
        if not request.preemptions:
            request.cached_tokens = min(request.computed, len(request.prompt))
        if request.stage is not RequestStage.DECODE and self._shares_prefixes:
            for name in request.hashes[found : self._nameable(request, request.known)]:
                if name not in self.prefix:
                    self._being_computed.setdefault(name, request)

    def _hash(self, request: Request, blocks: int) -> None:
        """Have the hashes of the first ``blocks`` pages; ready-made ones are never computed again."""
        hashes, size = request.hashes, self.page_tokens
        while len(hashes) < blocks:
            parent = hashes[-1] if hashes else request.root
            start = len(hashes) * size
            marks = image_block_marks(request.images, start, start + size) if request.images else b""
            hashes.append(block_hash(parent, request.tokens(start, start + size), marks))


def _untold(request: Request, block: int, group: int) -> None:
    pass


def _dealt(
    spans: Sequence[tuple[int, int, int]], sizes: Sequence[int], known: Sequence[PageId], new: Sequence[PageId]
) -> list[PageTable]:
    """Pages [begin, end) of each group: at first those that are known, then new ones."""
    held: list[PageTable] = []
    shared = taken = 0
    for (begin, found, end), size in zip(spans, sizes, strict=True):
        old, fresh = max(0, found - begin), end - max(begin, found)
        held.append(PageTable(begin, [*known[shared : shared + old], *new[taken : taken + fresh]], size))
        shared += old
        taken += fresh
    return held
