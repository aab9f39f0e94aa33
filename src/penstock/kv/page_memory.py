"""KV pages as bytes: their layout, and the memory that has all pages of one worker in one mapping.

::

    supervisor                        worker A                     worker B
    KvMemoryFile A  --fork-->  map_own: read and write     map_readonly: cannot write, nor make itself able to
    KvMemoryFile B  --fork-->  map_readonly                map_own

A ``KvMemoryFile`` is a memfd: it has no name and ends with the last process that holds it.  Its size is sealed, so no
reader can be hit by SIGBUS.  A worker that restarts wipes its memory first: a reader that still copies from it then
reads zeros, and the checksum shows it.

Outside the engine a page is opaque: two workers may exchange pages when their layouts have the same name.  Where layers
have different KV specs, a page holds one group of them (``KvShape.groups``).  Knows nothing about requests.
"""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os

import msgspec

from penstock.errors import ConfigError
from penstock.kernels.operands import KV_TYPES, KvShape
from penstock.kv_spec import TransferOrder
from penstock.types import PAGE_TOKENS, PageId


class KvLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One kind of page.  ``name`` covers everything that the meaning of a page's bytes depends on, except the model."""

    name: str
    page_bytes: int
    page_tokens: int
    shape: KvShape
    dtype: str

    @classmethod
    def for_shape(cls, shape: KvShape, dtype: str, *, page_tokens: int = PAGE_TOKENS) -> KvLayout:
        """The layout of pages that hold ``page_tokens`` tokens of this shape.

        Raises ConfigError for a dtype that is not in ``KV_TYPES``, or a size below 1.
        """
        if dtype not in KV_TYPES:
            raise ConfigError(f"KV dtype {dtype!r} is unknown; {', '.join(KV_TYPES)} are known")
        sizes = {"layers": shape.layers, "kv_heads": shape.kv_heads, "page_tokens": page_tokens}
        for field, size in (sizes | {"key_dim": shape.key_dim, "value_dim": shape.value_dim}).items():
            if size < 1:
                raise ConfigError(f"{field} of a KV page must be at least 1, not {size}")
        kind = "latent" if shape.shared else "full"
        sizes_name = f"h{shape.kv_heads}-t{page_tokens}-k{shape.key_dim}-v{shape.value_dim}-{dtype}"
        return cls(
            name=f"{kind}-l{shape.layers}-{sizes_name}{_groups_name(shape)}",
            page_bytes=shape.page_bytes(dtype, page_tokens),
            page_tokens=page_tokens,
            shape=shape,
            dtype=dtype,
        )

    def transfer_order(self, tokens: int, *, ahead: int = 0) -> TransferOrder:
        """The pages that a sequence of ``tokens`` tokens needs to continue, in the order in which they travel, and
        those of ``ahead`` tokens after them."""
        return TransferOrder(self.shape.reaches, tokens, self.page_tokens, ahead=ahead)


def _groups_name(shape: KvShape) -> str:
    """How layers are grouped; empty where one page holds all layers."""
    parts = [
        "+".join(map(str, group.layers)) + f"w{group.spec.window or 0}c{group.spec.chunk or 0}"
        for group in shape.groups
    ]
    return "".join(f"-g{part}" for part in parts)


_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL if hasattr(fcntl, "F_SEAL_SEAL") else 0
_ADVICE = ("MADV_HUGEPAGE", "MADV_DONTDUMP")


