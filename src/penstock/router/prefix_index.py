"""Which worker has which prompt prefix: what workers report of their caches, and what was just sent to them.

Workers number the changes of their prefix caches (``wire.gateway_messages.KvEvents``).  After a gap in the numbers the
worker needs a snapshot.  A prompt that was sent to a worker will be in its cache soon; until the worker's next report
after the first token it counts as cached (``PendingPrefixes``).  The index is an estimate: a worker that has evicted
the pages recomputes them.  Pure: knows hashes, slots and incarnations, no tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.host_ops import BlockIndex
from penstock.types import BlockHash, RequestId
from penstock.wire.gateway_messages import KvEvents

_FINE_BLOCKS = 64


class PendingPrefixes:
    """Open requests by the blocks of their prompts.  Bounded by the requests that are open."""

    def __init__(self) -> None:
        self._holders: dict[BlockHash, dict[int, int]] = {}  # block -> slot -> how many open requests
        self._open: dict[RequestId, tuple[list[BlockHash], list[int]]] = {}
        self._read: dict[int, list[list[BlockHash]]] = {}  # by slot: blocks of prompts that are read, until it reports

    def __len__(self) -> int:
        return len(self._open)

    def add(self, request: RequestId, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """This prompt was sent to these slots, instead of any to which it was sent before."""
        for blocks, slot in self._closed(request):
            self._take_back(blocks, slot)
        if not hashes or not slots:
            return
        blocks = [hashes[index] for index in _grid(len(hashes))]
        self._open[request] = (blocks, list(slots))
        for block in blocks:
            held = self._holders.setdefault(block, {})
            for slot in slots:
                held[slot] = held.get(slot, 0) + 1

    def on_prefilled(self, request: RequestId) -> None:
        """The prompt is computed, or was cancelled: removed with the next reports of its workers."""
        for blocks, slot in self._closed(request):
            self._read.setdefault(slot, []).append(blocks)

    def on_report(self, slot: int) -> None:
        """A worker has reported: prompts computed there no longer count."""
        for blocks in self._read.pop(slot, ()):
            self._take_back(blocks, slot)

    def _closed(self, request: RequestId) -> Iterator[tuple[list[BlockHash], int]]:
        opened = self._open.pop(request, None)
        if opened is not None:
            for slot in opened[1]:
                yield opened[0], slot

    def remove_slot(self, slot: int) -> None:
        """Whatever was sent there is lost."""
        self.on_report(slot)
        for blocks, slots in self._open.values():
            if slot in slots:
                slots.remove(slot)
                self._take_back(blocks, slot)

    def depths(self, hashes: Sequence[BlockHash]) -> Iterator[tuple[int, int]]:
        """(slot, leading blocks of this prompt that were sent to it) of all slots that were sent any.

        Who was sent a block was sent all blocks before it: where the number of slots is equal, they are the same.
        """
        if not self._holders or not hashes:
            return
        held = self._at(hashes[0])
        grid = _grid(len(hashes))
        last = 0
        while held:
            low, high = last, len(grid)
            while low + 1 < high:
                middle = (low + high) // 2
                low, high = (middle, high) if len(self._at(hashes[grid[middle]])) == len(held) else (low, middle)
            after = self._at(hashes[grid[high]]) if high < len(grid) else _NOBODY
            for slot in held:
                if slot not in after:
                    yield slot, grid[low] + 1
            last, held = high, after

    def sharers(self, hashes: Sequence[BlockHash], blocks: int) -> int:
        """How many open requests begin with the first ``blocks`` blocks of this prompt, 1 or more."""
        grid = _grid(min(blocks, len(hashes))) if self._open else ()
        return max(self._at(hashes[grid[-1]]).values(), default=0) if grid else 0

    def _at(self, block: BlockHash) -> Mapping[int, int]:
        return self._holders.get(block, _NOBODY)

    def _take_back(self, blocks: Sequence[BlockHash], slot: int) -> None:
        for block in blocks:
            held = self._holders[block]
            if held[slot] > 1:
                held[slot] -= 1
                continue
            del held[slot]
            if not held:
                del self._holders[block]


_NOBODY: Mapping[int, int] = MappingProxyType({})


def _grid(blocks: int) -> list[int]:
    """Indices of the blocks that are stored of a prompt of ``blocks`` blocks."""
    grid = list(range(min(blocks, _FINE_BLOCKS)))
    start, stride = _FINE_BLOCKS, 2
    while start < blocks:
        end = min(blocks, 2 * start)
        grid.extend(range(start + stride - 1, end, stride))
        start, stride = 2 * start, 2 * stride
    return grid


SNAPSHOT_RETRY_S = 1.0
"""A worker that was asked for all of its cache is given so long before it is asked again."""

SWEEP_ENTRIES = 1 << 17
"""Places of the table that are looked at for ended workers at each ``sweep``: some 3 ms, and nothing while all live."""


@dataclass(slots=True)
class _Followed:
    """One incarnation of a worker: how far its telling has been heard."""

    incarnation: int
    owner: int | None = None  # in the native index; None: there are more workers than it has room for
    lower: list[int] = field(default_factory=list[int])  # owners of all that is in its cache or a tier down to this one
    sequence: int = 0  # of the last change that was taken
    part: int | None = None  # of the snapshot that is coming: the next one
    whole: bool = False  # nothing is missing
    asked: float = float("-inf")  # when it was last asked for everything


class PrefixIndex:
    """Block hash -> slots that hold the block.

    ``capacity`` bounds the blocks, ``max_workers`` the workers (one with lower tiers counts as one more for
    each of them); the memory is 15 to 19 bytes a block, however many workers hold it.
    """

    def __init__(self, capacity: int = 1 << 24, max_workers: int = 1024) -> None:
        """Raises ValueError for limits below 1."""
        self._blocks = BlockIndex(capacity, max_workers)
        self._followed: list[_Followed | None] = []  # by slot
        self._owners: NDArray[np.intp] = np.zeros(0, np.intp)  # by slot, ``max_workers`` for one without
        self._below: list[NDArray[np.intp]] = []  # the same for each lower tier that any worker has
        self._depths: NDArray[np.int32] = np.zeros(max_workers + 1, np.int32)  # by owner; the last stays 0
        self._nobody = max_workers
        self.pending = PendingPrefixes()
        self.gaps = 0  # gaps in the numbers of workers' changes
        self.refused = 0  # blocks that found no room

    # --- workers come and go ----------------------------------------------------------------------------------------

    def add_worker(self, slot: int, incarnation: int) -> None:
        """The worker of this slot has begun anew, with an empty cache."""
        while len(self._followed) <= slot:
            self._followed.append(None)
        self._owners = self._longer(self._owners)
        self._below = [self._longer(owners) for owners in self._below]
        self.remove_worker(slot)
        followed = self._followed[slot] = _Followed(incarnation)
        self._begin(slot, followed)

    def remove_worker(self, slot: int) -> None:
        """The worker of this slot has ended, and its cache with it."""
        followed = self._followed[slot] if slot < len(self._followed) else None
        if followed is None:
            return
        self._end(slot, followed)
        self._followed[slot] = None
        self.pending.remove_slot(slot)

    def sweep(self) -> None:
        """Give back some of the memory of what has ended.  Called now and then."""
        self._blocks.sweep(SWEEP_ENTRIES)

    # --- what workers tell ------------------------------------------------------------------------------------------

    def on_kv_events(self, slot: int, events: KvEvents) -> None:
        """A worker tells of its cache.  What is old, or out of turn, changes nothing."""
        followed = self._current(slot, events.incarnation)
        if followed is None:
            return
        if events.parts:
            self._take_part(slot, followed, events)
        elif followed.whole and events.sequence == followed.sequence + 1:
            followed.sequence = events.sequence
            self._apply(slot, followed, events)
        elif followed.whole and events.sequence > followed.sequence:
            self._miss(followed)

    def on_report(self, slot: int, incarnation: int, sequence: int) -> None:
        """Compare a report's number of changes with those received."""
        followed = self._current(slot, incarnation)
        if followed is None:
            return
        if followed.whole and sequence > followed.sequence:
            self._miss(followed)
        self.pending.on_report(slot)

    def needs_snapshot(self, slot: int, now: float) -> bool:
        """Whether to request a snapshot from the worker.  True at most once in ``SNAPSHOT_RETRY_S``."""
        followed = self._followed[slot] if slot < len(self._followed) else None
        if followed is None or followed.whole or now - followed.asked < SNAPSHOT_RETRY_S:
            return False
        if followed.owner is None:  # there was no room when it came; others may have gone since
            self._begin(slot, followed)
            if followed.owner is None:
                followed.asked = now
                return False
        followed.asked = now
        return True

    def _take_part(self, slot: int, followed: _Followed, events: KvEvents) -> None:
        if events.part == 0:
            self._end(slot, followed)
            self._begin(slot, followed)
            followed.whole, followed.part, followed.sequence = False, 0, events.sequence
        if followed.part != events.part or followed.sequence != events.sequence:
            followed.part = None
            return
        self._apply(slot, followed, events)
        followed.part = events.part + 1
        if followed.part == events.parts:
            # What was told to nobody, because there was no owner for it, is asked for again.
            followed.part, followed.whole = None, followed.owner is not None

    def _apply(self, slot: int, followed: _Followed, events: KvEvents) -> None:
        """Each owner has what the ones before it have, and one tier more."""
        if followed.owner is None:
            return
        removed, stored, *sunk = map(_whole_keys, (events.removed, events.stored, *events.sunk))
        if self._deepen(slot, followed, len(sunk)) and not events.parts:
            self._miss(followed)
        for tier, owner in enumerate((followed.owner, *followed.lower)):
            self._blocks.remove(owner, b"".join((removed, *sunk[tier:])))
            self.refused += self._blocks.add(owner, b"".join((stored, *sunk[:tier])))

    def _deepen(self, slot: int, followed: _Followed, tiers: int) -> bool:
        """Open owners for ``tiers`` lower tiers, as far as there is room.  Returns whether one is new."""
        before = len(followed.lower)
        while len(followed.lower) < tiers and (owner := self._blocks.open()) is not None:
            if len(followed.lower) == len(self._below):
                self._below.append(np.full(len(self._owners), self._nobody, np.intp))
            self._below[len(followed.lower)][slot] = owner
            followed.lower.append(owner)
        return len(followed.lower) > before

    def _miss(self, followed: _Followed) -> None:
        """Keep what is known as an estimate until the next snapshot."""
        self.gaps += 1
        followed.whole = False

    # --- questions --------------------------------------------------------------------------------------------------

    def hits(self, hashes: Sequence[BlockHash], slots: int) -> NDArray[np.int32]:
        """How many leading blocks of this prompt each of the first ``slots`` slots has, or will have soon."""
        return self.with_pending(hashes, self.stored_blocks(hashes, slots))

    def stored_blocks(self, hashes: Sequence[BlockHash], slots: int) -> NDArray[np.int32]:
        """How many it has by its own word."""
        if not hashes:
            return np.zeros(slots, np.int32)
        self._blocks.match(hashes, self._depths[:-1])
        return self._of(self._owners, slots)

    def tier_blocks(self, hashes: Sequence[BlockHash], slots: int) -> tuple[NDArray[np.int32], ...]:
        """How many it has with one lower tier, with two...; as of the last ``stored``, which was of the same hashes."""
        return tuple(self._of(owners, slots) for owners in self._below) if hashes else ()

    def _of(self, owners: NDArray[np.intp], slots: int) -> NDArray[np.int32]:
        found = self._depths[owners[:slots]]
        if len(found) < slots:
            found = np.concatenate((found, np.zeros(slots - len(found), np.int32)))
        return found

    def with_pending(self, hashes: Sequence[BlockHash], stored: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same with what it will have soon."""
        found = stored
        for slot, blocks in self.pending.depths(hashes) if hashes else ():
            if slot < len(found) and blocks > found[slot]:
                found = found.copy() if found is stored else found
                found[slot] = blocks
        return found

    def add_pending(self, request: RequestId, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """A prompt was sent to these slots."""
        self.pending.add(request, hashes, slots)

    def on_prefilled(self, request: RequestId) -> None:
        """It has its first token, or will never have one.  The next report of each worker that it was sent to says what
        it left in caches; until then those pages are assumed to be there."""
        self.pending.on_prefilled(request)

    def __len__(self) -> int:
        return self._blocks.blocks()

    @property
    def memory_bytes(self) -> int:
        """Memory of the index."""
        return self._blocks.memory_bytes()

    # --- owners -----------------------------------------------------------------------------------------------------

    def _current(self, slot: int, incarnation: int) -> _Followed | None:
        followed = self._followed[slot] if slot < len(self._followed) else None
        return followed if followed is not None and followed.incarnation == incarnation else None

    def _begin(self, slot: int, followed: _Followed) -> None:
        followed.owner = self._blocks.open()
        self._owners[slot] = self._nobody if followed.owner is None else followed.owner

    def _end(self, slot: int, followed: _Followed) -> None:
        for owner in (followed.owner, *followed.lower):
            if owner is not None:
                self._blocks.close(owner)
        followed.owner = None
        followed.lower.clear()
        for owners in (self._owners, *self._below):
            owners[slot] = self._nobody

    def _longer(self, owners: NDArray[np.intp]) -> NDArray[np.intp]:
        """With a place for every slot."""
        more = np.full(max(0, len(self._followed) - len(owners)), self._nobody, np.intp)
        return np.concatenate((owners, more)) if len(more) else owners


def _whole_keys(packed: bytes) -> bytes:
    """Without the part of a key that a strange peer may have put at the end."""
    return packed[: len(packed) // 8 * 8]
