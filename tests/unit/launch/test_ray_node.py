"""What an actor of ``penstock ray`` does, without Ray: it runs a child, starts it again, and drains it."""

from __future__ import annotations

import errno
import io
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest

from penstock.config.fleet_file import FleetFile, FleetNode, MultiNodeGroup, RayPlacement, WorkerGroup, parse_fleet
from penstock.config.limits import SuperviseConfig
from penstock.launch import node_lease, ray_node
from penstock.launch.members.file import node_gateways, node_members
from penstock.launch.node_lease import LEASE_S, LeaseHolder, LeaseRecord, LeaseWatch, start_ticks
from penstock.launch.ray_cluster import NodeActor, actor_name, describe, keeps_its_state, node_of_actor
from penstock.launch.ray_node import (
    NodeOrder,
    NodeProcess,
    NodeReport,
    NodeRunner,
    child_environ,
    fleet_file_of,
    latest_order,
    node_digest,
    started_node,
    write_privately,
)
from penstock.launch.service_notify import READY, notify_service_manager
from penstock.types import Role

LIMITS = SuperviseConfig(backoff_first_s=0.01, backoff_max_s=0.1, drain_s=5.0, grace_s=1.0)
ORDER = NodeOrder(fleet="f", node="a", text="", digest="d")
CHILD = """
import os, signal, sys, time
from penstock.launch.service_notify import READY, notify_service_manager
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
notify_service_manager(READY)
while True:
    time.sleep(60)
"""


def wait_for(condition: Callable[[], bool]) -> None:
    """Two minutes at most."""
    until = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@contextmanager
def child(folder: Path, code: str = CHILD) -> Iterator[NodeProcess]:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    process = NodeProcess(command, child_environ(os.environ), folder / "node.log", LIMITS)
    process.start()
    try:
        yield process
    finally:
        process.begin_drain("the test ends")
        process.wait_drained()


def is_gone(pid: int) -> bool:
    """Whether it has ended; init may not have reaped it yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return True
    return state in "ZX"


def test_a_child_is_ready_when_it_says_so_and_is_started_again_when_it_is_killed(tmp_path: Path) -> None:
    with child(tmp_path) as process:
        wait_for(lambda: process.report(ORDER).state == "ready")
        first = process.report(ORDER)
        assert first.ready_after_s is not None
        os.kill(first.pid, signal.SIGKILL)
        wait_for(lambda: process.report(ORDER).state == "ready" and process.report(ORDER).pid != first.pid)
        again = process.report(ORDER)
        assert again.restarts == 1
        assert again.reason == "killed by SIGKILL"
    ended = process.report(ORDER)
    assert (ended.state, ended.pid, ended.reason) == ("stopped", 0, "the test ends")
    assert is_gone(again.pid)


def test_why_a_child_cannot_start_is_reported_with_its_last_line(tmp_path: Path) -> None:
    with child(tmp_path, "import sys; print('port 9000 is taken'); sys.exit(2)") as process:
        wait_for(lambda: process.report(ORDER).restarts >= 2)
        wait_for(lambda: process.report(ORDER).state == "waiting")
        assert process.report(ORDER).reason == "exit code 2: port 9000 is taken"
        assert process.report(ORDER).ready_after_s is None


def test_a_child_that_does_not_end_is_killed(tmp_path: Path) -> None:
    limits = msgspec.structs.replace(LIMITS, drain_s=0.1, grace_s=0.1)
    code = CHILD.replace("lambda *_: sys.exit(0)", "signal.SIG_IGN")
    process = NodeProcess([sys.executable, "-c", code], child_environ(os.environ), tmp_path / "log", limits)
    process.start()
    wait_for(lambda: process.report(ORDER).state == "ready")
    pid = process.report(ORDER).pid
    process.begin_drain("enough")
    assert process.report(ORDER).state == "draining"
    process.wait_drained()
    assert process.report(ORDER).state == "stopped"
    assert is_gone(pid)


def test_a_command_that_is_not_there_is_reported(tmp_path: Path) -> None:
    process = NodeProcess(["/no/such/command"], {}, tmp_path / "log", LIMITS)
    process.start()
    wait_for(lambda: process.report(ORDER).state == "waiting")
    assert "No such file" in process.report(ORDER).reason
    process.begin_drain("enough")
    process.wait_drained()


class FullDiskLease(LeaseHolder):
    """It cannot be written the first time."""

    full = True

    def write(self, record: LeaseRecord) -> None:
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, "No space left on device")
        super().write(record)


def test_a_lease_that_cannot_be_written_starts_no_second_child(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tells_pid = f"import os; print(os.getpid(), file=open({str(pids)!r}, 'a'), flush=True)"
    command = [sys.executable, "-c", tells_pid + CHILD]
    lease = FullDiskLease(tmp_path / "lease")
    process = NodeProcess(command, child_environ(os.environ), tmp_path / "log", LIMITS, lease=lease)
    process.start()
    try:
        wait_for(lambda: process.state == "ready")
        report = process.report(ORDER)
        assert (report.restarts, report.reason) == (0, "")
    finally:
        process.begin_drain("the test ends")
        process.wait_drained()
    assert [int(line) for line in pids.read_text().split()] == [report.pid]
    assert is_gone(report.pid)


def test_a_lease_that_could_not_be_written_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for a child that is not ready for long, as it loads."""
    monkeypatch.setattr(ray_node, "RECORD_AGAIN_S", 0.01)
    lease = FullDiskLease(tmp_path / "lease")
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = NodeProcess(command, child_environ(os.environ), tmp_path / "log", LIMITS, lease=lease, digest="d")
    process.start()
    try:
        wait_for(lambda: lease.read() is not None)
        record, report = lease.read(), process.report(ORDER)
        assert record == LeaseRecord(pid=report.pid, started=start_ticks(report.pid), digest="d")
        assert report.state == "starting"
    finally:
        process.begin_drain("the test ends")
        process.wait_drained()


