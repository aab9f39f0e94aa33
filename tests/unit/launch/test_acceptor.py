"""Processes that share a port: none takes much more than its share, and no connection waits for who does not come."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from penstock.clock import VirtualClock
from penstock.launch.heartbeat import HeartbeatTable
from penstock.launch.http_server import ALONE_AT_ONCE, FRESH_S, LEAD, PATIENCE_S, RETRY_S, SLACK, Acceptor, is_ahead
from penstock.types import WorkerState


class Port:
    """One listening socket, clients that have connected, and acceptors whose connections stay open."""

    def __init__(self, stack: ExitStack, acceptors: int) -> None:
        self.clock = VirtualClock(100.0)
        self.board = HeartbeatTable(acceptors)
        self._stack = stack
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=1024))
        self.taken: list[list[socket.socket]] = [[] for _ in range(acceptors)]
        self.acceptors = [self._acceptor(number) for number in range(acceptors)]
        for number in range(acceptors):
            self.board.slots[number].reset(1, 0)
            self.board.slots[number].set_state(WorkerState.READY)
        self.beat()

    def _acceptor(self, number: int) -> Acceptor:
        slots, taken = self.board.slots, self.taken[number]
        siblings = [slot for index, slot in enumerate(slots) if index != number]

        def take(connection: socket.socket) -> None:
            taken.append(self._stack.enter_context(connection))

        return Acceptor(self.listener, (slots[number], siblings), take, lambda: len(taken), self.clock)

    def connect(self, clients: int) -> None:
        for _ in range(clients):
            self._stack.enter_context(socket.create_connection(self.listener.getsockname()))

    def beat(self, *numbers: int) -> None:
        now_ns = int(self.clock.now() * 1e9)
        for number in numbers or range(len(self.acceptors)):
            self.board.slots[number].beat(now_ns, now_ns, 1)

    def counts(self) -> list[int]:
        return [len(taken) for taken in self.taken]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


async def turn(port: Port, number: int, turns: int = 1) -> None:
    """As many turns of an acceptor's loop with a connection waiting.  The listener is readable all the time."""
    for _ in range(turns):
        port.acceptors[number].on_readable()
        await asyncio.sleep(0)


async def test_a_burst_is_shared_however_often_each_process_gets_its_turn(stack: ExitStack):
    port = Port(stack, 2)
    port.listener.setblocking(False)
    port.connect(400)
    while sum(port.counts()) < 400:
        await turn(port, 0, turns=37)
        await turn(port, 1, turns=5)
    assert max(port.counts()) <= 1.2 * 200


async def test_who_does_not_come_is_waited_for_and_not_for_long(stack: ExitStack):
    """A process that beats and takes nothing: a turn of its loop is long."""
    port = Port(stack, 2)
    port.listener.setblocking(False)
    port.connect(20)
    await turn(port, 0, turns=100)
    assert port.counts() == [SLACK, 0]
    for _ in range(round(PATIENCE_S / RETRY_S) + 1):
        port.clock.advance(RETRY_S)
        await turn(port, 0)
    assert port.counts() == [SLACK + 1, 0]


async def test_who_does_not_beat_any_more_is_not_waited_for(stack: ExitStack):
    port = Port(stack, 2)
    port.listener.setblocking(False)
    port.connect(20)
    port.clock.advance(FRESH_S + 0.1)
    port.beat(0)
    await turn(port, 0)
    assert port.counts() == [20, 0]
    port.beat()
    port.board.slots[1].set_state(WorkerState.DRAINING)
    port.connect(ALONE_AT_ONCE)
    await turn(port, 0)
    assert port.counts() == [20 + ALONE_AT_ONCE, 0]


async def test_connections_that_are_over_at_once_are_shared_too(stack: ExitStack):
    port = Port(stack, 2)
    port.listener.setblocking(False)
    accepted = 0
    for _ in range(40):
        port.connect(1)
        await turn(port, 0)
        accepted += len(port.taken[0])
        port.taken[0].clear()
    assert accepted == SLACK
    assert is_ahead(SLACK, [0])
    assert not is_ahead(100, [round(100 / LEAD)])


async def test_a_process_without_room_for_connections_tries_again(stack: ExitStack, monkeypatch: pytest.MonkeyPatch):
    port = Port(stack, 1)
    port.connect(1)

    class Full:
        def __getattr__(self, name: str) -> object:
            return getattr(port.listener, name)

        def accept(self) -> object:
            raise OSError(24, "Too many open files")

    acceptor = port.acceptors[0]
    acceptor.start()
    monkeypatch.setattr(acceptor, "_listener", Full())
    acceptor.on_readable()
    assert acceptor._timer is not None
    monkeypatch.setattr(acceptor, "_listener", port.listener)
    acceptor._go_on()
    acceptor.on_readable()
    assert port.counts() == [1]
    acceptor.stop()
    acceptor.stop()
