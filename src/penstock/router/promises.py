"""Prompts that were sent to workers and have no first token yet: their blocks will be in those caches soon.  With the
first token they are, and the worker's next report says so: until then they count, too.

Counted, so that one of two prompts with a common beginning can go without the other.  Long prompts are remembered on a
grid that grows coarser (every block up to 64, then every 2nd, every 4th, …), which bounds both the memory and the time
of a question by the logarithm of the length and costs at most 1/32 of a match.  Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from penstock.types import BlockHash, RequestId

_FINE_BLOCKS = 64


class Promises:
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

    def settle(self, request: RequestId) -> None:
        """This request's prompt is read, or nobody wants that any more: forgotten when its workers have reported."""
        for blocks, slot in self._closed(request):
            self._read.setdefault(slot, []).append(blocks)

    def reported(self, slot: int) -> None:
        """A worker has told what it has, so what is read there need not be counted on any more."""
        for blocks in self._read.pop(slot, ()):
            self._take_back(blocks, slot)

    def _closed(self, request: RequestId) -> Iterator[tuple[list[BlockHash], int]]:
        opened = self._open.pop(request, None)
        if opened is not None:
            for slot in opened[1]:
                yield opened[0], slot

    def drop(self, slot: int) -> None:
        """Whatever was sent there is lost."""
        self.reported(slot)
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
    """Indices of the blocks that are remembered of a prompt of so many."""
    grid = list(range(min(blocks, _FINE_BLOCKS)))
    start, stride = _FINE_BLOCKS, 2
    while start < blocks:
        end = min(blocks, 2 * start)
        grid.extend(range(start + stride - 1, end, stride))
        start, stride = 2 * start, 2 * stride
    return grid