def test_a_child_that_cannot_be_watched_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pids, pidfd_open = [], os.pidfd_open

    def opened(pid: int) -> int:
        pids.append(pid)
        if len(pids) == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return pidfd_open(pid)

    monkeypatch.setattr(os, "pidfd_open", opened)
    with child(tmp_path) as process:
        wait_for(lambda: process.state == "ready")
        assert is_gone(pids[0])
        assert process.report(ORDER).pid == pids[1]
        assert process.report(ORDER).reason == "cannot be started: [Errno 24] Too many open files"


def test_a_child_that_is_drained_as_it_becomes_known_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second signal would break its streams."""
    told, may_end, lease = tmp_path / "told", tmp_path / "may end", LeaseHolder(tmp_path / "lease")
    code = f"""
        import os, signal, time
        signal.signal(signal.SIGTERM, lambda *_: print("SIGTERM", file=open({str(told)!r}, "a"), flush=True))
        open({str(told)!r}, "a").close()
        while not os.path.exists({str(may_end)!r}):
            time.sleep(0.01)
        """

    class DrainsWhenClosed(io.FileIO):
        """As the child has become known."""

        def close(self) -> None:
            if not self.closed:
                wait_for(told.exists)
                process.begin_drain("enough")
                wait_for(lambda: bool(told.read_text()))
            super().close()

    monkeypatch.setattr(ray_node, "_opened_log", lambda path: DrainsWhenClosed(path, "ab"))
    words = [sys.executable, "-c", textwrap.dedent(code)]
    process = NodeProcess(words, child_environ(os.environ), tmp_path / "log", LIMITS, lease=lease)
    process.start()
    wait_for(lambda: lease.read() is not None)
    may_end.touch()
    process.wait_drained()
    assert told.read_text().split() == ["SIGTERM"]


def test_a_node_ends_with_the_process_that_started_it() -> None:
    """``penstock node --end-with-parent`` is killed by the kernel, so that whoever comes next finds its ports free."""
    middle = textwrap.dedent(
        """
        import os, subprocess, sys
        words = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
        print(subprocess.Popen(words, stdout=subprocess.PIPE).stdout.readline().decode(), flush=True)
        os.kill(os.getpid(), 9)
        """
    )
    node = textwrap.dedent(
        """
        import os, sys, time
        from penstock.cli.node import check_parent
        check_parent(int(sys.argv[1]))
        print(os.getpid(), flush=True)
        time.sleep(600)
        """
    )
    run = subprocess.run([sys.executable, "-c", middle, node], capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == -signal.SIGKILL, run.stderr
    wait_for(lambda: is_gone(int(run.stdout)))


@pytest.mark.parametrize("address", ["", "relative", "/no/such/socket", "@no-such-socket"])
def test_without_a_receiver_nothing_is_sent(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", address)
    notify_service_manager(READY)


def test_a_receiver_that_reads_nothing_holds_up_no_node(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As an actor whose process is stopped, for the node repeats that it is ready."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as receiver:
        receiver.bind(str(tmp_path / "receiver"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "receiver"))
        most = int(Path("/proc/sys/net/unix/max_dgram_qlen").read_text())
        for _ in range(most + 10):
            notify_service_manager(READY, wait=False)


def test_a_node_is_not_ready_because_another_one_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as one that is left to its lease."""
    heard, drop = list[tuple[int, str]](), NodeProcess._drop_notifications

    def dropped(process: NodeProcess) -> set[tuple[int, str]]:
        found = drop(process)
        heard.extend(found)
        return found

    monkeypatch.setattr(NodeProcess, "_drop_notifications", dropped)
    with child(tmp_path, "import time; time.sleep(600)") as process:
        wait_for(lambda: process.report(ORDER).pid > 0)
        monkeypatch.setenv("NOTIFY_SOCKET", process._environ["NOTIFY_SOCKET"])
        for times in (1, 2):  # when it hears the second one it has dealt with the first
            notify_service_manager(READY)
            wait_for(lambda times=times: heard == [(os.getpid(), READY)] * times)
        assert process.state == "starting"


