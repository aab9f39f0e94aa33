"""``penstock probe``: whether workers and gateways are ready, or alive, as an exec probe of a container asks.

A worker is asked for a report, as by a gateway that looks for workers, and remembers nothing of that.  One that answers
and makes no progress though it has requests is not alive.  Progress is a step, a page that came or went, or a piece of
an image.  What it had reported is kept in a file from one probe to the next, so each ends at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import os
import secrets
import stat
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import msgspec

from penstock.cli.parsing import COMMANDS
from penstock.config.base import expanded_path
from penstock.config.limits import ProbeLimits
from penstock.errors import ConfigError
from penstock.http_client import HttpStreamClient, StreamError
from penstock.types import WorkerState
from penstock.wire.codec import version_reason
from penstock.wire.gateway_messages import Hello, WorkerReport
from penstock.wire.node_keys import HostKeys, NodeKeys, load_host_keys
from penstock.wire.zeromq import ZmqTransport

EPILOG = """\
examples:
  penstock probe --ready --keys ~/penstock-keys tcp://127.0.0.1:9000      can requests be sent to this worker?
  penstock probe --live --keys ~/penstock-keys tcp://127.0.0.1:9000       or should it be restarted?
  penstock probe --ready http://127.0.0.1:8000                            a gateway: as its /ready and /health say

Exit code 0: all that are named are; 1: one is not, and a line says why.  `penstock manifests` writes it into the probes
of pods and containers.
"""

MAX_STATE_BYTES = 4096
AGAIN_S = 0.2
"""Between two questions: a worker that was restarted is there again in milliseconds."""

LOOK_S = 0.01
"""Between two looks at the connection: with each, another key is tried that the worker may have."""

PROGRESS = ("steps", "pages_sent", "pages_received", "image_slices", "stored_tokens")
"""Counters that grow while a worker gets on with what it has."""

LIMITS = ProbeLimits()


class ProgressMark(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a worker had done when it was last seen to get on."""

    incarnation: int
    counts: tuple[float, ...]  # of PROGRESS
    since: float  # time.monotonic() of the first probe that saw these


class Verdict(NamedTuple):
    """What a probe found.  ``mark``: to be kept for the next one."""

    problem: str | None
    mark: ProgressMark


def judge_progress(before: ProgressMark | None, report: WorkerReport, now: float, still_s: float) -> Verdict:
    """Whether a worker gets on with its requests.  A worker without any may rest."""
    counters = report.counters | {"steps": float(report.steps)}
    counts = tuple(counters.get(name, 0.0) for name in PROGRESS)
    mark = ProgressMark(incarnation=report.incarnation, counts=counts, since=now)
    busy = report.running > 0 or report.prompt_tokens > 0
    # The clock begins anew with a boot: a mark of the future is of an earlier one.
    if before is None or before.since > now or not busy:
        return Verdict(None, mark)
    if (before.incarnation, before.counts) != (mark.incarnation, mark.counts):
        return Verdict(None, mark)
    still = now - before.since
    if still <= still_s:
        return Verdict(None, before)
    return Verdict(f"{report.worker} has {report.running} requests and has made no step for {still:.0f} s", before)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = subparsers.add_parser(
        "probe",
        help=COMMANDS["probe"],
        description="Find out whether workers and gateways are ready, or alive.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("target", nargs="+", metavar="TARGET", help="tcp://HOST:PORT of a worker, or a gateway's URL")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--ready", action="store_true", help="whether requests can be sent there")
    which.add_argument("--live", action="store_true", help="whether it makes progress (default)")
    parser.add_argument("--keys", type=Path, metavar="DIR", help="the deployment's keys, for workers")
    parser.add_argument("--node", default="", metavar="NAME", help="whose keys, if DIR has a folder for each node")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=LIMITS.probe_timeout_s,
        metavar="S",
        help=f"for each answer (default: {LIMITS.probe_timeout_s:g})",
    )
    parser.add_argument(
        "--still-s",
        type=float,
        default=LIMITS.probe_still_s,
        metavar="S",
        help=f"for which a worker with requests may make no step (default: {LIMITS.probe_still_s:g})",
    )


