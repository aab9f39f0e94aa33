"""``penstock status``: what a running service serves, how fast, and every worker, for people or as JSON.

Asks ``GET /admin/workers``; knows nothing else about the service.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from penstock.cli.openai_client import add_service_flags, request_json
from penstock.cli.parsing import COMMANDS
from penstock.config.kv_memory import format_size
from penstock.config.load import load_client
from penstock.errors import ConfigError, WorkerError

EPILOG = """\
examples:
  penstock status
  penstock status --watch            again every two seconds, with tokens a second; Ctrl-C ends
  penstock status --url http://10.0.0.7:8000 --json
"""

COLUMNS = ("id", "role", "pid", "state", "cores", "running", "queued", "kv_pages_used", "kv_pages_free")
MORE_COLUMNS = ("incarnation", "steps", "borrowed_core_seconds", "kv_pages_loading", "kv_pages_leaked")
"""With --verbose."""
MODEL_COLUMNS = ("name", "state", "pinned", "bytes", "requests", "loads", "reason")
"""Of a catalogue's models."""
JOINING_COLUMNS = ("endpoint", "reason")
"""Of workers that were asked to be joined."""
TIER_COLUMNS = ("worker", "tier", "pages", "pages_read", "pages_written", "pages_corrupt", "errors")
"""Of the tiers of workers' KV stores."""
RANK_COLUMNS = ("worker", "rank", "node", "pid", "weights", "kv_pages", "step_cpu_s")
"""With --verbose: of workers whose ranks divide the model."""


RATE_S = 1.0
"""Over which tokens a second are counted, where something runs."""

WATCH_S = 2.0
CLEAR = "\x1b[H\x1b[J"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "status",
        help=COMMANDS["status"],
        description="Show what a running service serves, how fast, and its workers.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    add_service_flags(parser)
    parser.add_argument("--timeout", type=float, default=5.0, metavar="S", help="default: %(default)g s")
    parser.add_argument(
        "-v",
        "--verbose",
        action="store_true",
        help="more columns: steps, pages leaked, ...; ranks of workers that have them",
    )
    parser.add_argument(
        "--watch",
        nargs="?",
        type=float,
        const=WATCH_S,
        metavar="S",
        help=f"again every S seconds (default: {WATCH_S:g})",
    )
    parser.add_argument("--json", action="store_true", help='print {"workers": [...], ...}; with --watch one a line')


def run(args: argparse.Namespace) -> int:
    """0 with the list; raises WorkerError when nothing answers, ConfigError for a bad URL."""
    url, api_key = load_client(args.url, args.api_key)
    if args.watch is not None and not 0.1 <= args.watch <= 3600:
        raise ConfigError(f"--watch {args.watch:g}: expected 0.1 to 3600 seconds")
    found, asked = fetch_status(url, api_key, args.timeout), time.monotonic()
    if args.watch is None:
        if args.json:
            print(json.dumps(found))
            return 0
        before = found
        if any(row.get("running") for row in found["workers"]):
            time.sleep(RATE_S)  # tokens are counted over this long
            found = fetch_status(url, api_key, args.timeout)
        sys.stdout.write(status_page(found, rates(before, found, time.monotonic() - asked), url, verbose=args.verbose))
        return 0
    before = found
    while True:
        took = time.monotonic() - asked
        shown = rates(before, found, took)
        if args.json:
            print(json.dumps(found), flush=True)
        else:
            clear = CLEAR if sys.stdout.isatty() else ""
            print(clear + status_page(found, shown, url, verbose=args.verbose), flush=True)
        before, asked = found, time.monotonic()
        time.sleep(args.watch)
        found = fetch_status(url, api_key, args.timeout)


def rates(before: dict[str, Any], after: dict[str, Any], seconds: float) -> tuple[float, float]:
    """Tokens a second that all workers together prefilled and generated between two looks."""
    earlier = {(row.get("id"), row.get("incarnation")): row for row in before["workers"]}
    found = []
    for name in ("prompt_tokens_computed", "generation_tokens"):
        count = sum(
            row.get(name, 0) - earlier.get((row.get("id"), row.get("incarnation")), {}).get(name, 0)
            for row in after["workers"]
        )
        found.append(max(0.0, count / seconds) if seconds > 0 else 0.0)
    return found[0], found[1]