def fleet(**more: object) -> FleetFile:
    """Two nodes, of which a has the gateway."""
    a = FleetNode(name="a", address="10.0.0.1", gateways=1, workers=(WorkerGroup(count=1),))
    b = FleetNode(name="b", address="10.0.0.2", workers=(WorkerGroup(count=2),))
    return msgspec.structs.replace(FleetFile(name="f", nodes=(a, b)), **more)


def test_a_node_is_restarted_for_what_it_reads_only() -> None:
    one = fleet()
    a, b = one.nodes
    longer = fleet(nodes=(a, msgspec.structs.replace(b, workers=(WorkerGroup(count=3),))))
    assert node_digest(longer, a) == node_digest(one, a), "its gateway follows the file"
    assert node_digest(longer, longer.nodes[1]) != node_digest(one, b)
    decoding = fleet(nodes=(a, msgspec.structs.replace(b, workers=(WorkerGroup(role=Role.DECODE, count=2),))))
    assert node_digest(decoding, a) != node_digest(one, a), "whether phases are split is decided at its start"
    served = fleet(nodes=(msgspec.structs.replace(a, http_port=8001), b))
    assert node_digest(served, served.nodes[0]) != node_digest(one, a)
    assert node_digest(served, b) == node_digest(one, b), "a gateway elsewhere is nothing to it"
    assert node_digest(fleet(settings={"max_model_len": 512}), b) != node_digest(one, b)
    assert node_digest(fleet(source="measured"), b) == node_digest(one, b)


def test_nodes_that_have_a_worker_together_are_restarted_for_it() -> None:
    one, tied = fleet(), fleet(groups=(MultiNodeGroup(nodes=("b", "a"), group="pp2"),))
    wider = fleet(groups=(MultiNodeGroup(nodes=("b", "a"), group="tp2,pp2"),))
    for node in one.nodes:
        assert len({node_digest(file, node) for file in (one, tied, wider)}) == 3
    b = msgspec.structs.replace(one.nodes[1], port=9100)
    moved = msgspec.structs.replace(tied, nodes=(one.nodes[0], b))
    assert node_digest(moved, moved.nodes[0]) != node_digest(tied, tied.nodes[0]), "its ranks meet those of b elsewhere"


