"""Names of members: which answers stay, and that a name without an answer holds up nothing."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence

import pytest

from penstock.clock import MonotonicClock
from penstock.config.limits import MembershipConfig
from penstock.errors import ConfigError
from penstock.launch.members.dns import DnsMembers, SrvTargets, srv_look_up
from penstock.launch.members.interface import Member, MembersHandler, MembersProblem
from penstock.launch.members.registry import open_members
from penstock.launch.members.resolver import (
    LastAnswer,
    LookUp,
    LookUpError,
    NameNotFoundError,
    ResolvedMembers,
    WatchedName,
    look_up_addresses,
)

LIMITS = MembershipConfig(dns_poll_s=0.01, dns_timeout_s=0.05, dns_empty_s=30.0)
ONE, TWO, THREE = "tcp://10.0.0.1:9000", "tcp://10.0.0.2:9000", "tcp://10.0.0.3:9000"


# --- the last good answer ---------------------------------------------------------------------------------------------


def test_without_an_answer_the_last_one_stays_however_long() -> None:
    last = LastAnswer(30.0)
    last.on_answer((ONE,))
    last.on_failure("timed out")
    assert (last.endpoints, last.problem) == ((ONE,), "timed out")
    last.on_answer((TWO,))
    assert (last.endpoints, last.problem) == ((TWO,), None)


def test_no_such_name_is_believed_after_a_while() -> None:
    last = LastAnswer(30.0)
    last.on_answer((ONE,))
    last.on_empty("no such name", 100.0)
    last.on_failure("timed out")  # says nothing about the name
    last.on_empty("no such name", 129.0)
    assert last.endpoints == (ONE,)
    last.on_empty("no such name", 130.0)
    assert last.endpoints == ()


def test_an_answer_in_between_begins_the_wait_anew() -> None:
    last = LastAnswer(30.0)
    last.on_empty("no such name", 100.0)
    last.on_answer((ONE,))
    last.on_empty("no such name", 131.0)
    assert last.endpoints == (ONE,)


# --- the system's resolver --------------------------------------------------------------------------------------------


async def test_a_name_of_this_host_is_resolved() -> None:
    assert "tcp://127.0.0.1:9000" in await look_up_addresses("localhost", 9000)


async def test_a_name_that_cannot_be_is_no_answer() -> None:
    with pytest.raises(LookUpError):
        await look_up_addresses("a" * 64 + ".invalid", 1)


# --- names that are watched -------------------------------------------------------------------------------------------


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - what is waited for is a state, not an event
            await asyncio.sleep(0.001)


class Answers:
    """A resolver that says what it is told to; None: nothing, until it is told otherwise."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[str, ...] | Exception | None] = {}
        self.asked: dict[str, int] = {}

    def look_up(self, host: str, port: int) -> LookUp:
        async def ask() -> tuple[str, ...]:
            self.asked[host] = self.asked.get(host, 0) + 1
            await until(lambda: self.of[host] is not None)
            answer = self.of[host] or ()
            if isinstance(answer, Exception):
                raise answer
            return tuple(f"tcp://{address}:{port}" for address in answer)

        return ask


class ToldMembers:
    """``Members`` in memory."""

    def __init__(self, *members: Member) -> None:
        self.members = members
        self._changed = asyncio.Event()

    def set(self, *members: Member) -> None:
        self.members = members
        self._changed.set()

    async def watch(self, tell: MembersHandler) -> None:
        while True:
            self._changed.clear()
            tell(self.members)
            await self._changed.wait()

    def problems(self) -> Sequence[MembersProblem]:
        return ()


def named(host: str, name: str = "") -> Member:
    return Member(name=name or host, endpoint=f"tcp://{host}:9000")


class Watch:
    """What members are told of, and the task that watches them."""

    def __init__(self, members: ResolvedMembers) -> None:
        self._told = asyncio.Queue[list[str]]()
        self._task = asyncio.create_task(
            members.watch(lambda found: self._told.put_nowait([m.endpoint for m in found]))
        )

    async def until(self, *endpoints: str) -> None:
        async with asyncio.timeout(30):
            while await self._told.get() != list(endpoints):
                continue

    async def end(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)


