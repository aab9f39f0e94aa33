"""What services need of the C++ extension, in Python, for hosts where it is not built and a GPU computes.

The same results, many times slower (docs/gpu.md): hashing a prompt's blocks, the index of who holds which block,
checksums of pages.  There are no kernels here: a model cannot be computed on a processor with this.
"""

from __future__ import annotations

import errno
import os
import select
import threading
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from penstock.hashing import block_hashes
from penstock.types import BlockHash

try:
    import xxhash
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the kernel extension is not built, and without it xxhash is needed for checksums: pip install 'penstock[gpu]'",
        name="xxhash",
    ) from error

HASH_BYTES = 32
KEY_BYTES = 8
MOST_SUFFIX = 1024
"""Bytes that a page is bound to at most."""

LEAST_RECORD, MOST_RECORD = 97, 128
"""Bytes that a small record has."""


def hash_blocks(parent: bytes, tokens: Sequence[int], first: int, last: int) -> list[bytes]:
    """``host_ops.hash_blocks`` in Python."""
    if not 0 <= first <= last <= len(tokens):
        raise ValueError(f"no tokens [{first}, {last}) among {len(tokens)}")
    if len(parent) != HASH_BYTES or not isinstance(tokens, (tuple, list)):
        raise ValueError("a parent of 32 bytes and a tuple or list of ids are hashed")
    if any(token >= 1 << 32 for token in tokens[first:last]):
        raise ValueError("token ids have 32 bits")
    return list(block_hashes(BlockHash(parent), tokens[first:last]))