def order_of(file: str) -> NodeOrder:
    found = parse_fleet(file.encode(), "file:")
    return NodeOrder(fleet=found.name, node="a", text=file, digest=node_digest(found, found.node("a")))


def test_an_actor_that_is_started_again_goes_on_with_the_latest_text(tmp_path: Path) -> None:
    node = '[[nodes]]\nname = "{}"\naddress = "10.0.0.{}"\n{}\nworkers = [{{ count = 1 }}]\n'
    text = 'name = "f"\n' + node.format("a", 1, "gateways = 1")
    order, more = order_of(text), text + node.format("b", 2, "")
    assert latest_order(order, tmp_path) == order, "there is no file yet"
    file = fleet_file_of(order, tmp_path)
    write_privately(file, more)
    assert latest_order(order, tmp_path).text == more
    assert file.stat().st_mode & 0o777 == 0o600
    for other in (more.replace("gateways = 1", "gateways = 2"), "name = ", more.replace('"a"', '"c"')):
        write_privately(file, other)
        assert latest_order(order, tmp_path) == order, "it is of another node than this order's"


def test_nodes_of_fleets_with_similar_names_have_files_of_their_own(tmp_path: Path) -> None:
    places = [("llm", "prod-a"), ("llm-prod", "a"), ("llm prod", "a"), ("llm/prod", "a")]
    orders = [msgspec.structs.replace(ORDER, fleet=fleet, node=node) for fleet, node in places]
    assert len({fleet_file_of(order, tmp_path) for order in orders}) == len(places)


