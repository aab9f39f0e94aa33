"""Workers of other hosts on a virtual clock: who is up, who is down, and who may come back."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest

from penstock.clock import VirtualClock
from penstock.errors import ConfigError
from penstock.launch.members.interface import Member
from penstock.launch.remote_workers import (
    GREETINGS_PER_LINK,
    LOST_S,
    OPENED_PER_TICK,
    PROBE_PAUSE_S,
    PROBED_AT_ONCE,
    RemoteWorkers,
    refuses_connections,
)
from penstock.router.fleet import Fleet
from penstock.types import RESTART_BITS, ModelIdentity, Role, WorkerId, WorkerState
from penstock.wire.codec import PROTOCOL_VERSION, PeerMessage, version_reason
from penstock.wire.gateway_messages import Hello, WorkerReport
from penstock.wire.in_memory import InMemoryHub
from penstock.wire.supervisor_messages import SupervisorMessage, WorkerDown, WorkerRemoved, WorkerUp
from penstock.wire.transport import Received, WireCounters

A, B = "tcp://a:1", "tcp://b:1"
BEAT_S = 0.25


def members_at(*endpoints: str) -> list[Member]:
    return [Member(name=endpoint, endpoint=endpoint) for endpoint in endpoints]


class Line:
    """A link that only counts."""

    speaks = 0
    closed = False

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.counters = WireCounters()
        self.sent: list[PeerMessage] = []

    async def __aiter__(self) -> AsyncIterator[Received]:
        for message in ():  # nothing comes
            yield message

    def send(self, message: PeerMessage, payload: memoryview | None = None) -> bool:
        self.sent.append(message)
        return True

    def probe_version(self) -> bool:
        self.counters.other_version = self.speaks
        return True

    def close(self) -> None:
        self.closed = True


class OldLine(Line):
    """A link to a worker of the version before, which answers only a probe."""

    speaks = 3


def report_of(worker: str, numerics: str = "n", incarnation: int = 5) -> WorkerReport:
    return WorkerReport(
        worker=WorkerId(worker),
        incarnation=incarnation,
        role=Role.DECODE,
        state=WorkerState.READY,
        pid=7,
        identity=ModelIdentity(fingerprint="f", numerics=numerics),
        max_model_len=64,
    )


class Town:
    """Two mailboxes, what the router is told, and a real fleet that takes it in."""

    def __init__(self, *, mixed: bool = False) -> None:
        self.clock = VirtualClock(1000.0)
        self.told: list[SupervisorMessage] = []
        self.removed: list[str] = []
        self.fleet = Fleet()
        self.lines: list[Line] = []
        hello = Hello(gateway="gateway-0-join", incarnation=1)
        self.joined = RemoteWorkers(self._connect, self._tell, hello, clock=self.clock, beat_s=BEAT_S, uses_mixed=mixed)
        self.joined.set_members(members_at(A, B))

    def _connect(self, endpoint: str) -> Line:
        self.lines.append(Line(endpoint))
        return self.lines[-1]

    def _tell(self, message: SupervisorMessage) -> None:
        self.told.append(message)
        if isinstance(message, WorkerUp):
            assert self.fleet.on_worker_up(message, self.clock.now()) or message.labels
        elif isinstance(message, WorkerDown):
            assert self.fleet.on_worker_down(message)
        elif isinstance(message, WorkerRemoved):
            self.removed.append(message.worker)

    def report(self, endpoint: str, worker: str, incarnation: int) -> None:
        report = report_of(worker, incarnation=incarnation)
        self.joined.on_report(endpoint, report)
        self.fleet.on_report(report, self.clock.now())

    def pass_time(self, seconds: float, *, speaking: tuple[tuple[str, str, int], ...] = ()) -> None:
        end = self.clock.now() + seconds
        while self.clock.now() < end:
            self.clock.advance(BEAT_S)
            for words in speaking:
                self.report(*words)
            self.joined.tick()

    def news(self) -> list[tuple[str, str, int]]:
        told, self.told = self.told, []
        return [
            ("up" if isinstance(m, WorkerUp) else "down", m.worker, m.incarnation)
            for m in told
            if isinstance(m, WorkerUp | WorkerDown)
        ]


@pytest.fixture
def town() -> Town:
    return Town()


def test_everybody_is_greeted_again_and_again(town: Town) -> None:
    town.pass_time(1.0)
    assert [len(line.sent) for line in town.lines] == [4, 4]
    assert town.news() == []


def test_a_worker_of_a_mixed_fleet_is_used_where_that_is_allowed(caplog: pytest.LogCaptureFixture) -> None:
    town = Town()
    for _ in range(3):
        town.joined.on_report(A, report_of("d", "triton-1>cpp-1"))
    assert town.news() == []
    (told,) = [record.getMessage() for record in caplog.records]
    assert "tcp://a:1 is not used" in told
    assert "triton-1>cpp-1; to use it add --allow-mixed-numerics" in told
    town = Town(mixed=True)
    town.joined.on_report(A, report_of("d", "triton-1>cpp-1"))
    assert town.news() == [("up", "d", 5)]


def test_the_first_report_is_an_arrival_and_the_next_is_none(town: Town) -> None:
    town.report(A, "d", 5)
    town.report(A, "d", 5)
    assert town.news() == [("up", "d", 5)]
    town.pass_time(60.0, speaking=((A, "d", 5),))
    assert town.news() == []


def test_a_new_incarnation_replaces_the_old_one(town: Town) -> None:
    town.report(A, "d", 5)
    town.report(A, "d", 6)
    assert town.news() == [("up", "d", 5), ("down", "d", 5), ("up", "d", 6)]


def test_silence_is_an_end_until_the_same_one_speaks_again(town: Town) -> None:
    """As after a broken cable: the process was there all the while."""
    town.report(A, "d", 5)
    town.pass_time(LOST_S + 2 * BEAT_S)
    assert town.news() == [("up", "d", 5), ("down", "d", 5)]
    assert town.fleet.status_rows()[0]["state"] == "dead"
    town.pass_time(10.0)
    assert town.news() == []
    town.report(A, "d", 5)
    assert town.news() == [("up", "d", 5)]
    assert town.fleet.status_rows()[0]["state"] == "ready"


def test_a_run_that_begins_after_the_clock_was_set_back_is_taken_as_any_other(town: Town) -> None:
    """Its number is drawn; here it is the lower one."""
    later, earlier = 9 << RESTART_BITS, 2 << RESTART_BITS
    town.report(A, "d", later + 1)
    town.report(A, "d", earlier + 1)
    assert town.news() == [("up", "d", later + 1), ("down", "d", later + 1), ("up", "d", earlier + 1)]
    assert town.fleet.status_rows()[0]["state"] == "ready"
    town.report(A, "d", later + 1)  # a word of the old run that waited on an old connection
    town.report(A, "d", later + 2)
    town.report(A, "d", earlier + 1)
    assert town.news() == []
    town.report(A, "d", earlier + 2)
    town.report(A, "d", earlier + 1)
    assert town.news() == [("down", "d", earlier + 1), ("up", "d", earlier + 2)]


def test_a_run_that_was_lost_makes_room_for_one_of_a_lower_number_elsewhere(town: Town) -> None:
    town.report(A, "d", (9 << RESTART_BITS) + 1)
    town.pass_time(LOST_S + 2 * BEAT_S)
    town.report(B, "d", (2 << RESTART_BITS) + 1)
    assert [kind for kind, *_ in town.news()] == ["up", "down", "up"]
    assert town.fleet.status_rows()[0]["state"] == "ready"


def test_silence_while_nobody_listened_proves_nothing(town: Town) -> None:
    town.report(A, "d", 5)
    town.clock.advance(60.0)  # this process was suspended
    town.joined.tick()
    town.pass_time(1.0, speaking=((A, "d", 5),))
    assert town.news() == [("up", "d", 5)]


def test_two_workers_of_one_name_are_not_mixed_up(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    town.report(A, "d", 5)
    for _ in range(10):
        town.joined.on_report(B, WorkerReport(
            worker=WorkerId("d"), incarnation=9, role=Role.DECODE, state=WorkerState.READY, pid=8,
            identity=ModelIdentity(fingerprint="f", numerics="n"), max_model_len=64))  # fmt: skip
    assert town.news() == [("up", "d", 5)]
    assert caplog.text.count("give it another --name") == 1
    assert town.joined.unjoined() == [(B, f"calls itself d, as the worker at {A} does: give it another --name")]


@pytest.mark.parametrize("joined_first", [True, False])
def test_a_worker_of_this_host_keeps_its_name_whoever_claims_it(
    joined_first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    town = Town()
    if joined_first:
        town.report(A, "d", 5)
        town.joined.add_local(WorkerId("d"))
        assert town.news() == [("up", "d", 5), ("down", "d", 5)]
    else:
        town.joined.add_local(WorkerId("d"))
    own = WorkerUp(worker=WorkerId("d"), incarnation=7 << RESTART_BITS, role=Role.DECODE, pid=9, endpoint="ipc://@d")
    assert town.fleet.on_worker_up(own, town.clock.now())
    town.pass_time(2 * LOST_S, speaking=((A, "d", 5),))
    assert town.news() == []
    assert town.fleet.endpoints == ["ipc://@d"]
    assert (A, "calls itself d, as the worker of this host does: give it another --name") in town.joined.unjoined()
    assert caplog.text.count("give it another --name") == 1
    town.joined.set_members(members_at(B))
    assert town.removed == [], "the member that goes does not take the worker of this host along"


def test_a_lost_member_that_once_had_the_name_of_a_worker_of_this_host_takes_nothing_along(town: Town) -> None:
    town.report(A, "d", 5)
    town.pass_time(LOST_S + 2 * BEAT_S)
    town.joined.add_local(WorkerId("d"))
    town.report(A, "other", 6)
    assert town.removed == []
    town.joined.set_members(members_at(B))
    assert town.removed == ["other"]


def test_a_worker_that_moved_is_found_where_it_is(town: Town) -> None:
    town.report(A, "d", 5)
    town.pass_time(LOST_S + 2 * BEAT_S)
    town.report(B, "d", 6)
    assert town.news() == [("up", "d", 5), ("down", "d", 5), ("up", "d", 6)]


async def test_who_does_not_answer_is_named_with_the_reason_again_and_again(caplog: pytest.LogCaptureFixture) -> None:
    clock, asked = VirtualClock(1000.0), list[str]()

    async def probe(endpoint: str) -> str:
        asked.append(endpoint)
        return "connection refused"

    hello = Hello(gateway="gateway-0", incarnation=1, discovery=True)
    told: list[SupervisorMessage] = []
    joined = RemoteWorkers(Line, told.append, hello, clock=clock, beat_s=3600.0, probe=probe)
    joined.set_members(members_at(A, B))
    joined.start()
    joined.on_report(B, report_of("d"))
    for _ in range(100):
        clock.advance(BEAT_S)
        joined.on_report(B, report_of("d"))
        joined.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    assert joined.unjoined() == [(A, "connection refused")]
    assert joined.count == 1
    assert set(asked) == {A}
    waited = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert waited == ["waiting for tcp://a:1: connection refused"] * 3, "after 1, 11 and 21 of 25 seconds"
    await joined.close()


@pytest.mark.parametrize(("refused", "speaks"), [(True, False), (False, False), (True, True)])
async def test_a_quiet_worker_whose_port_refuses_connections_is_gone(refused: bool, speaks: bool) -> None:
    """Not one that has spoken meanwhile, nor one of which nothing is known."""
    clock, town = VirtualClock(1000.0), list[SupervisorMessage]()
    quiet, looked = {A}, asyncio.Event()

    async def refuses(endpoint: str) -> bool:
        assert endpoint == A
        if speaks:
            quiet.clear()
        looked.set()
        return refused

    hello = Hello(gateway="gateway-0", incarnation=1, discovery=True)
    joined = RemoteWorkers(
        Line, town.append, hello, clock=clock, beat_s=3600.0, quiet=lambda: [*quiet, B], refuses=refuses
    )
    joined.set_members(members_at(A, B))
    joined.start()
    joined.on_report(A, report_of("d"))
    async with asyncio.timeout(30):
        await looked.wait()
    for _ in range(6):
        await asyncio.sleep(0)
    downs = [message for message in town if isinstance(message, WorkerDown)]
    if refused and not speaks:
        assert [(down.worker, down.reason) for down in downs] == [("d", "its port refuses connections")]
        joined.on_report(A, report_of("d", incarnation=6))
        assert [message.incarnation for message in town if isinstance(message, WorkerUp)] == [5, 6]
    else:
        assert downs == []
    await joined.close()


@pytest.mark.parametrize("refused", [True, False])
async def test_a_worker_whose_connection_ends_is_gone_if_its_port_refuses_another(refused: bool) -> None:
    """At once, and though nothing else says that it is quiet."""
    told, looked = list[SupervisorMessage](), list[str]()

    async def refuses(endpoint: str) -> bool:
        looked.append(endpoint)
        return refused

    hello = Hello(gateway="gateway-0", incarnation=1, discovery=True)
    joined = RemoteWorkers(Line, told.append, hello, clock=VirtualClock(1000.0), beat_s=3600.0, refuses=refuses)
    joined.set_members(members_at(A, B))
    joined.start()
    joined.on_report(A, report_of("d"))
    for endpoint in (A, A, B, "tcp://nowhere:1"):  # B: no worker has joined
        joined.on_disconnected(endpoint)
    for _ in range(6):
        await asyncio.sleep(0)
    assert looked == [A], "once, and only where there was a worker"
    downs = [message.reason for message in told if isinstance(message, WorkerDown)]
    assert downs == (["its port refuses connections"] if refused else [])
    await joined.close()


async def test_a_connection_that_ends_after_a_look_at_the_port_or_during_one_is_looked_at_again() -> None:
    """As of a worker that was quiet in a long step, and is killed after it."""
    clock, told, looks = VirtualClock(1000.0), list[SupervisorMessage](), list[asyncio.Future[bool]]()

    async def refuses(endpoint: str) -> bool:
        looks.append(asyncio.get_running_loop().create_future())
        return await looks[-1]

    quiet = {A}
    hello = Hello(gateway="gateway-0", incarnation=1, discovery=True)
    joined = RemoteWorkers(
        Line, told.append, hello, clock=clock, beat_s=3600.0, quiet=lambda: list(quiet), refuses=refuses
    )
    joined.set_members(members_at(A))
    joined.start()
    joined.on_report(A, report_of("d"))
    async with asyncio.timeout(30):
        while not looks:  # noqa: ASYNC110 - a look of another task
            await asyncio.sleep(0.01)
    looks[0].set_result(False)
    quiet.clear()
    await asyncio.sleep(0)
    joined.on_disconnected(A)  # the look before it has ended just now
    await asyncio.sleep(0)
    joined.on_disconnected(A)  # and the one because of it has not
    await asyncio.sleep(0)
    assert len(looks) == 3
    assert looks[1].cancelled()
    looks[2].set_result(True)
    for _ in range(6):
        await asyncio.sleep(0)
    assert [type(message) for message in told] == [WorkerUp, WorkerDown]
    await joined.close()


async def test_a_port_without_a_listener_refuses_connections_and_one_that_is_full_does_not() -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
        port = listener.getsockname()[1]
        assert not await refuses_connections(f"tcp://127.0.0.1:{port}")
    assert await refuses_connections(f"tcp://127.0.0.1:{port}")


async def test_an_error_in_telling_does_not_end_the_listening() -> None:
    """A gateway may be out of descriptors for a moment; the worker's next report is heard all the same."""
    hub, clock, told = InMemoryHub(), VirtualClock(1.0), []
    mailbox = hub.listen("memory://w")

    def tell(message: SupervisorMessage) -> None:
        told.append(message)
        if len(told) == 1:
            raise OSError(24, "Too many open files")

    hello = Hello(gateway="g-join", incarnation=1)
    joined = RemoteWorkers(hub.connect_async, tell, hello, clock=clock, beat_s=3600.0)
    joined.set_members(members_at("memory://w"))
    joined.start()
    await asyncio.sleep(0)
    for _ in range(2):
        joined.tick()
        while (received := mailbox.recv()) is not None:
            mailbox.send(received.peer, report_of("w"))
        for _ in range(6):
            await asyncio.sleep(0)
    assert [type(message) for message in told] == [WorkerUp, WorkerUp]
    await joined.close()


