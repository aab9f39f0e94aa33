"""F10: out of file descriptors, out of memory."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
from dataclasses import dataclass, replace
from pathlib import Path

import httpx
from bench.faults.result import Budget, Result, judged

from cluster.processes import alive
from cluster.server import PenstockServer
from cluster.streams import all_answers
from cluster.varied import varied_requests

DESCRIPTORS = 128
FLOOD = 400
CGROUPS = Path("/sys/fs/cgroup")


def f10(budget: Budget) -> Result:
    """The gateway may open no more files while connections pour in; a worker is ended for want of memory."""
    checks: dict[str, bool] = {}
    figures: dict[str, object] = {}
    bodies = varied_requests(max_tokens=30)[:8]
    with PenstockServer(["--decode", "2"]) as server:
        wanted = asyncio.run(all_answers(server.url, bodies, together=False))
        gateway = server.gateway_pid()
        _, hard = resource.prlimit(gateway, resource.RLIMIT_NOFILE)
        resource.prlimit(gateway, resource.RLIMIT_NOFILE, (DESCRIPTORS, hard))
        with contextlib.ExitStack() as stack:
            opened = 0
            for _ in range(FLOOD):
                with contextlib.suppress(OSError):
                    stack.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=1))
                    opened += 1
        server.wait_for(lambda: _answers(server), 30.0, "answering again")
        checks["not the same gateway after a flood"] = server.gateway_pid() == gateway
        resource.prlimit(gateway, resource.RLIMIT_NOFILE, (hard, hard))
        figures |= {"connections": opened, "descriptors": DESCRIPTORS}
        checks["answers differ after a flood"] = _same(server, bodies, wanted)
        killed = _out_of_memory(server)
        figures["out of memory"] = {True: "killed and replaced", False: "not replaced", None: "not run"}[killed]
        checks["a worker without memory was not replaced"] = killed is not False
        checks["answers differ after a lack of memory"] = _same(server, bodies, wanted)
        server.wait_idle(10.0)
        checks["pages leaked"] = all(row["kv_pages_leaked"] == 0 for row in server.workers())
    return with_memory(judged("F10", "out of file descriptors, out of memory", checks, figures), killed)


def with_memory(result: Result, killed: bool | None) -> Result:
    """What could not be run to its end has not held."""
    if result.held and killed is None:
        return replace(result, held=None, why="half of it was not run: that needs root and a memory cgroup")
    return result


@dataclass(frozen=True)
class MemoryGroup:
    """A memory cgroup of our own, of whichever version this host has."""

    folder: Path
    limits: tuple[tuple[str, str], ...]  # files and what is written to them, so that there is no room for one more page

    @classmethod
    def under(cls, cgroups: Path) -> MemoryGroup | None:
        """Where one can be made; None where this host has no memory controller."""
        name = f"penstock-bench-{os.getpid()}"
        if (cgroups / "memory" / "cgroup.procs").exists():  # version 1
            limits = (("memory.swappiness", "0"), ("memory.limit_in_bytes", "0"))
            return cls(cgroups / "memory" / name, limits)
        with contextlib.suppress(OSError):
            if "memory" in (cgroups / "cgroup.controllers").read_text().split():  # version 2
                enabled = cgroups / "cgroup.subtree_control"
                if "memory" not in enabled.read_text().split():
                    enabled.write_text("+memory")
                return cls(cgroups / name, (("memory.swap.max", "0"), ("memory.max", "0")))
        return None

    def take(self, pid: int) -> None:
        """From now on no new page for this process.  Raises OSError."""
        (self.folder / "cgroup.procs").write_text(str(pid))
        for name, value in self.limits:
            if name.startswith("memory.sw") and not (self.folder / name).exists():
                continue  # a kernel without swap
            (self.folder / name).write_text(value)


def _answers(server: PenstockServer) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return server.get("/ready").status_code == 200
    return False


def _same(server: PenstockServer, bodies: list, wanted: list) -> bool:
    got = asyncio.run(all_answers(server.url, bodies, together=True))
    return [one.identical for one in got] == [one.identical for one in wanted]


def _all_ready(server: PenstockServer) -> bool:
    with contextlib.suppress(AssertionError):
        server.wait_all_ready(30.0)
        return True
    return False


def _out_of_memory(server: PenstockServer) -> bool | None:
    """A worker whose memory cgroup has no room for one more page: the kernel ends it.  Was it replaced?  None without
    cgroups of ours, and when it lived.

    What it has already stays with the group that it came from; whatever it touches from now on is too much.
    """
    group = MemoryGroup.under(CGROUPS)
    victim = next(row for row in server.workers() if row["role"] == "decode")
    if group is None:
        return None
    try:
        group.folder.mkdir()
    except OSError:
        return None
    try:
        try:
            group.take(victim["pid"])
        except OSError:
            return None
        bodies = [body | {"cache_salt": "new"} for body in varied_requests(max_tokens=200)]
        asyncio.run(all_answers(server.url, bodies[:12], together=True))
        if alive(victim["pid"]):
            with contextlib.suppress(OSError):  # it may just be ending
                (group.folder.parent / "cgroup.procs").write_text(str(victim["pid"]))
            return None  # it needed no new memory
        return _all_ready(server)
    finally:
        with contextlib.suppress(OSError):
            group.folder.rmdir()
