"""The KV connector: the protocol for moving page bytes from one worker to another.

A connector moves bytes and decides nothing.  The receiver reads, into its own pages; no worker writes into another's
memory.  The receiver verifies every page on its own copy, so a sender that overwrites a page, dies or resumes meanwhile
can spoil a copy but cannot make a spoiled copy pass.

::

    sender                                      receiver
    grant_access -> FetchTicket --------------> add_ticket       where the pages are; not every connector needs it
    publish_page, PageReady ------------------> fetch_page       at once, or
                                                fetch_results    later
    revoke_access: no more fetches              stop_transfer: no more writes
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.kv.checksum import PageChecksum
from penstock.kv.page_memory import KvMemory
from penstock.types import PageId, RequestId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import FetchTicket, PageReady


@dataclass(frozen=True, slots=True, eq=False)
class FetchRequest:
    """An announced page of ``source``, and the receiver's page that it is to be copied to."""

    source: PageSource
    frame: PageReady
    into: memoryview = field(repr=False)
    payload: memoryview | None = field(default=None, repr=False)  # that came with the announcement


@dataclass(frozen=True, slots=True, eq=False)
class FetchResult:
    """The result of an asynchronous page fetch.  ``failure``: the reason, or None when the page is copied and
    verified."""

    request: FetchRequest
    failure: str | None = None  # why it is not there; None: it is, and it is the announced one


CORRUPT = "corrupt"
"""The failure of a page that came, and is not the announced one."""


REFUSED = "refused"
"""The failure of a page that its sender hands out no more."""


class KvConnector(Protocol):
    """One way of moving page bytes.  Both ends of a transfer use the same kind.

    Called by one thread.  No method blocks longer than copying a page takes.
    """

    name: str
    """"shm", "tcp", "tcp-sealed", "curve" or "memory": as in ``PullPages.carrier``."""

    own: KvMemory
    """This worker's pages: read by the sending end, written by the receiving end."""

    seal: PageChecksum

    # --- sending end -------------------------------------------------------------------------------------------------

    def grant_access(self, request: RequestId, epoch: int) -> FetchTicket | None:
        """Allow a receiver to fetch this transfer's pages.  Returns what it needs for that, None if nothing.
        Idempotent."""
        del request, epoch
        return None

    def publish_page(self, frame: PageReady) -> None:
        """This page of a granted transfer may be fetched."""
        del frame

    def inline_payload(self, page: PageId) -> memoryview | None:
        """The bytes that travel with a page's announcement; None when the receiver fetches them."""
        del page
        return None

    @property
    def rejected_connections(self) -> int:
        """Connections for pages that were rejected since the start: unauthenticated ones and those over the limit."""
        return 0

    def revoke_access(self, request: RequestId, epoch: int) -> None:
        """Pages of this transfer may not be fetched any more.  Sends that have begun are completed, whatever the
        page holds."""
        del request, epoch

    # --- receiving end -----------------------------------------------------------------------------------------------

    def add_ticket(self, source: PageSource, at: FetchTicket) -> None:
        """Where the sender says the pages of this transfer are."""
        del source, at

    def fetch_page(self, wanted: FetchRequest) -> bool:
        """Fetch an announced page.  True: it is copied and verified.  False: ``fetch_results`` will return the result.

        Raises PageCorrupt for a page that is not the announced one, TransferRefused for a source out of reach.
        """
        ...

    def start_fetches(self) -> None:
        """All fetches of this turn are queued: connectors that fetch in batches may start."""
        return

    @property
    def busy_s(self) -> float:
        """Processor seconds that the connector's own threads have spent since the start."""
        return 0.0

    @property
    def has_results(self) -> bool:
        """Whether ``fetch_results`` has something to return."""
        return False

    def fetch_results(self) -> Sequence[FetchResult]:
        """Results since the last call.  Those of stopped transfers may be among them."""
        return ()

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        """No page of this transfer is written once this returns."""
        del source, request, epoch

    @property
    def descriptors(self) -> Sequence[int]:
        """File descriptors that become readable when there are results."""
        return ()
