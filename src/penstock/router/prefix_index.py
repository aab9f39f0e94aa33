"""Which worker has probably computed which prompt prefix: a bounded memory, least recently used out first.

A guess, never a promise: a worker may have evicted the pages, and then it computes them again.  Block hashes are
chained, so "holds block n" means "held all before it", and the longest match is found by bisection.  Long prompts are
remembered on a grid that grows coarser (every block up to 64, then every 2nd, every 4th, …), which bounds both the
memory and the time of a decision by the logarithm of the length and costs at most 1/32 of a match.
Pure: knows hashes and slots, no tokens and no workers' states.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from penstock.types import BlockHash

_FINE_BLOCKS = 64
_HOLDERS = 8  # workers remembered a block


class PrefixIndex:
    """Block hash -> the (slot, incarnation) pairs that were given a prompt with that block.

    ``capacity`` bounds the number of blocks remembered.
    """

    def __init__(self, capacity: int = 65_536) -> None:
        if capacity < 1:
            raise ValueError(f"a prefix index of {capacity} blocks remembers nothing")
        self._capacity = capacity
        self._holders: OrderedDict[BlockHash, dict[int, int]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._holders)

    def record(self, hashes: Sequence[BlockHash], slot: int, incarnation: int) -> None:
        """Remember that ``slot`` was given the prompt with these blocks."""
        # From the last block to the first: a prefix is always younger than what extends it, so it goes later.
        for index in reversed(_grid(len(hashes))):
            key = hashes[index]
            holders = self._holders.get(key)
            if holders is None:
                self._holders[key] = {slot: incarnation}
                continue
            self._holders.move_to_end(key)
            holders.pop(slot, None)
            holders[slot] = incarnation
            if len(holders) > _HOLDERS:
                del holders[next(iter(holders))]
        while len(self._holders) > self._capacity:
            self._holders.popitem(last=False)

    def match(self, hashes: Sequence[BlockHash], slot: int, incarnation: int) -> int:
        """How many leading blocks of this prompt that incarnation of ``slot`` was given before."""
        return self.matches(hashes, [(slot, incarnation)])[0]

    def matches(self, hashes: Sequence[BlockHash], workers: Sequence[tuple[int, int]]) -> list[int]:
        """``match`` for each (slot, incarnation)."""
        first = self._holders.get(hashes[0]) if hashes else None
        if first is None:
            return [0] * len(workers)
        grid = _grid(len(hashes))
        return [
            self._match(hashes, grid, slot, incarnation) if first.get(slot) == incarnation else 0
            for slot, incarnation in workers
        ]

    def _match(self, hashes: Sequence[BlockHash], grid: Sequence[int], slot: int, incarnation: int) -> int:
        low, high = 1, len(grid)
        while low < high:
            middle = (low + high) // 2
            holders = self._holders.get(hashes[grid[middle]])
            if holders is not None and holders.get(slot) == incarnation:
                low = middle + 1
            else:
                high = middle
        return grid[low - 1] + 1


def _grid(blocks: int) -> list[int]:
    """Indices of the blocks that are remembered of a prompt of so many."""
    grid = list(range(min(blocks, _FINE_BLOCKS)))
    start, stride = _FINE_BLOCKS, 2
    while start < blocks:
        end = min(blocks, 2 * start)
        grid.extend(range(start + stride - 1, end, stride))
        start, stride = 2 * start, 2 * stride
    return grid
