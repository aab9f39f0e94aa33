"""All tiers of one worker, nearest first: who has a page, how long fetching it takes, and who should keep one.

No call blocks: what takes time is done by threads (``at_work``), and their answers are ``news``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from queue import Empty, SimpleQueue

from penstock.config.schema import KvStoreConfig
from penstock.kv.memory import KvMemory
from penstock.kv.store.at_work import Around, Load, News, Ticket, TierAtWork
from penstock.kv.store.hands import Doer, Hand
from penstock.kv.store.port import FinalPage, PageKey, Tier
from penstock.telemetry.metrics import tier_counter
from penstock.types import PageId


class PageStore:
    """See above.  Without tiers it has nothing and takes nothing."""

    def __init__(
        self,
        tiers: Sequence[Tier],
        memory: KvMemory,
        generation: Callable[[PageId], int],
        clock: Callable[[], float],
        config: KvStoreConfig,
        *,
        hand: Callable[[str, Callable[[], float], float], Doer] = Hand,
    ) -> None:
        """``tiers``: nearest first.  Begins their threads (``hand`` makes one): to be made after every fork."""
        self._news: SimpleQueue[News] = SimpleQueue()
        self._memory = memory
        self._clock = clock
        self.config = config
        around = Around(memory, generation, clock, config, self._news, hand)
        self._tiers = [TierAtWork(number, tier, around) for number, tier in enumerate(tiers)]
        self._peers = [work.tier for work in self._tiers if work.tier.name == "peers"]

    def __bool__(self) -> bool:
        return bool(self._tiers)

    @property
    def remotes(self) -> list[int]:
        """Tiers that must be asked (``ask``) what they have, as far as they work now."""
        now = self._clock()
        return [n for n, work in enumerate(self._tiers) if work.tier.remote and work.usable(now)]

    @property
    def lower(self) -> list[int]:
        """Tiers that keep copies and can be asked without a journey, nearest first."""
        return [n for n, work in enumerate(self._tiers) if work.tier.copies and not work.tier.remote]

    def find(self, keys: Sequence[PageKey], among: Sequence[int] | None = None) -> list[int | None]:
        """The nearest tier (``among`` these) that has each page, remote ones apart."""
        found: list[int | None] = [None] * len(keys)
        now = self._clock()
        for number, work in enumerate(self._tiers):
            if work.tier.remote or (among is not None and number not in among):
                continue
            open_places = [place for place, tier in enumerate(found) if tier is None]
            if not open_places:
                break
            there = work.has([keys[place] for place in open_places], now)
            for place, has in zip(open_places, there, strict=True):
                if has:
                    found[place] = number
        return found

    def ask(self, tier: int, ticket: Ticket, keys: Sequence[PageKey]) -> None:
        """How many of these pages, from the first on, does a remote tier have?  ``Found`` is the answer."""
        self._tiers[tier].ask(ticket, keys)

    def load(self, tier: int, ticket: Ticket, place: int, wanted: tuple[PageKey, PageId]) -> Load:
        """Bring a page into this worker's memory.  It belongs to the tier until ``Loaded`` says how it went, or the
        load is withdrawn."""
        key, page = wanted
        return self._tiers[tier].load(ticket, place, key, self._memory.view(page))

    def name(self, tier: int) -> str:
        """One of ``telemetry.metrics.TIERS``."""
        return self._tiers[tier].tier.name

    def read_s(self, tier: int) -> float:
        """Seconds a page."""
        return self._tiers[tier].read_s

    def too_dear(self, tiers: Iterable[int]) -> None:
        """Pages of these were not fetched because that was thought to take longer than computing them."""
        for tier in set(tiers):
            self._tiers[tier].too_dear()

    def peers_s(self) -> float | None:
        """Seconds a page out of other workers' caches; None: they cannot be reached."""
        return next((work.read_s for work in self._tiers if work.tier.name == "peers"), None)

    def save(self, final: FinalPage) -> None:
        """A page is full and final: let those keep it that find it worth while."""
        now = self._clock()
        for work in self._tiers:
            if work.wants(final, now):
                work.save(final)

    def evicted(self, key: PageKey) -> None:
        """This worker's memory does not have the page any more."""
        for tier in self._peers:
            tier.evicted(key)

    def news(self, most: int) -> list[News]:
        """What has come since the last call, so much of it at most."""
        news: list[News] = []
        try:
            while len(news) < most:
                news.append(self._news.get_nowait())
        except Empty:
            pass
        return news

    def counters(self) -> dict[str, float]:
        """Of all tiers, by ``telemetry.metrics.tier_counter``."""
        return {
            tier_counter(work.tier.name, figure): value
            for work in self._tiers
            for figure, value in work.figures().items()
        }

    def close(self) -> None:
        """Write what is left, within ``close_s`` of them all, and let go."""
        for work in self._tiers:
            work.end()
        deadline = self._clock() + self.config.close_s
        for work in self._tiers:
            work.close(deadline)
