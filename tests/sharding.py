"""Long tests in shards, of which CI runs one at a time (.ci/rotation.py), and those that found no time.  Pure."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from typing import NamedTuple


class Shard(NamedTuple):
    index: int
    count: int


def parse_shard(text: str) -> Shard:
    """``3/8``: the fourth of eight.  Raises ValueError."""
    index, _, count = text.partition("/")
    shard = Shard(int(index), int(count))
    if not 0 <= shard.index < shard.count:
        raise ValueError(f"{text}: expected INDEX/COUNT with 0 <= INDEX < COUNT")
    return shard


def shard_of(nodeid: str, count: int) -> int:
    """By the name alone: a test stays in its shard whatever other tests there are, so that it misses no turn."""
    return zlib.crc32(nodeid.encode()) % count


def in_turn(nodeids: Sequence[str], shard: Shard, left: Collection[str]) -> list[int]:
    """The places of the tests that run: those ``left`` over from an earlier run first, then those of the shard."""
    owed = [place for place, nodeid in enumerate(nodeids) if nodeid in left]
    due = [
        place
        for place, nodeid in enumerate(nodeids)
        if nodeid not in left and shard_of(nodeid, shard.count) == shard.index
    ]
    return owed + due
