"""Limits of keys and the audit log in two gateways: open requests are counted exactly over both, also when they are
killed; the log has a line of each kind, and a full disk stops no request."""

from __future__ import annotations

import json
import os
import resource
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from penstock.cli.main import main
from penstock.config.api_keys import KeyLimits, TenantEntry, edit_keys, load_keys, new_key

from .server import PATIENCE_S, PenstockServer

LIMIT = 4
PATH = "/v1/completions"
SHORT = {"model": "storyteller", "prompt": "Once", "max_tokens": 1}
LONG = {"model": "storyteller", "prompt": "Once", "max_tokens": 1900, "n": 16, "ignore_eos": True, "stream": True}
FLAGS = ["--aggregated", "--gateways", "2", "--api-key", "sk-of-the-test"]
ADMITTED = b"HTTP/1.1 200"
AUDIT = "[audit]\nmax_queued_audit_events = 10\nrefusal_window_s = 0.5\n"


def add_key(path: Path, tenant: str, **limits: Any) -> str:
    """Also one that has expired, which the command does not make."""
    key, entry = new_key(tenant, ("interactive",), KeyLimits(**limits))
    with edit_keys(path, 10, make=True) as held:
        tenants = {**held[0].tenants, tenant: TenantEntry()}
        held[0] = msgspec.structs.replace(held[0], tenants=tenants, keys=(*held[0].keys, entry))
    return key


@pytest.fixture
def paths(tmp_path: Path) -> tuple[Path, Path]:
    """The file of keys, and the audit log."""
    return tmp_path / "keys.json", tmp_path / "audit.jsonl"


@contextmanager
def serving(paths: tuple[Path, Path], folder: Path) -> Iterator[PenstockServer]:
    flags = [*FLAGS, "--api-keys", str(paths[0]), "--audit-log", str(paths[1])]
    with PenstockServer(flags, config=AUDIT, folder=folder) as server:
        yield server


def ask(server: PenstockServer, key: str, path: str = PATH, **fields: Any) -> httpx.Response:
    """On a connection of its own, which either gateway may take."""
    headers = {"Authorization": f"Bearer {key}"}
    return httpx.post(server.url + path, json=SHORT | fields, headers=headers, timeout=60, trust_env=False)


def code_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, "" if answer.status_code == 200 else answer.json()["error"]["code"]


def begin_stream(server: PenstockServer, key: str) -> socket.socket:
    """A request that was admitted, and of which nothing more is read.

    Sent again while the place of the request before it, which has been answered, is not free yet.
    """
    made: list[socket.socket] = []

    def admitted() -> bool:
        made.append(send_stream(server, key))
        if made[-1].recv(len(ADMITTED), socket.MSG_WAITALL) == ADMITTED:
            return True
        made.pop().close()
        return False

    server.wait_for(admitted, PATIENCE_S, "admitted")
    return made[0]


def send_stream(server: PenstockServer, key: str) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.port), timeout=60)
    raw = json.dumps(LONG).encode()
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(raw)}\r\n\r\n"
    )
    made.sendall(head.encode() + raw)
    return made


def audit_lines(path: Path, **wanted: Any) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [line for line in lines if all(line.get(name) == value for name, value in wanted.items())]


@pytest.mark.timeout(300)
def test_open_requests_are_counted_over_both_gateways_and_a_killed_one_forgets_its_own(
    paths: tuple[Path, Path], tmp_path: Path
) -> None:
    key = add_key(paths[0], "ann", max_concurrency=LIMIT)
    other = add_key(paths[0], "bob", max_concurrency=1)

    with serving(paths, tmp_path) as server:

        def refused() -> bool:
            return code_of(ask(server, key)) == (429, "concurrency_limit_exceeded")

        def until(condition: Callable[[], bool], what: str) -> None:
            server.wait_for(condition, PATIENCE_S, what)

        streams = [begin_stream(server, key) for _ in range(LIMIT - 1)]
        assert [code_of(ask(server, key)) for _ in range(8)] == [(200, "")] * 8
        streams.append(begin_stream(server, key))
        until(refused, "at its limit")
        assert all(refused() for _ in range(8)), "at either gateway"
        assert code_of(ask(server, other)) == (200, "")
        for _ in range(2):
            streams.pop(0).close()
            until(lambda: not refused(), "below its limit")
            streams.append(begin_stream(server, key))
            until(refused, "at its limit again")
        old = server.gateway_pids(server.workers())
        for pid in old:
            os.kill(pid, signal.SIGKILL)

        def anew() -> bool:
            try:
                return len(server.gateway_pids(server.workers()) - old) == 2 and not refused()
            except (httpx.TransportError, AssertionError):
                return False

        until(anew, "served by new gateways, which have nothing open")
        for stream in streams:
            stream.close()
        streams = [begin_stream(server, key) for _ in range(LIMIT)]
        until(refused, "at its limit with new gateways")
        for stream in streams:
            stream.close()
        until(lambda: server.metrics()["penstock:requests_open"] == 0, "idle")
        lines = audit_lines(paths[1], event="refused", reason="concurrency")
        ann, _ = load_keys(paths[0], 10).keys
        assert {(line["key"], line["status"]) for line in lines} == {(ann.id, 429)}
        assert {line["gateway"] for line in lines} == {"gateway-0", "gateway-1"}


