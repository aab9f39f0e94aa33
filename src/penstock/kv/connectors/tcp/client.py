"""The receiving end of TCP fetches: per source, the queue of pages and the connections that fetch them.

A thread per connection writes bytes from the socket straight into the receiver's pages and hashes them while they are
in the cache, in C++ for whole batches (``Arrivals``).  A lock is held while a piece is written and never while waiting
for it, so ``stop_batch`` returns at once and nothing of a stopped batch is written afterwards.  Two batches are
requested ahead so that the sender need not wait.  A batch is about what arrives in ``BATCH_S``: a slow link is not
filled for seconds with pages that may be cancelled.
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hmac import compare_digest
from typing import Any, Protocol

from penstock.config.limits import KvTransferConfig
from penstock.errors import ConfigError, ProtocolError
from penstock.kernels.host_ops import Arrivals
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import CORRUPT, REFUSED, FetchRequest, FetchResult
from penstock.kv.connectors.tcp import protocol as frames
from penstock.kv.connectors.tcp.protocol import HUNG_UP, MAX_PAGES, TimedSocket
from penstock.types import RequestId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import FetchTicket

BATCHES_IN_FLIGHT = 2
"""Batches asked for at once."""

DISCARD_BYTES = 1 << 20
"""Bytes of stopped batches that are discarded at once."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Before a lost connection is made anew, doubling."""

LOOPBACK = "127.0.0.1"

TransferKey = tuple[RequestId, int]


@dataclass(slots=True, eq=False)
class PageFetch:
    """One page, and how many connections were lost while fetching it."""

    request: FetchRequest
    tries: int = 0  # connections that were lost over it

    @property
    def key(self) -> TransferKey:
        """The transfer that the page belongs to."""
        return self.request.frame.request, self.request.frame.epoch


@dataclass(slots=True, eq=False)
class FetchBatch:
    """Pages of one transfer that are requested together."""

    key: TransferKey
    ticket: FetchTicket
    fetches: list[PageFetch]
    fetched: int = 0  # of the orders, from the first
    stopped: bool = False  # not wanted any more: what arrives is discarded
    arrivals: Arrivals | None = None  # what is being written


class FetchQueue(Protocol):
    """What a connection asks of its source's queue, and reports to it."""

    source: PageSource
    config: KvTransferConfig
    seal: PageChecksum
    sealed: bool

    def next_batch(self, line: FetchConnection, wait_s: float) -> FetchBatch | None:
        """The next batch.  None when none comes within ``wait_s``; a connection that waited in vain is to end."""
        ...

    def on_pages_fetched(self, batch: FetchBatch, failures: Sequence[str | None]) -> None:
        """The next pages of a batch have been received: for each the failure, or None."""
        ...

    def add_cpu_time(self, seconds: float) -> None:
        """Add processor seconds that a connection has spent."""
        ...

    def on_batch_fetched(self, line: FetchConnection, batch: FetchBatch, seconds: float) -> None:
        """A batch is complete, ``seconds`` after its request or after the previous batch of that connection."""
        ...

    def on_batch_refused(self, line: FetchConnection, batch: FetchBatch) -> None:
        """The sender has revoked access to these pages."""
        ...

    def on_connection_lost(self, line: FetchConnection, why: str) -> bool:
        """The connection broke.  False: do not reconnect."""
        ...


def host_of(endpoint: str) -> str:
    """The host of an endpoint ``tcp://host:port``; the loopback address for an endpoint on this host."""
    kind, _, rest = endpoint.partition("://")
    return rest.rpartition(":")[0].strip("[]") if kind == "tcp" else LOOPBACK


