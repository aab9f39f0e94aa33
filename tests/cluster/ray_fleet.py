"""A fleet of nodes a and b on a Ray cluster of two hosts (``ray_hosts``), and what its gateways answer."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx

from penstock.wire.curve_keys import CurveKeys

from .asking import ask
from .ray_hosts import RayHosts
from .server import PATIENCE_S, PenstockServer

KEY = "a-key-of-the-tests-of-ray"

FLEET = """
name = "two hosts"
keys = "{keys}"

[settings]
kv_memory = "64MiB"

[settings.failover]
no_path_s = 60.0
"""

NODE = """
[[nodes]]
name = "{name}"
address = "{address}"
gateways = {gateways}
workers = [{workers}]
{more}
"""


WORKERS = '{{ role = "prefill", count = 1 }}, {{ role = "decode", count = {decode} }}'


def missing() -> str:
    """What this machine lacks for a cluster; empty: nothing."""
    if find_spec("ray") is None:
        return "Ray (requirements-test.txt)"
    if shutil.which("redis-server") is None:
        return "redis-server"
    if shutil.which("ip") is None or os.geteuid() != 0:
        return "root and iproute2"
    namespaces = subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True)
    return "" if namespaces.returncode == 0 else "network namespaces"


class NodeGateway(PenstockServer):
    """The gateways of a node that Ray started: they can be asked, and are not ours to end."""

    def __init__(self, address: str) -> None:
        super().__init__([], environ={"PENSTOCK_API_KEY": KEY})
        self.url = f"http://{address}:8000"

    @property
    def running(self) -> bool:
        return True


class RayFleet:
    """A cluster with a fleet file of nodes a and b, and the gateway of each."""

    def __init__(self, ray: RayHosts, folder: Path) -> None:
        self.ray = ray
        self.file = folder / "fleet.toml"
        self.keys = folder / "keys"
        CurveKeys.ephemeral().save(self.keys)
        self.a, self.b = (NodeGateway(ray.host(name)) for name in "ab")
        self.write()

    def write(self, **nodes: dict[str, Any]) -> None:
        """The file; ``nodes``: what is otherwise in a node, ``{}`` for a node as it is.  Without any, both."""
        texts = []
        for name, given in (nodes or {"a": {}, "b": {}}).items():
            fields = {"address": self.ray.host(name), "gateways": 1, "decode": 1, "more": ""} | given
            fields.setdefault("workers", WORKERS.format(decode=fields.pop("decode")))
            http = f'http_host = "0.0.0.0"\nsettings = {{ api_key = "{KEY}" }}' if fields["gateways"] else ""
            fields["more"] += f"\n{http}"
            texts.append(NODE.format(name=name, **fields))
        self.file.write_text(FLEET.format(keys=self.keys) + "".join(texts))

    def command(self, action: str, *words: str, code: int = 0) -> str:
        return self.ray.penstock("ray", action, str(self.file), *words, code=code)

    def nodes(self, code: int | None = None) -> dict[str, dict[str, Any]]:
        """The rows of ``penstock ray status``, by node; ``code``: what it must end with."""
        done = self.ray.run("a", "penstock", "ray", "status", str(self.file), "--json")
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return {row["node"]: row for row in json.loads(done.stdout)["nodes"]}

    def wait_for_node(self, name: str, state: str) -> dict[str, Any]:
        """Until a node has this state; its row."""
        return self._wait_for_row(name, lambda row: row["state"] == state, f"{name} is {state}")

    def wait_for_another(self, name: str, before: dict[str, Any]) -> dict[str, Any]:
        """Until a node is ready in another process, or has another actor; its row."""

        def another(row: dict[str, Any]) -> bool:
            same = all(row.get(what) == before[what] for what in ("pid", "actor_pid"))
            return row["state"] == "ready" and not same

        return self._wait_for_row(name, another, f"another {name} is ready")

    def _wait_for_row(self, name: str, holds: Callable[[dict[str, Any]], bool], what: str) -> dict[str, Any]:
        found: dict[str, Any] = {}

        def reached() -> bool:
            found.clear()
            try:
                found.update(self.nodes()[name])
            except ValueError:  # the cluster does not answer yet
                return False
            return holds(found)

        PenstockServer.wait_for(reached, 2 * PATIENCE_S, what)
        return found

    def wait_whole(self, *workers: str) -> None:
        """Until each gateway has these workers, ready; none given: all four."""
        wanted = set(workers or ("a-prefill-0", "a-decode-0", "b-prefill-0", "b-decode-0"))
        for gateway in (self.a, self.b):
            try:
                gateway.wait_for(lambda gateway=gateway: ready_workers(gateway) >= wanted, 2 * PATIENCE_S, "whole")
            except AssertionError:
                rows = [(row["id"], row["state"]) for row in gateway.workers()]
                raise AssertionError(f"{gateway.url} is not whole: {rows}; {self.nodes()}") from None


def ready_workers(server: PenstockServer) -> set[str]:
    """The names of those; a gateway that does not answer yet has none."""
    try:
        return {row["id"] for row in server.workers() if row["state"] == "ready"}
    except httpx.TransportError:
        return set()


def seconds_until_answered(server: PenstockServer, wanted: str) -> float:
    """Until a whole answer has come, which must be ``wanted``; it is asked once a gateway is ready."""
    began = time.monotonic()
    found: list[str] = []

    def answers() -> bool:
        try:
            if server.get("/ready").status_code != 200:
                return False
            found.append(ask(server, max_tokens=40))
        except httpx.TransportError:
            return False
        return True

    server.wait_for(answers, PATIENCE_S, "answered")
    assert found == [wanted]
    return time.monotonic() - began