def run(args: argparse.Namespace) -> int:
    """0 if all are, 1 if one is not; raises ConfigError for targets that are none."""
    code = 0
    for target in args.target:
        if target.startswith(("http://", "https://")):
            problem = asyncio.run(_gateway_problem(target, "/ready" if args.ready else "/health", args.timeout_s))
        elif target.startswith("tcp://"):
            if args.keys is None:
                raise ConfigError(f"{target}: a worker answers those who have the deployment's keys: add --keys DIR")
            problem = worker_problem(target, args.keys, args)
        else:
            raise ConfigError(f"{target}: expected tcp://HOST:PORT of a worker, or http://HOST:PORT of a gateway")
        print(f"{target}: {problem or ('ready' if args.ready else 'alive')}")
        code |= problem is not None
    return code


async def _gateway_problem(url: str, path: str, timeout_s: float) -> str | None:
    try:
        # Like the kubelet, it does not verify the certificate: it is the name of the service, not of this host.
        async with asyncio.timeout(timeout_s), HttpStreamClient(url, verify=False) as client:
            reply = await client.get(path)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (StreamError, ValueError) as error:
        return str(error)
    if reply.status == 200:
        return None
    text = reply.body[:MAX_STATE_BYTES].decode(errors="replace")
    return f"{path} answers {reply.status}: {text}"


def worker_problem(endpoint: str, keys: Path, args: argparse.Namespace) -> str | None:
    """Why the worker at ``endpoint`` is not ready, or not alive."""
    report = request_report(endpoint, load_host_keys(expanded_path(keys, "--keys"), args.node), args.timeout_s)
    if isinstance(report, str):
        return report
    if args.ready:
        return None if report.state is WorkerState.READY else f"{report.worker} is {report.state.value}"
    path = _state_path(endpoint)
    verdict = judge_progress(_read_mark(path), report, time.monotonic(), args.still_s)
    _write_mark(path, verdict.mark)
    return verdict.problem


def request_report(endpoint: str, keys: HostKeys, timeout_s: float) -> WorkerReport | str:
    """The report of the worker at ``endpoint``, or why there is none.  Raises ConfigError for what is no endpoint."""
    transport = ZmqTransport(keys)
    try:
        if isinstance(keys, NodeKeys):
            transport.on_proven(endpoint, keys.public)  # the first key that is tried: most ask their own workers
        link = transport.connect(endpoint)
        owner = f"{keys.node}-" if isinstance(keys, NodeKeys) else ""
        hello = Hello(gateway=f"{owner}probe-{secrets.token_hex(8)}", incarnation=1, discovery=True)
        now = time.monotonic()
        deadline, ask_at = now + timeout_s, now
        while (now := time.monotonic()) < deadline:
            if now >= ask_at:  # again: what was sent is lost with each key that is tried
                link.send(hello)
                ask_at = now + AGAIN_S
            transport.wait(min(deadline - now, LOOK_S), [link])
            received = link.recv()
            if received is not None and isinstance(received.message, WorkerReport):
                return received.message
        version = link.counters.other_version
        if version:
            return version_reason(version)
        return f"no answer within {timeout_s:g} s; a worker does not answer keys that it does not know"
    finally:
        transport.close()


def _state_path(endpoint: str) -> Path:
    name = hashlib.sha256(endpoint.encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"penstock-probe-{os.geteuid()}-{name}"


def _read_mark(path: Path) -> ProgressMark | None:
    """None: there is none, or one that this user has not written."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_uid != os.geteuid():
            return None
        try:
            return msgspec.json.decode(file.read(MAX_STATE_BYTES), type=ProgressMark)
        except (OSError, msgspec.DecodeError):
            return None


def _write_mark(path: Path, mark: ProgressMark) -> None:
    """Replaces the file, so that a reader sees one mark or the other.  Without a folder to write to, each probe is the
    first one."""
    new = path.with_name(f"{path.name}.{os.getpid()}")
    with contextlib.suppress(OSError):
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(msgspec.json.encode(mark))
            new.replace(path)
        except OSError:
            new.unlink(missing_ok=True)  # on a full disk, each probe would leave one
