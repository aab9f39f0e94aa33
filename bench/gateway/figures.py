"""Figures of other processes, and lines to them: CPU time, memory, and what a child says when it is asked."""

from __future__ import annotations

import json
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any


def cpu_s(pid: int) -> float:
    """CPU seconds of all threads of a process, as ``getrusage`` tells them, in nanoseconds (clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


def anonymous_kib(pid: int) -> int:
    """Resident memory that is the process's own."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise LookupError(f"process {pid} has no memory")


class Child:
    """A forked process with a line to it: one JSON value a message, either way."""

    def __init__(self, work: Callable[[socket.socket], None]) -> None:
        self._line, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            self._line.close()
            code = 1
            try:
                work(theirs)
                code = 0
            except BaseException:  # noqa: BLE001 - a child has nobody to raise it to
                traceback.print_exc()
            os._exit(code)
        theirs.close()

    def ask(self, what: Any, timeout_s: float = 120.0) -> Any:
        """Send a value and wait for the answer."""
        self._line.send(json.dumps(what).encode())
        return self.hear(timeout_s)

    def hear(self, timeout_s: float = 120.0) -> Any:
        """What it says next."""
        self._line.settimeout(timeout_s)
        said = self._line.recv(1 << 16)
        if not said:
            raise EOFError(f"process {self.pid} has ended")
        return json.loads(said)

    def end(self) -> None:
        """Kill it and wait for it."""
        self._line.close()
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)


def say(line: socket.socket, what: Any) -> None:
    """From a child."""
    line.send(json.dumps(what).encode())


def hardware_line() -> str:
    """Processor, cores and load, as a table names them."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), "")
    return f"{model}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}"
