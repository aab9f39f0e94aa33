"""Files that only their owner may write, as those of keys: read with checks, replaced atomically, edited in turn."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock.errors import ConfigError


def read_private_file(path: Path, max_bytes: int, *, what: str, hint: str) -> bytes:
    """The content.  ``what`` names it in errors, and ``hint`` says how to make it.

    Raises ConfigError for a file that others than its owner may write, or that is larger than ``max_bytes``.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe in its place must not make us wait
    except OSError as error:
        raise ConfigError(f"cannot read {what} {path}: {error.strerror}; {hint}") from error
    with os.fdopen(descriptor, "rb") as file:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise ConfigError(
                f"{path} must be a file that only its owner can write; it has {stat.filemode(facts.st_mode)}"
            )
        try:
            raw = file.read(max_bytes + 1)
        except OSError as error:
            raise ConfigError(f"cannot read {what} {path}: {error.strerror}") from error
    if len(raw) > max_bytes:
        raise ConfigError(f"{path} is larger than {max_bytes} bytes")
    return raw


def replace_file(path: Path, raw: bytes) -> None:
    """Replace the file atomically, with mode 0600: a concurrent reader sees the old file or the new one.

    Raises ConfigError.
    """
    new: Path | None = None
    try:
        with tempfile.NamedTemporaryFile(dir=path.absolute().parent, prefix=f".{path.name}-", delete=False) as out:
            new = Path(out.name)
            os.fchmod(out.fileno(), 0o600)
            out.write(raw)
            out.flush()
            os.fsync(out.fileno())
        os.replace(new, path)
    except OSError as error:
        if new is not None:
            new.unlink(missing_ok=True)
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


@contextmanager
def locked_folder(folder: Path, what: str) -> Iterator[None]:
    """Made if need be, with mode 0700, and held: concurrent edits of its files wait.  Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise ConfigError(f"cannot write {what} to {folder}: {error.strerror}") from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)
