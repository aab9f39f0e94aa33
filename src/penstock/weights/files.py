"""Files of weights: mapped for reading, and written atomically.  Knows bytes, not what they mean."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec

from penstock.errors import ModelError
from penstock.weights.safetensors_header import AGAIN


@dataclass(frozen=True, slots=True)
class FileRange:
    """Where a tensor's bytes lie: ``file`` is a descriptor, valid while the file is open."""

    file: int
    offset: int
    nbytes: int


class FileStamp(msgspec.Struct, frozen=True):
    """What the system knows of a file without reading it; another one when the file was written, replaced or moved."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int


class MappedFile:
    """The bytes of one file.  Views of it stay valid after ``close``."""

    def __init__(self, path: Path) -> None:
        """Raises ModelError if the file cannot be read or is empty."""
        self.path = path
        try:
            with path.open("rb") as file:
                self.size = os.fstat(file.fileno()).st_size
                if self.size == 0:
                    raise ModelError(f"{path}: truncated, the file is empty; {AGAIN}")
                self._map = mmap.mmap(file.fileno(), self.size, access=mmap.ACCESS_READ)
                self._descriptor = os.dup(file.fileno())
        except OSError as error:
            raise ModelError(f"{path}: cannot be read ({error.strerror or error})") from error

    @property
    def stamp(self) -> FileStamp:
        """The stamp of the open file, even if its path names another one now."""
        stat = os.fstat(self._descriptor)
        return FileStamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino)

    def file_range(self, start: int, stop: int) -> FileRange:
        """Where these bytes lie in the file, for callers that read them themselves."""
        return FileRange(self._descriptor, start, stop - start)

    def view(self, start: int, stop: int) -> memoryview:
        """These bytes: a read-only view of the mapping."""
        return memoryview(self._map)[start:stop]

    def drop(self, start: int, stop: int) -> None:
        """Take the pages of these bytes out of this process's resident memory."""
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        if hasattr(self._map, "madvise") and stop > start:
            self._map.madvise(mmap.MADV_DONTNEED, first, stop - first)

    def close(self) -> None:
        """Unmap, unless arrays still look into the mapping: then it goes with the last of them."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
        try:
            self._map.close()
        except BufferError:
            del self._map


@contextmanager
def atomic_write(target: Path, partial: Path, *, go_on: bool = False) -> Iterator[BinaryIO]:
    """A file that appears whole or not at all: ``partial`` is written (or continued, with ``go_on``), flushed to the
    drive and renamed to ``target`` in the same folder.  If the body raises, ``partial`` stays."""
    with partial.open("r+b") if go_on else partial.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())
    partial.replace(target)
