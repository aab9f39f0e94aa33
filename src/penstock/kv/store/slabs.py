"""Pages in a file of slabs: host memory that all workers share, and disk.

One thread writes, another reads.  A place is cleared in the directory before it is written and named after it: who is
killed in between leaves an empty place.  What a crash of the machine tears is found by the proof.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Sequence

from penstock.errors import PageCorrupt
from penstock.kv.store.directory import Directory, Entry
from penstock.kv.store.port import FinalPage, PageKey
from penstock.kv.store.seal import AnySeal
from penstock.kv.store.slab_file import SlabFile
from penstock.kv.store.worth import Ranking

_LOOKS = 64
"""Places that are looked at for uses since the last time, before one is given up."""

_MOST_USES = 1024  # that count at one time: the number is anybody's word


class SlabTier:
    """See ``port.Tier``."""

    copies = True
    remote = False

    def __init__(self, name: str, file: SlabFile, seal: AnySeal) -> None:
        """Reads the directory: some 2 us a page that is there."""
        self.name = name
        self._file = file
        self._seal = seal
        self._page_bytes = seal.layout.page_bytes
        slab = file.head.slab_bytes
        self._read_buffer, self._write_buffer = mmap.mmap(-1, slab), mmap.mmap(-1, slab)  # aligned, for O_DIRECT
        self._reading = threading.Lock()
        self._directory = Directory(file.directory, file.head.places, file.writer)
        self._directory.scan()
        self._ranking = Ranking()
        self._touches: dict[int, int] = {}
        self._free = set(range(file.begin, file.end))
        for place, _ in self._directory.known():
            if place in self._free:
                self._free.discard(place)
                entry = self._directory.at(place)
                self._rank(place, entry.saves_s if entry else 0.0)

    @property
    def pages(self) -> int:
        """See ``port.Tier``; those of all processes."""
        return len(self._directory)

    @property
    def places(self) -> int:
        """Pages that there is room for."""
        return self._file.head.places

    def has(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``port.Tier``."""
        self._directory.refresh()
        return [bool(self._directory.find(key)) for key in keys]

    def read(self, key: PageKey, into: memoryview) -> bool:
        """See ``port.Tier``."""
        for place in self._directory.find(key):
            entry = self._directory.at(place)
            if entry is None or entry.key != key:
                self._directory.forget(place)
                continue
            with self._reading, memoryview(self._read_buffer) as slab:
                if self._file.read(place, slab) < self._page_bytes:
                    self._lost(place)
                    raise PageCorrupt(f"{self._file.what} ends within place {place}")
                try:
                    with slab[: self._page_bytes] as stored:
                        self._seal.open(key, stored, entry.proof, into)
                except PageCorrupt:
                    if self._directory.at(place) != entry:
                        continue  # written anew meanwhile
                    self._lost(place)
                    raise
            self._directory.touch(place)
            return True
        return False

    def write(self, final: FinalPage, content: memoryview) -> bool:
        """See ``port.Tier``.  By the one thread that writes."""
        if self._directory.find(final.key):
            return True
        place = self._room()
        if place is None:
            return False
        stored, proof = self._seal.close(final.key, content)
        with memoryview(self._write_buffer) as slab:
            slab[: self._page_bytes] = stored
            self._file.write(place, slab)
        self._directory.put(place, Entry(final.key, final.saves_s, proof))
        self._free.discard(place)
        self._rank(place, final.saves_s)
        return True

    def evicted(self, key: PageKey) -> None:
        """Nothing to do: the page here is another one."""

    def close(self) -> None:
        """See ``port.Tier``."""
        self._directory.close()
        self._file.close()

    # --- room --------------------------------------------------------------------------------------------------------

    def _room(self) -> int | None:
        """A place of our own with nothing in it; what would be missed least is given up for that."""
        for place in self._free:
            return place
        least = self._ranking.least()
        for _ in range(_LOOKS):
            if least is None:
                return None
            fresh = (self._directory.touches(least) - self._touches[least]) % (1 << 32)
            if not fresh:
                break
            self._touches[least] += fresh  # it was read since
            self._ranking.used(least, min(fresh, _MOST_USES))
            least = self._ranking.least()
        if least is not None:
            self._ranking.goes(least)
            self._directory.clear(least)
            self._free.add(least)
        return least

    def _rank(self, place: int, saves_s: float) -> None:
        self._touches[place] = self._directory.touches(place)
        self._ranking.add(place, saves_s)

    def _lost(self, place: int) -> None:
        """What is there is not what its entry says.  Its writer will write over it in time."""
        self._directory.forget(place)
