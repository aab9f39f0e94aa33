"""The lower tiers of one worker's KV cache, by capacity and order of use: a model, not the real store.

::

    device --evicted--> host --evicted--> disk --evicted--> gone
       ^                  |                 |
       +---- read back ---+-----------------+      what was read back stays below, too

Writes are free (they are few beside what the links carry); reading waits its turn and takes the link's time.
Knows names of blocks and counts, no bytes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from penstock.types import BlockHash


class Tier:
    """So many blocks, the least recently used of which goes first."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._blocks: OrderedDict[BlockHash, None] = OrderedDict()

    def __contains__(self, block: BlockHash) -> bool:
        return block in self._blocks

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[BlockHash]:
        return iter(self._blocks)

    def keep(self, block: BlockHash) -> BlockHash | None:
        """Have this block, as the one used last; returns the one that had to leave."""
        if not self.capacity:
            return block
        self._blocks[block] = None
        self._blocks.move_to_end(block)
        return self._blocks.popitem(last=False)[0] if len(self._blocks) > self.capacity else None


class Tiers:
    """Host memory above a disk."""

    def __init__(self, host: int, disk: int) -> None:
        self._tiers = (Tier(host), Tier(disk))
        self.read = [0, 0]  # blocks, of each

    def __contains__(self, block: BlockHash) -> bool:
        return any(block in tier for tier in self._tiers)

    def keep(self, block: BlockHash) -> list[tuple[BlockHash, int]]:
        """The device gives this block up.  Which blocks now stand in which tier at best: 1 host, 2 disk, 0 none."""
        moved, leaving = [], block
        for number, tier in enumerate(self._tiers, 1):
            dropped = tier.keep(leaving)
            if dropped != leaving:
                moved.append((leaving, number))
            if dropped is None:
                return moved
            leaving = dropped
        return moved if leaving in self else [*moved, (leaving, 0)]

    def nearest(self) -> Iterator[tuple[BlockHash, int]]:
        """Every block, and the nearest tier that has it: 1 host, 2 disk."""
        host, disk = self._tiers
        yield from ((block, 1) for block in host)
        yield from ((block, 2) for block in disk if block not in host)

    def found(self, hashes: Sequence[BlockHash], start: int, limit: int) -> tuple[int, int]:
        """Of the blocks from ``start`` on, up to the first that is nowhere here: how many are in host memory, and how
        many on disk only."""
        host, disk = self._tiers
        counts = [0, 0]
        for block in hashes[start:limit]:
            if block in host:
                counts[0] += 1
            elif block in disk:
                counts[1] += 1
            else:
                break
        return counts[0], counts[1]
