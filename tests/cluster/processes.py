"""What /proc tells of processes and their abstract sockets; whoever has gone meanwhile is told of as nothing."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection
from pathlib import Path


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()  # state, ppid, pgrp, session, ...


def command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


def parent(pid: int) -> int | None:
    fields = stat(pid)
    return int(fields[1]) if fields else None


def children(pid: int) -> list[int]:
    """Of a process with one thread, as a supervisor is."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]
    except OSError:
        return [child for child in pids() if parent(child) == pid]


def children_named(parents: Collection[int], word: str) -> list[int]:
    """Living children of these, whichever thread started them, in whose command line this stands."""
    return [pid for pid in pids() if parent(pid) in parents and alive(pid) and word in command(pid)]


def session(pid: int) -> int | None:
    fields = stat(pid)
    return int(fields[3]) if fields else None


def alive(pid: int) -> bool:
    fields = stat(pid)
    return bool(fields) and fields[0] not in ("Z", "X")


def socket_inodes(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{pid}/fd/{fd}")
                if target.startswith("socket:["):
                    found.add(target[8:-1])
    return found


def abstract_sockets() -> list[tuple[str, str]]:
    """(inode, name without the leading @) of every abstract socket of this host."""
    rows = (line.split() for line in Path("/proc/net/unix").read_text(encoding="utf-8").splitlines()[1:])
    return [(row[6], row[7].removeprefix("@")) for row in rows if len(row) > 7 and row[7].startswith("@")]
