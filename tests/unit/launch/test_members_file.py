"""A members file: what it may say, and that what it may not say changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest

from penstock.clock import MonotonicClock
from penstock.config.limits import MembershipConfig
from penstock.errors import ConfigError
from penstock.launch.members.file import FileMembers, parse_fleet_gateways, parse_fleet_members, parse_members
from penstock.launch.members.interface import Member, MemberKind, follow_members
from penstock.launch.members.registry import open_members, other_nodes_members

LIMITS = MembershipConfig(max_members=3, max_members_bytes=600, file_poll_s=0.01)


def content(*members: str) -> bytes:
    return f'{{"members": [{", ".join(members)}]}}'.encode()


ONE = '{"name": "w0", "endpoint": "tcp://10.0.0.1:9000", "labels": {"zone": "a"}}'
OTHER = '{"name": "w1", "endpoint": "tcp://[fd00::1]:9000"}'


def test_members_have_a_name_an_endpoint_and_labels() -> None:
    assert parse_members(content(ONE, OTHER), LIMITS) == (
        Member(name="w0", endpoint="tcp://10.0.0.1:9000", labels={"zone": "a"}),
        Member(name="w1", endpoint="tcp://[fd00::1]:9000"),
    )
    assert parse_members(content(), LIMITS) == ()


@pytest.mark.parametrize(
    ("raw", "because"),
    [
        (b"", "truncated"),
        (content(ONE)[:-9], "truncated"),
        (b"\xff" * 9, "malformed"),
        (b"[]", "Expected `object`"),
        (b"{}", "missing required field `members`"),
        (b"[" * 599, "Expected `object`, got `array`"),
        (content('{"name": "w", "endpont": "tcp://a:1"}'), "unknown field `endpont` - at `$.members[0]`"),
        (b'{"members": [], "model": "x"}', "unknown field `model`"),
        (content('{"name": "", "endpoint": "tcp://a:1"}'), "length >= 1"),
        (content('{"name": "w", "endpoint": "a:1"}'), "members[0].endpoint: 'a:1' is not an endpoint"),
        (content('{"name": "w", "endpoint": "ipc://@a"}'), "expected tcp://HOST:PORT"),
        (content('{"name": "w", "endpoint": "tcp://*:1"}'), "expected tcp://HOST:PORT"),
        (content('{"name": "w", "endpoint": "tcp://a:0"}'), "expected tcp://HOST:PORT"),
        (content('{"name": "w", "endpoint": "tcp://a;b:1"}'), "expected tcp://HOST:PORT"),
        (content('{"name": "w", "endpoint": "tcp://a:1", "labels": {"a": 1}}'), "Expected `str`"),
        (content(ONE, ONE), "2 members have the name 'w0'"),
        (content(ONE, ONE.replace("w0", "w1")), "2 members have the endpoint 'tcp://10.0.0.1:9000'"),
        (content(*(f'{{"name": "{n}", "endpoint": "tcp://a:{n}"}}' for n in range(1, 5))), "at most max_members"),
        (content('{"name": "%s", "endpoint": "tcp://a:1"}' % ("w" * 600)), "max_members_bytes, 600"),
    ],
)
def test_what_is_wrong_is_said_in_a_line(raw: bytes, because: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_members(raw, LIMITS)
    assert because in str(caught.value)
    assert "\n" not in str(caught.value)


async def test_a_file_that_is_missing_or_broken_changes_nothing_and_is_logged_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "members.json"
    source, told = FileMembers(path, LIMITS), asyncio.Queue[list[str]]()
    watching = asyncio.create_task(source.watch(lambda members: told.put_nowait([m.name for m in members])))

    async def problem_with(words: str) -> None:
        async with asyncio.timeout(30):
            while not (source.problems() and words in source.problems()[0][1]):  # noqa: ASYNC110
                await asyncio.sleep(LIMITS.file_poll_s)

    await problem_with("no such file")
    path.write_bytes(content(ONE))
    assert await told.get() == ["w0"]
    assert source.problems() == ()
    path.write_bytes(content(ONE)[:30])
    await problem_with("truncated")
    path.unlink()
    await problem_with("no such file")
    path.write_bytes(content(ONE, OTHER))
    assert await told.get() == ["w0", "w1"]
    assert told.empty()
    warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warned) == 3, warned
    assert f"members are not read from {path}, the last good ones stay: no such file" in warned[0]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_file_that_is_the_same_is_told_once(tmp_path: Path) -> None:
    path = tmp_path / "members.json"
    path.write_bytes(content(ONE))
    source, told = FileMembers(path, LIMITS), asyncio.Queue[int]()
    watching = asyncio.create_task(source.watch(lambda members: told.put_nowait(len(members))))
    assert await told.get() == 1
    path.write_bytes(content(ONE))
    path.touch()
    path.write_bytes(content(ONE, OTHER))
    assert await told.get() == 2
    assert told.empty()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


NODES = """
name = "f"

[[nodes]]
name = "a"
address = "10.0.0.1"
gateways = 1
workers = [{ count = 1 }]

[[nodes]]
name = "b"
address = "10.0.0.2"

