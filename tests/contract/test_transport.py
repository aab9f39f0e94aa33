"""One suite for every transport: memory, ipc and TCP (both with CURVE)."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator

import pytest
from transport_place import PATIENCE_S, Place, fresh_name, note

from penstock.errors import ConfigError
from penstock.types import PageId, RequestId
from penstock.wire import codec
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import Cancel
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.transfer_messages import HandOverAlive, PageReady
from penstock.wire.transport import Link, Listener
from penstock.wire.zeromq import ZmqTransport


@pytest.fixture(params=["memory", "ipc", "tcp"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    name = fresh_name()
    match request.param:
        case "memory":
            made = Place(InMemoryHub(), f"memory://{name}")
        case "ipc":
            made = Place(ZmqTransport(CurveKeys.ephemeral()), f"ipc://@penstock-{name}")
        case _:
            made = Place(ZmqTransport(CurveKeys.ephemeral()), "tcp://127.0.0.1:0")
    yield made
    made.transport.close()


@pytest.fixture
def ends(place: Place) -> tuple[Listener, Link]:
    listener = place.transport.listen(place.endpoint)
    return listener, place.transport.connect(listener.endpoint)


def test_messages_and_payloads_go_both_ways(place: Place, ends: tuple[Listener, Link]) -> None:
    listener, link = ends
    page = PageReady(
        request=RequestId("r"), epoch=1, index=0, tokens=16, page=PageId(3), generation=1, checksum=bytes(16)
    )
    assert link.send(note(1))
    got = place.wait_for(listener, link)
    assert got.message == note(1)
    assert got.payload is None
    body = bytearray(os.urandom(200_000))
    assert listener.send(got.peer, page, memoryview(body))
    sent = bytes(body)
    body[:] = bytes(len(body))  # the sender may reuse its memory at once
    back = place.wait_for(link, listener)
    assert (back.peer, back.message) == (b"", page)
    assert back.payload is not None
    assert bytes(back.payload) == sent
    assert listener.counters.sent == link.counters.sent == 1


def test_order_is_kept_and_peers_are_told_apart(place: Place, ends: tuple[Listener, Link]) -> None:
    listener, first = ends
    second = place.transport.connect(listener.endpoint)
    for number in range(100):
        assert first.send(note(number))
        assert second.send(note(1000 + number))
    seen: dict[bytes, list[int]] = {}
    for _ in range(200):
        got = place.wait_for(listener, first, second)
        assert isinstance(got.message, Cancel)
        seen.setdefault(got.peer, []).append(got.message.epoch)
    assert sorted(seen.values()) == [list(range(100)), list(range(1000, 1100))]


def test_messages_wait_for_a_listener_that_comes_later(place: Place) -> None:
    if place.endpoint.startswith("tcp"):
        probe = place.transport.listen(place.endpoint)
        place.endpoint = probe.endpoint
        probe.close()
    link = place.transport.connect(place.endpoint)
    assert link.send(note(7))
    deadline = time.monotonic() + PATIENCE_S
    while True:
        try:
            listener = place.transport.listen(place.endpoint)
            break
        except ConfigError:  # the probe's port is given back by another thread
            assert time.monotonic() < deadline
    assert place.wait_for(listener, link).message == note(7)


def test_recv_and_wait_say_when_there_is_nothing(place: Place, ends: tuple[Listener, Link]) -> None:
    listener, link = ends
    assert listener.recv() is None
    assert link.recv() is None
    assert not place.transport.wait(0, [link])


def test_sending_to_nobody_is_answered_not_raised(place: Place, ends: tuple[Listener, Link]) -> None:
    listener, _ = ends
    assert not listener.send(b"\x00none", note(1))
    assert listener.counters.unsent == 1


def test_a_peer_that_left_is_noticed_when_sent_to(place: Place, ends: tuple[Listener, Link]) -> None:
    listener, link = ends
    assert link.send(note(1))
    peer = place.wait_for(listener, link).peer
    link.close()
    deadline = time.monotonic() + PATIENCE_S
    while listener.send(peer, note(2)):
        assert time.monotonic() < deadline
        place.transport.wait(0.01, [listener])
    assert listener.counters.unsent >= 1


def test_what_cannot_be_encoded_is_answered_not_raised(
    place: Place, ends: tuple[Listener, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or one message would end the process that sends it."""
    listener, link = ends
    assert link.send(note(1))
    peer = place.wait_for(listener, link).peer
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 1000)
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    large = Cancel(request=RequestId("r" * 1001), epoch=1)
    for message, payload in ((note(1), memoryview(bytes(1001))), (large, None), (note(1 << 70), None)):
        assert not link.send(message, payload)
        assert not listener.send(peer, message, payload)
    assert (link.counters.unsent, listener.counters.unsent) == (3, 3)
    assert not codec.fits_in_frame(large)
    assert link.send(note(2))
    assert place.wait_for(listener, link).message == note(2)


