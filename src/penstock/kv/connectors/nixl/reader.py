"""The receiving end over NIXL: one thread that has pages read, copies them and verifies its copy.

Reads land in memory that only the process and this thread know.  A read that does not end in time cannot be cancelled:
the process is killed, and its memory is never used again.
"""

from __future__ import annotations

import contextlib
import logging
import math
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count

import msgspec

from penstock.errors import PageCorrupt
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import CORRUPT, FetchRequest, FetchResult
from penstock.kv.connectors.nixl.agent_client import (
    AddPeer,
    AgentClient,
    AgentGoneError,
    AgentReady,
    AgentSetup,
    AgentUnavailable,
    NixlUnavailableError,
    ReadDone,
    ReadPages,
)
from penstock.types import RequestId
from penstock.wire.gateway_messages import PageSource

log = logging.getLogger("penstock.worker")

FAILED = "NIXL"
"""The failure of a page that is to be fetched another way."""

BATCH_BYTES = 4 << 20
MOST_PAGES = 64
READS_IN_FLIGHT = 2
START_S = 20.0
REST_S = 10.0
"""After a failure everything goes another way for so long, and then until a new process has come up."""

SourceTransferKey = tuple[PageSource, RequestId, int]


@dataclass(slots=True, eq=False)
class NixlFetch:
    """A page to be fetched from an agent's memory."""

    request: FetchRequest
    agent: bytes
    address: int
    stopped: bool = False

    @property
    def key(self) -> SourceTransferKey:
        return self.request.source, self.request.frame.request, self.request.frame.epoch


class _AgentRun:
    """One run of the process, with the memory that it reads into."""

    def __init__(self, begin: AgentSetup) -> None:
        self._memory = os.memfd_create("penstock-nixl", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self._memory, begin.nbytes)
            self.mapped = mmap.mmap(self._memory, begin.nbytes)
            self.client = AgentClient(begin, self._memory)
        except Exception:
            os.close(self._memory)
            raise
        self.view = memoryview(self.mapped)
        self.peers: dict[bytes, int] = {}
        self.numbers = count()

    def close(self) -> None:
        self.client.close()
        os.close(self._memory)
        self.view.release()
        with contextlib.suppress(BufferError):
            self.mapped.close()


