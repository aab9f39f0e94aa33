"""The supervisor's loop with real processes, real signals, and children that only beat."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.launch.node_lease import LeaseHolder

PATIENCE_S = 60.0


class Service:
    """The fake service as a process, and the lines that it prints."""

    def __init__(self, script: dict[str, object], environ: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fake_service.py")), json.dumps(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PYTHONPATH": ":".join(p for p in sys.path if p), "PATH": "", **environ},
        )
        self.pid = self._process.pid
        self.lines: list[str] = []
        self.children: dict[int, int] = {}  # pid -> pidfd, of all that ever ran
        self._rest = b""

    def until(self, pattern: str, *, seen: bool = False) -> re.Match[str]:
        """Read on to the first line that matches; with ``seen`` look at what was read before, too."""
        if seen:
            for line in self.lines:
                if match := re.fullmatch(pattern, line):
                    return match
        deadline = time.monotonic() + PATIENCE_S
        while True:
            while b"\n" in self._rest:
                raw, self._rest = self._rest.split(b"\n", 1)
                self._take(raw.decode())
                if match := re.fullmatch(pattern, self.lines[-1]):
                    return match
            assert self._process.stdout is not None
            ready, _, _ = select.select([self._process.stdout], [], [], deadline - time.monotonic())
            more = os.read(self._process.stdout.fileno(), 4096) if ready else b""
            assert more, f"no line {pattern!r} in {self.lines}"
            self._rest += more

    def _take(self, line: str) -> None:
        self.lines.append(line)
        if match := re.fullmatch(r".* runs (\d+)", line):
            with contextlib.suppress(ProcessLookupError):  # it has ended already
                self.children[int(match[1])] = os.pidfd_open(int(match[1]))

    def signal(self, signum: int) -> None:
        self._process.send_signal(signum)

    def end(self) -> int:
        """Wait for the end; returns the exit code, and makes sure that no child is left."""
        code = self._process.wait(PATIENCE_S)
        for pid, fd in self.children.items():
            assert select.select([fd], [], [], PATIENCE_S)[0], f"{pid} outlived its supervisor"
        return code

    def close(self) -> None:
        self._process.kill()
        out, err = self._process.communicate(timeout=PATIENCE_S)
        for fd in self.children.values():
            os.close(fd)
        if os.environ.get("VERBOSE"):
            print(self.lines, out, err)


@pytest.fixture
def start() -> Iterator[object]:
    services = []

    def _start(ready: bool = True, environ: dict[str, str] | None = None, **script: object) -> Service:
        services.append(Service(script, environ or {}))
        if ready:
            services[-1].until("ready")
        return services[-1]

    yield _start
    for service in services:
        service.close()


def pid_of(service: Service, worker: str) -> int:
    return int(service.until(rf"worker {worker} runs (\d+)", seen=True)[1])


def test_it_starts_tells_and_drains(start) -> None:
    service = start()
    for worker in ("prefill-0", "decode-0"):
        pid = pid_of(service, worker)
        service.until(rf"gateway 1 up {worker} 1 {pid} nowhere-{worker}-1", seen=True)
    service.signal(signal.SIGTERM)
    service.until("stopping")
    service.until("gateway 1 draining")
    service.until("no child left")
    assert service.end() == 0


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGHUP])
def test_other_signals_drain_too(start, signum: int) -> None:
    service = start()
    service.signal(signum)
    service.until("gateway 1 draining")
    assert service.end() == 0


def test_a_killed_worker_is_back_at_once_under_the_same_name(start) -> None:
    service = start(config={"backoff_first_s": 3600.0, "backoff_max_s": 3600.0})  # it is not waited for that
    os.kill(pid_of(service, "decode-0"), signal.SIGKILL)
    service.until(r"gateway 1 down decode-0 1 dead")
    service.until(r"gateway 1 up decode-0 2 \d+ nowhere-decode-0-2")


@pytest.mark.parametrize("rank", ["decode-0", "decode-0/2"])
def test_a_rank_that_is_killed_ends_all_of_its_worker(start, rank: str) -> None:
    """The worker is started anew when all of them have gone, and is told of as one."""
    service = start(ranks=3)
    ranks = [pid_of(service, name) for name in ("decode-0", "decode-0/1", "decode-0/2")]
    os.kill(pid_of(service, rank), signal.SIGKILL)
    service.until("gateway 1 down decode-0 1 dead")
    for pid in ranks:
        assert select.select([service.children[pid]], [], [], 0)[0], "it was told of before all had ended"
    service.until(r"gateway 1 up decode-0 2 \d+ nowhere-decode-0-2")
    assert sum(line.startswith("gateway 1 down decode-0") for line in service.lines) == 1


def test_a_rank_that_is_stopped_is_found_and_all_are_replaced(start) -> None:
    service = start(ranks=2, config={"wedge_s": 0.3, "look_s": 0.05})
    os.kill(pid_of(service, "decode-0/1"), signal.SIGSTOP)
    service.until("gateway 1 down decode-0 1 wedged")
    service.until(r"gateway 1 up decode-0 2 \d+ nowhere-decode-0-2")


def test_a_rank_that_cannot_start_ends_it_with_its_number(start) -> None:
    service = start(ready=False, ranks=2, follower="crash", config={"backoff_first_s": 0.01, "rapid_deaths": 2})
    service.until(r"gave up: decode-0 ended 2 times.*rank 1: ValueError: I was told to.*")
    assert service.end() == 1


def test_all_ranks_end_with_their_worker(start) -> None:
    service = start(ranks=3)
    service.signal(signal.SIGTERM)
    service.until("no child left")
    assert service.end() == 0


def test_a_fork_that_a_thread_forbids_is_tried_again(start) -> None:
    """A thread that has just ended may be counted for a while yet, on a machine that is short of processor time."""
    service = start(config={"backoff_first_s": 0.01}, thread=[2, 3])
    os.kill(pid_of(service, "decode-0"), signal.SIGKILL)
    service.until(r"gateway 1 up decode-0 4 \d+ nowhere-decode-0-4")


def test_a_fork_that_a_thread_forbids_for_good_is_given_up_in_words(start) -> None:
    service = start(config={"backoff_first_s": 0.01, "rapid_deaths": 3}, thread=[2, 99])
    os.kill(pid_of(service, "decode-0"), signal.SIGKILL)
    service.until(r"gave up: decode-0 ended 3 times before it was ready.*this process has 2 threads.*")
    assert service.end() == 1


def test_a_stopped_worker_is_replaced(start) -> None:
    service = start(config={"wedge_s": 1.0})
    stopped_at = time.monotonic()
    os.kill(pid_of(service, "prefill-0"), signal.SIGSTOP)
    service.until(r"gateway 1 down prefill-0 1 wedged")
    assert time.monotonic() - stopped_at > 0.2  # how long it was silent before counts, too
    service.until(r"gateway 1 down prefill-0 1 dead")
    service.until(r"gateway 1 up prefill-0 2 .*")


def test_a_killed_gateway_is_back_and_hears_of_the_fleet(start) -> None:
    service = start()
    gateway = int(service.until(r"gateway 1 runs (\d+)", seen=True)[1])
    os.kill(gateway, signal.SIGKILL)
    service.until(r"gateway 2 up prefill-0 1 .*")
    service.until(r"gateway 2 up decode-0 1 .*")
    os.kill(pid_of(service, "decode-0"), signal.SIGKILL)
    service.until(r"gateway 2 up decode-0 2 .*")


def test_killing_the_supervisor_ends_everything_stopped_children_too(start) -> None:
    service = start()
    os.kill(pid_of(service, "decode-0"), signal.SIGSTOP)
    service.signal(signal.SIGKILL)
    assert service.end() == -signal.SIGKILL


def test_a_worker_that_always_crashes_ends_it_with_its_last_words(start) -> None:
    service = start(
        ready=False, **{"decode-0": "crash", "config": {"rapid_deaths": 3, "backoff_first_s": 0.01, "grace_s": 0.5}}
    )
    line = service.until(r"gave up: .*")[0]
    assert "decode-0 ended 3 times before it was ready" in line
    assert "ValueError: I was told to (exit code 70)" in line
    assert "penstock doctor" in line
    assert service.end() == 1


def test_a_child_that_does_not_listen_is_killed_after_the_grace(start) -> None:
    service = start(**{"decode-0": "deaf", "config": {"grace_s": 0.3}})
    stopped_at = time.monotonic()
    service.signal(signal.SIGTERM)
    assert service.end() == 0  # it would never end by itself
    assert time.monotonic() - stopped_at > 0.3


def test_draining_ends_at_its_deadline(start) -> None:
    service = start(endless=True, config={"drain_s": 0.5, "grace_s": 0.3})
    stopped_at = time.monotonic()
    service.signal(signal.SIGTERM)
    service.until("gateway 1 draining")
    assert service.end() == 0  # its gateway would never end by itself
    assert time.monotonic() - stopped_at > 0.5


def test_the_second_signal_means_now(start) -> None:
    service = start(endless=True, config={"drain_s": 60.0, "grace_s": 0.3})
    service.signal(signal.SIGTERM)
    service.until("gateway 1 draining")
    service.signal(signal.SIGINT)
    assert service.end() == 0


def test_it_can_be_stopped_while_it_loads(start) -> None:
    service = start(ready=False, load_s=60.0)
    service.until(r"gateway 1 runs \d+")
    service.signal(signal.SIGTERM)
    service.until("stopped while loading")
    assert service.end() == 0
    assert not [line for line in service.lines if line.startswith("worker")]


def test_a_lease_that_ends_drains_the_service(start, tmp_path: Path) -> None:
    holder = LeaseHolder(tmp_path / "lease")
    service = start(lease=str(tmp_path / "lease"), lease_s=0.1)
    holder.close()
    service.until("gateway 1 draining")
    assert service.end() == 0


def test_a_lease_that_ends_while_the_service_drains_does_not_cut_that_short(start, tmp_path: Path) -> None:
    holder = LeaseHolder(tmp_path / "lease")
    config = {"drain_s": 2.0, "grace_s": 0.3}
    service = start(endless=True, config=config, lease=str(tmp_path / "lease"), lease_s=0.1)
    stopped_at = time.monotonic()
    service.signal(signal.SIGTERM)
    service.until("gateway 1 draining")
    holder.close()
    assert service.end() == 0  # its gateway would never end by itself
    assert time.monotonic() - stopped_at > 2.0


def test_what_takes_a_lease_over_hears_that_the_node_is_ready_however_late_it_listens(start, tmp_path: Path) -> None:
    """An actor may end while its node loads, and the next one begin to listen when that is ready."""
    address = f"penstock-test-{tmp_path.name}-{os.getpid()}"
    with contextlib.closing(LeaseHolder(tmp_path / "lease")), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as late:
        start(environ={"NOTIFY_SOCKET": f"@{address}"}, lease=str(tmp_path / "lease"))
        late.bind(f"\0{address}")
        late.settimeout(PATIENCE_S)
        assert late.recv(100) == b"READY=1"


def test_one_suspicion_of_a_worker_that_beats_does_no_harm(start) -> None:
    service = start(suspect="decode-0")
    os.kill(pid_of(service, "prefill-0"), signal.SIGKILL)
    service.until(r"gateway 1 up prefill-0 2 .*")
    assert not [line for line in service.lines if "down decode-0" in line]
