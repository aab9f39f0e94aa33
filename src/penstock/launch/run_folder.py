"""The folder of one run: its worker sockets, stored responses, and what it serves; accessible to its user only.

::

    $XDG_RUNTIME_DIR, or the folder for temporary files, or /dev/shm, or /run
      penstock-4f1c09a2b7d3/       mode 0700
        lock                       held (flock(2)) as long as the run lasts
        decode-0-2                 the mailbox of a worker's second incarnation
        responses.sqlite3          stored responses, unless --response-store names a folder
        service.json               a ServiceRecord, once the service is ready; `penstock ps` reads it

The folder of a killed run stays; the next run of the same user on this host removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import msgspec

from penstock.api.response_store import RESPONSE_STORE_FILES
from penstock.errors import ConfigError
from penstock.types import WorkerId

_NAME = re.compile(r"\.?penstock-[0-9a-f]{12}")
_LOCK = "lock"
_RECORD = "service.json"
_OWN_FILES = (_LOCK, _RECORD, f"{_RECORD}.new", *RESPONSE_STORE_FILES)
_MAX_RECORD_BYTES = 64 << 10
_JUST_MADE_S = 60.0
"""A hidden folder younger than this may be about to be locked by another run."""

MOST_PATH_BYTES = 107
"""The most bytes of a socket's path (unix(7))."""

_LONGEST_NAME = 24
"""The longest name of a worker of this host with its incarnation."""

log = logging.getLogger(__name__)


class ServiceRecord(msgspec.Struct, frozen=True, kw_only=True):
    """A service that is ready, for other commands of its user on its host."""

    pid: int  # of the supervisor
    url: str
    model: str  # its name for clients; empty: a catalog
    path: str = ""  # the model's folder or file
    generates: bool = True  # text; not embeddings, scores or transcriptions
    needs_key: bool = False
    stops_with_parent: bool = False  # it belongs to the process that started it


_decode_record = msgspec.json.Decoder(ServiceRecord).decode


def running_services(bases: Iterable[Path] | None = None) -> list[ServiceRecord]:
    """The services of this user on this host that are ready, the latest last."""
    found: dict[int, tuple[int, ServiceRecord]] = {}  # by process: when it was ready, and what it serves
    for base in default_bases() if bases is None else bases:
        with contextlib.suppress(OSError):
            for entry in os.scandir(base):
                if _is_own_folder(entry) and not entry.name.startswith(".") and not _is_left(entry, entry.stat()):
                    record = _read_record(Path(entry.path))
                    if record is not None:
                        found[record[1].pid] = record
    return [record for _, record in sorted(found.values(), key=lambda found: found[0])]


def _read_record(folder: Path) -> tuple[int, ServiceRecord] | None:
    """When it was written (ns), and what it says.  None: the service is not ready, or is no service."""
    try:
        with (folder / _RECORD).open("rb") as file:
            return os.fstat(file.fileno()).st_mtime_ns, _decode_record(file.read(_MAX_RECORD_BYTES))
    except (OSError, msgspec.DecodeError):
        return None


class RunFolder:
    """The folder of one run.  ``close`` removes it with its content."""

    def __init__(self, bases: Iterable[Path] | None = None) -> None:
        """Create it in the first of ``bases`` that exists and is writable.  Raises ConfigError if none is."""
        tried: list[str] = []
        for base in default_bases() if bases is None else bases:
            try:
                remove_stale_folders(base)
                self.path, self._lock = _made(base)
            except OSError as error:
                tried.append(f"{base}: {error.strerror or error}")
                continue
            return
        raise ConfigError(
            "workers need a folder for their sockets, and none can be made: "
            f"{'; '.join(tried)}. Set XDG_RUNTIME_DIR or TMPDIR to one that this user can write"
        )

    def endpoint(self, worker: WorkerId, incarnation: int) -> str:
        """Where this incarnation listens.  The socket of the previous one is removed."""
        with contextlib.suppress(FileNotFoundError):
            (self.path / f"{worker}-{incarnation - 1}").unlink()
        return f"ipc://{self.path / f'{worker}-{incarnation}'}"

    def publish(self, record: ServiceRecord) -> None:
        """Write down what is served here, for ``running_services``."""
        new = self.path / f"{_RECORD}.new"
        new.write_bytes(msgspec.json.encode(record))
        new.replace(self.path / _RECORD)

    def close(self) -> None:
        """May be called twice."""
        _remove(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def default_bases() -> list[Path]:
    """The parent folders to try, in order."""
    own = os.environ.get("XDG_RUNTIME_DIR")
    named = [Path(own)] if own else []
    return [*named, Path(tempfile.gettempdir()), Path("/tmp"), Path("/dev/shm"), Path("/run")]  # noqa: S108 - mode 0700


def _made(base: Path) -> tuple[Path, int]:
    """A new folder, and its lock.  Raises OSError."""
    path = base.absolute() / f"penstock-{secrets.token_hex(6)}"
    if len(os.fsencode(path)) + 1 + _LONGEST_NAME > MOST_PATH_BYTES:
        raise OSError(0, "its name is too long for a socket")
    hidden = path.with_name(f".{path.name}")  # until it is locked
    hidden.mkdir(mode=0o700)
    try:
        lock = os.open(hidden / _LOCK, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        hidden.rename(path)
    except OSError:
        _remove(hidden)
        raise
    return path, lock


def remove_stale_folders(base: Path) -> None:
    """Remove the folders of this user's killed runs in ``base``."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(base):
            if _is_own_folder(entry) and _is_left(entry, entry.stat(follow_symlinks=False)):
                _remove(Path(entry.path))


def _is_own_folder(entry: os.DirEntry[str]) -> bool:
    """Whether this is the folder of a run of this user."""
    if not _NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
        return False
    found = entry.stat(follow_symlinks=False)
    return found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700


def _is_left(entry: os.DirEntry[str], found: os.stat_result) -> bool:
    """Whether the folder's run has ended."""
    if entry.name.startswith(".") and time.time() - found.st_mtime < _JUST_MADE_S:
        return False
    try:
        lock = os.open(Path(entry.path) / _LOCK, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True


def _remove(path: Path) -> None:
    """Remove the folder with its sockets, record, stored responses and lock; one with anything else stays."""
    try:
        for entry in list(os.scandir(path)):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) or entry.name in _OWN_FILES:
                os.unlink(entry.path)
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s stays: %s", path, error.strerror or error)
