"""Which worker has which prompt prefix: what workers tell of their caches, and what was just sent to them.

Two sources.  Workers number the changes of their prefix caches (``wire.messages.KvEvents``); a number that is missing,
or that a report knows and we do not, makes the worker ``lacking`` until it has told everything anew.  And a prompt that
was sent somewhere will be in that cache soon: until its first token it counts as if it were (``promises``).
A guess, never a promise to anybody: a worker may have evicted the pages meanwhile, and then it computes them again.
Pure: knows hashes, slots and incarnations, no tokens and no workers' states.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from penstock.kernels.host_ops import BlockIndex
from penstock.router.promises import Promises
from penstock.types import BlockHash, RequestId
from penstock.wire.messages import KvEvents

ASK_AGAIN_S = 1.0
"""A worker that was asked for all of its cache is given so long before it is asked again."""

SWEPT_AT_ONCE = 1 << 17
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

    ``capacity`` bounds the blocks, ``max_workers`` the workers that are told apart (a worker with lower tiers counts as
    one more for each of them); the memory is 15 to 19 bytes a block, whoever holds it.
    """

    def __init__(self, capacity: int = 1 << 24, max_workers: int = 1024) -> None:
        """Raises ValueError for limits below 1."""
        self._blocks = BlockIndex(capacity, max_workers)
        self._followed: list[_Followed | None] = []  # by slot
        self._owners: NDArray[np.intp] = np.zeros(0, np.intp)  # by slot, ``max_workers`` for one without
        self._below: list[NDArray[np.intp]] = []  # the same for each lower tier that anybody has told of
        self._depths: NDArray[np.int32] = np.zeros(max_workers + 1, np.int32)  # by owner; the last stays 0
        self._nobody = max_workers
        self.promises = Promises()
        self.gaps = 0  # how often something that a worker told was missed
        self.refused = 0  # blocks that found no room

    # --- workers come and go ----------------------------------------------------------------------------------------

    def follow(self, slot: int, incarnation: int) -> None:
        """The worker of this slot has begun anew, with an empty cache."""
        while len(self._followed) <= slot:
            self._followed.append(None)
        self._owners = self._longer(self._owners)
        self._below = [self._longer(owners) for owners in self._below]
        self.drop(slot)
        followed = self._followed[slot] = _Followed(incarnation)
        self._begin(slot, followed)

    def drop(self, slot: int) -> None:
        """The worker of this slot has ended, and its cache with it."""
        followed = self._followed[slot] if slot < len(self._followed) else None
        if followed is None:
            return
        self._end(slot, followed)
        self._followed[slot] = None
        self.promises.drop(slot)

    def sweep(self) -> None:
        """Give back some of the memory of what has ended.  Called now and then."""
        self._blocks.sweep(SWEPT_AT_ONCE)

    # --- what workers tell ------------------------------------------------------------------------------------------

    def take(self, slot: int, events: KvEvents) -> None:
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

    def told(self, slot: int, incarnation: int, sequence: int) -> None:
        """A worker's report says that it has told of so many changes; all of them should be here by now."""
        followed = self._current(slot, incarnation)
        if followed is None:
            return
        if followed.whole and sequence > followed.sequence:
            self._miss(followed)
        self.promises.reported(slot)

    def lacking(self, slot: int, now: float) -> bool:
        """Is the worker to be asked for all that it has?  True at most once in ``ASK_AGAIN_S``."""
        followed = self._followed[slot] if slot < len(self._followed) else None
        if followed is None or followed.whole or now - followed.asked < ASK_AGAIN_S:
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
            followed.part, followed.whole = None, True

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
        """The worker has so many lower tiers; those for which there is no room are not known.  Is one known newly?"""
        before = len(followed.lower)
        while len(followed.lower) < tiers and (owner := self._blocks.open()) is not None:
            if len(followed.lower) == len(self._below):
                self._below.append(np.full(len(self._owners), self._nobody, np.intp))
            self._below[len(followed.lower)][slot] = owner
            followed.lower.append(owner)
        return len(followed.lower) > before

    def _miss(self, followed: _Followed) -> None:
        """What is here stays the best guess until the worker has told everything anew."""
        self.gaps += 1
        followed.whole = False

    # --- questions --------------------------------------------------------------------------------------------------

    def hits(self, hashes: Sequence[BlockHash], slots: int) -> NDArray[np.int32]:
        """How many leading blocks of this prompt each of the first ``slots`` slots has, or will have soon."""
        return self.promised(hashes, self.stored(hashes, slots))

    def stored(self, hashes: Sequence[BlockHash], slots: int) -> NDArray[np.int32]:
        """How many it has by its own word."""
        if not hashes:
            return np.zeros(slots, np.int32)
        self._blocks.match(hashes, self._depths[:-1])
        return self._of(self._owners, slots)

    def below(self, hashes: Sequence[BlockHash], slots: int) -> tuple[NDArray[np.int32], ...]:
        """How many it has with one lower tier, with two...; as of the last ``stored``, which was of the same hashes."""
        return tuple(self._of(owners, slots) for owners in self._below) if hashes else ()

    def _of(self, owners: NDArray[np.intp], slots: int) -> NDArray[np.int32]:
        found = self._depths[owners[:slots]]
        if len(found) < slots:
            found = np.concatenate((found, np.zeros(slots - len(found), np.int32)))
        return found

    def promised(self, hashes: Sequence[BlockHash], stored: NDArray[np.int32]) -> NDArray[np.int32]:
        """The same with what it will have soon."""
        found = stored
        for slot, blocks in self.promises.depths(hashes) if hashes else ():
            if slot < len(found) and blocks > found[slot]:
                found = found.copy() if found is stored else found
                found[slot] = blocks
        return found

    def expect(self, request: RequestId, hashes: Sequence[BlockHash], slots: Sequence[int]) -> None:
        """A prompt was sent to these slots."""
        self.promises.add(request, hashes, slots)

    def settle(self, request: RequestId) -> None:
        """It has its first token, or will never have one: what it has left in caches is told with the next report of
        each worker that it was sent to, and counted on until then."""
        self.promises.settle(request)

    def __len__(self) -> int:
        return self._blocks.blocks()

    @property
    def memory_bytes(self) -> int:
        """Of what workers told."""
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
