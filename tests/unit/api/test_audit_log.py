"""The audit log: like refusals are one line, no line is lost without being counted, files are whole lines."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.api.audit_log import (
    MAX_BATCH_LINES,
    MAX_LINE_BYTES,
    AuditEvent,
    AuditFile,
    AuditLog,
    RefusalGroups,
    check_audit_log,
)
from penstock.config.limits import AuditLimits
from penstock.errors import ConfigError

PATIENCE_S = 30.0
LIMITS = AuditLimits()


def refusal(key: str = "k-1", status: int = 403, route: str = "/a", **fields: Any) -> AuditEvent:
    return AuditEvent(event="refused", key=key, status=status, route=route, **fields)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Every line is one object."""
    return [json.loads(line) for line in path.read_text().splitlines()]


# --- refusals that are alike -----------------------------------------------------------------------------------------


def test_the_first_refusal_is_a_line_and_the_rest_of_a_window_is_another():
    groups = RefusalGroups(10.0, 100)
    assert groups.add(refusal(), 0.0) == msgspec.structs.replace(refusal(), count=1)
    assert [groups.add(refusal(), 1.0 + i) for i in range(5)] == [None] * 5
    assert groups.due(9.9) == []
    assert groups.due(10.0) == [msgspec.structs.replace(refusal(), count=5, seconds=10.0)]
    assert groups.add(refusal(), 11.0) is None, "it goes on"
    assert [line.count for line in groups.due(20.0)] == [1]
    assert groups.due(30.0) == []
    assert groups.add(refusal(), 31.0) is not None, "a window without any has ended it"


def test_refusals_differ_by_key_status_route_and_address_but_limits_by_key_only():
    groups = RefusalGroups(10.0, 100)
    different = [refusal(), refusal("k-2"), refusal(status=401), refusal(route="/b"), refusal(remote="::1")]
    assert all(groups.add(event, 0.0) is not None for event in different)
    limits = [refusal(status=429, route=f"/{i}", remote=f"10.0.0.{i}", reason="rate_limit") for i in range(5)]
    assert [groups.add(event, 0.0) is not None for event in limits] == [True, False, False, False, False]
    assert groups.add(refusal(status=429, reason="concurrency"), 0.0) is not None


def test_kinds_beyond_the_limit_are_counted_together():
    """Who guesses keys from many addresses fills neither memory nor disk."""
    groups = RefusalGroups(10.0, 4)
    seen = [groups.add(refusal(status=401, remote=f"10.0.0.{i}"), 0.0) for i in range(1000)]
    assert sum(line is not None for line in seen) == 5
    (rest,) = groups.due(10.0)
    assert (rest.count, rest.remote, rest.status, rest.key) == (995, "other", 401, "")


# --- the file --------------------------------------------------------------------------------------------------------


def test_it_is_for_its_owner_only_and_is_appended_to(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    path.write_bytes(b"{}\n")
    path.chmod(0o644)
    file = AuditFile(path, 1 << 20, 2)
    assert file.append([b"1\n", b"2\n"]) == 2
    file.close()
    assert path.read_bytes() == b"{}\n1\n2\n"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_full_is_kept_under_another_name_and_the_oldest_goes(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path, 100, 2)
    line = b"x" * 39 + b"\n"
    for number in range(9):
        file.append([b"%d" % number + line[1:]])
    assert sorted(item.name for item in tmp_path.iterdir()) == ["audit.jsonl", "audit.jsonl.1", "audit.jsonl.2"]
    kept = [(tmp_path / name).read_bytes() for name in ("audit.jsonl.2", "audit.jsonl.1", "audit.jsonl")]
    assert [part[:1] for raw in kept for part in raw.splitlines()] == [b"4", b"5", b"6", b"7", b"8"]
    assert {stat.S_IMODE(item.stat().st_mode) for item in tmp_path.iterdir()} == {0o600}
    file.append([b"y" * 200 + b"\n"])  # longer than a file may be: it has one for itself
    file.append([b"z\n"])
    assert path.read_bytes() == b"z\n"
    file.close()


def test_a_file_that_was_moved_or_removed_is_made_anew(tmp_path: Path):
    """As logrotate does it."""
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path, 1 << 20, 2)
    file.append([b"1\n"])
    path.rename(tmp_path / "moved")
    file.append([b"2\n"])
    path.unlink()
    file.append([b"3\n"])
    file.close()
    assert (path.read_bytes(), (tmp_path / "moved").read_bytes()) == (b"3\n", b"1\n")