async def test_a_worker_of_another_version_is_named_with_both_versions(caplog: pytest.LogCaptureFixture) -> None:
    async def probe(_endpoint: str) -> str:
        return "something listens there and does not answer"

    clock = VirtualClock(1000.0)
    hello = Hello(gateway="gateway-0", incarnation=1, discovery=True)
    joined = RemoteWorkers(OldLine, lambda _message: None, hello, clock=clock, beat_s=3600.0, probe=probe)
    joined.set_members(members_at(A))
    joined.start()
    for _ in range(8):
        clock.advance(BEAT_S)
        joined.tick()
        await asyncio.sleep(0)
        await asyncio.sleep(0)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert f"speaks protocol version 3, this one {PROTOCOL_VERSION}" in line
    assert joined.unjoined() == [(A, version_reason(3))]
    await joined.close()


# --- members come and go ----------------------------------------------------------------------------------------------


def test_a_member_that_comes_is_greeted_with_the_next_heartbeat(town: Town) -> None:
    town.joined.set_members(members_at(A, B, "tcp://c:1"))
    town.pass_time(BEAT_S)
    assert [line.endpoint for line in town.lines].count("tcp://c:1") == 1
    town.report("tcp://c:1", "w", 5)
    assert town.news() == [("up", "w", 5)]
    assert (town.joined.count, town.joined.expected) == (1, 3)


