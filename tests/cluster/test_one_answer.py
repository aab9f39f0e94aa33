"""Law 1: the same request gives the same tokens and logprobs, whatever serves it.

Twenty varied requests are answered over the whole matrix of topology, batch, cache, chunk size, death and preemption,
and each answer is compared with the plainest one (one worker, alone, cold, whole prompts).  Every cell also has to show
that what it is named after took place: a cell that tested nothing fails.

By default five cells of the matrix are run, half of each; ``--long`` runs all of it.  Kernel families and compressed
weights are in ``test_kernel_families.py``.
"""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest

from .one_answer import (
    ROOMS,
    Plain,
    answers_with_a_kill,
    assert_it_took_place,
    compare,
    crowd_until_somebody_gives_way,
)
from .server import PenstockServer
from .streams import all_answers
from .varied import varied_requests

TOPOLOGIES = {
    "split-shm": ["--transfer", "shm"],
    "split-tcp": ["--transfer", "tcp"],
    "aggregated": ["--aggregated"],
}
CHUNKS = {"chunk-16": 16, "chunk-64": 64, "whole": None}

Rounds = tuple[tuple[bool, bool], ...]
"""Of one cell: all requests together or one after the other, and whether a worker is killed."""

ALONE, ALONE_KILLED, TOGETHER, TOGETHER_KILLED = itertools.product((False, True), (False, True))

DEFAULT_CELLS: dict[tuple[str, str, str], Rounds] = {  # a kill amid many surely hits an answer that has to go on
    ("split-shm", "chunk-16", "roomy"): (ALONE, TOGETHER_KILLED),
    ("split-shm", "whole", "tight"): (ALONE_KILLED, TOGETHER_KILLED),
    ("split-tcp", "chunk-64", "roomy"): (TOGETHER, TOGETHER_KILLED),
    ("aggregated", "chunk-16", "tight"): (ALONE, TOGETHER_KILLED),
    ("aggregated", "whole", "roomy"): (TOGETHER, TOGETHER_KILLED),
}

GUESSING = {("split-shm", "chunk-16"): "head", ("aggregated", "chunk-16"): "lookup", ("split-tcp", "whole"): "head"}
"""How workers of these topologies and chunk sizes guess tokens ahead; the plain answers come from one that does not."""

CELLS = [
    *(pytest.param(*cell, rounds, id="-".join(cell)) for cell, rounds in DEFAULT_CELLS.items()),
    *(
        pytest.param(
            *cell,
            (ALONE, ALONE_KILLED, TOGETHER, TOGETHER_KILLED),
            id=f"{'-'.join(cell)}, whole",
            marks=pytest.mark.long,
        )
        for cell in itertools.product(TOPOLOGIES, CHUNKS, ROOMS)
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("topology", "chunk", "room", "rounds"), CELLS)
def test_one_prompt_one_answer(topology: str, chunk: str, room: str, rounds: Rounds, plain: Plain):
    flags = [*TOPOLOGIES[topology], "--kv-memory", ROOMS[room]]
    if CHUNKS[chunk] is not None:
        flags += ["--max-chunk-tokens", str(CHUNKS[chunk])]
    guessing = GUESSING.get((topology, chunk))
    if guessing is not None:
        flags += ["--speculate", guessing]
    with PenstockServer(flags) as server:
        for together, kill in rounds:
            # A salt of its own keeps a round's first pass cold, and makes its second pass find its own pages.  In a
            # batch, requests with a common beginning also find each other's.
            bodies = varied_requests(salt=f"{together}-{kill}", salt_each=not together)
            for temperature in ("cold", "cached"):
                asked_again = server.metrics()["penstock:resubmissions_total"]
                where = f"{topology} {chunk} {room} {'batch' if together else 'alone'} {temperature} kill={kill}"
                if kill:
                    answers = asyncio.run(answers_with_a_kill(server, bodies, plain.varied, together=together))
                else:
                    answers = asyncio.run(all_answers(server.url, bodies, together=together))
                compare(answers, plain.varied, where)
                cached = sum(answer.cached_tokens for answer in answers)
                if temperature == "cached" and not kill and room == "roomy":
                    assert cached > 1000, f"{where}: the second pass found {cached} tokens"
                asked_again = server.metrics()["penstock:resubmissions_total"] - asked_again  # of who was only slow
                if temperature == "cold" and not together and not kill and not asked_again:
                    assert cached <= 300, f"{where}: the first pass found {cached} tokens already"
        if room == "tight":
            crowd_until_somebody_gives_way(server, plain.crowd, f"{topology}, crowded")
        assert_it_took_place(server, split=topology != "aggregated", tight=room == "tight")
        if guessing is not None:
            server.wait_counted("spec_decode_num_accepted_tokens_total")
            metrics = server.metrics()
            guessed = metrics["penstock:spec_decode_num_draft_tokens_total"]
            assert metrics["penstock:spec_decode_num_accepted_tokens_total"] < guessed


def test_the_bodies_cross_every_threshold():
    """The data are what the docstring says: guards the test against being thinned out."""
    bodies = varied_requests()
    lengths = [len(body["prompt"]) for body in bodies]
    assert len(bodies) == 20
    assert (min(lengths), max(lengths)) == (3, 1500)
    assert any(body.get("n") == 2 for body in bodies)
    fields = {key for body in bodies for key in body}
    assert {"logprobs", "stop", "repetition_penalty", "min_p", "logit_bias", "structured_outputs"} <= fields


@pytest.mark.timeout(120)
def test_a_chat_answer_is_the_same_split_and_aggregated():
    body = {
        "model": "storyteller",
        "messages": [{"role": "user", "content": "Tell me a story about a little fox who was lost."}],
        "max_tokens": 200,
        "seed": 42,
    }
    texts = []
    for flags in ([], ["--aggregated"]):
        with PenstockServer(flags) as server:
            answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60, trust_env=False)
            assert answer.status_code == 200, answer.text
            texts.append(answer.json()["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]
    assert len(texts[0]) > 100
