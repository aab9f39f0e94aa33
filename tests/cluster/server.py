"""A real ``penstock serve`` for a test: started on a free port, waited for, asked, ended, and searched for leftovers.

    with PenstockServer(["--aggregated"]) as server:
        httpx.get(f"{server.url}/v1/models")

Leaving the block ends the service with SIGTERM (it must exit with 0) and insists that nothing is left of it.  When the
block raised, the service is killed and the gist of its log is printed instead.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import re
import secrets
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

from .processes import abstract_sockets, alive, children, children_named, command, pids, session, socket_inodes, stat

START_S = 60.0
STOP_S = 40.0
PATIENCE_S = 30.0
"""For what must come and whose time is not what is tested: nobody waits so long but where something is broken."""

MOST_OUT_S = 60.0
"""A worker that was silent on a busy machine, again and again, is kept out of routing for half a minute."""

LOOKS_PER_S = 20
"""On a machine with other work a look takes longer, and so does what is waited for: limits are of seconds and looks."""

MOST_TIMES = 3.0
"""As many seconds at most, however few the looks were."""

FIRST_PORT = 10_000
"""From here on up to those that the system gives to connections, ports are for services of tests."""

GIST_LINES = 40
"""Of a log, when a test has failed."""

_GRAVE = re.compile(r'^[\d:.]+ [WEC] |"level": ?"(WARNING|ERROR|CRITICAL)"|Traceback')
_OURS = re.compile(r"@?penstock-[0-9a-f]{12}-")
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)$")


def free_port() -> int:
    """A port that was free a moment ago, and is none of those that the system gives to connections meanwhile."""
    first_given = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    while first_given > FIRST_PORT:
        port = secrets.choice(range(FIRST_PORT, first_given))  # test processes side by side draw others
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def _with_metrics_at_once(config: str) -> str:
    """``/metrics`` shows what is, not what was a second ago."""
    if re.search(r"^\[limits\]$", config, re.MULTILINE):
        return re.sub(r"^\[limits\]$", "[limits]\nmetrics_cache_s = 0.0", config, count=1, flags=re.MULTILINE)
    return f"{config}\n[limits]\nmetrics_cache_s = 0.0\n"


class PenstockServer:
    """One service in a session of its own, so that its processes can be told from all others.

    On asyncio's event loop, which is what users have without an extra, unless ``flags`` say otherwise.
    """

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
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.ready_after_s = 0.0
        self.launcher: list[str] = []  # words before the command, as ``ip netns exec there``
        self.module = "penstock"
        self._environ = dict(environ or {})
        if config is not None:
            assert folder is not None, "a configuration file needs a folder"
            path = folder / f"penstock-{self.port}.toml"
            path.write_text(_with_metrics_at_once(config), encoding="utf-8")
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
            print(self.gist_of_log())
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self.kill()
            print(self.gist_of_log())
            return
        if self.running:
            code = self.stop()
            if code != 0:
                print(self.gist_of_log())
            assert code == 0, f"ended with {code} after SIGTERM"
        self.assert_nothing_left()
        assert "Traceback" not in self.read_log(), self.read_log()

    def start(self) -> None:
        """Start it and return at once."""
        self._log_fd = os.memfd_create("penstock-test-log")
        weakref.finalize(self, os.close, self._log_fd)
        command = [*self.launcher, sys.executable, "-m", self.module, *self._words()]
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
        config = [] if "--config" in self.flags else ["--config", self._plain_config()]
        return ["serve", "--event-loop", "asyncio", *config, *self.flags, "--port", str(self.port)]

    def _plain_config(self) -> str:
        """A file in memory, with what every server of a test has."""
        descriptor = os.memfd_create("penstock-test-config")
        weakref.finalize(self, os.close, descriptor)
        os.write(descriptor, _with_metrics_at_once("").encode())
        return f"/proc/{os.getpid()}/fd/{descriptor}"

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
        """Until /ready answers 200; of several gateways, whichever takes the connection."""
        began, looks = time.monotonic(), 10 if "--gateways" in self.flags else 1

        def ready() -> bool:
            assert self.running, f"ended with {self.process.returncode} before it was ready:\n{self.read_log()}"
            with contextlib.suppress(httpx.TransportError):
                return all(self.get("/ready").status_code == 200 for _ in range(looks))
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
        """SIGKILL to the supervisor: everything ends with it, and has ended."""
        if self._process is not None:
            self._note_mailboxes()
            self._process.kill()
            self._process.wait(STOP_S)
            self.wait_for(lambda: not self.processes(), STOP_S, "ended with its supervisor")

    def read_log(self) -> str:
        """Everything that was written to stdout and stderr so far."""
        size = os.fstat(self._log_fd).st_size
        return os.pread(self._log_fd, size, 0).decode(errors="replace")

    def gist_of_log(self) -> str:
        """What a failure is understood by, and no more than is read: its end, and warnings before that."""
        lines = self.read_log().splitlines()
        before, end = lines[:-GIST_LINES], lines[-GIST_LINES:]
        warnings = [line for line in before if _GRAVE.search(line)][-GIST_LINES:]
        left_out = [f"({len(before) - len(warnings)} lines are left out)"] if before else []
        return "\n".join((*warnings, *left_out, *end))

    # --- asking ------------------------------------------------------------------------------------------------------

    def get(self, path: str, **headers: str) -> httpx.Response:
        """Without certificates: to read those would take far longer than to ask."""
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE_S, trust_env=False, verify=False)

    def workers(self) -> list[dict[str, Any]]:
        """The rows of ``penstock status --json``."""
        answer = self.get("/admin/workers", **self.key_headers())
        assert answer.status_code == 200, answer.text
        return answer.json()["workers"]

    def worker(self, worker: str) -> dict[str, Any]:
        """The row of this worker."""
        (row,) = [row for row in self.workers() if row["id"] == worker]
        return row

    def metrics(self, path: str = "/metrics") -> dict[str, float]:
        """Each metric's value, summed over its labels."""
        totals: dict[str, float] = {}
        for line in self.get(path, **self.key_headers()).text.splitlines():
            if match := _SAMPLE.match(line):
                totals[match[1]] = totals.get(match[1], 0.0) + float(match[2])
        return totals

    def key_headers(self) -> dict[str, str]:
        """The service's own key, which is an operator's."""
        key = self._environ.get("PENSTOCK_API_KEY")
        if "--api-key" in self.flags:
            key = self.flags[self.flags.index("--api-key") + 1]
        return {"Authorization": f"Bearer {key}"} if key else {}

    # --- waiting -----------------------------------------------------------------------------------------------------

    @staticmethod
    def wait_for(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Look every 20 ms until the condition holds.

        Given up after so long and ``LOOKS_PER_S`` looks a second, and after ``MOST_TIMES`` as long in any case.
        """
        began, looks = time.monotonic(), 0
        while not condition():
            looks += 1
            took_s = time.monotonic() - began
            over = took_s >= timeout_s and looks >= LOOKS_PER_S * timeout_s
            assert not over, f"not {what} within {timeout_s:g} s"
            assert took_s < MOST_TIMES * timeout_s, f"not {what} within {took_s:.1f} s and {looks} looks"
            time.sleep(0.02)

    def wait_counted(self, name: str, *, above: float = 0.0) -> None:
        """Until this metric is above a value: workers report some moments after what they count."""

        def counted() -> float:
            return self.metrics().get(f"penstock:{name}", 0.0)

        try:
            self.wait_for(lambda: counted() > above, PATIENCE_S, "counted")
        except AssertionError:
            raise AssertionError(f"{name} is {counted():g}, not above {above:g}") from None

    def wait_idle(self, timeout_s: float = PATIENCE_S) -> None:
        """Until no worker has anything to do or holds a page."""
        fields = ("running", "queued", "kv_pages_used")

        def idle() -> bool:
            return all(row[field] == 0 for row in self.workers() for field in fields)

        try:
            self.wait_for(idle, timeout_s, "idle")
        except AssertionError:
            raise AssertionError(f"not idle within {timeout_s:g} s: {self.workers()}") from None

    def wait_all_ready(self, timeout_s: float = MOST_OUT_S) -> None:
        """Until every worker is ready."""
        self._wait_for_states(("ready",), timeout_s)

    def wait_all_ready_or_draining(self, timeout_s: float = MOST_OUT_S) -> None:
        """Until every worker can be told something."""
        self._wait_for_states(("ready", "draining"), timeout_s)

    def _wait_for_states(self, states: tuple[str, ...], timeout_s: float) -> None:
        def there() -> bool:
            rows = self.workers()
            return bool(rows) and all(row["state"] in states for row in rows)

        try:
            self.wait_for(there, timeout_s, "there")
        except AssertionError:
            found = {row["id"]: row["state"] for row in self.workers()}
            raise AssertionError(f"not all {' or '.join(states)} within {timeout_s:g} s: {found}") from None

    # --- leftovers ---------------------------------------------------------------------------------------------------

    def processes(self) -> set[int]:
        """Every living process of this service: those of its session."""
        return {pid for pid in pids() if session(pid) == self.pid and alive(pid)}

    def gateway_pid(self) -> int:
        """The supervisor's one child that is no worker."""
        (gateway,) = self.gateway_pids(self.workers())
        return gateway

    def gateway_pids(self, workers: list[dict[str, Any]]) -> set[int]:
        """All of them; ``workers`` are the rows of those."""
        ranks = {rank["pid"] for row in workers for rank in row.get("ranks", ())}
        return {pid for pid in children(self.pid) if alive(pid)} - {row["pid"] for row in workers} - ranks

    def children_of_workers(self, module: str) -> list[int]:
        """Their own processes that run this module of the package, such as ``kv.store.mooncake.process``."""
        assert importlib.util.find_spec(f"penstock.{module}") is not None, f"there is no penstock.{module}"
        return children_named({row["pid"] for row in self.workers()}, module)

    def _note_mailboxes(self) -> None:
        """Remember what this run's abstract sockets are called."""
        inodes = {inode for pid in self.processes() for inode in socket_inodes(pid)}
        for inode, name in abstract_sockets():
            if inode in inodes and (match := _OURS.match(name)):
                self._mailboxes.add(match[0])

    def assert_nothing_left(self, timeout_s: float = PATIENCE_S) -> None:
        """After the end: no process, no abstract socket, no named shared memory, and the port is free."""
        assert self._process is not None
        assert self._process.poll() is not None, "still running"
        try:
            self.wait_for(lambda: not self.processes(), timeout_s, "without processes")
        except AssertionError:
            left = {pid: (command(pid), stat(pid)[:2]) for pid in self.processes()}
            raise AssertionError(f"processes are left after {timeout_s:g} s: {left}") from None
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
        return [name for _, name in abstract_sockets() if name.startswith(tuple(self._mailboxes or {"\0"}))]

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


class PenstockNode(PenstockServer):
    """A ``penstock node`` of a fleet file; ``port`` is that of its gateways, 0 if it has none."""

    def __init__(self, fleet: Path, name: str, port: int, *, environ: Mapping[str, str] | None = None) -> None:
        super().__init__([], port=port, environ=environ)
        self.fleet = fleet
        self.name = name
        self.has_gateways = port != 0

    def _words(self) -> list[str]:
        return ["node", str(self.fleet), "--name", self.name]

    def wait_ready(self, timeout_s: float = START_S) -> None:
        """Until its own processes are; where it has gateways, until /ready answers 200."""

        def up() -> bool:
            assert self.running, f"ended with {self.process.returncode} before it was ready:\n{self.read_log()}"
            return f"node {self.name} is ready" in self.read_log()

        self.wait_for(up, timeout_s, "up")
        if self.has_gateways:
            super().wait_ready(timeout_s)