[[groups]]
nodes = ["b", "a"]
group = "pp2"
"""


def test_the_workers_of_a_fleet_file_are_members_those_of_one_node_aside() -> None:
    a = Member(name="a-both-0", endpoint="tcp://10.0.0.1:9000", labels={"node": "a"})
    b = Member(name="b-both-0", endpoint="tcp://10.0.0.2:9000", labels={"node": "b"})
    assert parse_fleet_members(NODES.encode(), LIMITS) == (a, b)
    assert parse_fleet_members(NODES.encode(), LIMITS, but="a") == (b,)
    for raw, because in (
        (b"name = ", "not TOML"),
        (NODES.replace("address", "adress").encode(), "adress"),
        (b'name = "f"', "it has neither"),
        (NODES.encode() + b"#" * 600, "more than max_members_bytes, 600"),
    ):
        with pytest.raises(ConfigError, match=because):
            parse_fleet_members(raw, LIMITS)
    with pytest.raises(ConfigError, match="5 workers; at most max_members, 3"):
        parse_fleet_members(NODES.replace("count = 1", "count = 4").encode(), LIMITS)


async def test_an_endpoint_picker_gets_the_http_ports_of_the_nodes_with_gateways(tmp_path: Path) -> None:
    path = tmp_path / "fleet.toml"
    path.write_text(NODES)
    members = open_members(f"fleet:{path}", LIMITS, MonotonicClock(), MemberKind.GATEWAYS)
    told = asyncio.Queue[Sequence[Member]]()
    watching = asyncio.create_task(members.watch(told.put_nowait))
    a = Member(name="a-gateway", endpoint="tcp://10.0.0.1:8000", labels={"node": "a"})
    b = Member(name="b-gateway", endpoint="tcp://10.0.0.2:8080", labels={"node": "b"})
    assert await told.get() == [a]
    path.write_text(NODES.replace('"10.0.0.2"', '"10.0.0.2"\ngateways = 2\nhttp_port = 8080'))
    assert await told.get() == [a, b]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
    with pytest.raises(ConfigError, match="2 nodes with gateways; at most max_members, 1"):
        parse_fleet_gateways(path.read_bytes(), MembershipConfig(max_members=1))


async def test_until_a_fleet_file_can_be_read_there_are_those_that_were_known_first(tmp_path: Path) -> None:
    first = Member(name="tcp://10.0.0.2:9000", endpoint="tcp://10.0.0.2:9000")
    path = tmp_path / "fleet.toml"
    path.write_text("name = ")
    source = FileMembers(path, LIMITS, partial(parse_fleet_members, but="a"), [first])
    told = asyncio.Queue[list[str]]()
    watching = asyncio.create_task(source.watch(lambda members: told.put_nowait([m.name for m in members])))
    assert await told.get() == [first.name]
    async with asyncio.timeout(30):
        while not source.problems():  # noqa: ASYNC110
            await asyncio.sleep(LIMITS.file_poll_s)
    path.write_text(NODES)
    assert await told.get() == ["b-both-0"]
    assert source.problems() == ()
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


SIX_NODES = 'name = "f"\n' + "".join(
    f'\n[[nodes]]\nname = "n{n}"\naddress = "10.0.0.{n}"\ngateways = 1\nworkers = [{{ count = 1 }}]\n' for n in range(6)
)
OF_SIX = MembershipConfig(file_poll_s=0.01)


def write_at_each_look(monkeypatch: pytest.MonkeyPatch, *contents: bytes) -> list[bytes]:
    """Each look at the file finds the next of them; returns those that are left."""
    left, read = list(contents), FileMembers._read

    def write_and_read(self: FileMembers) -> bytes | OSError:
        if left:
            self._path.write_bytes(left.pop(0))
        return read(self)

    monkeypatch.setattr(FileMembers, "_read", write_and_read)
    return left


@pytest.mark.parametrize("of_a_node", [False, True])
async def test_a_fleet_file_that_is_being_written_loses_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, of_a_node: bool
) -> None:
    whole = SIX_NODES.encode()
    prefixes = []
    for end in range(len(whole)):
        with suppress(ConfigError):
            parse_fleet_members(whole[:end], OF_SIX)
            prefixes.append(whole[:end])
    assert len(prefixes) > 5, "otherwise this tests nothing"
    looks = [look for prefix in prefixes for look in (prefix, whole)]
    left = write_at_each_look(monkeypatch, whole, whole, *looks, whole, whole[:-2], whole + b"#", whole + b"#")
    place, clock = str(tmp_path / "fleet.toml"), MonotonicClock()
    if of_a_node:
        members = other_nodes_members(place, "n0", (), OF_SIX, clock)
    else:
        members = open_members(f"fleet:{place}", OF_SIX, clock)
    told: list[int] = []
    watching = asyncio.create_task(members.watch(lambda found: told.append(len(found))))
    async with asyncio.timeout(30):
        while left or len(told) < 2:  # noqa: ASYNC110 - the second is told of the changed content
            await asyncio.sleep(OF_SIX.file_poll_s)
    assert set(told) == {5 if of_a_node else 6}
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)


async def test_a_fleet_file_that_cannot_be_parsed_leaves_the_last_good_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.launch.members.interface.RETRY_WATCH_S", 0.01)
    nested, long = b"name = " + b"[" * 5000, b"name = " + b"1" * 5000
    left = write_at_each_look(monkeypatch, SIX_NODES.encode(), SIX_NODES.encode(), nested, nested, nested, long, long)
    members = other_nodes_members(
        str(tmp_path / "fleet.toml"), "n0", ("tcp://10.0.0.9:9000",), OF_SIX, MonotonicClock()
    )
    told: list[int] = []
    watching = asyncio.create_task(follow_members(members, lambda found: told.append(len(found))))
    async with asyncio.timeout(30):
        while left or not any("digits" in problem for _, problem in members.problems()):  # noqa: ASYNC110
            await asyncio.sleep(OF_SIX.file_poll_s)
    assert told == [1, 5]
    logged = [record.getMessage() for record in caplog.records if record.levelname != "INFO"]
    assert len(logged) == 2, logged
    assert "maximum recursion depth" in logged[0]
    watching.cancel()
    await asyncio.gather(watching, return_exceptions=True)
