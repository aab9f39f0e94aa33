"""One suite for every transport: memory, ipc and TCP (both with CURVE)."""

from __future__ import annotations

import asyncio
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import pytest

from penstock.errors import ConfigError, ProtocolError
from penstock.types import PageId, RequestId
from penstock.wire import codec
from penstock.wire.keys import Keys
from penstock.wire.memory import MemoryHub
from penstock.wire.messages import Cancel, HandOverAlive, PageReady, WorkerDown
from penstock.wire.transport import Link, Listener, Received, Transport
from penstock.wire.zeromq import ZmqTransport

_names = itertools.count()


@dataclass
class Place:
    """A transport, and where to listen on it."""

    transport: Transport
    endpoint: str

    def wait_for(self, end: Listener | Link, *others: Listener | Link) -> Received:
        """The next message at ``end``.  Fails after five seconds."""
        deadline = time.monotonic() + 5
        while time.monotonic() < deadline:
            if (received := end.recv()) is not None:
                return received
            self.transport.wait(0.1, [end, *others])
        raise AssertionError("nothing came")

    def quiet(self, end: Listener | Link, seconds: float = 0.3) -> bool:
        """Nothing comes for a while."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if end.recv() is not None:
                return False
            if not self.transport.wait(deadline - time.monotonic(), [end]):
                break
        return end.recv() is None


@pytest.fixture(params=["memory", "ipc", "tcp"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    name = f"test-{os.getpid()}-{next(_names)}"
    match request.param:
        case "memory":
            made = Place(MemoryHub(), f"memory://{name}")
        case "ipc":
            made = Place(ZmqTransport(Keys.ephemeral()), f"ipc://@penstock-{name}")
        case _:
            made = Place(ZmqTransport(Keys.ephemeral()), "tcp://127.0.0.1:0")
    yield made
    made.transport.close()


@pytest.fixture
def ends(place: Place) -> tuple[Listener, Link]:
    listener = place.transport.listen(place.endpoint)
    return listener, place.transport.connect(listener.endpoint)


def note(number: int) -> Cancel:
    return Cancel(request=RequestId("r"), epoch=number)


def test_messages_and_payloads_go_both_ways(place: Place, ends: tuple[Listener, Link]) -> None:
    listener, link = ends
    page = PageReady(
        request=RequestId("r"), epoch=1, block=0, tokens=16, page=PageId(3), generation=1, checksum=bytes(16)
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
    deadline = time.monotonic() + 5
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
    deadline = time.monotonic() + 5
    while listener.send(peer, note(2)):
        assert time.monotonic() < deadline
        place.transport.wait(0.01, [listener])
    assert listener.counters.unsent >= 1


def test_what_is_too_large_is_refused_at_the_sender(
    place: Place, ends: tuple[Listener, Link], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, link = ends
    monkeypatch.setattr(codec, "MAX_PAYLOAD_BYTES", 1000)
    with pytest.raises(ProtocolError, match="at most 1000"):
        link.send(note(1), memoryview(bytes(1001)))
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 1000)
    with pytest.raises(ProtocolError, match="at most 1000"):
        link.send(Cancel(request=RequestId("r" * 1001), epoch=1))


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


@pytest.mark.parametrize("endpoint", ["", "memory://", "ipc:///tmp/x", "ipc://@", "tcp://1.2.3.4", "udp://a:1", "a"])
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
    await asyncio.wait_for(done.wait(), 5)
    assert got == list(range(300))
    link.close()
    await asyncio.wait_for(task, 5)
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
    async with asyncio.timeout(5):
        for _ in range(1000):
            await anext(link)
    assert turns >= 5
    task.cancel()
    link.close()


# --- what only real sockets can do -----------------------------------------------------------------------------------


def zmq_pair(server: Keys, client: Keys) -> tuple[ZmqTransport, ZmqTransport, Listener, Link]:
    a, b = ZmqTransport(server), ZmqTransport(client)
    listener = a.listen(f"ipc://@penstock-test-{os.getpid()}-{next(_names)}")
    return a, b, listener, b.connect(listener.endpoint)


def mixed(server: Keys, client: Keys) -> Keys:
    return Keys(
        server_public=server.server_public,
        server_secret=server.server_secret,
        client_public=client.client_public,
        client_secret=client.client_secret,
    )


def test_the_right_keys_are_let_in() -> None:
    keys = Keys.ephemeral()
    a, b, listener, link = zmq_pair(keys, keys)
    with closing(a), closing(b):
        assert link.send(note(1))
        assert Place(a, "").wait_for(listener).message == note(1)


def test_an_unknown_client_key_is_not_let_in_even_with_the_servers_public_key() -> None:
    keys = Keys.ephemeral()
    a, b, listener, link = zmq_pair(keys, mixed(keys, Keys.ephemeral()))
    with closing(a), closing(b):
        assert link.send(note(1))
        assert Place(a, "").quiet(listener)


def test_a_link_talks_only_to_the_server_it_knows() -> None:
    keys = Keys.ephemeral()
    a, b, listener, link = zmq_pair(keys, mixed(Keys.ephemeral(), keys))
    with closing(a), closing(b):
        assert link.send(note(1))
        assert Place(a, "").quiet(listener)


def test_clear_text_is_not_let_in() -> None:
    import zmq

    transport = ZmqTransport(Keys.ephemeral())
    listener = transport.listen(f"ipc://@penstock-test-{os.getpid()}-{next(_names)}")
    with closing(transport), zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(listener.endpoint)
        plain.send(codec.encode(note(1)))
        assert Place(transport, "").quiet(listener)


def test_hostile_frames_are_counted_and_dropped() -> None:
    keys = Keys.ephemeral()
    a, b, listener, link = zmq_pair(keys, keys)
    with closing(a), closing(b):
        raw = link.socket  # type: ignore[attr-defined]
        supervisor_only = codec.encode(WorkerDown(worker="w", incarnation=1, state="dead", reason=""))  # type: ignore[arg-type]
        good = codec.encode(note(1))
        hostile = [[b""], [b"\x01"], [b"\x02" + good[1:]], [good, b"p", b"q"], [good + b"x"], [supervisor_only]]
        for frames in hostile:
            raw.send_multipart(frames)
        assert link.send(note(2))
        assert Place(a, "").wait_for(listener).message == note(2)
        assert listener.counters.malformed == len(hostile)


def test_a_queue_that_is_full_is_answered_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.wire import zeromq

    monkeypatch.setattr(zeromq, "QUEUE_MESSAGES", 10)
    with closing(ZmqTransport(Keys.ephemeral())) as transport:
        link = transport.connect("ipc://@penstock-test-nobody-listens")
        answers = [link.send(note(number)) for number in range(30)]
        assert answers[:10] == [True] * 10
        assert answers[-1] is False
        assert link.counters.unsent == 20


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"])
def test_last_words_arrive_when_closing_waits_for_them(endpoint: str) -> None:
    """A worker that ends gives its requests back; who reads late must hear it all the same."""
    keys = Keys.ephemeral()
    leaving, staying = ZmqTransport(keys), ZmqTransport(keys)
    try:
        name = f"ipc://@penstock-last-{os.getpid()}" if endpoint == "ipc" else "tcp://127.0.0.1:0"
        listener = leaving.listen(name)
        link = staying.connect(listener.endpoint)
        link.send(note(0))
        peer = Place(leaving, "").wait_for(listener).peer
        for number in range(500):
            assert listener.send(peer, note(number))
        leaving.close(linger_s=5.0)
        heard = [Place(staying, "").wait_for(link).message for _ in range(500)]
        assert heard == [note(number) for number in range(500)]
    finally:
        leaving.close()
        staying.close()


def test_closing_does_not_wait_longer_than_it_was_told() -> None:
    """Nobody listens: what was said there never leaves."""
    transport = ZmqTransport(Keys.ephemeral())
    assert transport.connect(f"ipc://@penstock-nobody-{os.getpid()}").send(note(1))
    began = time.monotonic()
    transport.close(linger_s=0.05)
    assert time.monotonic() - began < 30  # else it would be forever


def test_an_async_link_works_on_uvloop() -> None:
    import uvloop

    async def talk() -> list[int]:
        with closing(ZmqTransport(Keys.ephemeral())) as transport:
            listener = transport.listen(f"ipc://@penstock-test-{os.getpid()}-{next(_names)}")
            link = transport.connect_async(listener.endpoint)
            assert link.send(note(0))
            first = await asyncio.to_thread(Place(transport, "").wait_for, listener)
            for number in range(200):
                assert listener.send(first.peer, note(number))
            async with asyncio.timeout(5):
                return [(await anext(link)).message.epoch for _ in range(200)]  # type: ignore[union-attr]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(talk()) == list(range(200))


def test_a_taken_endpoint_is_a_config_error() -> None:
    with closing(ZmqTransport(Keys.ephemeral())) as transport:
        listener = transport.listen("tcp://127.0.0.1:0")
        assert listener.endpoint != "tcp://127.0.0.1:0"
        with pytest.raises(ConfigError, match="in use"):
            transport.listen(listener.endpoint)


def test_wait_wakes_for_a_descriptor() -> None:
    with closing(ZmqTransport(Keys.ephemeral())) as transport:
        listener = transport.listen(f"ipc://@penstock-test-{os.getpid()}-{next(_names)}")
        read, write = os.pipe()
        try:
            assert not transport.wait(0, [listener], [read])
            os.write(write, b"x")
            assert transport.wait(5, [listener], [read])
        finally:
            os.close(read)
            os.close(write)


def test_a_forked_child_cannot_use_its_parents_transport() -> None:
    transport = ZmqTransport(Keys.ephemeral())
    child = os.fork()
    if child == 0:
        try:
            transport.connect("ipc://@x")
        except RuntimeError:
            transport.close()
            os._exit(0)
        os._exit(1)
    with closing(transport):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
