"""What only real sockets can do: keys, hostile frames, full queues, last words, forks."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from multiprocessing.connection import Connection

import pytest
import zmq
from transport_place import PATIENCE_S, Place, fresh_name, note

from penstock.errors import ConfigError
from penstock.launch.run_folder import RunFolder
from penstock.types import WorkerId
from penstock.wire import codec, zeromq
from penstock.wire.codec import PROTOCOL_VERSION
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.curve_sockets import ConnectionEvents
from penstock.wire.supervisor_messages import WorkerDown
from penstock.wire.transport import Link, Listener
from penstock.wire.zeromq import ZmqIntervals, ZmqTransport


def zmq_pair(server: CurveKeys, client: CurveKeys) -> tuple[ZmqTransport, ZmqTransport, Listener, Link]:
    a, b = ZmqTransport(server), ZmqTransport(client)
    listener = a.listen(f"ipc://@penstock-{fresh_name()}")
    return a, b, listener, b.connect(listener.endpoint)


def mixed(server: CurveKeys, client: CurveKeys) -> CurveKeys:
    return CurveKeys(
        server_public=server.server_public,
        server_secret=server.server_secret,
        client_public=client.client_public,
        client_secret=client.client_secret,
    )


def test_the_right_keys_are_let_in() -> None:
    keys = CurveKeys.ephemeral()
    a, b, listener, link = zmq_pair(keys, keys)
    with closing(a), closing(b):
        assert link.send(note(1))
        assert Place(a, "").wait_for(listener).message == note(1)


def test_an_unknown_client_key_is_not_let_in_even_with_the_servers_public_key() -> None:
    keys = CurveKeys.ephemeral()
    a, b, listener, link = zmq_pair(keys, mixed(keys, CurveKeys.ephemeral()))
    with closing(a), closing(b):
        assert link.send(note(1))
        assert Place(a, "").quiet(listener)


def test_a_link_talks_only_to_the_server_it_knows() -> None:
    keys = CurveKeys.ephemeral()
    a, b, listener, link = zmq_pair(keys, mixed(CurveKeys.ephemeral(), keys))
    with closing(a), closing(b):
        assert link.send(note(1))
        assert Place(a, "").quiet(listener)


def test_clear_text_is_not_let_in() -> None:
    transport = ZmqTransport(CurveKeys.ephemeral())
    listener = transport.listen(f"ipc://@penstock-{fresh_name()}")
    with closing(transport), zmq.Context() as context, context.socket(zmq.DEALER) as plain:
        plain.setsockopt(zmq.LINGER, 0)
        plain.connect(listener.endpoint)
        plain.send(codec.encode_message(note(1)))
        assert Place(transport, "").quiet(listener)


def test_hostile_frames_are_counted_and_dropped() -> None:
    keys = CurveKeys.ephemeral()
    a, b, listener, link = zmq_pair(keys, keys)
    with closing(a), closing(b):
        raw = link.socket  # type: ignore[attr-defined]
        supervisor_only = codec.encode_message(WorkerDown(worker="w", incarnation=1, state="dead", reason=""))  # type: ignore[arg-type]
        good = codec.encode_message(note(1))
        other = bytes((PROTOCOL_VERSION + 1,)) + good[1:]
        hostile = [[b""], [good[:1]], [other], [good, b"p", b"q"], [good + b"x"], [supervisor_only]]
        for frames in hostile:
            raw.send_multipart(frames)
        assert link.send(note(2))
        assert Place(a, "").wait_for(listener).message == note(2)
        assert listener.counters.malformed == len(hostile)


def test_ends_of_two_versions_learn_of_each_other(caplog: pytest.LogCaptureFixture) -> None:
    """A gateway that joins a worker of another version says which; so does a worker that such a gateway joins."""
    keys = CurveKeys.ephemeral()
    a, b, listener, link = zmq_pair(keys, keys)
    with closing(a), closing(b):
        old = link.socket  # type: ignore[attr-defined]
        for _ in range(3):
            old.send(bytes((PROTOCOL_VERSION - 1,)) + codec.encode_message(note(1))[1:])
        old.send(codec.version_probe())
        assert Place(a, "").quiet(listener)
        assert listener.counters.other_version == PROTOCOL_VERSION - 1
        assert [record.getMessage() for record in caplog.records] == [
            f"refused: {codec.version_reason(PROTOCOL_VERSION - 1)}"
        ]
        assert old.poll(5_000)
        assert [old.recv() for _ in range(4)] == [codec.VERSION_NOTICE] * 4

        assert link.send(note(2))
        peer = Place(a, "").wait_for(listener).peer
        listener.socket.send_multipart([peer, bytes((PROTOCOL_VERSION + 1,))])  # type: ignore[attr-defined]
        assert old.poll(5_000)
        assert link.recv() is None
        assert link.counters.other_version == PROTOCOL_VERSION + 1


def test_a_queue_that_is_full_is_answered_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.wire import zeromq

    monkeypatch.setattr(zeromq, "QUEUE_MESSAGES", 10)
    with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
        link = transport.connect("ipc://@penstock-test-nobody-listens")
        answers = [link.send(note(number)) for number in range(30)]
        assert answers[:10] == [True] * 10
        assert answers[-1] is False
        assert link.counters.unsent == 20


@pytest.mark.parametrize("endpoint", ["ipc", "tcp"])
def test_last_words_arrive_when_closing_waits_for_them(endpoint: str) -> None:
    """A worker that ends gives its requests back; who reads late must hear it all the same."""
    keys = CurveKeys.ephemeral()
    leaving, staying = ZmqTransport(keys), ZmqTransport(keys)
    try:
        name = f"ipc://@penstock-last-{os.getpid()}" if endpoint == "ipc" else "tcp://127.0.0.1:0"
        listener = leaving.listen(name)
        link = staying.connect(listener.endpoint)
        link.send(note(0))
        peer = Place(leaving, "").wait_for(listener).peer
        for number in range(500):
            assert listener.send(peer, note(number))
        leaving.close(linger_s=30.0)
        heard = [Place(staying, "").wait_for(link).message for _ in range(500)]
        assert heard == [note(number) for number in range(500)]
    finally:
        leaving.close()
        staying.close()


def test_closing_does_not_wait_longer_than_it_was_told() -> None:
    """Nobody listens: what was said there never leaves."""
    transport = ZmqTransport(CurveKeys.ephemeral())
    assert transport.connect(f"ipc://@penstock-nobody-{os.getpid()}").send(note(1))
    began = time.monotonic()
    transport.close(linger_s=0.05)
    assert time.monotonic() - began < 30  # else it would be forever


def _echo(endpoint: str, keys: CurveKeys, line: Connection) -> None:
    """A process that answers every message."""
    transport = ZmqTransport(keys)
    listener = transport.listen(endpoint)
    line.send(listener.endpoint)
    while True:
        transport.wait(None, [listener])
        while (received := listener.recv()) is not None:
            listener.send(received.peer, received.message)


@pytest.mark.parametrize("endpoint", ["tcp://127.0.0.1:0", "ipc://@penstock-{name}"])
async def test_an_async_link_notices_that_the_process_at_its_other_end_is_killed(
    endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeromq, "WATCHED_LINKS", 1)
    keys, fork = CurveKeys.ephemeral(), multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    peer = fork.Process(target=_echo, args=(endpoint.format(name=fresh_name()), keys, there), daemon=True)
    peer.start()
    with closing(ZmqTransport(keys)) as transport:
        address, ended = here.recv(), asyncio.Event()
        closed, link, unwatched = (transport.connect_async(address) for _ in range(3))
        closed.notify_disconnected(lambda: pytest.fail("it is closed"))
        closed.close()  # and another may be watched
        link.notify_disconnected(ended.set)
        unwatched.notify_disconnected(lambda: pytest.fail("one too many"))
        async with asyncio.timeout(PATIENCE_S):
            for each in (link, unwatched):
                assert each.send(note(0))
                await anext(each)
            assert not ended.is_set()
            peer.kill()
            await ended.wait()
            peer.join()


@contextlib.contextmanager
def _descriptors_left(count: int) -> Iterator[None]:
    """This process may open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = list[int]()
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(count):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for descriptor in taken:
            os.close(descriptor)


