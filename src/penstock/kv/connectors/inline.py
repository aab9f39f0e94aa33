"""Pages as payloads of their announcements, inside the encrypted messages of ``wire.zeromq``.

Needs no library and no port of its own, and is slower than ``tcp``: one thread encrypts and copies every byte.
"""

from __future__ import annotations

from penstock.errors import PageCorrupt
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, KvConnector
from penstock.kv.page_memory import KvMemory
from penstock.types import PageId


class InlineConnector(KvConnector):
    """Encryption and framing are the transport's."""

    name = "curve"

    def __init__(self, own: KvMemory, seal: PageChecksum) -> None:
        self.own = own
        self.seal = seal

    def inline_payload(self, page: PageId) -> memoryview | None:
        """The page itself."""
        return self.own.view(page)

    def fetch_page(self, wanted: FetchRequest) -> bool:
        """Copies the payload at once."""
        frame = wanted.frame
        if wanted.payload is None:
            raise PageCorrupt(f"block {frame.index} of {frame.request} came without its bytes")
        self.seal.copy_checked(frame, wanted.payload, wanted.into)
        return True
