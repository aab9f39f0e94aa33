"""Processes and their memory: where a command runs, how a tree of processes ends, and what it holds.

Knows nothing about what any process does.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.peers.places import REPOSITORY

STOP_S = 15.0


def own_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """With this repository's packages first, whether Penstock is installed or not; and no network."""
    paths = [str(REPOSITORY / "src"), str(REPOSITORY), os.environ.get("PYTHONPATH", "")]
    return {**_inherited(), "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(extra or {})}


def peer_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Without this repository's packages; and no network."""
    kept = {name: value for name, value in _inherited().items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return {**kept, "TRANSFORMERS_VERBOSITY": "error", **(extra or {})}


def _inherited() -> dict[str, str]:
    """Bytecode is kept, as an installed package's is: no start is charged with compiling sources."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "HF_HUB_OFFLINE": "1"}


def compile_sources() -> None:
    """Bytecode of this repository's package, as ``pip install`` would have made it."""
    command = [sys.executable, "-m", "compileall", "-q", str(REPOSITORY / "src" / "penstock")]
    subprocess.run(command, env=own_environment(), check=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def spawn(command: Sequence[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """In a session of its own, so that ``stop`` reaches whatever it starts."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as file:
        return subprocess.Popen(
            command, env=dict(environment), stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM, then SIGKILL to all of its session; returns when it has been reaped and its children have gone."""
    family = [process.pid, *descendants(process.pid)]
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait(STOP_S)
    end = time.monotonic() + STOP_S
    while any(Path(f"/proc/{pid}").exists() for pid in family) and time.monotonic() < end:
        time.sleep(0.05)


def descendants(pid: int) -> list[int]:
    """Children and theirs, as long as they live."""
    found: list[int] = []
    for child in _children(pid):
        found += [child, *descendants(child)]
    return found


def _children(pid: int) -> Iterator[int]:
    for tasks in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            yield from map(int, tasks.read_text().split())
        except OSError:
            continue


def memory_bytes(pid: int) -> dict[str, int]:
    """Proportional set size of a process and all its descendants together, and the part of it that has no file.

    A page that several processes share counts once over all of them; so does one of the page cache that they map.
    """
    total = {"pss": 0, "pss_anonymous": 0, "pss_file": 0, "pss_shared_memory": 0}
    names = {"Pss": "pss", "Pss_Anon": "pss_anonymous", "Pss_File": "pss_file", "Pss_Shmem": "pss_shared_memory"}
    for each in (pid, *descendants(pid)):
        try:
            lines = Path(f"/proc/{each}/smaps_rollup").read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            name, _, value = line.partition(":")
            if name in names:
                total[names[name]] += 1024 * int(value.split()[0])
    return total
