"""Services of several hosts that share only TCP, keys and a worker, and a tenant that uses up its rate at all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from tests.store_rig import redis_server

from penstock.config.api_keys import TenantEntry, edit_keys, new_key
from penstock.wire.curve_keys import CurveKeys

from .server import PATIENCE_S, PenstockServer, PenstockWorker

FAST_MINUTE = 600
EMPTIED = 30
"""Times of three seconds that a minute's worth may take to be used up, on a busy machine."""

EMPTYING = 3
"""Clients at each gateway meanwhile: on a busy machine one alone may ask for less than flows in."""

ASKED_PER_S = 20
"""At each gateway."""


def key_file(path: Path, rates: TenantEntry) -> dict[str, str]:
    """Writes a file with one key, of a tenant with these rates; returns the headers of its requests."""
    key, entry = new_key("ann", ("interactive",))
    with edit_keys(path, 10, make=True) as held:
        tenants = {"ann": rates}
        held[0] = type(held[0])(salt=held[0].salt, tenants=tenants, keys=(entry,))
    return {"Authorization": f"Bearer {key}"}


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
        self.admissions: list[tuple[float, int]] = []  # of ``admitted``: when, and how many units
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
            admitted = self.admitted(3.0, EMPTYING * self.servers)
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
                    units = self.unit.used(response.json())
                    self.admissions.append((time.monotonic(), units))
                    admitted += units
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


def redis_is_up(server: PenstockServer) -> bool:
    return server.metrics()["penstock:limits_redis_up"] == 1


# --- a minute of disturbances -----------------------------------------------------------------------------------------

MINUTE_S = 60.0
HOSTS = 4


@dataclass
class Minute:
    """What all hosts together admitted in a minute, in parts that events divide."""

    rate: int  # units that a minute may have
    events: list[tuple[float, str]] = field(default_factory=list)  # seconds from the start, and what befell
    parts: list[int] = field(default_factory=list)
    admissions: list[tuple[float, int]] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def ratio(self) -> float:
        """To what the rate allows in this time."""
        return sum(self.parts) / (self.rate * self.seconds / 60)

    def __str__(self) -> str:
        told = ", ".join(f"{what} after {at:.0f} s" for at, what in self.events)
        return f"{self.seconds:.1f} s, {HOSTS} hosts, {told}: admitted {self.parts}, {self.ratio:.3f} of the rate"


def _minute(hosts: Hosts, events: Sequence[tuple[str, Callable[[], object]]]) -> Minute:
    """Ask for a minute, in which the events happen at equal distances, from empty buckets on."""
    hosts.empty()
    minute = Minute(hosts.unit.a_minute())
    hosts.admissions.clear()
    began, part_s = time.monotonic(), MINUTE_S / (len(events) + 1)
    for what, happen in events:
        minute.parts.append(hosts.admitted(part_s, hosts.servers))
        minute.events.append((time.monotonic() - began, what))
        happen()
    minute.parts.append(hosts.admitted(max(1.0, began + MINUTE_S - time.monotonic()), hosts.servers))
    minute.seconds = time.monotonic() - began
    minute.admissions = [(at - began, units) for at, units in hosts.admissions]
    return minute


def minute_without_redis(folder: Path, unit: Unit) -> Minute:
    """One of the hosts is killed, and another takes its place."""
    with several_hosts(folder, HOSTS, unit=unit) as hosts:
        kill, start = (lambda: hosts.servers.pop().kill()), hosts.start
        return _minute(hosts, [("a host killed", kill), ("another started", start)])


def minute_with_redis(folder: Path, unit: Unit) -> Minute:
    """With the Redis, without it, with one host less, and with an empty Redis in its place."""
    with ExitStack() as stack:
        redis = stack.enter_context(ExitStack())
        url = redis.enter_context(redis_server(folder))
        hosts = stack.enter_context(several_hosts(folder, HOSTS, ["--limits-redis", url], unit))
        assert all(map(redis_is_up, hosts.servers))

        def kill_host() -> None:
            assert not any(map(redis_is_up, hosts.servers))
            hosts.servers.pop().kill()

        events = [
            ("Redis killed", redis.close),
            ("a host killed", kill_host),
            ("Redis back, empty", lambda: redis.enter_context(redis_server(folder))),
        ]
        minute = _minute(hosts, events)
        assert all(map(redis_is_up, hosts.servers))
        return minute
