"""Law 1 over two nodes with a gateway each: one answer through either gateway, streamed or not, also when workers die.

The matrix of ``test_one_answer.py``, with ``penstock node`` twice: alone and in a batch, cold and from the cache, with
and without a worker that is killed, and where workers guess tokens ahead.  One request's prompt, pages and tokens may
be of different nodes, and what a gateway knows of the other node's workers it knows by heartbeats.  How pages travel
is no axis of its own: in shared memory within a node, over TCP between nodes.
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
    guess_until_some_are_right,
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
speculate = "{guessing}"

[settings.failover]
silence_s = 60.0
still_s = 60.0
no_path_s = 60.0
"""
"""Slow workers are not taken for dead, and answers wait for one that starts anew."""

GUESSING = {("split on both nodes", "chunk-16"): "head", ("aggregated", "whole"): "lookup"}
"""How workers of these topologies and chunk sizes guess tokens ahead."""

CACHED = 1000
"""Prompt tokens, of 6,843, that a pass finds at least of an earlier one, where there is room for all of them."""

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
    settings = SETTINGS.format(chunk=CHUNKS[chunk], room=ROOMS[room], guessing=GUESSING.get((topology, chunk), "off"))
    in_short, where = request.node.callspec.id == "in short", f"{topology} {chunk} {room}"
    with two_nodes(tmp_path, workers=TOPOLOGIES[topology], settings=settings) as pair:
        if in_short:
            killed_together(pair.a, pair.b, plain, where, passes=("cold",))
        else:
            if (topology, chunk) in GUESSING:
                guess_until_some_are_right(pair.a, plain)
            for here, there in ((pair.a, pair.b), (pair.b, pair.a)):
                killed_together(here, there, plain, where, passes=("cold", "cached"))
                without_a_kill(here, there, plain, where, roomy=room == "roomy")
            killed_alone(pair, plain, where)
        if room == "tight":
            crowd_until_somebody_gives_way(pair.a, plain, f"{topology}, crowded")
        for node in (pair.a,) if in_short else pair.nodes:
            assert_it_took_place(node, split=topology != "aggregated", tight=room == "tight")
        pair.assert_nothing_leaked()


def killed_together(
    here: PenstockNode, there: PenstockNode, plain: Plain, where: str, *, passes: tuple[str, ...]
) -> None:
    """In a batch, through both gateways at once: each pass after the first finds what the dead have left in caches."""
    bodies = varied_requests(salt=f"{where}, {here.name}, killed")
    for temperature in passes:
        streamed, whole = asyncio.run(both_ways_with_a_kill(here, there, bodies, plain))
        compare(streamed, plain.varied, f"{where}, {temperature}, killed, streamed by {here.name}")
        compare(whole, plain.varied, f"{where}, {temperature}, killed, not streamed by {there.name}")


async def both_ways_with_a_kill(
    here: PenstockNode, there: PenstockNode, bodies: list[dict[str, Any]], plain: Plain
) -> tuple[list[Answer], list[Answer]]:
    """All answers twice, at once: streamed by one gateway, and in one piece by the other.  Workers that decode die."""
    whole = asyncio.create_task(whole_answers(there.url, bodies))
    streamed = await answers_with_a_kill(here, bodies, plain.varied, together=True)
    return streamed, await whole


def without_a_kill(here: PenstockNode, there: PenstockNode, plain: Plain, where: str, *, roomy: bool) -> None:
    """Alone and cold at one gateway, then from the cache, at the other, too."""
    bodies = varied_requests(salt=f"{where}, {here.name}, alone", salt_each=True)
    for node in (here, there):
        for together in (False, True):
            asked = whole_answers(node.url, bodies) if together else all_answers(node.url, bodies, together=False)
            answers = asyncio.run(asked)
            at = f"{where}, {'together, not streamed' if together else 'alone'} by {node.name} after {here.name}"
            compare(answers, plain.varied, at)
            cached = sum(answer.cached_tokens for answer in answers)
            if roomy and (together or node is there):
                assert cached > CACHED, f"{at}: this pass found {cached} tokens"


def killed_alone(pair: NodePair, plain: Plain, where: str) -> None:
    """Each kill hits the only request: cold at one gateway, then, with what the dead have left, at the other."""
    bodies = varied_requests(salt=f"{where}, killed alone", salt_each=True)
    for node in pair.nodes:
        answers = asyncio.run(answers_with_a_kill(node, bodies, plain.varied, together=False))
        compare(answers, plain.varied, f"{where}, alone, killed, by {node.name}")
