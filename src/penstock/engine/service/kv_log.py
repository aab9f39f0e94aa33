"""What changes in this worker's prefix cache and below it, told to gateways: numbered, batched, and whole again when
asked for.

::

    blocks become known or are evicted --note--> changed --take (once a step)--> KvEvents 7, 8, 9 …
    a gateway that missed some, or is new ----------------snapshot---------> KvEvents 9 in parts: all that is known

Within a batch only a block's last word counts, so the order in it does not matter.  Knows the names of blocks, not
their pages; and nothing about connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice

from penstock.types import BlockHash, WorkerId
from penstock.wire.messages import KV_EVENT_BLOCKS, KV_KEY_BYTES, KvEvents

_NOWHERE = -1


class KvLog:
    """The log of one incarnation.  ``known`` lists all blocks that the cache has now; ``lower`` those that only one of
    the lower ``tiers`` has, with the number of the nearest: 1, 2, ..."""

    def __init__(
        self,
        worker: WorkerId,
        incarnation: int,
        known: Callable[[], Iterable[BlockHash]],
        lower: Callable[[], Mapping[BlockHash, int] | Iterable[tuple[BlockHash, int]]] = tuple,
        tiers: int = 0,
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._known = known
        self._lower = lower
        self._tiers = tiers
        self._changed: dict[bytes, int] = {}  # -> the nearest tier: 0 is the cache
        self.sequence = 0  # of the last message that was taken

    def __len__(self) -> int:
        return len(self._changed)

    def note(self, block: BlockHash, known: bool) -> None:
        """A block is in the cache from now on, or is not any more."""
        self._changed[block[:KV_KEY_BYTES]] = 0 if known else _NOWHERE

    def sank(self, block: BlockHash, tier: int) -> None:
        """A block that the cache does not have is in this lower tier from now on, and in none that is nearer."""
        self._changed[block[:KV_KEY_BYTES]] = tier

    def take(self) -> list[KvEvents]:
        """What has changed since the last call, in order of its numbers."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        by_tier: dict[int, list[bytes]] = {}
        for key, tier in changed.items():
            by_tier.setdefault(tier, []).append(key)
        messages = []
        for start in range(0, max(map(len, by_tier.values())), KV_EVENT_BLOCKS):
            self.sequence += 1
            messages.append(
                self._message(
                    {tier: keys[start : start + KV_EVENT_BLOCKS] for tier, keys in by_tier.items()}, self.sequence
                )
            )
        return messages

    def snapshot(self) -> Iterator[KvEvents]:
        """Everything as it stands after message ``sequence``, in parts.  To be called with nothing left to ``take``.

        Names are copied at once (some 10 ns a block); each part is made when it is asked for.  What changes between
        two parts is in the changes behind ``sequence``, and may or may not be in a part: told after all parts, those
        changes are the last word either way.
        """
        lower = self._lower()
        tiers = lower if isinstance(lower, Mapping) else dict(lower)
        return self._parts(self.sequence, list(self._known()), list(tiers), tiers)

    def _parts(
        self, sequence: int, known: list[BlockHash], below: list[BlockHash], tiers: Mapping[BlockHash, int]
    ) -> Iterator[KvEvents]:
        told = chain(((tiers.get(block, _NOWHERE), block) for block in below), ((0, block) for block in known))
        parts = max(1, -(-(len(known) + len(below)) // KV_EVENT_BLOCKS))
        for part in range(parts):
            by_tier: dict[int, list[bytes]] = {}
            for tier, block in islice(told, KV_EVENT_BLOCKS):
                by_tier.setdefault(tier, []).append(block[:KV_KEY_BYTES])
            yield self._message(by_tier, sequence, part=part, parts=parts)

    def _message(self, by_tier: Mapping[int, list[bytes]], sequence: int, *, part: int = 0, parts: int = 0) -> KvEvents:
        return KvEvents(
            worker=self._worker,
            incarnation=self._incarnation,
            sequence=sequence,
            stored=b"".join(by_tier.get(0, ())),
            removed=b"".join(by_tier.get(_NOWHERE, ())),
            sunk=tuple(b"".join(by_tier.get(tier, ())) for tier in range(1, self._tiers + 1)),
            part=part,
            parts=parts,
        )