class AdvancingPages:
    """A batch of sequences that go on by one token at a time: its positions and its table, which change in place."""

    def __init__(self, positions: NDArray[np.int32], table: NDArray[np.int32], groups: int, page_tokens: int) -> None:
        self._positions = positions
        self._table = table
        self._groups = groups
        self._page_tokens = page_tokens
        self._first = int(positions[0])

    def begun(self) -> bytes | None:
        """Pairs of a place in the table and a page, of those that the sequences reach with their next tokens.  None if
        the first one has not gone on by one token since the last call."""
        if self._positions[0] != self._first + 1:
            return None
        self._first += 1
        (rows,) = np.nonzero(self._positions % self._page_tokens == 0)
        columns = self._table.shape[1]
        at = (rows * columns + self._positions[rows] // self._page_tokens)[:, None]
        at = (at + columns // self._groups * np.arange(self._groups)).ravel()
        return np.stack((at, self._table.reshape(-1)[at]), axis=1).astype(np.int32).tobytes()


def hash_chain(parent: bytes, tokens: NDArray[np.uint32], out: NDArray[np.uint8]) -> None:
    """Hashes of the full blocks, into rows of 32 bytes."""
    for row, block in zip(out, block_hashes(BlockHash(parent), tokens.tolist()), strict=True):
        row[:] = np.frombuffer(block, np.uint8)


def xxh3_128(data: memoryview) -> bytes:
    """XXH3-128 with seed 0: 16 bytes, big-endian."""
    return xxhash.xxh3_128_digest(data)


def xxh3_64(data: memoryview, seed: int) -> int:
    """XXH3-64 of a small record.  Raises ValueError for another length."""
    if not LEAST_RECORD <= data.nbytes <= MOST_RECORD:
        raise ValueError(f"a record has {LEAST_RECORD} to {MOST_RECORD} bytes")
    return xxhash.xxh3_64_intdigest(data, seed)


def seal_page(page: memoryview, suffix: bytes) -> bytes:
    """XXH3-128 of a page and what it is bound to."""
    _check(suffix)
    whole = xxhash.xxh3_128(page)
    whole.update(suffix)
    return whole.digest()


def copy_page(page: memoryview, into: memoryview, suffix: bytes) -> bytes:
    """The same of the copy, which is made first: a page that changes meanwhile cannot pass."""
    _check(suffix)
    if page.nbytes != into.nbytes:
        raise ValueError("pages have other sizes")
    into[:] = page
    return seal_page(into, suffix)


class Arrivals:
    """Arriving pages, as ``_native.Arrivals``; each page is read once more to be hashed."""

    def __init__(self, pages: list[memoryview]) -> None:
        if not all(page.nbytes for page in pages):
            raise ValueError("a page has at least a byte")
        self._pages = pages
        self._at = 0  # of the page that is coming
        self._writing = threading.Lock()
        self._stopped = False
        self.done = 0
        self.left = sum(page.nbytes for page in pages)

    def receive(self, descriptor: int, patience_s: float) -> int:
        """See above."""
        if descriptor < 0:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        taken, watched = 0, select.poll()
        watched.register(descriptor, select.POLLIN)
        while self.left:
            if not watched.poll(0 if taken else patience_s * 1000):
                break
            page = self._pages[self.done]
            with self._writing:
                if self._stopped:
                    break
                got = os.readv(descriptor, [page[self._at :]])
            if not got:
                return taken or -1
            taken += got
            self.left -= got
            self._at += got
            if self._at == page.nbytes:
                self.done, self._at = self.done + 1, 0
        return taken

    def stop(self) -> None:
        """See above."""
        with self._writing:
            self._stopped = True

    def checksum(self, page: int, suffix: bytes) -> bytes:
        """As ``seal_page``, of a page that is there."""
        if page >= self.done:
            raise ValueError("that page is not there yet")
        return seal_page(self._pages[page], suffix)


def _check(suffix: bytes) -> None:
    if not 1 <= len(suffix) <= MOST_SUFFIX:
        raise ValueError(f"a suffix has 1 to {MOST_SUFFIX} bytes")


class BlockIndex:
    """Index of the owners of blocks (cpp/host/block_index.hpp): sets of owners by the first bytes of a block's hash."""

    def __init__(self, max_blocks: int, max_owners: int) -> None:
        """Raises ValueError for limits below 1."""
        if max_blocks < 1 or not 1 <= max_owners <= 1 << 16:
            raise ValueError("an index has 1 block and 1 to 65536 owners at least")
        self._max_blocks, self._max_owners = max_blocks, max_owners
        self._owners: dict[bytes, set[int]] = {}
        self._held: dict[int, set[bytes]] = {}
        self._free = list(range(max_owners - 1, -1, -1))

    def open(self) -> int | None:
        """A number for a new owner; None when all are taken."""
        if not self._free:
            return None
        owner = self._free.pop()
        self._held[owner] = set()
        return owner

    def close(self, owner: int) -> None:
        """It holds nothing any more, and its number is free."""
        self._held_by(owner)
        for key in self._held.pop(owner):
            self._drop(key, owner)
        self._free.append(owner)

    def sweep(self, places: int) -> None:
        """Nothing is left of those that closed."""

    def add(self, owner: int, keys: bytes) -> int:
        """``owner`` holds these blocks now; how many were refused for want of room."""
        held, refused = self._held_by(owner), 0
        for key in _split(keys):
            owners = self._owners.get(key)
            if owners is None:
                if len(self._owners) >= self._max_blocks:
                    refused += 1
                    continue
                owners = self._owners[key] = set()
            owners.add(owner)
            held.add(key)
        return refused

    def remove(self, owner: int, keys: bytes) -> None:
        """``owner`` holds these no longer."""
        held = self._held_by(owner)
        for key in _split(keys):
            if key in held:
                held.remove(key)
                self._drop(key, owner)

    def has(self, owner: int, block: bytes) -> bool:
        """Whether ``owner`` holds this block."""
        return owner in self._owners.get(block[:KEY_BYTES], ())

    def match(self, hashes: Sequence[bytes], depths: NDArray[np.int32]) -> None:
        """Writes how many leading blocks of a prompt each owner holds."""
        if len(depths) != self._max_owners:
            raise ValueError("depths must have a number for each owner")
        depths[:] = 0
        left: set[int] | None = None
        for depth, block in enumerate(hashes):
            owners = self._owners.get(block[:KEY_BYTES], set())
            left = set(owners) if left is None else left & owners
            if not left:
                return
            depths[list(left)] = depth + 1

    def blocks(self) -> int:
        """The number of distinct blocks held."""
        return len(self._owners)

    def memory_bytes(self) -> int:
        """About."""
        return 200 * len(self._owners) + 100 * sum(map(len, self._held.values()))

    def _held_by(self, owner: int) -> set[bytes]:
        if owner not in self._held:
            raise ValueError(f"there is no owner {owner}")
        return self._held[owner]

    def _drop(self, key: bytes, owner: int) -> None:
        owners = self._owners[key]
        owners.discard(owner)
        if not owners:
            del self._owners[key]


def _split(keys: bytes) -> Iterator[bytes]:
    if len(keys) % KEY_BYTES:
        raise ValueError(f"keys have {KEY_BYTES} bytes each")
    return (keys[begin : begin + KEY_BYTES] for begin in range(0, len(keys), KEY_BYTES))
