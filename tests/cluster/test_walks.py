"""The walk "A worker dies" of ARCHITECTURE.md, as far as the host's processes take part (``launch/``).

The gateway's part is in ``tests/null/test_walks.py``.
"""

from __future__ import annotations

import mmap
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.null.test_walks import Calls, listed

from .server import PATIENCE_S, PenstockServer

SOURCES = Path(__file__).parents[2] / "src"
RECORDER = Path(__file__).parent / "call_recorder"


class Recording:
    """Calls of all processes of one service, by phase (``call_recorder/sitecustomize.py``)."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "calls"
        self._path.touch()
        flag = folder / "calls.flag"
        flag.write_bytes(b"\0")
        with flag.open("r+b") as file:
            self._flag = mmap.mmap(file.fileno(), 1)
        self._phases = 0
        self.environ = {
            "CALL_RECORD": str(self._path),
            "PYTHONPATH": os.pathsep.join((str(RECORDER), str(SOURCES))),
        }

    @contextmanager
    def phase(self) -> Iterator[None]:
        """Calls are recorded meanwhile."""
        self._phases += 1
        self._flag[0] = self._phases
        yield
        self._flag[0] = 0

    def calls(self, pids: set[int]) -> Calls:
        """What these processes have called so far in the last phase."""
        found = set()
        for line in self._path.read_text().splitlines():
            phase, pid, file, function = line.split("\t")
            if int(phase) == self._phases and int(pid) in pids:
                found.add((file, function.replace(".<locals>", "")))
        return found


def test_a_worker_dies(tmp_path: Path) -> None:
    recording = Recording(tmp_path)
    with PenstockServer(["--prefill", "1", "--decode", "1"], environ=recording.environ) as server:
        pids, supervisor = server.processes(), {server.pid}
        server.wait_for(lambda: "curl -N" in server.read_log(), PATIENCE_S, "the last line of the start")
        with recording.phase():
            look = ("launch/supervisor.py", "Supervisor._read_heartbeats")
            server.wait_for(lambda: look in recording.calls(supervisor), PATIENCE_S, "a look at the heartbeats")
        idle = recording.calls(supervisor)
        with recording.phase():
            os.kill(server.worker("decode-0")["pid"], signal.SIGKILL)
            server.wait_for(lambda: server.worker("decode-0")["incarnation"] == 2, PATIENCE_S, "a second incarnation")
            server.wait_all_ready()
        pairs = {pair for pair in listed("A worker dies") if pair[0].startswith("launch/")}
        assert sorted(pairs - recording.calls(pids)) == [], "listed and not called"
        called = {file for file, _ in recording.calls(supervisor) - idle if file.startswith("launch/")}
        assert sorted(called - {file for file, _ in pairs}) == [], "called and not listed"
