"""Downloads what serving a model needs from the Hugging Face Hub into the Hub's own cache.

The Hub's library resolves the revision, lists the files, and links them into the cache.  Large files are fetched here:
an interrupted download goes on where it stopped, in a later process too, and every one is compared with the Hub's
SHA-256.  Starts threads: not for a process that is about to fork.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from penstock import __version__
from penstock.errors import ModelError

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoFile

WANTED_FILES = (
    *("*.json", "*.safetensors", "*.jinja", "LICENSE*", "README.md"),
    *("*.model", "*.tiktoken", "merges.txt", "vocab.bpe"),  # vocabularies without tokenizer.json
)
UNWANTED_FILES = ("consolidated*.safetensors", "original/*", "onnx/*", "openvino/*")
"""The same weights once more, in forms that are not served."""

SPARE_BYTES = 64 << 20
"""Disk space that a download leaves free."""

MAX_FRUITLESS_RETRIES = 5
"""Connections in a row that may break without a new byte."""

_READ_BYTES = 8 << 20
_PARTIAL = ".penstock.incomplete"

_PROGRESS_EVERY_S = 10.0
"""Between two lines about a download whose output is no terminal."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DownloadedModel:
    """Where a model is in the cache."""

    folder: Path
    revision: str  # the commit
    files: int
    size: int  # bytes of all files
    fetched: int  # bytes that were downloaded now


def download_model(
    name: str,
    *,
    revision: str | None = None,
    wanted: Sequence[str] = WANTED_FILES,
) -> DownloadedModel:
    """Download the files of a Hub model that match ``wanted``, unless they are in the cache; shows progress.

    Without a connection, the cached files are enough.  Raises ModelError in one line.
    """
    import httpx2
    from huggingface_hub import errors

    try:
        return _download(name, revision, wanted)
    except errors.GatedRepoError:
        raise ModelError(
            f"{name} is gated: accept its terms at https://huggingface.co/{name}, then log in with `hf auth login` "
            "or set HF_TOKEN"
        ) from None
    except errors.RevisionNotFoundError:
        raise ModelError(f"{name} has no revision {revision}: expected a branch, a tag or a commit") from None
    except errors.RepositoryNotFoundError:
        raise ModelError(
            f"{name}: the Hub has no such model, or it is private (then log in: `hf auth login`)"
        ) from None
    except errors.LocalEntryNotFoundError as error:
        raise ModelError(_not_cached(name, offline=isinstance(error.__cause__, errors.OfflineModeIsEnabled))) from None
    # ValueError: a name or an address that the Hub's library takes for none; RuntimeError: what fetches large files.
    except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError, RuntimeError) as error:
        first = next(iter(str(error).splitlines()), "") or type(error).__name__
        raise ModelError(f"{name}: cannot fetch it from the Hub: {first}") from None


def _download(name: str, revision: str | None, wanted: Sequence[str]) -> DownloadedModel:
    import httpx2
    from huggingface_hub import HfApi, errors, snapshot_download

    patterns: dict[str, Any] = {"allow_patterns": list(wanted), "ignore_patterns": list(UNWANTED_FILES)}
    try:
        commit = HfApi().repo_info(name, revision=revision).sha or ""
    except errors.RevisionNotFoundError:
        raise
    except httpx2.ProxyError:
        raise
    except (httpx2.TransportError, errors.OfflineModeIsEnabled) as error:
        try:
            return _described(Path(snapshot_download(name, revision=revision, local_files_only=True, **patterns)), 0)
        except errors.LocalEntryNotFoundError as not_cached:
            raise not_cached from error
    except errors.HfHubHTTPError:  # a model that was cached while its owner allowed it can be served
        return _described(Path(snapshot_download(name, revision=revision, **patterns)), 0)
    fetched = 0
    missing = _missing_files(name, commit, patterns)
    if missing:
        storage = _storage_folder(name)
        _check_space(name, storage, sum(file.size for file in missing))
        large = [file for file in missing if file.lfs is not None and not _is_too_large(file)]
        fetched = sum(file.size for file in missing)
        with _progress(name, sum(file.size for file in large)) as add:
            for file in large:
                _fetch(name, commit, file, storage / "blobs", add)
    bars = None if any(map(_is_too_large, missing)) else _silent_bar_class()
    folder = Path(snapshot_download(name, revision=revision, tqdm_class=bars, **patterns))
    for file in missing:
        _check_small(folder, file)
    return _described(folder, fetched)


