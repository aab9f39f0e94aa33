"""A real Ray cluster of two hosts, which are network namespaces of this machine (``bench.faults.hosts``)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType

from bench.faults.hosts import Hosts

from .processes import alive, command, pids
from .server import PATIENCE_S, PenstockServer

PORT = 6379
REDIS_PORT = 6390
RUN_S = 110.0
"""For a command to end."""
STARTS = 3
"""Of a host, at most: a raylet whose agents are not up within 15 s ends, which no setting changes, and after 30 s
`ray start` does."""
SETTINGS = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "500",
    "RAY_health_check_failure_threshold": "3",
    "RAY_gcs_rpc_server_reconnect_timeout_s": "3600",
}
"""Those that docs/fleet.md recommends."""

LEAN = ("--include-log-monitor=false",)
LEAN_HEAD = (*LEAN, "--include-dashboard=false", "--no-monitor")
"""For ``ray start``, as docs/fleet.md has them: fewer processes, which take a second or two of CPU each to start."""
WEIGHT = '[ ! -w /proc/self/autogroup ] || echo -10 >/proc/self/autogroup; exec "$@"'
FIRST = ("setsid", "--wait", "sh", "-c", WEIGHT, "sh")
"""As docs/fleet.md has it: Linux shares processors out among sessions, so Ray's commands go before the nodes."""

REDIS_HOST = "r"

RESOURCES = '{"seat": 1}'
"""Custom ones of hosts a and b each, which nodes may reserve."""


class RayHosts:
    """Hosts a and b, a with the head, and r with a Redis that keeps the state of its GCS.

    Use: ``with RayHosts() as ray:``.
    """

    def __init__(self) -> None:
        self._hosts = Hosts(["a", "b", REDIS_HOST])
        self._folder = tempfile.mkdtemp(prefix="pray")  # short: names of sockets are
        self._spaces: dict[str, str] = {}
        self._spawned: list[subprocess.Popen[bytes]] = []
        paths = os.pathsep.join(path for path in sys.path if path)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("PENSTOCK_", "RAY_"))}
        own = {"PYTHONPATH": paths, "RAY_ADDRESS": self.address, "RAY_DEDUP_LOGS": "0"}
        self.environ = kept | own | SETTINGS

    def __enter__(self) -> RayHosts:
        try:
            self._hosts.__enter__()
            self._spaces = {name: self._hosts.inside(name)[-1] for name in ("a", "b", REDIS_HOST)}
            self.start_redis()
            self.start("a")
            self.start("b")
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for host in self._spaces:
            self.kill(host)
        for process in self._spawned:
            process.wait()
        self._hosts.__exit__(kind, error, trace)
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def address(self) -> str:
        """Of the cluster."""
        return f"{self._hosts.address('a')}:{PORT}"

    def host(self, name: str) -> str:
        """The address of a host."""
        return self._hosts.address(name)

    def inside(self, host: str) -> list[str]:
        """The words that make a command run there."""
        return self._hosts.inside(host)

    def start_redis(self) -> None:
        """With what the one before it had written, each command of which is on its disk before it is answered."""
        listen = ("--bind", self.host(REDIS_HOST), "--port", str(REDIS_PORT), "--protected-mode", "no")
        kept = ("--save", "", "--appendonly", "yes", "--appendfsync", "always", "--dir", self._folder)
        self.spawn(REDIS_HOST, ["redis-server", *listen, *kept])

        def answers() -> bool:
            words = ("redis-cli", "-h", self.host(REDIS_HOST), "-p", str(REDIS_PORT), "ping")
            done = subprocess.run([*self.inside(REDIS_HOST), *words], capture_output=True, text=True, check=False)
            return "PONG" in done.stdout

        PenstockServer.wait_for(answers, PATIENCE_S, "Redis")

    def gcs(self) -> int:
        """Its process."""
        (pid,) = self.pids("a", "gcs_server")
        return pid

    def end_gcs(self) -> list[str]:
        """Kill it; returns the words that start it again (``spawn`` on host a)."""
        pid = self.gcs()
        words = self.command_of(pid)
        os.kill(pid, signal.SIGKILL)
        PenstockServer.wait_for(lambda: not alive(pid), PATIENCE_S, "the GCS has ended")
        return words

    def spawn(self, host: str, words: Sequence[str]) -> None:
        """Run a command there until the host is killed."""
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._spawned.append(subprocess.Popen([*self.inside(host), *words], env=self.environ, **quiet))

    @staticmethod
    def command_of(pid: int) -> list[str]:
        """The words of a process."""
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().rstrip("\0").split("\0")

    def start(self, host: str) -> None:
        """``ray start`` there; nothing else runs on the host yet."""
        for _ in range(STARTS):
            done = self._start(host)
            if done.returncode == 0:
                return
            self.kill(host)
        raise AssertionError(done.stdout + done.stderr)

    def _start(self, host: str) -> subprocess.CompletedProcess[str]:
        words = ["--head", f"--port={PORT}", *LEAN_HEAD]
        if host != "a":
            words = [f"--address={self.address}", *LEAN]
        own = f"--node-ip-address={self.host(host)}"
        size = ("--num-cpus=2", "--object-store-memory=80000000", "--disable-usage-stats", f"--resources={RESOURCES}")
        place = [f"--temp-dir={self._folder}"] if host == "a" else []
        # A head that is started again looks there, and for raylets in /proc, where it sees those of other hosts here.
        if host == "a":
            Path(self._folder, "ray_current_cluster").unlink(missing_ok=True)
        redis = {"RAY_REDIS_ADDRESS": f"{self.host(REDIS_HOST)}:{REDIS_PORT}"} if host == "a" else {}
        return self.run(host, "ray.scripts.scripts", "start", *words, own, *size, *place, environ=redis)

    def run(
        self, host: str, module: str, *words: str, environ: Mapping[str, str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        """``python -m module`` on a host, to its end.  ``environ``: more variables."""
        return subprocess.run(
            [*self._hosts.inside(host), *FIRST, sys.executable, "-m", module, *words],
            env=self.environ | dict(environ or {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=RUN_S,
            check=False,
        )

    def penstock(self, *words: str, host: str = "a", code: int = 0) -> str:
        """What a command of ``penstock`` says on a host."""
        done = self.run(host, "penstock", *words)
        assert done.returncode == code, f"{words} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        return done.stdout + done.stderr

    def pids(self, host: str, *words: str) -> set[int]:
        """The processes of a host whose command lines have all these words."""
        told = subprocess.run(["ip", "netns", "pids", self._spaces[host]], capture_output=True, text=True, check=False)
        found = {int(pid) for pid in told.stdout.split()} & set(pids())
        return {pid for pid in found if alive(pid) and all(word in command(pid) for word in words)}

    def kill(self, host: str) -> None:
        """All processes of a host end at once, as when its power is gone."""
        while found := self.pids(host):
            for pid in found:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            PenstockServer.wait_for(lambda found=found: not any(map(alive, found)), PATIENCE_S, "ended")
