"""The TCP connector: between hosts, or where memory cannot be shared.

``tcp`` sends pages as they are, ``tcp-sealed`` under AES-256-GCM; both authenticate the receiver and the sender
(``protocol``).  The checksum of each page comes over the control channel.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections import deque
from collections.abc import Sequence

from penstock.config.limits import KvTransferConfig
from penstock.errors import PageCorrupt
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, FetchResult, KvConnector
from penstock.kv.connectors.tcp.client import SourcePool, host_of
from penstock.kv.connectors.tcp.protocol import aes_gcm
from penstock.kv.connectors.tcp.server import PageServer
from penstock.kv.page_memory import KvMemory
from penstock.types import RequestId
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
        self._roads: dict[PageSource, SourcePool] = {}
        # Announced before anybody said where they are, where messages overtake each other.
        self._early: dict[tuple[PageSource, RequestId, int], list[FetchRequest]] = {}
        self._asked: dict[SourcePool, list[FetchRequest]] = {}  # in this turn of the loop
        self._gone_s = 0.0  # processor time of roads that are no more
        self._lock = threading.Lock()  # of the two below, and of whether the descriptor is readable
        self._landed: deque[FetchResult] = deque()
        self._told = False
        self.descriptor = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    def add_ticket(self, source: PageSource, at: FetchTicket) -> None:
        road = self._roads.get(source)
        if road is None:
            for other in [other for other, known in self._roads.items() if known.is_idle]:
                self._gone_s += self._roads.pop(other).busy_s
            road = self._roads[source] = SourcePool(source, self._config, self._seal, self._sealed, self._land)
        road.add_ticket(at)
        early = self._early.pop((source, at.request, at.epoch), None)
        if early:
            road.queue_pages(early)

    def fetch_page(self, wanted: FetchRequest) -> None:
        road, frame = self._roads.get(wanted.source), wanted.frame
        if road is None or not road.has_ticket((frame.request, frame.epoch)):
            self._early.setdefault((wanted.source, frame.request, frame.epoch), []).append(wanted)
        else:
            self._asked.setdefault(road, []).append(wanted)

    def start_fetches(self) -> None:
        asked, self._asked = self._asked, {}
        for road, pages in asked.items():
            road.queue_pages(pages)

    @property
    def busy_s(self) -> float:
        return self._gone_s + sum(road.busy_s for road in self._roads.values())

    @property
    def has_results(self) -> bool:
        return self._told

    def fetch_results(self) -> Sequence[FetchResult]:
        with self._lock:
            if not self._told:
                return ()
            self._told = False
            os.eventfd_read(self.descriptor)
            landed, self._landed = self._landed, deque()
        return landed

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        self._early.pop((source, request, epoch), None)
        road = self._roads.get(source)
        if road is None:
            return
        if road in self._asked:
            self._asked[road] = [each for each in self._asked[road] if _key_of(each) != (request, epoch)]
        road.stop_transfer((request, epoch))
        with self._lock:
            self._landed = deque(each for each in self._landed if _key_of(each.request) != (request, epoch))
            if self._told and not self._landed:
                self._told = False
                os.eventfd_read(self.descriptor)

    def close(self) -> None:
        for road in self._roads.values():
            road.close()
        self._roads.clear()
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
            if not self._told:
                self._told = True
                os.eventfd_write(self.descriptor, 1)


def _key_of(wanted: FetchRequest) -> tuple[RequestId, int]:
    return wanted.frame.request, wanted.frame.epoch


CLEAR, ENCRYPTED = "tcp", "tcp-sealed"


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
    ) -> None:
        """``endpoint``: this worker's mailbox, on whose host pages are served; ``port``: the port for that, 0 for any
        free one.

        Raises ConfigError when it cannot listen there, or cannot encrypt.
        """
        if sealed:
            aes_gcm()
        host = host_of(endpoint)
        self.name = ENCRYPTED if sealed else CLEAR
        self.own = own
        self.seal = seal
        self.server = PageServer(own, "" if host == "*" else host, port, config, sealed=sealed)
        self._courier = FetchClient(config, seal, sealed=sealed)

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
        self._courier.add_ticket(source, at)

    def fetch_page(self, wanted: FetchRequest) -> bool:
        """Asynchronous."""
        frame = wanted.frame
        if not (0 <= frame.page < 1 << 64 and 0 <= frame.generation < 1 << 64):
            raise PageCorrupt(f"page {frame.page} of generation {frame.generation}")
        self._courier.fetch_page(wanted)
        return False

    def start_fetches(self) -> None:
        self._courier.start_fetches()

    @property
    def busy_s(self) -> float:
        return self._courier.busy_s

    @property
    def has_results(self) -> bool:
        return self._courier.has_results

    def fetch_results(self) -> Sequence[FetchResult]:
        return self._courier.fetch_results()

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        self._courier.stop_transfer(source, request, epoch)

    @property
    def descriptors(self) -> Sequence[int]:
        return (self._courier.descriptor,)

    def close(self) -> None:
        """Closes all connections.  Idempotent."""
        self.server.close()
        self._courier.close()
