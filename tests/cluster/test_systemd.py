"""The units of ``penstock manifests systemd`` under a systemd: readiness, drain, restart, and what they may not do."""

from __future__ import annotations

import itertools
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from penstock.wire.curve_keys import CurveKeys

from .asking import ask, penstock
from .front import KEY, TOKENS, Front
from .server import START_S, PenstockServer
from .systemd_host import EXECUTABLE, SystemdHost, missing

FLEET = """
name = "two hosts"
keys = "/etc/penstock/host-keys"

[settings]
kv_memory = "64MiB"
failover = {{ no_path_s = 60.0 }}

[[nodes]]
name = "a"
address = "127.0.0.1"
port = {port}
gateways = 1
http_port = {http}
workers = [{{ role = "prefill", count = 1 }}, {{ role = "decode", count = 1 }}]

[[nodes]]
name = "b"
address = "127.0.0.1"
port = {other}
workers = [{{ role = "decode", count = 1 }}]
"""
PORTS = range(20000, 32768)
"""Below those from which the system takes ports of outgoing connections, so that a unit finds its own free again."""

NAMES = {"a-prefill-0", "a-decode-0", "b-decode-0"}
UNITS = ("penstock-a", "penstock-b")


def ports_below(count: int) -> int:
    """The first of so many ports in a row that are free."""
    for first in itertools.islice(itertools.cycle(PORTS[::count]), os.getpid() % 1000, 4000):
        with ExitStack() as stack:
            try:
                for port in range(first, first + count):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except OSError:
                continue
        return first
    raise AssertionError(f"no {count} free ports in {PORTS}")


@contextmanager
def units(folder: Path) -> Iterator[tuple[SystemdHost, Front]]:
    """Both units, as docs/fleet.md installs them, enabled and started."""
    port = ports_below(7)
    fleet = folder / "fleet.toml"
    fleet.write_text(FLEET.format(port=port, other=port + 4, http=port + 6))
    printed = penstock("manifests", "systemd", str(fleet), "--executable", EXECUTABLE, "--out", str(folder / "units"))
    assert printed.returncode == 0, printed.stderr
    with SystemdHost(folder) as host:
        host.write("/etc/penstock/fleet.toml", fleet.read_text())
        host.do("install", "-d", "-m", "0700", "-o", "penstock", "-g", "penstock", "/etc/penstock/host-keys")
        for file in CurveKeys.ephemeral().save(folder / "keys"):
            host.write(f"/etc/penstock/host-keys/{file.name}", file.read_text(), mode="0600", owner="penstock")
        host.write("/etc/penstock/environment", f"PENSTOCK_API_KEY={KEY}\n", mode="0600")
        for unit in UNITS:
            host.write(f"/etc/systemd/system/{unit}.service", (folder / "units" / f"{unit}.service").read_text())
        host.do("systemctl", "daemon-reload")
        host.do("systemctl", "enable", "--now", *UNITS)
        front = Front(f"http://127.0.0.1:{port + 6}")
        try:
            yield host, front
        except BaseException:
            print(host.journal())
            raise


def is_whole(front: Front) -> bool:
    """Whether the gateway knows all workers as ready."""
    try:
        return {name for name, row in front.workers().items() if row["state"] == "ready"} == NAMES
    except httpx.TransportError:
        return False


def wait_whole(front: Front) -> None:
    PenstockServer.wait_for(lambda: is_whole(front), START_S, "whole")


@pytest.mark.long
def test_units_start_drain_come_back_and_are_locked_in(tmp_path: Path) -> None:
    if why := missing():
        pytest.skip(why)
    with PenstockServer(["--aggregated"]) as server:
        wanted = ask(server, max_tokens=TOKENS)
    with units(tmp_path) as (host, front):
        assert front.get("/ready").status_code == 200, "Type=notify: it is ready when `systemctl start` returns"
        wait_whole(front)
        check_locked_in(host)

        with front.streams(4) as streams:
            for stream in streams:
                stream.read(50)
            host.do("systemctl", "stop", "penstock-b")
            assert host.shows("penstock-b", "Result") == "success", "it has drained within TimeoutStopSec"
            assert [stream.read() for stream in streams] == [wanted] * 4
        host.do("systemctl", "start", "penstock-b")
        wait_whole(front)

        with front.streams(4) as streams:
            for stream in streams:
                stream.read(50)
            host.do("systemctl", "kill", "--signal=KILL", "--kill-whom=main", "penstock-b")
            assert [stream.read() for stream in streams] == [wanted] * 4
        PenstockServer.wait_for(lambda: host.shows("penstock-b", "NRestarts") == "1", START_S, "Restart=always")
        PenstockServer.wait_for(lambda: host.shows("penstock-b", "ActiveState") == "active", START_S, "active")
        wait_whole(front)

        with front.streams(1) as (stream,):
            stream.read(50)
            host.do("systemctl", "restart", "penstock-a")
            assert stream.read() == wanted, "what runs is finished before it ends"
        assert front.get("/ready").status_code == 200
        wait_whole(front)
        assert front.ask() == wanted
        for unit in UNITS:
            host.do("systemctl", "disable", "--now", unit)
            assert host.shows(unit, "Result") == "success"


def check_locked_in(host: SystemdHost) -> None:
    """Every process of a unit, not the first one alone."""
    for unit in UNITS:
        group = host.shows(unit, "ControlGroup")
        pids = host.do("cat", f"/sys/fs/cgroup{group}/cgroup.procs").split()
        assert len(pids) >= 2
        for pid in pids:
            status = dict(line.split(":", 1) for line in host.do("cat", f"/proc/{pid}/status").splitlines())
            assert {status[name].strip() for name in ("CapEff", "CapPrm", "CapBnd", "CapAmb")} == {"0" * 16}
            assert (status["NoNewPrivs"].strip(), status["Seccomp"].strip()) == ("1", "2")
            assert status["Uid"].split()[0] == host.do("id", "-u", "penstock").strip()
        main = host.shows(unit, "MainPID")
        for path in ("/usr", "/etc/penstock", "/home", "/proc/sys/kernel/hostname"):
            refused = host.run("nsenter", "--target", main, "--mount", "--root", "--", "touch", f"{path}/new")
            assert refused.returncode != 0, path
        tried = f"touch /tmp/{unit} /run/{unit}/new /var/cache/{unit}/new"
        host.do("nsenter", "--target", main, "--mount", "--root", "--", "sh", "-ec", tried)
        assert host.run("test", "-e", f"/tmp/{unit}").returncode != 0, "PrivateTmp"