@pytest.mark.parametrize("left", [0, 1, 2, 3, 8])
async def test_a_link_that_is_not_watched_for_want_of_descriptors_stops_no_other(left: int) -> None:
    keys, fork = CurveKeys.ephemeral(), multiprocessing.get_context("fork")
    here, there = fork.Pipe()
    peer = fork.Process(target=_echo, args=("tcp://127.0.0.1:0", keys, there), daemon=True)
    peer.start()
    with closing(ZmqTransport(keys)) as transport:
        address = here.recv()
        links, ended = [transport.connect_async(address)], asyncio.Event()
        async with asyncio.timeout(PATIENCE_S):
            assert links[0].send(note(0))
            await anext(links[0])
            with _descriptors_left(left), contextlib.suppress(ConfigError):
                links.append(transport.connect_async(address))
                links[1].notify_disconnected(ended.set)
            watched = transport.watched_links
            if left != 3:  # the connection, which another thread opens, or what watches it takes the third
                assert watched == (left == 8), "a link has two, and what watches it two more"
            for each in links:
                assert each.send(note(1))
                await anext(each)
            peer.kill()
            peer.join()
            if watched:
                await ended.wait()
        for each in links:
            each.close()
        assert transport.watched_links == 0


def test_an_async_link_works_on_uvloop() -> None:
    import uvloop

    async def talk() -> list[int]:
        with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
            listener = transport.listen(f"ipc://@penstock-{fresh_name()}")
            link = transport.connect_async(listener.endpoint)
            assert link.send(note(0))
            first = await asyncio.to_thread(Place(transport, "").wait_for, listener)
            for number in range(200):
                assert listener.send(first.peer, note(number))
            async with asyncio.timeout(PATIENCE_S):
                return [(await anext(link)).message.epoch for _ in range(200)]  # type: ignore[union-attr]

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert runner.run(talk()) == list(range(200))