def status_page(found: dict[str, Any], speeds: tuple[float, float], url: str, *, verbose: bool) -> str:
    """Everything that is shown of one look."""
    parts = [summary_lines(found, speeds, url)]
    if "models" in found:
        models = [row | {"bytes": format_size(row.get("bytes", 0))} for row in found["models"]]
        parts.append(rows_table(models, MODEL_COLUMNS))
    columns = COLUMNS + (MORE_COLUMNS if verbose else ())
    if any(row.get("reason") for row in found["workers"]):
        columns += ("reason",)
    parts.append(rows_table(found["workers"], columns))
    if found.get("joining"):
        parts.append("waiting for workers to join:\n" + rows_table(found["joining"], JOINING_COLUMNS))
    tiers = [{"worker": row.get("id"), **tier} for row in found["workers"] for tier in row.get("kv_tiers", ())]
    if tiers:
        parts.append(rows_table(tiers, TIER_COLUMNS))
    ranks = [{"worker": row.get("id"), **rank} for row in found["workers"] for rank in row.get("ranks", ())]
    if verbose and ranks:
        parts.append(rows_table([row | _rank_sizes(row) for row in ranks], RANK_COLUMNS))
    return "\n".join(part for part in parts if part)


def _rank_sizes(rank: dict[str, Any]) -> dict[str, Any]:
    """What a rank has and has spent, for people."""
    return {
        "weights": format_size(rank.get("weight_bytes", 0)),
        "kv_pages": format_size(rank.get("kv_bytes", 0)),
        "step_cpu_s": round(rank.get("step_cpu_s", 0.0), 2),
    }


def summary_lines(found: dict[str, Any], speeds: tuple[float, float], url: str) -> str:
    """``storyteller at http://127.0.0.1:8000, up 3 h: 12 running, 0 queued, 340 tokens/s out, 1,200 in, KV 41 %``"""
    service, workers = found.get("service"), found["workers"]
    if service is None:
        return ""

    def total(name: str) -> int:
        return int(sum(row.get(name, 0) for row in workers))

    used, free = total("kv_pages_used"), total("kv_pages_free")
    share = f", KV {100 * used / (used + free):.0f} %" if used + free else ""
    return (
        f"{service['model']} (context {service['max_model_len']:,}) at {url}, penstock {service['version']}, up "
        f"{format_duration(service['uptime_s'])}\n"
        f"{total('running')} running, {total('queued')} queued; {speeds[1]:,.0f} tokens/s generated, "
        f"{speeds[0]:,.0f} prefilled{share}\n"
    )


def format_duration(seconds: float) -> str:
    """``45 s``, ``12 min``, ``3 h``, ``5 days``."""
    for limit, divisor, unit in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{seconds // divisor:.0f} {unit}"
    return f"{seconds // 86_400:.0f} days"


def fetch_status(url: str, api_key: str | None, timeout_s: float) -> dict[str, Any]:
    """The answer of ``/admin/workers``: the ``service``, and rows of ``workers``, of a catalogue's ``models``, and of
    workers that are still ``joining``."""
    status, found = request_json(url, api_key, timeout_s, "/admin/workers")
    rows: dict[str, Any] = {}
    if status == 200 and isinstance(found, dict):
        rows = {name: found[name] for name in ("service", "workers", "models", "joining") if name in found}
    lists = all(isinstance(rows[name], list) for name in rows if name != "service")
    if "workers" not in rows or not lists or not isinstance(rows.get("service", {}), dict):
        raise WorkerError(f"{url} answered {status}, but not as a Penstock does")
    return rows


def rows_table(workers: list[dict[str, Any]], columns: Sequence[str] = COLUMNS) -> str:
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
