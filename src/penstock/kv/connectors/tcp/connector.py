"""The TCP connector: between hosts, or where memory cannot be shared.

``tcp`` sends pages as they are, ``tcp-sealed`` under AES-256-GCM; both authenticate the receiver and the sender
(``protocol``).  The checksum of each page comes over the control channel.  Pages of workers whose memory is mapped
here, those of the same ``penstock node``, are copied out of it.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TypeAlias

from penstock.config.limits import KvTransferConfig
from penstock.errors import PageCorrupt
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, FetchResult, KvConnector
from penstock.kv.connectors.shm import ShmConnector
from penstock.kv.connectors.tcp.client import SourcePool, host_of
from penstock.kv.connectors.tcp.protocol import aes_gcm
from penstock.kv.connectors.tcp.server import PageServer
from penstock.kv.page_memory import KvMemory
from penstock.types import RequestId, WorkerId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import FetchTicket, PageReady


class FetchClient:
    """The receiving end: a ``SourcePool`` per source, and the results of all of them.

    Connections have threads of their own and continue while the worker computes; the worker's loop calls this object
    and learns of results by a descriptor.
    """

    def __init__(self, config: KvTransferConfig, seal: PageChecksum, *, sealed: bool) -> None:
        self._config = config
        self._seal = seal
        self._sealed = sealed
        self._pools: dict[PageSource, SourcePool] = {}
        # Announced before anybody said where they are, where messages overtake each other.
        self._early: dict[tuple[PageSource, RequestId, int], list[FetchRequest]] = {}
        self._requested: dict[SourcePool, list[FetchRequest]] = {}  # in this turn of the loop
        self._closed_pools_s = 0.0  # processor time of pools that are no more
        self._lock = threading.Lock()  # of the two below, and of whether the descriptor is readable
        self._landed: deque[FetchResult] = deque()
        self._signaled = False
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def add_ticket(self, source: PageSource, at: FetchTicket) -> None:
        pool = self._pools.get(source)
        if pool is None:
            for other in [other for other, known in self._pools.items() if known.is_idle]:
                self._closed_pools_s += self._pools.pop(other).busy_s
            pool = self._pools[source] = SourcePool(source, self._config, self._seal, self._sealed, self._land)
        pool.add_ticket(at)
        early = self._early.pop((source, at.request, at.epoch), None)
        if early:
            pool.queue_pages(early)

    def fetch_page(self, wanted: FetchRequest) -> None:
        pool, frame = self._pools.get(wanted.source), wanted.frame
        if pool is None or not pool.has_ticket((frame.request, frame.epoch)):
            self._early.setdefault((wanted.source, frame.request, frame.epoch), []).append(wanted)
        else:
            self._requested.setdefault(pool, []).append(wanted)

    def start_fetches(self) -> None:
        requested, self._requested = self._requested, {}
        for pool, pages in requested.items():
            pool.queue_pages(pages)

    @property
    def busy_s(self) -> float:
        return self._closed_pools_s + sum(pool.busy_s for pool in self._pools.values())

    @property
    def has_results(self) -> bool:
        return self._signaled

    def fetch_results(self) -> Sequence[FetchResult]:
        with self._lock:
            if not self._signaled:
                return ()
            self._signaled = False
            os.eventfd_read(self.descriptor)
            landed, self._landed = self._landed, deque()
        return landed

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        self._early.pop((source, request, epoch), None)
        pool = self._pools.get(source)
        if pool is None:
            return
        if pool in self._requested:
            self._requested[pool] = [each for each in self._requested[pool] if _key_of(each) != (request, epoch)]
        pool.stop_transfer((request, epoch))
        with self._lock:
            self._landed = deque(each for each in self._landed if _key_of(each.request) != (request, epoch))
            if self._signaled and not self._landed:
                self._signaled = False
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()
        self._pools.clear()
        with self._lock:
            descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            with contextlib.suppress(OSError):
                os.close(descriptor)

    def _land(self, landed: Sequence[FetchResult]) -> None:
        with self._lock:
            if self.descriptor < 0 or not landed:
                return
            self._landed.extend(landed)
            if not self._signaled:
                self._signaled = True
                os.eventfd_write(self.descriptor, 1)


def _key_of(wanted: FetchRequest) -> tuple[RequestId, int]:
    return wanted.frame.request, wanted.frame.epoch


CLEAR, ENCRYPTED = "tcp", "tcp-sealed"

PageSourceKey: TypeAlias = tuple[WorkerId, str]
"""Name and endpoint of a worker."""


class TcpConnector(KvConnector):
    """To be created after the last fork: it has threads."""

    def __init__(
        self,
        own: KvMemory,
        seal: PageChecksum,
        config: KvTransferConfig,
        *,
        endpoint: str,
        port: int,
        sealed: bool = False,
        neighbors: Mapping[PageSourceKey, KvMemory] | None = None,
    ) -> None:
        """``endpoint``: this worker's mailbox, on whose host pages are served; ``port``: the port for that, 0 for any
        free one.  ``neighbors``: memory that is mapped here, by name and endpoint of its worker.

        Raises ConfigError when it cannot listen there, or cannot encrypt.
        """
        if sealed:
            aes_gcm()
        host = host_of(endpoint)
        self.name = ENCRYPTED if sealed else CLEAR
        self.own = own
        self.seal = seal
        self.server = PageServer(own, "" if host == "*" else host, port, config, sealed=sealed)
        self._client = FetchClient(config, seal, sealed=sealed)
        self._neighbors = neighbors or {}
        self._copies = ShmConnector(own, {worker: memory for (worker, _), memory in self._neighbors.items()}, seal)

    def grant_access(self, request: RequestId, epoch: int) -> FetchTicket | None:
        return self.server.grant_access(request, epoch)

    def publish_page(self, frame: PageReady) -> None:
        self.server.publish_page(frame)

    def revoke_access(self, request: RequestId, epoch: int) -> None:
        self.server.revoke_access(request, epoch)

    @property
    def rejected_connections(self) -> int:
        return self.server.rejected_connections

    def add_ticket(self, source: PageSource, at: FetchTicket) -> None:
        self._client.add_ticket(source, at)

    def fetch_page(self, wanted: FetchRequest) -> bool:
        """Asynchronous, unless the source's memory is mapped here."""
        frame = wanted.frame
        if (wanted.source.worker, wanted.source.endpoint) in self._neighbors:
            return self._copies.fetch_page(wanted)
        if not (0 <= frame.page < 1 << 64 and 0 <= frame.generation < 1 << 64):
            raise PageCorrupt(f"page {frame.page} of generation {frame.generation}")
        self._client.fetch_page(wanted)
        return False

    def start_fetches(self) -> None:
        self._client.start_fetches()

    @property
    def busy_s(self) -> float:
        return self._client.busy_s

    @property
    def has_results(self) -> bool:
        return self._client.has_results

    def fetch_results(self) -> Sequence[FetchResult]:
        return self._client.fetch_results()

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        self._client.stop_transfer(source, request, epoch)

    @property
    def descriptors(self) -> Sequence[int]:
        return (self._client.descriptor,)

    def close(self) -> None:
        """Closes all connections.  Idempotent."""
        self.server.close()
        self._client.close()
