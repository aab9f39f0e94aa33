"""The rates of a tenant hold for all gateways of a host and of several hosts, and for gateways that start anew."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx
import pytest

from penstock.config.api_keys import TenantEntry

from .rated_hosts import (
    FAST_MINUTE,
    REQUESTS,
    TOKENS,
    Unit,
    key_file,
    minute_with_redis,
    minute_without_redis,
    several_hosts,
)
from .server import PATIENCE_S, PenstockServer

A_MINUTE = 6
BODY = {"model": "storyteller", "prompt": "Once", "max_tokens": 1}


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
    minute = minute_without_redis(tmp_path, unit)
    print(f"\n{minute}")
    assert 0.8 <= minute.ratio <= 1.1


# --- rates in a Redis -------------------------------------------------------------------------------------------------


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("unit", [REQUESTS, TOKENS], ids=["requests", "tokens"])
def test_four_hosts_whose_redis_is_killed_admit_at_most_a_tenth_more_than_the_rate(tmp_path: Path, unit: Unit) -> None:
    """Over 60 seconds: with the Redis, without it, with one host less, and with an empty Redis in its place.

    No request is refused for want of the Redis, and at no time do hosts admit without a limit.
    """
    pytest.importorskip("redis", reason="the extra redis is not installed")
    minute = minute_with_redis(tmp_path, unit)
    print(f"\n{minute}")
    assert 0.8 <= minute.ratio <= 1.1
    quarter = unit.a_minute() / 4
    assert all(part <= 1.4 * quarter for part in minute.parts)
    assert all(part >= 0.5 * quarter for part in minute.parts)
