"""Which blocks this worker's cache has given up that a tier below it still has: so gateways know what a hit costs here.

A tier tells nobody what it drops, so some of the blocks are looked at again now and then; until then they are a guess,
as all that gateways know of caches.  Knows names and numbers of tiers, no pages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

from penstock.types import BlockHash

MOST_SUNK = 1 << 18
"""Blocks that are known to be below; those that sank first are forgotten beyond that."""

LOOKED_AT = 8
"""Blocks that are looked at again at a time."""

Nearest = Callable[[Sequence[BlockHash]], Sequence[int]]
"""The number of the nearest tier that has each block: 1, 2...; 0: none."""


class Sunk:
    """Changes come out as (block, tier); 0: it is in none, and not in the cache."""

    def __init__(self, nearest: Nearest) -> None:
        self._nearest = nearest
        self._tiers: dict[BlockHash, int] = {}  # looked at longest ago first

    def rose(self, block: BlockHash) -> None:
        """The cache has it again."""
        self._tiers.pop(block, None)

    def left(self, blocks: Sequence[BlockHash]) -> Iterator[tuple[BlockHash, int]]:
        """The cache has given these up.  The tiers are asked once for all of them."""
        # All that may have to go are found in one walk: the front of a dict from which much was taken is slow to find.
        oldest = iter(list(islice(self._tiers, max(0, len(self._tiers) + len(blocks) - MOST_SUNK))))
        for block, tier in zip(blocks, self._nearest(blocks) if blocks else (), strict=True):
            if tier:
                self._tiers[block] = tier
                if len(self._tiers) > MOST_SUNK:
                    forgotten = next(oldest, None) or next(iter(self._tiers))
                    del self._tiers[forgotten]
                    yield forgotten, 0
            yield block, tier

    def look(self) -> Iterator[tuple[BlockHash, int]]:
        """What has changed of some since they were looked at last."""
        blocks = list(islice(self._tiers, LOOKED_AT))
        for block, tier in zip(blocks, self._nearest(blocks) if blocks else (), strict=True):
            before = self._tiers.pop(block)
            if tier:
                self._tiers[block] = tier
            if tier != before:
                yield block, tier

    def all(self) -> Mapping[BlockHash, int]:
        """Every block, and its tier."""
        return self._tiers
