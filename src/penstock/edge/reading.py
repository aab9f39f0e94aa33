"""From texts that are only read to an answer: all are read, so many at one time, and told in the words of an API.

Whatever ends an answer early closes every token stream it had open.  Large answers are written piece by piece, so that
other people's streams go on meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import msgspec

from penstock.edge.kept import Answers
from penstock.edge.pool_shapes import PoolHead, PoolShape
from penstock.errors import WorkerLost
from penstock.wire.ports import PoolWork

_PIECES_A_TURN = 8
"""Vectors written before others get a turn: a fraction of a millisecond."""

_encode = msgspec.json.Encoder().encode


async def read_all(streams: Answers, work: PoolWork, at_once: int) -> list[bytes]:
    """What every text became, in order; at most ``at_once`` are with the workers at any time.

    Raises what the first that failed did.
    """
    left = iter(range(len(work.requests)))
    found = [b""] * len(work.requests)

    async def take() -> None:
        for index in left:
            found[index] = await _read(streams, work, index)

    tasks = [asyncio.create_task(take()) for _ in range(min(at_once, len(found)))]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    return found


async def _read(streams: Answers, work: PoolWork, index: int) -> bytes:
    stream = streams.stream(work.requests[index])
    try:
        async for batch in stream:
            if batch.pooled is not None:
                return batch.pooled
    finally:
        await stream.aclose()
    raise WorkerLost("A text was read and nothing came of it.")


async def written(shape: PoolShape, head: PoolHead, work: PoolWork, pooled: Sequence[bytes]) -> bytes:
    """The whole answer."""
    items: list[msgspec.Raw] = []
    for item in shape.items(work, pooled):
        items.append(msgspec.Raw(_encode(item)))
        if len(items) % _PIECES_A_TURN == 0:
            await asyncio.sleep(0)
    return _encode(shape.whole(head, items))
