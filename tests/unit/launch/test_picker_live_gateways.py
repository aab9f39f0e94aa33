"""Which members can serve: what their /ready says, and what becomes of those that are silent or gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest

from penstock.clock import MonotonicClock
from penstock.config.limits import MembershipConfig, PickerLimits
from penstock.launch.members.interface import Member, Members, MembersHandler
from penstock.launch.members.resolver import ResolvedMembers
from penstock.launch.picker.live_gateways import LiveGateways

LIMITS = PickerLimits(ready_every_s=0.01, ready_timeout_s=0.2)
PATIENCE_S = 20.0


class Gateway:
    """A real HTTP server of one path, on a port of its own."""

    def __init__(self) -> None:
        self.status = 200
        self.is_silent = False
        self.paths: set[str] = set()
        self._server: asyncio.Server | None = None
        self.port = 0

    @property
    def endpoint(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while self._server is not None and self._server.is_serving():
                head = await reader.readuntil(b"\r\n\r\n")
                self.paths.add(head.split(b" ")[1].decode())
                if self.is_silent:
                    continue
                writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 0\r\n\r\n" % self.status)
        writer.close()


class GivenMembers:
    """Members that a test changes."""

    def __init__(self, *endpoints: str) -> None:
        self._endpoints = endpoints
        self._tell: MembersHandler | None = None

    async def watch(self, tell: MembersHandler) -> None:
        self._tell = tell
        self.set(*self._endpoints)
        await asyncio.get_running_loop().create_future()

    def set(self, *endpoints: str) -> None:
        assert self._tell is not None
        self._tell([Member(name=endpoint, endpoint=f"tcp://{endpoint}") for endpoint in endpoints])

    def problems(self) -> tuple[()]:
        return ()


@asynccontextmanager
async def following(members: Members) -> AsyncIterator[LiveGateways]:
    live = LiveGateways(members, LIMITS, on_change=lambda: None)
    task = asyncio.create_task(live.run())
    async with asyncio.timeout(PATIENCE_S):
        await live.settled.wait()
    try:
        yield live
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert asyncio.all_tasks() == {asyncio.current_task()} or all(
            task.get_name() != "probe" for task in asyncio.all_tasks()
        )


async def until(so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not so():  # noqa: ASYNC110 - a probe signals nothing
            await asyncio.sleep(0.005)


@asynccontextmanager
async def gateways(count: int) -> AsyncIterator[list[Gateway]]:
    found = [Gateway() for _ in range(count)]
    for gateway in found:
        await gateway.start()
    try:
        yield found
    finally:
        for gateway in found:
            await gateway.stop()


async def test_those_that_say_so_are_ready() -> None:
    async with gateways(2) as (one, two):
        two.status = 503
        async with following(GivenMembers(one.endpoint, two.endpoint)) as live:
            assert live.ranking.endpoints == (one.endpoint,)
            assert live.member_count == 2
            assert one.paths == {"/ready"}
            two.status = 200
            await until(lambda: len(live.ranking.endpoints) == 2)
            one.status = 503
            await until(lambda: live.ranking.endpoints == (two.endpoint,))


async def test_one_that_is_silent_or_refuses_is_left_out_and_used_again() -> None:
    async with gateways(2) as (one, two), following(GivenMembers(one.endpoint, two.endpoint)) as live:
        one.is_silent = True
        await until(lambda: live.ranking.endpoints == (two.endpoint,))
        one.is_silent = False
        await until(lambda: len(live.ranking.endpoints) == 2)
        await two.stop()
        await until(lambda: live.ranking.endpoints == (one.endpoint,))
        await two.start()
        await until(lambda: len(live.ranking.endpoints) == 2)


async def test_members_come_and_go() -> None:
    async with gateways(2) as (one, two):
        members = GivenMembers(one.endpoint)
        async with following(members) as live:
            assert live.ranking.endpoints == (one.endpoint,)
            members.set(one.endpoint, two.endpoint)
            await until(lambda: len(live.ranking.endpoints) == 2)
            members.set(two.endpoint)
            assert live.ranking.endpoints == (two.endpoint,), "at once, without a probe"
            assert live.member_count == 1


async def test_without_members_it_is_settled() -> None:
    for members in (GivenMembers(), ResolvedMembers(GivenMembers(), MembershipConfig(), MonotonicClock())):
        async with following(members) as live:
            assert live.ranking.endpoints == ()


async def test_it_is_not_settled_before_a_name_is_resolved() -> None:
    asked, resolved = asyncio.Event(), asyncio.Event()
    async with gateways(1) as (one,):

        async def look_up() -> tuple[str, ...]:
            asked.set()
            await resolved.wait()
            return (f"tcp://{one.endpoint}",)

        named = GivenMembers(f"gateway.test:{one.port}")
        members = ResolvedMembers(named, MembershipConfig(), MonotonicClock(), lambda host, port: look_up)
        live = LiveGateways(members, LIMITS, on_change=lambda: None)
        running = asyncio.create_task(live.run())
        async with asyncio.timeout(PATIENCE_S):
            await asked.wait()
            assert not live.settled.is_set()
            resolved.set()
            await live.settled.wait()
        assert live.ranking.endpoints == (one.endpoint,)
        named.set()
        assert live.ranking.endpoints == ()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def test_a_source_that_fails_is_watched_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.launch.members.interface.RETRY_WATCH_S", 0.01)

    class Failing(GivenMembers):
        failures = 1

        async def watch(self, tell: MembersHandler) -> None:
            if self.failures:
                self.failures -= 1
                raise OSError("away")
            await super().watch(tell)

    async with gateways(1) as (one,), following(Failing(one.endpoint)) as live:
        assert live.ranking.endpoints == (one.endpoint,)
