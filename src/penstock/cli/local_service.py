"""A service for one command: one that runs on this host, or ``penstock serve`` as a child until the command ends.

The child has a session of its own, so the terminal's signals do not reach it, and stops when this process ends, however
that is.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import penstock
from penstock.bundled import STORYTELLER
from penstock.cli.console import StatusLine
from penstock.config.base import expanded_path
from penstock.errors import ConfigError, WorkerError
from penstock.launch.run_folder import ServiceRecord, running_services
from penstock.sidecar import python_command

LOG_TAIL_BYTES = 16 << 10
POLL_S = 0.05
FOLDER_PREFIX = "penstock-own-"
JUST_MADE_S = 60.0
"""A folder younger than this may be about to be locked."""

STOP_S = 40.0
"""How long an orderly end may take before the service is killed."""

_ERROR = "penstock: error: "
_LOG_LINE = re.compile(r"^[\d:.]+ ([IWEC]) \S+ +(.*)$")


def find_service(model: str | None) -> ServiceRecord | None:
    """The latest service of this user on this host with this model (its name, folder or file; None: any model).

    Not those that other commands started for themselves.
    """
    wanted = None if model is None else {model, str(expanded_path(model, "MODEL").resolve())}
    services = [record for record in running_services() if record.model and record.generates]
    shared = [record for record in services if not record.stops_with_parent]
    return next((one for one in reversed(shared) if wanted is None or wanted & {one.model, one.path}), None)


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that only this user can read, removed at the end of the block.

    Those that killed processes left are removed, too: the lock in a folder is held as long as its process lives.
    """
    base = Path(tempfile.gettempdir())
    for left in base.glob(f"{FOLDER_PREFIX}*"):
        with contextlib.suppress(OSError):
            found = left.lstat()
            old = time.time() - found.st_mtime > JUST_MADE_S
            if old and found.st_uid == os.geteuid() and _is_unlocked(left / "lock"):
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=FOLDER_PREFIX) as name, (Path(name) / "lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield Path(name)


def _is_unlocked(path: Path) -> bool:
    """Raises OSError where there is none: a folder that is being made."""
    with path.open("rb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True


@contextlib.contextmanager
def started_service(model: str | None, folder: Path, flags: Sequence[str] = ()) -> Iterator[ServiceRecord]:
    """``penstock serve`` on any free port until the end of the block; its log is in ``folder``.

    Shows how the start goes.  ``model`` as ``penstock serve`` takes it; None or storyteller: the bundled one.  Raises
    ConfigError with the service's own last words if it cannot start.
    """
    model = None if model == STORYTELLER and not Path(model).exists() else model
    words = [
        "serve",
        *([] if model is None else [model]),
        "--port",
        "0",
        "--stop-with-parent",
        str(os.getpid()),
        *flags,
    ]
    log = folder / "service.log"
    package = str(Path(penstock.__file__).parent.parent)
    with log.open("wb") as out:
        process = subprocess.Popen(
            python_command("penstock", *words),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))},
            start_new_session=True,
        )
    try:
        with StatusLine(f"starting {model or STORYTELLER}") as status:
            record = _wait_ready(process, log, status)
        yield record
        if process.poll() is not None:
            last = "; ".join(service_failures(log)[-2:])
            print(f"penstock: the service ended with {process.returncode} meanwhile: {last}", file=sys.stderr)
    finally:
        _stop(process)


def _wait_ready(process: subprocess.Popen[bytes], log: Path, status: StatusLine) -> ServiceRecord:
    while True:
        record = next((one for one in running_services() if one.pid == process.pid), None)
        if record is not None:
            return record
        if process.poll() is not None:
            _raise_last_words(process.returncode, log)
        status.show(last_words(log))
        time.sleep(POLL_S)


def _raise_last_words(code: int, log: Path) -> NoReturn:
    lines = _tail(log)
    errors = [line.removeprefix(_ERROR) for line in lines if line.startswith(_ERROR)]
    if errors:
        raise ConfigError(errors[-1])
    raise WorkerError(f"the service ended with {code} before it was ready: {' / '.join(lines[-3:])}")


def last_words(log: Path) -> str:
    """The text of the last line of a service's log, without time and process."""
    lines = _tail(log)
    match = _LOG_LINE.match(lines[-1]) if lines else None
    return match[2] if match else ""


def service_failures(log: Path) -> list[str]:
    """The warnings and errors at the end of a service's log."""
    matches = filter(None, map(_LOG_LINE.match, _tail(log)))
    return [match[2] for match in matches if match[1] in "WEC"]


def _tail(log: Path) -> list[str]:
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_TAIL_BYTES))
        return file.read().decode(errors="replace").splitlines()


def _stop(process: subprocess.Popen[bytes]) -> None:
    """An orderly end; killed if that takes too long."""
    if process.poll() is None:
        process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """In the block, SIGTERM and SIGHUP raise SystemExit, so that what was started is stopped and removed."""

    def leave(signum: int, frame: object) -> NoReturn:
        raise SystemExit(128 + signum)

    caught = [signum for signum in (signal.SIGTERM, signal.SIGHUP) if signal.getsignal(signum) != signal.SIG_IGN]
    before = {signum: signal.signal(signum, leave) for signum in caught}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
