"""The folder of a run's sockets: whose it is, and what becomes of those that killed runs have left."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from penstock.errors import ConfigError
from penstock.launch.run_folder import MOST_PATH_BYTES, RunFolder, ServiceRecord, running_services
from penstock.types import WorkerId

D = WorkerId("decode-0")


@pytest.fixture
def base() -> Iterator[Path]:
    """With a short name: a socket's path has 107 bytes."""
    with tempfile.TemporaryDirectory(prefix="p") as folder:
        yield Path(folder)


def test_it_is_its_owners_alone_and_gone_afterwards(base: Path) -> None:
    folder = RunFolder([base])
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert folder.endpoint(D, 1) == f"ipc://{folder.path}/decode-0-1"
    folder.close()
    folder.close()
    assert list(base.iterdir()) == []


def test_what_an_earlier_incarnation_left_is_removed(base: Path) -> None:
    with closing(RunFolder([base])) as folder:
        left = folder.path / "decode-0-1"
        left.touch()
        folder.endpoint(D, 2)
        assert not left.exists()


def test_a_run_that_was_killed_is_swept_by_the_next_and_one_that_lives_is_not(base: Path) -> None:
    script = """
import socket, sys, time
from pathlib import Path
from penstock.launch.run_folder import RunFolder
folder = RunFolder([Path(sys.argv[1])])
with socket.socket(socket.AF_UNIX) as left:
    left.bind(folder.endpoint("decode-0", 1).removeprefix("ipc://"))
    print("up", flush=True)
    time.sleep(600)
"""
    command = [sys.executable, "-c", script, str(base)]
    environment = {"PYTHONPATH": ":".join(part for part in sys.path if part), "PATH": ""}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        (theirs,) = base.iterdir()
        RunFolder([base]).close()
        assert (theirs / "decode-0-1").is_socket()
        process.send_signal(signal.SIGKILL)
        process.wait()
    with closing(RunFolder([base])) as folder:
        assert list(base.iterdir()) == [folder.path]


def test_nothing_else_is_removed(base: Path) -> None:
    others = [base / "penstock-0123456789ab", base / "penstock-notes", base / "penstock-abcdefabcdef"]
    for other in others:
        other.mkdir(mode=0o700)
    (others[0] / "letter").touch()
    others[2].chmod(0o755)
    RunFolder([base]).close()
    assert sorted(base.iterdir()) == sorted(others)


def test_the_next_place_is_taken_where_one_cannot_be_written_or_is_too_long(base: Path) -> None:
    deep = base / ("d" * MOST_PATH_BYTES)
    deep.mkdir()
    with closing(RunFolder([base / "missing", deep, base])) as folder:
        assert folder.path.parent == base
    with pytest.raises(ConfigError, match="XDG_RUNTIME_DIR"):
        RunFolder([base / "missing"])
    assert os.listdir(deep) == []


SERVICE = ServiceRecord(pid=os.getpid(), url="http://127.0.0.1:8000", model="storyteller", path="/models/storyteller")


def test_what_a_run_serves_is_known_as_long_as_it_lasts(base: Path) -> None:
    with closing(RunFolder([base])) as folder:
        assert running_services([base]) == []  # it is not ready
        folder.publish(SERVICE)
        assert running_services([base / "missing", base, base]) == [SERVICE]
        assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    assert running_services([base]) == []
    assert list(base.iterdir()) == []


def test_records_of_killed_runs_and_those_that_are_none_are_passed_over(base: Path) -> None:
    script = """
import os, sys
from pathlib import Path
from penstock.launch.run_folder import RunFolder, ServiceRecord
RunFolder([Path(sys.argv[1])]).publish(ServiceRecord(pid=os.getpid(), url="http://127.0.0.1:1", model="gone"))
os._exit(0)
"""
    environment = {"PYTHONPATH": ":".join(part for part in sys.path if part), "PATH": ""}
    subprocess.run([sys.executable, "-c", script, str(base)], env=environment, check=True, timeout=60)
    (left,) = base.iterdir()
    assert (left / "service.json").exists()
    assert running_services([base]) == []
    with closing(RunFolder([base])) as folder:
        assert not left.exists()  # swept with its record
        (folder.path / "service.json").write_text('{"pid": "no number"}')
        assert running_services([base]) == []
        folder.publish(SERVICE)
        folder.path.chmod(0o755)  # others could have written it
        assert running_services([base]) == []
        folder.path.chmod(0o700)
