"""A Mooncake store of a test's own: its master and, apart from it, a client that gives the memory."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import socket
import stat
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from penstock.errors import ConfigError, TierError
from penstock.kv.store.envelope import AnyEnvelope
from penstock.kv.store.mooncake.tier import MooncakeConfig, MooncakeTier


class Mooncake:
    """Both processes.  The master may be killed and started again at the same port."""

    def __init__(self, folder: Path, *, gives: bool = True) -> None:
        self._folder = folder
        self.port, self._metrics, self._giver_port = free_ports(3)
        self.giver: subprocess.Popen[bytes] | None = None
        self.master = self.start_master()
        try:
            self.giver = self._start_giver() if gives else None
        except BaseException:
            self.close()
            raise

    @property
    def at(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start_master(self) -> subprocess.Popen[bytes]:
        words = [f"--rpc_port={self.port}", "--rpc_address=127.0.0.1", "--metrics_host=127.0.0.1"]
        self.master = self._start(
            "mooncake_master", [*words, f"--metrics_port={self._metrics}", "--enable_metric_reporting=false"], self.port
        )
        return self.master

    def close(self) -> None:
        for process in filter(None, (self.giver, self.master)):
            process.kill()
            process.wait()

    def _start_giver(self) -> subprocess.Popen[bytes]:
        words = ["--host=127.0.0.1", "--metadata_server=P2PHANDSHAKE", f"--master_server_address={self.at}"]
        return self._start(
            "mooncake_client",
            [*words, "--global_segment_size=64 MB", f"--port={self._giver_port}"],
            self._giver_port,
        )

    def _start(self, program: str, words: Sequence[str], port: int) -> subprocess.Popen[bytes]:
        spec = importlib.util.find_spec("mooncake")
        assert spec is not None
        assert spec.submodule_search_locations
        path = Path(spec.submodule_search_locations[0]) / program
        if not os.access(path, os.X_OK):
            path.chmod(path.stat().st_mode | stat.S_IXUSR)
        log = self._folder / f"{program}.log"
        with log.open("ab") as file:
            process = subprocess.Popen([str(path), *words], stdout=file, stderr=file)
        deadline = time.monotonic() + 60
        try:
            while not _listens(port):
                assert process.poll() is None, f"{program} ended with {process.returncode}: {log.read_text()[-2000:]}"
                assert time.monotonic() < deadline, f"{program} does not listen"
                time.sleep(0.02)
        except BaseException:
            process.kill()
            process.wait()
            raise
        return process


@contextlib.contextmanager
def mooncake_store(folder: Path, *, gives: bool = True) -> Iterator[Mooncake]:
    """Skips the test where the package or one of its libraries is missing.  ``gives``: it has 64 MB of memory."""
    try:
        MooncakeTier.check("127.0.0.1:1")
    except ConfigError as error:
        pytest.skip(f"NOT RUN: {error}")
    store = Mooncake(folder, gives=gives)
    try:
        yield store
    finally:
        store.close()


def mooncake_tier(
    store: Mooncake, seal: AnyEnvelope, *, timeout_s: float = 5.0, segment_bytes: int = 0
) -> MooncakeTier:
    """Whose process has come up."""
    tier = MooncakeTier(MooncakeConfig(master=store.at, segment_bytes=segment_bytes), seal, timeout_s=timeout_s)
    deadline = time.monotonic() + 60
    while True:
        try:
            tier.contains([])
            return tier
        except TierError:
            assert time.monotonic() < deadline, "Mooncake's client does not come up"


def free_ports(count: int) -> list[int]:
    """That nobody had a moment ago."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0