def test_a_member_that_goes_takes_its_worker_along(town: Town) -> None:
    town.pass_time(BEAT_S)
    town.report(A, "d", 5)
    town.joined.set_members(members_at(B))
    assert town.removed == ["d"]
    assert [endpoint for endpoint, _ in town.joined.unjoined()] == [B]
    town.joined.on_report(A, report_of("d"))  # it still reports, as requests of this gateway go on there
    assert town.news() == [("up", "d", 5)]
    assert town.joined.count == 0


def test_nobody_is_taken_away_where_nobody_was(town: Town) -> None:
    town.pass_time(BEAT_S)
    town.joined.set_members([])
    assert town.removed == []
    assert all(line.closed for line in town.lines)
    town.pass_time(1.0)
    assert len(town.lines) == 2, "nobody is greeted any more"


def test_the_name_of_a_member_that_goes_is_free(town: Town) -> None:
    town.report(A, "d", 5)
    town.joined.on_report(B, report_of("d", incarnation=9 << RESTART_BITS))
    assert town.news() == [("up", "d", 5)]
    town.joined.set_members(members_at(B))
    assert town.removed == ["d"]
    town.joined.on_report(B, report_of("d", incarnation=5))
    assert town.joined.count == 1


def test_a_worker_that_has_moved_is_not_taken_away_with_its_old_endpoint(town: Town) -> None:
    town.report(A, "d", 5)
    town.pass_time(LOST_S + 2 * BEAT_S)
    town.report(B, "d", 6)
    town.joined.set_members(members_at(B))
    assert town.removed == []
    assert town.joined.count == 1


