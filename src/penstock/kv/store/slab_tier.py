"""The slab tier: pages in one file of equal slabs, for host memory that all workers share and for disk.

::

    | head 4 KiB | index (page_index) | slab | slab | slab | ...      all in whole blocks of 4 KiB
      JSON, checked                     one page each

One thread writes, another reads.  A place is cleared in the index before its slab is written, and its entry is written
after it: a process killed in between leaves an empty place.  What a crash of the machine tears is found by the proof.

The same for a file on disk and for a memfd.  Several processes use one file: each writes to a share of its own, which
the kernel locks (open file description locks: they end with the process that holds them), and reads everywhere.

A file is used only when its head fits this model, numerics class and layout.  One of another model is refused; a
damaged one, one of another size, or one of another version of the kernels is started afresh unless another process uses
it.  Nothing in it is trusted: sizes come from our own head, entries and pages have checks of their own.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.errors import ConfigError, PageCorrupt
from penstock.kernels.host_ops import xxh3_128
from penstock.kv.page_memory import KvLayout
from penstock.kv.store.envelope import AnyEnvelope
from penstock.kv.store.eviction import EvictionQueue
from penstock.kv.store.page_index import MAX_WRITERS, IndexEntry, PageIndex, index_bytes
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.types import ModelIdentity

log = logging.getLogger("penstock.worker")

BLOCK = 4096
MAX_PLACES = 1 << 26
_MAGIC = "penstock-kv/1"
_CHECK_BYTES = 16
_SHARES_AT = 1 << 61  # locked bytes that stand for places; no file is as long
_HEAD_AT = 1 << 60  # that stands for the head
_USERS_AT = _HEAD_AT + 1  # shared by all that use the file: its head must not change meanwhile


class SlabHead(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The head of a file: whose pages it holds, and their layout."""

    magic: str
    fingerprint: str
    numerics: str
    layout: str
    page_bytes: int
    slab_bytes: int
    places: int
    encrypted: bool

    @property
    def identity(self) -> ModelIdentity:
        """The model and kernels whose pages it holds."""
        return ModelIdentity(fingerprint=self.fingerprint, numerics=self.numerics)


