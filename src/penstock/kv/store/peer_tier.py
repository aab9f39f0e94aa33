"""The peer tier: pages in other workers' KV memory on this host, copied straight out of their prefix caches.

Every worker has the others' memory mapped read-only (``connectors.shm``).  One index in shared memory lists what stands
in which page, with a proof; each worker writes its own entries and clears those of evicted pages.  A reader copies a
page and verifies the copy; if the owner has reused the page meanwhile, verification fails.  So no worker waits for
another, no page is pinned, and nothing is stored twice.

This is how the next turn of a chat finds the last response, which a decode worker computed.
"""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError, PageCorrupt
from penstock.kv.page_memory import KvMemory
from penstock.kv.store.envelope import PageEnvelope
from penstock.kv.store.page_index import IndexEntry, PageIndex, index_bytes
from penstock.kv.store.tier import FinalPage, KvTier, PageKey
from penstock.types import PageId, WorkerId


class PeerTier(KvTier):
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
        """``descriptor``: of the shared index; ``sizes``: every worker with its number of pages, the same for all.

        Clears the entries of this worker's earlier incarnation: create this object before the memory is wiped.
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
        return len(self._directory) - len(self._places)

    def contains(self, keys: Sequence[PageKey]) -> list[bool]:
        self._directory.refresh()
        return [any(place not in self._own for place in self._directory.find(key)) for key in keys]

    def read_page(self, key: PageKey, into: memoryview) -> bool:
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
        """Publishes the entry of one of this worker's own pages."""
        _, proof = self._seal.seal(final.key, content)
        place = self._own.start + final.page
        self._directory.write_entry(place, IndexEntry(final.key, final.saves_s, proof))
        self._places[final.key] = place  # last: ``on_evicted``, on another thread, removes what is there
        return True

    def on_evicted(self, key: PageKey) -> None:
        place = self._places.pop(key, None)
        if place is not None:
            self._directory.clear_entry(place)

    def close(self) -> None:
        for place in self._places.values():
            self._directory.clear_entry(place)
        self._directory.close()

    def _view(self, place: int) -> memoryview:
        for worker, first in self._firsts.items():
            if first <= place < first + self._sizes[worker] and worker in self._peers:
                return self._peers[worker].view(PageId(place - first))
        raise PageCorrupt(f"place {place} is no worker's whose memory is mapped here")
