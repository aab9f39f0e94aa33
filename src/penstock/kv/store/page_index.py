"""The index of stored pages: a table that several processes share, in memory or at the head of a file.

::

    area   | rings: one a writer | touches: a number a place | entries: 128 bytes a place |

    ring   | changes so far | the places that changed last |      readers follow it; one that falls behind reads all
    entry  | block 32 | group 2 | state 2 | spare 4 | saves 8 | spare 8 | proof 40 | spare 24 | check 8 |

Every place has one writer, which alone changes its entry; every process reads.  An entry that is read while it changes,
or that was torn by a crash, fails its check (XXH3-64, the place as the seed) and counts as empty.  ``touches`` is the
only field that all processes may write: how often a page was read.  It is advice for the writer and may be lost.

The area survives a killed process; whether it has reached the disk is for proofs to show, not for flushes.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from penstock.kernels.host_ops import xxh3_64
from penstock.kv.store.envelope import PROOF_BYTES
from penstock.kv.store.tier import PageKey
from penstock.types import BlockHash

ENTRY_BYTES = 128
MAX_WRITERS = 64
RING = 4096
"""Changes of a writer that a reader may be behind."""

_ENTRY = struct.Struct(f"<32sHH4xd8x{PROOF_BYTES}s24x")
_CHECK = struct.Struct("<Q")
_PLACE = struct.Struct("<I")
_RING_BYTES = 64 + 4 * RING
_KNOWN = 1
_STATE_AT = 34

assert _ENTRY.size + _CHECK.size == ENTRY_BYTES


class IndexEntry(NamedTuple):
    """The page in a place."""

    key: PageKey
    saves_s: float
    proof: bytes


def index_bytes(places: int) -> int:
    """Bytes of an index of ``places`` places, a multiple of 4 KiB."""
    return -(-(MAX_WRITERS * _RING_BYTES + places * (4 + ENTRY_BYTES)) // 4096) * 4096


class PageIndex:
    """One process's view of the table.  Thread-safe."""

    def __init__(self, area: memoryview, places: int, writer: int | None) -> None:
        """``writer``: this process's number among the writers, None for a reader.  Call ``scan`` before use."""
        self.places = places
        self._area = area
        self._writer = writer
        touches_at = MAX_WRITERS * _RING_BYTES
        self._entries_at = touches_at + 4 * places
        self._touches = np.frombuffer(area, np.uint32, places, touches_at)
        self._seen = [0] * MAX_WRITERS
        self._keys: dict[int, PageKey] = {}  # by place
        self._places: dict[PageKey, tuple[int, ...]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._keys)

    # --- reading -----------------------------------------------------------------------------------------------------

    def scan(self) -> None:
        """Read all entries: some 2 us per stored page."""
        with self._lock:  # of all of it: what this process puts meanwhile would be noted and thrown away
            self._scan()

    def _scan(self) -> None:
        seen = [self._changes(writer) for writer in range(MAX_WRITERS)]
        raw = np.frombuffer(self._area, np.uint8, self.places * ENTRY_BYTES, self._entries_at)
        states = raw.reshape(self.places, ENTRY_BYTES)[:, _STATE_AT]
        found = {
            int(place): entry.key for place in np.flatnonzero(states == _KNOWN) if (entry := self.entry_at(int(place)))
        }
        self._seen = seen
        self._keys, self._places = {}, {}
        for place, key in found.items():
            self._note(place, key)

    def refresh(self) -> None:
        """Read what other processes have changed."""
        for writer in range(MAX_WRITERS):
            changes = self._changes(writer)
            if changes == self._seen[writer] or writer == self._writer:
                continue
            if not 0 <= changes - self._seen[writer] <= RING // 2:  # the other half is being written anew, perhaps
                self.scan()
                return
            start = writer * _RING_BYTES + 64
            for change in range(self._seen[writer], changes):
                (place,) = _PLACE.unpack_from(self._area, start + 4 * (change % RING))
                if place < self.places:
                    entry = self.entry_at(place)
                    with self._lock:
                        self._note(place, entry.key if entry else None)
            self._seen[writer] = changes

    def find(self, key: PageKey) -> tuple[int, ...]:
        """Places that hold this page, as far as is known."""
        return self._places.get(key, ())

    def entry_at(self, place: int) -> IndexEntry | None:
        """The current entry of a place; None if it is empty."""
        start = self._entries_at + place * ENTRY_BYTES
        raw = bytes(self._area[start : start + ENTRY_BYTES])
        block, group, state, saves_s, proof = _ENTRY.unpack_from(raw)
        if state != _KNOWN or _check(raw[: _ENTRY.size], place) != _CHECK.unpack_from(raw, _ENTRY.size)[0]:
            return None
        return IndexEntry(PageKey(BlockHash(block), group), saves_s if 0 <= saves_s < 1e9 else 0.0, proof)

    def known_places(self) -> Iterator[tuple[int, PageKey]]:
        """All places with their pages."""
        with self._lock:
            return iter(tuple(self._keys.items()))

    def count_use(self, place: int) -> None:
        """Count a read of the page in this place."""
        self._touches[place] += np.uint32(1)

    def use_count(self, place: int) -> int:
        """Reads of the page, modulo 2**32."""
        return int(self._touches[place])

    def ignore_place(self, place: int) -> None:
        """Ignore a place whose page did not match its entry until the entry changes."""
        with self._lock:
            self._note(place, None)

    # --- writing: one's own places only ------------------------------------------------------------------------------

    def write_entry(self, place: int, entry: IndexEntry) -> None:
        """Write an entry."""
        raw = _ENTRY.pack(entry.key.block, entry.key.group, _KNOWN, entry.saves_s, entry.proof)
        self._write(place, raw + _CHECK.pack(_check(raw, place)), entry.key)

    def clear_entry(self, place: int) -> None:
        """Mark a place as empty."""
        self._write(place, bytes(ENTRY_BYTES), None)

    def _write(self, place: int, raw: bytes, key: PageKey | None) -> None:
        assert self._writer is not None, "who only reads writes nothing"
        start = self._entries_at + place * ENTRY_BYTES
        with self._lock:
            self._area[start : start + ENTRY_BYTES] = raw
            ring = self._writer * _RING_BYTES
            changes = self._changes(self._writer)
            _PLACE.pack_into(self._area, ring + 64 + 4 * (changes % RING), place)
            _CHECK.pack_into(self._area, ring, changes + 1)
            self._note(place, key)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _changes(self, writer: int) -> int:
        changes: int = _CHECK.unpack_from(self._area, writer * _RING_BYTES)[0]
        return changes

    def _note(self, place: int, key: PageKey | None) -> None:
        before = self._keys.pop(place, None)
        if before is not None:
            left = tuple(other for other in self._places[before] if other != place)
            if left:
                self._places[before] = left
            else:
                del self._places[before]
        if key is not None:
            self._keys[place] = key
            self._places[key] = (*self._places.get(key, ()), place)

    def close(self) -> None:
        """Release the area."""
        del self._touches
        self._area.release()


def _check(raw: bytes, place: int) -> int:
    return xxh3_64(raw, place)
