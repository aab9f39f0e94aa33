"""A request's pages from admission to release: shared prefix, fresh pages, growth, naming of what is final.

::

    pages of one request, in token order
           | shared prefix | arrived from prefill | computed here |
    now    | +1 reference  | verified, counted    | written       |
    full   | known already | named by their hash, offered to the prefix cache |
    at end | -1 reference each; what has a name stays cached, the rest is free

Layers that read equally far back are a group with pages of its own (``penstock.reach``); all groups' pages come out of
one pool.  What a group with a window does not read any more is given back while the request goes on.  While a prompt is
being read such a group holds as many pages as it will ever need at once, and takes a new one for each that fell out: so
a request that was admitted never waits for others' memory before its prompt is read.

Knows nothing about steps, budgets or the order of service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from penstock.engine.core.blocks import BlockPool, Leaks, Lease, Shortfall
from penstock.engine.core.holding import Holding, all_pages
from penstock.engine.core.prefix import PrefixCache
from penstock.engine.core.request import Request
from penstock.hashing import block_hash, image_marks
from penstock.reach import EVERYTHING, Pieces, Reach, blocks_of, most_blocks, most_pages
from penstock.types import BlockHash, Leg, PageId


class Refusal(Enum):
    """Why a request cannot be admitted now."""

    NO_ROOM = "not enough pages"
    BEING_COMPUTED = "another request is computing a block that this one can share"


class PageMemory:
    """The pool and the prefix cache of one worker, as requests use them."""

    def __init__(
        self,
        *,
        pages: int,
        page_tokens: int,
        reaches: Sequence[Reach] = (EVERYTHING,),
        ahead: int = 1,
        shares_prefixes: bool = True,
    ) -> None:
        """``reaches``: of each group of layers; ``ahead``: tokens of one request that a step computes at most."""
        self.page_tokens = page_tokens
        self.reaches = tuple(reaches)
        self._shares_prefixes = shares_prefixes
        self.pool = BlockPool(pages)
        self.prefix = PrefixCache(self.pool, self.reaches, page_tokens)
        self.asked_tokens = 0  # tokens looked up in the prefix cache, and found there, since the start
        self.found_tokens = 0
        self._ahead = ahead
        self._moving = [group for group, reach in enumerate(self.reaches) if reach.span is not None]
        self._being_computed: dict[BlockHash, Request] = {}
        self._refused: tuple[Request, int] | None = None  # who found no room, and the pool's releases at that time

    def covered(self, hashes: Sequence[BlockHash]) -> int:
        """Tokens of a prompt with these block hashes that the prefix cache has now."""
        return self.prefix.longest(hashes, len(hashes)) * self.page_tokens

    @property
    def groups(self) -> int:
        """Groups of layers: pages that one more block takes."""
        return len(self.reaches)

    def most_pages(self, tokens: int) -> int:
        """Pages that a request of so many tokens holds at most at any time."""
        return most_pages(self.reaches, tokens, ahead=self._ahead, page_tokens=self.page_tokens)

    def missing_pages(self, request: Request, tokens: int) -> int:
        """Pages that ``request`` lacks for its first ``tokens`` tokens."""
        blocks, missing = blocks_of(tokens, self.page_tokens), 0
        for own in request.held:
            if blocks > len(own.pages):
                missing += blocks - len(own.pages)
        return missing

    def pieces(self, request: Request) -> Pieces:
        """The pages that are handed over with everything that is known of ``request`` elsewhere."""
        return Pieces(self.reaches, len(request.prompt) + request.emitted, self.page_tokens)

    def admit(self, request: Request, *, spare: int) -> Refusal | None:
        """Give ``request`` pages to read all its known tokens, as many as possible from the prefix cache, which count
        as computed.  All or nothing; ``spare`` pages stay available for the growth of others.
        """
        if request.waits_for in self._being_computed:
            return Refusal.BEING_COMPUTED
        if self._refused == (request, self.pool.releases):
            return Refusal.NO_ROOM
        request.waits_for = None
        if self._shares_prefixes:
            self._hash(request, request.known // self.page_tokens)
        limit = self._shareable(request)
        match = self.prefix.match(request.hashes, limit, self._next(request))
        found = match.blocks
        with match.lease as shared:
            if found < limit and request.leg is not Leg.DECODE and request.hashes[found] in self._being_computed:
                request.waits_for = request.hashes[found]
                return Refusal.BEING_COMPUTED
            spans = [self._span(request, group, found) for group in range(self.groups)]
            fresh = self.pool.reserve(sum(end - max(begin, found) for begin, end in spans), spare=spare)
            if isinstance(fresh, Shortfall):
                self._refused = (request, self.pool.releases + (len(shared) > 0))  # it is released on leaving
                return Refusal.NO_ROOM
            with fresh:
                request.adopt(_dealt(spans, found, shared.take(), fresh.take()), page_tokens=self.page_tokens)
        self._count_found(request, found, limit)
        return None

    def grow(self, request: Request, tokens: int) -> bool:
        """Have pages for the first ``tokens`` tokens.  False when there are not enough: nothing has changed."""
        missing = self.missing_pages(request, tokens)
        if missing == 0:
            return True
        fresh = self.pool.reserve(missing)
        if isinstance(fresh, Shortfall):
            return False
        self._extend(request, [blocks_of(tokens, self.page_tokens)] * len(request.held), fresh)
        return True

    def read_on(self, request: Request) -> None:
        """A piece of a prompt was read and settled: have pages for the next in place of those that fell out."""
        if not self._moving:
            return
        blocks = blocks_of(request.known, self.page_tokens)
        ends = [len(own.pages) for own in request.held]
        missing = 0
        for group in self._moving:
            end = min(blocks, request.held[group].begin + self._ring(group, request.known))
            missing += max(0, end - ends[group])
            ends[group] = max(end, ends[group])
        fresh = self.pool.reserve(missing)
        assert isinstance(fresh, Lease), "each page that fell out made room for another"
        self._extend(request, ends, fresh)

    def settle(self, request: Request) -> None:
        """Name the pages that have become full and final, offer them to the prefix cache, and give back what no later
        position reads."""
        full = request.computed // self.page_tokens if self._shares_prefixes else 0
        self._hash(request, full)
        while request.settled < full:
            block = request.settled
            name = request.hashes[block]
            for group, own in enumerate(request.held):
                if block >= own.begin:
                    self.prefix.insert(name, own.pages[block], group)
            if self._being_computed.get(name) is request:
                del self._being_computed[name]
            request.settled += 1
        for group in self._moving:
            self.pool.release(request.held[group].drop(self.reaches[group].kept(request.computed, self.page_tokens)))

    def release(self, request: Request) -> None:
        """Take everything back; ``request`` has nothing computed any more."""
        for name in request.hashes[request.settled :]:
            if self._being_computed.get(name) is request:
                del self._being_computed[name]
        if request.held:
            self.pool.release(request.surrender())

    def check(self, requests: Iterable[Request]) -> Leaks:
        """The pool's integrity check, with ``requests`` as all the owners there are."""
        return self.pool.check(all_pages(request.held) for request in requests)

    def _next(self, request: Request) -> int:
        """The position that is computed next after the known ones, if those are computed elsewhere; else 0."""
        return request.known if request.leg is Leg.DECODE else 0

    def _ring(self, group: int, tokens: int) -> int:
        """Blocks that a group holds at most at once while so many tokens are read."""
        return most_blocks(self.reaches[group], tokens, ahead=self._ahead, page_tokens=self.page_tokens)

    def _span(self, request: Request, group: int, found: int) -> tuple[int, int]:
        """Blocks [begin, end) that a group needs to begin with, the first ``found`` blocks being known."""
        begin = self.prefix.needed(group, found, self._next(request))
        blocks = blocks_of(request.known, self.page_tokens)
        return begin, min(blocks, begin + self._ring(group, request.known))

    def _extend(self, request: Request, ends: Sequence[int], fresh: Lease) -> None:
        """Give each group's table so many blocks."""
        with fresh:
            pages = fresh.take()
            for own, end in zip(request.held, ends, strict=True):
                missing = end - len(own.pages)
                if missing > 0:
                    own.pages += pages[:missing]
                    del pages[:missing]
            request.measure(self.page_tokens)

    def _shareable(self, request: Request) -> int:
        """Pages that may come from the cache: at least one token stays to be computed where a token will be drawn."""
        if request.leg is Leg.DECODE:
            return request.known // self.page_tokens
        alone = request.wants_prompt_logprobs or not self._shares_prefixes
        return 0 if alone else (request.known - 1) // self.page_tokens

    def _count_found(self, request: Request, found: int, limit: int) -> None:
        request.computed = found * self.page_tokens
        request.settled = found
        self.asked_tokens += limit * self.page_tokens
        self.found_tokens += request.computed
        if not request.preempted:
            request.cached_tokens = min(request.computed, len(request.prompt))
        if request.leg is not Leg.DECODE and self._shares_prefixes:
            for name in request.hashes[found : request.known // self.page_tokens]:
                if name not in self.prefix:
                    self._being_computed.setdefault(name, request)

    def _hash(self, request: Request, blocks: int) -> None:
        """Have the hashes of the first ``blocks`` pages; ready-made ones are never computed again."""
        hashes, size = request.hashes, self.page_tokens
        while len(hashes) < blocks:
            parent = hashes[-1] if hashes else request.root
            start = len(hashes) * size
            marks = image_marks(request.images, start, start + size) if request.images else b""
            hashes.append(block_hash(parent, request.tokens(start, start + size), marks))


def _dealt(
    spans: Sequence[tuple[int, int]], found: int, known: Sequence[PageId], new: Sequence[PageId]
) -> list[Holding]:
    """Blocks [begin, end) of each group: below ``found`` the pages that are known, from there on new ones."""
    held: list[Holding] = []
    shared = taken = 0
    for begin, end in spans:
        old, fresh = max(0, found - begin), end - max(begin, found)
        held.append(Holding(begin, [*known[shared : shared + old], *new[taken : taken + fresh]]))
        shared += old
        taken += fresh
    return held
