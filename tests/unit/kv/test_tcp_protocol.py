"""What a receiver asks for ahead on one connection, against the sender's own end of it."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import pytest

from penstock.config.limits import KvTransferConfig
from penstock.kernels.operands import KvShape
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, FetchResult
from penstock.kv.connectors.tcp import protocol as frames
from penstock.kv.connectors.tcp import server
from penstock.kv.connectors.tcp.client import FetchBatch, PageFetch, SourcePool, _FetchSession
from penstock.kv.connectors.tcp.protocol import TimedSocket
from penstock.kv.connectors.tcp.server import PageServer
from penstock.kv.page_memory import KvLayout, KvMemory
from penstock.types import ModelIdentity, PageId, RequestId, WorkerId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import FetchTicket, PageReady

LAYOUT = KvLayout.for_shape(KvShape.plain(layers=2, kv_heads=2, head_dim=8), "fp32")
SEAL = PageChecksum(ModelIdentity(fingerprint="f" * 64, numerics="test-1-fp32"), LAYOUT)
CONFIG = KvTransferConfig(connections=1)


@dataclass
class Ends:
    """A sender with a page of each number up to 8, and one connection to it."""

    desk: PageServer
    talk: _FetchSession
    told: list[FetchResult] = field(default_factory=list)

    def grant(self, name: str, *pages: int) -> FetchTicket:
        at = self.desk.grant_access(RequestId(name), 1)
        for page in pages:
            self.desk.publish_page(frame_of(self.desk, at, page))
        return at

    def batch(self, at: FetchTicket, page: int) -> FetchBatch:
        source = PageSource(worker=WorkerId("prefill-0"), incarnation=1, endpoint="tcp://127.0.0.1:1")
        wanted = FetchRequest(source, frame_of(self.desk, at, page), memoryview(bytearray(LAYOUT.page_bytes)))
        return FetchBatch((at.request, at.epoch), at, [PageFetch(wanted)])


def frame_of(desk: PageServer, at: FetchTicket, page: int) -> PageReady:
    seal = SEAL.checksum(desk.own.view(PageId(page)), 1)
    return PageReady(request=at.request, epoch=1, index=page, tokens=16, page=PageId(page), generation=1, checksum=seal)


@pytest.fixture
def ends() -> Iterator[Ends]:
    with ExitStack() as stack:
        own = stack.enter_context(closing(KvMemory.anonymous(LAYOUT, 8)))
        desk = stack.enter_context(closing(PageServer(own, "127.0.0.1", 0, CONFIG, sealed=False)))
        told: list[FetchResult] = []
        source = PageSource(worker=WorkerId("prefill-0"), incarnation=1, endpoint="tcp://127.0.0.1:1")
        road = SourcePool(source, CONFIG, SEAL, sealed=False, land=told.extend)
        wire = stack.enter_context(closing(TimedSocket(socket.create_connection(("127.0.0.1", desk.port)), 60)))
        yield Ends(desk, _FetchSession(road, wire, threading.Lock()), told)


def test_a_leg_that_is_refused_ends_no_conversation_however_much_of_it_was_asked_for(ends: Ends) -> None:
    """It is introduced anew while an older question of it is still to be refused."""
    one, gone = ends.grant("one", 0, 1), ends.grant("gone", 2, 3, 4)
    ends.desk.revoke_access(gone.request, 1)
    questions = [ends.batch(one, 0), *(ends.batch(gone, page) for page in (2, 3, 4)), ends.batch(one, 1)]
    answers: list[bool] = []
    for number, question in enumerate(questions):
        ends.talk.ask(question)
        if number:  # two are always on their way
            answers.append(ends.talk.receive(questions[number - 1]) is not None)
    answers.append(ends.talk.receive(questions[-1]) is not None)
    assert answers == [True, False, False, False, True]
    assert [(each.request.frame.page, each.failure) for each in ends.told] == [(0, None), (1, None)]


@pytest.mark.parametrize("lack", [MemoryError(), RuntimeError("can't start new thread")])
def test_a_connection_that_cannot_be_served_leaves_the_others_theirs(
    ends: Ends, monkeypatch: pytest.MonkeyPatch, lack: Exception
) -> None:
    class Lacking(server._ServerConnection):
        def __init__(self, desk: PageServer, wire: TimedSocket) -> None:
            super().__init__(desk, wire)
            if isinstance(lack, MemoryError):
                raise lack

    def start(thread: threading.Thread) -> None:
        raise lack

    with monkeypatch.context() as patch:
        patch.setattr(server, "_ServerConnection", Lacking)
        patch.setattr(threading.Thread, "start", start)
        with socket.create_connection(("127.0.0.1", ends.desk.port), 60) as sock:
            assert sock.recv(1) == b""
    with socket.create_connection(("127.0.0.1", ends.desk.port), 60) as sock:
        assert sock.recv(4) == frames.MAGIC


def test_who_finds_no_room_is_counted_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    config = KvTransferConfig(max_connections=1)
    with ExitStack() as stack:
        own = stack.enter_context(closing(KvMemory.anonymous(LAYOUT, 8)))
        desk = stack.enter_context(closing(PageServer(own, "127.0.0.1", 0, config, sealed=False)))
        sock = stack.enter_context(socket.create_connection(("127.0.0.1", desk.port), 60))
        assert sock.recv(4) == frames.MAGIC
        for turned_away in (1, 2):
            with socket.create_connection(("127.0.0.1", desk.port), 60) as other:
                assert other.recv(1) == b""
            with desk._lock:
                assert desk.rejected_connections == turned_away
    assert [record.args for record in caplog.records] == [(1,)]
