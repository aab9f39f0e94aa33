"""The folder of one run's worker sockets and stored responses, accessible to its user only.

::

    $XDG_RUNTIME_DIR, or the folder for temporary files, or /dev/shm, or /run
      penstock-4f1c09a2b7d3/       mode 0700
        lock                       held (flock(2)) as long as the run lasts
        decode-0-2                 the mailbox of a worker's second incarnation
        responses.sqlite3          stored responses, unless --response-store names a folder

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

from penstock.api.response_store import RESPONSE_STORE_FILES
from penstock.errors import ConfigError
from penstock.types import WorkerId

_NAME = re.compile(r"\.?penstock-[0-9a-f]{12}")
_LOCK = "lock"
_JUST_MADE_S = 60.0
"""A hidden folder younger than this may be about to be locked by another run."""

MOST_PATH_BYTES = 107
"""The most bytes of a socket's path (unix(7))."""

_LONGEST_NAME = 24
"""The longest name of a worker of this host with its incarnation."""

log = logging.getLogger(__name__)


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
            if _NAME.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                found = entry.stat(follow_symlinks=False)
                if found.st_uid == os.geteuid() and stat.S_IMODE(found.st_mode) == 0o700 and _is_left(entry, found):
                    _remove(Path(entry.path))


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
    """Remove the folder with its sockets, stored responses and lock; a folder with anything else stays."""
    known = (_LOCK, *RESPONSE_STORE_FILES)
    try:
        for entry in list(os.scandir(path)):
            if stat.S_ISSOCK(entry.stat(follow_symlinks=False).st_mode) or entry.name in known:
                os.unlink(entry.path)
        path.rmdir()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning("%s stays: %s", path, error.strerror or error)