def test_another_worker_at_an_endpoint_ends_what_was_known_of_the_first(town: Town) -> None:
    """As when a pod gets the address of an earlier one."""
    town.report(A, "pod-1", 5)
    town.report(A, "pod-2", 5)
    assert [kind for kind, *_ in town.news()] == ["up", "down", "up"]
    assert town.removed == ["pod-1"]


def test_a_worker_with_two_addresses_is_used_at_one(town: Town, caplog: pytest.LogCaptureFixture) -> None:
    """As a pod with an A and an AAAA record: nobody has to be given another name."""
    town.report(A, "d", 5)
    town.joined.on_report(B, report_of("d", incarnation=5))
    assert town.news() == [("up", "d", 5)]
    assert "--name" not in caplog.text
    assert town.joined.unjoined() == []
    assert (town.joined.count, town.joined.expected) == (1, 1)
    town.joined.set_members(members_at(B))
    town.joined.on_report(B, report_of("d", incarnation=5))
    assert [message.endpoint for message in town.told if isinstance(message, WorkerUp)] == [B]


def test_labels_are_told_when_they_change(town: Town) -> None:
    town.report(A, "d", 5)
    town.joined.set_members([Member(name="w", endpoint=A, labels={"zone": "a"})])
    assert [message.labels for message in town.told if isinstance(message, WorkerUp)] == [{}, {"zone": "a"}]
    assert town.fleet.status_rows()[0]["labels"] == {"zone": "a"}
    town.told.clear()
    town.joined.set_members([Member(name="w", endpoint=A, labels={"zone": "a"})])
    assert town.told == []


