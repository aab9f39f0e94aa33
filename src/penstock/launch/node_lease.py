"""A node's lease: a file that is locked by the process that keeps the node running, an actor of ``penstock ray``.

::

    actor --- locks, and writes which process the node is ---> FILE <--- is it locked? --- penstock node --lease FILE

A lock ends with the process that has it (flock(2)).  The node goes on for ``LEASE_S`` without: the actor with which Ray
replaces the one that ended finds it by the file and takes it over.  Otherwise the node drains and ends, also where the
new actor has not found it and runs another one: an actor may end before it has written the record, or have no space.
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
"""For which a node goes on while nothing has locked its file, or what has locked it runs another node."""

LOCK_WITHIN_S = 10.0
"""For the process that had the lock to be gone."""

MAX_RECORD_BYTES = 4096

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
        return _decode(os.pread(self._descriptor, MAX_RECORD_BYTES, 0))

    def write(self, record: LeaseRecord) -> None:
        """Raises OSError."""
        raw = msgspec.json.encode(record)
        os.pwrite(self._descriptor, raw, 0)
        os.truncate(self._descriptor, len(raw))

    def close(self) -> None:
        """Give the lock up."""
        os.close(self._descriptor)


class LeaseWatch:
    """The node's end, in the process that the record is of."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self._before = os.pread(self._descriptor, MAX_RECORD_BYTES, 0)  # may be of a node that has ended
        self._held_at: float | None = None

    def is_over(self, now: float) -> bool:
        """Whether nothing that runs this process has held the lock for ``LEASE_S``; to be called several times a
        second."""
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            if not self._is_of_another():
                self._held_at = now
                return False
        else:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        if self._held_at is None:
            self._held_at = now
        return now - self._held_at > LEASE_S

    def _is_of_another(self) -> bool:
        """Whether another process was started with the lease since.  An unwritten record says nothing."""
        raw = b""
        with contextlib.suppress(OSError):
            raw = os.pread(self._descriptor, MAX_RECORD_BYTES, 0)
        record = None if raw == self._before else _decode(raw)
        return record is not None and record.pid != os.getpid()


def _decode(raw: bytes) -> LeaseRecord | None:
    try:
        return msgspec.json.decode(raw, type=LeaseRecord)
    except msgspec.DecodeError:
        return None


def running_pid(path: Path) -> int:
    """The process that the record in a lease names, also if another one has the lock, if it runs; else 0."""
    try:
        record = _decode(path.read_bytes())
    except OSError:
        return 0
    return record.pid if record is not None and 0 <= record.started == start_ticks(record.pid) else 0


def start_ticks(pid: int) -> int:
    """When a process was started, to tell it from another one of its number; -1: there is none."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
        return int(stat.rpartition(")")[2].split()[_START_TIME])
    return -1
