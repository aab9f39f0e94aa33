"""Pages over NIXL where both ends have it, over TCP otherwise: ``--transfer nixl``.

Both ends have a ``TcpConnector`` and are called by its name, so a worker without NIXL exchanges pages with one that has
it.  Pages that NIXL fails to bring are fetched over TCP; so are those of the first transfer, while its processes start.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections import deque
from collections.abc import Sequence

import msgspec

from penstock.config.limits import KvTransferConfig
from penstock.errors import PageCorrupt
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, FetchResult, KvConnector
from penstock.kv.connectors.nixl.agent_client import AgentClient, AgentGoneError, AgentReady, AgentSetup
from penstock.kv.connectors.nixl.reader import FAILED, NixlFetch, NixlReader, SourceTransferKey
from penstock.kv.connectors.tcp.connector import TcpConnector
from penstock.kv.page_memory import KvMemory
from penstock.types import RequestId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import MAX_AGENT_BYTES, FetchTicket, PageReady


class NixlExporter:
    """The sending end: a process that has mapped this worker's pages.  Without NIXL, and after a failure, ``ready``
    is None."""

    def __init__(self, begin: AgentSetup, memory: int) -> None:
        """``memory``: descriptor of the pages; stays the caller's.  Starts nothing."""
        self.ready: AgentReady | None = None
        self.settled = threading.Event()  # the process has come up, or has not
        self._begin = begin
        self._memory = memory
        self._agent: AgentClient | None = None
        self._thread: threading.Thread | None = None

    @property
    def pid(self) -> int | None:
        """Process id of the agent."""
        return None if self._agent is None else self._agent.pid

    def start(self) -> None:
        """Starts the process unless it has been started."""
        if self.settled.is_set() or self._thread is not None:
            return
        agent: AgentClient | None = None
        try:
            agent = AgentClient(self._begin, self._memory)
            thread = threading.Thread(target=self._listen, args=(agent,), name="kv-nixl-give", daemon=True)
            thread.start()
        except (OSError, RuntimeError) as error:  # no more descriptors or threads
            if agent is not None:
                agent.close()
            log.warning("pages are given by sockets, NIXL cannot be had: %s", error)
            self.settled.set()
            return
        self._agent, self._thread = agent, thread

    def close(self) -> None:
        """No page can be read any more.  Idempotent."""
        if self._agent is not None and self._thread is not None:
            self._agent.kill()
            self._thread.join()
            self._agent.close()

    def _listen(self, agent: AgentClient) -> None:
        try:
            first = agent.receive(None)
            if not isinstance(first, AgentReady) or len(first.agent) > MAX_AGENT_BYTES:
                reason = getattr(first, "reason", "it says too much")
                log.warning("pages are given by sockets, NIXL cannot be had: %s", reason)
                return
            self.ready = first
            self.settled.set()
            agent.receive(None)
        except AgentGoneError:
            if self.ready is not None:
                log.warning("pages are given by sockets from now on: the process of NIXL has ended")
        finally:
            self.ready = None
            self.settled.set()


log = logging.getLogger("penstock.worker")

MOST_PAGE = 1 << 40
_WITHOUT_RDMA = {"tcp", "sm", "shm", "posix", "sysv", "cma", "self"}


def needs_writing(transports: str) -> bool:
    """Whether exported pages must be mapped writable.  RDMA cards register no other memory, though no peer writes
    there."""
    return not {each.strip() for each in transports.split(",")} <= _WITHOUT_RDMA