def _described(folder: Path, fetched: int) -> DownloadedModel:
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return DownloadedModel(folder, folder.name, len(sizes), sum(sizes), fetched)


def _storage_folder(name: str) -> Path:
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    return Path(constants.HF_HUB_CACHE).expanduser().resolve() / repo_folder_name(repo_id=name, repo_type="model")


def _missing_files(name: str, commit: str, patterns: dict[str, Any]) -> list[RepoFile]:
    """What has to be downloaded; the Hub is asked for its list only where something is."""
    from huggingface_hub import HfApi, errors, get_cached_repo_tree
    from huggingface_hub.hf_api import RepoFile

    folder = _storage_folder(name) / "snapshots" / commit

    def is_selected(path: str) -> bool:
        allowed, ignored = ([fnmatch(path, pattern) for pattern in patterns[kind]] for kind in patterns)
        return any(allowed) and not any(ignored)

    def absent(entries: Sequence[RepoFile]) -> list[RepoFile]:
        return [file for file in entries if is_selected(file.path) and not (folder / file.path).exists()]

    with contextlib.suppress(errors.CachedRepoTreeNotFoundError):
        if not absent(get_cached_repo_tree(name, revision=commit)):
            return []
    entries = HfApi().list_repo_tree(name, recursive=True, revision=commit)
    return absent([entry for entry in entries if isinstance(entry, RepoFile)])


def _is_too_large(file: RepoFile) -> bool:
    """Whether the Hub gives this file only to its own library's transfer protocol."""
    from huggingface_hub import constants

    return bool(file.size > constants.MAX_HTTP_DOWNLOAD_SIZE)


def _check_space(name: str, storage: Path, needed: int) -> None:
    """Raises ModelError where the disk has less than is missing.  What was fetched in part counts as there."""
    existing = next(path for path in (storage, *storage.parents) if path.is_dir())
    there = sum(path.stat().st_size for path in storage.glob(f"blobs/*{_PARTIAL}"))
    free = shutil.disk_usage(existing).free
    if needed - there + SPARE_BYTES > free:
        raise ModelError(
            f"{name} needs {format_bytes(needed - there)} more, and {existing} has {format_bytes(free)} free: "
            "make room, or set HF_HOME to a folder on another disk"
        )


def format_bytes(count: int) -> str:
    """``16.1 GB``, ``13.6 MB``: decimal, as the Hub shows sizes."""
    return f"{count / 1e9:,.1f} GB" if count >= 10**8 else f"{count / 1e6:,.1f} MB"


def _fetch(name: str, commit: str, file: RepoFile, blobs: Path, add: Callable[[int], None]) -> None:
    """Bring one large file into ``blobs``, where the Hub's library finds it by its SHA-256.  Raises ModelError."""
    assert file.lfs is not None
    blob = blobs / file.lfs.sha256
    if blob.exists():
        add(file.size)
        return
    blobs.mkdir(parents=True, exist_ok=True)
    partial = blobs / f"{file.lfs.sha256}{_PARTIAL}"
    with partial.open("ab") as out:
        try:
            fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ModelError(f"{name}: another process downloads {file.path} already") from None
        if out.tell() > file.size:
            out.truncate(0)
        add(out.tell())
        _fetch_rest(name, commit, file, out, add)
        out.flush()
        os.fsync(out.fileno())
    if _sha256(partial) != file.lfs.sha256:
        partial.unlink()
        raise ModelError(f"{name}: {file.path} was damaged on its way (another SHA-256 than the Hub's): pull it again")
    partial.replace(blob)


