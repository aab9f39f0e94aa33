"""``penstock ray`` on a real Ray cluster of two hosts, in network namespaces: what dies, and what goes on."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from penstock.wire.curve_keys import CurveKeys

from .asking import ask, streaming
from .ray_hosts import RayHosts
from .server import PATIENCE_S, PenstockServer
from .streams import all_answers
from .varied import varied_requests

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
workers = [{{ role = "prefill", count = 1 }}, {{ role = "decode", count = {decode} }}]
{more}
"""


def no_namespaces() -> bool:
    if shutil.which("ip") is None or os.geteuid() != 0:
        return True
    return subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode != 0


pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(find_spec("ray") is None, reason="needs Ray: requirements-test.txt"),
    pytest.mark.skipif(no_namespaces(), reason="needs root, iproute2 and network namespaces"),
    pytest.mark.timeout(600),
]


class Gateway(PenstockServer):
    """The gateways of a node that Ray started: they can be asked, and are not ours to end."""

    def __init__(self, address: str) -> None:
        super().__init__([])
        self.url = f"http://{address}:8000"

    @property
    def running(self) -> bool:
        return True


class RayFleet:
    """A cluster with a fleet file of nodes a and b, and the gateway of each."""

    def __init__(self, ray: RayHosts, folder: Path) -> None:
        self.ray = ray
        self.file = folder / "fleet.toml"
        self._keys = folder / "keys"
        CurveKeys.ephemeral().save(self._keys)
        self.a, self.b = (Gateway(ray.host(name)) for name in "ab")
        self.write()

    def write(self, **nodes: dict[str, Any]) -> None:
        """The file; ``nodes``: what is otherwise in a node, ``{}`` for a node as it is.  Without any, both."""
        texts = []
        for name, given in (nodes or {"a": {}, "b": {}}).items():
            fields = {"gateways": 1, "decode": 1, "more": ""} | given
            http = f'http_host = "0.0.0.0"\nsettings = {{ api_key = "{KEY}" }}' if fields["gateways"] else ""
            fields["more"] += http
            texts.append(NODE.format(name=name, address=self.ray.host(name), **fields))
        self.file.write_text(FLEET.format(keys=self._keys) + "".join(texts))

    def command(self, action: str, *words: str, code: int = 0) -> str:
        return self.ray.penstock("ray", action, str(self.file), *words, code=code)

    def nodes(self, code: int | None = None) -> dict[str, dict[str, Any]]:
        """The rows of ``penstock ray status``, by node."""
        done = self.ray.run("a", "penstock", "ray", "status", str(self.file), "--json")
        assert code is None or done.returncode == code, done.stdout + done.stderr
        return {row["node"]: row for row in json.loads(done.stdout)["nodes"]}


KEY = "a-key-of-the-tests-of-ray"
