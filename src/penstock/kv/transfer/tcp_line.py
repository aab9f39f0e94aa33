"""One connection over which a receiver fetches pages, and the thread that serves it.

Bytes go from the socket into the receiver's own pages, with nothing between, and are hashed while they are in the
cache: in C++, for as many pages as come (``kernels.pages.Arrivals``).  A lock is held there while a piece is written
and never while it is waited for, so that ``settle`` returns at once and nothing more is written of what was stopped
before it.  Two batches are asked for ahead, so that the sender need not wait.  What is to be fetched next, and what
becomes of it when the connection breaks, is decided elsewhere (``Errands``).
"""

from __future__ import annotations

import logging
import secrets
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from hmac import compare_digest
from typing import Any, Protocol

from penstock.config.limits import HandOverConfig
from penstock.errors import ConfigError, ProtocolError
from penstock.kernels.host_ops import Arrivals
from penstock.kv.transfer import tcp_frames as frames
from penstock.kv.transfer.port import CORRUPT, PageSeal, Wanted
from penstock.kv.transfer.tcp_wire import HUNG_UP, Wire
from penstock.types import RequestId
from penstock.wire.messages import PageSource
from penstock.wire.page_doors import PagesAt

log = logging.getLogger("penstock.worker")

AHEAD = 2
"""Batches asked for at once."""

THROWN_AWAY_BYTES = 1 << 20
"""As much at once of what nobody wants any more."""

FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.02, 0.5
"""Before a lost connection is made anew, doubling."""

LOOPBACK = "127.0.0.1"

Key = tuple[RequestId, int]


@dataclass(slots=True, eq=False)
class Order:
    """One page."""

    wanted: Wanted
    tries: int = 0  # connections that were lost over it

    @property
    def key(self) -> Key:
        """Whose page it is."""
        return self.wanted.frame.request, self.wanted.frame.epoch


@dataclass(slots=True, eq=False)
class Batch:
    """Pages of one leg that are asked for in one go."""

    key: Key
    door: PagesAt
    orders: list[Order]
    landed: int = 0  # of the orders, from the first
    stopped: bool = False  # nobody wants them any more: what comes is thrown away
    arrivals: Arrivals | None = None  # what is being written


class Errands(Protocol):
    """What there is to fetch from one source."""

    source: PageSource
    config: HandOverConfig
    seal: PageSeal
    sealed: bool

    def take(self, line: Line, wait_s: float) -> Batch | None:
        """Something to do.  None when there is nothing for ``wait_s``; a line that waited in vain is to end."""
        ...

    def landed(self, batch: Batch, failures: Sequence[str | None]) -> None:
        """The next pages of a batch are here, or others are: for each what is wrong with it."""
        ...

    def worked(self, seconds: float) -> None:
        """So much processor time was spent."""
        ...

    def came(self, line: Line, batch: Batch, seconds: float) -> None:
        """All of a batch is here, so many seconds after it was asked for, or after the one before it on that line."""
        ...

    def refused(self, line: Line, batch: Batch) -> None:
        """The sender hands these out no more."""
        ...

    def lost(self, line: Line, why: str) -> bool:
        """The connection broke.  False: it is not to be made anew."""
        ...


def host_of(endpoint: str) -> str:
    """Where a mailbox is: of ``tcp://host:port`` the host, the loopback for one on this host."""
    kind, _, rest = endpoint.partition("://")
    return rest.rpartition(":")[0].strip("[]") if kind == "tcp" else LOOPBACK


class Line:
    """Ends by itself when there has been nothing to fetch for a while."""

    def __init__(self, errands: Errands) -> None:
        self._errands = errands
        self._writing = threading.Lock()
        self._ended = threading.Event()
        self._wire: Wire | None = None
        self._thread = threading.Thread(target=self._run, name=f"pages-from-{errands.source.worker}", daemon=True)

    def start(self) -> None:
        """Once."""
        self._thread.start()

    def settle(self, batch: Batch) -> None:
        """Nothing more is written of a batch that was stopped, once this returns."""
        with self._writing:
            arrivals = batch.arrivals
        if arrivals is not None:
            arrivals.stop()

    def hang_up(self) -> None:
        """End soon."""
        self._ended.set()
        wire = self._wire
        if wire is not None:
            wire.hang_up()

    def _run(self) -> None:
        pause = FIRST_PAUSE_S
        while True:
            began = time.monotonic()
            try:
                self._serve()
            except Exception as error:  # whatever ends this thread unheard leaves prompts waiting
                if not isinstance(error, OSError | ProtocolError | ConfigError):
                    log.exception("a connection over which pages are fetched failed")
                if not self._errands.lost(self, str(error) or type(error).__name__):
                    return
                pause = FIRST_PAUSE_S if time.monotonic() - began > LONGEST_PAUSE_S else min(2 * pause, LONGEST_PAUSE_S)
                if self._ended.wait(pause):
                    return
            else:
                return

    def _serve(self) -> None:
        """Fetch until there is nothing to fetch."""
        errands, flying, before = self._errands, deque[Batch](), time.thread_time()
        talk: _Talk | None = None
        try:
            while True:
                room = len(flying) < AHEAD
                batch = errands.take(self, 0.0 if flying else errands.config.peer_idle_s) if room else None
                if batch is not None:
                    talk = talk or _Talk(errands, self._connect(batch.door.port), self._writing)
                    talk.ask(batch)
                    flying.append(batch)
                elif flying and talk is not None:
                    seconds = talk.receive(flying[0])
                    (errands.refused(self, flying[0]) if seconds is None else errands.came(self, flying[0], seconds))
                    flying.popleft()
                    errands.worked((spent := time.thread_time()) - before)
                    before = spent
                else:
                    return
        finally:
            wire, self._wire = self._wire, None
            if wire is not None:
                wire.close()

    def _connect(self, port: int) -> Wire:
        errands = self._errands
        host, greeting_s = host_of(errands.source.endpoint), errands.config.greeting_s
        self._wire = wire = Wire(socket.create_connection((host, port), timeout=greeting_s), greeting_s)
        return wire