async def test_a_name_without_an_answer_holds_up_no_other() -> None:
    answers = Answers()
    answers.of = {"slow": None, "quick": ("10.0.0.2",)}
    members = ResolvedMembers(
        ToldMembers(named("slow"), named("10.0.0.1"), named("quick")), LIMITS, MonotonicClock(), answers.look_up
    )
    watch = Watch(members)
    await watch.until(ONE)
    await watch.until(ONE, TWO)
    await until(lambda: members.problems() == (("tcp://slow:9000", "no answer within 0.05 s"),))
    assert answers.asked["slow"] == 1, "while it has not answered it is not asked again"
    answers.of["slow"] = ("10.0.0.3",)
    await watch.until(THREE, ONE, TWO)
    assert members.problems() == ()
    await watch.end()


async def test_an_address_stays_while_the_name_has_it_and_is_another_when_it_has_not() -> None:
    answers = Answers()
    answers.of = {"w": ("10.0.0.1", "10.0.0.2")}
    watch = Watch(ResolvedMembers(ToldMembers(named("w")), LIMITS, MonotonicClock(), answers.look_up))
    await watch.until(ONE)
    answers.of["w"] = ("10.0.0.2", "10.0.0.1")  # resolvers turn them around
    await watch.until(ONE)
    answers.of["w"] = LookUpError("timed out")
    asked = answers.asked["w"]
    await until(lambda: answers.asked["w"] >= asked + 3)
    answers.of["w"] = ("10.0.0.2",)
    await watch.until(TWO)
    await watch.end()


async def test_a_name_that_is_no_members_any_more_is_not_looked_up() -> None:
    answers, source = Answers(), ToldMembers(named("w"), named("v"))
    answers.of = {"w": ("10.0.0.1",), "v": NameNotFoundError("no such name")}
    members = ResolvedMembers(source, LIMITS, MonotonicClock(), answers.look_up)
    watch = Watch(members)
    await watch.until(ONE)
    source.set(named("10.0.0.2"))
    await watch.until(TWO)
    assert members.problems() == ()
    assert members._following == members._names == members._addresses == {}
    await watch.end()


async def test_a_watch_that_begins_anew_goes_on_with_the_addresses_that_are_known() -> None:
    """Other sources than DNS may fail in any way; their members stay meanwhile."""
    source, answers, told = ToldMembers(named("w"), named("v"), named("10.0.0.3")), Answers(), list[list[str]]()
    answers.of = {"w": ("10.0.0.1",), "v": ("10.0.0.2",)}
    members = ResolvedMembers(source, LIMITS, MonotonicClock(), answers.look_up)
    watch = Watch(members)
    await watch.until(ONE, TWO, THREE)
    await watch.end()
    answers.of = {"w": None, "v": ("10.0.0.2",)}
    asked = answers.asked["v"]
    watching = asyncio.create_task(members.watch(lambda found: told.append([m.endpoint for m in found])))
    await until(lambda: answers.asked["v"] >= asked + 2)
    assert told
    assert all(endpoints == [ONE, TWO, THREE] for endpoints in told)
    source.set(named("v"))
    await until(lambda: told[-1] == [TWO])
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    assert members._following == {}


async def test_two_members_at_one_address_are_one() -> None:
    source = ToldMembers(named("10.0.0.1", "first"), named("w", "second"))
    answers = Answers()
    answers.of = {"w": ("10.0.0.1",)}
    watch = Watch(ResolvedMembers(source, LIMITS, MonotonicClock(), answers.look_up))
    await watch.until(ONE)
    await watch.until(ONE)
    await watch.end()


