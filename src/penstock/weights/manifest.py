"""The record of a folder's weights: the hash of every tensor, and the stamp of every file that was hashed.

As git's index: while a file's stamp (size, times, inode) is the same, its hashes are known without reading it.  When
it is not, everything in the file is hashed again: the same tensors are accepted, others are refused until the operator
accepts them.  A file that was written so shortly before it was hashed that a later change could have left the
stamp as it is, is not trusted (git's "racy" rule).

Manifests live in a folder of caches, one file for each model folder.  A damaged manifest is ignored with a
warning: the folder is as on its first load.  Knows no kernels, and decides nothing about how weights are loaded.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
from blake3 import blake3

from penstock.errors import ModelError
from penstock.weights.checkpoint_reader import Checkpoint
from penstock.weights.compression_format import OriginalTensor
from penstock.weights.files import FileStamp, atomic_write

VERSION = 1
FOLDER = "manifests"
MAX_BYTES = 64 << 20
"""A longer manifest is none of ours."""

MAX_MANIFESTS = 1000
"""Model folders that are remembered; those loaded longest ago go first."""

RACY_NS = 2_000_000_000
"""The coarsest clock of a file system: a file that changed within this time before it was hashed may change unseen."""

ACCEPT_FLAG = "--accept-new-weights"

log = logging.getLogger(__name__)


class FileRecord(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One file: its stamp, and the tensors that it held then."""

    stamp: FileStamp
    hashed_ns: int  # when its hashing began
    tensors: dict[str, OriginalTensor]

    def is_of(self, stamp: FileStamp) -> bool:
        """Whether a file with this stamp is certainly the one that was hashed."""
        return stamp == self.stamp and max(stamp.mtime_ns, stamp.ctime_ns) + RACY_NS < self.hashed_ns


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The record of one model folder."""

    version: int
    folder: str
    files: dict[str, FileRecord]


class ManifestStore:
    """All manifests in one cache folder."""

    def __init__(self, cache: Path, *, accept_new: bool = False, now_ns: Callable[[], int] = time.time_ns) -> None:
        """``accept_new``: accept weights that differ from the record, and record them."""
        self._folder = cache / FOLDER
        self._accept_new = accept_new
        self._now_ns = now_ns

    def open(self, checkpoint: Checkpoint) -> FolderManifest:
        """The record of this checkpoint's folder.  To be called before any of its tensors is read."""
        folder = str(checkpoint.folder.resolve())
        path = self._folder / f"{blake3(os.fsencode(folder)).hexdigest()[:32]}.json"
        old = _read(path, folder)
        return FolderManifest(checkpoint, path, old, self._now_ns(), self._accept_new)


class FolderManifest:
    """One load of one checkpoint: the record before it, and the one to save after it."""

    def __init__(
        self, checkpoint: Checkpoint, path: Path, old: Manifest | None, begun_ns: int, accept_new: bool
    ) -> None:
        self._checkpoint = checkpoint
        self._path = path
        self._old = old
        self._begun_ns = begun_ns
        self._accept_new = accept_new
        files = old.files if old is not None else {}
        stamps = checkpoint.stamps()
        self._trusted = {name: file for name, file in files.items() if name in stamps and file.is_of(stamps[name])}

    def known_tensors(self) -> dict[str, OriginalTensor]:
        """Tensors whose hash need not be computed: those of files that are the ones that were hashed."""
        known = {}
        for name in self._checkpoint.names:
            file = self._trusted.get(self._checkpoint.path_of(name).name)
            entry = file.tensors.get(name) if file is not None else None
            info = self._checkpoint.info(name)
            if entry is not None and (entry.dtype, entry.shape) == (info.dtype, info.shape):
                known[name] = entry
        return known

    def verify_and_save(self, found: Mapping[str, OriginalTensor]) -> None:
        """Compare the hashes of all tensors with the record, and save them.

        Raises ModelError if these are other weights than last time, unless they are to be accepted.
        """
        if self._old is not None:
            old = {name: entry for file in self._old.files.values() for name, entry in file.tensors.items()}
            self._compare(old, found)
        stamps = self._checkpoint.stamps()
        tensors: dict[str, dict[str, OriginalTensor]] = {file: {} for file in stamps}
        for name, entry in found.items():
            tensors[self._checkpoint.path_of(name).name][name] = entry
        files: dict[str, FileRecord] = {}
        for file, stamp in stamps.items():
            record = self._trusted.get(file)
            if record is None or record.tensors != tensors[file]:
                record = FileRecord(stamp, self._begun_ns, tensors[file])
            files[file] = record
        manifest = Manifest(VERSION, str(self._checkpoint.folder.resolve()), files)
        if manifest != self._old:
            _write(self._path, manifest)

    def _compare(self, old: Mapping[str, OriginalTensor], found: Mapping[str, OriginalTensor]) -> None:
        complaint = _difference(self._checkpoint, old, found)
        if complaint is None:
            return
        if not self._accept_new:
            raise ModelError(
                f"{complaint}; these are not the weights that were loaded from here before. "
                f"If they are meant to be new, start once with {ACCEPT_FLAG}"
            )
        log.info("new weights accepted: %s", complaint)