class KvMemoryFile:
    """One worker's KV memory in the process that forks the workers: a descriptor, not mapped."""

    def __init__(self, descriptor: int, layout: KvLayout, pages: int) -> None:
        self.descriptor = descriptor
        self.layout = layout
        self.pages = pages

    @classmethod
    def create(cls, layout: KvLayout, pages: int, *, label: str = "kv") -> KvMemoryFile:
        """Zeroed memory of ``pages`` pages, allocated as pages are written.

        ``label`` appears in /proc only.  Raises ConfigError when the system refuses.
        """
        size = _size(layout, pages)
        try:
            descriptor = os.memfd_create(f"penstock-{label}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise ConfigError(f"cannot make shared KV memory: {error.strerror}") from error
        try:
            os.ftruncate(descriptor, size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _SEALS)
        except OSError as error:
            os.close(descriptor)
            raise _unavailable(f"make {size} bytes of shared KV memory", error) from error
        return cls(descriptor, layout, pages)

    def map_own(self, *, lend: int | None = None) -> KvMemory:
        """Map for reading and writing, by the worker that owns these pages.

        ``lend``: os.O_RDONLY or os.O_RDWR; the memory then keeps a descriptor that a child process may map.
        """
        memory = KvMemory(_map(self.descriptor, _size(self.layout, self.pages), write=True), self.layout, self.pages)
        if lend is not None:
            try:
                memory.shared_descriptor = os.open(f"/proc/self/fd/{self.descriptor}", lend | os.O_CLOEXEC)
            except OSError as error:
                raise ConfigError(f"cannot open KV memory again (is /proc there?): {error.strerror}") from error
        return memory

    def map_readonly(self) -> KvMemory:
        """Map for the other workers, through a descriptor opened for reading, so that not even mprotect can make it
        writable. Close the file afterwards: through it the process could map the memory for writing."""
        try:
            descriptor = os.open(f"/proc/self/fd/{self.descriptor}", os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(f"cannot open KV memory for reading (is /proc there?): {error.strerror}") from error
        try:
            mapped = _map(descriptor, _size(self.layout, self.pages), write=False)
        finally:
            os.close(descriptor)
        return KvMemory(mapped, self.layout, self.pages)

    def close(self) -> None:
        """Mappings stay valid.  Idempotent."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


class KvMemory:
    """Mapped pages: ``pages`` of ``layout.page_bytes`` each, one after another."""

    def __init__(self, mapped: mmap.mmap, layout: KvLayout, pages: int, *, private: bool = False) -> None:
        self.layout = layout
        self.pages = pages
        self.shared_descriptor = -1  # a descriptor of it
        self.mapped_bytes = len(mapped)
        self._mapped = mapped
        self._private = private
        self._view = memoryview(mapped)[: pages * layout.page_bytes]
        for name in _ADVICE:
            if hasattr(mmap, name):
                # Advice is refused where the kernel was built or set up without it; nothing is lost.
                with contextlib.suppress(OSError):
                    mapped.madvise(getattr(mmap, name))

    @classmethod
    def anonymous(cls, layout: KvLayout, pages: int) -> KvMemory:
        """Private memory of one process."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        try:
            mapped = mmap.mmap(-1, _size(layout, pages), flags=flags)
        except OSError as error:
            raise _unavailable(f"make {_size(layout, pages)} bytes of KV memory", error) from error
        return cls(mapped, layout, pages, private=True)

    @property
    def readonly(self) -> bool:
        return self._view.readonly

    @property
    def buffer(self) -> memoryview:
        """All pages, one after another."""
        return self._view

    def view(self, page: PageId) -> memoryview:
        """The bytes of one page.  Raises IndexError outside the memory."""
        if not 0 <= page < self.pages:
            raise IndexError(f"page {page} of {self.pages}")
        start = page * self.layout.page_bytes
        return self._view[start : start + self.layout.page_bytes]

    def wipe(self) -> None:
        """Return all memory to the system; every page reads as zeros afterwards, for every process."""
        self._mapped.madvise(mmap.MADV_DONTNEED if self._private else mmap.MADV_REMOVE)

    def close(self) -> None:
        """Unmap.  While views of pages are in use, the memory goes with the last of them."""
        if self.shared_descriptor >= 0:
            os.close(self.shared_descriptor)
            self.shared_descriptor = -1
        self._view.release()
        with contextlib.suppress(BufferError):
            self._mapped.close()


def _map(descriptor: int, size: int, *, write: bool) -> mmap.mmap:
    protection = mmap.PROT_READ | mmap.PROT_WRITE if write else mmap.PROT_READ
    try:
        return mmap.mmap(descriptor, size, flags=mmap.MAP_SHARED, prot=protection)
    except OSError as error:
        raise _unavailable(f"map {size} bytes of KV memory", error) from error


def _unavailable(what: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot {what}: {error.strerror}; use --kv-memory with less, as --kv-memory 128MiB")


def _size(layout: KvLayout, pages: int) -> int:
    if pages < 1:
        raise ConfigError(f"KV memory needs at least 1 page, not {pages}")
    return -(-pages * layout.page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