def test_a_taken_endpoint_is_a_config_error() -> None:
    with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
        listener = transport.listen("tcp://127.0.0.1:0")
        assert listener.endpoint != "tcp://127.0.0.1:0"
        with pytest.raises(ConfigError, match="in use"):
            transport.listen(listener.endpoint)


def test_wait_wakes_for_a_descriptor() -> None:
    with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
        listener = transport.listen(f"ipc://@penstock-{fresh_name()}")
        read, write = os.pipe()
        try:
            assert not transport.wait(0, [listener], [read])
            os.write(write, b"x")
            assert transport.wait(PATIENCE_S, [listener], [read])
        finally:
            os.close(read)
            os.close(write)


def test_a_forked_child_cannot_use_its_parents_transport() -> None:
    transport = ZmqTransport(CurveKeys.ephemeral())
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


def test_a_link_finds_whoever_listens_there_next_and_is_a_stranger_to_it() -> None:
    """What waited for the old connection may arrive at the new one or nowhere; nobody is told.  See ``Hello``."""
    keys = CurveKeys.ephemeral()
    with closing(ZmqTransport(keys)) as staying:
        with closing(ZmqTransport(keys)) as leaving:
            endpoint = leaving.listen("tcp://127.0.0.1:0").endpoint
            link = staying.connect(endpoint)
        with closing(ZmqTransport(keys)) as first:
            listener = first.listen(endpoint)
            assert link.send(note(0))
            one = Place(first, "").wait_for(listener).peer
        with closing(ZmqTransport(keys)) as second:
            listener = second.listen(endpoint)
            assert not listener.send(one, note(1))
            heard = None
            for number in range(100):  # a message that left as the connection broke is lost
                assert link.send(note(number))
                if second.wait(0.1, [listener]) and (heard := listener.recv()) is not None:
                    break
            assert heard is not None
            assert listener.send(heard.peer, note(7))
            assert Place(staying, "").wait_for(link).message == note(7)


