"""The audit log: refusals, actions of operators and changes of keys, as lines of JSON in an append-only file.

::

    event loop --put--> bounded queue --> one thread: counts like refusals together --> FILE, FILE.1 ... FILE.n

``put`` never waits.  A line that finds the queue full is counted, and so is one that could not be written when the
process ends; the count is a line of its own as soon as there is room.  While the file cannot be written (a full disk),
the thread retries and the queue fills.  Gateways of one host share the file: each line is one write under a lock.

Has no keys, prompts or responses: ids, names of routes, numbers and addresses only.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import queue
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Protocol

import msgspec

from penstock.config.base import expanded_path
from penstock.config.limits import AuditLimits
from penstock.errors import ConfigError
from penstock.telemetry.log import log_event

log = logging.getLogger(__name__)

MAX_LINE_BYTES = 4096
"""A longer line loses its texts."""

MAX_ROUTE_CHARS, MAX_DETAIL_CHARS, MAX_WORD_CHARS = 128, 128, 64

MAX_LINE_KEYS = 128
"""Ids of keys in one line; more are in further lines."""

MAX_BATCH_LINES = 256
"""Events that the thread takes out of the queue before it writes."""

LOCK_WAIT_S = 1.0
"""For which a line waits for another gateway's; one that is stopped while it writes must not silence the others."""

RETRY_S = 0.5
"""Between two tries to write, and between two looks for counts that are due."""

LAST_RETRY_S = 0.05
"""The first of these while the process ends."""

OTHERS = "other"
"""The route and address of refusals beyond ``max_refusal_groups``, which are counted together."""

REFUSED = "refused"
PEER_REFUSED = "peer_refused"
"""Of processes; like ``REFUSED`` those alike are counted together."""


class AuditEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What is written, without time and gateway."""

    event: str
    key: str = ""  # its id
    tenant: str = ""  # as metrics and `penstock keys list` name it
    method: str = ""
    route: str = ""
    detail: str = ""  # what an operator changed
    status: int = 0
    reason: str = ""
    remote: str = ""  # address of the client
    keys: tuple[str, ...] = ()  # ids
    count: int = 0  # of refusals or lines that this one stands for
    seconds: float = 0.0  # in which those were


class AuditSink(Protocol):
    """Where events go."""

    def put(self, event: AuditEvent) -> None:
        """Never waits, never fails."""
        ...


class RefusalGroups:
    """Counts like refusals together: the first of a window has a line at once, the others one at the window's end.

    Those are alike that have the same key, status, reason, route and address; of 429 the same key and reason.
    """

    def __init__(self, window_s: float, max_groups: int) -> None:
        self._window_s = window_s
        self._max_groups = max_groups
        self._open: dict[AuditEvent, tuple[float, int]] = {}  # kind -> beginning of its window, refusals not written

    def add(self, event: AuditEvent, now: float) -> AuditEvent | None:
        """The line for this refusal; None if it was only counted."""
        kind = msgspec.structs.replace(event, route="", remote="", method="") if event.status == 429 else event
        if kind not in self._open and len(self._open) >= self._max_groups:
            kind = AuditEvent(event=event.event, status=event.status, route=OTHERS, remote=OTHERS)
        if kind in self._open:
            begun, count = self._open[kind]
            self._open[kind] = (begun, count + 1)
            return None
        self._open[kind] = (now, 0)
        return msgspec.structs.replace(event, count=1)

    def due(self, now: float, *, all_of_them: bool = False) -> list[AuditEvent]:
        """The lines of windows that have ended; ``all_of_them``: of all."""
        lines: list[AuditEvent] = []
        for kind, (begun, count) in list(self._open.items()):
            if now - begun < self._window_s and not all_of_them:
                continue
            del self._open[kind]
            if count:
                lines.append(msgspec.structs.replace(kind, count=count, seconds=round(now - begun, 1)))
                if not all_of_them:
                    self._open[kind] = (now, 0)  # it goes on: the next line is due a window later
        return lines


class AuditFile:
    """The file and its predecessors.  For one thread; other processes may write to the same file."""

    def __init__(self, path: Path, max_bytes: int, max_files: int) -> None:
        self._path = path
        self._max_bytes = max_bytes
        self._max_files = max_files
        self._descriptor: int | None = None  # before the first line

    def open(self) -> int:
        """The descriptor of the open file.  Raises OSError if it cannot be opened for appending."""
        if self._descriptor is None:
            self._descriptor = self._open()
        return self._descriptor

    def close(self) -> None:
        """Closes the file; harmless if it is not open."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def append(self, lines: Sequence[bytes]) -> int:
        """Writes lines in order; returns how many are in the file, whole.  Raises OSError if not even the first is."""
        written = 0
        self.open()
        held = self._lock()
        try:
            for line in lines:
                held = self._make_room(len(line), held=held)
                self._write(line, alone=held)
                written += 1
        except OSError:
            if not written:
                raise
        finally:
            if self._descriptor is not None:
                fcntl.flock(self._descriptor, fcntl.LOCK_UN)
        return written

    def _write(self, line: bytes, *, alone: bool) -> None:
        file = self.open()
        size = os.fstat(file).st_size
        if os.write(file, line) < len(line):
            if alone:  # no other process has written behind it
                os.ftruncate(file, size)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _make_room(self, size: int, *, held: bool) -> bool:
        """Opens the file of this path, a new one if there is none or too little room; whether its lock is held."""
        while True:
            while not self._is_current():  # this process, another or the operator has moved it
                self.close()
                held = self._lock()
            there = os.fstat(self.open()).st_size
            if not there or there + size <= self._max_bytes:
                return held
            self._rename_files()

    def _rename_files(self) -> None:
        """Another process that is about to write to the file without its lock does so under its new name."""
        for number in range(self._max_files - 1, 0, -1):
            with suppress(FileNotFoundError):
                os.replace(self._numbered(number), self._numbered(number + 1))
        with suppress(FileNotFoundError):
            os.replace(self._path, self._numbered(1))

    def _numbered(self, number: int) -> str:
        return f"{self._path}.{number}"

    def _lock(self) -> bool:
        """Whether the lock of the open file is held, after ``LOCK_WAIT_S`` at most."""
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self.open(), fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= until:
                    return False
                time.sleep(0.001)
                continue
            return True

    def _is_current(self) -> bool:
        own = os.fstat(self.open())
        try:
            there = os.stat(self._path)
        except FileNotFoundError:
            return False
        return (own.st_dev, own.st_ino) == (there.st_dev, there.st_ino)

    def _open(self) -> int:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe must not make us wait
        descriptor = os.open(self._path, flags, 0o600)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise OSError(errno.EINVAL, "it is no regular file")
        os.fchmod(descriptor, 0o600)
        return descriptor


