"""Links and streams: what they do when a queue is full, a message is bad, nobody waits."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

import pytest
from router_words import report

from penstock.clock import VirtualClock
from penstock.config.schema import GatewayConfig
from penstock.errors import ConfigError
from penstock.router.links import WorkerLinks
from penstock.router.service import RouterService
from penstock.types import RequestId, Role, WorkerId
from penstock.wire.gateway_messages import Cancel, Hello, TokenItem, Tokens, WorkerReport
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.supervisor_messages import WorkerUp
from penstock.wire.transport import AsyncLink

D0 = WorkerId("decode-0")
HELLO = Hello(gateway="g", incarnation=1)


def cancel(name: str) -> Cancel:
    return Cancel(request=RequestId(name), epoch=1)


async def settle() -> None:
    for _ in range(6):
        await asyncio.sleep(0)


async def test_a_cancel_that_cannot_leave_leaves_with_a_later_beat():
    hub = InMemoryHub(capacity=2)
    mailbox = hub.listen("memory://d")
    links = WorkerLinks(hub.connect_async, lambda *_: None)
    link = links.open(D0, 1, "memory://d")
    assert link.send(HELLO)
    for name in "abc":
        link.cancel(cancel(name))
    assert not link.send(HELLO)

    def read() -> list[str]:
        heard = []
        while (received := mailbox.recv()) is not None:
            heard.append(received.message.request if isinstance(received.message, Cancel) else "hello")
        return heard

    assert read() == ["hello", "a"]
    links.send_heartbeats(HELLO)
    assert read() == ["hello", "b"]
    link.cancel(cancel("d"))
    links.send_heartbeats(HELLO)
    assert read() == ["hello", "c"]
    links.send_heartbeats(HELLO)
    assert read() == ["hello", "d"]
    assert links.dropped > 0
    await links.close()


async def test_only_the_current_incarnation_has_a_link():
    hub = InMemoryHub()
    links = WorkerLinks(hub.connect_async, lambda *_: None)
    links.open(D0, 1, "memory://d1")
    links.open(D0, 2, "memory://d2")
    assert links.link_to(D0, 1) is None
    assert links.link_to(D0, 2) is not None
    links.close_link(D0)
    links.close_link(D0)
    assert links.link_to(D0, 2) is None
    await links.close()


async def test_a_message_that_cannot_be_handled_is_told_and_the_next_one_is(caplog):
    hub = InMemoryHub()
    mailbox = hub.listen("memory://d")
    heard: list[tuple[WorkerId, int]] = []

    def handle(worker: WorkerId, incarnation: int, message: object) -> None:
        if isinstance(message, WorkerReport) and message.steps == 13:
            raise RuntimeError("unlucky")
        heard.append((worker, incarnation))

    links = WorkerLinks(hub.connect_async, handle)
    links.open(D0, 4, "memory://d").send(HELLO)
    received = mailbox.recv()
    assert received is not None
    mailbox.send(received.peer, report("decode-0", steps=13))
    mailbox.send(received.peer, report("decode-0"))
    with caplog.at_level(logging.ERROR):
        await settle()
    assert heard == [(D0, 4)]
    assert "a message of decode-0 could not be handled" in caplog.text
    assert "RuntimeError: unlucky" in caplog.text
    await links.close()


async def test_a_strange_endpoint_is_refused():
    links = WorkerLinks(InMemoryHub().connect_async, lambda *_: None)
    with pytest.raises(ConfigError):
        links.open(D0, 1, "carrier-pigeon://d")
    await links.close()


async def test_closing_links_ends_their_readers():
    hub = InMemoryHub()
    links = WorkerLinks(hub.connect_async, lambda *_: None)
    links.open(D0, 1, "memory://d")
    before = asyncio.all_tasks()
    assert {task.get_name() for task in before} >= {"link decode-0"}
    await links.close()
    assert {task.get_name() for task in asyncio.all_tasks()}.isdisjoint({"link decode-0"})


async def test_a_worker_whose_link_cannot_be_made_yet_gets_one_with_a_later_beat():
    hub, clock, tries = InMemoryHub(), VirtualClock(1.0), []

    def connect(endpoint: str, *, worker: str = "") -> AsyncLink:
        tries.append(endpoint)
        if len(tries) < 3:
            raise ConfigError("cannot open a socket: Too many open files")
        return hub.connect_async(endpoint)

    mailbox = hub.listen("memory://d")
    config = GatewayConfig(name="g", model_name="m")
    service = RouterService(config, connect=connect, clock=clock, suspect=lambda _: None)
    service.on_supervisor(WorkerUp(worker=D0, incarnation=1, role=Role.BOTH, pid=1, endpoint="memory://d"))
    for _ in range(2):
        assert mailbox.recv() is None
        clock.advance(config.failover.beat_s)
        service.tick()
    assert isinstance(mailbox.recv().message, Hello)
    await service.close()


def tokens_of(*names: str) -> Tokens:
    return Tokens(
        worker=D0,
        incarnation=1,
        items=tuple(TokenItem(request=RequestId(n), epoch=1, index=0, tokens=(7,)) for n in names),
    )


async def test_tokens_of_many_requests_are_handled_in_the_order_they_came_so_many_a_turn():
    most, hub, links_made = 64, InMemoryHub(), 3
    turn, per_turn, heard = 0, Counter[int](), {f"decode-{i}": list[str]() for i in range(links_made)}

    def count_turns() -> None:
        nonlocal turn
        turn += 1
        asyncio.get_running_loop().call_soon(count_turns)

    def handle(worker: WorkerId, incarnation: int, message: object) -> None:
        if isinstance(message, Tokens):
            per_turn[turn] += len(message.items)
            heard[worker] += [item.request for item in message.items]
        else:
            heard[worker].append("report")

    links = WorkerLinks(hub.connect_async, handle, units_per_turn=most)
    names = [f"r{n}" for n in range(600)]
    for worker in heard:
        mailbox = hub.listen(f"memory://{worker}")
        links.open(WorkerId(worker), 1, f"memory://{worker}").send(HELLO)
        received = mailbox.recv()
        assert received is not None
        mailbox.send(received.peer, tokens_of(*names))
        mailbox.send(received.peer, tokens_of("last"))
        mailbox.send(received.peer, report(worker))
    count_turns()
    for _ in range(200):
        await asyncio.sleep(0)
    assert all(came == [*names, "last", "report"] for came in heard.values())
    assert max(per_turn.values()) <= most
    await links.close()