@pytest.mark.timeout(300)
def test_the_audit_log_has_every_kind_of_line_and_a_full_disk_stops_no_request(
    paths: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys, log = paths
    expired = add_key(keys, "ann", expires=1)
    other = add_key(keys, "bob", models=("other",))
    with serving(paths, tmp_path) as server:
        assert code_of(ask(server, expired)) == (401, "expired_api_key")
        assert code_of(ask(server, other)) == (403, "model_not_found")
        worker = server.workers()[0]["id"]
        assert ask(server, other, f"/admin/workers/{worker}/drain").status_code == 403
        headers = {"Authorization": "Bearer sk-of-the-test"}
        drained = httpx.post(f"{server.url}/admin/workers/{worker}/resume", json={}, headers=headers, timeout=60)
        assert drained.status_code == 200

        def noted(count: int, **wanted: Any) -> None:
            server.wait_for(lambda: len(audit_lines(log, **wanted)) >= count, PATIENCE_S, f"noted: {wanted}")

        assert main(["keys", "add", str(keys), "--tenant", "eve", "--routes", "embeddings"]) == 0
        eve, name = capsys.readouterr().out.split()[:2]
        noted(2, event="keys_added", keys=[name])  # by either gateway
        assert code_of(ask(server, eve)) == (403, "route_not_allowed")
        assert main(["keys", "revoke", str(keys), name]) == 0
        noted(2, event="keys_revoked", keys=[name])
        assert code_of(ask(server, eve)) == (401, "invalid_api_key")
        ann, bob = load_keys(keys, 10).keys
        noted(1, event="refused", key=ann.id, status=401, reason="expired_api_key", route=PATH, remote="127.0.0.1")
        noted(1, event="refused", key=bob.id, status=403, reason="model_not_found", method="POST")
        noted(1, event="refused", key=bob.id, status=403, reason="not_an_operator")
        noted(1, event="refused", key=name, status=403, reason="route_not_allowed")
        noted(1, event="refused", status=401, reason="invalid_api_key")
        noted(1, event="admin", key="api-key", status=200, route=f"/admin/workers/{worker}/resume")
        fill_the_disk(server, log)
    text = log.read_text()
    assert all(secret not in text for secret in (expired, other, eve, "sk-of-the-test", "Once"))
    assert log.stat().st_mode & 0o777 == 0o600


def fill_the_disk(server: PenstockServer, log: Path) -> None:
    """No gateway can append for a while: they serve, refuse, and count what they had no room for."""
    gateways = server.gateway_pids(server.workers())
    before = resource.prlimit(next(iter(gateways)), resource.RLIMIT_FSIZE)
    server.wait_for(lambda: is_quiet(log), PATIENCE_S, "quiet")
    begun = len(audit_lines(log))
    for pid in gateways:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (log.stat().st_size, before[1]))
    wrong = 48
    for number in range(wrong):
        assert code_of(ask(server, "sk-wrong")) == (401, "invalid_api_key")
        assert number % 8 or code_of(ask(server, "sk-of-the-test")) == (200, "")
    assert len(audit_lines(log)) == begun
    assert server.metrics()["penstock:audit_events_lost_total"] > 0
    for pid in gateways:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)

    def counted() -> int:
        return sum(line["count"] for line in audit_lines(log)[begun:])

    server.wait_for(lambda: counted() == wrong, PATIENCE_S, "counted")
    assert audit_lines(log, event="lost")


def is_quiet(log: Path) -> bool:
    """Whether the windows of earlier refusals have ended."""

    return time.time() - log.stat().st_mtime > 2.0
