"""Law 1 over two nodes with a gateway each: one answer through either gateway, streamed or not, also when workers die.

The matrix of ``test_one_answer.py``, with ``penstock node`` twice.  One request's prompt, pages and tokens may be of
different nodes, and what a gateway knows of the other node's workers it knows by heartbeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from .one_answer import (
    ROOMS,
    Plain,
    answers_with_a_kill,
    assert_it_took_place,
    compare,
    crowd_until_somebody_gives_way,
)
from .server import PenstockNode
from .streams import Answer, all_answers, whole_answers
from .two_nodes import AGGREGATED, SPLIT, NodePair, Workers, two_nodes
from .varied import varied_requests

TOPOLOGIES: dict[str, Mapping[str, Workers]] = {
    "split on both nodes": {"a": SPLIT, "b": SPLIT},
    "prefill on one, decode on the other": {"a": (("prefill", 1),), "b": (("decode", 1),)},
    "aggregated": {"a": AGGREGATED, "b": AGGREGATED},
}
CHUNKS = {"chunk-16": "max_chunk_tokens = 16", "chunk-64": "max_chunk_tokens = 64", "whole": ""}

SETTINGS = """
{chunk}
kv_memory = "{room}"

[settings.failover]
silence_s = 60.0
still_s = 60.0
no_path_s = 60.0
"""
"""Slow workers are not taken for dead, and answers wait for one that starts anew."""

CELLS = [
    pytest.param("split on both nodes", "whole", "roomy", id="in short"),
    *(
        pytest.param(topology, chunk, room, id=f"{topology}, {chunk}, {room}", marks=pytest.mark.long)
        for topology in TOPOLOGIES
        for chunk in CHUNKS
        for room in ROOMS
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("topology", "chunk", "room"), CELLS)
def test_two_nodes_give_one_answer(
    topology: str, chunk: str, room: str, plain: Plain, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    settings = SETTINGS.format(chunk=CHUNKS[chunk], room=ROOMS[room])
    with two_nodes(tmp_path, workers=TOPOLOGIES[topology], settings=settings) as pair:
        in_short = request.node.callspec.id == "in short"
        for here, there in ((pair.a, pair.b),) if in_short else ((pair.a, pair.b), (pair.b, pair.a)):
            where = f"{topology} {chunk} {room}, streamed by {here.name}"
            bodies = varied_requests(salt=f"{where} killed")
            streamed, whole = asyncio.run(both_ways_with_a_kill(here, there, bodies, plain))
            compare(streamed, plain.varied, where)
            compare(whole, plain.varied, f"{where}, not streamed by {there.name}")
            if not in_short:
                without_a_kill(pair, plain, where)
        if room == "tight":
            crowd_until_somebody_gives_way(pair.a, plain, f"{topology}, crowded")
        assert_it_took_place(pair.a, split=topology != "aggregated", tight=room == "tight")
        pair.assert_nothing_leaked()


async def both_ways_with_a_kill(
    here: PenstockNode, there: PenstockNode, bodies: list[dict[str, Any]], plain: Plain
) -> tuple[list[Answer], list[Answer]]:
    """All answers twice, at once: streamed by one gateway, and in one piece by the other.  Workers that decode die."""
    whole = asyncio.create_task(whole_answers(there.url, bodies))
    streamed = await answers_with_a_kill(here, bodies, plain.varied, together=True)
    return streamed, await whole


def without_a_kill(pair: NodePair, plain: Plain, where: str) -> None:
    """Alone and cold at one gateway, then from the cache at the other."""
    bodies = varied_requests(salt=f"{where} alone", salt_each=True)
    for node in pair.nodes:
        compare(asyncio.run(all_answers(node.url, bodies, together=False)), plain.varied, f"{where}, alone")
        compare(asyncio.run(whole_answers(node.url, bodies)), plain.varied, f"{where}, together, not streamed")
