"""The rates of a tenant hold for all gateways of a host and of several hosts, and for gateways that start anew."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.config.api_keys import TenantEntry, edit_keys, new_key
from penstock.wire.curve_keys import CurveKeys

from .server import PATIENCE_S, PenstockServer, PenstockWorker

A_MINUTE = 6
BODY = {"model": "storyteller", "prompt": "Once", "max_tokens": 1}


def key_file(path: Path, requests_per_minute: int) -> dict[str, str]:
    """Writes a file with one key; returns the headers of its requests."""
    key, entry = new_key("ann", ("interactive",))
    with edit_keys(path, 10, make=True) as held:
        tenants = {"ann": TenantEntry(requests_per_minute=requests_per_minute)}
        held[0] = type(held[0])(salt=held[0].salt, tenants=tenants, keys=(entry,))
    return {"Authorization": f"Bearer {key}"}


def test_gateways_share_the_rates_of_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    headers = key_file(path, A_MINUTE)
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
ASKED_PER_S = 20
"""At each gateway."""


class Hosts:
    """One worker, and services with a gateway each."""

    def __init__(self, stack: ExitStack, folder: Path, number: int, flags: Sequence[str] = ()) -> None:
        CurveKeys.ephemeral().save(folder / "keys")
        self.headers = key_file(folder / "api-keys.json", FAST_MINUTE)
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
        """How many requests these servers admit in that time; they are asked without a pause until a bucket is empty,
        then ``ASKED_PER_S`` times a second."""
        return asyncio.run(self._admitted(seconds, servers))

    async def _admitted(self, seconds: float, servers: Sequence[PenstockServer]) -> int:
        end = time.monotonic() + seconds
        return sum(await asyncio.gather(*(self._ask(server.url, end) for server in servers)))

    async def _ask(self, url: str, end: float) -> int:
        admitted = 0
        async with httpx.AsyncClient(base_url=url, headers=self.headers, timeout=30) as client:
            while time.monotonic() < end:
                try:
                    code = (await client.post("/tokenize", json={"prompt": "Once"})).status_code
                except httpx.TransportError:  # it was killed
                    code = 0
                admitted += code == 200
                if code != 200:
                    await asyncio.sleep(1 / ASKED_PER_S)
        return admitted


def hosts_of(server: PenstockServer) -> float:
    return server.metrics()["penstock:rate_limit_hosts"]


@contextmanager
def several_hosts(folder: Path, number: int, flags: Sequence[str] = ()) -> Iterator[Hosts]:
    with ExitStack() as stack:
        yield Hosts(stack, folder, number, flags)


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
def test_four_hosts_of_which_one_is_killed_admit_at_most_a_tenth_more_than_the_rate(tmp_path: Path) -> None:
    """The bar of many gateways: over 60 seconds, with a host that is killed and one that takes its place."""
    with several_hosts(tmp_path, 4) as hosts:
        hosts.admitted(30.0, hosts.servers)
        parts = []
        began = time.monotonic()
        parts.append(hosts.admitted(20.0, hosts.servers))
        killed = hosts.servers.pop()
        killed.kill()
        parts.append(hosts.admitted(20.0, hosts.servers))
        hosts.start()
        parts.append(hosts.admitted(max(1.0, began + 60 - time.monotonic()), hosts.servers))
        seconds = time.monotonic() - began
        ratio = sum(parts) / (FAST_MINUTE * seconds / 60)
        print(f"\n{seconds:.1f} s, 4 hosts, one killed after 20 s and another started after 40 s: admitted {parts}, "
              f"{ratio:.3f} of the rate")  # fmt: skip
        assert 0.8 <= ratio <= 1.1