def test_a_node_whose_file_another_actor_has_leaves_it_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the actor before this one may have it."""
    monkeypatch.setattr(node_lease, "LOCK_WITHIN_S", 0.1)
    node = 'name = "a"\naddress = "10.0.0.1"\ngateways = 1\nworkers = [{ count = 1 }]\n'
    text = f'name = "f g"\nkeys = "/keys"\n[[nodes]]\n{node}'
    order = NodeOrder(fleet="f g", node="a", text=text, digest="d")
    file = fleet_file_of(order, tmp_path)
    write_privately(file, "of the other actor")
    other = LeaseHolder(file.with_suffix(".lease"))
    with pytest.raises(TimeoutError, match="is locked by another process"):
        started_node(order, tmp_path)
    assert file.read_text() == "of the other actor"
    other.close()


def test_a_node_whose_file_cannot_be_written_leaves_no_lease_behind(tmp_path: Path) -> None:
    """The node of an actor before this one must not go on without an actor."""
    node = 'name = "a"\naddress = "10.0.0.1"\ngateways = 1\nworkers = [{ count = 1 }]\n'
    order = NodeOrder(fleet="f", node="a", text=f'name = "f"\nkeys = "/keys"\n[[nodes]]\n{node}', digest="d")
    file = fleet_file_of(order, tmp_path)
    file.mkdir()
    with pytest.raises(OSError, match="Is a directory"):
        started_node(order, tmp_path)
    LeaseHolder(file.with_suffix(".lease")).close()


@pytest.fixture
def abandoned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[NodeOrder, LeaseHolder, int]]:
    """An order whose node runs and whose lease another actor still holds: the order, the lease, the process."""
    monkeypatch.setattr(node_lease, "LOCK_WITHIN_S", 0.05)
    monkeypatch.setattr(ray_node, "START_AGAIN_S", 0.01)
    node = 'name = "a"\naddress = "10.0.0.1"\ngateways = 1\nworkers = [{ count = 1 }]\n'
    order = NodeOrder(fleet="f", node="a", text=f'name = "f"\nkeys = "/keys"\n[[nodes]]\n{node}', digest="d")
    with subprocess.Popen([sys.executable, "-c", CHILD]) as running:
        lease = LeaseHolder(fleet_file_of(order, tmp_path).with_suffix(".lease"))
        started = start_ticks(running.pid)
        lease.write(LeaseRecord(pid=running.pid, started=started, digest="d", ready_after_s=1.0))
        yield order, lease, running.pid
        running.kill()


def test_a_node_is_taken_over_however_long_its_lease_was_held(
    tmp_path: Path, abandoned: tuple[NodeOrder, LeaseHolder, int]
) -> None:
    """As when the actor before this one is on a busy host, or stopped."""
    order, lease, pid = abandoned
    node = NodeRunner(order, tmp_path)
    waits = node.report()
    assert (waits.state, waits.pid) == ("waiting", 0)
    assert "is locked by another process" in waits.reason
    assert [member.name for member in waits.members] == ["a-both-0"], "gateways keep it"
    assert (waits.only_follows, waits.stops_within_s) == (False, SuperviseConfig().stops_within_s)
    lease.close()
    node.wait_for_change("waiting", 60.0)
    wait_for(lambda: node.report().state == "ready")
    assert node.report().pid == pid
    node.begin_drain("enough")
    node.wait_drained()
    assert (node.report().state, node.report().reason) == ("stopped", "enough")
    wait_for(lambda: is_gone(pid))


@pytest.mark.parametrize("failures", [1, 2])
def test_a_node_whose_host_has_no_thread_left_is_tried_again(
    tmp_path: Path, abandoned: tuple[NodeOrder, LeaseHolder, int], monkeypatch: pytest.MonkeyPatch, failures: int
) -> None:
    """Even where there is none to try it again."""
    order, lease, pid = abandoned
    lease.close()
    left, start = iter(range(failures)), threading.Thread.start

    def started(thread: threading.Thread) -> None:
        if next(left, None) is not None:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", started)
    node = NodeRunner(order, tmp_path)
    wait_for(lambda: node.report().state == "ready")
    assert node.report().pid == pid
    node.begin_drain("enough")
    node.wait_drained()
    assert node.report().state == "stopped"


def test_a_child_is_started_again_whatever_fails_in_its_watch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch, watched = NodeProcess._watch, list[int]()

    def fails_once(process: NodeProcess, child: ray_node._Child, *more: float | None) -> float | None:
        watched.append(child.pid)
        if len(watched) == 1:
            raise ValueError("not foreseen")
        return watch(process, child, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(NodeProcess, "_watch", fails_once)
    with child(tmp_path) as process:
        wait_for(lambda: process.state == "ready")
        assert is_gone(watched[0])
        assert process.report(ORDER).pid == watched[1]
        assert process.report(ORDER).reason == "cannot be started: not foreseen"


def test_a_node_that_is_drained_before_it_could_start_never_does(
    tmp_path: Path, abandoned: tuple[NodeOrder, LeaseHolder, int]
) -> None:
    order, lease, pid = abandoned
    node = NodeRunner(order, tmp_path)
    node.begin_drain("enough")
    node.wait_drained()
    lease.close()
    assert (node.report().state, node.report().reason) == ("stopped", "enough")
    assert not is_gone(pid)
    assert node.report().pid == pid, "it is left to its lease"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert node.report().pid == 0


@pytest.mark.parametrize("short", ["for a moment", "for ever"])
def test_a_node_that_could_not_be_taken_over_is_drained_or_named(
    tmp_path: Path,
    abandoned: tuple[NodeOrder, LeaseHolder, int],
    monkeypatch: pytest.MonkeyPatch,
    short: str,
) -> None:
    order, lease, pid = abandoned
    lease.close()
    few, pidfd_open = threading.Event(), os.pidfd_open
    few.set()

    def opened(number: int) -> int:
        if few.is_set():
            raise OSError(errno.EMFILE, "Too many open files")
        return pidfd_open(number)

    monkeypatch.setattr(os, "pidfd_open", opened)
    node = NodeRunner(order, tmp_path)
    wait_for(lambda: "Too many open files" in node.report().reason)
    if short == "for a moment":
        few.clear()
    node.begin_drain("enough")
    node.wait_drained()
    assert node.report().state == "stopped"
    if short == "for a moment":
        assert node.report().pid == 0
        wait_for(lambda: is_gone(pid))
    else:
        assert node.report().pid == pid
        assert not is_gone(pid)


def test_a_node_whose_settings_are_wrong_is_not_tried_again(tmp_path: Path) -> None:
    text = 'name = "f"\n[[nodes]]\nname = "a"\naddress = "10.0.0.1"\ngateways = 1\nworkers = [{ count = 1 }]\n'
    node = NodeRunner(NodeOrder(fleet="f", node="a", text=text, digest="d"), tmp_path)
    assert node.report().state == "stopped"
    assert "keys is missing" in node.report().reason
    node.wait_drained()


def test_a_change_of_state_is_waited_for(tmp_path: Path) -> None:
    with child(tmp_path) as process:
        process.wait_for_change("starting", 30.0)
        assert process.state == "ready"
        began = time.monotonic()
        process.wait_for_change("ready", 0.05)
        assert time.monotonic() - began >= 0.05
        os.kill(process.report(ORDER).pid, signal.SIGKILL)
        process.wait_for_change("ready", 30.0)
        assert process.state != "ready"


@pytest.mark.parametrize("digest", ["d", "other"])
def test_a_child_goes_on_when_the_process_that_watches_it_is_killed(
    tmp_path: Path, digest: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next one takes it over, or ends it if it was started with anything else."""
    watcher = textwrap.dedent(
        """
        import os, sys, time
        from pathlib import Path
        from penstock.config.limits import SuperviseConfig
        from penstock.launch.node_lease import LeaseHolder
        from penstock.launch.ray_node import NodeProcess
        folder, code = Path(sys.argv[1]), sys.argv[2]
        lease = LeaseHolder(folder / "lease")
        process = NodeProcess([sys.executable, "-c", code], os.environ, folder / "node.log", SuperviseConfig(),
                              lease=lease, digest="d")
        process.start()
        process.wait_for_change("starting", 60.0)
        print(process.state, process._process.pid, flush=True)
        time.sleep(600)
        """
    )
    words = [sys.executable, "-c", watcher, str(tmp_path), CHILD]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdout is not None
        state, pid = first.stdout.readline().split()
        assert state == "ready"
        monkeypatch.setattr(node_lease, "LOCK_WITHIN_S", 0.05)
        with pytest.raises(TimeoutError):
            LeaseHolder(tmp_path / "lease")
        monkeypatch.undo()
        first.kill()
    lease = LeaseHolder(tmp_path / "lease")
    command = [sys.executable, "-c", CHILD]
    process = NodeProcess(command, os.environ, tmp_path / "node.log", LIMITS, lease=lease, digest=digest)
    process.start()
    process.wait_for_change("starting", 60.0)
    try:
        report = process.report(ORDER)
        assert report.state == "ready"
        assert (report.pid == int(pid)) == (digest == "d")
        if digest == "d":
            os.kill(report.pid, signal.SIGKILL)
            wait_for(lambda: process.report(ORDER).restarts == 1 and process.state == "ready")
            assert process.report(ORDER).reason == "ended"
    finally:
        process.begin_drain("the test ends")
        process.wait_drained()
    wait_for(lambda: is_gone(int(pid)))


