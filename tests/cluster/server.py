"""A real ``penstock serve`` for a test: started on a free port, waited for, asked, ended, and searched for leftovers.

    with PenstockServer(["--aggregated"]) as server:
        httpx.get(f"{server.url}/v1/models")

Leaving the block ends the service with SIGTERM (it must exit with 0) and insists that nothing is left of it.  When the
block raised, the service is killed and its log is printed instead.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

START_S = 30.0
STOP_S = 20.0
_OURS = re.compile(r"@?penstock-[0-9a-f]{12}-")
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$")


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


class PenstockServer:
    """One service in a session of its own, so that its processes can be told from all others."""

    def __init__(
        self,
        flags: Sequence[str] = (),
        *,
        config: str | None = None,
        environ: Mapping[str, str] | None = None,
        folder: Path | None = None,
        port: int | None = None,
    ) -> None:
        """``flags`` as for ``penstock serve``; ``config``: TOML for --config, written to ``folder``."""
        self.flags = list(flags)
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready_after_s = 0.0
        self._environ = dict(environ or {})
        if config is not None:
            assert folder is not None, "a configuration file needs a folder"
            path = folder / f"penstock-{self.port}.toml"
            path.write_text(config, encoding="utf-8")
            self.flags += ["--config", str(path)]
        self._process: subprocess.Popen[bytes] | None = None
        self._log_fd = -1
        self._mailboxes: set[str] = set()  # name prefixes of this run's sockets

    # --- life --------------------------------------------------------------------------------------------------------

    def __enter__(self) -> PenstockServer:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.kill()
            print(self.read_log())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
            print(self.read_log())
            return
        if self.running:
            code = self.stop()
            if code != 0:
                print(self.read_log())
            assert code == 0, f"ended with {code} after SIGTERM"
        self.assert_nothing_left()
        assert "Traceback" not in self.read_log(), self.read_log()

    def start(self) -> None:
        """Start it and return at once."""
        self._log_fd = os.memfd_create("penstock-test-log")
        weakref.finalize(self, os.close, self._log_fd)
        command = [sys.executable, "-m", "penstock", *self._words()]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
        paths = [path for path in sys.path if path]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log_fd,
            stderr=self._log_fd,
            env=environ | {"PYTHONPATH": os.pathsep.join(paths)} | self._environ,
            start_new_session=True,
        )

    def _words(self) -> list[str]:
        return ["serve", *self.flags, "--port", str(self.port)]

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "not started"
        return self._process

    @property
    def pid(self) -> int:
        """Of the supervisor."""
        return self.process.pid

    @property
    def running(self) -> bool:
        return self.process.poll() is None

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until /ready answers 200."""
        began = time.monotonic()

        def ready() -> bool:
            assert self.running, f"ended with {self.process.returncode} before it was ready:\n{self.read_log()}"
            with contextlib.suppress(httpx.TransportError):
                return self.get("/ready").status_code == 200
            return False

        self.wait_for(ready, timeout_s, "ready")
        self.ready_after_s = time.monotonic() - began
        self._note_mailboxes()

    def stop(self, signum: int = signal.SIGTERM, timeout_s: float = STOP_S) -> int:
        """Send the signal to the supervisor and wait for the end; the exit code."""
        self._note_mailboxes()
        self.process.send_signal(signum)
        return self.wait_end(timeout_s)

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to every process of the foreground group."""
        self._note_mailboxes()
        os.killpg(self.pid, signal.SIGINT)

    def wait_end(self, timeout_s: float = STOP_S) -> int:
        """The exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still runs after {timeout_s:g} s:\n{self.read_log()}") from None

    def kill(self) -> None:
        """SIGKILL to the supervisor: everything ends with it."""
        if self._process is not None:
            self._note_mailboxes()
            self._process.kill()
            self._process.wait(STOP_S)

    def read_log(self) -> str:
        """Everything that was written to stdout and stderr so far."""
        size = os.fstat(self._log_fd).st_size
        return os.pread(self._log_fd, size, 0).decode(errors="replace")

    # --- asking ------------------------------------------------------------------------------------------------------

    def get(self, path: str, **headers: str) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=5.0, trust_env=False)

    def workers(self) -> list[dict[str, Any]]:
        """The rows of ``penstock status --json``."""
        answer = self.get("/admin/workers", **self._key())
        assert answer.status_code == 200, answer.text
        return answer.json()["workers"]

    def worker(self, worker: str) -> dict[str, Any]:
        """The row of this worker."""
        (row,) = [row for row in self.workers() if row["id"] == worker]
        return row

    def metrics(self) -> dict[str, float]:
        """Each metric's value, summed over its labels."""
        totals: dict[str, float] = {}
        for line in self.get("/metrics", **self._key()).text.splitlines():
            if match := _SAMPLE.match(line):
                totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        return totals

    def _key(self) -> dict[str, str]:
        if "--api-key" not in self.flags:
            return {}
        return {"Authorization": f"Bearer {self.flags[self.flags.index('--api-key') + 1]}"}

    # --- waiting -----------------------------------------------------------------------------------------------------

    @staticmethod
    def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Look every 20 ms until the condition holds."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, f"not {what} within {timeout_s:g} s"
            time.sleep(0.02)

    def wait_idle(self, timeout_s: float) -> None:
        """Until no worker has anything to do or holds a page."""
        fields = ("running", "queued", "kv_pages_used")

        def idle() -> bool:
            return all(row[field] == 0 for row in self.workers() for field in fields)

        try:
            self.wait_for(idle, timeout_s, "idle")
        except AssertionError:
            raise AssertionError(f"not idle within {timeout_s:g} s: {self.workers()}") from None

    def wait_all_ready(self, timeout_s: float) -> None:
        """Until every worker is ready."""
        self.wait_for(lambda: all(row["state"] == "ready" for row in self.workers()), timeout_s, "all ready")

    # --- leftovers ---------------------------------------------------------------------------------------------------

    def processes(self) -> set[int]:
        """Every living process of this service: those of its session."""
        return {pid for pid in _pids() if _session(pid) == self.pid and _alive(pid)}

    def gateway_pid(self) -> int:
        """The one process that is neither supervisor nor worker."""
        (gateway,) = self.processes() - {self.pid, *(row["pid"] for row in self.workers())}
        return gateway

    def _note_mailboxes(self) -> None:
        """Remember what this run's abstract sockets are called."""
        inodes = {inode for pid in self.processes() for inode in _socket_inodes(pid)}
        for inode, name in _abstract_sockets():
            if inode in inodes and (match := _OURS.match(name)):
                self._mailboxes.add(match[0])

    def assert_nothing_left(self, timeout_s: float = 5.0) -> None:
        """After the end: no process, no abstract socket, no named shared memory, and the port is free."""
        assert self._process is not None
        assert self._process.poll() is not None, "still running"
        self.wait_for(lambda: not self.processes(), timeout_s, "without processes")
        # A process whose first thread has ended counts as ended, though its others may still close what it had.
        self.wait_for(lambda: not self._sockets_left(), timeout_s, "without abstract sockets")
        named = [name for name in os.listdir("/dev/shm") if "penstock" in name]
        assert named == [], f"named shared memory is left: {named}"
        self.wait_for(self._port_is_free, timeout_s, "without its port")

    def _port_is_free(self) -> bool:
        try:
            with socket.create_server(("127.0.0.1", self.port)):
                return True
        except OSError:
            return False

    def _sockets_left(self) -> list[str]:
        return [name for _, name in _abstract_sockets() if name.startswith(tuple(self._mailboxes or {"\0"}))]

    def assert_nothing_has_a_name(self) -> None:
        """While it runs: no process maps a file of /dev/shm, which would outlive a SIGKILL."""
        for pid in self.processes():
            with contextlib.suppress(OSError):
                maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8")
                assert "/dev/shm/" not in maps, f"process {pid} has named shared memory:\n{maps}"


class PenstockWorker(PenstockServer):
    """A ``penstock worker``, as on another host: ready when it says how it is joined; it can be asked nothing."""

    @property
    def endpoint(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def _words(self) -> list[str]:
        return ["worker", "--listen", self.endpoint, *self.flags]

    def wait_ready(self, timeout_s: float = START_S) -> None:
        def ready() -> bool:
            assert self.running, f"ended with {self.process.returncode} before it was ready:\n{self.read_log()}"
            return "join it: " in self.read_log()

        self.wait_for(ready, timeout_s, "ready")

    def worker_pid(self) -> int:
        """Of the worker, not its supervisor."""
        (pid,) = self.processes() - {self.pid}
        return pid


def _pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # state, ppid, pgrp, session, ...


def _session(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[3]) if fields else None


def _alive(pid: int) -> bool:
    fields = _stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def _socket_inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def _abstract_sockets() -> list[tuple[str, str]]:
    """(inode, name without the leading @) of every abstract socket of this host."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:])
    return [(row[6], row[7].removeprefix("@")) for row in rows if len(row) > 7 and row[7].startswith("@")]
