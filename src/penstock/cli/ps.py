"""``penstock ps``: the services of this user that run on this host, for people or as JSON.

Finds them by their run folders, asks each ``GET /admin/workers``, and reads the memory of its processes from /proc.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from penstock.cli.console import text_table
from penstock.cli.openai_client import request_json
from penstock.cli.parsing import COMMANDS
from penstock.cli.status import format_duration
from penstock.config.kv_memory import format_size
from penstock.config.load import load_client
from penstock.errors import PenstockError
from penstock.launch.run_folder import ServiceRecord, running_services

EPILOG = """\
examples:
  penstock ps
  penstock ps --json | jq -r '.services[].url'

Only services of this user on this host that are ready; `penstock status --url URL` shows one of them, on any host.
The memory counts weights once that processes share.
"""

HEADS = ("model", "url", "pid", "up", "workers", "running", "queued", "memory")
NUMERIC = (2, 4, 5, 6, 7)
NONE_RUNS = "No service of yours runs on this host.  Start one: penstock serve MODEL, or penstock run MODEL"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "ps",
        help=COMMANDS["ps"],
        description="List the services that run on this host.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--api-key", metavar="KEY", help="for services that need one; default: PENSTOCK_API_KEY")
    parser.add_argument("--timeout", type=float, default=2.0, metavar="S", help="for each; default: %(default)g s")
    parser.add_argument("--json", action="store_true", help='print {"services": [...]}')


def run(args: argparse.Namespace) -> int:
    """0 with the list, which may be empty."""
    _, api_key = load_client(None, args.api_key)
    processes = children_by_parent()
    rows = [service_row(record, api_key, args.timeout, processes) for record in running_services()]
    if args.json:
        print(json.dumps({"services": rows}))
    elif not rows:
        print(NONE_RUNS)
    else:
        print(text_table([_cells(row) for row in rows], headers=[head.upper() for head in HEADS], right=NUMERIC))
        for row in rows:
            if row["error"]:
                print(f"{row['url']}: {row['error']}")
    return 0


def service_row(
    record: ServiceRecord, api_key: str | None, timeout_s: float, processes: dict[int, list[int]]
) -> dict[str, Any]:
    """What is known of one service; counts are None if it does not tell them (``error`` says why)."""
    row: dict[str, Any] = {
        "model": record.model or "(catalogue)",
        "url": record.url,
        "pid": record.pid,
        "path": record.path,
        "uptime_s": process_age_s(record.pid),
        "memory_bytes": memory_bytes([record.pid, *descendants(record.pid, processes)]),
        "workers": None,
        "running": None,
        "queued": None,
        "error": None,
    }
    try:
        status, found = request_json(record.url, api_key if record.needs_key else None, timeout_s, "/admin/workers")
    except PenstockError as error:
        return row | {"error": str(error)}
    workers = found.get("workers") if status == 200 and isinstance(found, dict) else None
    if not isinstance(workers, list):
        return row | {"error": f"/admin/workers answers {status}"}
    totals = {name: sum(worker.get(name, 0) for worker in workers) for name in ("running", "queued")}
    return row | totals | {"workers": len(workers)}


def _cells(row: dict[str, Any]) -> list[str]:
    shown = {
        **row,
        "up": "" if row["uptime_s"] is None else format_duration(row["uptime_s"]),
        "memory": format_size(row["memory_bytes"]),
    }
    return ["?" if shown[head] is None else str(shown[head]) for head in HEADS]


def process_age_s(pid: int) -> float | None:
    """Seconds since the process started (proc_pid_stat(5)); None: it has gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace")
    except OSError:
        return None
    started = int(stat.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)


def children_by_parent() -> dict[int, list[int]]:
    """The ids of all processes on this host, by that of their parent."""
    found: dict[int, list[int]] = defaultdict(list)
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            stat = Path(f"/proc/{name}/stat").read_text(encoding="ascii", errors="replace")
        except OSError:  # it has just ended
            continue
        found[int(stat.rpartition(")")[2].split()[1])].append(int(name))
    return dict(found)


def descendants(pid: int, children: dict[int, list[int]]) -> list[int]:
    """All processes below this one."""
    found = list(children.get(pid, ()))
    for child in found:  # grows meanwhile
        found += children.get(child, ())
    return found


def memory_bytes(pids: list[int]) -> int:
    """An estimate for a supervisor, the first, and the processes that it forked.

    Each shares the supervisor's anonymous memory, which has the weights, and adds its own.  Proportional shares would
    be exact, but a worker's cannot be read by its own user.
    """
    sizes = [resident_sizes(pid) for pid in pids]
    shared = sizes[0].get("RssAnon", 0)
    own = sum(max(0, size.get("RssAnon", 0) - shared) + size.get("RssShmem", 0) for size in sizes)
    return shared + own + max(size.get("RssFile", 0) for size in sizes)


def resident_sizes(pid: int) -> dict[str, int]:
    """Bytes by name, such as ``RssAnon`` (proc_pid_status(5)); empty: the process has gone."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return {}
    return {line.split(":")[0]: int(line.split()[1]) << 10 for line in lines if line.startswith("Rss")}