class FetchConnection:
    """Ends by itself after a while without work."""

    def __init__(self, errands: FetchQueue) -> None:
        self._errands = errands
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._wire: TimedSocket | None = None
        self._thread = threading.Thread(target=self._run, name=f"pages-from-{errands.source.worker}", daemon=True)

    def start(self) -> None:
        """To be called once."""
        self._thread.start()

    def stop_batch(self, batch: FetchBatch) -> None:
        """No page of a stopped batch is written once this returns."""
        with self._writing:
            arrivals = batch.arrivals
        if arrivals is not None:
            arrivals.stop()

    def shut_down(self) -> None:
        """End soon."""
        self._ended.set()
        wire = self._wire
        if wire is not None:
            wire.shut_down()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                self._serve()
            except Exception as error:  # whatever ends this thread unheard leaves prompts waiting
                if not isinstance(error, OSError | ProtocolError | ConfigError):
                    log.exception("a connection over which pages are fetched failed")
                if not self._errands.on_connection_lost(self, str(error) or type(error).__name__):
                    return
                pause = FIRST_PAUSE_S if time.monotonic() - began > LONGEST_PAUSE_S else min(2 * pause, LONGEST_PAUSE_S)
                if self._ended.wait(pause):
                    return
            else:
                return

    def _serve(self) -> None:
        """Fetch until the queue is empty."""
        errands, flying, before = self._errands, deque[FetchBatch](), time.thread_time()
        talk: _FetchSession | None = None
        try:
            while True:
                room = len(flying) < BATCHES_IN_FLIGHT
                batch = errands.next_batch(self, 0.0 if flying else errands.config.peer_idle_s) if room else None
                if batch is not None:
                    talk = talk or _FetchSession(errands, self._connect(batch.ticket.port), self._writing)
                    talk.ask(batch)
                    flying.append(batch)
                elif flying and talk is not None:
                    seconds = talk.receive(flying[0])
                    (
                        errands.on_batch_refused(self, flying[0])
                        if seconds is None
                        else errands.on_batch_fetched(self, flying[0], seconds)
                    )
                    flying.popleft()
                    errands.add_cpu_time((spent := time.thread_time()) - before)
                    before = spent
                else:
                    return
        finally:
            wire, self._wire = self._wire, None
            if wire is not None:
                wire.close()

    def _connect(self, port: int) -> TimedSocket:
        errands = self._errands
        host, greeting_s = host_of(errands.source.endpoint), errands.config.greeting_s
        self._wire = wire = TimedSocket(socket.create_connection((host, port), timeout=greeting_s), greeting_s)
        return wire