FIRST_PEER = """
from contextlib import closing
from penstock.types import RequestId
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.gateway_messages import Cancel
from penstock.wire.zeromq import ZmqTransport

keys = CurveKeys.ephemeral()
with closing(ZmqTransport(keys)) as workers, closing(ZmqTransport(keys)) as gateways:
    listener = workers.listen("tcp://127.0.0.1:0")
    link = gateways.connect(listener.endpoint)
    link.send(Cancel(request=RequestId("r"), epoch=1))
    while (received := listener.recv()) is None:
        workers.wait(1.0, [listener])
print(received.peer.hex())
"""


def test_nobody_can_guess_what_the_next_connection_is_called() -> None:
    """Who takes that name has the library end the process."""
    command = [sys.executable, "-c", FIRST_PEER]
    peers = {subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE_S).stdout for _ in range(3)}
    assert len(peers) == 3


def test_connections_that_cannot_be_watched_cost_no_descriptor() -> None:
    """Tried again and again, they would take the last ones."""
    with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
        link = transport.connect(f"ipc://@penstock-{fresh_name()}")
        socket: zmq.Socket[bytes] = link.socket  # type: ignore[attr-defined]
        before = len(os.listdir("/proc/self/fd"))
        with _descriptors_left(1):
            for _ in range(3):
                with pytest.raises(zmq.ZMQError, match="Too many open files"):
                    ConnectionEvents(socket, int(zmq.EVENT_DISCONNECTED))
        deadline = time.monotonic() + PATIENCE_S
        while len(os.listdir("/proc/self/fd")) > before:  # another thread closes the last one
            assert time.monotonic() < deadline
            time.sleep(0.001)