def _fetch_rest(name: str, commit: str, file: RepoFile, out: BinaryIO, add: Callable[[int], None]) -> None:
    """Append what is missing, over as many connections as it takes while each brings something."""
    import httpx2
    from huggingface_hub import hf_hub_url

    url = hf_hub_url(name, file.path, revision=commit)
    fruitless = 0
    while (before := out.tell()) < file.size:
        try:
            _append_rest(url, before, out, add)
        except httpx2.TransportError as error:
            fruitless = 0 if out.tell() > before else fruitless + 1
            if fruitless > MAX_FRUITLESS_RETRIES:
                raise
            log.warning("%s: the connection broke at byte %d (%s); going on there", file.path, out.tell(), error)
            time.sleep(min(2.0**fruitless - 1, 10.0))
    if out.tell() != file.size:
        raise ModelError(f"{name}: {file.path} has more than the {file.size} bytes that the Hub lists: pull it again")


def _append_rest(url: str, begin: int, out: BinaryIO, add: Callable[[int], None]) -> None:
    """One request for everything from byte ``begin`` on; a server without ranges sends the whole."""
    from huggingface_hub import constants, get_session, get_token, hf_raise_for_status

    headers = {"Accept-Encoding": "identity", "User-Agent": f"penstock/{__version__}"}
    token = None if constants.HF_HUB_DISABLE_IMPLICIT_TOKEN else get_token()
    if token:
        headers["Authorization"] = f"Bearer {token}"  # not sent on to another host that it redirects to
    if begin:
        headers["Range"] = f"bytes={begin}-"
    timeout = constants.HF_HUB_DOWNLOAD_TIMEOUT
    with get_session().stream("GET", url, headers=headers, timeout=timeout, follow_redirects=True) as response:
        hf_raise_for_status(response)
        if begin and not response.headers.get("Content-Range", "").startswith(f"bytes {begin}-"):
            out.truncate(0)
            out.seek(0)
            add(-begin)
        for chunk in response.iter_raw():
            out.write(chunk)
            add(len(chunk))


@contextlib.contextmanager
def _progress(name: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal, elsewhere a line every ten seconds; call what it gives with each number of new bytes."""
    if sys.stderr.isatty():
        from tqdm import tqdm

        with tqdm(desc=name, total=total, unit="B", unit_scale=True, dynamic_ncols=True) as bar:

            def advance(count: int) -> None:
                bar.update(count)

            yield advance
        return
    done, last = 0, time.monotonic()

    def add(count: int) -> None:
        nonlocal done, last
        done += count
        if time.monotonic() - last >= _PROGRESS_EVERY_S:
            last = time.monotonic()
            log.info("%s: %s of %s (%.0f %%)", name, format_bytes(done), format_bytes(total), 100 * done / total)

    yield add


def _check_small(folder: Path, file: RepoFile) -> None:
    """Compare a file that Git holds itself with its blob id (git-hash-object(1)).  Raises ModelError."""
    path = folder / file.path
    if file.lfs is not None or not path.is_file():
        return
    content = path.read_bytes()
    if hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest() != file.blob_id:
        path.resolve().unlink()
        path.unlink(missing_ok=True)
        raise ModelError(f"{file.path} was damaged on its way (another Git hash than the Hub's): pull it again")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_READ_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _silent_bar_class() -> type[Any]:
    """For the Hub's library, where all that takes time has been fetched."""
    from tqdm.auto import tqdm

    class SilentBar(tqdm):  # type: ignore[type-arg]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            super().__init__(*args, **kwargs | {"disable": True})

    return SilentBar


def _not_cached(name: str, *, offline: bool) -> str:
    if offline:
        return (
            f"{name}: the model is not in the local cache, and HF_HUB_OFFLINE forbids to fetch it; "
            "unset that once, or give the folder of a model instead of a name"
        )
    return (
        f"{name}: the Hub cannot be reached and the model is not in the local cache; "
        "connect once, or give the folder of a model instead of a name"
    )
