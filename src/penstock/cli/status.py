"""``penstock status``: every worker of a running service, for people or as JSON.

Asks ``GET /admin/workers``; knows nothing else about the service.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from penstock.config.load import load_client
from penstock.errors import ConfigError, WorkerError

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

_MAX_ANSWER_BYTES = 4 << 20


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "status",
        help="list the workers of a running service",
        description="List the workers of a running service.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--url", default=None, metavar="URL", help="default: PENSTOCK_URL or http://127.0.0.1:8000")
    parser.add_argument("--api-key", default=None, metavar="KEY", help="default: PENSTOCK_API_KEY")
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
    return 0


def fetch(url: str, api_key: str | None, timeout_s: float) -> dict[str, list[dict[str, Any]]]:
    """The answer of ``/admin/workers``: rows of ``workers``, and of a catalogue's ``models``."""
    parts = urlsplit(url if "://" in url else f"http://{url}")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {url}: expected something like http://127.0.0.1:8000")
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = kind(parts.hostname, parts.port, timeout=timeout_s)
    except ValueError as error:  # a port that is no number
        raise ConfigError(f"--url {url}: {error}") from None
    try:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        connection.request("GET", parts.path.rstrip("/") + "/admin/workers", headers=headers)
        answer = connection.getresponse()
        body = answer.read(_MAX_ANSWER_BYTES)
    except ConnectionRefusedError:
        raise WorkerError(f"nothing listens at {url}; start it with `penstock serve`") from None
    except (OSError, http.client.HTTPException) as error:
        raise WorkerError(f"no answer from {url}: {error}") from None
    finally:
        connection.close()
    return _rows(url, answer.status, body)


def _rows(url: str, status: int, body: bytes) -> dict[str, list[dict[str, Any]]]:
    if status in (401, 403):
        raise ConfigError(f"{url} wants a key: add --api-key KEY or set PENSTOCK_API_KEY")
    try:
        found: dict[str, Any] = json.loads(body) if status == 200 else {}
        rows: dict[str, Any] = {
            name: found[name] for name in ("workers", "models") if name in found or name == "workers"
        }
    except (ValueError, KeyError, TypeError):
        rows = {}
    if not rows or not all(isinstance(own, list) for own in rows.values()):
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