def test_more_links_than_the_library_has_sockets_by_default() -> None:
    """A gateway has two links a worker."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 4096:
        pytest.skip(f"{hard} descriptors are too few here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
            links = [transport.connect(f"ipc://@penstock-nobody-{os.getpid()}-{number}") for number in range(1100)]
            assert all(link.send(note(1)) for link in links)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_no_more_sockets_is_a_config_error() -> None:
    with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
        transport._context.set(zmq.MAX_SOCKETS, 2)  # type: ignore[attr-defined]
        links = [transport.connect(f"ipc://@penstock-nobody-{os.getpid()}") for _ in range(2)]
        for make in (transport.connect, transport.listen):
            with pytest.raises(ConfigError, match="cannot open a socket"):
                make(f"ipc://@penstock-{fresh_name()}")
        assert links[0].send(note(1))


def test_a_stranger_who_says_nothing_is_hung_up_on() -> None:
    with closing(ZmqTransport(CurveKeys.ephemeral(), intervals=ZmqIntervals(handshake=50))) as transport:
        host, _, port = transport.listen("tcp://127.0.0.1:0").endpoint.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as stranger:
            while stranger.recv(4096):
                continue  # the library's greeting


def test_a_port_that_strangers_fill_is_shut_until_they_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    from penstock.wire import zeromq

    monkeypatch.setattr(zeromq, "most_connections", lambda: 8)
    keys = CurveKeys.ephemeral()
    with closing(ZmqTransport(keys)) as workers, closing(ZmqTransport(keys)) as gateways:
        listener = workers.listen("tcp://127.0.0.1:0")
        host, _, port = listener.endpoint.removeprefix("tcp://").rpartition(":")
        early = gateways.connect(listener.endpoint)
        assert early.send(note(1))
        assert Place(workers, "").wait_for(listener).message == note(1)

        strangers: list[socket.socket] = []
        deadline = time.monotonic() + PATIENCE_S
        with contextlib.suppress(TimeoutError):
            while time.monotonic() < deadline:
                strangers.append(socket.create_connection((host, int(port)), timeout=0.5))
                assert listener.recv() is None
                workers.wait(0.001, [listener])
            raise AssertionError("it takes everybody")
        assert len(strangers) >= 7
        assert early.send(note(2))
        assert Place(workers, "").wait_for(listener).message == note(2)

        for stranger in strangers:
            stranger.close()
        late = gateways.connect(listener.endpoint)
        assert late.send(note(3))
        assert Place(workers, "").wait_for(listener).message == note(3)


# --- other users of this host ----------------------------------------------------------------------------------------

NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_nobody(what: Callable[[], int]) -> int:
    """The exit code of a child that is another user."""
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os._exit(what())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def address_of(endpoint: str) -> str:
    path = endpoint.removeprefix("ipc://")
    return "\0" + path[1:] if path.startswith("@") else path


@as_root
def test_another_user_is_hung_up_on_before_a_word_is_said() -> None:
    with closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
        address = address_of(transport.listen(f"ipc://@penstock-{fresh_name()}").endpoint)

        def speak() -> int:
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.settimeout(PATIENCE_S)
                stranger.connect(address)
                try:
                    return len(stranger.recv(64))
                except ConnectionResetError:
                    return 0

        assert as_nobody(speak) == 0


@as_root
def test_another_user_cannot_reach_a_socket_in_the_folder_of_a_run() -> None:
    with closing(RunFolder()) as folder, closing(ZmqTransport(CurveKeys.ephemeral())) as transport:
        address = address_of(transport.listen(folder.endpoint(WorkerId("decode-0"), 1)).endpoint)

        def speak() -> int:
            with socket.socket(socket.AF_UNIX) as stranger:
                try:
                    stranger.connect(address)
                except PermissionError:
                    return 0
                return 1

        assert as_nobody(speak) == 0


LISTENER = """
import os, resource, sys
from penstock.wire.curve_keys import CurveKeys
from penstock.wire.zeromq import ZmqTransport
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
pairs = zip(sys.argv[2::2], sys.argv[3::2])
transport = ZmqTransport(CurveKeys(**{name: bytes.fromhex(value) for name, value in pairs}))
listener = transport.listen(sys.argv[1])
print("listens", flush=True)
while (received := listener.recv()) is None:
    transport.wait(1.0, [listener])
print(received.message.epoch, flush=True)
os._exit(0)
"""


@as_root
def test_another_user_who_connects_again_and_again_ends_nobody() -> None:
    """The library gives up with SIGABRT when a process has no descriptor left to accept a connection with."""
    keys = CurveKeys.ephemeral()
    endpoint = f"ipc://@penstock-{fresh_name()}"
    pairs = [part for name in CurveKeys.__slots__ for part in (name, getattr(keys, name).hex())]
    process = subprocess.Popen(
        [sys.executable, "-c", LISTENER, endpoint, *pairs],
        stdout=subprocess.PIPE,
        env={"PYTHONPATH": ":".join(part for part in sys.path if part), "PATH": ""},
    )
    with process, closing(ZmqTransport(keys)) as transport:
        assert process.stdout is not None
        assert process.stdout.readline() == b"listens\n"

        def storm() -> int:
            strangers = [socket.socket(socket.AF_UNIX) for _ in range(200)]
            for stranger in strangers:
                stranger.settimeout(PATIENCE_S)
                stranger.connect(address_of(endpoint))
            for stranger in strangers:  # all of them were looked at
                with contextlib.suppress(ConnectionResetError):
                    stranger.recv(64)
            return 0

        assert as_nobody(storm) == 0
        assert transport.connect(endpoint).send(note(7))
        assert process.stdout.readline() == b"7\n"
