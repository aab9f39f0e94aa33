"""Pages on one host: the receiver copies out of the sender's memory, which it has mapped read-only.

Announcements carry no bytes.  A page may be overwritten while it is copied; the checksum of the copy shows it.
"""

from __future__ import annotations

from collections.abc import Mapping

from penstock.errors import PageCorrupt, TransferRefused
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, KvConnector
from penstock.kv.page_memory import KvMemory
from penstock.types import WorkerId


class ShmConnector(KvConnector):
    """``peers``: the other workers' memory, mapped read-only.  It may grow while the connector is in use."""

    name = "shm"

    def __init__(self, own: KvMemory, peers: Mapping[WorkerId, KvMemory], seal: PageChecksum) -> None:
        self.own = own
        self.seal = seal
        self._peers = peers

    def fetch_page(self, wanted: FetchRequest) -> bool:
        """Copies and verifies the page in one pass."""
        source, frame = wanted.source, wanted.frame
        memory = self._peers.get(source.worker)
        if memory is None:
            raise TransferRefused(f"the memory of {source.worker} is not mapped here")
        if not 0 <= frame.page < memory.pages:
            raise PageCorrupt(f"page {frame.page} of {source.worker}, which has {memory.pages}")
        self.seal.copy_checked(frame, memory.view(frame.page), wanted.into)
        return True


class InMemoryConnector(ShmConnector):
    """The double for tests: two workers in one process.  ``peers``: the other workers' memory."""

    name = "memory"
