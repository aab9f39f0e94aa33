"""What only the carrier over NIXL can meet: no NIXL at one end, and processes that hang, die or are left.

NIXL goes over UCX's TCP here, on the loopback: there is no RDMA.
"""

from __future__ import annotations

import errno
import math
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import ClassVar

import psutil
import pytest
from transfer_rig import IDENTITY, LAYOUT, OWN, THEIRS, R, Rig, arrived, make_rig, nixl_carrier, offer_all, start

from blows import strike
from penstock.config.limits import KvTransferConfig
from penstock.kv.checksum import PageChecksum
from penstock.kv.connectors.base import FetchRequest, FetchResult
from penstock.kv.connectors.nixl import connector as nixl_connector
from penstock.kv.connectors.nixl import reader
from penstock.kv.connectors.nixl.agent_client import AgentEvent, AgentGoneError, AgentReady, AgentUnavailable, ReadDone
from penstock.kv.connectors.nixl.connector import NixlConnector, needs_writing
from penstock.types import PageId, WorkerId
from penstock.wire.gateway_messages import PageSource
from penstock.wire.transfer_messages import PageReady

long = pytest.mark.long


@pytest.fixture
def rig() -> Iterator[Rig]:
    with ExitStack() as stack:
        made, closing = make_rig("nixl", config=KvTransferConfig(fetch_stall_s=3.0))
        for thing in reversed(closing):
            stack.callback(thing.close)
        yield made


def ends(rig: Rig) -> tuple[NixlConnector, NixlConnector]:
    sender, receiver = rig.sender._carrier, rig.receiver._carrier
    assert isinstance(sender, NixlConnector)
    assert isinstance(receiver, NixlConnector)
    return sender, receiver


def hand_over(rig: Rig, epoch: int) -> None:
    """Three pages, whichever way; all of them right."""
    for page in OWN:
        rig.receiver_memory.view(page)[:] = bytes(rig.receiver_memory.layout.page_bytes)  # type: ignore[arg-type]
    start(rig, epoch=epoch)
    offer_all(rig, epoch=epoch)
    rig.done(3, epoch=epoch)
    rig.until(lambda: len(rig.released) == epoch)
    assert not rig.failed
    assert arrived(rig)


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline, "it did not come true"
        time.sleep(0.02)


def test_network_cards_want_pages_that_could_be_written():
    assert needs_writing("rc,dc,ud")
    assert needs_writing("tcp, rc")
    assert not needs_writing("tcp, sm,self")


@pytest.fixture
def carrier() -> Iterator[NixlConnector]:
    """A worker's; nothing of it is started."""
    memory, made = nixl_carrier(KvTransferConfig(), PageChecksum(IDENTITY, LAYOUT))
    yield made
    made.close()
    memory.close()


def wanted() -> FetchRequest:
    source = PageSource(worker=WorkerId("prefill-0"), incarnation=1, endpoint="tcp://127.0.0.1:1")
    frame = PageReady(request=R, epoch=1, index=0, page=PageId(1), generation=1, tokens=16, checksum=bytes(16))
    return FetchRequest(source, frame, memoryview(bytearray(LAYOUT.page_bytes)))


def test_a_page_that_landed_and_was_stopped_wakes_nobody(carrier: NixlConnector):
    page = wanted()
    carrier._land(FetchResult(page))
    assert select.select(carrier.descriptors, [], [], 0)[0]
    carrier.stop_transfer(page.source, R, 1)
    assert not select.select(carrier.descriptors, [], [], 0)[0]
    carrier._land(FetchResult(page))
    assert [each.request for each in carrier.fetch_results()] == [page], "the next one does"


class NoThread:
    """A process that cannot be had."""

    def __init__(self, *_: object) -> None:
        raise RuntimeError("can't start new thread")


class Babbler:
    """A process that tells of what nobody asked for."""

    pid = None

    def __init__(self, *_: object) -> None:
        self._said: list[AgentEvent] = [AgentReady(b"agent", 0), ReadDone(99)]

    def receive(self, _: float | None) -> AgentEvent:
        return self._said.pop(0)

    def send(self, _: object) -> None:
        pass

    kill = close = lambda self: None


@pytest.mark.parametrize(("client", "why"), [(NoThread, "can't start new thread"), (Babbler, "read 99")])
def test_whatever_fails_pages_go_another_way(
    carrier: NixlConnector, monkeypatch: pytest.MonkeyPatch, client: type, why: str
):
    monkeypatch.setattr(reader, "AgentClient", client)
    page = wanted()
    carrier.reader.queue_page(reader.NixlFetch(page, b"agent", 0))
    carrier.reader.start()
    until(lambda: carrier.has_results)
    assert [(each.request, each.failure) for each in carrier._landed] == [(page, reader.FAILED)]
    assert why in carrier.reader.last_error
    until(carrier.reader.settled.is_set)
    assert not carrier.reader.usable
    until(lambda: not memory_of_reads())


class Tended:
    """A process of this test's making."""

    pid = None
    begun: ClassVar[list[Tended]]

    def __init__(self, *_: object) -> None:
        self.up = threading.Event()
        self.begun.append(self)

    def send(self, _: object) -> None:
        pass

    def kill(self) -> None:
        self.up.set()

    close = kill


def test_a_receiver_without_nixl_tries_once(carrier: NixlConnector, monkeypatch: pytest.MonkeyPatch):
    class Without(Tended):
        begun: ClassVar[list[Tended]] = []

        def receive(self, _: float | None) -> AgentEvent:
            return AgentUnavailable("none of the packages is installed")

    monkeypatch.setattr(reader, "AgentClient", Without)
    carrier.reader.start()
    until(carrier.reader.settled.is_set)
    assert carrier.reader.resting_until == math.inf
    assert "none of the packages" in carrier.reader.last_error
    carrier.reader.start()
    carrier.reader.queue_page(reader.NixlFetch(wanted(), b"agent", 0))
    until(lambda: carrier.has_results)
    assert [each.failure for each in carrier._landed] == [reader.FAILED]
    assert not carrier.reader.usable
    assert len(Without.begun) == 1


