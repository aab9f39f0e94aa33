"""One tier and the threads that work for it: reads and writes never wait for each other, and nobody for them.

Measures how long a page takes, counts, and leaves a tier alone that fails or hangs (``breaker``).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Protocol

from penstock.config.schema import KvStoreConfig
from penstock.errors import PageCorrupt, TierError
from penstock.kv.memory import KvMemory
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.telemetry.metrics import TIER_FIGURES
from penstock.types import PageId

# MERGED: When a tier that fails is left alone, and when it is tried again.  Pure.

FAILURES = 3
"""In a row, after which nothing is asked of the tier for a while."""

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0


class CircuitBreaker:
    """Closed while the tier works.  Opens after failures in a row, longer each time; one success closes it."""

    def __init__(self) -> None:
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._until = float("-inf")

    def allows(self, now: float) -> bool:
        """May the tier be asked?  After a rest everybody may; the first failure ends that."""
        return now >= self._until

    def record_success(self) -> None:
        """It did what was asked, in time."""
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._until = float("-inf")

    def record_failure(self, now: float) -> bool:
        """It did not.  True when it is left alone from now on, and was not before."""
        self._failures += 1
        if self._failures < FAILURES or now < self._until:
            return False
        self._until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        return True


# MERGED: Threads that do jobs one after the other, for whoever must not wait for them.


Job = Callable[[], None]

WRITE_PAUSE_S = 50e-6
"""Between two pages that are written: nobody waits for them."""


class JobRunner(Protocol):
    """Who does jobs."""

    busy_since: float | None

    @property
    def queued(self) -> int:
        """Jobs that are not begun."""
        ...

    def submit(self, job: Job) -> None:
        """Do this, too."""
        ...

    def finish(self) -> None:
        """Nothing more comes: end when all is done."""
        ...

    def join(self, patience_s: float) -> bool:
        """Has it ended?  Waits for that so long at most."""
        ...


class JobThread:
    """A thread.  Jobs are done in order.  What one raises is logged: it must deal with what it can foresee."""

    def __init__(self, name: str, clock: Callable[[], float], pause_s: float) -> None:
        """``pause_s`` after each job: the interpreter has one lock, and the worker's loop may wait for it."""
        self._pause_s = pause_s
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._clock = clock
        self.busy_since: float | None = None  # the job that is being done was begun then
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        """Jobs that are not begun."""
        return self._jobs.qsize()

    def submit(self, job: Job) -> None:
        """Do this, too."""
        self._jobs.put(job)

    def finish(self) -> None:
        """Nothing more comes: end when all is done."""
        self._jobs.put(None)

    def join(self, patience_s: float) -> bool:
        """Has it ended?  Waits for that so long at most; who has not is left behind."""
        self._thread.join(patience_s)
        return not self._thread.is_alive()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            self.busy_since = self._clock()
            try:
                job()
            except Exception:
                log.exception("a job of the KV store failed")
            self.busy_since = None
            if self._pause_s:
                time.sleep(self._pause_s)


log = logging.getLogger("penstock.worker")

FIRST_READ = {
    "peers": (10e-6, 5e9),
    "host": (20e-6, 3e9),
    "disk": (100e-6, 1e9),
    "redis": (500e-6, 0.5e9),
    "mooncake": (500e-6, 0.5e9),
}
FIRST_WRITE = (20e-6, 3e9)
"""(seconds, bytes a second) that a page is thought to take before one was read or written; then they are measured."""

_FADING = 0.9
_DOUBT = 0.98
"""What is thought too dear is thought a little cheaper each time: who never tries again never learns."""


@dataclass(slots=True, eq=False)
class StoreRequest:
    """Something that was asked of tiers.  ``wanted`` is made False by whoever asked: what is not begun is left then."""

    wanted: bool = True


