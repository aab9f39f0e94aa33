"""Pages in other workers' KV memory on this host, copied straight out of their prefix caches.

Every worker has the others' memory mapped read-only, for hand-overs (``transfer.shm``).  Beside it lies one directory
(anonymous shared memory): each worker writes there what stands in which of its pages, with a checksum, and takes back
what it evicts.  Who wants a page copies it and proves the copy; when the owner has given it away meanwhile, the proof
fails.  So nobody waits for anybody, no page is held for others, and nothing is stored twice.

This is how the next turn of a chat finds the last answer, which the decode worker wrote.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError, PageCorrupt
from penstock.kv.memory import KvMemory
from penstock.kv.store.envelope import PageEnvelope
from penstock.kv.store.page_index import IndexEntry, PageIndex, index_bytes
from penstock.kv.store.tier import FinalPage, PageKey
from penstock.types import PageId, WorkerId


class PeerTier:
    """See ``port.Tier``."""

    name = "peers"
    stores_copies = False
    is_remote = False

    def __init__(
        self,
        descriptor: int,
        sizes: Sequence[tuple[WorkerId, int]],
        own: WorkerId,
        peers: Mapping[WorkerId, KvMemory],
        seal: PageEnvelope,
    ) -> None:
        """``descriptor``: of the shared directory; ``sizes``: every worker with its pages, the same for all.

        What an earlier incarnation of this worker said of its pages is taken back: call this before they are wiped.
        """
        self._seal = seal
        self._peers = peers
        self._firsts: dict[WorkerId, int] = {}
        places = 0
        for worker, pages in sizes:
            self._firsts[worker] = places
            places += pages
        self._sizes = dict(sizes)
        self._own = range(self._firsts[own], self._firsts[own] + self._sizes[own])
        try:
            mapped = mmap.mmap(descriptor, index_bytes(places))
        except (OSError, ValueError) as error:
            raise ConfigError(f"cannot map the directory of KV pages: {error}") from None
        writer = [worker for worker, _ in sizes].index(own)
        self._directory = PageIndex(memoryview(mapped), places, writer)
        self._directory.scan()
        self._places: dict[PageKey, int] = {}
        for place, _ in self._directory.known_places():
            if place in self._own:
                self._directory.clear_entry(place)

    @property
    def pages(self) -> int:
        """See ``port.Tier``."""
        return len(self._directory) - len(self._places)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        """See ``port.Tier``."""
        self._directory.refresh()
        return [any(place not in self._own for place in self._directory.find(key)) for key in keys]

    def read_page(self, key: PageKey, into: memoryview) -> bool:
        """See ``port.Tier``."""
        for place in self._directory.find(key):
            if place in self._own:
                continue
            entry = self._directory.entry_at(place)
            if entry is None or entry.key != key:
                self._directory.ignore_place(place)
                continue
            try:
                self._seal.unseal(key, self._view(place), entry.proof, into)
            except PageCorrupt:
                if self._directory.entry_at(place) == entry:
                    self._directory.ignore_place(place)
                    raise
                continue
            return True
        return False

    def write_page(self, final: FinalPage, content: memoryview) -> bool:
        """See ``port.Tier``: say what stands in one of our pages."""
        _, proof = self._seal.seal(final.key, content)
        place = self._own.start + final.page
        self._directory.write_entry(place, IndexEntry(final.key, final.saves_s, proof))
        self._places[final.key] = place  # last: ``evicted``, from another thread, takes back what is there
        return True

    def on_evicted(self, key: PageKey) -> None:
        """See ``port.Tier``."""
        place = self._places.pop(key, None)
        if place is not None:
            self._directory.clear_entry(place)

    def close(self) -> None:
        """See ``port.Tier``."""
        for place in self._places.values():
            self._directory.clear_entry(place)
        self._directory.close()

    def _view(self, place: int) -> memoryview:
        for worker, first in self._firsts.items():
            if first <= place < first + self._sizes[worker] and worker in self._peers:
                return self._peers[worker].view(PageId(place - first))
        raise PageCorrupt(f"place {place} is no worker's whose memory is mapped here")
