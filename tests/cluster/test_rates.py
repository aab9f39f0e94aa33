"""The rates of a tenant hold for all gateways of a host, and for one that is forked anew."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import httpx

from penstock.config.api_keys import TenantEntry, edit_keys, new_key

from .server import PATIENCE_S, PenstockServer

A_MINUTE = 6
BODY = {"model": "storyteller", "prompt": "Once", "max_tokens": 1}


def test_gateways_share_the_rates_of_a_tenant(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    key, entry = new_key("ann", ("interactive",))
    with edit_keys(path, 10, make=True) as held:
        tenants = {"ann": TenantEntry(requests_per_minute=A_MINUTE)}
        held[0] = type(held[0])(salt=held[0].salt, tenants=tenants, keys=(entry,))
    headers = {"Authorization": f"Bearer {key}"}
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
