"""A real Envoy in front of real gateways, configured by ``examples/envoy.yaml``; and a real ``penstock picker``."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from clients.packages import need_envoy

from .server import PATIENCE_S, START_S, STOP_S, PenstockServer, free_port

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/envoy.yaml"
SERVED_BY = "x-served-by"
"""A response header that is added to the example: the gateway's address."""


def envoy_config(port: int, gateways: Sequence[int], picker: int | None, *, fail_open: bool = True) -> dict[str, Any]:
    """The example with these ports; without a picker, as its users have it who need none: plain round robin."""
    config = yaml.safe_load(EXAMPLE.read_text(encoding="utf-8"))
    (listener,) = config["static_resources"]["listeners"]
    listener["address"]["socket_address"]["port_value"] = port
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    shown = {"header": {"key": SERVED_BY, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}
    manager["route_config"]["response_headers_to_add"] = [shown]
    clusters = {cluster["name"]: cluster for cluster in config["static_resources"]["clusters"]}
    clusters["gateways"]["load_assignment"]["endpoints"] = _endpoints(gateways)
    processing, router = manager["http_filters"]
    if picker is None:
        policy = clusters["gateways"].pop("load_balancing_policy")["policies"][0]["typed_extension_config"]
        clusters["gateways"]["load_balancing_policy"] = policy["typed_config"]["fallback_policy"]
        manager["http_filters"] = [router]
        config["static_resources"]["clusters"] = [clusters["gateways"]]
    else:
        processing["typed_config"]["failure_mode_allow"] = fail_open
        clusters["picker"]["load_assignment"]["endpoints"] = _endpoints([picker])
    return config


def _endpoints(ports: Sequence[int]) -> list[dict[str, Any]]:
    places = [{"address": "127.0.0.1", "port_value": port} for port in ports]
    return [{"lb_endpoints": [{"endpoint": {"address": {"socket_address": place}}} for place in places]}]


class Envoy:
    """One process, on a port of its own; leaving the block ends it."""

    def __init__(self, folder: Path, gateways: Sequence[int], picker: int | None, *, fail_open: bool = True) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = folder / f"envoy-{self.port}.log"
        self._config = folder / f"envoy-{self.port}.json"
        self._config.write_text(json.dumps(envoy_config(self.port, gateways, picker, fail_open=fail_open)))
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Envoy:
        command = [need_envoy(), "-c", self._config, "--disable-hot-restart", "--concurrency", "1", "-l", "warn"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        try:
            PenstockServer.wait_for(self._listens, START_S, "listening")
        except BaseException:
            self._process.kill()
            print(self._log.read_text())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        finally:
            self._process.kill()
        if kind is not None:
            print(self._log.read_text()[-4000:])

    def _listens(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, f"Envoy has ended:\n{self._log.read_text()}"
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1.0):
            return True
        return False

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE_S, trust_env=False)


class PenstockPicker(PenstockServer):
    """A ``penstock picker``; ``port`` is that of ext_proc, ``url`` that of its metrics."""

    def __init__(self, members: str, flags: Sequence[str] = ()) -> None:
        super().__init__(flags)
        self.members = members
        self.health_port, self.metrics_port = free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.metrics_port}"

    def _words(self) -> list[str]:
        ports = ["--health-port", str(self.health_port), "--metrics-port", str(self.metrics_port)]
        return ["picker", "--members", self.members, "--listen", f"tcp://127.0.0.1:{self.port}", *ports, *self.flags]

    def wait_ready(self, timeout_s: float = START_S) -> None:
        def ready() -> bool:
            assert self.running, f"ended with {self.process.returncode} before it was ready:\n{self.read_log()}"
            return "ready: " in self.read_log()

        self.wait_for(ready, timeout_s, "ready")

    def ready_gateways(self) -> int:
        """As its metrics say."""
        for line in self.get("/metrics").text.splitlines():
            if line.startswith('penstock:picker_gateways{state="ready"}'):
                return int(float(line.split()[-1]))
        raise AssertionError("the metrics do not say")
