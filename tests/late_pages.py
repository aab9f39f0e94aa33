"""Pages that land when a test says so: the double of a carrier that fetches over a network."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.errors import PageCorrupt
from penstock.kv.connectors.base import CORRUPT, FetchRequest, FetchResult
from penstock.kv.connectors.shm import InMemoryConnector
from penstock.types import RequestId
from penstock.wire.gateway_messages import PageSource


class LateCarrier(InMemoryConnector):
    """``flying``: what was asked for and is not there.  Nothing is written but by ``land``."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self.flying: list[FetchRequest] = []
        self._landed: list[FetchResult] = []

    def fetch_page(self, wanted: FetchRequest) -> bool:
        self.flying.append(wanted)
        return False

    def land(self, pages: int) -> None:
        """The first so many."""
        landing, self.flying = self.flying[:pages], self.flying[pages:]
        for wanted in landing:
            try:
                super().fetch_page(wanted)
                self._landed.append(FetchResult(wanted))
            except PageCorrupt:
                self._landed.append(FetchResult(wanted, CORRUPT))

    @property
    def has_results(self) -> bool:
        return bool(self._landed)

    def fetch_results(self) -> Sequence[FetchResult]:
        landed, self._landed = self._landed, []
        return landed

    def stop_transfer(self, source: PageSource, request: RequestId, epoch: int) -> None:
        def others(wanted: FetchRequest) -> bool:
            return (wanted.source, wanted.frame.request, wanted.frame.epoch) != (source, request, epoch)

        self.flying = [wanted for wanted in self.flying if others(wanted)]
        self._landed = [landed for landed in self._landed if others(landed.request)]