def test_a_lease_is_over_when_nothing_has_locked_it_for_long(tmp_path: Path) -> None:
    holder = LeaseHolder(tmp_path / "lease")
    assert holder.read() is None
    watch = LeaseWatch(tmp_path / "lease")
    assert not watch.is_over(1000.0)
    holder.close()
    assert not watch.is_over(1000.0 + LEASE_S)
    assert watch.is_over(1000.1 + LEASE_S)
    again = LeaseHolder(tmp_path / "lease")
    assert not watch.is_over(2000.0)
    again.write(LeaseRecord(pid=os.getpid(), started=start_ticks(os.getpid()), digest="a" * 99))
    shorter = LeaseRecord(pid=os.getpid(), started=start_ticks(os.getpid()), digest="b", ready_after_s=1.0)
    again.write(shorter)
    assert again.read() == shorter
    assert start_ticks(2**22 + 1) == -1


def test_a_lease_is_over_when_its_holder_runs_another_node(tmp_path: Path) -> None:
    """As when the record of this one could not be written, or its actor was killed before."""
    holder, other = LeaseHolder(tmp_path / "lease"), start_ticks(os.getppid())
    holder.write(LeaseRecord(pid=os.getppid(), started=other - 1, digest="d"))
    watch = LeaseWatch(tmp_path / "lease")
    assert not watch.is_over(1000.0)
    assert not watch.is_over(1100.0), "it is of the node before this one: no other can be written"
    holder.write(LeaseRecord(pid=os.getppid(), started=other, digest="d"))
    assert not watch.is_over(1100.0 + LEASE_S)
    assert watch.is_over(1100.1 + LEASE_S)
    holder.write(LeaseRecord(pid=os.getpid(), started=start_ticks(os.getpid()), digest="d"))
    assert not watch.is_over(2000.0)
    holder.close()