class _FetchSession:
    """The protocol on one connection."""

    def __init__(self, errands: FetchQueue, wire: TimedSocket, writing: threading.Lock) -> None:
        """Waits for the sender's HELLO."""
        self._errands = errands
        self._wire = wire
        self._writing = writing
        self._sealed = errands.sealed
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self._pair = frames.Handshake(
            frames.parse_hello(wire.receive_exactly(frames.HELLO_BYTES), sealed=self._sealed), self._nonce
        )
        wire.timeout_s = errands.config.fetch_stall_s
        self._attached: set[int] = set()  # grants that the sender knows us to have the token of, or is about to
        self._attaching: set[int] = set()  # numbers of the batches asked for with an ATTACH that is not answered yet
        self._cipher: Any = None
        self._number = 0  # of the last batch that was asked for
        self._expected = 0  # of the one that comes next
        self._sealed_pages = 0
        self._asked = self._came = 0.0
        self._page_bytes = errands.seal.layout.page_bytes
        scratch = self._page_bytes + frames.TAG_BYTES if self._sealed else DISCARD_BYTES
        self._scratch = memoryview(bytearray(scratch))

    def ask(self, batch: FetchBatch) -> None:
        """Request all pages of a batch."""
        grant_id, token = batch.ticket.grant_id, batch.ticket.token
        parts: list[bytes] = []
        self._number = number = (self._number + 1) & 0xFFFF_FFFF
        if grant_id not in self._attached:
            if self._sealed and self._cipher is None:
                self._cipher = self._pair.cipher(token, grant_id)
            self._attached.add(grant_id)
            self._attaching.add(number)
            parts = [frames.pack_head(frames.ATTACH, grant_id), self._nonce, self._pair.receiver_proof(token, grant_id)]
        pages = [order.request.frame.page for order in batch.fetches]
        self._asked = time.monotonic()
        self._wire.send([b"".join((*parts, frames.pack_fetch(grant_id, number, pages)))])

    def receive(self, batch: FetchBatch) -> float | None:
        """Receive the oldest requested batch.  Returns seconds, or None if it was refused."""
        grant_id, count = batch.ticket.grant_id, len(batch.fetches)
        self._expected = (self._expected + 1) & 0xFFFF_FFFF
        refused = self._expected in self._attaching and not self._is_attached(batch.ticket)
        self._attaching.discard(self._expected)
        answer = frames.parse_head(self._wire.receive_exactly(frames.HEAD_BYTES))
        if answer == (frames.REFUSED, 0, self._expected, grant_id):
            self._attached.discard(grant_id)
            return None
        if refused or answer != (frames.PAGES, count, self._expected, grant_id):
            raise ProtocolError("an answer to another question")
        if self._sealed:
            for _ in range(count):
                self._sealed_page(batch)
        else:
            self._pages(batch)
        began, self._came = max(self._came, self._asked), time.monotonic()
        return self._came - began

    def _is_attached(self, ticket: FetchTicket) -> bool:
        """Whether the sender has proved that it has the token."""
        kind, _, _, grant_id = frames.parse_head(self._wire.receive_exactly(frames.HEAD_BYTES))
        if (kind, grant_id) == (frames.REFUSED, ticket.grant_id):
            return False
        if (kind, grant_id) != (frames.ATTACHED, ticket.grant_id):
            raise ProtocolError("no answer to a greeting")
        proof = self._wire.receive_exactly(frames.PROOF_BYTES)
        if not compare_digest(proof, self._pair.sender_proof(ticket.token, ticket.grant_id)):
            raise ProtocolError("the peer that answers there is not the sender")
        return True

    def _pages(self, batch: FetchBatch) -> None:
        """Receive plain pages into their destination."""
        with self._writing:  # who stops it afterwards finds what to stop
            arrivals = batch.arrivals = Arrivals([order.request.into for order in batch.fetches])
            if batch.stopped:
                arrivals.stop()
        while arrivals.left and not batch.stopped:
            got = arrivals.receive(self._wire.sock.fileno(), self._wire.timeout_s)
            if got < 0:
                raise ConnectionError(HUNG_UP)
            self._report_pages(batch, arrivals)
            if got == 0 and not batch.stopped:
                raise self._wire.stall_error()
        left = arrivals.left
        while left:
            left -= self._wire.receive_some(self._scratch[:left])

    def _report_pages(self, batch: FetchBatch, arrivals: Arrivals) -> None:
        """Report pages that are complete now."""
        suffix, failures = self._errands.seal.suffix, list[str | None]()
        for page in range(batch.fetched, arrivals.done):
            frame = batch.fetches[page].request.frame
            right = arrivals.checksum(page, suffix(frame.generation)) == frame.checksum
            failures.append(None if right else CORRUPT)
        if failures:
            self._errands.on_pages_fetched(batch, failures)

    def _sealed_page(self, batch: FetchBatch) -> None:
        """Receive an encrypted page into a scratch buffer and decrypt it into its destination."""
        wanted = batch.fetches[batch.fetched].request
        self._wire.receive_into(self._scratch)
        nonce = frames.page_nonce(self._sealed_pages)
        self._sealed_pages += 1
        names = frames.page_associated_data(batch.ticket.grant_id, wanted.frame.page)
        with self._writing:
            if not batch.stopped:
                self._open(nonce, names, wanted.into)
        right = batch.stopped or self._errands.seal.matches(wanted.frame, wanted.into)
        self._errands.on_pages_fetched(batch, (None if right else CORRUPT,))

    def _open(self, nonce: bytes, names: bytes, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(nonce, self._scratch, names, into)
        except InvalidTag:
            raise ProtocolError("a page that was changed on its way") from None


log = logging.getLogger("penstock.worker")

BATCH_S = 0.02
BATCH_BYTES = 8 << 20
"""Most of one go."""

INITIAL_RATE = 50e6
"""Bytes a second of a connection over which nothing has come yet."""

_SMOOTHING = 0.3


@dataclass(slots=True, eq=False)
class _ConnectionBatches:
    """A connection and the batches that it has requested."""

    line: FetchConnection
    flying: list[FetchBatch] = field(default_factory=list[FetchBatch])


class SourcePool(FetchQueue):
    """All fetches from one source and its connections.  ``busy_s``: processor seconds of the connections.

    ``land`` is called with results by any thread, never for stopped transfers.  It is called under this pool's lock and
    may take no lock that is held while the pool is called.
    """

    def __init__(
        self,
        source: PageSource,
        config: KvTransferConfig,
        seal: PageChecksum,
        sealed: bool,
        land: Callable[[Sequence[FetchResult]], None],
    ) -> None:
        self.source = source
        self.config = config
        self.seal = seal
        self.sealed = sealed
        self._land = land
        self._changed = threading.Condition()  # of all that follows
        self._doors: dict[TransferKey, FetchTicket] = {}
        self._pending: deque[PageFetch] = deque()
        self._ways: dict[FetchConnection, _ConnectionBatches] = {}
        self.busy_s = 0.0
        self._idle = 0  # lines that wait for something to do
        self._rate = INITIAL_RATE
        self._closed = False

    # --- for the worker's loop ---------------------------------------------------------------------------------------

    def add_ticket(self, at: FetchTicket) -> None:
        """Where the pages of a transfer are."""
        with self._changed:
            self._doors[at.request, at.epoch] = at

    def has_ticket(self, key: TransferKey) -> bool:
        """Whether the pages of this transfer can be fetched."""
        return key in self._doors

    def queue_pages(self, pages: Sequence[FetchRequest]) -> None:
        """Queue pages of transfers with a ticket."""
        with self._changed:
            for wanted in pages:
                if self._doors[wanted.frame.request, wanted.frame.epoch].sealed == self.sealed:
                    self._pending.append(PageFetch(wanted))
                else:
                    self._land((FetchResult(wanted, "its pages would not come as agreed"),))
            if not self._pending:
                return
            if self._idle:
                self._changed.notify()
            elif len(self._ways) < self.config.connections:
                self._open()

    def stop_transfer(self, key: TransferKey) -> None:
        """No page of this transfer is written once this returns."""
        with self._changed:
            self._doors.pop(key, None)
            if any(order.key == key for order in self._pending):
                self._pending = deque(order for order in self._pending if order.key != key)
            writing: list[tuple[FetchConnection, FetchBatch]] = []
            for way in self._ways.values():
                for batch in way.flying:
                    if batch.key == key:
                        batch.stopped = True
                        writing.append((way.line, batch))
        for line, batch in writing:
            line.stop_batch(batch)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to fetch and no connection."""
        with self._changed:
            return not (self._doors or self._pending or self._ways)

    def close(self) -> None:
        """Close all connections and drop all fetches."""
        with self._changed:
            self._closed = True
            self._pending.clear()
            lines = list(self._ways)
            self._changed.notify_all()
        for line in lines:
            line.shut_down()

    # --- for its connections -----------------------------------------------------------------------------------------

    def next_batch(self, line: FetchConnection, wait_s: float) -> FetchBatch | None:
        with self._changed:
            if not self._pending and not self._closed and wait_s:
                self._idle += 1
                self._changed.wait_for(lambda: self._pending or self._closed, wait_s)
                self._idle -= 1
            if self._closed or not self._pending:
                if wait_s:
                    self._ways.pop(line, None)
                return None
            batch = self._batch()
            self._ways[line].flying.append(batch)
            if self._pending and self._idle:
                self._changed.notify()
            elif self._pending and len(self._ways) < self.config.connections:
                self._open()
            return batch

    def on_batch_fetched(self, line: FetchConnection, batch: FetchBatch, seconds: float) -> None:
        nbytes = len(batch.fetches) * self.seal.layout.page_bytes
        with self._changed:
            self._ways[line].flying.remove(batch)
            self._rate += _SMOOTHING * (nbytes / max(seconds, 1e-6) - self._rate)

    def on_batch_refused(self, line: FetchConnection, batch: FetchBatch) -> None:
        with self._changed:
            self._ways[line].flying.remove(batch)
            if not batch.stopped:
                self._fail(batch.fetches, REFUSED)

    def on_pages_fetched(self, batch: FetchBatch, failures: Sequence[str | None]) -> None:
        with self._changed:  # a result after a stop would be taken for one of the next pull
            first, batch.fetched = batch.fetched, batch.fetched + len(failures)
            if not batch.stopped:
                orders = batch.fetches[first : batch.fetched]
                self._land([FetchResult(order.request, why) for order, why in zip(orders, failures, strict=True)])

    def add_cpu_time(self, seconds: float) -> None:
        with self._changed:
            self.busy_s += seconds

    def on_connection_lost(self, line: FetchConnection, why: str) -> bool:
        """Queue the connection's batches again.  Responses come in the order of requests, so only the first batch
        can have caused the loss, and only it is charged a try."""
        with self._changed:
            way = self._ways[line]
            given_up = self._charge(way.flying[0]) if way.flying else []
            hopeless = {order.key for order in given_up}
            for batch in reversed(way.flying):
                if not batch.stopped and batch.key in self._doors:
                    self._pending.extendleft(reversed(batch.fetches[batch.fetched :]))
            if hopeless:
                self._pending = deque(order for order in self._pending if order.key not in hopeless)
            way.flying.clear()
            self._fail(given_up, f"its pages cannot be fetched: {why}")
            self._changed.notify()
            return not self._closed

    # --- inside ------------------------------------------------------------------------------------------------------

    def _charge(self, batch: FetchBatch) -> list[PageFetch]:
        """Charge a lost connection to a batch.  Returns the pages that are given up."""
        left = [] if batch.stopped else batch.fetches[batch.fetched :]
        for order in left:
            order.tries += 1
        return [order for order in left if order.tries >= self.config.fetch_tries]

    def _open(self) -> None:
        """Open another connection if possible; without any, all queued pages fail."""
        line = FetchConnection(self)
        self._ways[line] = _ConnectionBatches(line)
        try:
            line.start()
        except RuntimeError as error:  # the system gives no more threads
            log.warning("no further connection for pages of %s: %s", self.source.worker, error)
            del self._ways[line]
            if not self._ways:
                waiting, self._pending = list(self._pending), deque()
                self._fail(waiting, f"its pages cannot be fetched: {error}")

    def _batch(self) -> FetchBatch:
        """The oldest queued page and those of the same transfer that follow it."""
        size = self.seal.layout.page_bytes
        most = min(MAX_PAGES, max(1, int(min(BATCH_BYTES, self._rate * BATCH_S)) // size))
        orders = [self._pending.popleft()]
        key = orders[0].key
        while self._pending and len(orders) < most and self._pending[0].key == key:
            orders.append(self._pending.popleft())
        return FetchBatch(key, self._doors[key], orders)

    def _fail(self, orders: list[PageFetch], why: str) -> None:
        self._land([FetchResult(order.request, why) for order in orders])