def slab_head(identity: ModelIdentity, layout: KvLayout, nbytes: int, *, encrypted: bool) -> SlabHead:
    """The head of a file of at most ``nbytes`` bytes.  Raises ConfigError when that is too small for a page."""
    slab = -(-layout.page_bytes // BLOCK) * BLOCK
    places = min(MAX_PLACES, (nbytes - BLOCK) // slab)
    while places > 0 and BLOCK + index_bytes(places) + places * slab > nbytes:
        places -= max(1, (BLOCK + index_bytes(places) + places * slab - nbytes) // (slab + BLOCK))
    if places < 1:
        least = BLOCK + index_bytes(1) + slab
        raise ConfigError(f"{nbytes} bytes hold no KV page of this model: {least} bytes hold one")
    return SlabHead(
        magic=_MAGIC,
        fingerprint=identity.fingerprint,
        numerics=identity.numerics,
        layout=layout.name,
        page_bytes=layout.page_bytes,
        slab_bytes=slab,
        places=places,
        encrypted=encrypted,
    )


class SlabFile:
    """An open file with a fitting head.  ``begin, end``: the places that this process may write; none if they are
    locked."""

    def __init__(
        self, descriptor: int, head: SlabHead, what: str, *, writer: int, writers: int, allocate: bool = True
    ) -> None:
        """This process is writer ``writer`` of ``writers``.  ``allocate``: reserve all space at once, so that it
        never runs out. Takes over the descriptor, and closes it when it raises ConfigError."""
        self.head = head
        self.what = what
        self.direct = False
        self._allocates = allocate
        self._descriptor = self._io = descriptor
        self._slabs_at = BLOCK + index_bytes(head.places)
        try:
            self._begin()
            begin, end = head.places * writer // writers, head.places * (writer + 1) // writers
            own = writer < MAX_WRITERS and begin < end and _lock(descriptor, _SHARES_AT + begin, end - begin)
            self.begin, self.end = (begin, end) if own else (0, 0)
            self.writer = writer if own else None
            self._mapped = mmap.mmap(descriptor, self._slabs_at, access=mmap.ACCESS_WRITE)
        except (OSError, ValueError) as error:  # ValueError: it is shorter than what is to be mapped
            os.close(descriptor)
            raise ConfigError(f"{what}: {getattr(error, 'strerror', None) or error}") from None
        except ConfigError:
            os.close(descriptor)
            raise
        if not own:
            log.warning("%s is written by another service: its pages are read here, none are written", what)
        self.directory = memoryview(self._mapped)[BLOCK:]

    @classmethod
    def at(cls, path: Path, head: SlabHead, *, writer: int, writers: int, direct: bool) -> SlabFile:
        """A file on disk, created if missing.  ``direct``: bypass the page cache where the file system can.  Raises
        ConfigError."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigError(f"{path}: {error.strerror}") from None
        file = cls(descriptor, head, str(path), writer=writer, writers=writers)
        if direct and hasattr(os, "O_DIRECT"):
            with contextlib.suppress(OSError):  # a file system without it
                file._io = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_DIRECT)
                file.direct = True
        return file

    @classmethod
    def memory(cls, descriptor: int, head: SlabHead, *, writer: int, writers: int) -> SlabFile:
        """Host memory: a memfd created by the process that forked the workers.  Raises ConfigError."""
        try:  # opened anew: locks are those of an open file, and a fork shares its parent's
            own = os.open(f"/proc/self/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot open shared host memory (is /proc there?): {error.strerror}") from None
        return cls(own, head, "host memory", writer=writer, writers=writers, allocate=False)

    # --- pages -------------------------------------------------------------------------------------------------------

    def read(self, place: int, into: memoryview) -> int:
        """Fill ``into`` (a whole slab) from a place; returns the bytes read."""
        return os.preadv(self._io, [into], self._slabs_at + place * self.head.slab_bytes)

    def write(self, place: int, slab: memoryview) -> None:
        """Raises OSError, also after a short write."""
        written = os.pwritev(self._io, [slab], self._slabs_at + place * self.head.slab_bytes)
        if written != slab.nbytes:
            raise OSError(f"{written} of {slab.nbytes} bytes were written")

    def close(self) -> None:
        """The index must have been closed before."""
        self.directory.release()
        self._mapped.close()
        if self._io != self._descriptor:
            os.close(self._io)
        os.close(self._descriptor)

    # --- beginning ---------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        """Make sure that the file has our head, and lock it as used while it is open here."""
        descriptor, head = self._descriptor, self.head
        if not _lock(descriptor, _HEAD_AT, 1, wait=True):
            raise ConfigError(f"{self.what}: cannot be locked")
        try:
            size = self._slabs_at + head.places * head.slab_bytes
            found = _read_head(descriptor)
            if found is not None and found.identity.unversioned != head.identity.unversioned:
                raise ConfigError(
                    f"{self.what} has KV pages of another model ({found.fingerprint[:12]}, {found.numerics}): "
                    "delete it, or name another folder"
                )
            if found != head or os.fstat(descriptor).st_size != size:
                if found is not None or os.fstat(descriptor).st_size:
                    log.warning(
                        "%s is damaged, or was made for another size or layout or by other kernels: it begins anew",
                        self.what,
                    )
                if not _lock(descriptor, _USERS_AT, 1):
                    raise ConfigError(f"{self.what} is used by another service with other settings")
                self._write_head(size)
            if not _lock(descriptor, _USERS_AT, 1, kind=fcntl.F_RDLCK):  # also in place of the exclusive one
                raise ConfigError(f"{self.what}: cannot be locked")
        finally:
            _unlock(descriptor, _HEAD_AT, 1)

    def _write_head(self, size: int) -> None:
        """Empty the file and write our head."""
        os.ftruncate(self._descriptor, 0)
        if self._allocates:
            _allocate(self._descriptor, size, self.what)
        else:
            os.ftruncate(self._descriptor, size)
        raw = msgspec.json.encode(self.head)
        os.pwrite(self._descriptor, raw + bytes(BLOCK - _CHECK_BYTES - len(raw)) + xxh3_128(raw), 0)


def _allocate(descriptor: int, size: int, what: str) -> None:
    """Reserve all space now, so that the file system cannot run full later."""
    try:
        os.posix_fallocate(descriptor, 0, size)
    except OSError as error:
        os.ftruncate(descriptor, 0)
        raise ConfigError(f"{what}: cannot have {size} bytes: {error.strerror}") from None


def _read_head(descriptor: int) -> SlabHead | None:
    """None if there is no readable head."""
    raw = os.pread(descriptor, BLOCK, 0)
    text = raw[:-_CHECK_BYTES].rstrip(b"\0")
    if len(raw) != BLOCK or raw[-_CHECK_BYTES:] != xxh3_128(text):
        return None
    try:
        head = msgspec.json.decode(text, type=SlabHead)
    except msgspec.DecodeError:
        return None
    return head if head.magic == _MAGIC else None


def _lock(descriptor: int, start: int, length: int, *, kind: int = fcntl.F_WRLCK, wait: bool = False) -> bool:
    """Lock these bytes (F_RDLCK: shared) while the file is open here."""
    how = fcntl.F_OFD_SETLKW if wait else fcntl.F_OFD_SETLK
    try:
        fcntl.fcntl(descriptor, how, _flock(kind, start, length))
    except OSError:
        return False
    return True


def _unlock(descriptor: int, start: int, length: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, _flock(fcntl.F_UNLCK, start, length))


def _flock(kind: int, start: int, length: int) -> bytes:
    """``struct flock`` of Linux with 64-bit offsets."""
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


_LOOKS = 64
"""Places that are looked at for uses since the last time, before one is given up."""

_MOST_USES = 1024  # that count at one time: the number is anybody's word


class SlabTier(KvTier):
    stores_copies = True
    is_remote = False

    def __init__(self, name: str, file: SlabFile, seal: AnyEnvelope) -> None:
        """Reads the index: some 2 us per stored page."""
        self.name = name
        self._file = file
        self._seal = seal
        self._page_bytes = seal.layout.page_bytes
        slab = file.head.slab_bytes
        self._read_buffer, self._write_buffer = mmap.mmap(-1, slab), mmap.mmap(-1, slab)  # aligned, for O_DIRECT
        self._reading = threading.Lock()
        self._directory = PageIndex(file.directory, file.head.places, file.writer)
        self._directory.scan()
        self._ranking = EvictionQueue()
        self._touches: dict[int, int] = {}
        self._free = set(range(file.begin, file.end))
        for place, _ in self._directory.known_places():
            if place in self._free:
                self._free.discard(place)
                entry = self._directory.entry_at(place)
                self._rank(place, entry.saves_s if entry else 0.0)

    @property
    def pages(self) -> int:
        """Stored pages, of all processes."""
        return len(self._directory)

    @property
    def places(self) -> int:
        """Pages that there is room for."""
        return self._file.head.places

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._directory.refresh()
        return [bool(self._directory.find(key)) for key in keys]

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        for place in self._directory.find(key):
            entry = self._directory.entry_at(place)
            if entry is None or entry.key != key:
                self._directory.ignore_place(place)
                continue
            with self._reading, memoryview(self._read_buffer) as slab:
                if self._file.read(place, slab) < self._page_bytes:
                    self._lost(place)
                    raise PageCorrupt(f"{self._file.what} ends within place {place}")
                try:
                    with slab[: self._page_bytes] as stored:
                        self._seal.unseal(key, stored, entry.proof, into)
                except PageCorrupt:
                    if self._directory.entry_at(place) != entry:
                        continue  # written anew meanwhile
                    self._lost(place)
                    raise
            self._directory.count_use(place)
            return True
        return False

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        """Called by the one writing thread."""
        if self._directory.find(final.key):
            return True
        place = self._room()
        if place is None:
            return False
        stored, proof = self._seal.seal(final.key, content)
        with memoryview(self._write_buffer) as slab:
            slab[: self._page_bytes] = stored
            self._file.write(place, slab)
        self._directory.write_entry(place, IndexEntry(final.key, final.saves_s, proof))
        self._free.discard(place)
        self._rank(place, final.saves_s)
        return True

    def on_evicted(self, key: PageKey) -> None:
        """Nothing to do: the stored page is a copy."""

    def close(self) -> None:
        self._directory.close()
        self._file.close()

    # --- room --------------------------------------------------------------------------------------------------------

    def _room(self) -> int | None:
        """An empty place of our own; the least valuable page is evicted for it."""
        for place in self._free:
            return place
        least = self._ranking.least_valuable()
        for _ in range(_LOOKS):
            if least is None:
                return None
            fresh = (self._directory.use_count(least) - self._touches[least]) % (1 << 32)
            if not fresh:
                break
            self._touches[least] += fresh  # it was read since
            self._ranking.on_used(least, min(fresh, _MOST_USES))
            least = self._ranking.least_valuable()
        if least is not None:
            self._ranking.evict(least)
            self._directory.clear_entry(least)
            self._free.add(least)
        return least

    def _rank(self, place: int, saves_s: float) -> None:
        self._touches[place] = self._directory.use_count(place)
        self._ranking.add(place, saves_s)

    def _lost(self, place: int) -> None:
        """The page does not match its entry: ignore the place until its writer overwrites it."""
        self._directory.ignore_place(place)
