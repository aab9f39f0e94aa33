"""One tier and its two threads: reads and writes never wait for each other, and the worker's loop never waits for them.

Measures how long a page takes, counts, and pauses a tier that fails or hangs (``CircuitBreaker``).
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
from penstock.kv.page_memory import KvMemory
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.telemetry.metrics import TIER_FIGURES
from penstock.types import PageId

FAILURES = 3
"""In a row, after which nothing is asked of the tier for a while."""

FIRST_REST_S = 1.0
LONGEST_REST_S = 30.0


class CircuitBreaker:
    """Closed while the tier works; opens after consecutive failures, longer each time; a success closes it."""

    def __init__(self) -> None:
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._until = float("-inf")

    def allows(self, now: float) -> bool:
        """Whether the tier may be called.  After a pause it may; the first failure starts the next pause."""
        return now >= self._until

    def record_success(self) -> None:
        """The tier did its work in time."""
        self._failures = 0
        self._rest_s = FIRST_REST_S
        self._until = float("-inf")

    def record_failure(self, now: float) -> bool:
        """The tier failed.  Returns whether a pause starts now."""
        self._failures += 1
        if self._failures < FAILURES or now < self._until:
            return False
        self._until = now + self._rest_s
        self._rest_s = min(2 * self._rest_s, LONGEST_REST_S)
        return True


Job = Callable[[], None]

WRITE_PAUSE_S = 50e-6
"""Pause between two pages that are written: no request waits for them."""


class JobRunner(Protocol):
    """Runs jobs in order."""

    busy_since: float | None

    @property
    def queued(self) -> int:
        """Jobs that have not started."""
        ...

    def submit(self, job: Job) -> None:
        """Add a job."""
        ...

    def finish(self) -> None:
        """No more jobs will come: end after the last one."""
        ...

    def join(self, patience_s: float) -> bool:
        """Wait for the end, at most ``patience_s``.  Returns whether it has ended."""
        ...


class JobThread:
    """A thread that runs jobs in order.  Exceptions of a job are logged."""

    def __init__(self, name: str, clock: Callable[[], float], pause_s: float) -> None:
        """Pauses for ``pause_s`` after each job: the worker's loop may be waiting for the interpreter's lock."""
        self._pause_s = pause_s
        self._jobs: SimpleQueue[Job | None] = SimpleQueue()
        self._clock = clock
        self.busy_since: float | None = None  # the job that is being done was begun then
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    @property
    def queued(self) -> int:
        return self._jobs.qsize()

    def submit(self, job: Job) -> None:
        self._jobs.put(job)

    def finish(self) -> None:
        self._jobs.put(None)

    def join(self, patience_s: float) -> bool:
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
    """The caller's handle on lookups and loads.  Jobs that have not started are skipped once ``wanted`` is False."""

    wanted: bool = True


class PageLoad:
    """A load in progress: the page belongs to the tier from ``begin`` on, unless it was withdrawn before.

    Exactly one of the two succeeds, whichever threads call them.
    """

    __slots__ = ("_unclaimed",)

    def __init__(self) -> None:
        self._unclaimed = [True]

    def begin(self) -> bool:
        """The tier is about to write into the page.  False: it must not, and need not report."""
        return self._claim()

    def withdraw(self) -> bool:
        """The page is not needed.  True: the tier will not write into it; False: ``LoadDone`` will come."""
        return self._claim()

    def _claim(self) -> bool:
        try:
            return self._unclaimed.pop()  # one step of the interpreter
        except IndexError:
            return False


@dataclass(frozen=True, slots=True)
class LookupDone:
    """A remote tier has the first ``pages`` of the requested pages."""

    request: StoreRequest
    tier: int
    pages: int


@dataclass(frozen=True, slots=True)
class LoadDone:
    """A load has ended; without ``good`` the page was not read."""

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
    job_runner: Callable[[str, Callable[[], float], float], JobRunner] = JobThread
    processor_s: Callable[[], float] = time.thread_time  # of the thread that asks


