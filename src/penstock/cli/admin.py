"""``penstock admin``: tells workers of a running service to take another role, to drain, or to restart.

Asks ``POST /admin/workers/{id}/...``; what may be done is the service's to say.
"""

from __future__ import annotations

import argparse
import time
from typing import Any
from urllib.parse import quote

from penstock.cli.openai_client import add_service_flags, request_json
from penstock.cli.parsing import COMMANDS
from penstock.cli.status import fetch_status
from penstock.config.load import load_client
from penstock.errors import ConfigError, WorkerError

EPILOG = """\
examples:
  penstock admin role decode-1 prefill      it reads prompts from now on; answers that it writes go on elsewhere
  penstock admin drain decode-0             it takes nothing new and hands its answers over; it stays up
  penstock admin resume decode-0            it takes requests again
  penstock admin restart decode-0           drain, then start it anew
  penstock admin restart --all              one worker after the other: a rolling restart

`penstock status` lists the workers.  Nothing that runs is lost by any of these.
"""

ROLES = ("prefill", "decode", "both")
LOOK_S = 0.05
"""Between two looks at a worker that restarts."""

LAST_OF_ITS_ROLE = "last_of_its_role"
"""The code of a refusal that ``--force`` overrules."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "admin",
        help=COMMANDS["admin"],
        description="Tell workers of a running service to take another role, to drain, or to restart.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(title="verbs", dest="verb", metavar="VERB", required=True)
    role = _verb(verbs, "role", "give a worker another role while it serves")
    role.add_argument("workers", nargs=1, metavar="WORKER", help="its id, as `penstock status` shows it")
    role.add_argument("role", choices=ROLES, metavar="ROLE", help="prefill, decode or both")
    for name, text in (
        ("drain", "take nothing new; let others go on with the worker's answers"),
        ("resume", "take requests again"),
        ("restart", "drain workers and start them anew, one after the other"),
    ):
        verb = _verb(verbs, name, text)
        verb.add_argument("workers", nargs="*" if name == "restart" else "+", metavar="WORKER")
        if name == "restart":
            verb.add_argument("--all", action="store_true", help="every worker")
    parser.set_defaults(run=run)


def _verb(verbs: argparse._SubParsersAction[argparse.ArgumentParser], name: str, text: str) -> argparse.ArgumentParser:
    verb = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    add_service_flags(verb)
    verb.add_argument("--timeout", type=float, default=60.0, metavar="S", help="default: %(default)g s")
    verb.add_argument("--force", action="store_true", help="even if no worker is left for a part of the service")
    return verb


def run(args: argparse.Namespace) -> int:
    """0 when it is done; raises ConfigError for what cannot be, WorkerError when it was not done in time."""
    service = _Service(*load_client(args.url, args.api_key), args.timeout)
    workers = list(args.workers)
    if args.verb == "restart":
        if bool(workers) == args.all:
            raise ConfigError("restart: name the workers, or say --all")
        workers = workers or [row["id"] for row in service.rows()]
    for worker in workers:
        began = time.monotonic()
        before = service.row(worker).get("incarnation") if args.verb == "restart" else None
        row = service.post(worker, args.verb, {"role": args.role} if args.verb == "role" else {}, force=args.force)
        if before is not None:
            row = service.wait_restarted(worker, before)
        print(f"{worker}: {row.get('role')}, {row.get('state')} ({time.monotonic() - began:.2f} s)")
    return 0


class _Service:
    """The one that is asked."""

    def __init__(self, url: str, api_key: str | None, timeout_s: float) -> None:
        self._url, self._key, self._timeout_s = url, api_key, timeout_s

    def rows(self) -> list[dict[str, Any]]:
        """All workers."""
        rows: list[dict[str, Any]] = fetch_status(self._url, self._key, self._timeout_s)["workers"]
        return rows

    def row(self, worker: str) -> dict[str, Any]:
        """One of them; empty for one that there is not, which the service words better."""
        return next((row for row in self.rows() if row.get("id") == worker), {})

    def post(self, worker: str, verb: str, what: dict[str, Any], *, force: bool) -> dict[str, Any]:
        """Its row afterwards."""
        body = what | ({"force": True} if force else {})
        path = f"/admin/workers/{quote(worker, safe='')}/{verb}"
        status, found = request_json(self._url, self._key, self._timeout_s, path, body)
        if status == 200 and isinstance(found, dict):
            return found
        error = found.get("error") if isinstance(found, dict) else None
        text = error.get("message") if isinstance(error, dict) else None
        if text is None:
            raise WorkerError(f"{self._url} answered {status}, but not as a Penstock does")
        if isinstance(error, dict) and error.get("code") == LAST_OF_ITS_ROLE:
            text = text.partition(", or insist with")[0].rstrip(".") + ", or add --force."
        raise ConfigError(text) if status < 500 else WorkerError(text)

    def wait_restarted(self, worker: str, before: int) -> dict[str, Any]:
        """Until a later incarnation is ready."""
        until = time.monotonic() + self._timeout_s
        while time.monotonic() < until:
            row = self.row(worker)
            if row.get("incarnation", before) != before and row.get("state") == "ready":
                return row
            time.sleep(LOOK_S)
        raise WorkerError(f"{worker} has not come back within {self._timeout_s:g} s; look at `penstock status`")
