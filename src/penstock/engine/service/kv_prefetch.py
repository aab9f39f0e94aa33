"""Pages of prompts that other tiers have (``kv.store``): fetched while the request waits, kept when they are final.

::

    AddRequest -> find tiers -> allocate (core.prefetch) -> threads fill the pages -> prefix cache -> queue
                     |                |                          |
                     none, or         no room:                   not within the time that computing takes:
                     slower: queue    queue                      queue; pages that come later serve other requests

A request leaves for the queue as soon as waiting gains nothing more, so a tier that is slow, broken or wrong costs it
no more time than recomputing the pages.  Fetched pages count like computed ones: the scheduler finds them in the prefix
cache, and knows nothing of tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from penstock.clock import Clock
from penstock.engine.core.events import AddRequest
from penstock.engine.core.page_pool import PageLabel
from penstock.engine.core.prefetch import Prefetch, Prefetches
from penstock.engine.core.request import Request
from penstock.engine.core.scheduler import Scheduler
from penstock.engine.service.kv_events import LowerTiers
from penstock.engine.service.load_report import StoreFigures
from penstock.engine.service.readiness import NoPrefetch, PageWait
from penstock.hashing import block_hash, image_block_marks
from penstock.kv.store.eviction import ReuseStats
from penstock.kv.store.store import PageStore
from penstock.kv.store.tier import FinalPage, PageKey
from penstock.kv.store.tier_worker import LoadDone, LookupDone, PageLoad, StoreRequest
from penstock.types import BlockHash, PageId, RequestId, RequestStage

LOOKUP_PAGES = 256
"""Pages looked up at a time: behind one that no tier has, those of full attention layers are useless."""


LOADS_PER_TURN = 1024
"""Pages that tiers are asked for between two steps, some 5 ms."""


class _Phase(Enum):
    ASKING = "remote tiers are asked, or another request fetches the same pages"
    BRINGING = "pages are on their way"
    DONE = "it may go on"


@dataclass(slots=True, eq=False)
class _Waiting:
    """A request that pages may be fetched for."""

    hashes: Sequence[BlockHash]
    limit: int  # blocks that it can use
    had: int  # of those, here when it came
    began: float
    deadline: float
    phase: _Phase = _Phase.ASKING
    ticket: StoreRequest = field(default_factory=StoreRequest)
    asked: list[PageKey] = field(default_factory=list[PageKey])  # of remote tiers
    answers: dict[int, int] = field(default_factory=dict[int, int])  # how many of those a remote tier has
    unanswered: int = 0
    behind: list[PageKey] = field(default_factory=list[PageKey])  # pages that another request fetches
    brought: Prefetch | None = None
    places: Sequence[int] = ()  # the last block of each page that is brought
    tiers: Sequence[int] = ()  # from which each page is brought
    loads: list[PageLoad] = field(default_factory=list[PageLoad])  # of the first of these pages, which were asked for
    ended: float = 0.0
    found: int = 0  # blocks here when it ended
    pages: Counter[str] = field(default_factory=Counter[str])  # that were asked for, by tier

    def page_wait(self, size: int) -> PageWait:
        """The wait as it is reported; a block has ``size`` tokens."""
        pages = {f"{tier}_pages": count for tier, count in self.pages.items()}
        tokens = {"wanted_tokens": (self.limit - self.had) * size, "found_tokens": max(0, self.found - self.had) * size}
        return PageWait(self.began, self.ended, tokens | pages)


@dataclass(slots=True)
class PrefetchCounts:
    """Numbers only grow."""

    tokens: int = 0  # that were brought in time
    waits: int = 0
    wait_s: float = 0.0
    wasted_waits: int = 0  # waits that brought nothing


class NoPrefetcher(NoPrefetch):
    """Without tiers."""

    def figures(self, domain: str) -> StoreFigures:
        """None."""
        return StoreFigures()

    def lower_tiers(self) -> LowerTiers | None:
        """None."""
        return None

    def close(self) -> None:
        """There is nothing to write."""


class KvPrefetcher:
    """A ``readiness.PageReadiness`` that also saves pages that become final here, and hears of evicted ones."""

    def __init__(self, scheduler: Scheduler, store: PageStore, clock: Clock) -> None:
        """From now on the scheduler's memory tells this object what becomes of its pages."""
        self._memory = scheduler.memory
        self._cost = scheduler.cost
        self._size = scheduler.config.page_tokens
        self._store = store
        self._always = store.config.always
        self._clock = clock
        self._imports = Prefetches(self._memory)
        self._reuse = ReuseStats()
        self._waiting: dict[RequestId, _Waiting] = {}
        self._passed: list[_Waiting] = []
        self._open: dict[StoreRequest, _Waiting] = {}  # those that something was asked for
        self._loading: dict[PageKey, StoreRequest] = {}
        self._events_left = self._memory.verifier.pages_per_step  # of what tiers tell, in this turn
        self._loads_left = LOADS_PER_TURN
        self.counts = PrefetchCounts()
        self._watcher: Callable[[RequestId, PageWait], None] = lambda request, wait: None
        self._memory.on_final = self._final
        self._memory.prefix.on_evict = self._evicted

    # --- ``readiness.PageReadiness`` --------------------------------------------------------------------------------

    def watch(self, tell: Callable[[RequestId, PageWait], None]) -> None:
        """``tell`` hears how long each request waited that passes."""
        self._watcher = tell

    def is_ready(self, event: AddRequest) -> bool:
        """Whether the request need not wait for pages."""
        self._handle_store_events()
        waiting = self._waiting.get(event.id)
        now = self._clock.now()
        if waiting is None:
            waiting = self._begin(event, now)
            if waiting is None:
                return True
            self._waiting[event.id] = waiting
        if waiting.phase is _Phase.ASKING and not waiting.unanswered and not self._is_behind(waiting):
            self._bring(waiting)
        if waiting.phase is _Phase.BRINGING and waiting.brought is not None:
            if len(waiting.loads) < len(waiting.tiers):
                self._ask_for_pages(waiting, waiting.brought)
            if not waiting.brought.in_flight:
                self._end(waiting, now)
        if waiting.phase is not _Phase.DONE and now >= waiting.deadline:
            self._end(waiting, now)
        return waiting.phase is _Phase.DONE

    def remove_request(self, request: RequestId) -> None:
        """The request has left."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._release(waiting)

    def on_passed(self, request: RequestId) -> None:
        """It goes to the scheduler now."""
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._passed.append(waiting)
            self._watcher(request, waiting.page_wait(self._size))

    def on_scheduled(self) -> None:
        """The scheduler has had its turn with every request that passed: it holds what it found, or waits for room."""
        self._events_left = self._memory.verifier.pages_per_step
        self._loads_left = LOADS_PER_TURN
        self._handle_store_events()
        for waiting in self._passed:
            self._release(waiting)
        self._passed.clear()

    def figures(self, domain: str) -> StoreFigures:
        """For reports.  ``domain``: in which pages can be taken from other workers' caches."""
        tiers, takes_pages = self._store.local_tiers, self._store.peer_read_s() is not None
        return StoreFigures(
            counters=self.counters,
            tier_s=lambda: tuple(map(self._store.read_s, tiers)),
            domain=domain if takes_pages else "",
            fetch_s=lambda: self._store.peer_read_s() or 0.0,
        )

    def lower_tiers(self) -> LowerTiers | None:
        """The tiers below this worker's cache; None when there are none."""
        tiers = self._store.local_tiers
        return LowerTiers(self._nearest, len(tiers)) if tiers else None

    def _nearest(self, blocks: Sequence[BlockHash]) -> list[int]:
        """The nearest local tier of each block (``kv_events.NearestTier``)."""
        tiers, group = self._store.local_tiers, self._memory.prefix.reported_group
        found = self._store.find_pages([PageKey(block, group) for block in blocks], among=tiers)
        return [0 if tier is None else tiers.index(tier) + 1 for tier in found]

    def counters(self) -> dict[str, float]:
        """For reports."""
        counts = self.counts
        own = {
            "stored_tokens": counts.tokens,
            "store_waits": counts.waits,
            "store_wait_seconds": counts.wait_s,
            "store_waits_in_vain": counts.wasted_waits,
        }
        return own | self._store.counters()

    def close(self) -> None:
        """Write what is left."""
        self._store.close()

    # --- fetching ---------------------------------------------------------------------------------------------------

    def _begin(self, event: AddRequest, now: float) -> _Waiting | None:
        """None: there is nothing to be gained."""
        alone = event.sampling.prompt_logprobs is not None and not event.emitted
        if event.stage is RequestStage.DECODE or event.pooling is not None or alone:
            return None
        limit = (len(event.prompt) + len(event.emitted) - 1) // self._size
        hashes = self._hashes(event, limit)
        self._reuse.on_blocks_requested(hashes[:limit])
        had = self._memory.prefix.longest_prefix(hashes, limit)
        if had >= limit:
            return None
        most_s = self._store.config.max_wait_s
        if not self._always:
            most_s = min(most_s, self._seconds(had, limit))
        waiting = _Waiting(hashes, limit, had, now, now + most_s)
        self._bring(waiting, last=False)
        if waiting.phase is _Phase.ASKING and not waiting.behind:
            self._request_tiers(waiting)
        if waiting.phase is _Phase.DONE:
            return None
        self.counts.waits += 1
        return waiting

    def _request_tiers(self, waiting: _Waiting) -> None:
        """Remote tiers, as far as an answer of theirs can be worth more than computing."""
        lacking = self._seconds(waiting.had, waiting.limit)
        tiers = [tier for tier in self._store.remote_tiers if self._always or self._store.read_s(tier) < lacking]
        if not tiers:
            self._bring(waiting)
            return
        missing = self._imports.missing_pages(waiting.hashes, waiting.limit)
        waiting.asked = [PageKey(waiting.hashes[last], group) for last, group in missing]
        self._open[waiting.ticket] = waiting
        for tier in tiers:
            waiting.unanswered += 1
            self._store.lookup(tier, waiting.ticket, waiting.asked)

    def _bring(self, waiting: _Waiting, *, last: bool = True) -> None:
        """Have what tiers have brought, if that is sooner than computing it.

        ``last``: no other tier will be asked; else nothing is done unless all of the prompt is there.
        """
        hashes, limit = waiting.hashes, waiting.limit
        where = self._where(waiting)
        reach = self._imports.reachable_blocks(hashes, limit, lambda block, group: PageKey(block, group) in where)
        if not last and reach < limit and self._store.remote_tiers:
            return
        missing = self._imports.missing_pages(hashes, reach)
        wanted = [(hashes[last], group) for last, group in missing]
        keys = [PageKey(block, group) for block, group in wanted]
        behind = [key for key in keys if key in self._loading]
        if behind:
            waiting.behind = behind
            return
        fetching_s = sum(self._store.read_s(where[key]) for key in keys)
        brought = None
        if reach > waiting.had and (self._always or fetching_s < self._seconds(waiting.had, reach)):
            brought = self._imports.begin(hashes, limit, wanted)
        elif reach > waiting.had:
            self._store.on_fetch_skipped(where[key] for key in keys)
        if brought is None:
            waiting.phase = _Phase.DONE
            return
        waiting.phase, waiting.brought = _Phase.BRINGING, brought
        waiting.places = [last for last, _ in missing]
        self._open[waiting.ticket] = waiting
        self._loading |= dict.fromkeys(keys, waiting.ticket)
        waiting.tiers = [where[key] for key in keys]
        waiting.pages.update({self._store.tier_name(tier): count for tier, count in Counter(waiting.tiers).items()})
        self._ask_for_pages(waiting, brought)

    def _ask_for_pages(self, waiting: _Waiting, brought: Prefetch) -> None:
        """Load some of the pages in this turn, all requests together."""
        begin = len(waiting.loads)
        stop = min(len(waiting.tiers), begin + self._loads_left)
        self._loads_left -= stop - begin
        waiting.loads += [
            self._store.load_page(
                waiting.tiers[place],
                waiting.ticket,
                place,
                (PageKey(*brought.requested[place]), brought.in_flight[place]),
            )
            for place in range(begin, stop)
        ]

    def _where(self, waiting: _Waiting) -> dict[PageKey, int]:
        """The tier of each page that is not here, up to the first full attention page that no tier has."""
        where: dict[PageKey, int] = {}
        for tier, pages in waiting.answers.items():
            for key in waiting.asked[:pages]:
                where.setdefault(key, tier)
        whole = self._memory.prefix.full_attention_groups
        missing = self._imports.missing_pages(waiting.hashes, waiting.limit)
        for start in range(0, len(missing), LOOKUP_PAGES):
            keys = [PageKey(waiting.hashes[last], group) for last, group in missing[start : start + LOOKUP_PAGES]]
            local = self._store.find_pages(keys)
            where.update((key, tier) for key, tier in zip(keys, local, strict=True) if tier is not None)
            if any(key.group in whole and key not in where for key in keys):
                break
        return where

    def _is_behind(self, waiting: _Waiting) -> bool:
        behind = waiting.behind
        while behind and behind[-1] not in self._loading:
            behind.pop()  # each is looked at once
        return bool(behind)

    def _handle_store_events(self) -> None:
        some = self._store.pop_events(self._events_left)  # each is a page to be sealed
        self._events_left -= len(some)
        for news in some:
            waiting = self._open.get(news.request)
            if waiting is None:
                continue
            match news:
                case LookupDone():
                    waiting.unanswered -= 1
                    waiting.answers[news.tier] = news.pages
                case LoadDone():
                    self._loaded(waiting, news)
            over = waiting.brought is None or not waiting.brought.in_flight
            if over and waiting.unanswered == 0 and waiting.phase is _Phase.DONE:
                self._open.pop(news.request, None)

    def _loaded(self, waiting: _Waiting, news: LoadDone) -> None:
        brought = waiting.brought
        assert brought is not None, "what was asked for has room"
        block, group = brought.requested[news.place]
        key = PageKey(block, group)
        self._loading.pop(key, None)
        page = self._imports.on_filled(brought, news.place, news.good)
        if page is not None:
            self._store_page(key, page, waiting.places[news.place], (waiting.limit * self._size, False))

    def _end(self, waiting: _Waiting, now: float) -> None:
        """It waits no longer."""
        waiting.phase = _Phase.DONE
        waiting.ticket.wanted = False
        found = waiting.found = self._memory.prefix.longest_prefix(waiting.hashes, waiting.limit)
        waiting.ended = now
        self.counts.tokens += max(0, found - waiting.had) * self._size
        self.counts.wasted_waits += found <= waiting.had
        self.counts.wait_s += now - waiting.began

    def _release(self, waiting: _Waiting) -> None:
        waiting.phase = _Phase.DONE
        waiting.ticket.wanted = False
        if waiting.brought is not None:
            self._withdraw(waiting, waiting.brought)
            self._imports.release(waiting.brought)
        if waiting.unanswered == 0 and (waiting.brought is None or not waiting.brought.in_flight):
            self._open.pop(waiting.ticket, None)

    def _withdraw(self, waiting: _Waiting, brought: Prefetch) -> None:
        """Loads that wait behind others at a tier, which may hang: their pages are free at once."""
        asked = len(waiting.loads)
        places = [place for place in brought.in_flight if place >= asked or waiting.loads[place].withdraw()]
        for place in places:
            self._loading.pop(PageKey(*brought.requested[place]), None)
        self._imports.on_withdrawn(brought, places)

    # --- keeping ----------------------------------------------------------------------------------------------------

    def _final(self, request: Request, page: int, group: int) -> None:
        """A page of the request has become full and final here."""
        own = request.page_tables[group]
        block = (page + 1) * own.page_tokens // self._size - 1
        answer = block * self._size >= len(request.prompt)
        self._store_page(PageKey(request.hashes[block], group), own.pages[page], block, (request.known, answer))

    def _store_page(self, key: PageKey, page: PageId, index: int, of: tuple[int, bool]) -> None:
        """``of``: tokens of the sequence that the block at ``index`` is of, and whether the block is of an answer."""
        known, answer = of
        chance = self._reuse.reuse_probability(self._reuse.on_block_computed(key.block, answer))
        self._store.save_page(
            FinalPage(
                key=key,
                page=page,
                generation=self._memory.pool.generation(page),
                saves_s=self._seconds(index, max(index + 1, known // self._size)),
                gain_s=chance * self._seconds(index, index + 1),
                chance=chance,
            )
        )

    def _evicted(self, label: PageLabel) -> None:
        self._store.on_evicted(PageKey(label.block, label.group))

    # --- arithmetic -------------------------------------------------------------------------------------------------

    def _seconds(self, begin: int, end: int) -> float:
        """To compute these blocks of one sequence, by what steps have taken."""
        _, token, pair, _ = self._cost.rates
        first, count = begin * self._size, (end - begin) * self._size
        return token * count + pair * count * (first + 0.5 * (count + 1))

    def _hashes(self, event: AddRequest, blocks: int) -> Sequence[BlockHash]:
        """Hashes of the first ``blocks`` blocks; those that came with the request are not computed again."""
        if len(event.hashes) >= blocks:
            return event.hashes
        hashes, size = list(event.hashes), self._size
        tokens = (*event.prompt, *event.emitted)
        for start in range(len(hashes) * size, blocks * size, size):
            marks = image_block_marks(event.images, start, start + size) if event.images else b""
            parent = hashes[-1] if hashes else event.root
            hashes.append(block_hash(parent, tokens[start : start + size], marks))
        return hashes
