"""Which pages a tier stores, and which it evicts.  Pure.

**Admission.**  A page is stored where the computation that it is expected to save exceeds the cost of storing it, both
in measured seconds: ``chance * (compute - read) > write``.  The chance is learned: for a sample of blocks (by their
hashes, so that all pages of a block are in it or none) it is recorded for a while which of them were requested again,
by origin: blocks of prompts, of responses, and those that had been requested again before.

**Eviction** is by value per byte with recency (GreedyDual-Size-Frequency: Cherkasova 1998; all pages of a tier have one
size, so a byte is a page): ``clock + uses * saves``, where ``saves`` is the computation that is lost with the page and
everything behind it, and the clock is the value of the last evicted page.  A block's ``saves`` exceeds that of all
blocks behind it, so a prefix is shortened from its end, never broken in its middle.
"""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Iterable
from enum import Enum

from penstock.types import BlockHash

SAMPLED = 8
"""One block in this many is sampled."""

FOLLOWED = 1 << 14
"""Blocks that are sampled at one time: one that has not come up again before as many others have come is not awaited
any more."""

_WEIGHTY = 1 << 12  # observations of a kind after which older ones count half


class BlockOrigin(Enum):
    """Origins of blocks, which are requested again at different rates."""

    PROMPT = "of a prompt"
    ANSWER = "of an answer"
    AGAIN = "asked for before"


class ReuseStats:
    """How often blocks are requested again."""

    def __init__(self) -> None:
        self._followed: OrderedDict[BlockHash, BlockOrigin] = OrderedDict()  # oldest first
        self._again = dict.fromkeys(BlockOrigin, 1.0)
        self._all = dict.fromkeys(BlockOrigin, 2.0)

    def reuse_probability(self, origin: BlockOrigin) -> float:
        """For a block of this origin; one half before anything was observed."""
        return self._again[origin] / self._all[origin]

    def on_block_computed(self, block: BlockHash, answer: bool) -> BlockOrigin:
        """A block was computed or fetched.  Returns its origin."""
        if block[0] % SAMPLED:
            return BlockOrigin.ANSWER if answer else BlockOrigin.PROMPT
        origin = self._followed.get(block)
        if origin is None:
            origin = BlockOrigin.ANSWER if answer else BlockOrigin.PROMPT
            self._follow(block, origin)
        return origin

    def on_blocks_requested(self, blocks: Iterable[BlockHash]) -> None:
        """A request's prompt has these blocks."""
        for block in blocks:
            if block[0] % SAMPLED == 0 and (origin := self._followed.pop(block, None)) is not None:
                self._count(origin, 1.0)
                self._follow(block, BlockOrigin.AGAIN)

    def _follow(self, block: BlockHash, origin: BlockOrigin) -> None:
        self._followed[block] = origin
        if len(self._followed) > FOLLOWED:
            self._count(self._followed.popitem(last=False)[1], 0.0)

    def _count(self, origin: BlockOrigin, again: float) -> None:
        self._again[origin] += again
        self._all[origin] += 1
        if self._all[origin] > _WEIGHTY:
            self._again[origin] /= 2
            self._all[origin] /= 2


class EvictionQueue:
    """Places ordered by the value of their pages."""

    def __init__(self) -> None:
        self._value: dict[int, float] = {}
        self._saves: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []
        self._clock = 0.0

    def __len__(self) -> int:
        return len(self._value)

    def add(self, place: int, saves_s: float) -> None:
        """A page was stored."""
        self._saves[place] = saves_s
        self._set(place, self._clock + saves_s)

    def on_used(self, place: int, times: int = 1) -> None:
        """The page was read."""
        if place in self._value:
            self._set(place, max(self._value[place], self._clock) + times * self._saves[place])

    def remove(self, place: int) -> None:
        """The page is gone."""
        self._value.pop(place, None)
        self._saves.pop(place, None)

    def least_valuable(self) -> int | None:
        """The place with the least valuable page; None without pages."""
        while self._heap:
            value, place = self._heap[0]
            if self._value.get(place) == value:
                return place
            heapq.heappop(self._heap)
        return None

    def evict(self, place: int) -> None:
        """Remove a place and advance the clock, so that pages without a recent use lose value."""
        self._clock = max(self._clock, self._value.get(place, 0.0))
        self.remove(place)

    def _set(self, place: int, value: float) -> None:
        self._value[place] = value
        heapq.heappush(self._heap, (value, place))
        if len(self._heap) > 4 * len(self._value) + 64:
            self._heap = [(value, place) for place, value in self._value.items()]
            heapq.heapify(self._heap)
