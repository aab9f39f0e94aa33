"""What changes in this worker's prefix cache, told to gateways: numbered, batched, and whole again when asked for.

::

    blocks become known or are evicted --note--> changed --take (once a step)--> KvEvents 7, 8, 9 …
    a gateway that missed some, or is new ----------------snapshot---------> KvEvents 9 in parts: all that is known

Within a batch only a block's last word counts, so the order in it does not matter.  Knows the names of blocks, not
their pages; and nothing about connections.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from penstock.types import BlockHash, WorkerId
from penstock.wire.messages import KV_EVENT_BLOCKS, KV_KEY_BYTES, KvEvents


class KvLog:
    """The log of one incarnation.  ``known`` lists all blocks that the cache has now."""

    def __init__(self, worker: WorkerId, incarnation: int, known: Callable[[], Iterable[BlockHash]]) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._known = known
        self._changed: dict[bytes, bool] = {}
        self.sequence = 0  # of the last message that was taken

    def __len__(self) -> int:
        return len(self._changed)

    def note(self, block: BlockHash, known: bool) -> None:
        """A block is in the cache from now on, or is not any more."""
        self._changed[block[:KV_KEY_BYTES]] = known

    def take(self) -> list[KvEvents]:
        """What has changed since the last call, in order of its numbers."""
        if not self._changed:
            return []
        changed, self._changed = self._changed, {}
        stored = [key for key, known in changed.items() if known]
        removed = [key for key, known in changed.items() if not known]
        messages = []
        for start in range(0, max(len(stored), len(removed)), KV_EVENT_BLOCKS):
            self.sequence += 1
            end = start + KV_EVENT_BLOCKS
            messages.append(self._message(stored=stored[start:end], removed=removed[start:end]))
        return messages

    def snapshot(self) -> Iterator[KvEvents]:
        """Everything as it stands after message ``sequence``, in parts.  To be called with nothing left to ``take``."""
        keys = [block[:KV_KEY_BYTES] for block in self._known()]
        parts = max(1, -(-len(keys) // KV_EVENT_BLOCKS))
        for part in range(parts):
            stored = keys[part * KV_EVENT_BLOCKS : (part + 1) * KV_EVENT_BLOCKS]
            yield self._message(stored=stored, part=part, parts=parts)

    def _message(
        self, *, stored: list[bytes], removed: list[bytes] | None = None, part: int = 0, parts: int = 0
    ) -> KvEvents:
        return KvEvents(
            worker=self._worker,
            incarnation=self._incarnation,
            sequence=self.sequence,
            stored=b"".join(stored),
            removed=b"".join(removed or ()),
            part=part,
            parts=parts,
        )