def test_pages_go_by_sockets_while_a_new_process_comes_up(carrier: NixlConnector, monkeypatch: pytest.MonkeyPatch):
    class Mortal(Tended):
        begun: ClassVar[list[Tended]] = []
        ready = False

        def receive(self, _: float | None) -> AgentEvent:
            if self.ready:
                raise AgentGoneError("its process has ended")
            self.up.wait(30)
            self.ready = True
            return AgentReady(b"agent", 0)

    monkeypatch.setattr(reader, "AgentClient", Mortal)
    carrier.reader.start()
    for life in (1, 2):
        until(lambda life=life: len(Mortal.begun) == life)
        assert not carrier.reader.usable, "it has not come up"
        Mortal.begun[-1].up.set()
        until(lambda: carrier.reader.usable)
        carrier.reader.queue_page(reader.NixlFetch(wanted(), b"agent", 0))
        until(lambda life=life: len(carrier._landed) == life)
        assert not carrier.reader.usable
        carrier.reader.resting_until = 0.0
        assert not carrier.reader.usable, "rested, and without a process"
        carrier.reader.start()


def memory_of_reads() -> list[str]:
    links = []
    for each in Path("/proc/self/fd").iterdir():
        try:
            links.append(os.readlink(each))
        except FileNotFoundError:  # of this very look
            continue
    return [link for link in links if "memfd:penstock-nixl" in link]


@pytest.mark.parametrize("lacking", ["descriptors", "threads"])
def test_without_room_for_its_processes_pages_go_by_sockets(
    carrier: NixlConnector, monkeypatch: pytest.MonkeyPatch, lacking: str
):
    def none(*_: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        if lacking == "descriptors":
            patch.setattr(nixl_connector, "AgentClient", none)
        else:
            patch.setattr(threading.Thread, "start", no_thread)
            carrier.reader.start()
            assert not carrier.reader.usable
        at = carrier.grant_access(R, 1)
    assert at is not None
    assert not at.agent
    assert carrier.grant_access(R, 1) == at, "not tried again and again"
    assert carrier.exporter.pid is None


@long
def test_pages_come_by_nixl_where_both_have_it(rig: Rig):
    sender, receiver = ends(rig)
    for epoch in (1, 2, 3):
        hand_over(rig, epoch)
    assert receiver.reader.pages == 9
    assert sender._tcp.server._callers == set()
    maps = Path(f"/proc/{sender.exporter.pid}/maps").read_text().splitlines()
    (shared,) = (line for line in maps if "memfd:penstock-kv" in line)
    assert " r--s " in shared, "nobody can write there"


@long
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_pages_come_by_sockets_where_one_has_it_not(rig: Rig, who: str):
    sender, receiver = ends(rig)
    if who == "sender":
        assert sender.exporter.pid is not None
        os.kill(sender.exporter.pid, signal.SIGKILL)
        until(lambda: sender.exporter.ready is None)
    else:
        receiver.reader.resting_until = float("inf")
    hand_over(rig, 1)
    assert receiver.reader.pages == 0


@long
@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("who", ["sender", "receiver"])
def test_a_process_that_hangs_or_dies_costs_a_deadline_and_no_page(rig: Rig, who: str, how: signal.Signals):
    sender, receiver = ends(rig)
    hand_over(rig, 1)
    pid = sender.exporter.pid if who == "sender" else receiver.reader.pid
    taking = receiver.reader.pid
    assert pid is not None
    assert taking is not None
    strike(pid, how)
    began = time.monotonic()
    hand_over(rig, 2)
    assert time.monotonic() - began < 60
    if how is signal.SIGSTOP:
        assert receiver.reader.pages == 3
        assert "did not end in 3 s" in receiver.reader.last_error
        until(lambda: not psutil.pid_exists(taking))  # nor what it might still write
    if how is signal.SIGSTOP:
        os.kill(sender.exporter.pid or 0, signal.SIGCONT)
    receiver.reader.resting_until = 0.0
    hand_over(rig, 3)


@long
def test_what_was_stopped_is_not_written(rig: Rig):
    sender, receiver = ends(rig)
    hand_over(rig, 1)
    assert sender.exporter.pid is not None
    start(rig, epoch=2)
    strike(sender.exporter.pid, signal.SIGSTOP)
    offer_all(rig, epoch=2)
    rig.until(lambda: bool(receiver.reader._flying))
    receiver.stop_transfer(rig.source, rig.granted[0].request, 2)
    before = [rig.receiver_page(page) for page in OWN]
    for page in THEIRS:
        rig.sender_memory.view(page)[:] = bytes(rig.sender_memory.layout.page_bytes)  # type: ignore[arg-type]
    os.kill(sender.exporter.pid, signal.SIGCONT)
    until(lambda: not receiver.reader._flying)
    assert [rig.receiver_page(page) for page in OWN] == before
    assert not receiver.fetch_results()


@long
def test_nothing_is_left(rig: Rig):
    sender, receiver = ends(rig)
    hand_over(rig, 1)
    assert receiver.exporter.pid is None, "who only takes needs no process to give"
    pids = [sender.exporter.pid, receiver.reader.pid]
    for carrier in (sender, receiver):
        carrier.close()
    assert not [pid for pid in pids if pid is None or psutil.pid_exists(pid)]
