"""The rates of a tenant hold for all gateways of a host and of several hosts, and for gateways that start anew."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from tests.store_rig import redis_server

from penstock.config.api_keys import TenantEntry, edit_keys, new_key
from penstock.wire.curve_keys import CurveKeys

from .server import PATIENCE_S, PenstockServer, PenstockWorker

A_MINUTE = 6
BODY = {"model": "storyteller", "prompt": "Once", "max_tokens": 1}


def key_file(path: Path, rates: TenantEntry) -> dict[str, str]:
    """Writes a file with one key, of a tenant with these rates; returns the headers of its requests."""
    key, entry = new_key("ann", ("interactive",))
    with edit_keys(path, 10, make=True) as held:
        tenants = {"ann": rates}
        held[0] = type(held[0])(salt=held[0].salt, tenants=tenants, keys=(entry,))
    return {"Authorization": f"Bearer {key}"}


def test_gateways_share_the_rates_of_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    headers = key_file(path, TenantEntry(requests_per_minute=A_MINUTE))
    flags = ["--gateways", "2", "--api-keys", str(path), "--api-key", "sk-of-the-test"]
    with PenstockServer(flags) as server:
        began = time.monotonic()
        codes: list[int] = []

        def ask() -> None:
            """On a connection of its own, which either gateway may take."""
            codes.append(httpx.post(server.url + "/v1/completions", json=BODY, headers=headers, timeout=60).status_code)

        for _ in range(3 * A_MINUTE):
            ask()
        old = server.gateway_pids(server.workers())
        assert len(old) == 2
        for pid in old:
            os.kill(pid, signal.SIGKILL)

        def anew() -> bool:
            try:
                return len(server.gateway_pids(server.workers()) - old) == 2
            except (httpx.TransportError, AssertionError):
                return False

        server.wait_for(anew, PATIENCE_S, "two new gateways")
        for _ in range(3 * A_MINUTE):
            ask()
        may = A_MINUTE + 1 + (time.monotonic() - began) * A_MINUTE / 60
        assert set(codes) == {200, 429}
        assert A_MINUTE <= codes.count(200) <= may


# --- gateways of several hosts: services that share only TCP, keys and a worker ---------------------------------------

FAST_MINUTE = 600
EMPTIED = 30
"""Times of three seconds that a minute's worth may take to be used up, on a busy machine."""

ASKED_PER_S = 20
"""At each gateway."""


@dataclass(frozen=True)
class Unit:
    """What is rated, and a request that uses it."""

    rates: TenantEntry
    path: str
    body: dict[str, Any]
    used: Callable[[dict[str, Any]], int]  # by the response to one

    def a_minute(self) -> int:
        """What the tenant may use."""
        return self.rates.requests_per_minute or self.rates.tokens_per_minute or 0


REQUESTS = Unit(TenantEntry(requests_per_minute=FAST_MINUTE), "/tokenize", {"prompt": "Once"}, lambda response: 1)
TOKENS = Unit(
    TenantEntry(tokens_per_minute=40 * FAST_MINUTE),
    "/v1/completions",
    {"model": "storyteller", "prompt": list(range(50, 80)), "max_tokens": 10, "ignore_eos": True},
    lambda response: response["usage"]["total_tokens"],
)
"""Of a request's 40 tokens 30 are known before it is admitted."""


class Hosts:
    """One worker, and services with a gateway each."""

    def __init__(
        self, stack: ExitStack, folder: Path, number: int, flags: Sequence[str] = (), unit: Unit = REQUESTS
    ) -> None:
        CurveKeys.ephemeral().save(folder / "keys")
        self.unit = unit
        self._refusing: set[str] = set()
        self.headers = key_file(folder / "api-keys.json", unit.rates)
        worker = stack.enter_context(PenstockWorker(["--keys", str(folder / "keys")]))
        joins = ["--keys", str(folder / "keys"), "--join", worker.endpoint]
        self._flags = [*joins, "--api-keys", str(folder / "api-keys.json"), "--api-key", "sk-of-the-test", *flags]
        self._stack = stack
        self.servers: list[PenstockServer] = []
        for _ in range(number):
            self.start()
        for server in self.servers:
            server.wait_for(lambda server=server: hosts_of(server) == number, PATIENCE_S, "divided")  # type: ignore[misc]

    def start(self) -> PenstockServer:
        """One more host."""
        self.servers.append(self._stack.enter_context(PenstockServer(self._flags)))
        return self.servers[-1]

    def admitted(self, seconds: float, servers: Sequence[PenstockServer]) -> int:
        """How many units these servers admit in that time; they are asked without a pause until a bucket is empty, then
        ``ASKED_PER_S`` times a second."""
        return asyncio.run(self._admitted(seconds, servers))

    def empty(self) -> None:
        """Use up what the buckets hold, until each host refuses requests and no more is admitted than flows in."""
        for _ in range(EMPTIED):
            self._refusing.clear()
            admitted = self.admitted(3.0, self.servers)
            if len(self._refusing) == len(self.servers) and admitted <= 1.2 * self.unit.a_minute() * 3.0 / 60:
                return
        raise AssertionError("the buckets are never empty")

    async def _admitted(self, seconds: float, servers: Sequence[PenstockServer]) -> int:
        end = time.monotonic() + seconds
        return sum(await asyncio.gather(*(self._ask(server.url, end) for server in servers)))

    async def _ask(self, url: str, end: float) -> int:
        admitted = 0
        async with httpx.AsyncClient(base_url=url, headers=self.headers, timeout=30) as client:
            while time.monotonic() < end:
                try:
                    response = await client.post(self.unit.path, json=self.unit.body)
                except httpx.TransportError:  # it was killed
                    await asyncio.sleep(1 / ASKED_PER_S)
                    continue
                assert response.status_code in (200, 429, 503), response.text
                if response.status_code == 200:
                    admitted += self.unit.used(response.json())
                else:
                    if response.status_code == 429:
                        self._refusing.add(url)
                    await asyncio.sleep(1 / ASKED_PER_S)
        return admitted


