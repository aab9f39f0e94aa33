"""What waits for the connections to one sender: who is told of it, and who pays for a connection that breaks.

No connection is made: the test is the thread that would serve it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Sequence

import pytest

from penstock.config.limits import KvTransferConfig
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, FetchResult
from penstock.kv.connectors.tcp import client
from penstock.kv.connectors.tcp.client import FetchBatch, FetchConnection, SourcePool
from penstock.kv.page_memory import KvLayout
from penstock.types import ModelIdentity, PageId, RequestId, WorkerId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import FetchTicket, PageReady

SOURCE = PageSource(worker=WorkerId("prefill-0"), incarnation=1, endpoint="tcp://127.0.0.1:1")
SEAL = PageChecksum(
    ModelIdentity(fingerprint="f" * 64, numerics="test-1-fp32"),
    KvLayout.for_shape(KvShape.plain(layers=2, kv_heads=2, head_dim=8), "fp32"),
)


class Unserved(FetchConnection):
    """Has no thread."""

    def start(self) -> None:
        """See above."""


class Unstarted(FetchConnection):
    """Gets no thread."""

    def start(self) -> None:
        raise RuntimeError("can't start new thread")


class Roadside:
    """A road with one connection, and what it has told."""

    def __init__(self, config: KvTransferConfig) -> None:
        self.told: list[FetchResult] = []
        self.on_land: Callable[[], None] = lambda: None
        self.road = SourcePool(SOURCE, config, SEAL, sealed=False, land=self._land)

    def door(self, name: str) -> tuple[RequestId, int]:
        at = FetchTicket(request=RequestId(name), epoch=1, port=1, grant_id=len(name), token=bytes(32), sealed=False)
        self.road.add_ticket(at)
        return at.request, 1

    def fetch(self, name: str, page: int) -> None:
        frame = PageReady(
            request=RequestId(name), epoch=1, index=page, tokens=16, page=PageId(page), generation=1, checksum=bytes(16)
        )
        self.road.queue_pages([FetchRequest(SOURCE, frame, memoryview(bytearray(1)))])

    def take(self) -> tuple[FetchConnection, FetchBatch]:
        (line,) = self.road._ways
        batch = self.road.next_batch(line, 0.0)
        assert batch is not None
        return line, batch

    def _land(self, landed: Sequence[FetchResult]) -> None:
        if landed:
            self.on_land()
        self.told.extend(landed)


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[[KvTransferConfig], Roadside]:
    monkeypatch.setattr(client, "FetchConnection", Unserved)
    return Roadside


def land(side: Roadside, line: FetchConnection, batch: FetchBatch) -> None:
    side.road.on_pages_fetched(batch, [None])


def refuse(side: Roadside, line: FetchConnection, batch: FetchBatch) -> None:
    side.road.on_batch_refused(line, batch)


def lose(side: Roadside, line: FetchConnection, batch: FetchBatch) -> None:
    side.road.on_connection_lost(line, "hung up")


@pytest.mark.parametrize("end", [land, refuse, lose])
def test_nothing_is_told_of_a_leg_once_stopping_it_has_returned(
    make: Callable[[KvTransferConfig], Roadside], end: Callable[[Roadside, FetchConnection, FetchBatch], None]
) -> None:
    """Somebody stops it at the worst moment: when the connection's thread has looked, and not told yet."""
    side = make(KvTransferConfig(connections=1, fetch_tries=1))
    key = side.door("one")
    side.fetch("one", 3)
    line, batch = side.take()
    told_before: list[int] = []

    def stop_it() -> None:
        side.road.stop_transfer(key)
        told_before.append(len(side.told))

    stopping = threading.Thread(target=stop_it)

    def stop() -> None:
        stopping.start()
        stopping.join(0.02)  # were it let in here, it would be over long before

    side.on_land = stop
    end(side, line, batch)
    stopping.join()
    assert told_before == [len(side.told)] == [1]


@pytest.mark.parametrize("end", [land, refuse, lose])
def test_nothing_is_told_of_a_leg_that_was_stopped(
    make: Callable[[KvTransferConfig], Roadside], end: Callable[[Roadside, FetchConnection, FetchBatch], None]
) -> None:
    side = make(KvTransferConfig(connections=1, fetch_tries=1))
    key = side.door("one")
    side.fetch("one", 3)
    line, batch = side.take()
    side.road.stop_transfer(key)
    end(side, line, batch)
    assert side.told == []


def test_a_connection_that_breaks_costs_a_try_only_what_it_broke_over(
    make: Callable[[KvTransferConfig], Roadside],
) -> None:
    side = make(KvTransferConfig(connections=1, fetch_tries=2))
    for name in ("guilty", "other"):
        side.door(name)
    side.fetch("guilty", 3)
    side.fetch("other", 4)
    side.fetch("guilty", 5)
    for _ in range(2):
        line, batch = side.take()
        assert batch.key[0] == "guilty"
        assert side.take()[1].key[0] == "other"
        assert side.told == []
        assert side.road.on_connection_lost(line, "a stranger")
    assert [(each.request.frame.page, each.failure) for each in side.told] == [
        (3, "its pages cannot be fetched: a stranger")
    ]
    for _ in range(2):  # what else waited of the leg is not tried in vain; the other still has all its tries
        line, batch = side.take()
        assert [order.request.frame.page for order in batch.fetches] == [4]
        assert side.road.next_batch(line, 0.0) is None
        side.road.on_connection_lost(line, "hung up")
    assert [each.request.frame.page for each in side.told] == [3, 4]


def test_a_batch_that_was_stopped_costs_nobody_a_try(make: Callable[[KvTransferConfig], Roadside]) -> None:
    side = make(KvTransferConfig(connections=1, fetch_tries=1))
    stopped = side.door("stopped")
    side.door("other")
    side.fetch("stopped", 3)
    side.fetch("other", 4)
    line, _ = side.take()
    side.take()
    side.road.stop_transfer(stopped)
    side.road.on_connection_lost(line, "hung up")
    assert side.told == []
    assert [order.request.frame.page for order in side.take()[1].fetches] == [4]


def test_without_a_thread_for_it_what_is_fetched_fails(
    make: Callable[[KvTransferConfig], Roadside], monkeypatch: pytest.MonkeyPatch
) -> None:
    side = make(KvTransferConfig(connections=2))
    key = side.door("one")
    side.fetch("one", 3)
    monkeypatch.setattr(client, "FetchConnection", Unstarted)
    side.fetch("one", 4)  # one connection is there already
    assert side.told == []
    assert [order.request.frame.page for order in side.take()[1].fetches] == [3, 4]
    alone = make(KvTransferConfig(connections=2))
    alone.door("one")
    alone.fetch("one", 3)
    assert [each.failure for each in alone.told] == ["its pages cannot be fetched: can't start new thread"]
    alone.road.stop_transfer(key)
    assert alone.road.is_idle


def test_whatever_ends_a_connection_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MemoryError

    monkeypatch.setattr(socket, "create_connection", fail)
    monkeypatch.setattr(client, "FIRST_PAUSE_S", 0.0)
    side, heard = Roadside(KvTransferConfig(connections=1, fetch_tries=2, peer_idle_s=0.01)), threading.Event()
    side.on_land = heard.set
    side.door("one")
    side.fetch("one", 3)
    assert heard.wait(60)
    side.road.close()
    assert [each.failure for each in side.told] == ["its pages cannot be fetched: MemoryError"]