def test_a_member_is_called_by_its_name_until_it_joins(town: Town) -> None:
    town.joined.set_members([Member(name="w", endpoint=A)])
    assert town.joined.unjoined() == [("w (tcp://a:1)", "no answer yet")]


def test_what_waits_in_a_link_for_somebody_who_never_comes_is_bounded(town: Town) -> None:
    town.joined.set_members(members_at(A))
    town.pass_time(BEAT_S * (2 * GREETINGS_PER_LINK + 1))
    at_a = [line for line in town.lines if line.endpoint == A]
    assert [len(line.sent) for line in at_a] == [GREETINGS_PER_LINK, GREETINGS_PER_LINK, 1]
    assert [line.closed for line in at_a] == [True, True, False]


def test_thousands_of_members_are_greeted_in_several_turns(town: Town) -> None:
    town.joined.set_members(members_at(*(f"tcp://w{number}:1" for number in range(3000))))
    town.joined.tick()
    assert len(town.lines) == OPENED_PER_TICK
    town.pass_time(BEAT_S * 3000 / OPENED_PER_TICK)
    assert len(town.lines) == 3000


def test_a_link_that_cannot_be_opened_holds_up_no_other(town: Town) -> None:
    connect = town.joined._connect

    def refuse(endpoint: str) -> Line:
        if endpoint == A:
            raise ConfigError("cannot open a socket")
        return connect(endpoint)

    town.joined._connect = refuse
    town.joined.tick()
    assert [line.endpoint for line in town.lines] == [B]
    assert dict(town.joined.unjoined())[A] == "cannot open a socket"


async def test_of_many_members_that_do_not_answer_some_at_a_time_are_probed() -> None:
    clock, probed = VirtualClock(1000.0), list[str]()

    async def probe(endpoint: str) -> str:
        probed.append(endpoint)
        return "connection refused"

    joined = RemoteWorkers(
        Line, lambda _message: None, Hello(gateway="g", incarnation=1), clock=clock, beat_s=3600.0, probe=probe
    )
    joined.set_members(members_at(*(f"tcp://w{number}:1" for number in range(100))))
    joined.start()
    counts = []
    for _ in range(12):
        clock.advance(PROBE_PAUSE_S)
        joined.tick()
        for _ in range(8):
            await asyncio.sleep(0)
        counts.append(len(probed))
    assert counts[:3] == [PROBED_AT_ONCE, 2 * PROBED_AT_ONCE, 3 * PROBED_AT_ONCE]
    assert set(probed) == {f"tcp://w{number}:1" for number in range(100)}
    joined.set_members([])  # while the probes of a round are on their way
    await joined.close()
