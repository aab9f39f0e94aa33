"""``penstock status``: every worker of a running service, for people or as JSON.

Asks ``GET /admin/workers``; knows nothing else about the service.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from penstock.cli.asking import add_service_flags, ask
from penstock.cli.parsing import COMMANDS
from penstock.config.load import load_client
from penstock.errors import WorkerError

EPILOG = """\
examples:
  penstock status
  penstock status --url http://10.0.0.7:8000 --json
"""

COLUMNS = (
    "id",
    "role",
    "pid",
    "state",
    "cores",
    "borrowed_core_seconds",
    "running",
    "queued",
    "kv_pages_used",
    "kv_pages_free",
    "kv_pages_leaked",
)
MODEL_COLUMNS = ("name", "state", "pinned", "bytes", "requests", "loads", "reason")
"""Of a catalogue's models."""
JOINING_COLUMNS = ("endpoint", "reason")
"""Of workers that were asked to be joined."""
TIER_COLUMNS = ("worker", "tier", "pages", "pages_read", "pages_written", "pages_corrupt", "errors")
"""Of the tiers of workers' KV stores."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "status",
        help=COMMANDS["status"],
        description="List the workers of a running service.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_service_flags(parser)
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="default: %(default)g s")
    parser.add_argument("--json", action="store_true", help='print {"workers": [...]}')


def run(args: argparse.Namespace) -> int:
    """0 with the list; raises WorkerError when nothing answers, ConfigError for a bad URL."""
    url, api_key = load_client(args.url, args.api_key)
    found = fetch(url, api_key, args.timeout)
    if args.json:
        print(json.dumps(found))
        return 0
    if "models" in found:
        sys.stdout.write(table(found["models"], MODEL_COLUMNS) + "\n")
    sys.stdout.write(table(found["workers"]))
    if found.get("joining"):
        sys.stdout.write("\nwaiting for workers to join:\n" + table(found["joining"], JOINING_COLUMNS))
    tiers = [{"worker": row.get("id"), **tier} for row in found["workers"] for tier in row.get("kv_tiers", ())]
    if tiers:
        sys.stdout.write("\n" + table(tiers, TIER_COLUMNS))
    return 0


def fetch(url: str, api_key: str | None, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """The answer of ``/admin/workers``: rows of ``workers``, and of a catalogue's ``models``."""
    status, found = ask(url, api_key, timeout_s, "/admin/workers")
    rows: dict[str, Any] = {}
    if status == 200 and isinstance(found, dict):
        rows = {name: found[name] for name in ("workers", "models", "joining") if name in found}
    if "workers" not in rows or not all(isinstance(own, list) for own in rows.values()):
        raise WorkerError(f"{url} answered {status}, but not as a Penstock does")
    return rows


def table(workers: list[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> str:
    """The rows for people: one line each, numbers to the right."""
    if not workers:
        return "no workers\n"
    heads = [name.removeprefix("kv_").replace("_", " ") for name in columns]
    rows = [heads, *([str(row.get(name, "")) for name in columns] for row in workers)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(columns))]
    numeric = [all(isinstance(row.get(name), (int, float)) for row in workers) for name in columns]
    lines = (
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, numeric, strict=True)
        ).rstrip()
        for row in rows
    )
    return "\n".join(lines) + "\n"
