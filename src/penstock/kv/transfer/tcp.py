"""Pages as payloads beside their announcements: between hosts, or where memory cannot be shared."""

from __future__ import annotations

from penstock.errors import PageCorrupt
from penstock.kv.memory import KvMemory
from penstock.kv.transfer.port import PageSeal
from penstock.types import PageId
from penstock.wire.messages import PageReady, PageSource


class TcpCarrier:
    """Encryption and framing are the transport's."""

    name = "tcp"

    def __init__(self, own: KvMemory, seal: PageSeal) -> None:
        self.own = own
        self.seal = seal

    def payload(self, page: PageId) -> memoryview | None:
        """The page itself."""
        return self.own.view(page)

    def copy(self, source: PageSource, frame: PageReady, payload: memoryview | None, into: memoryview) -> None:
        """As ``PageCarrier.copy``."""
        del source
        if payload is None:
            raise PageCorrupt(f"block {frame.block} of {frame.request} came without its bytes")
        self.seal.copy(frame, payload, into)
