"""Exact rates of tenants, with a real Redis: over several hosts, and without it, stopped or emptied."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
from tests.store_rig import redis_server

from penstock.api.auth import Tenant
from penstock.api.load_shedding import BucketCharge, TenantRateLimiter
from penstock.clock import MonotonicClock
from penstock.errors import ConfigError, RateLimited
from penstock.launch.redis_rates import MAX_CONNECTIONS, RedisRates
from penstock.launch.shared_rates import SharedTokenBuckets

redis = pytest.importorskip("redis", reason="the extra redis is not installed")

ANN = Tenant(id="ann", requests_per_minute=30, tokens_per_minute=3000)
TIMEOUT_S = 1.0
PATIENCE_S = 30.0


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with redis_server(tmp_path) as url:
        yield url


@pytest.fixture
def server(url: str) -> Iterator[Any]:
    """A client beside those that are tested."""
    client = redis.Redis.from_url(url)
    yield client
    client.close()


class Host:
    """The limiter of one host, one of two that share rates."""

    def __init__(self, url: str) -> None:
        self.exact = RedisRates(url, b"key", timeout_s=TIMEOUT_S)
        self.buckets = SharedTokenBuckets(16, b"key")
        with self.buckets.locked():
            self.buckets.set_hosts(1, time.monotonic())  # it was there first
            self.buckets.set_hosts(2, time.monotonic())
        self.rates = TenantRateLimiter(MonotonicClock(), self.buckets, self.exact)

    async def ask(self, tries: int, tokens: int = 0) -> int:
        """How many of so many requests are admitted."""
        admitted = 0
        for _ in range(tries):
            try:
                await self.rates.charge_request(ANN, 1, tokens)
            except RateLimited:
                continue
            admitted += 1
        return admitted

    async def wait_up(self) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while not self.exact.is_up:  # noqa: ASYNC110 - a state of another task
                await asyncio.sleep(0.01)


async def use_up_in_outage(host: Host, server: Any) -> float:
    """The host admits its share while Redis is stopped, which is back afterwards; returns when that began."""
    began = time.monotonic()
    pid = server.info("server")["process_id"]
    assert await host.ask(1) == 1
    os.kill(pid, signal.SIGSTOP)
    try:
        assert await host.ask(30) >= 13
    finally:
        os.kill(pid, signal.SIGCONT)
    await host.wait_up()
    return began


@asynccontextmanager
async def hosts(url: str, number: int = 2) -> AsyncIterator[list[Host]]:
    made = [Host(url) for _ in range(number)]
    try:
        yield made
    finally:
        for host in made:
            await host.exact.close()


async def test_all_hosts_together_admit_what_one_may_and_one_may_have_it_all(url: str) -> None:
    async with hosts(url) as (one, other):
        began = time.monotonic()
        first = await asyncio.gather(*(host.ask(10) for host in (one, other)))
        assert sum(first) == 20
        rest = await one.ask(30) + await other.ask(30)
        assert 10 <= rest <= 11 + (time.monotonic() - began) * 30 / 60


async def test_tokens_of_completions_are_taken_even_if_they_are_not_there(url: str, server: Any) -> None:
    async with hosts(url) as (one, other):
        assert await one.ask(1, tokens=1000) == 1
        one.rates.charge_completion(ANN, 5000)
        await asyncio.gather(*one.exact._pending)
        with pytest.raises(RateLimited, match=r"may use 3000 tokens a minute. 0 are left"):
            await other.rates.charge_request(ANN, 1, 10)
        assert all(b"ann" not in name for name in server.keys("penstock:rate:*"))
        assert all(0 < server.ttl(name) <= 200 for name in server.keys("penstock:rate:*"))


async def test_while_redis_is_stopped_hosts_fall_back_to_shares_never_to_none(url: str, server: Any) -> None:
    async with hosts(url, 1) as (host,):
        assert await host.ask(10) == 10
        pid = server.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            more = await host.ask(30)
            assert time.monotonic() - began < TIMEOUT_S + 5.0, "only the first waits for it"
            assert 10 <= more <= 11 + (time.monotonic() - began) * 15 / 60, "its half of what was left"
            assert not host.exact.is_up
        finally:
            os.kill(pid, signal.SIGCONT)
        await host.wait_up()
        await host.ask(1)
        assert host.exact.is_up


async def test_more_charges_at_a_time_than_connections_wait_for_one(url: str, server: Any) -> None:
    exact, charge = RedisRates(url, b"key", timeout_s=PATIENCE_S), BucketCharge(unit="requests", size=1e6, amount=1.0)
    charges = [exact.charge_buckets("ann", [charge], [1.0]) for _ in range(200)]
    answers = await asyncio.gather(*charges)
    assert None not in answers
    assert exact.is_up
    assert server.info("clients")["connected_clients"] <= MAX_CONNECTIONS + 1
    await exact.close()


class DistantRedis:
    """The way to a Redis whose answers take ``delay_s``, on any number of connections."""

    def __init__(self, url: str) -> None:
        self.delay_s = 0.0
        self._there = urlsplit(url)
        self._pumps = set[asyncio.Task[None]]()

    @asynccontextmanager
    async def url(self) -> AsyncIterator[str]:
        server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        try:
            yield f"redis://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        finally:
            server.close()
            for pump in self._pumps:
                pump.cancel()
            await asyncio.gather(*self._pumps, return_exceptions=True)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_unix_connection(self._there.path)
        for source, sink, late in ((reader, there[1], False), (there[0], writer, True)):
            self._pumps.add(asyncio.create_task(self._pump(source, sink, late)))

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, late: bool) -> None:
        with closing(sink):
            while words := await source.read(65536):
                if late:
                    await asyncio.sleep(self.delay_s)
                sink.write(words)


async def test_charges_that_wait_long_for_a_connection_are_charged_once_and_redis_is_not_away(
    url: str, server: Any
) -> None:
    redis = DistantRedis(url)
    async with redis.url() as there:
        exact, charge = RedisRates(there, b"key", timeout_s=TIMEOUT_S), BucketCharge("requests", 1e6, 1.0)

        async def ask(tries: int) -> int:
            """How many of so many at a time are charged there."""
            answers = await asyncio.gather(*(exact.charge_buckets("ann", [charge], [1.0]) for _ in range(tries)))
            return tries - answers.count(None)

        def calls() -> int:
            return int(server.info("commandstats")["cmdstat_evalsha"]["calls"])

        assert await ask(MAX_CONNECTIONS) == MAX_CONNECTIONS, "all are connected"
        before, redis.delay_s = calls(), 0.3
        charged = await ask(500)
        assert exact.is_up
        assert MAX_CONNECTIONS <= charged < 500
        assert calls() - before == charged, "what is charged to the shares is not charged there as well"
        await exact.close()


async def test_one_that_was_refused_has_nothing_saved_when_redis_is_gone(url: str, server: Any) -> None:
    """Its own buckets would be full, for it was the other host that had all of the rate."""
    async with hosts(url) as (one, other):
        assert await one.ask(40) == 30
        assert await other.ask(1) == 0
        pid = server.info("server")["process_id"]
        os.kill(pid, signal.SIGSTOP)
        try:
            began = time.monotonic()
            admitted = await other.ask(30)
            assert not other.exact.is_up
            assert admitted <= 1 + (time.monotonic() - began) * 30 / 60
        finally:
            os.kill(pid, signal.SIGCONT)


async def test_what_hosts_admit_while_redis_is_away_is_not_admitted_again_when_it_is_back(
    url: str, server: Any
) -> None:
    async with hosts(url, 1) as (host,):
        began = await use_up_in_outage(host, server)
        assert await host.ask(30) <= 1 + (time.monotonic() - began) * 30 / 60


async def test_a_client_that_leaves_during_the_first_charge_of_a_bucket_makes_it_no_fuller(
    url: str, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with hosts(url, 1) as (host,):
        began = await use_up_in_outage(host, server)
        waiting = asyncio.Event()

        async def wait(**_: object) -> None:
            """For a connection to Redis."""
            waiting.set()
            await asyncio.Event().wait()

        with monkeypatch.context() as patch:
            patch.setattr(host.exact, "_script", wait)
            leaving = asyncio.create_task(host.ask(1))
            await waiting.wait()
            leaving.cancel()
        assert await host.ask(30) <= 1 + (time.monotonic() - began) * 30 / 60


async def test_a_bucket_is_not_too_full_because_another_of_its_tenant_was_charged_first(url: str, server: Any) -> None:
    """The tokens of a response that ends are charged alone, and may be what comes first when Redis is back."""
    async with hosts(url, 1) as (host,):
        began = await use_up_in_outage(host, server)
        host.rates.charge_completion(ANN, 5)
        await asyncio.gather(*host.exact._pending)
        assert await host.ask(30) <= 1 + (time.monotonic() - began) * 30 / 60


async def test_a_redis_that_has_lost_its_memory_gives_no_second_minutes_worth(url: str, server: Any) -> None:
    async with hosts(url, 1) as (host,):
        began = time.monotonic()
        assert await host.ask(31) >= 30
        server.flushall()
        assert await host.ask(30) <= 1 + (time.monotonic() - began) * 30 / 60


async def test_a_request_that_is_refused_takes_nothing(url: str) -> None:
    async with hosts(url, 1) as (host,):
        assert await host.ask(1, tokens=2500) == 1
        assert await host.ask(20, tokens=1000) == 0
        assert await host.ask(29, tokens=1) == 29


async def test_what_is_no_bucket_is_as_good_as_no_redis(url: str, server: Any) -> None:
    async with hosts(url, 1) as (host,):
        assert await host.ask(1) == 1
        for name in server.keys("penstock:rate:*"):
            server.set(name, b"not a hash")
        assert await host.ask(30) <= 15
        assert not host.exact.is_up


def test_a_bad_url_is_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="--limits-redis"):
        RedisRates("http://here", b"key", timeout_s=TIMEOUT_S)
