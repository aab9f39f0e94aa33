"""A node's lease: a file that is locked by the process that keeps the node running, an actor of ``penstock ray``.

::

    actor --- locks, and writes which process the node is ---> FILE <--- is it locked? --- penstock node --lease FILE

A lock ends with the process that has it (flock(2)).  The node goes on for ``LEASE_S`` without: the actor with which Ray
replaces the one that ended finds it by the file and takes it over.  Otherwise the node drains and ends.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from pathlib import Path
from typing import Annotated

import msgspec

LEASE_S = 30.0
"""For which a node goes on while nothing has locked its file."""

LOCK_WITHIN_S = 10.0
"""For the process that had the lock to be gone."""

_START_TIME = 19  # of the words behind the name in /proc/PID/stat: ticks since the system's start (proc_pid_stat(5))


class LeaseRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The process of a node."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    started: int  # ``start_ticks``
    digest: str  # of what it was started with
    ready_after_s: float | None = None  # None: it is not ready yet


class LeaseHolder:
    """The lock, held until this process ends or ``close``."""

    def __init__(self, path: Path) -> None:
        """Raises OSError, also TimeoutError while another process has it."""
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        until = time.monotonic() + LOCK_WITHIN_S
        while True:
            try:
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > until:
                    os.close(self._descriptor)
                    raise TimeoutError(f"{path} is locked by another process") from None
                time.sleep(0.01)  # a node that looks has it for a moment

    def read(self) -> LeaseRecord | None:
        """What was written last; None: nothing that can be read."""
        try:
            return msgspec.json.decode(os.pread(self._descriptor, 4096, 0), type=LeaseRecord)
        except msgspec.DecodeError:
            return None

    def write(self, record: LeaseRecord) -> None:
        """Raises OSError."""
        raw = msgspec.json.encode(record)
        os.pwrite(self._descriptor, raw, 0)
        os.truncate(self._descriptor, len(raw))

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._descriptor)


class LeaseWatch:
    """The node's end."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._held_at: float | None = None

    def is_over(self, now: float) -> bool:
        """Whether nothing has held the lock for ``LEASE_S``; to be called several times a second."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            self._held_at = now
            return False
        fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        if self._held_at is None:
            self._held_at = now
        return now - self._held_at > LEASE_S


def start_ticks(pid: int) -> int:
    """When a process was started, to tell it from another one of its number; -1: there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[_START_TIME])
    return -1