def hosts_of(server: PenstockServer) -> float:
    return server.metrics()["penstock:rate_limit_hosts"]


@contextmanager
def several_hosts(folder: Path, number: int, flags: Sequence[str] = (), unit: Unit = REQUESTS) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack, folder, number, flags, unit)


@pytest.mark.long
def test_gateways_of_two_hosts_divide_the_rate_of_a_tenant(tmp_path: Path) -> None:
    with several_hosts(tmp_path, 2) as hosts:
        began = time.monotonic()
        both = hosts.admitted(2.0, hosts.servers)
        assert both <= 1.1 * FAST_MINUTE + (time.monotonic() - began) * FAST_MINUTE / 60
        one = hosts.servers[:1]
        before = hosts.admitted(3.0, one)
        while time.monotonic() < began + PATIENCE_S and before < 0.8 * 3 * FAST_MINUTE / 60:
            before = hosts.admitted(3.0, one)
        assert before >= 0.8 * 3 * FAST_MINUTE / 60, "it is lent the share of the other"
        admitted = hosts.admitted(2.0, hosts.servers)
        assert admitted <= 2 * FAST_MINUTE / 60 + 0.1 * FAST_MINUTE


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("unit", [REQUESTS, TOKENS], ids=["requests", "tokens"])
def test_four_hosts_of_which_one_is_killed_admit_at_most_a_tenth_more_than_the_rate(tmp_path: Path, unit: Unit) -> None:
    """The bar of many gateways: over 60 seconds, with a host that is killed and one that takes its place."""
    with several_hosts(tmp_path, 4, unit=unit) as hosts:
        hosts.empty()
        parts = []
        began = time.monotonic()
        parts.append(hosts.admitted(20.0, hosts.servers))
        killed = hosts.servers.pop()
        killed.kill()
        parts.append(hosts.admitted(20.0, hosts.servers))
        hosts.start()
        parts.append(hosts.admitted(max(1.0, began + 60 - time.monotonic()), hosts.servers))
        seconds = time.monotonic() - began
        ratio = sum(parts) / (unit.a_minute() * seconds / 60)
        print(f"\n{seconds:.1f} s, 4 hosts, one killed after 20 s and another started after 40 s: admitted {parts}, "
              f"{ratio:.3f} of the rate")  # fmt: skip
        assert 0.8 <= ratio <= 1.1


# --- rates in a Redis -------------------------------------------------------------------------------------------------


def redis_is_up(server: PenstockServer) -> bool:
    return server.metrics()["penstock:limits_redis_up"] == 1


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("unit", [REQUESTS, TOKENS], ids=["requests", "tokens"])
def test_four_hosts_whose_redis_is_killed_admit_at_most_a_tenth_more_than_the_rate(tmp_path: Path, unit: Unit) -> None:
    """Over 60 seconds: with the Redis, without it, with one host less, and with an empty Redis in its place.

    No request is refused for want of the Redis, and at no time do hosts admit without a limit.
    """
    pytest.importorskip("redis", reason="the extra redis is not installed")
    with ExitStack() as stack:
        redis = stack.enter_context(ExitStack())
        url = redis.enter_context(redis_server(tmp_path))
        hosts = stack.enter_context(several_hosts(tmp_path, 4, ["--limits-redis", url], unit))
        hosts.empty()
        assert all(map(redis_is_up, hosts.servers))
        parts = []
        began = time.monotonic()
        parts.append(hosts.admitted(15.0, hosts.servers))
        redis.close()
        parts.append(hosts.admitted(15.0, hosts.servers))
        assert not any(map(redis_is_up, hosts.servers))
        hosts.servers.pop().kill()
        parts.append(hosts.admitted(15.0, hosts.servers))
        redis.enter_context(redis_server(tmp_path))
        parts.append(hosts.admitted(max(1.0, began + 60 - time.monotonic()), hosts.servers))
        assert all(map(redis_is_up, hosts.servers))
        seconds = time.monotonic() - began
        ratio = sum(parts) / (unit.a_minute() * seconds / 60)
        print(f"\n{seconds:.1f} s, 4 hosts, Redis killed after 15 s, a host after 30 s, Redis back after 45 s: "
              f"admitted {parts}, {ratio:.3f} of the rate")  # fmt: skip
        assert 0.8 <= ratio <= 1.1
        quarter = unit.a_minute() / 4
        assert all(part <= 1.4 * quarter for part in parts)
        assert all(part >= 0.5 * quarter for part in parts)