class AuditLog:
    """Use: construct it in the process that serves, after the fork; ``put``; ``close`` at its end."""

    def __init__(
        self,
        path: Path,
        gateway: str,
        limits: AuditLimits,
        *,
        role: str = "gateway",
        wall_time: Callable[[], float] = time.time,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        """Starts the thread.  ``gateway``: the process's name, in each line under its ``role``."""
        self._file = AuditFile(path, limits.max_audit_file_bytes, limits.max_audit_files)
        self._path = path
        self._process = {role: gateway}
        self._limits = limits
        self._wall_time = wall_time
        self._monotonic = monotonic
        self._queue: queue.Queue[tuple[float, AuditEvent]] = queue.Queue(limits.max_queued_audit_events)
        self._groups = RefusalGroups(limits.refusal_window_s, limits.max_refusal_groups)
        self._lost = 0  # events that were never written; only ``put`` counts, so no lock is needed
        self._lost_written = 0  # of those, how many the file tells of
        self._failing = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="audit log", daemon=True)
        self._thread.start()

    @property
    def lost(self) -> int:
        """Events for which there was no room."""
        return self._lost

    def put(self, event: AuditEvent) -> None:
        try:
            self._queue.put_nowait((self._wall_time(), event))
        except queue.Full:
            self._lost += 1

    def close(self) -> None:
        """Write what is queued, within ``audit_flush_s``."""
        self._closing.set()
        self._thread.join(self._limits.audit_flush_s)
        if self._thread.is_alive():
            lines = self._queue.qsize() + self._lost - self._lost_written
            log_event(log, logging.ERROR, "the audit log ends without its last lines", lines=lines)

    # --- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        while True:
            closing = self._closing.is_set()
            lines = self._take(closing=closing)
            while lines or self._lost > self._lost_written:
                lines = lines[self._append(lines) :]
                if self._failing and self._closing.wait(RETRY_S):
                    time.sleep(LAST_RETRY_S)
            if closing and self._queue.empty():
                self._file.close()
                return

    def _take(self, *, closing: bool) -> list[bytes]:
        """The lines of what is queued and due; waits up to ``RETRY_S`` for the first."""
        events: list[tuple[float, AuditEvent]] = []
        with suppress(queue.Empty):
            events.append(self._queue.get(block=not closing, timeout=None if closing else RETRY_S))
            while len(events) < MAX_BATCH_LINES:
                events.append(self._queue.get_nowait())
        now, lines = self._monotonic(), []
        for at, event in events:
            line = self._groups.add(event, now) if event.event in (REFUSED, PEER_REFUSED) else event
            if line is not None:
                lines.append(self._encode(at, line))
        due = self._groups.due(now, all_of_them=closing and self._queue.empty())
        return lines + [self._encode(self._wall_time(), line) for line in due]

    def _append(self, lines: Sequence[bytes]) -> int:
        """Write lines; returns how many were written."""
        lost = self._lost - self._lost_written
        losses = [self._encode(self._wall_time(), AuditEvent(event="lost", count=lost))] if lost else []
        try:
            written = self._file.append([*losses, *lines])
        except OSError as error:
            if not self._failing:
                self._failing = True
                log.error(
                    "cannot write the audit log %s: %s; events are counted once the queue is full", self._path, error
                )
            return 0
        if self._failing:
            self._failing = False
            log.info("the audit log %s is written again", self._path)
        if losses and written:
            self._lost_written += lost
            written -= 1
        return written

    def _encode(self, at: float, event: AuditEvent) -> bytes:
        line = _encoded(at, self._process, event)
        if len(line) > MAX_LINE_BYTES:
            line = _encoded(at, self._process, msgspec.structs.replace(event, route="", detail="", remote=""))
        return line


def _encoded(at: float, process: dict[str, str], event: AuditEvent) -> bytes:
    moment = datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return msgspec.json.encode({"time": moment, **process, **msgspec.to_builtins(event)}) + b"\n"


def check_audit_log(path: str | None, limits: AuditLimits) -> str | None:
    """The absolute path.  Raises ConfigError, before any process starts, for a file that could not be written."""
    if path is None:
        return None
    absolute = expanded_path(path, "--audit-log").absolute()
    try:
        file = AuditFile(absolute, limits.max_audit_file_bytes, limits.max_audit_files)
        file.open()
        file.close()
    except OSError as error:
        raise ConfigError(f"--audit-log {path}: cannot append to it: {error.strerror}; choose another file") from error
    return str(absolute)