class NixlReader:
    """``land`` is called with each result, under this reader's lock, and never for stopped transfers."""

    def __init__(
        self, begin: AgentSetup, seal: PageChecksum, stall_s: float, land: Callable[[FetchResult], None]
    ) -> None:
        """``begin.nbytes`` is set here.  Starts nothing."""
        self._page = seal.layout.page_bytes
        self._batch = max(1, min(MOST_PAGES, BATCH_BYTES // self._page))
        room = -(-READS_IN_FLIGHT * self._batch * self._page // mmap.PAGESIZE) * mmap.PAGESIZE
        self._begin = msgspec.structs.replace(begin, nbytes=room)
        self._seal = seal
        self._stall_s = stall_s
        self._land = land
        self._changed = threading.Condition()  # of all that follows
        self._pending: deque[NixlFetch] = deque()
        self._flying: dict[
            int, tuple[int, list[NixlFetch]]
        ] = {}  # number -> half of the memory, what is to stand there
        self._closed = False
        self._agent: AgentClient | None = None
        self.resting_until = 0.0
        self.last_error = ""  # it rests
        self.pages = 0  # that it brought
        self.busy_s = 0.0  # of processor time, that the thread took
        self.settled = threading.Event()  # it has a process, or had to do without one
        self._reads = False  # its process has come up
        self._wanted = False  # since the last failure
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Starts the thread unless it has been started."""
        with self._changed:
            self._wanted = True
            self._changed.notify()
        if self._thread is not None or time.monotonic() < self.resting_until:
            return
        thread = threading.Thread(target=self._work, name="kv-nixl-take", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:  # no more threads: without this one it is not usable
            self.last_error = str(error)
            self.resting_until = time.monotonic() + REST_S
            log.warning("pages come by sockets for a while, NIXL cannot be had: %s", error)
            return
        self._thread = thread

    @property
    def usable(self) -> bool:
        """Whether pages can be queued."""
        return self._reads and not self._rests

    @property
    def _rests(self) -> bool:
        return time.monotonic() < self.resting_until

    @property
    def pid(self) -> int | None:
        """Process id of the agent."""
        agent = self._agent
        return None if agent is None else agent.pid

    def queue_page(self, errand: NixlFetch) -> None:
        """Asynchronous."""
        with self._changed:
            self._pending.append(errand)
            self._changed.notify()

    def stop_transfer(self, key: SourceTransferKey) -> None:
        """No page of this transfer is written once this returns."""
        with self._changed:
            for errand in (*self._pending, *(each for _, batch in self._flying.values() for each in batch)):
                errand.stopped = errand.stopped or errand.key == key
            self._pending = deque(errand for errand in self._pending if not errand.stopped)

    def close(self) -> None:
        """Idempotent."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            self._changed.notify()
            agent = self._agent
        if agent is not None:
            agent.kill()
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        life: _AgentRun | None = None
        while not self._closed:
            try:
                if life is None and self._rests:
                    self._lose()
                else:
                    life = life or self._born()
                    self._reads = True
                    self.settled.set()
                    self._turn(life)
            except Exception as error:  # noqa: BLE001 - unheard, it would leave pages waiting for ever
                self._give_up(error)
                if life is not None:
                    life.close()
                life = self._agent = None
                self.settled.set()
            self.busy_s = time.thread_time()
            with self._changed:
                while not (self._pending or self._flying or self._closed or (life is None and self._due)):
                    self._changed.wait(None if life is not None else self._patience_s)
        if life is not None:
            life.close()

    @property
    def _due(self) -> bool:
        """Whether another process may be started."""
        return self._wanted and not self._rests

    @property
    def _patience_s(self) -> float | None:
        """Seconds until another process may be started."""
        if not self._wanted or self.resting_until == math.inf:
            return None
        return max(0.0, self.resting_until - time.monotonic())

    def _born(self) -> _AgentRun:
        life = _AgentRun(self._begin)
        with self._changed:
            self._agent = life.client
            closed = self._closed
        if closed:
            life.client.kill()
        try:
            first = life.client.receive(START_S)
            if isinstance(first, AgentUnavailable):
                raise NixlUnavailableError(first.reason)
            if not isinstance(first, AgentReady):
                raise AgentGoneError(f"not ready in {START_S:g} s")
        except Exception:
            life.close()
            raise
        return life

    def _turn(self, life: _AgentRun) -> None:
        """Submit as many reads as may be in flight, and process the next result."""
        while (batch := self._next(life)) is not None:
            life.client.send(batch)
        if self._flying:
            done = life.client.receive(self._stall_s)
            if not isinstance(done, ReadDone):
                raise AgentGoneError(f"a read did not end in {self._stall_s:g} s")
            if done.number not in self._flying:
                raise AgentGoneError(f"it reports read {done.number}, which was not requested")
            if done.failure is not None:
                raise AgentGoneError(done.failure)
            self._arrived(life, done.number)

    def _next(self, life: _AgentRun) -> ReadPages | None:
        with self._changed:
            if not self._pending or len(self._flying) >= READS_IN_FLIGHT:
                return None
            agent = self._pending[0].agent
            batch: list[NixlFetch] = []
            while self._pending and self._pending[0].agent == agent and len(batch) < self._batch:
                batch.append(self._pending.popleft())
            half = next(
                each for each in range(READS_IN_FLIGHT) if each not in {used for used, _ in self._flying.values()}
            )
            number = next(life.numbers)
            self._flying[number] = half, batch
        if agent not in life.peers:
            life.peers[agent] = len(life.peers)
            life.client.send(AddPeer(life.peers[agent], agent))
        offsets = [self._place(half, slot) for slot in range(len(batch))]
        return ReadPages(number, life.peers[agent], self._page, [each.address for each in batch], offsets)

    def _place(self, half: int, slot: int) -> int:
        return (half * self._batch + slot) * self._page

    def _arrived(self, life: _AgentRun, number: int) -> None:
        half, batch = self._flying[number]
        for slot, errand in enumerate(batch):
            start = self._place(half, slot)
            with self._changed, life.view[start : start + self._page] as page:
                if not errand.stopped:
                    self.pages += 1
                    self._land(FetchResult(errand.request, self._copied(errand, page)))
                    errand.stopped = True  # the page is the receiver's now: it is not fetched again, whatever fails
        with self._changed:
            del self._flying[number]

    def _copied(self, errand: NixlFetch, page: memoryview) -> str | None:
        try:
            self._seal.copy_checked(errand.request.frame, page, errand.request.into)
        except PageCorrupt:
            return CORRUPT
        return None

    def _give_up(self, error: Exception) -> None:
        """Use TCP for a while; for good where NIXL is missing."""
        with self._changed:
            self._reads = self._wanted = False
            self.last_error = str(error) or type(error).__name__
            self.resting_until = time.monotonic() + REST_S
            if isinstance(error, NixlUnavailableError):
                self.resting_until = math.inf
                log.warning("pages come by sockets, NIXL cannot be had: %s", self.last_error)
            self._lose()

    def _lose(self) -> None:
        """Return all queued fetches as failed, to be fetched another way."""
        with self._changed:
            lost = [each for _, batch in self._flying.values() for each in batch] + list(self._pending)
            self._flying.clear()
            self._pending.clear()
            for errand in lost:
                if not errand.stopped:
                    self._land(FetchResult(errand.request, FAILED))