async def test_a_resolver_that_blocks_does_not_keep_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread cannot be ended; nobody waits for it."""
    asked, released = threading.Event(), threading.Event()

    def block(*_: object, **__: object) -> list[object]:
        asked.set()
        assert released.wait(30)
        return []

    monkeypatch.setattr("socket.getaddrinfo", block)
    name = WatchedName("w", lambda: look_up_addresses("w", 1), LIMITS, MonotonicClock())
    following = asyncio.create_task(name.follow(lambda: None))
    await until(lambda: name.last.problem is not None)
    assert asked.is_set()
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "look up w"]
    assert thread.daemon
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    released.set()


async def test_an_srv_target_without_an_answer_holds_up_no_other_and_keeps_its_last_address(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("dns", reason="the extra dns is not installed")
    from tests.cluster.name_server import NameServer

    async def answer(host: str, port: int) -> tuple[str, ...]:
        return await answers.look_up(host, port)()

    answers = Answers()
    monkeypatch.setattr("penstock.launch.members.dns.look_up_addresses", answer)
    with NameServer("_penstock._tcp.workers.test", "SRV", ("127.0.0.1", 0)) as names:
        limits = MembershipConfig(name_server=f"127.0.0.1:{names.address[1]}", dns_timeout_s=30.0)
        targets = SrvTargets("_penstock._tcp.workers.test", limits)
        look_up = srv_look_up("_penstock._tcp.workers.test", limits, targets)
        names.records = ["0 0 9000 one.test.", "0 0 9000 two.test."]
        answers.of = {"one.test": ("10.0.0.1",), "two.test": LookUpError("temporary failure")}
        assert await look_up() == (ONE,)
        assert await look_up() == (ONE,)
        logged = [record.getMessage() for record in caplog.records]
        assert len(logged) == 1
        assert "_penstock._tcp.workers.test" in logged[0]
        assert logged[0].endswith("two.test: temporary failure")
        answers.of["two.test"] = ("10.0.0.2",)
        assert await look_up() == (ONE, TWO)
        answers.of = dict.fromkeys(answers.of, LookUpError("temporary failure"))
        assert await look_up() == (ONE, TWO)
        names.records = ["0 0 9000 three.test."]
        answers.of["three.test"] = LookUpError("temporary failure")
        with pytest.raises(LookUpError, match=r"three\.test: temporary failure"):
            await look_up()
        answers.of["three.test"] = NameNotFoundError("no such name")
        with pytest.raises(NameNotFoundError, match="hosts without addresses"):
            await look_up()


async def test_an_srv_target_whose_name_server_is_silent_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The system's resolver asks for 10 s and more; which target it is, is told."""
    pytest.importorskip("dns", reason="the extra dns is not installed")
    from tests.cluster.name_server import NameServer

    asked, released = list[str](), threading.Event()

    def resolve(host: str, port: int, **_: object) -> list[tuple[object, ...]]:
        asked.append(host)
        assert host != "slow.test" or released.wait(30)
        return [(None, None, None, "", ("10.0.0.2" if host == "slow.test" else "10.0.0.1", port))]

    monkeypatch.setattr("socket.getaddrinfo", resolve)
    name = "_penstock._tcp.workers.test"
    with NameServer(name, "SRV", ("127.0.0.1", 0)) as names:
        names.records = ["0 0 9000 one.test.", "0 0 9000 slow.test."]
        limits = MembershipConfig(name_server=f"127.0.0.1:{names.address[1]}", dns_timeout_s=1.0, dns_poll_s=0.01)
        targets = SrvTargets(name, limits)
        watched = WatchedName(f"dns:{name}", srv_look_up(name, limits, targets), limits, MonotonicClock())
        members, told = DnsMembers(watched, 16, targets), list[list[str]]()
        watching = asyncio.create_task(members.watch(lambda found: told.append([m.endpoint for m in found])))
        try:
            await until(lambda: told == [[ONE]])
            assert members.problems() == ((f"dns:{name}", "slow.test: no answer within 0.5 s"),)
            await until(lambda: asked.count("one.test") >= 3)
            assert asked.count("slow.test") == 1, "one thread"
            released.set()
            await until(lambda: told == [[ONE], [ONE, TWO]])
            assert members.problems() == ()
        finally:
            released.set()
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)


# --- --members --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "because"),
    [
        (
            "members.json",
            "file:PATH, fleet:FLEET_FILE, dns:NAME:PORT, dns:_SERVICE._tcp.NAME, nats:URL/BUCKET, or ray:FLEET",
        ),
        ("file:", "expected file:PATH"),
        ("file:~nosuchuser/members", "--members ~nosuchuser/members: ~nosuchuser has no home folder on this host"),
        ("fleet:~nosuchuser/fleet", "--members ~nosuchuser/fleet: ~nosuchuser has no home folder on this host"),
        ("etcd:workers", "expected file:PATH"),
        ("ray:", "expected file:PATH"),
        ("dns:workers", "expected dns:NAME:PORT"),
        ("dns:workers:0", "expected dns:NAME:PORT"),
        ("dns:workers:http", "expected dns:NAME:PORT"),
        ("dns:10.0.0.1:9000", "use --join tcp://10.0.0.1:9000"),
        ("nats:nats://u:p@host:4222/workers", "belong in the file"),
        ("nats:host:4222", "expected nats:nats://HOST:PORT/BUCKET"),
        ("dns:_penstock._tcp.workers:9000", "SRV records have ports of their own"),
    ],
)
def test_what_cannot_be_is_refused_in_a_line(text: str, because: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_members(text, LIMITS, MonotonicClock())
    assert because in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_name_and_a_file_need_not_be_there_yet() -> None:
    open_members("dns:workers.example:9000", LIMITS, MonotonicClock())
    open_members("file:/no/such/file", LIMITS, MonotonicClock())
