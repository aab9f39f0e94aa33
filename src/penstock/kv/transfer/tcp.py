"""Pages over plain sockets: between hosts, or where memory cannot be shared.

::

    sender                                                    receiver
    loop --grant, offer, revoke--> Desk, its threads <====> Lines, their threads <--Road, Courier <--fetch, stop-- loop
                                                                                            landed -------------->

The receiver reads: it asks for pages that were announced to it, over connections of its own, straight into its own
pages.  ``tcp`` sends them as they are, ``tcp-sealed`` under AES-256-GCM; who may ask, and of whom, is proved in both
(``tcp_frames``).  The checksum of each page came over the control channel.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.config.limits import HandOverConfig
from penstock.errors import PageCorrupt
from penstock.kv.memory import KvMemory
from penstock.kv.transfer.port import Landed, PageCarrier, PageSeal, Wanted
from penstock.kv.transfer.tcp_courier import Courier
from penstock.kv.transfer.tcp_desk import Desk
from penstock.kv.transfer.tcp_frames import aead
from penstock.kv.transfer.tcp_line import host_of
from penstock.types import RequestId
from penstock.wire.messages import PageReady, PageSource
from penstock.wire.page_doors import PagesAt

CLEAR, SEALED = "tcp", "tcp-sealed"


class TcpCarrier(PageCarrier):
    """Make it after the last fork: it has threads."""

    def __init__(
        self, own: KvMemory, seal: PageSeal, config: HandOverConfig, at: tuple[str, int], *, sealed: bool = False
    ) -> None:
        """``at``: this worker's mailbox, at whose host pages are fetched, and the port for it; 0 is any free one.

        Raises ConfigError when it cannot listen there, or cannot encrypt.
        """
        if sealed:
            aead()
        endpoint, port = at
        host = host_of(endpoint)
        self.name = SEALED if sealed else CLEAR
        self.own = own
        self.seal = seal
        self.desk = Desk(own, "" if host == "*" else host, port, config, sealed=sealed)
        self._courier = Courier(config, seal, sealed=sealed)

    def grant(self, request: RequestId, epoch: int) -> PagesAt | None:
        return self.desk.grant(request, epoch)

    def offer(self, frame: PageReady) -> None:
        self.desk.offer(frame)

    def revoke(self, request: RequestId, epoch: int) -> None:
        self.desk.revoke(request, epoch)

    @property
    def turned_away(self) -> int:
        return self.desk.refused

    def door(self, source: PageSource, at: PagesAt) -> None:
        self._courier.door(source, at)

    def fetch(self, wanted: Wanted) -> bool:
        """Some time after the turn."""
        frame = wanted.frame
        if not (0 <= frame.page < 1 << 64 and 0 <= frame.generation < 1 << 64):
            raise PageCorrupt(f"page {frame.page} of generation {frame.generation}")
        self._courier.fetch(wanted)
        return False

    def flush(self) -> None:
        self._courier.flush()

    @property
    def busy_s(self) -> float:
        return self._courier.busy_s

    @property
    def has_landed(self) -> bool:
        return self._courier.has_landed

    def landed(self) -> Sequence[Landed]:
        return self._courier.landed()

    def stop(self, source: PageSource, request: RequestId, epoch: int) -> None:
        self._courier.stop(source, request, epoch)

    @property
    def descriptors(self) -> Sequence[int]:
        return (self._courier.descriptor,)

    def close(self) -> None:
        """Hang up on everybody.  May be called twice."""
        self.desk.close()
        self._courier.close()
