"""A request's pages from admission to release: shared prefix, fresh pages, growth, naming of what is final.

::

    pages of one request, in token order
           | shared prefix | arrived from prefill | computed here |
    now    | +1 reference  | verified, counted    | written       |
    full   | known already | named by their hash, offered to the prefix cache |
    at end | -1 reference each; what has a name stays cached, the rest is free

Knows nothing about steps, budgets or the order of service.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import Enum

from penstock.engine.core.blocks import BlockPool, Leaks, Shortfall
from penstock.engine.core.prefix import PrefixCache
from penstock.engine.core.request import Request
from penstock.hashing import block_hash, image_marks
from penstock.types import BlockHash, Leg


class Refusal(Enum):
    """Why a request cannot be admitted now."""

    NO_ROOM = "not enough pages"
    BEING_COMPUTED = "another request is computing a block that this one can share"


class PageMemory:
    """The pool and the prefix cache of one worker, as requests use them."""

    def __init__(self, *, pages: int, page_tokens: int) -> None:
        self.page_tokens = page_tokens
        self.pool = BlockPool(pages)
        self.prefix = PrefixCache(self.pool)
        self.asked_tokens = 0  # tokens looked up in the prefix cache, and found there, since the start
        self.found_tokens = 0
        self._being_computed: dict[BlockHash, Request] = {}
        self._refused: tuple[Request, int] | None = None  # who found no room, and the pool's releases at that time

    def covered(self, hashes: Sequence[BlockHash]) -> int:
        """Tokens of a prompt with these block hashes that the prefix cache has now."""
        found = 0
        while found < len(hashes) and hashes[found] in self.prefix:
            found += 1
        return found * self.page_tokens

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_tokens)

    def admit(self, request: Request, *, spare: int) -> Refusal | None:
        """Give ``request`` pages for all its known tokens, as many as possible from the prefix cache, which count as
        computed.  All or nothing; ``spare`` pages stay available for the growth of others.
        """
        if request.waits_for in self._being_computed:
            return Refusal.BEING_COMPUTED
        if self._refused == (request, self.pool.releases):
            return Refusal.NO_ROOM
        request.waits_for = None
        self._hash(request, request.known // self.page_tokens)
        limit = self._shareable(request)
        with self.prefix.match(request.hashes, limit) as shared:
            found = len(shared)
            if found < limit and request.leg is not Leg.DECODE and request.hashes[found] in self._being_computed:
                request.waits_for = request.hashes[found]
                return Refusal.BEING_COMPUTED
            fresh = self.pool.reserve(self.pages_for(request.known) - found, spare=spare)
            if isinstance(fresh, Shortfall):
                self._refused = (request, self.pool.releases + (found > 0))  # ``shared`` is released on leaving
                return Refusal.NO_ROOM
            with fresh:
                request.adopt(shared.take() + fresh.take(), page_tokens=self.page_tokens)
        self._count_found(request, found, limit)
        return None

    def grow(self, request: Request, tokens: int) -> bool:
        """Have pages for the first ``tokens`` tokens.  False when there are not enough: nothing has changed."""
        fresh = self.pool.reserve(self.pages_for(tokens) - len(request.pages))
        if isinstance(fresh, Shortfall):
            return False
        with fresh:
            request.adopt(fresh.take(), page_tokens=self.page_tokens)
        return True

    def settle(self, request: Request) -> None:
        """Name the pages that have become full and final, and offer them to the prefix cache."""
        full = request.computed // self.page_tokens
        self._hash(request, full)
        while request.settled < full:
            name = request.hashes[request.settled]
            self.prefix.insert(name, request.pages[request.settled])
            if self._being_computed.get(name) is request:
                del self._being_computed[name]
            request.settled += 1

    def release(self, request: Request) -> None:
        """Take everything back; ``request`` has nothing computed any more."""
        for name in request.hashes[request.settled :]:
            if self._being_computed.get(name) is request:
                del self._being_computed[name]
        if request.pages:
            self.pool.release(request.surrender())

    def check(self, requests: Iterable[Request]) -> Leaks:
        """The pool's integrity check, with ``requests`` as all the owners there are."""
        return self.pool.check(request.pages for request in requests)

    def _shareable(self, request: Request) -> int:
        """Pages that may come from the cache: at least one token stays to be computed where a token will be drawn."""
        if request.leg is Leg.DECODE:
            return request.known // self.page_tokens
        return 0 if request.wants_prompt_logprobs else (request.known - 1) // self.page_tokens

    def _count_found(self, request: Request, found: int, limit: int) -> None:
        request.computed = found * self.page_tokens
        request.settled = found
        self.asked_tokens += limit * self.page_tokens
        self.found_tokens += request.computed
        if not request.preempted:
            request.cached_tokens = min(request.computed, len(request.prompt))
        if request.leg is not Leg.DECODE:
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