GCS = ["/ray/core/src/ray/gcs/gcs_server", "--gcs_server_port=6379", "--node-ip-address=10.0.0.1"]


@pytest.mark.parametrize(
    ("commands", "kept"),
    [
        ([["python"], []], None),
        ([[*GCS]], False),
        ([["x"], [*GCS, "--redis_address=10.0.0.9", "--redis_port=6379"]], True),
        ([[*GCS[:2], "--node-ip-address=10.0.0.2", "--redis_address=10.0.0.9"]], None),
    ],
)
def test_whether_a_gcs_keeps_its_state_is_read_from_its_command(commands: list[list[str]], kept: bool | None) -> None:
    assert keeps_its_state("10.0.0.1:6379", commands) is kept


def test_members_of_a_node_are_its_workers() -> None:
    members = node_members(fleet(), fleet().nodes[1])
    assert [(member.name, member.endpoint, member.labels) for member in members] == [
        ("b-both-0", "tcp://10.0.0.2:9000", {"node": "b"}),
        ("b-both-1", "tcp://10.0.0.2:9002", {"node": "b"}),
    ]


def test_the_gateways_of_a_node_are_reached_at_its_address_and_their_port() -> None:
    a, b = fleet().nodes
    (member,) = node_gateways(msgspec.structs.replace(b, gateways=2), 8765)
    assert (member.name, member.endpoint, member.labels) == ("b-gateway", "tcp://10.0.0.2:8765", {"node": "b"})
    assert node_gateways(msgspec.structs.replace(a, gateways=0), 8765) == ()


def test_actors_of_fleets_with_similar_names_are_told_apart() -> None:
    assert node_of_actor("two hosts", actor_name("two hosts", "a-b")) == "a-b"
    assert node_of_actor("x", actor_name("x/y", "a")) is None
    assert node_of_actor("x/y", actor_name("x", "a")) is None
    assert node_of_actor("x", "penstock/x/") is None


def test_what_a_child_must_not_inherit_is_left_out() -> None:
    found = child_environ({"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HOME": "/root"})
    assert "OMP_NUM_THREADS" not in found
    assert "CUDA_VISIBLE_DEVICES" not in found
    assert found["HOME"] == "/root"
    assert child_environ({"CUDA_VISIBLE_DEVICES": "2,3"})["CUDA_VISIBLE_DEVICES"] == "2,3"


def test_a_placement_is_read_strictly() -> None:
    assert msgspec.convert({"resources": {"CPU": 8}}, RayPlacement).resources == {"CPU": 8}
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"resources": {"CPU": -1}}, RayPlacement)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"resource": {}}, RayPlacement)


@pytest.mark.parametrize(
    ("state", "report", "shown"),
    [
        (None, None, ("not started", "")),
        ("PENDING_CREATION", None, ("pending", "waits for Ray to place its actor; Ray nodes: 10.0.0.9")),
        ("RESTARTING", None, ("restarting", "waits for Ray to place its actor; Ray nodes: 10.0.0.9")),
        ("ALIVE", None, ("silent", "its actor does not answer")),
        ("ALIVE", NodeReport(node="a", digest="d", state="ready", reason="killed by SIGKILL"), ("ready", "")),
        ("ALIVE", NodeReport(node="a", digest="d", state="waiting", reason="exit code 2"), ("waiting", "exit code 2")),
    ],
)
def test_a_state_is_told_in_words(state: str | None, report: NodeReport | None, shown: tuple[str, str]) -> None:
    actor = None if state is None else NodeActor("a", None, state, 0)
    assert describe(actor, report, {"id": "10.0.0.9"}) == shown