class PageLoad:
    """A page that a tier was asked to bring: it belongs to the tier from ``begin`` on, unless it was withdrawn before.

    One of the two is the first, whichever threads they are called from.
    """

    __slots__ = ("_unclaimed",)

    def __init__(self) -> None:
        self._unclaimed = [True]

    def begin(self) -> bool:
        """The tier's thread is about to write into the page.  False: it must not, and need not tell."""
        return self._claim()

    def withdraw(self) -> bool:
        """The page is needed no more.  True: nobody will write into it; False: ``LoadDone`` will come."""
        return self._claim()

    def _claim(self) -> bool:
        try:
            return self._unclaimed.pop()  # one step of the interpreter
        except IndexError:
            return False


@dataclass(frozen=True, slots=True)
class LookupDone:
    """A remote tier has so many of the pages that were asked for, from the first on."""

    request: StoreRequest
    tier: int
    pages: int


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A page stands where it was wanted, or (not ``good``) will never."""

    request: StoreRequest
    place: int  # as the page was called when it was asked for
    good: bool


StoreEvent = LookupDone | LoadDone


@dataclass(frozen=True, slots=True)
class TierContext:
    """What all tiers of a worker share."""

    memory: KvMemory
    generation: Callable[[PageId], int]  # how often a page has been given out
    clock: Callable[[], float]
    config: KvStoreConfig
    news: SimpleQueue[StoreEvent]
    hand: Callable[[str, Callable[[], float], float], JobRunner] = JobThread
    processor_s: Callable[[], float] = time.thread_time  # of the thread that asks


class TierWorker:
    """A tier, asked from the worker's loop: no call blocks."""

    def __init__(self, number: int, tier: KvTier, around: TierContext) -> None:
        self.tier = tier
        self._number = number
        self._around = around
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()
        self._figures = dict.fromkeys(TIER_FIGURES, 0.0)
        nbytes = around.memory.layout.page_bytes
        self.read_s = _seconds(FIRST_READ[tier.name], nbytes)  # a page, of late: by the clock, for somebody waits
        self.write_s = _seconds(FIRST_WRITE, nbytes)  # of the processor's time: nobody waits, others could use it
        self._page = bytearray(around.memory.layout.page_bytes)
        self._reader = around.hand(f"kv-{tier.name}-read", around.clock, 0.0)
        self._writer = around.hand(f"kv-{tier.name}-write", around.clock, WRITE_PAUSE_S)

    # --- asked ------------------------------------------------------------------------------------------------------

    def usable(self, now: float) -> bool:
        """Does it work, as far as is known?"""
        since = self._reader.busy_since
        hangs = since is not None and now - since > self._around.config.hang_s
        return not hangs and self._breaker.allows(now)

    def contains(self, keys: Sequence[PageKey], now: float) -> list[bool]:
        """Of a tier that is not remote: what is there."""
        if self.usable(now):
            try:
                return self.tier.contains(keys)
            except (OSError, TierError) as error:
                self._failed(error)
        return [False] * len(keys)

    def lookup(self, ticket: StoreRequest, keys: Sequence[PageKey]) -> None:
        """Of a remote one; ``LookupDone`` is the answer."""
        self._reader.submit(lambda: self._ask(ticket, keys))

    def load_page(self, ticket: StoreRequest, place: int, key: PageKey, into: memoryview) -> PageLoad:
        """Bring a page; ``LoadDone`` is the answer, unless it is withdrawn.  Until then ``into`` belongs to the
        tier."""
        load = PageLoad()
        self._reader.submit(lambda: self._load(ticket, place, key, into) if load.begin() else None)
        return load

    def accepts(self, final: FinalPage, now: float) -> bool:
        """Is writing this page worth the time, and can it be done?"""
        if not self._breaker.allows(now):
            return False
        weighed = self.tier.stores_copies and not self._around.config.always
        if weighed and final.gain_s - final.chance * self.read_s <= self.write_s:
            self.write_s *= _DOUBT
            return False
        if self._writer.queued >= self._around.config.max_queued_writes:
            self._count("writes_dropped")
            return False
        return True

    def on_fetch_skipped(self) -> None:
        """Pages were not fetched because that was thought to take longer than computing them."""
        self.read_s *= _DOUBT

    def save_page(self, final: FinalPage) -> None:
        """Keep a page.  It is copied later: should it be gone by then, so much the worse."""
        self._writer.submit(lambda: self._save(final))

    def metrics(self) -> dict[str, float]:
        """Of ``telemetry.metrics.TIER_FIGURES``."""
        with self._lock:
            return self._figures | {"pages": self.tier.pages}

    def finish(self) -> None:
        """Nothing more is asked: do what is left."""
        self._reader.finish()
        self._writer.finish()

    def close(self, deadline: float) -> None:
        """After ``end``: let go of the tier, if all is done by then."""
        ended = [hand.join(max(0.0, deadline - self._around.clock())) for hand in (self._reader, self._writer)]
        if all(ended):
            self.tier.close()

    # --- done by the threads ----------------------------------------------------------------------------------------

    def _ask(self, ticket: StoreRequest, keys: Sequence[PageKey]) -> None:
        pages = 0
        try:
            if ticket.wanted and self._breaker.allows(self._around.clock()):
                found = self.tier.contains(keys)
                pages = found.index(False) if False in found else len(found)
                self._breaker.record_success()
        except (OSError, TierError) as error:
            self._failed(error)
        finally:
            self._around.news.put(LookupDone(ticket, self._number, pages))

    def _load(self, ticket: StoreRequest, place: int, key: PageKey, into: memoryview) -> None:
        good = False
        began = self._around.clock()
        try:
            if ticket.wanted and self._breaker.allows(began):
                good = self.tier.read_page(key, into)
                self._breaker.record_success()
                self._count("pages_read" if good else "pages_missed")
        except PageCorrupt as error:
            first = not self._figures["pages_corrupt"]
            self._count("pages_corrupt")
            level = logging.WARNING if first else logging.DEBUG  # metrics tell how many
            log.log(level, "KV store, %s: %s; it is computed instead", self.tier.name, error)
        except (OSError, TierError) as error:
            self._failed(error)
        finally:
            self._around.news.put(LoadDone(ticket, place, good))
        if good:
            seconds = self._around.clock() - began
            self.read_s = _FADING * self.read_s + (1 - _FADING) * seconds
            self._count("read_seconds", seconds)
            self._count("bytes_read", into.nbytes)

    def _save(self, final: FinalPage) -> None:
        around = self._around
        began, worked = around.clock(), around.processor_s()
        if not self._breaker.allows(began):
            return
        # The page does not change while it keeps its generation: a copy taken between two looks at that is right.
        if around.generation(final.page) == final.generation:
            self._page[:] = around.memory.view(final.page)
        if around.generation(final.page) != final.generation:
            self._count("writes_dropped")
            return
        try:
            with memoryview(self._page) as content:
                kept = self.tier.write_page(final, content)
            if around.generation(final.page) != final.generation:
                self.tier.on_evicted(final.key)  # while it was written: the loop's word came too early
            self._breaker.record_success()
        except (OSError, TierError) as error:
            self._failed(error)
            return
        seconds = around.clock() - began
        self.write_s = _FADING * self.write_s + (1 - _FADING) * (around.processor_s() - worked)
        if kept:
            self._count("pages_written")
            self._count("bytes_written", len(self._page))
            self._count("write_seconds", seconds)

    def _failed(self, error: Exception) -> None:
        self._count("errors")
        if self._breaker.record_failure(self._around.clock()):
            log.warning("KV store: %s is left alone for a while: %s", self.tier.name, error)

    def _count(self, figure: str, amount: float = 1.0) -> None:
        with self._lock:
            self._figures[figure] += amount


def _seconds(first: tuple[float, float], nbytes: int) -> float:
    return first[0] + nbytes / first[1]