class NixlConnector(KvConnector):
    """To be created after the last fork: it has threads and processes."""

    def __init__(self, tcp: TcpConnector, own: KvMemory, seal: PageChecksum, config: KvTransferConfig) -> None:
        """``own`` is shared memory (``KvMemoryFile.map_own``).  Without NIXL everything goes over ``tcp``, which is
        closed with this connector."""
        self.name = tcp.name
        self.own = own
        self.seal = seal
        self._tcp = tcp
        self._doors: dict[SourceTransferKey, FetchTicket] = {}
        self._without: set[PageSource] = set()  # sources without NIXL that have been logged
        self._lock = threading.Lock()  # of what has landed
        self._landed: deque[FetchResult] = deque()
        self._event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        begin = AgentSetup(
            name=f"penstock-{os.urandom(8).hex()}",
            transports=config.nixl_transports,
            devices=config.nixl_devices,
            exports=True,
            writable=needs_writing(config.nixl_transports),
            nbytes=own.mapped_bytes,
            descriptors=(-1, -1),
        )
        self.exporter = NixlExporter(begin, own.shared_descriptor)
        taking = msgspec.structs.replace(begin, name=f"{begin.name}-takes", exports=False, writable=True)
        self.reader = NixlReader(taking, seal, config.fetch_stall_s, self._land)

    # --- sending end ---

    def grant_access(self, request: RequestId, epoch: int) -> FetchTicket | None:
        at = self._tcp.grant_access(request, epoch)
        self.exporter.start()
        ready = self.exporter.ready
        if at is None or ready is None:
            return at
        return msgspec.structs.replace(at, agent=ready.agent, base=ready.base)

    def publish_page(self, frame: PageReady) -> None:
        self._tcp.publish_page(frame)

    def revoke_access(self, request: RequestId, epoch: int) -> None:
        self._tcp.revoke_access(request, epoch)

    @property
    def rejected_connections(self) -> int:
        return self._tcp.rejected_connections

    # --- receiving end ---

    def add_ticket(self, source: PageSource, at: FetchTicket) -> None:
        self._tcp.add_ticket(source, at)
        self._doors[source, at.request, at.epoch] = at
        if at.agent:
            self.reader.start()
        elif source not in self._without:
            self._without = {each for each in self._without if each.worker != source.worker} | {source}
            log.info("pages of %s come by %s: it has no NIXL yet", source.worker, self._tcp.name)

    def fetch_page(self, wanted: FetchRequest) -> bool:
        """Asynchronous."""
        frame = wanted.frame
        if not (0 <= frame.page < MOST_PAGE and 0 <= frame.generation < 1 << 64):
            raise PageCorrupt(f"page {frame.page} of generation {frame.generation}")
        at = self._doors.get((wanted.source, frame.request, frame.epoch))
        address = 0 if at is None else at.base + frame.page * self.own.layout.page_bytes
        if at is None or not at.agent or address >= 1 << 64 or not self.reader.usable:
            return self._tcp.fetch_page(wanted)
        self.reader.queue_page(NixlFetch(wanted, at.agent, address))
        return False

    def start_fetches(self) -> None:
        self._tcp.start_fetches()

    @property
    def busy_s(self) -> float:
        return self._tcp.busy_s + self.reader.busy_s

    @property
    def has_results(self) -> bool:
        return bool(self._landed) or self._tcp.has_results

    def fetch_results(self) -> Sequence[FetchResult]:
        with self._lock, contextlib.suppress(BlockingIOError):
            landed, self._landed = self._landed, deque()
            os.eventfd_read(self._event)
        lost = [each for each in landed if each.failure == FAILED]
        if lost:
            log.warning("%d pages are asked for by %s: NIXL: %s", len(lost), self._tcp.name, self.reader.last_error)
        for each in lost:
            self._tcp.fetch_page(each.request)
        self._tcp.start_fetches()
        return [*(each for each in landed if each.failure != FAILED), *self._tcp.fetch_results()]

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        key = (source, request, epoch)
        self._doors.pop(key, None)
        self._tcp.stop_transfer(source, request, epoch)
        self.reader.stop_transfer(key)
        with self._lock:
            self._landed = deque(each for each in self._landed if _key_of(each) != key)
            if not self._landed and self._event >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_read(self._event)

    @property
    def descriptors(self) -> Sequence[int]:
        return (self._event, *self._tcp.descriptors)

    def close(self) -> None:
        """Idempotent."""
        self.reader.close()
        self.exporter.close()
        self._tcp.close()
        with self._lock:
            event, self._event = self._event, -1
        if event >= 0:
            os.close(event)

    def _land(self, landed: FetchResult) -> None:
        with self._lock:
            if self._event >= 0:
                self._landed.append(landed)
                os.eventfd_write(self._event, 1)


def _key_of(landed: FetchResult) -> SourceTransferKey:
    frame = landed.request.frame
    return landed.request.source, frame.request, frame.epoch