class TierWorker:
    """A tier, called from the worker's loop without blocking."""

    def __init__(self, number: int, tier: KvTier, context: TierContext) -> None:
        self.tier = tier
        self._number = number
        self._context = context
        self._breaker = CircuitBreaker()
        self._lock = threading.Lock()
        self._figures = dict.fromkeys(TIER_FIGURES, 0.0)
        nbytes = context.memory.layout.page_bytes
        self.read_s = _seconds(FIRST_READ[tier.name], nbytes)  # a page, of late: by the clock, for somebody waits
        self.write_s = _seconds(FIRST_WRITE, nbytes)  # of processor time: no request waits for a write
        self._page = bytearray(context.memory.layout.page_bytes)
        self._reader = context.job_runner(f"kv-{tier.name}-read", context.clock, 0.0)
        self._writer = context.job_runner(f"kv-{tier.name}-write", context.clock, WRITE_PAUSE_S)

    # --- asked ------------------------------------------------------------------------------------------------------

    def usable(self, now: float) -> bool:
        """Whether the tier works, as far as is known."""
        since = self._reader.busy_since
        hangs = since is not None and now - since > self._context.config.hang_s
        return not hangs and self._breaker.allows(now)

    def contains(self, keys: Sequence[PageKey], now: float) -> list[bool]:
        """For a local tier: which pages it has."""
        if self.usable(now):
            try:
                return self.tier.contains(keys)
            except (OSError, TierError) as error:
                self._failed(error)
        return [False] * len(keys)

    def lookup(self, ticket: StoreRequest, keys: Sequence[PageKey]) -> None:
        """For a remote tier; ``LookupDone`` is the result."""
        self._reader.submit(lambda: self._ask(ticket, keys))

    def load_page(self, ticket: StoreRequest, place: int, key: PageKey, into: memoryview) -> PageLoad:
        """Fetch a page; ``LoadDone`` is the result unless the load is withdrawn.  Until then ``into`` belongs to the
        tier."""
        load = PageLoad()
        self._reader.submit(lambda: self._load(ticket, place, key, into) if load.begin() else None)
        return load

    def accepts(self, final: FinalPage, now: float) -> bool:
        """Whether storing this page is worth the time and possible now."""
        if not self._breaker.allows(now):
            return False
        weighed = self.tier.stores_copies and not self._context.config.always
        if weighed and final.gain_s - final.chance * self.read_s <= self.write_s:
            self.write_s *= _DOUBT
            return False
        if self._writer.queued >= self._context.config.max_queued_writes:
            self._count("writes_dropped")
            return False
        return True

    def on_fetch_skipped(self) -> None:
        """Pages were recomputed because fetching was predicted to take longer."""
        self.read_s *= _DOUBT

    def save_page(self, final: FinalPage) -> None:
        """Store a page.  It is copied later; if it has been evicted by then, it is not stored."""
        self._writer.submit(lambda: self._save(final))

    def metrics(self) -> dict[str, float]:
        """By ``telemetry.metrics.TIER_FIGURES``."""
        with self._lock:
            return self._figures | {"pages": self.tier.pages}

    def finish(self) -> None:
        """No more calls will come: complete what is queued."""
        self._reader.finish()
        self._writer.finish()

    def close(self, deadline: float) -> None:
        """After ``finish``: close the tier if all is done by the deadline."""
        ended = [runner.join(max(0.0, deadline - self._context.clock())) for runner in (self._reader, self._writer)]
        if all(ended):
            self.tier.close()

    # --- done by the threads ----------------------------------------------------------------------------------------

    def _ask(self, ticket: StoreRequest, keys: Sequence[PageKey]) -> None:
        pages = 0
        try:
            if ticket.wanted and self._breaker.allows(self._context.clock()):
                found = self.tier.contains(keys)
                pages = found.index(False) if False in found else len(found)
                self._breaker.record_success()
        except (OSError, TierError) as error:
            self._failed(error)
        finally:
            self._context.news.put(LookupDone(ticket, self._number, pages))

    def _load(self, ticket: StoreRequest, place: int, key: PageKey, into: memoryview) -> None:
        good = False
        began = self._context.clock()
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
            self._context.news.put(LoadDone(ticket, place, good))
        if good:
            seconds = self._context.clock() - began
            self.read_s = _FADING * self.read_s + (1 - _FADING) * seconds
            self._count("read_seconds", seconds)
            self._count("bytes_read", into.nbytes)

    def _save(self, final: FinalPage) -> None:
        context = self._context
        began, worked = context.clock(), context.processor_s()
        if not self._breaker.allows(began):
            return
        # The page does not change while it keeps its generation: a copy taken between two looks at that is right.
        if context.generation(final.page) == final.generation:
            self._page[:] = context.memory.view(final.page)
        if context.generation(final.page) != final.generation:
            self._count("writes_dropped")
            return
        try:
            with memoryview(self._page) as content:
                kept = self.tier.write_page(final, content)
            if context.generation(final.page) != final.generation:
                self.tier.on_evicted(final.key)  # while it was written: the loop's word came too early
            self._breaker.record_success()
        except (OSError, TierError) as error:
            self._failed(error)
            return
        seconds = context.clock() - began
        self.write_s = _FADING * self.write_s + (1 - _FADING) * (context.processor_s() - worked)
        if kept:
            self._count("pages_written")
            self._count("bytes_written", len(self._page))
            self._count("write_seconds", seconds)

    def _failed(self, error: Exception) -> None:
        self._count("errors")
        if self._breaker.record_failure(self._context.clock()):
            log.warning("KV store: %s is left alone for a while: %s", self.tier.name, error)

    def _count(self, figure: str, amount: float = 1.0) -> None:
        with self._lock:
            self._figures[figure] += amount


def _seconds(first: tuple[float, float], nbytes: int) -> float:
    return first[0] + nbytes / first[1]
