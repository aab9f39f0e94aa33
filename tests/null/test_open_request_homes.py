"""The limit of open requests of an API key, over the gateways of several hosts."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from itertools import pairwise

import pytest

from penstock.engine.service.open_requests import COUNT_VALID_S
from penstock.router.home_calls import ANSWER_S
from penstock.router.open_requests import REFRESH_S, REFRESHED_PER_TICK
from penstock.wire.gateway_messages import KEY_DIGEST_BYTES

from .router_town import Town
from .test_rate_shares import STEP_S, Host, close, serve

KEY = "k-12"


async def acquired(town: Town, hosts: Sequence[Host], at: Host, limit: int) -> bool:
    """Whether this host may begin one more request."""
    task = asyncio.create_task(at.router.fleet_counts.acquire(KEY, limit))
    for _ in range(200):
        if task.done():
            break
        await serve(town, 0.1, hosts)
    return await task


async def together(town: Town, hosts: Sequence[Host], tries: int, limit: int) -> int:
    """How many of so many requests at each host are begun, all at the same time."""
    tasks = [asyncio.create_task(host.router.fleet_counts.acquire(KEY, limit)) for _ in range(tries) for host in hosts]
    for _ in range(200):
        if all(task.done() for task in tasks):
            break
        await serve(town, 0.1, hosts)
    return sum(await asyncio.gather(*tasks))


async def test_all_hosts_together_have_as_many_as_the_limit_says() -> None:
    async with Town("both-0", "both-1") as town:
        hosts = [Host(town, number, ("both-0", "both-1")) for number in range(3)]
        await serve(town, 3.0, hosts)
        assert await together(town, hosts, 4, limit=5) <= 5
        await serve(town, 10.0, hosts)
        counts = [host.router.fleet_counts for host in hosts]
        opened = [sum(each._open.values()) for each in counts]
        assert 3 <= sum(opened) <= 5, "those that asked at the same time may each have counted for the others"
        while sum(opened) < 5:
            assert await acquired(town, hosts, hosts[0], 5)
            opened[0] += 1
        for host in hosts:
            assert not await acquired(town, hosts, host, 5)
        busy = next(number for number, has in enumerate(opened) if has)
        counts[busy].release(KEY)
        await serve(town, 0.2, hosts)
        assert await acquired(town, hosts, hosts[(busy + 1) % 3], 5)
        assert not await acquired(town, hosts, hosts[busy], 5)
        await close(hosts)


async def test_each_gateway_of_a_host_knows_of_other_hosts_also_one_that_never_exchanges_rates() -> None:
    async with Town("both-0") as town:
        first, other = Host(town, 0), Host(town, 1)
        second = Host(
            town, 0, name="host-0-b", buckets=first.buckets
        )  # its turn is always just after that of ``first``
        gateways = [first, second, other]
        await serve(town, 5.0, gateways)
        assert await acquired(town, gateways, other, limit=1)
        assert [await acquired(town, gateways, gateway, limit=1) for gateway in (first, second)] == [False, False]
        await close(gateways)


async def test_homes_of_many_keys_are_told_a_part_of_them_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, asked = 1000, list[int]()
    async with Town("both-0", "both-1") as town:
        hosts = [Host(town, number, ("both-0", "both-1")) for number in range(2)]
        await serve(town, 3.0, hosts)
        counts = hosts[0].router.fleet_counts
        counts._open = {number.to_bytes(KEY_DIGEST_BYTES): 1 for number in range(keys)}
        groups = counts._homes.groups
        monkeypatch.setattr(counts._homes, "groups", lambda names: asked.append(len(names)) or groups(names))
        await serve(town, 3.0, hosts)
        assert max(asked) <= max(REFRESHED_PER_TICK, keys * STEP_S / REFRESH_S)
        assert sum(asked) > keys, "and again"
        counts._open.clear()
        await close(hosts)


async def test_homes_of_many_keys_are_told_in_time_by_a_gateway_that_is_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its turns are far between."""
    turn_s, told = 0.3, dict[bytes, list[float]]()
    async with Town("both-0", "both-1") as town:
        hosts = [Host(town, number, ("both-0", "both-1")) for number in range(2)]
        await serve(town, 3.0, hosts)
        counts = hosts[0].router.fleet_counts
        counts._open = {number.to_bytes(KEY_DIGEST_BYTES): 1 for number in range(2000)}
        groups = counts._homes.groups

        def noted(names: list[bytes]) -> list[list[bytes]]:
            for name in names:
                told.setdefault(name, []).append(town.clock.now())
            return groups(names)

        monkeypatch.setattr(counts._homes, "groups", noted)
        for _ in range(30):
            await town.turn(turn_s)
            for host in hosts:
                host.router.tick()
        assert len(told) == 2000
        gaps = [later - earlier for times in told.values() for earlier, later in pairwise(times)]
        assert max(gaps) < COUNT_VALID_S - 2 * turn_s
        counts._open.clear()
        await close(hosts)


async def test_a_home_that_dies_is_made_up_for_within_seconds() -> None:
    async with Town("both-0", "both-1") as town:
        hosts = [Host(town, number, ("both-0", "both-1")) for number in range(2)]
        await serve(town, 3.0, hosts)
        for host in hosts:
            assert await acquired(town, hosts, host, 2)
        (home,) = [name for name in town.alive if len(town.worker(name).mailbox.exchange._open_requests)]
        town.stop(home)
        began = town.clock.now()
        assert await acquired(town, hosts, hosts[0], 2), "without an answer it holds for each host"
        assert town.clock.now() - began <= ANSWER_S + 0.2
        hosts[0].router.fleet_counts.release(KEY)
        await serve(town, 10.0, hosts)
        for host in hosts:
            assert not await acquired(town, hosts, host, 2), "the other worker knows them by now"
        await close(hosts)


async def test_a_host_that_is_gone_has_no_open_requests() -> None:
    async with Town("both-0") as town:
        hosts = [Host(town, number) for number in range(3)]
        await serve(town, 3.0, hosts)
        assert await acquired(town, hosts, hosts[0], 1)
        assert not await acquired(town, hosts, hosts[1], 1)
        await serve(town, COUNT_VALID_S + 0.5, hosts[1:])
        assert await acquired(town, hosts[1:], hosts[1], 1)
        await close(hosts)


async def test_a_host_that_is_alone_asks_nothing() -> None:
    async with Town("both-0") as town:
        alone = Host(town, 0)
        await serve(town, 2.0, [alone])
        counts = alone.router.fleet_counts
        assert await counts.acquire(KEY, 1)
        counts.release(KEY)
        assert not counts._open
        assert len(town.worker("both-0").mailbox.exchange._open_requests) == 0
        await close([alone])
