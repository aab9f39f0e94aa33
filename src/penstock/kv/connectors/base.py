"""What carries a page, and how a page is proved to be the right one.

A carrier moves bytes; it decides nothing.  It is the receiver that reads, into pages of its own; nobody writes into
another's memory.  Every page is checked by the receiver on its own copy: a sender that writes, dies or wakes up
meanwhile can spoil a copy but cannot make a spoiled copy pass.

::

    grant -> PagesAt ------------------------> door         where the pages are to be fetched; some need no door
    offer, PageReady ------------------------> fetch        at once, or
                                               landed       some time later
    revoke: nobody may fetch any more          stop: nothing more is written
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from penstock.kv.checksum import PageChecksum
from penstock.kv.memory import KvMemory
from penstock.types import PageId, RequestId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import PageReady, PagesAt


@dataclass(frozen=True, slots=True, eq=False)
class FetchRequest:
    """A page of ``source`` that was announced, and the receiver's own page that it is to stand in."""

    source: PageSource
    frame: PageReady
    into: memoryview = field(repr=False)
    payload: memoryview | None = field(default=None, repr=False)  # that came with the announcement


@dataclass(frozen=True, slots=True, eq=False)
class FetchResult:
    """What became of a page that was not there at once."""

    request: FetchRequest
    failure: str | None = None  # why it is not there; None: it is, and it is the announced one


CORRUPT = "corrupt"
"""The failure of a page that came, and is not the announced one."""


REFUSED = "refused"
"""The failure of a page that its sender hands out no more."""


class KvConnector(Protocol):
    """One way for page bytes to get from worker to worker.  Both ends of a hand-over use the same kind.

    Called by one thread.  Nothing here waits longer than copying a page takes.
    """

    name: str
    """"shm", "tcp", "tcp-sealed", "curve" or "memory": as in ``PullPages.carrier``."""

    own: KvMemory
    """This worker's pages: read by the sending end, written by the receiving end."""

    seal: PageChecksum

    # --- sending end -------------------------------------------------------------------------------------------------

    def grant_access(self, request: RequestId, epoch: int) -> PagesAt | None:
        """A receiver may have this leg's pages.  What it needs for that; None: nothing.  Twice gives the same."""
        del request, epoch
        return None

    def publish_page(self, frame: PageReady) -> None:
        """This page of a granted leg may be fetched."""
        del frame

    def inline_payload(self, page: PageId) -> memoryview | None:
        """What goes with the announcement of a page; None when the receiver fetches it itself."""
        del page
        return None

    @property
    def rejected_connections(self) -> int:
        """Connections for pages that proved nothing, or were too many, since the start."""
        return 0

    def revoke_access(self, request: RequestId, epoch: int) -> None:
        """Nobody may fetch pages of this leg any more.  What is on its way is sent to its end, whatever is in it."""
        del request, epoch

    # --- receiving end -----------------------------------------------------------------------------------------------

    def add_ticket(self, source: PageSource, at: PagesAt) -> None:
        """What the sender said of where this hand-over's pages are."""
        del source, at

    def fetch_page(self, wanted: FetchRequest) -> bool:
        """Bring an announced page.  True: it is here, and it is the announced one.  False: ``landed`` will tell.

        Raises PageCorrupt for a page that is not the announced one, HandOverRefused for a source out of reach.
        """
        ...

    def start_fetches(self) -> None:
        """No more is to be fetched in this turn: what brings pages in one go may begin."""
        return

    @property
    def busy_s(self) -> float:
        """Seconds of processor time that threads of its own have spent on bringing pages, since the start."""
        return 0.0

    @property
    def has_results(self) -> bool:
        """Has ``landed`` something to tell?"""
        return False

    def fetch_results(self) -> Sequence[FetchResult]:
        """What has become of pages since this was asked last.  Those that were stopped may be among them."""
        return ()

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        """Nothing more is written for this hand-over once this returns."""
        del source, request, epoch

    @property
    def descriptors(self) -> Sequence[int]:
        """Readable when something has landed."""
        return ()