def test_processes_share_a_file_and_its_rotation_without_losing_a_line(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    writers, each = 4, 400
    children = [in_child(lambda n=number: write_numbers(path, n, each)) for number in range(writers)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * writers
    files = list(tmp_path.iterdir())
    assert len(files) > 5
    assert all(item.stat().st_size <= 4000 for item in files)
    found = [(line["writer"], line["n"]) for item in files for line in lines_of(item)]
    assert sorted(found) == [(writer, n) for writer in range(writers) for n in range(each)]


def write_numbers(path: Path, writer: int, count: int) -> int:
    file = AuditFile(path, 4000, 100)
    for n in range(0, count, 2):
        lines = [json.dumps({"writer": writer, "n": n + i, "text": "x" * 17}).encode() + b"\n" for i in range(2)]
        if file.append(lines) != 2:
            return 1
    return 0


def in_child(work: Callable[[], int]) -> int:
    """The id of a process that ends with what ``work`` returns."""
    child = os.fork()
    if not child:
        try:
            os._exit(work())
        finally:
            os._exit(70)
    return child


def test_a_disk_that_is_full_leaves_whole_lines(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    file = AuditFile(path, 1 << 20, 2)
    with files_of_at_most(25):
        assert file.append([b"0123456789\n"] * 3) == 2, "the third does not fit, and no part of it is left"
        with pytest.raises(OSError, match=r"No space left|too large"):
            file.append([b"0123456789\n"])
        assert file.append([b"01\n"]) == 1
    assert file.append([b"0123456789\n"]) == 1
    assert path.read_bytes() == b"0123456789\n" * 2 + b"01\n" + b"0123456789\n"
    file.close()


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """No file of this process may be larger (SIGXFSZ is ignored by Python)."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_process_that_is_stopped_while_it_writes_silences_no_other(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    there, gone = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        AuditFile(path, 1 << 20, 2)._lock()
        os.write(there[1], b"x")
        os.close(gone[1])
        os.read(gone[0], 1)
        os._exit(0)
    try:
        os.read(there[0], 1)
        file = AuditFile(path, 1 << 20, 2)
        assert file.append([b"1\n"]) == 1
        assert path.read_bytes() == b"1\n"
        file.close()
    finally:
        os.close(gone[1])
        os.waitpid(child, 0)
        for end in (*there, gone[0]):
            os.close(end)


def test_a_folder_that_has_gone_stops_nothing_and_is_written_to_when_it_is_back(tmp_path: Path):
    """A gateway that is started anew meanwhile must serve."""
    folder = tmp_path / "logs"
    log = AuditLog(folder / "audit.jsonl", "gateway-0", LIMITS)
    log.put(AuditEvent(event="admin", detail="1"))
    wait_until(lambda: log._failing)
    folder.mkdir()
    wait_until((folder / "audit.jsonl").exists)
    log.close()
    assert [line["detail"] for line in lines_of(folder / "audit.jsonl")] == ["1"]


@pytest.mark.parametrize("what", ["folder", "pipe", "nowhere"])
def test_what_cannot_be_appended_to_is_refused_before_the_start(tmp_path: Path, what: str):
    path = tmp_path / what
    if what == "folder":
        path.mkdir()
    elif what == "pipe":
        os.mkfifo(path)
    else:
        path = path / "audit.jsonl"
    with pytest.raises(ConfigError, match=r"--audit-log .*cannot append to it"):
        check_audit_log(str(path), LIMITS)


# --- the log ---------------------------------------------------------------------------------------------------------


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, "in vain"
        time.sleep(0.005)


def test_lines_have_time_and_gateway_and_what_is_queued_is_written_at_the_end(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "gateway-7", LIMITS, wall_time=lambda: 1_800_000_000.25)
    log.put(AuditEvent(event="admin", key="k-1", method="POST", route="/admin/x", status=200, detail="role=decode"))
    for _ in range(3):
        log.put(refusal(reason="route_not_allowed", remote="10.0.0.1"))
    log.put(AuditEvent(event="keys_added", keys=("k-2", "k-3")))
    log.close()
    head = {"time": "2027-01-15T08:00:00.250Z", "gateway": "gateway-7"}
    refused = {"key": "k-1", "route": "/a", "status": 403, "reason": "route_not_allowed", "remote": "10.0.0.1"}
    admin = {"key": "k-1", "method": "POST", "route": "/admin/x", "detail": "role=decode", "status": 200}
    *lines, rest = lines_of(path)
    assert lines == [
        {**head, "event": "admin", **admin},
        {**head, "event": "refused", **refused, "count": 1},
        {**head, "event": "keys_added", "keys": ["k-2", "k-3"]},
    ]
    assert {name: rest[name] for name in refused} == refused
    assert rest["count"] == 2


def test_a_line_is_shorter_than_a_write_that_may_be_cut(tmp_path: Path):
    path = tmp_path / "audit.jsonl"
    log = AuditLog(path, "gateway-0", LIMITS)
    log.put(refusal(route="\0" * 1000, detail="\u2028" * 1000, reason="r"))
    log.close()
    assert path.stat().st_size <= MAX_LINE_BYTES
    assert lines_of(path)[0]["reason"] == "r"


def test_what_finds_no_room_is_counted_and_the_count_is_written(tmp_path: Path):
    """The disk is full for a while: nobody waits, and afterwards the file tells how much is missing."""
    path = tmp_path / "audit.jsonl"
    child = in_child(lambda: fill_and_free(path))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines = lines_of(path)
    written = [line for line in lines if line["event"] == "admin"]
    lost = sum(line["count"] for line in lines if line["event"] == "lost")
    assert len(written) + lost == 1001
    assert lost >= LEAST_LOST
    assert [line["detail"] for line in written] == sorted((line["detail"] for line in written), key=int)


LEAST_LOST = 1000 - 10 - MAX_BATCH_LINES - 1
"""Of a thousand: those that neither wait nor are with the thread nor fit the disk."""


def fill_and_free(path: Path) -> int:
    """In a process of its own, as its limit is for all of its files."""
    limits = AuditLimits(max_queued_audit_events=10)
    log = AuditLog(path, "gateway-0", limits)
    with files_of_at_most(100):
        for number in range(1000):
            began = time.monotonic()
            log.put(AuditEvent(event="admin", detail=str(number)))
            if time.monotonic() - began > 1.0:
                return 1
        if log.lost < LEAST_LOST:
            return 2
    wait_until(lambda: log._queue.empty() and not log._failing)
    log.put(AuditEvent(event="admin", detail="1000"))
    log.close()
    return 0 if '"1000"' in path.read_text() else 3


def test_a_full_disk_at_the_end_delays_no_more_than_agreed(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    log = AuditLog(tmp_path / "audit.jsonl", "gateway-0", AuditLimits(audit_flush_s=0.2))
    with files_of_at_most(10):
        log.put(AuditEvent(event="admin"))
        log.close()
    assert "the audit log ends without its last lines" in caplog.text
    log._thread.join(PATIENCE_S)  # there is room again
    assert not log._thread.is_alive()


def test_putting_never_waits_for_a_writer_that_hangs(tmp_path: Path):
    """The thread is held where it writes: the queue fills, and the rest is counted."""
    path = tmp_path / "audit.jsonl"
    held, go = threading.Event(), threading.Event()
    log = AuditLog(path, "gateway-0", AuditLimits(max_queued_audit_events=5))
    append = log._file.append

    def slow(lines: Any) -> int:
        held.set()
        go.wait(PATIENCE_S)
        return append(lines)

    log._file.append = slow  # type: ignore[method-assign]
    log.put(AuditEvent(event="admin", detail="0"))
    assert held.wait(PATIENCE_S)
    for number in range(1, 101):
        log.put(AuditEvent(event="admin", detail=str(number)))
    assert log.lost == 95
    go.set()
    log.close()
    lines = lines_of(path)
    assert sum(line["count"] for line in lines if line["event"] == "lost") == 95
    assert [line["detail"] for line in lines if line["event"] == "admin"] == [str(n) for n in range(6)]


def test_a_process_that_is_killed_leaves_whole_lines(tmp_path: Path):
    path = tmp_path / "audit.jsonl"

    def writes() -> int:
        log = AuditLog(path, "gateway-0", LIMITS)
        for number in range(1_000_000):
            log.put(AuditEvent(event="admin", detail=str(number)))
            if number % 100 == 0:
                time.sleep(0.0005)
        return 0

    child = in_child(writes)
    wait_until(lambda: path.exists() and path.stat().st_size > 100_000)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert path.read_bytes().endswith(b"\n")
    assert len(lines_of(path)) > 500