class _Talk:
    """What is said on one connection."""

    def __init__(self, errands: Errands, wire: Wire, writing: threading.Lock) -> None:
        """Waits for the sender's greeting."""
        self._errands = errands
        self._wire = wire
        self._writing = writing
        self._sealed = errands.sealed
        self._nonce = secrets.token_bytes(frames.NONCE_BYTES)
        self._pair = frames.Pair(frames.read_hello(wire.exactly(frames.HELLO_BYTES), sealed=self._sealed), self._nonce)
        wire.patience_s = errands.config.fetch_stall_s
        self._attached: set[int] = set()  # legs that the sender knows us to have the token of, or is about to
        self._attaching: set[int] = set()  # numbers of the batches asked for with an ATTACH that is not answered yet
        self._cipher: Any = None
        self._number = 0  # of the last batch that was asked for
        self._expected = 0  # of the one that comes next
        self._sealed_pages = 0
        self._asked = self._came = 0.0
        self._page_bytes = errands.seal.layout.page_bytes
        scratch = self._page_bytes + frames.TAG_BYTES if self._sealed else THROWN_AWAY_BYTES
        self._scratch = memoryview(bytearray(scratch))

    def ask(self, batch: Batch) -> None:
        """Ask for all pages of a batch."""
        leg, token = batch.door.leg, batch.door.token
        parts: list[bytes] = []
        self._number = number = (self._number + 1) & 0xFFFF_FFFF
        if leg not in self._attached:
            if self._sealed and self._cipher is None:
                self._cipher = self._pair.cipher(token, leg)
            self._attached.add(leg)
            self._attaching.add(number)
            parts = [frames.head(frames.ATTACH, leg), self._nonce, self._pair.receiver_proof(token, leg)]
        pages = [order.wanted.frame.page for order in batch.orders]
        self._asked = time.monotonic()
        self._wire.send([b"".join((*parts, frames.fetch(leg, number, pages)))])

    def receive(self, batch: Batch) -> float | None:
        """Take the batch that was asked for first of those that have not come.  Seconds that it took; None: refused."""
        leg, count = batch.door.leg, len(batch.orders)
        self._expected = (self._expected + 1) & 0xFFFF_FFFF
        refused = self._expected in self._attaching and not self._is_attached(batch.door)
        self._attaching.discard(self._expected)
        answer = frames.read_head(self._wire.exactly(frames.HEAD_BYTES))
        if answer == (frames.REFUSED, 0, self._expected, leg):
            self._attached.discard(leg)
            return None
        if refused or answer != (frames.PAGES, count, self._expected, leg):
            raise ProtocolError("an answer to another question")
        if self._sealed:
            for _ in range(count):
                self._sealed_page(batch)
        else:
            self._pages(batch)
        began, self._came = max(self._came, self._asked), time.monotonic()
        return self._came - began

    def _is_attached(self, door: PagesAt) -> bool:
        """The sender's own proof."""
        kind, _, _, leg = frames.read_head(self._wire.exactly(frames.HEAD_BYTES))
        if (kind, leg) == (frames.REFUSED, door.leg):
            return False
        if (kind, leg) != (frames.ATTACHED, door.leg):
            raise ProtocolError("no answer to a greeting")
        proof = self._wire.exactly(frames.PROOF_BYTES)
        if not compare_digest(proof, self._pair.sender_proof(door.token, door.leg)):
            raise ProtocolError("whoever answers there is not the sender")
        return True

    def _pages(self, batch: Batch) -> None:
        """As they are, into where they are to stand."""
        with self._writing:  # who stops it afterwards finds what to stop
            arrivals = batch.arrivals = Arrivals([order.wanted.into for order in batch.orders])
            if batch.stopped:
                arrivals.stop()
        while arrivals.left and not batch.stopped:
            got = arrivals.take(self._wire.sock.fileno(), self._wire.patience_s)
            if got < 0:
                raise ConnectionError(HUNG_UP)
            self._tell(batch, arrivals)
            if got == 0 and not batch.stopped:
                raise self._wire.silence()
        left = arrivals.left
        while left:
            left -= self._wire.some(self._scratch[:left])

    def _tell(self, batch: Batch, arrivals: Arrivals) -> None:
        """What is there now and was not before."""
        suffix, failures = self._errands.seal.suffix, list[str | None]()
        for page in range(batch.landed, arrivals.done):
            frame = batch.orders[page].wanted.frame
            right = arrivals.checksum(page, suffix(frame.generation)) == frame.checksum
            failures.append(None if right else CORRUPT)
        if failures:
            self._errands.landed(batch, failures)

    def _sealed_page(self, batch: Batch) -> None:
        """Into a place beside, and from there, proved and in clear, to where it is to stand."""
        wanted = batch.orders[batch.landed].wanted
        self._wire.fill(self._scratch)
        nonce = frames.nonce_of(self._sealed_pages)
        self._sealed_pages += 1
        names = frames.names_of(batch.door.leg, wanted.frame.page)
        with self._writing:
            if not batch.stopped:
                self._open(nonce, names, wanted.into)
        right = batch.stopped or self._errands.seal.check(wanted.frame, wanted.into)
        self._errands.landed(batch, (None if right else CORRUPT,))

    def _open(self, nonce: bytes, names: bytes, into: memoryview) -> None:
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(nonce, self._scratch, names, into)
        except InvalidTag:
            raise ProtocolError("a page that was changed on its way") from None