def test_closing_twice_is_fine_and_names_can_be_used_again(place: Place) -> None:
    listener = place.transport.listen(place.endpoint)
    listener.close()
    listener.close()
    place.transport.close()
    place.transport.close()


def test_a_closed_end_takes_and_gives_nothing(place: Place, ends: tuple[Listener, Link]) -> None:
    listener, link = ends
    assert link.send(note(1))
    peer = place.wait_for(listener, link).peer
    link.close()
    assert not link.send(note(2))
    assert link.recv() is None
    listener.close()
    assert not listener.send(peer, note(3))
    assert listener.recv() is None
    assert (link.counters.unsent, listener.counters.unsent) == (1, 1)


TOO_LONG = "ipc:///" + "x" * 107


@pytest.mark.parametrize(
    "endpoint", ["", "memory://", "ipc://x", "ipc://@", TOO_LONG, "tcp://1.2.3.4", "udp://a:1", "a"]
)
def test_endpoints_of_no_known_kind_are_refused(place: Place, endpoint: str) -> None:
    for use in (place.transport.listen, place.transport.connect):
        with pytest.raises(ConfigError, match="endpoint"):
            use(endpoint)


async def test_an_async_link_iterates_until_it_is_closed(place: Place) -> None:
    listener = place.transport.listen(place.endpoint)
    link = place.transport.connect_async(listener.endpoint)
    got: list[int] = []
    done = asyncio.Event()

    async def reader() -> None:
        async for received in link:
            assert isinstance(received.message, Cancel)
            got.append(received.message.epoch)
            if len(got) == 300:
                done.set()

    task = asyncio.create_task(reader())
    assert link.send(note(0))
    peer = await asyncio.to_thread(place.wait_for, listener) if "memory" not in place.endpoint else listener.recv()
    assert peer is not None
    for number in range(300):
        assert listener.send(peer.peer, note(number))
        link.send(HandOverAlive(request=RequestId("r"), epoch=number))
    await asyncio.wait_for(done.wait(), PATIENCE_S)
    assert got == list(range(300))
    link.close()
    await asyncio.wait_for(task, PATIENCE_S)
    for number in range(300):
        received = place.wait_for(listener)
        assert received.message == HandOverAlive(request=RequestId("r"), epoch=number)


async def test_a_busy_async_link_lets_other_tasks_run(place: Place) -> None:
    listener = place.transport.listen(place.endpoint)
    link = place.transport.connect_async(listener.endpoint)
    assert link.send(note(0))
    first = listener.recv() if "memory" in place.endpoint else await asyncio.to_thread(place.wait_for, listener)
    assert first is not None
    turns = 0

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    task = asyncio.create_task(other())
    for number in range(1000):
        assert listener.send(first.peer, note(number))
    async with asyncio.timeout(PATIENCE_S):
        for _ in range(1000):
            await anext(link)
    assert turns >= 5
    task.cancel()
    link.close()