def _difference(
    checkpoint: Checkpoint, old: Mapping[str, OriginalTensor], new: Mapping[str, OriginalTensor]
) -> str | None:
    """A message about the first tensor that differs; None if none does."""
    for name in sorted(old.keys() | new.keys()):
        if name not in new:
            return f"{checkpoint.folder}: tensor {name!r} is missing, its BLAKE3 was {old[name].blake3}"
        where = f"{checkpoint.path_of(name)}: tensor {name!r}"
        if name not in old:
            return f"{where} was not there, its BLAKE3 is {new[name].blake3}"
        was, now = old[name], new[name]
        if was.blake3 != now.blake3:
            return f"{where} has BLAKE3 {now.blake3}, it was {was.blake3}"
        if (was.dtype, was.shape) != (now.dtype, now.shape):
            return f"{where} is {now.dtype} {list(now.shape)}, it was {was.dtype} {list(was.shape)}"
    return None


# --- files ------------------------------------------------------------------------------------------------------------


def _read(path: Path, folder: str) -> Manifest | None:
    """The manifest in this file, if it is whole; a warning if there is one that is not."""
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_BYTES + 1)
    except FileNotFoundError:
        return None
    except OSError as error:
        log.warning("%s: cannot be read (%s); every tensor is hashed", path, error.strerror or error)
        return None
    body, _, check = raw.partition(b"\n")
    try:
        if len(raw) > MAX_BYTES or blake3(body).hexdigest().encode() != check.strip():
            raise ValueError("its own hash is another")
        manifest = msgspec.json.decode(body, type=Manifest)
        if manifest.version != VERSION or manifest.folder != folder:
            raise ValueError(f"it is of version {manifest.version}, for {manifest.folder}")
    except (ValueError, msgspec.DecodeError, msgspec.ValidationError) as error:
        log.warning(
            "%s: damaged (%s). Whether the weights in %s are those of the last load is unknown; "
            "they are hashed and remembered anew",
            path,
            error,
            folder,
        )
        return None
    return manifest


def _write(path: Path, manifest: Manifest) -> None:
    """Under a temporary name, then renamed: a reader finds the old one or the new one.  Failing is no harm."""
    body = msgspec.json.encode(manifest)
    partial = path.with_name(f"{path.name}.{os.getpid()}-{secrets.token_hex(4)}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with atomic_write(path, partial) as file:
                file.write(body + b"\n" + blake3(body).hexdigest().encode() + b"\n")
        finally:
            partial.unlink(missing_ok=True)
        _forget_oldest(path.parent)
    except OSError as error:
        log.warning("%s: cannot be written (%s); the weights will be hashed at every start", path, error.strerror)


def _forget_oldest(folder: Path) -> None:
    files = [(entry.stat().st_mtime_ns, entry.path) for entry in os.scandir(folder) if entry.name.endswith(".json")]
    for _, path in sorted(files)[: max(0, len(files) - MAX_MANIFESTS)]:
        Path(path).unlink(missing_ok=True)
